"""Results of calls as values: what they return or raise, warn and log."""

import logging
import warnings
from contextlib import contextmanager


def outcome(call):
    """Return the result of ``call``, or the text of its error."""
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def warnings_of(call):
    """Return the category, file and words of the warnings of ``call``, or the text of its error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        error = outcome(call)
    if isinstance(error, str):
        return error
    return [f"{w.category.__name__} {w.filename}: {w.message}" for w in caught]


@contextmanager
def logged(name, level=logging.WARNING):
    """Yield the messages that the logger ``name`` and those below it log at this level or above."""
    texts, handler, logger = [], logging.Handler(level), logging.getLogger(name)
    handler.emit = lambda record: texts.append(record.getMessage())
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
