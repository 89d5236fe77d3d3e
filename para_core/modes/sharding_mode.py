"""The base class of the modes that a user enters for attention: it shards and gathers tensors, and keeps the
layouts of sharded sequences.

It intercepts nothing: that is in the subclasses of :mod:`.layout_mode` and :mod:`.batch_parallel`. A subclass
in ``para_core/comparison/runs.py`` notes what is sharded: it overrides ``_remember`` and ``_trace_safe``.
Tests: tests/modes/test_unified.py, tests/attention/test_inputs.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from types import TracebackType
from typing import Literal, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from para_core.attention.call_agreement import EQUAL_PARTS
from para_core.distributed.agree import agree
from para_core.distributed.mesh import SequenceMesh
from para_core.distributed.records import Record, Signature
from para_core.layout.sequence import Segment, SequenceLayout, even_layout
from para_core.layout.tokens import gather_tokens, shard_tokens

# The type of a length that is stored on a mode: an int while tracing, otherwise a tensor ``[length, 0]``.
# Dynamo treats an int attribute of a mode as a constant and would recompile for every length, but it makes
# tensor sizes symbolic.
Length = int | Tensor
# The type of a layout that is stored on a mode: for each segment a tuple (name, total, replicated, balanced,
# together).
TraceSafeLayout = tuple[tuple[str, Length, bool, bool, int], ...]


class ShardingMode(TorchFunctionMode):
    """A torch function mode that shards and gathers tensors over the ranks of ``mesh``.

    The mode keeps the layouts of the sequences that were sharded through it, until it is left. Entering it
    forgets those that were sharded before. ``assume_equal`` skips the small exchange in eager code that turns
    invalid input on one rank into an error on all ranks.
    """

    def __init__(self, mesh: SequenceMesh, *, assume_equal: bool) -> None:
        super().__init__()
        self._mesh = mesh
        self._assume_equal = assume_equal
        self._depth = 0
        # The sequences that were sharded through this mode or declared replicated, in the order of these
        # calls. The tuple becomes empty when the mode is left.
        self._known: TraceSafeLayout = ()
        # Whether a balanced sequence was among those that were last forgotten, in eager code.
        self._forgot_balanced = False
        # Whether gather was called after the last shard in a graph, so that the next shard there begins a new
        # call. In eager code nothing reads it. A graph that shards and never gathers leaves it False, and the
        # next call goes on with the sequences of this one.
        self._gathered = True

    def __enter__(self) -> Self:
        if self._depth == 0:
            self._forget()
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
            self._forget()
            self._end()

    def _forget(self) -> None:
        """Forget the known sequences, also those that were sharded before the mode was entered."""
        if not torch.compiler.is_compiling():
            self._forgot_balanced = any(segment.balanced for segment in segments_of(self._known))
        self._set_known(())

    def _begin(self) -> None:
        """Prepare for use when the outermost context of the mode is entered. Does nothing unless overridden."""

    def _end(self) -> None:
        """Undo :meth:`_begin` when the outermost context of the mode is left. Does nothing unless overridden.

        In a graph each gather calls it, so it may be called more often than :meth:`_begin`.
        """

    def _note_state(self) -> None:
        """Adapt to changed sequences or explicit layouts, in eager code. Does nothing unless overridden."""

    def _note_sharded(self, x: Tensor, dim: int, layout: SequenceLayout) -> None:
        """Note in eager code on several ranks that :meth:`shard` returns ``x``, sharded by ``layout``.
        Does nothing unless overridden.
        """

    def sequence(self, total: int, *, balance: Literal["causal"] | None = None) -> SequenceLayout:
        """Return the layout of ``total`` tokens, for the argument ``sequence`` of :meth:`shard` and
        :meth:`gather`.

        Args:
            total (`int`): Number of tokens of the whole sequence.
            balance (`"causal"`, *optional*): Give each rank an early and a late part of the sequence, so that
                all ranks have equal work under a causal mask. The model must not assume that a rank's tokens
                are consecutive. Defaults to consecutive tokens.

        Raises:
            TypeError: If ``total`` is no integer.
            ValueError: If ``balance`` is neither ``"causal"`` nor None.
        """
        if balance not in (None, "causal"):
            raise ValueError(f"balance is {balance!r}; expected 'causal', or None for consecutive tokens.")
        return even_layout(total, self._mesh.ranks, balanced=balance == "causal")

    def _set_known(self, sequences: TraceSafeLayout) -> None:
        """Set the known sequences. A subclass caches plans by them, so every change in eager code must be noted."""
        self._known = sequences
        if not torch.compiler.is_compiling():
            self._note_state()

    def _trace_safe(self, layout: SequenceLayout) -> TraceSafeLayout:
        """Return the segments of ``layout`` as they are stored on a mode."""
        return to_trace_safe(self._require_ranks(layout).segments, self._mesh.device_type)

    def _require_ranks(self, layout: SequenceLayout) -> SequenceLayout:
        """Return ``layout``. Raise ``TypeError`` if it is no layout, and ``ValueError`` if it is for another
        number of ranks.
        """
        if not isinstance(layout, SequenceLayout):
            raise TypeError(
                f"got a {type(layout).__name__} as a layout; expected the value of cp.sequence(total), or a "
                "SequenceLayout."
            )
        if layout.ranks != self._mesh.ranks:
            raise ValueError(f"the layout is for {layout.ranks} ranks, but the mesh has {self._mesh.ranks}.")
        return layout

    def _only_sequence(self, num_tokens: int) -> SequenceLayout:
        """Return the layout of the only sequence that was sharded through this mode; if there is none, equal
        parts of ``num_tokens`` tokens for each rank. Raise ``ValueError`` if there are several, or a
        balanced one was forgotten, whose tokens would be put together in another order.
        """
        sequences = [segment for segment in segments_of(self._known) if not segment.replicated]
        if len(sequences) == 1:
            return SequenceLayout((sequences[0],), self._mesh.ranks)
        if not sequences and self._forgot_balanced:
            raise ValueError(
                "a sequence was sharded with balance='causal' before this mode was entered or left, which forgot it. "
                "Shard and gather inside the mode, or pass sequence=cp.sequence(total, balance='causal')."
            )
        if not sequences:
            return self.sequence(num_tokens * self._mesh.ranks)
        raise ValueError(
            "several sequences were sharded through this mode (of "
            f"{', '.join([str(segment.total) for segment in sequences])} tokens). Say which one this is: cp.gather(y, "
            "dim, sequence=cp.sequence(total))."
        )

    def _remember(self, segment: Segment) -> None:
        """Add ``segment`` to the known sequences, unless one of its length and kind is known."""
        if torch.compiler.is_compiling() and self._depth == 0:
            self._enter_in_graph()
        kind = (segment.replicated, segment.balanced, segment.together)
        for other in segments_of(self._known):
            # Lengths last: in a graph each comparison of two becomes a guard.
            if (other.replicated, other.balanced, other.together) == kind and other.total == segment.total:
                return
        self._set_known((*self._known, *to_trace_safe([segment], self._mesh.device_type)))

    def _enter_in_graph(self) -> None:
        """Do the work of ``__enter__`` at the first shard after a gather, which begins a new call of the model.

        Dynamo does not trace ``__enter__`` and ``__exit__`` of a mode that was constructed outside of the
        graph. Gather does the work of the latter, but keeps the sequences for another gather.
        """
        if self._gathered:
            self._known = ()
            self._begin()
        self._gathered = False

    def shard(
        self,
        x: Tensor,
        dim: int,
        *,
        sequence: SequenceLayout | None = None,
        balance: Literal["causal"] | None = None,
    ) -> Tensor:
        """Return this rank's part of ``x`` along ``dim``. Every rank passes the same whole ``x``.

        All ranks must call this: in eager code they compare their layouts, unless ``assume_equal`` is set.

        Args:
            x (`Tensor`): A tensor of any shape. It may have fewer tokens than there are ranks.
            dim (`int`): The dim to shard.
            sequence (:class:`SequenceLayout`, *optional*): The layout from :meth:`sequence`. Required inside
                a compiled function. Defaults to equal parts of the length of ``x``.
            balance (`"causal"`, *optional*): See :meth:`sequence`. Not allowed together with ``sequence``.

        Raises:
            TypeError: If ``x`` is no tensor or ``sequence`` no layout. In eager code all ranks raise.
            ValueError: If ``dim`` is out of range, or the length of ``x`` differs between ranks or from
                ``sequence``; in eager code all ranks raise. Also if ``sequence`` and ``balance`` are both
                passed.
            RuntimeError: If ``sequence`` is missing inside a compiled function.
        """
        if sequence is None and torch.compiler.is_compiling():
            raise RuntimeError(
                "inside a compiled function cp.shard needs sequence=: tokens = cp.sequence(x.shape[dim]); "
                "cp.shard(x, dim, sequence=tokens)."
            )
        layout = self._agree_on_layout(x, dim, sequence, is_whole=True, balance=balance)
        # Remember the segments of a concatenation too: attention would otherwise take this rank's tokens for
        # one of equal parts. If their order matters, or one is replicated, it raises and asks for
        # cp.using(...).
        for segment in layout.segments:
            self._remember(segment)
        if self._mesh.ranks == 1:
            return x
        part = shard_tokens(x, dim, layout, self._mesh)
        if not torch.compiler.is_compiling():
            self._note_sharded(part, dim, layout)
        return part

    def gather(self, y: Tensor, dim: int, *, sequence: SequenceLayout | None = None) -> Tensor:
        """Return the whole tensor on every rank, gathered along ``dim``, a collective. Each rank passes its
        part.

        Args:
            y (`Tensor`): This rank's part.
            dim (`int`): The sharded dim.
            sequence (:class:`SequenceLayout`, *optional*): The layout of the whole sequence. Required inside
                a compiled function and if several sequences were sharded through this mode. Defaults to the
                only sequence that was sharded since the mode was entered; if there was none, to the layout
                that was passed to the mode, or to equal parts.

        Raises:
            TypeError: If ``y`` is no tensor or ``sequence`` no layout. In eager code all ranks raise.
            ValueError: If ``dim`` is out of range, or a rank's part does not have the length that the layout
                gives it; if ``sequence`` is missing, also if several sequences are known, or a balanced one
                was sharded before the mode was entered or left. In eager code all ranks raise.
            RuntimeError: If ``sequence`` is missing inside a compiled function.
        """
        if sequence is None and torch.compiler.is_compiling():
            raise RuntimeError(
                "inside a compiled function cp.gather needs sequence=: the value that cp.sequence(total) gave before."
            )
        layout = self._agree_on_layout(y, dim, sequence, is_whole=False)
        if torch.compiler.is_compiling() and self._depth == 0:
            self._end()
        self._gathered = True
        if self._mesh.ranks == 1:
            return y
        return gather_tokens(y, dim, layout, self._mesh)

    def _agree_on_layout(
        self,
        x: Tensor,
        dim: int,
        sequence: SequenceLayout | None,
        *,
        is_whole: bool,
        balance: Literal["causal"] | None = None,
    ) -> SequenceLayout:
        """Return the layout of ``x`` along ``dim`` (:meth:`_require_layout`), which is valid and equal on all
        ranks.

        In eager code, unless ``assume_equal`` is set, the ranks compare their layouts, a collective. If the
        layout is then invalid on any rank or differs between ranks, all ranks raise.
        """
        exchanges = self._mesh.ranks > 1 and not (self._assume_equal or torch.compiler.is_compiling())
        if exchanges:
            self._mesh.check_alive()
        try:
            layout = self._require_layout(x, dim, sequence, is_whole=is_whole, balance=balance)
        except (TypeError, ValueError) as error:
            if exchanges:
                agree(error, self._mesh)
            raise
        if exchanges:
            dim = int(dim) % x.ndim  # A number of NumPy is no JSON.
            shape = (*x.shape[:dim], *x.shape[dim + 1 :])
            agree(_layout_signature(layout, dim, shape, x.dtype), self._mesh, explain=_explain_difference)
        return layout

    def _require_layout(
        self,
        x: Tensor,
        dim: int,
        sequence: SequenceLayout | None,
        *,
        is_whole: bool,
        balance: Literal["causal"] | None,
    ) -> SequenceLayout:
        """Return the layout of ``x`` along ``dim``: ``sequence``, or the default of :meth:`shard`
        (``is_whole``, with ``balance``) or :meth:`gather` (for this rank's part). Raise ``TypeError`` or
        ``ValueError`` if the arguments do not fit.
        """
        if sequence is not None and balance is not None:
            raise ValueError(
                "shard got sequence= and balance=; say it once: cp.sequence(total, balance='causal')."
            )
        if not isinstance(x, Tensor):
            raise TypeError(f"got a {type(x).__name__}; expected a tensor.")
        if not hasattr(dim, "__index__"):
            raise TypeError(f"dim is {dim!r}; expected the number of the dim that is sharded.")
        if not -x.ndim <= dim < x.ndim:
            raise ValueError(f"dim={dim} is out of range for a tensor of shape {list(x.shape)}.")
        num_tokens = x.shape[dim]
        if sequence is not None:
            layout = self._require_ranks(sequence)
        elif is_whole:
            layout = self.sequence(num_tokens, balance=balance)
        else:
            layout = self._only_sequence(num_tokens)
        if is_whole and num_tokens != layout.total:
            raise ValueError(f"x has {num_tokens} tokens in dim {dim}, but sequence= says {layout.total}.")
        size = layout.size(self._mesh.rank)
        if not is_whole and num_tokens != size:
            raise ValueError(
                f"y has {num_tokens} tokens in dim {dim}, but this rank's part of {layout.total} is {size}."
            )
        return layout


@lru_cache(maxsize=256)
def _layout_signature(
    layout: SequenceLayout, dim: int, shape: tuple[int, ...], dtype: torch.dtype
) -> Signature:
    """Return what must be equal on all ranks in a call of shard or gather, by the words of the error if it is not.

    ``dim`` counts from 0, and ``shape`` is without it.
    """
    # Layouts that place other tokens on a rank may have the same lengths.
    segments = [
        f"{segment.total}{' replicated' * segment.replicated}{' balanced' * segment.balanced}"
        for segment in layout.segments
    ]
    return Signature.of(
        {
            "segments": " + ".join(segments),
            "lengths per rank": layout.sizes(),
            "dim": dim,
            "shape without that dim": shape,
            "dtype": str(dtype),
        }
    )


def _explain_difference(records: list[Record]) -> str:
    rank = next(rank for rank, record in enumerate(records) if record != records[0])
    first = _describe_record(records[0])
    other = _describe_record(records[rank])
    return f"the ranks disagree about a sequence: rank 0 has {first}; rank {rank} has {other}. {EQUAL_PARTS}"


def _describe_record(record: Record) -> str:
    return ", ".join([f"{name} {value}" for name, value in record.items()])


def to_trace_safe(segments: Sequence[Segment], device_type: str) -> TraceSafeLayout:
    """Return ``segments`` as tuples to store on a mode, with lengths in a form that Dynamo makes symbolic.

    :func:`segments_of` converts the result back.
    """
    traced = torch.compiler.is_compiling()
    return tuple(
        [
            (
                segment.name,
                segment.total if traced else torch.empty((segment.total, 0), device=device_type),
                segment.replicated,
                segment.balanced,
                segment.together,
            )
            for segment in segments
        ]
    )


def segments_of(layout: TraceSafeLayout) -> tuple[Segment, ...]:
    """Return the segments of a layout that :func:`to_trace_safe` made."""
    return tuple(
        [
            Segment(
                name, total.shape[0] if isinstance(total, Tensor) else total, replicated, balanced, together
            )
            for name, total, replicated, balanced, together in layout
        ]
    )
