"""Lines about loading, which the first rank sends to the caller: components of a pipeline, with their bytes."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from para_core.launcher.connection import CallerConnection
from para_core.progress import (
    DIFFUSERS,
    component_bytes,
    counts_components,
    folder_on_disk,
    pass_records_to,
    readable_bytes,
)
from para_core.progress import logger as reports

# diffusers logs "Loaded NAME as CLASS from `NAME` subfolder of FOLDER." after each component of a pipeline.
_LOADED = re.compile(r"Loaded (?P<name>\S+) as \S+ from `\S+` subfolder of (?P<folder>.+)\.$")

# Loggers of libraries that warn when they are imported.
_CHATTY = ("torch", "torchao", "accelerate", "peft", "huggingface_hub")


class _LoadingHandler(logging.Handler):
    """A handler that sends a line to the caller for each component of a pipeline that diffusers has loaded,
    and for each record of :mod:`para_core.progress`.
    """

    def __init__(self, connection: CallerConnection) -> None:
        super().__init__(logging.INFO)
        self._connection = connection
        self._sizes: dict[str, dict[str, int]] = {}  # bytes by component, by folder

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == reports.name:
            self._send(record.getMessage(), getattr(record, "done", None), getattr(record, "total", None))
            return
        match = _LOADED.match(record.getMessage())
        if match is None or counts_components():
            return
        folder = match["folder"]
        if folder not in self._sizes:
            # The caller needs this module to load results, and can import it while the ranks load.
            self._connection.channel.send(("import", "diffusers.utils"))
            self._sizes[folder] = component_bytes(folder_on_disk(folder))
            total = sum(self._sizes[folder].values())
            self._send(f"loading {folder}: {readable_bytes(total)}")
        size = self._sizes[folder].get(match["name"], 0)
        self._send(f"loaded {match['name']}" + (f" ({readable_bytes(size)})" if size else ""))

    def _send(self, line: str, done: int | None = None, total: int | None = None) -> None:
        self._connection.channel.send(("line", line, done, total))


@contextmanager
def report_loading_to(connection: CallerConnection) -> Iterator[None]:
    """Inside this context, in which the pipeline is loaded, let the first rank send lines to the caller."""
    if connection.rank > 0:
        yield
        return
    lines = _LoadingHandler(connection)
    with pass_records_to(lines, logging.getLogger(DIFFUSERS)), pass_records_to(lines):
        yield


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Inside this context, hide what libraries log when they are imported, such as optional parts that are missing."""
    loggers = [logging.getLogger(name) for name in _CHATTY]
    levels = [logger.level for logger in loggers]
    # Transformers and diffusers set the level of their loggers at import, to the variable's or to WARNING.
    variables = [name for name in ("TRANSFORMERS_VERBOSITY", "DIFFUSERS_VERBOSITY") if name not in os.environ]
    os.environ.update(dict.fromkeys(variables, "error"))
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]
            logging.getLogger(name.partition("_")[0].lower()).setLevel(logging.WARNING)
        for logger, level in zip(loggers, levels, strict=True):
            if logger.level == logging.ERROR:
                logger.setLevel(level)
