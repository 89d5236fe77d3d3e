"""The base of modes: it shards and gathers tensors, and keeps the layouts of sharded sequences."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from types import TracebackType
from typing import Literal, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from para_core.attention.call_agreement import EQUAL_PARTS
from para_core.distributed.consistency import Record, Signature, check_consistent, signature
from para_core.distributed.layout import Segment, SequenceLayout, even_layout
from para_core.distributed.mesh import SequenceMesh
from para_core.distributed.sharding import gather_tokens, shard_tokens

# A length that outlives a call: an int while tracing, else the first dim of a tensor without elements. Dynamo takes an
# int that it finds on a mode for a constant, and would compile anew for every length; sizes of tensors become symbolic.
Length = int | Tensor
# Of each segment its name, total, and whether it is replicated, balanced.
TraceSafeLayout = tuple[tuple[str, Length, bool, bool], ...]


class ShardingMode(TorchFunctionMode):
    """:meth:`shard` and :meth:`gather` over the ranks of ``mesh``, and the memory of what was sharded while the mode is
    entered.

    Args:
        mesh: the ranks that share a tensor.
        assume_equal: skip the small exchange that, in eager code, turns input that is bad on one rank into an error on
            all.
    """

    def __init__(self, mesh: SequenceMesh, *, assume_equal: bool) -> None:
        super().__init__()
        self._mesh = mesh
        self._assume_equal = assume_equal
        self._depth = 0
        # The sequences that were sharded through this mode, or said to be replicated, in that order; emptied on exit.
        self._known: TraceSafeLayout = ()
        self._gathered = True

    def __enter__(self) -> Self:
        if self._depth == 0:
            self._set_known(())
            self._begin()
        self._depth += 1
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)  # type: ignore[no-untyped-call]
        self._depth -= 1
        if self._depth == 0:
            self._set_known(())
            self._end()
            if exc_type is None and not torch.compiler.is_compiling():
                self._check_use()

    def _begin(self) -> None:
        """Prepare the mode when it is entered and was not active before."""

    def _end(self) -> None:
        """Clean up when the mode is left."""

    def _check_use(self) -> None:
        """Check the use of the mode when it is left without an exception, in eager code."""

    def _note_state(self) -> None:
        """React to a change of the known sequences, in eager code."""

    def _note_sharded(self, x: Tensor, dim: int) -> None:
        """React to a tensor that :meth:`shard` returns, in eager code."""

    def sequence(self, total: int, *, balance: Literal["causal"] | None = None) -> SequenceLayout:
        """Return the layout of ``total`` tokens, a value for ``sequence=`` of :meth:`shard` and :meth:`gather`.

        Args:
            balance: ``"causal"`` gives each rank an early and a late part, so that under a causal mask all have the
                same work; the model must then not rely on its tokens being neighbours.
        """
        if balance not in (None, "causal"):
            raise ValueError(f"balance is {balance!r}; expected 'causal', or None for consecutive tokens.")
        return even_layout(total, self._mesh.ranks, balanced=balance == "causal")

    # -- what is remembered

    def _set_known(self, sequences: TraceSafeLayout) -> None:
        self._known = sequences
        if not torch.compiler.is_compiling():
            self._note_state()

    def _trace_safe(self, layout: SequenceLayout) -> TraceSafeLayout:
        return to_trace_safe(self._checked(layout).segments, self._mesh.device_type)

    def _checked(self, layout: SequenceLayout) -> SequenceLayout:
        if layout.ranks != self._mesh.ranks:
            raise ValueError(f"the layout is for {layout.ranks} ranks, but the mesh has {self._mesh.ranks}.")
        return layout

    def _only_sequence(self, held: int) -> SequenceLayout:
        sequences = [segment for segment in segments_of(self._known) if not segment.replicated]
        if len(sequences) == 1:
            return SequenceLayout((sequences[0],), self._mesh.ranks)
        if not sequences:
            return self.sequence(held * self._mesh.ranks)
        raise ValueError(
            "several sequences were sharded through this mode (of "
            f"{', '.join([str(segment.total) for segment in sequences])} tokens). "
            "Say which one this is: cp.gather(y, dim, sequence=cp.sequence(total))."
        )

    def _remember(self, segment: Segment) -> None:
        if torch.compiler.is_compiling() and self._depth == 0:
            # Dynamo enters a mode that was made outside of the graph without tracing __enter__ and __exit__, so what
            # these do is done here and in gather: the first shard after a gather belongs to another call.
            if self._gathered:
                self._known = ()
                self._begin()
            self._gathered = False
        kind = (segment.replicated, segment.balanced)
        same = [other for other in segments_of(self._known) if (other.replicated, other.balanced) == kind]
        if not [other for other in same if other.total == segment.total]:
            self._set_known((*self._known, *to_trace_safe([segment], self._mesh.device_type)))

    # -- sharding and gathering

    def shard(
        self,
        x: Tensor,
        dim: int,
        *,
        sequence: SequenceLayout | None = None,
        balance: Literal["causal"] | None = None,
    ) -> Tensor:
        """Return this rank's part of ``x`` along ``dim``. Every rank passes the same whole ``x``.

        Args:
            x: any shape; any length along ``dim``, also one shorter than the number of ranks.
            sequence: from :meth:`sequence`; needed inside a compiled function, else read off ``x``.
            balance: see :meth:`sequence`.

        Raises:
            ValueError: in eager code on every rank, if ``x`` is not as long on all ranks, or not as ``sequence`` says.
        """
        if sequence is None and torch.compiler.is_compiling():
            raise RuntimeError(
                "inside a compiled function cp.shard needs sequence=: tokens = cp.sequence(x.shape[dim]); "
                "cp.shard(x, dim, sequence=tokens)."
            )
        if sequence is not None and balance is not None:
            raise ValueError("shard got sequence= and balance=; say it once: cp.sequence(total, balance='causal').")
        if sequence is None and balance is not None and -x.ndim <= dim < x.ndim:
            sequence = self.sequence(x.shape[dim], balance=balance)
        layout = self._agree(x, dim, sequence, whole=True)
        if len(layout.segments) == 1:
            self._remember(layout.segments[0])
        if self._mesh.ranks == 1:
            return x
        part = shard_tokens(x, dim, layout, self._mesh)
        if not torch.compiler.is_compiling():
            self._note_sharded(part, dim)
        return part

    def gather(self, y: Tensor, dim: int, *, sequence: SequenceLayout | None = None) -> Tensor:
        """Return the gathered ``y`` along ``dim`` on every rank. Each rank passes its part.

        Args:
            sequence: what the part is of; may be left out while only one sequence was sharded through this mode.

        Raises:
            ValueError: in eager code on every rank, if a rank's part is not what ``sequence`` gives it.
        """
        if sequence is None and torch.compiler.is_compiling():
            raise RuntimeError(
                "inside a compiled function cp.gather needs sequence=: the value that cp.sequence(total) gave before."
            )
        layout = self._agree(y, dim, sequence, whole=False)
        if torch.compiler.is_compiling() and self._depth == 0:
            self._end()
        self._gathered = True
        return y if self._mesh.ranks == 1 else gather_tokens(y, dim, layout, self._mesh)

    def _agree(self, x: Tensor, dim: int, sequence: SequenceLayout | None, *, whole: bool) -> SequenceLayout:
        """Return the layout of ``x`` along ``dim``, in eager code equal on every rank, or raise on every rank."""
        talk = self._mesh.ranks > 1 and not (self._assume_equal or torch.compiler.is_compiling())
        if talk:
            self._mesh.check_alive()
        try:
            layout = self._fitting(x, dim, sequence, whole=whole)
        except (TypeError, ValueError) as error:
            if talk:
                check_consistent(error, self._mesh)
            raise
        if talk:
            dim %= x.ndim
            shape = (*x.shape[:dim], *x.shape[dim + 1 :])
            check_consistent(_signature(layout.sizes(), dim, shape, x.dtype), self._mesh, explain=_difference)
        return layout

    def _fitting(self, x: Tensor, dim: int, sequence: SequenceLayout | None, *, whole: bool) -> SequenceLayout:
        if not -x.ndim <= dim < x.ndim:
            raise ValueError(f"dim={dim} is out of range for a tensor of shape {list(x.shape)}.")
        held = x.shape[dim]
        if sequence is not None:
            layout = self._checked(sequence)
        else:
            layout = self.sequence(held) if whole else self._only_sequence(held)
        if whole and held != layout.total:
            raise ValueError(f"x has {held} tokens in dim {dim}, but sequence= says {layout.total}.")
        expected = layout.size(self._mesh.rank)
        if not whole and held != expected:
            raise ValueError(f"y has {held} tokens in dim {dim}, but this rank's part of {layout.total} is {expected}.")
        return layout


@lru_cache(maxsize=256)
def _signature(lengths: tuple[int, ...], dim: int, shape: tuple[int, ...], dtype: torch.dtype) -> Signature:
    return signature(
        {"lengths per rank": lengths, "dim": dim, "shape without that dim": shape, "dtype": str(dtype)},
    )


def _difference(records: list[Record]) -> str:
    rank = next(rank for rank, record in enumerate(records) if record != records[0])
    first, other = (", ".join([f"{name} {value}" for name, value in records[i].items()]) for i in (0, rank))
    return f"the ranks disagree about a sequence: rank 0 has {first}; rank {rank} has {other}. {EQUAL_PARTS}"


def to_trace_safe(segments: Sequence[Segment], device_type: str) -> TraceSafeLayout:
    """``segments`` as they are kept on what outlives a call; :func:`segments_of` gives them back."""
    traced = torch.compiler.is_compiling()
    return tuple(
        [
            (
                segment.name,
                segment.total if traced else torch.empty((segment.total, 0), device=device_type),
                segment.replicated,
                segment.balanced,
            )
            for segment in segments
        ]
    )


def segments_of(held: TraceSafeLayout) -> tuple[Segment, ...]:
    return tuple(
        [
            Segment(name, total.shape[0] if isinstance(total, Tensor) else total, replicated, balanced)
            for name, total, replicated, balanced in held
        ]
    )
