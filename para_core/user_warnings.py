"""Warnings for users of para_core.

A warning names the user's line of code, and a :class:`WarningLog` gives it only once. Tests:
tests/test_user_warnings.py.
"""

from __future__ import annotations

import sys
import warnings

# Frames of these packages may be between the user's code and the warning, so the warning names the innermost
# frame outside of them.
_LIBRARIES = frozenset(
    {"para_core", "torch", "diffusers", "transformers", "accelerate", "contextlib", "functools"}
)


class ParaCoreWarning(UserWarning):
    """Base class of para_core's warnings about a setting or a call that the user should change."""


class ParallelWarning(ParaCoreWarning):
    """A warning that some ranks do nothing useful, or that attention was not computed over all ranks."""


class ForeignCodeWarning(ParallelWarning):
    """A warning that code of the user's own runs inside a parallel model, and sees the tokens of one rank only."""


class CacheWarning(ParaCoreWarning):
    """A warning that a cache skips nothing, skips everything, or cannot tell CFG branches apart."""


class ThresholdWarning(CacheWarning):
    """A warning about the threshold of a cache, with which no step was skipped, or every step that could be skipped."""


class WarningLog:
    """A record of the warnings that one object has given, so that each warning is given only once per object."""

    def __init__(self) -> None:
        self._keys: set[str] = set()

    def warn(self, key: str, message: str, category: type[ParaCoreWarning]) -> None:
        """Warn with :func:`warn_user`, unless a warning with this ``key`` was given since the last :meth:`clear`."""
        if key not in self._keys:
            self._keys.add(key)
            warn_user(message, category)

    def clear(self) -> None:
        """Forget which warnings were given, so that each can be given once more.

        Call this when settings have changed.
        """
        self._keys.clear()


def warn_user(message: str, category: type[ParaCoreWarning]) -> None:
    """Warn at the user's line of code: the innermost line outside of para_core and the libraries in ``_LIBRARIES``."""
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
