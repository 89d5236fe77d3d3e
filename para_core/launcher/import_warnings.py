"""Hide what libraries warn about while they are imported on a rank, such as optional parts that are missing.

:mod:`para_core.launcher.rank` does so around the user's ``load``, which may import at any time, also inside
``from_pretrained``. What ``load`` itself causes, such as a warning about weights that a checkpoint lacks, is
shown. Tests: tests/launcher/test_loading.py.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Packages that warn when they are imported, each by the loggers of its modules, and the environment variable, if there
# is one, by which a user says what a package logs.
_CHATTY = {
    "torch": "TORCH_LOGS",
    "torchao": None,
    "accelerate": "ACCELERATE_LOG_LEVEL",
    "peft": None,
    "huggingface_hub": "HF_HUB_VERBOSITY",
    "transformers": "TRANSFORMERS_VERBOSITY",
    "diffusers": "DIFFUSERS_VERBOSITY",
}


@contextmanager
def hide_import_warnings() -> Iterator[None]:
    """Inside this context, hide warnings that are logged while the body of a module of a chatty package runs.
    Those of Python's ``warnings`` are shown, as are errors.

    A package is left alone if its variable, such as ``TRANSFORMERS_VERBOSITY``, says what to show. Levels of
    loggers are neither changed nor restored, because ``load`` may set them.
    """
    hidden = {name for name, variable in _CHATTY.items() if variable is None or variable not in os.environ}
    make_record = logging.getLogRecordFactory()

    def make_or_hide(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make_record(*args, **kwargs)
        is_warning = record.levelno == logging.WARNING
        if is_warning and _package_of(record.name) in hidden and _is_importing():
            # No handler has a lower level. A filter of a logger would not see the records of its children, and
            # a filter of a handler those of handlers that the import adds.
            record.levelno = logging.NOTSET - 1
        return record

    logging.setLogRecordFactory(make_or_hide)
    try:
        yield
    finally:
        # If load has set a factory that calls this one, it stays, and hides nothing any more.
        hidden.clear()
        if logging.getLogRecordFactory() is make_or_hide:
            logging.setLogRecordFactory(make_record)


def _is_importing() -> bool:
    """Whether the body of a module of a chatty package is running in this thread."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        name = frame.f_globals.get("__name__")
        if frame.f_code.co_name == "<module>" and isinstance(name, str) and _package_of(name) in _CHATTY:
            return True
    return False


def _package_of(name: str) -> str:
    return name.partition(".")[0]
