"""Options of parallelize_pipe and parallelize_transformer as one value."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch

from para_core.adapters.spec import Adapter, Text
from para_core.adapters.weights.sharded_component import METHODS, Method
from para_core.adapters.weights.text_encoders import TEXT_ENCODERS, TextEncoders
from para_core.attention.attention_options import AttnOptions, RotateMethod
from para_core.attention.attn_func import AttnFunc
from para_core.attention.backend_selection import Backend
from para_core.distributed.timeouts import as_timedelta
from para_core.weights.pipefusion import PipeFusion


@dataclass(frozen=True)
class ParallelOptions:
    """Options that the user gave; :func:`~para_core.adapters.parallelize_pipe` documents them.

    Raises:
        TypeError: If an option has a wrong type.
        ValueError: If an option has a value that no pipeline takes, or two options exclude each other.
    """

    text: Text | None = None
    timeout: timedelta | float | None = None
    adapter: Adapter | None = None
    assume_equal: bool = False
    vae: bool = False
    weights: Method | Literal["replicate"] | None = None
    text_encoders: TextEncoders | None = None
    pipefusion: PipeFusion | None = None
    rotate_method: RotateMethod | None = None
    backend: Backend | None = None
    comm_dtype: torch.dtype | None = None
    attn_func: AttnFunc | None = None

    def __post_init__(self) -> None:
        if self.weights not in (None, "replicate", *METHODS):
            raise ValueError(
                f"weights is {self.weights!r}; expected 'fsdp', 'tensor', 'replicate', or None to leave them as they "
                "are."
            )
        if self.text_encoders not in (None, *TEXT_ENCODERS):
            raise ValueError(
                f"text_encoders is {self.text_encoders!r}; expected {', '.join(map(repr, TEXT_ENCODERS))}, or None to "
                "leave them as they are."
            )
        if self.pipefusion is not None and not isinstance(self.pipefusion, PipeFusion):
            raise TypeError(f"pipefusion is {self.pipefusion!r}; expected a PipeFusion of para_core, or None.")
        if self.backend is not None and self.attn_func is not None:
            raise ValueError(f"backend={self.backend!r} and attn_func both choose the local attention. Leave one out.")
        if self.timeout is not None:
            as_timedelta(self.timeout)
        self.attention(None)

    def attention(self, default_method: RotateMethod | None) -> AttnOptions:
        """Return the attention options.

        Args:
            default_method (`RotateMethod`, *optional*): The ``rotate_method`` if the user gave neither that option nor
                ``comm_dtype``.
        """
        if self.comm_dtype is not None:
            default_method = None
        return AttnOptions(
            rotate_method=self.rotate_method or default_method or "alltoall",
            backend=self.backend,
            comm_dtype=self.comm_dtype,
        )

    @property
    def of_transformers(self) -> dict[str, object]:
        """Options by name that the user gave and that only a transformer takes."""
        options = {
            "text": self.text,
            "adapter": self.adapter,
            "weights": "tensor" if self.weights == "tensor" else None,
            "pipefusion": self.pipefusion,
            "rotate_method": self.rotate_method,
            "backend": self.backend,
            "comm_dtype": self.comm_dtype,
            "attn_func": self.attn_func,
        }
        return {name: value for name, value in options.items() if value is not None}
