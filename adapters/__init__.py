"""Run diffusers pipelines in parallel or with a cache; contains the adapters that describe diffusers' models."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from para_core.adapters.api import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """Import :mod:`para_core.adapters.api` at the first access to a public name, and return the value of
    ``name``.

    ``para_core plan`` reads the stored counts of this package without importing torch.
    """
    api = importlib.import_module("para_core.adapters.api")
    public = {name: value for name, value in vars(api).items() if not name.startswith("_")}
    globals().update(public, __all__=sorted(public))
    if name not in globals():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
