"""The backends of local attention that are not PyTorch's, by name."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

import torch

from para_core.attention.backends.backend import LocalBackend
from para_core.option_values import ADDED_BACKENDS

# They are imported here and not at first use, because Dynamo cannot trace an import.
ADDED: Mapping[str, LocalBackend] = {
    name: import_module(f"{__package__}.{backend.module}").BACKEND for name, backend in ADDED_BACKENDS.items()
}


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def check_library(backend: str | None) -> None:
    """Raise ``ImportError`` if ``backend`` names a library that is not installed. Any other backend passes."""
    if backend is not None and backend in ADDED:
        ADDED[backend].check_installed()
