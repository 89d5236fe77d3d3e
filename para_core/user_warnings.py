"""Warnings to the user of the library: each names the user's own line, and is given once per object."""

from __future__ import annotations

import sys
import warnings

# Packages between a user's line and the code that warns. A warning names the innermost frame outside of them.
_LIBRARIES = frozenset({"para_core", "torch", "diffusers", "transformers", "accelerate", "contextlib", "functools"})


class ParaCoreWarning(UserWarning):
    """A setting or a call that a user of para_core should change."""


class ParallelWarning(ParaCoreWarning):
    """Ranks that do nothing useful, or attention that was not computed over all ranks."""


class CacheWarning(ParaCoreWarning):
    """A cache that skips nothing, skips everything, or cannot tell CFG branches apart."""


class ThresholdWarning(CacheWarning):
    """A threshold at which a cache skipped no step, or every step that it could."""


class WarningLog:
    """The warnings that one object has given; each key is given once until :meth:`clear`."""

    def __init__(self) -> None:
        self._keys: set[str] = set()

    def warn(self, key: str, message: str, category: type[ParaCoreWarning]) -> None:
        """Give ``message`` as :func:`warn_user` does, unless a warning with ``key`` was given already."""
        if key not in self._keys:
            self._keys.add(key)
            warn_user(message, category)

    def clear(self) -> None:
        """Let every key be given again, because settings changed."""
        self._keys.clear()


def warn_user(message: str, category: type[ParaCoreWarning]) -> None:
    """Give a warning at the innermost line that is neither para_core's nor a library's that calls it."""
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
