"""Exact sequence parallelism and First Block Cache for diffusion transformers, without touching model code."""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from para_core.version import __version__ as __version__

if TYPE_CHECKING:
    from para_core.api import *  # noqa: F403
    from para_core.launcher.errors import Cancelled as Cancelled
    from para_core.launcher.errors import RankDied as RankDied
    from para_core.launcher.launch import launch as launch

_here = Path(__file__).parent
if not (_here / "adapters").is_dir():
    # In a checkout, the folders adapters/, kernels/, fleet/ and cli/ are siblings of this one, so their
    # parent must be searched too. An installation moves them into this folder.
    __path__.append(str(_here.parent))  # noqa: F405

# Public names of para_core.launcher, with the modules that define them. They are in __all__ with those of api.py.
_OF_LAUNCH = {"launch": "launch", "Cancelled": "errors", "RankDied": "errors"}


def __getattr__(name: str) -> Any:
    """Import :mod:`para_core.api` at the first access to a public name, and return the value of ``name``.

    ``para_core --help`` accesses no public name, so it starts without importing torch.
    """
    if name in _OF_LAUNCH:
        # A program that launches ranks starts them before it imports torch itself.
        value = getattr(importlib.import_module(f"para_core.launcher.{_OF_LAUNCH[name]}"), name)
        globals()[name] = value
        return value
    # Do not write `from para_core import api` here: that statement looks up the attribute "api" and so calls
    # this function again, without end.
    api = importlib.import_module("para_core.api")
    public = {name: value for name, value in vars(api).items() if not name.startswith("_")}
    globals().update(public, __all__=sorted({*public, *_OF_LAUNCH}))
    if name not in globals():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
