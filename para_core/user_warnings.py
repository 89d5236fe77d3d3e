"""Warnings for users of para_core. Each one names the user's line of code, and is given once per object."""

from __future__ import annotations

import sys
import warnings

# Packages that may be between a user's line and the warning. The warning names the innermost frame outside of them.
_LIBRARIES = frozenset({"para_core", "torch", "diffusers", "transformers", "accelerate", "contextlib", "functools"})


class ParaCoreWarning(UserWarning):
    """Base class of warnings about a setting or a call that a user of para_core should change."""


class ParallelWarning(ParaCoreWarning):
    """Warns that ranks do nothing useful, or that attention was not computed over all ranks."""


class CacheWarning(ParaCoreWarning):
    """Warns that a cache skips nothing, skips everything, or cannot tell CFG branches apart."""


class ThresholdWarning(CacheWarning):
    """Warns of a threshold at which a cache skipped no step, or every step that it could."""


class WarningLog:
    """A record of the warnings that one object has given. Each key is given once until :meth:`clear`."""

    def __init__(self) -> None:
        self._keys: set[str] = set()

    def warn(self, key: str, message: str, category: type[ParaCoreWarning]) -> None:
        """Give ``message`` with :func:`warn_user`, unless a warning with ``key`` was given before."""
        if key not in self._keys:
            self._keys.add(key)
            warn_user(message, category)

    def clear(self) -> None:
        """Allow every key to be given again, after settings have changed."""
        self._keys.clear()


def warn_user(message: str, category: type[ParaCoreWarning]) -> None:
    """Give a warning that names the innermost line of code outside of para_core and the libraries in ``_LIBRARIES``."""
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
