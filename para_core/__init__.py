"""Exact sequence parallelism and First Block Cache for diffusion transformers, without touching model code."""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from para_core.version import __version__ as __version__

if TYPE_CHECKING:
    from para_core.api import *  # noqa: F403

_here = Path(__file__).parent
if not (_here / "adapters").is_dir():
    # In a checkout, adapters/ and kernels/ are next to this folder. Only an installation moves them into it.
    __path__.append(str(_here.parent))  # noqa: F405


def __getattr__(name: str) -> Any:
    """Import para_core.api when the first public name is used. ``para_core --help`` uses none, so it need not import
    torch.
    """
    # import_module is needed, because `from para_core import api` would call this function again.
    api = importlib.import_module("para_core.api")
    globals().update({public: getattr(api, public) for public in ("__all__", *api.__all__)})
    if name not in globals():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
