"""How attention is computed over a mesh, whatever its tensors are: one frozen value, which writes itself as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Literal, TypedDict, get_args

import torch

from para_core.attention.backend_selection import BACKENDS, EXACT_FORM, Backend
from para_core.attention.hooks import BlockVisibility, KeySelection, read_block_visibility, read_key_selection

# How the queries of a ring's ranks meet the keys of others: these are passed on from neighbour to neighbour, or all come at once; or
# queries travel along rows of ranks, and keys along columns.
RotateMethod = Literal["alltoall", "allgather", "2d"]
ROTATE_METHODS: tuple[RotateMethod, ...] = get_args(RotateMethod)
# By the name that stands for each in a graph.
COMM_DTYPES = {"int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn}


class AttnKeywords(TypedDict, total=False):
    """The fields of :class:`AttnOptions`, for functions that take them one by one."""

    ulysses_chunks: int
    rotate_method: RotateMethod
    comm_dtype: torch.dtype | None
    block_mask: BlockVisibility | None
    kept_keys: KeySelection | None
    backend: Backend | None


@dataclass(frozen=True)
class AttnOptions:
    """What a mode, a plan or a functional form may choose.

    Args:
        ulysses_chunks: without gradients, each rank's heads are split into so many parts, of which the next one travels while one
            is computed.
        rotate_method: how blocks travel round a ring in the forward pass; ``"2d"``: backward, too. With ``block_mask`` and
            ``kept_keys``, which send what is seen alone, it is as ``"alltoall"``.
        comm_dtype: approximate: what travels, where no gradient is kept, is rounded to it. None: travels as it is.
        block_mask: which blocks of queries see which blocks of keys; None: all.
        kept_keys: approximate: how it is decided which keys are attended to; None: all are.
        backend: computes attention on one device: one of PyTorch's, or ``"triton"``; None: the best one that the user's switches
            allow. ``"triton-int8"`` is approximate: where no gradient is kept, q·k is in 8 bits.

    Raises:
        ValueError: a value is none of these.
    """

    ulysses_chunks: int = 1
    rotate_method: RotateMethod = "alltoall"
    comm_dtype: torch.dtype | None = None
    block_mask: BlockVisibility | None = None
    kept_keys: KeySelection | None = None
    backend: Backend | None = None

    def __post_init__(self) -> None:
        chunks = self.ulysses_chunks
        if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
            raise ValueError(f"ulysses_chunks is {chunks!r}; expected a positive integer.")
        if self.comm_dtype not in (None, *COMM_DTYPES.values()):
            expected = " or ".join(map(str, COMM_DTYPES.values()))
            raise ValueError(f"comm_dtype is {self.comm_dtype}; expected {expected}, or None for exact attention.")
        if self.rotate_method not in ROTATE_METHODS:
            raise ValueError(f"rotate_method is {self.rotate_method!r}; expected 'alltoall', 'allgather' or '2d'.")
        if self.rotate_method == "2d" and self.comm_dtype is not None:
            raise ValueError(
                f"rotate_method='2d' sends tensors as they are, and comm_dtype is {self.comm_dtype}. Leave comm_dtype out, or take "
                "rotate_method='alltoall'."
            )
        if self.backend not in (None, *BACKENDS):
            raise ValueError(f"backend is {self.backend!r}; expected one of {', '.join(BACKENDS)}, or None.")

    @property
    def by_position(self) -> bool:
        """Whether the result depends on where in the sequence a token is, whatever the call."""
        return self.block_mask is not None or self.kept_keys is not None

    @property
    def with_gradients(self) -> AttnOptions:
        """What holds where a gradient is kept: nothing is rounded there. This value itself if it rounds nothing."""
        exact = None if self.backend is None else EXACT_FORM.get(self.backend)
        if exact is None and self.comm_dtype is None:
            return self
        return replace(self, comm_dtype=None, backend=exact or self.backend)

    @property
    def by_name(self) -> dict[str, str]:
        """What a caller of a pipeline chooses of it, for ranks to compare."""
        return {name: str(getattr(self, name)) for name in ("rotate_method", "backend", "comm_dtype")}

    def as_text(self) -> str:
        """Return this value as JSON, equal on ranks that have equal ones.

        >>> AttnOptions.read(AttnOptions(ulysses_chunks=2).as_text())
        AttnOptions(ulysses_chunks=2, rotate_method='alltoall', comm_dtype=None, block_mask=None, kept_keys=None, backend=None)
        """
        comm_dtype = next((name for name, dtype in COMM_DTYPES.items() if dtype == self.comm_dtype), None)
        blocks = None if self.block_mask is None else self.block_mask.fields
        kept = None if self.kept_keys is None else self.kept_keys.fields
        text: str = _to_json(self.ulysses_chunks, self.rotate_method, comm_dtype, blocks, kept, self.backend)
        return text

    @staticmethod
    def read(text: str) -> AttnOptions:
        """Return the value that :meth:`as_text` wrote."""
        fields = json.loads(text)
        blocks, kept, comm_dtype = fields["block_mask"], fields["kept_keys"], fields["comm_dtype"]
        return AttnOptions(
            fields["ulysses_chunks"],
            fields["rotate_method"],
            None if comm_dtype is None else COMM_DTYPES[comm_dtype],
            None if blocks is None else read_block_visibility(blocks),
            None if kept is None else read_key_selection(kept),
            fields["backend"],
        )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _to_json(
    ulysses_chunks: int,
    rotate_method: str,
    comm_dtype: str | None,
    block_mask: tuple[int | str, ...] | None,
    kept_keys: tuple[float, ...] | None,
    backend: str | None,
) -> str:
    # Dynamo does not trace the encoder. Options are constants of a graph.
    fields = {"ulysses_chunks": ulysses_chunks, "rotate_method": rotate_method, "comm_dtype": comm_dtype}
    return json.dumps({**fields, "block_mask": block_mask, "kept_keys": kept_keys, "backend": backend})
