"""Lines about loading, which the first rank sends to the caller: components of a pipeline, with their bytes.

:mod:`para_core.launcher.rank` sends them while the user's ``load`` runs; :mod:`para_core.progress` describes
the records that they are made of. Tests: tests/launcher/test_loading.py, and test_calls.py for the lines of a
real pipeline.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

from para_core.launcher.connection import CallerConnection
from para_core.progress import (
    DIFFUSERS,
    component_bytes,
    copy_records_to,
    counts_components,
    folder_on_disk,
    pass_records_to,
    readable_bytes,
)
from para_core.progress import logger as reports

# diffusers logs "Loaded NAME as CLASS from `NAME` subfolder of FOLDER." after each component of a pipeline.
_LOADED = re.compile(r"Loaded (?P<name>\S+) as \S+ from `\S+` subfolder of (?P<folder>.+)\.$")


class _LoadingHandler(logging.Handler):
    """A handler that sends a line to the caller for each component of a pipeline that diffusers has loaded,
    and for each record of :mod:`para_core.progress`. Other records, such as warnings of diffusers, send
    nothing.

    Before the first component of a folder it also tells the caller to import a module, and sends the size of
    all components, if it finds them on the disk.
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
        # Inside report_components, the records of para_core.progress have a line for each component already.
        if match is None or counts_components():
            return
        folder = match["folder"]
        if folder not in self._sizes:
            # The caller needs this module to load results, and can import it while the ranks load.
            self._connection.channel.send(("import", "diffusers.utils"))
            self._sizes[folder] = component_bytes(folder_on_disk(folder))
            total = sum(self._sizes[folder].values())
            # The folder may be unknown: a repository that is loaded with ``revision=`` or ``cache_dir=``.
            self._send(f"loading {folder}" + (f": {readable_bytes(total)}" if total else ""))
        size = self._sizes[folder].get(match["name"], 0)
        self._send(f"loaded {match['name']}" + (f" ({readable_bytes(size)})" if size else ""))

    def _send(self, line: str, done: int | None = None, total: int | None = None) -> None:
        self._connection.channel.send(("line", line, done, total))


@contextmanager
def report_loading_to(connection: CallerConnection) -> Iterator[None]:
    """Inside this context, in which the pipeline is loaded, let the first rank send lines to the caller.

    The records of :mod:`para_core.progress` go to the caller alone. What diffusers logs is shown as before, too.
    """
    if connection.rank > 0:
        yield
        return
    lines = _LoadingHandler(connection)
    with copy_records_to(lines, logging.getLogger(DIFFUSERS)), pass_records_to(lines):
        yield
