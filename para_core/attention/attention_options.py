"""The options of attention over a mesh that do not depend on a call's tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypedDict

import torch

from para_core.attention.block_sparse import BlockMask
from para_core.attention.schedule import KeptKeys
from para_core.option_values import BACKENDS, EXACT_FORM, ROTATE_METHODS, Backend, RotateMethod

# The values of the option comm_dtype, by the names that commands and recipes have for them.
COMM_DTYPES = {"int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn}


class AttnKeywords(TypedDict, total=False):
    """The fields of :class:`AttnOptions` as a type for keyword arguments, ``**options: Unpack[AttnKeywords]``."""

    rotate_method: RotateMethod
    comm_dtype: torch.dtype | None
    block_mask: BlockMask | None
    kept_keys: KeptKeys | None
    backend: Backend | None


@dataclass(frozen=True)
class AttnOptions:
    """The options of attention over a mesh, as attention modes, plans and functions such as
    ``unified_attention`` take.

    :class:`~para_core.modes.unified.UnifiedAttnMode` describes ``rotate_method``, ``comm_dtype`` and
    ``backend``. With ``block_mask`` each ring rank sends its keys directly to the ranks that see any of them.
    With ``kept_keys`` (not exact) only kept keys are passed on, except in the cases that
    :func:`~para_core.attention.approximate.snapkv.sparse_attention` names.

    Raises:
        ValueError: A value is unknown, or two options exclude each other.
        TypeError: ``backend`` is not a string.
    """

    rotate_method: RotateMethod = "alltoall"
    comm_dtype: torch.dtype | None = None
    block_mask: BlockMask | None = None
    kept_keys: KeptKeys | None = None
    backend: Backend | None = None

    def __post_init__(self) -> None:
        if self.comm_dtype not in (None, *COMM_DTYPES.values()):
            expected = " or ".join(map(str, COMM_DTYPES.values()))
            raise ValueError(
                f"comm_dtype is {self.comm_dtype}; expected {expected}, or None for exact attention."
            )
        if self.rotate_method not in ROTATE_METHODS:
            raise ValueError(
                f"rotate_method is {self.rotate_method!r}; expected 'alltoall', 'allgather' or '2d'."
            )
        if self.rotate_method == "2d" and self.comm_dtype is not None:
            raise ValueError(
                f"rotate_method='2d' sends tensors as they are, and comm_dtype is {self.comm_dtype}. Leave comm_dtype "
                "out, or take rotate_method='alltoall'."
            )
        if not (self.backend is None or isinstance(self.backend, str)):
            raise TypeError(
                f"backend is {self.backend!r}; expected a name. An AttentionSchedule is for parallelize_pipe, which "
                "knows the steps."
            )
        if self.backend not in (None, *BACKENDS):
            raise ValueError(f"backend is {self.backend!r}; expected one of {', '.join(BACKENDS)}, or None.")

    @property
    def by_position(self) -> bool:
        """Whether ``block_mask`` or ``kept_keys`` is set, so that a query's position decides which keys it sees."""
        return self.block_mask is not None or self.kept_keys is not None

    @property
    def with_gradients(self) -> AttnOptions:
        """The options for calls that require a gradient: without rounding to 8 bits; ``self`` if nothing is rounded."""
        backend = self.backend
        exact = backend
        if backend is not None and backend in EXACT_FORM:
            exact = EXACT_FORM[backend]
        if exact == backend and self.comm_dtype is None:
            return self
        return replace(self, comm_dtype=None, backend=exact)

    @property
    def by_name(self) -> dict[str, str]:
        """The options that a user of a pipeline can set, as strings that ranks can compare."""
        return {name: str(getattr(self, name)) for name in ("rotate_method", "backend", "comm_dtype")}
