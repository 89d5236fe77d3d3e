"""What is intercepted: modes that reroute scaled_dot_product_attention, and nothing about how it is computed."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._higher_order_ops.flex_attention import flex_attention
from torch._ops import HigherOrderOperator
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from para_core.agreement import Record, error_record, exchange, raise_first_error
from para_core.attention.call import EQUAL_PARTS, AttnFunc, attend_over_mesh
from para_core.attention.multi_head import multi_head_attention
from para_core.layout import Segment, SequenceLayout, concatenations, even_layout
from para_core.mesh import SequenceMesh, sequence_mesh
from para_core.sharding import gather_tokens, shard_tokens

# A length that outlives a call: an int while tracing, else the first dim of a tensor without elements. Dynamo takes an
# int that it finds on a mode for a constant, and would compile anew for every length; sizes of tensors become symbolic.
Length = int | Tensor
# Of each segment its name, total, and whether it is replicated, balanced.
HeldLayout = tuple[tuple[str, Length, bool, bool], ...]


class UnifiedAttnMode(TorchFunctionMode):
    """Inside ``with UnifiedAttnMode(mesh) as cp:`` every ``scaled_dot_product_attention`` runs over the mesh.

    Each rank calls it with its part of the sequence, and gets its part of the result. Which part a rank holds is said,
    in this order, by ``layout``; by what was cut with ``cp.shard``; else every rank is taken to hold an equal part.

    Args:
        mesh: a DeviceMesh with a ``ring`` and/or ``ulysses`` dim (a slice of a larger one, too), or a ProcessGroup,
            whose ranks then all go to Ulysses.
        layout: the layout of the queries of every attention call inside, and of its keys unless ``key_layout`` is given.
        assume_equal: skip the small exchange that, in eager code, begins each intercepted call, each ``shard`` and each
            ``gather``, and turns input that is bad on one rank into an error on all. Nothing is exchanged in a
            compiled graph.
        attn_func: computes attention on one device in place of SDPA: called as ``attn_func(query, key, value, attn_mask=,
            dropout_p=, is_causal=, scale=)`` on several ranks, with ``[B, H, S, D]`` and at most one of mask and ``is_causal``, it returns
            ``out``, or ``(out, lse)`` with lse ``[B, H, S_q]`` in float32, which a ring needs.
        ulysses_chunks: without gradients, cut each rank's heads into so many parts, and let the next one travel while one
            is computed.

    >>> import torch.distributed as dist  # doctest: +SKIP
    >>> with UnifiedAttnMode(mesh) as cp:  # doctest: +SKIP
    ...     y = cp.gather(model(cp.shard(x, dim=1)), dim=1)
    """

    # What the ranks of a plain ProcessGroup do, and which mesh dim may have one rank only.
    _group_dim = "ulysses"
    _single_dim: str | None = None

    def __init__(
        self,
        mesh: DeviceMesh | ProcessGroup | SequenceMesh,
        *,
        layout: SequenceLayout | None = None,
        key_layout: SequenceLayout | None = None,
        assume_equal: bool = False,
        attn_func: AttnFunc | None = None,
        ulysses_chunks: int = 1,
    ) -> None:
        super().__init__()
        if isinstance(ulysses_chunks, bool) or not isinstance(ulysses_chunks, int) or ulysses_chunks < 1:
            raise ValueError(f"ulysses_chunks is {ulysses_chunks!r}; expected a positive integer.")
        self._ulysses_chunks = ulysses_chunks
        self._mesh = mesh if isinstance(mesh, SequenceMesh) else sequence_mesh(mesh, group_dim=self._group_dim)
        if self._single_dim is not None:
            _require_single(self._mesh, self._single_dim, type(self).__name__)
        self._assume_equal = assume_equal
        self._attn_func = attn_func
        self._depth = 0
        # The sequences that were cut through this mode, or said to be replicated, in that order; emptied on exit.
        self._known: HeldLayout = ()
        self._gathered = True
        self._fast_path = True
        # Of queries and of keys, if given: decides before what was cut.
        self._explicit: tuple[HeldLayout, HeldLayout | None] | None = None
        if layout is not None:
            self._explicit = (self._hold_layout(layout), None if key_layout is None else self._hold_layout(key_layout))
        elif key_layout is not None:
            raise ValueError("key_layout was given without layout; give both, or neither.")
        self.intercepted = False
        # Off where a plan has not cut the tokens yet, or has gathered them.
        self.active = True

    # -- entering and leaving

    def __enter__(self) -> Self:
        if self._depth == 0:
            self._known = ()
            self._fast_path = _switch_fused_encoder(False)
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
            self._known = ()
            self._give_fused_encoder_back()
            if exc_type is None and not torch.compiler.is_compiling():
                self._warn_if_nothing_was_intercepted()

    def _give_fused_encoder_back(self) -> None:
        # Where it was off before, another thread's mode may have switched it off, and gives it back when it ends.
        if self._fast_path:
            _switch_fused_encoder(True)

    def _warn_if_nothing_was_intercepted(self) -> None:
        if self.intercepted or self._mesh.ranks == 1:
            return
        self.intercepted = True  # once per mode
        warnings.warn(
            f"{type(self).__name__} on {self._mesh.ranks} ranks intercepted no scaled_dot_product_attention: nothing "
            "inside ran in parallel. Attention that does not go through torch.nn.functional (flash_attn, a diffusers "
            "backend such as 'flash') cannot be seen; switch to a native backend.",
            stacklevel=3,
        )

    @staticmethod
    def disable() -> TorchFunctionMode:
        """A context inside which no mode of this module intercepts anything."""
        return _Disabled()

    def bound(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, run under this mode as it is now, whenever it is called.

        For what is called again after the mode has been left: ``checkpoint(cp.bound(block), x, use_reentrant=False)``
        recomputes in the backward.
        """
        again, known = copy.copy(self), self._known
        again._depth = 0

        def run(*args: Any, **kwargs: Any) -> Any:
            with again:
                again._known, again.intercepted = known, False
                result = function(*args, **kwargs)
                self.intercepted = self.intercepted or again.intercepted
                again.intercepted = True  # it does not warn: this mode does
            return result

        return run

    # -- intercepting

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.unflatten and torch.compiler.is_compiling():
            # Dynamo cannot trace the method under a mode: it is Python that calls super().
            return torch.unflatten(*args, **kwargs)
        if self._mesh.ranks == 1 or not self.active:
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self.attend(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            return multi_head_attention(self.attend, *args, **kwargs)
        if func in _UNSEEN:
            raise RuntimeError(
                f"{getattr(func, '__name__', func)} computes attention without scaled_dot_product_attention, so it "
                f"cannot run on {self._mesh.ranks} ranks: each would attend to its own tokens only. Use "
                "F.scaled_dot_product_attention, or run this call under UnifiedAttnMode.disable()."
            )
        return func(*args, **kwargs)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """``scaled_dot_product_attention`` over the mesh: what an intercepted call becomes."""
        self.intercepted = True
        if self._mesh.ranks == 1:
            out: Tensor = torch.ops.aten.scaled_dot_product_attention.default(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
            return out
        return attend_over_mesh(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            scale,
            enable_gqa,
            mesh=self._mesh,
            # A mask or is_causal asks where in the sequence a token is, not only on which rank.
            choose_layouts=lambda num_queries, num_keys: self._layouts(
                num_queries, num_keys, ordered=is_causal or attn_mask is not None
            ),
            assume_equal=self._assume_equal,
            attn_func=self._attn_func,
            ulysses_chunks=self._ulysses_chunks,
        )

    # -- which rank holds which tokens

    def sequence(self, total: int, *, balance: Literal["causal"] | None = None) -> SequenceLayout:
        """Who holds which of ``total`` tokens: a value for ``sequence=`` of :meth:`shard` and :meth:`gather`.

        Args:
            balance: ``"causal"`` gives each rank an early and a late part, so that under a causal mask all have the same
                work; the model must then not rely on its tokens being neighbours.
        """
        if balance not in (None, "causal"):
            raise ValueError(f"balance is {balance!r}; expected 'causal', or None for consecutive tokens.")
        return even_layout(total, self._mesh.ranks, balanced=balance == "causal")

    def replicated(self, x: Tensor, dim: int = -2) -> Tensor:
        """Say that every rank holds all tokens of ``x``, along ``dim``; returns ``x``.

        From then on, keys of that length are taken to be replicated: cross-attention to them sends nothing. Where such
        tokens are concatenated with sharded ones, say the order with :meth:`using`.
        """
        if not -x.ndim <= dim < x.ndim:
            raise ValueError(f"dim={dim} is out of range for a tensor of shape {list(x.shape)}.")
        self._remember(Segment("replicated", x.shape[dim], replicated=True))
        return x

    def local_mask(self, mask: Tensor, *, sequence: SequenceLayout | None = None) -> Tensor:
        """An attention mask whose key dim (the last) is of this rank's keys, for all keys: gathered along it.

        A mask is read like this by itself where lengths leave no doubt.

        Args:
            sequence: of the keys; as for :meth:`gather`.
        """
        if sequence is None and torch.compiler.is_compiling():
            raise RuntimeError("inside a compiled function cp.local_mask needs sequence=, as cp.gather does.")
        layout = self._agree(mask, -1, sequence, whole=False)
        return mask if self._mesh.ranks == 1 else gather_tokens(mask, -1, layout, self._mesh)

    @contextmanager
    def using(self, layout: SequenceLayout, *, key_layout: SequenceLayout | None = None) -> Iterator[None]:
        """Inside, every attention call has ``layout`` for its queries, and ``key_layout`` (or the same) for its keys."""
        before = self._explicit
        self._explicit = (self._hold_layout(layout), None if key_layout is None else self._hold_layout(key_layout))
        try:
            yield
        finally:
            self._explicit = before

    def set_layout(self, layout: SequenceLayout) -> None:
        """Every attention call from now on has ``layout``: :meth:`using`, for as long as the mode lives."""
        self._explicit = (self._hold_layout(layout), None)

    def _hold(self, length: int) -> Length:
        if torch.compiler.is_compiling():
            return length
        return torch.empty((length, 0), device=self._mesh.device_type)

    def _hold_layout(self, layout: SequenceLayout) -> HeldLayout:
        segments = self._checked(layout).segments
        return tuple([self._hold_segment(segment) for segment in segments])

    def _hold_segment(self, segment: Segment) -> tuple[str, Length, bool, bool]:
        return segment.name, self._hold(segment.total), segment.replicated, segment.balanced

    def _held_layout(self, held: HeldLayout) -> SequenceLayout:
        return SequenceLayout(_segments(held), self._mesh.ranks)

    def _checked(self, layout: SequenceLayout) -> SequenceLayout:
        if layout.ranks != self._mesh.ranks:
            raise ValueError(f"the layout is for {layout.ranks} ranks, but the mesh has {self._mesh.ranks}.")
        return layout

    def _layouts(self, num_queries: int, num_keys: int, *, ordered: bool) -> tuple[SequenceLayout, SequenceLayout]:
        if self._explicit is not None:
            query_layout = self._held_layout(self._explicit[0])
            key_layout = query_layout if self._explicit[1] is None else self._held_layout(self._explicit[1])
            for kind, layout, held in (("query", query_layout, num_queries), ("key", key_layout, num_keys)):
                expected = layout.size(self._mesh.rank)
                if held != expected:
                    raise ValueError(
                        f"{kind} has {held} tokens, but the layout gives this rank {expected} of {layout.total}. "
                        "Pass the layout that it was cut by (cp.using(layout, key_layout=...))."
                    )
            return query_layout, key_layout
        if len(self._known) == 0:
            query_layout = even_layout(num_queries * self._mesh.ranks, self._mesh.ranks)
            if num_keys == num_queries:
                return query_layout, query_layout
            return query_layout, even_layout(num_keys * self._mesh.ranks, self._mesh.ranks)
        query_layout = self._remembered(num_queries, "query", ordered)
        if num_keys == num_queries:
            return query_layout, query_layout
        return query_layout, self._remembered(num_keys, "key", ordered)

    def _remembered(self, held: int, kind: str, ordered: bool) -> SequenceLayout:
        """The sequence cut through this mode, or concatenation of such, of which this rank holds ``held`` tokens."""
        ranks, rank = self._mesh.ranks, self._mesh.rank
        candidates = concatenations(_segments(self._known), ranks)
        fitting = [layout for layout in candidates if layout.size(rank) == held]
        if not fitting:
            known = ", ".join([f"{layout.size(rank)} of {layout.total}" for layout in candidates])
            raise ValueError(
                f"{kind} has {held} tokens on this rank, which fits nothing that was cut with cp.shard here ({known}). "
                "Cut it with cp.shard too, or say who holds what with cp.using(SequenceLayout(...))."
            )
        found = fitting[0]
        for other in candidates:
            alike = [mine == theirs for mine, theirs in zip(found.sizes(), other.sizes(), strict=True)]
            if any(alike) and not all(alike):
                raise ValueError(
                    f"{kind} has {held} tokens on this rank, and a sequence of {found.total} or of {other.total} would "
                    "fit on some rank. Say which with cp.using(cp.sequence(total))."
                )
            if ordered and all(alike) and (other is not found or len(found.segments) > 1):
                raise ValueError(
                    f"{kind} of {found.total} tokens was put together in one of several orders, and a mask or is_causal "
                    "needs to know which. Say it with cp.using(SequenceLayout(...))."
                )
        if len(found.segments) > 1 and found.replicated:
            raise ValueError(
                f"{kind} of {found.total} tokens holds replicated ones, and they may be first or last. Say it with "
                "cp.using(SequenceLayout((Segment(..., replicated=True), Segment(...)), ranks))."
            )
        return found

    # -- cutting and putting together

    def shard(
        self,
        x: Tensor,
        dim: int,
        *,
        sequence: SequenceLayout | None = None,
        balance: Literal["causal"] | None = None,
    ) -> Tensor:
        """This rank's part of ``x`` along ``dim``; ``x`` is the same, whole, on every rank.

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
        return x if self._mesh.ranks == 1 else shard_tokens(x, dim, layout, self._mesh)

    def _remember(self, segment: Segment) -> None:
        if torch.compiler.is_compiling() and self._depth == 0:
            # Dynamo enters a mode that was made outside of the graph without tracing __enter__ and __exit__, so what
            # these do is done here and in gather: the first cut after a gather belongs to another call.
            if self._gathered:
                self._known = ()
                self._fast_path = _switch_fused_encoder(False)
            self._gathered = False
        kind = (segment.replicated, segment.balanced)
        same = [one for one in _segments(self._known) if (one.replicated, one.balanced) == kind]
        if not [one for one in same if one.total == segment.total]:
            self._known = (*self._known, self._hold_segment(segment))

    def gather(self, y: Tensor, dim: int, *, sequence: SequenceLayout | None = None) -> Tensor:
        """The whole of ``y`` along ``dim``, on every rank; ``y`` is this rank's part.

        Args:
            sequence: what the part is of; may be left out while only one sequence was cut through this mode.

        Raises:
            ValueError: in eager code on every rank, if a rank's part is not what ``sequence`` gives it.
        """
        if sequence is None and torch.compiler.is_compiling():
            raise RuntimeError(
                "inside a compiled function cp.gather needs sequence=: the value that cp.sequence(total) gave before."
            )
        layout = self._agree(y, dim, sequence, whole=False)
        if torch.compiler.is_compiling() and self._depth == 0:
            self._give_fused_encoder_back()
        self._gathered = True
        if self._mesh.ranks == 1:
            return y
        return gather_tokens(y, dim, layout, self._mesh)

    def _only_sequence(self, held: int) -> SequenceLayout:
        known = [segment for segment in _segments(self._known) if not segment.replicated]
        if len(known) == 1:
            return SequenceLayout((known[0],), self._mesh.ranks)
        if not known:
            return self.sequence(held * self._mesh.ranks)
        raise ValueError(
            f"several sequences were cut through this mode (of {', '.join([str(one.total) for one in known])} tokens). "
            "Say which one this is: cp.gather(y, dim, sequence=cp.sequence(total))."
        )

    def _agree(self, x: Tensor, dim: int, sequence: SequenceLayout | None, *, whole: bool) -> SequenceLayout:
        """The layout that ``x`` has along ``dim``, in eager code the same on every rank, or an error on every rank."""
        talk = self._mesh.ranks > 1 and not (self._assume_equal or torch.compiler.is_compiling())
        if talk:
            self._mesh.check_alive()
        try:
            layout = self._fitting(x, dim, sequence, whole=whole)
        except (TypeError, ValueError) as error:
            if talk:
                raise_first_error(exchange(error_record(error), self._mesh))
            raise
        if not talk:
            return layout
        shape = list(x.shape)
        del shape[dim]
        record: Record = {
            "lengths per rank": layout.sizes(),
            "dim": dim % x.ndim,
            "shape without that dim": shape,
            "dtype": str(x.dtype),
        }
        records = exchange(record, self._mesh)
        raise_first_error(records)
        for rank, other in enumerate(records):
            if other != records[0]:
                raise ValueError(
                    f"the ranks disagree about a sequence: rank 0 has {_described(records[0])}; rank {rank} has "
                    f"{_described(other)}. {EQUAL_PARTS}"
                )
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


class RingAttnMode(UnifiedAttnMode):
    """:class:`UnifiedAttnMode` on a mesh without an ``ulysses`` dim (or one of size 1): keys and values travel."""

    _group_dim = "ring"
    _single_dim = "ulysses"


class UlyssesAttnMode(UnifiedAttnMode):
    """:class:`UnifiedAttnMode` on a mesh without a ``ring`` dim (or one of size 1): tokens are traded for heads."""

    _single_dim = "ring"


def _described(record: Record) -> str:
    return ", ".join([f"{name} {value}" for name, value in record.items()])


def _require_single(mesh: SequenceMesh, name: str, mode: str) -> None:
    size = getattr(mesh, name).size
    if size > 1:
        raise ValueError(
            f"{mode} got a mesh whose {name!r} dim has {size} ranks; expected 1. Use UnifiedAttnMode for both at once."
        )


def _segments(held: HeldLayout) -> tuple[Segment, ...]:
    return tuple([Segment(name, _length(total), replicated, balanced) for name, total, replicated, balanced in held])


def _length(held: Length) -> int:
    return held.shape[0] if isinstance(held, Tensor) else held


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def _switch_fused_encoder(on: bool) -> bool:
    """Allow torch's fused encoder kernels or not; returns whether they were allowed.

    In eager code torch leaves them when a mode is on. Dynamo takes them all the same, and shows them to no mode: so they
    are off while a mode is entered, also while one is entered in a graph that is being traced (this runs then).
    """
    before: bool = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(on)
    return before


_UNSEEN = (torch._native_multi_head_attention, torch._transformer_encoder_layer_fwd, flex_attention)


class _Disabled(TorchFunctionMode):
    """Hands attention on under a name that the modes outside do not intercept."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return torch.ops.aten.scaled_dot_product_attention.default(*args, **kwargs)
        if func is F.multi_head_attention_forward or func in _UNSEEN or isinstance(func, HigherOrderOperator):
            with torch._C.DisableTorchFunction():
                return func(*args, **kwargs)
        if func is Tensor.unflatten and torch.compiler.is_compiling():
            return torch.unflatten(*args, **kwargs)
        return func(*args, **kwargs)
