"""What para_core knows about diffusers pipelines."""

from para_core.adapters.adapter import Adapter
from para_core.adapters.parallel import (
    parallelize_pipe,
    parallelize_transformer,
    unparallelize_pipe,
    unparallelize_transformer,
)

__all__ = [
    "Adapter",
    "parallelize_pipe",
    "parallelize_transformer",
    "unparallelize_pipe",
    "unparallelize_transformer",
]
