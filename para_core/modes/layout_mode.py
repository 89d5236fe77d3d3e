"""The base class of the attention modes: it determines which tokens of queries, keys and masks each rank holds.

Only :mod:`.unified` derives from it. The arithmetic is in :mod:`.inference`, sharding and gathering of
tensors in :mod:`.sharding_mode`. Tests: tests/modes/test_unified.py, tests/modes/test_inference.py,
tests/modes/test_flex_attention.py for masks of blocks, tests/attention/test_inputs.py.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, cast, overload

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from para_core.distributed.agree import agree
from para_core.distributed.mesh import SequenceMesh
from para_core.layout.sequence import Segment, SequenceLayout, even_layout
from para_core.layout.tokens import gather_tokens
from para_core.modes.inference import layout_of_total, sequence_of_length, sequence_of_symbolic_length
from para_core.modes.registry import ShardMask, mask_sharder
from para_core.modes.sharding_mode import ShardingMode, TraceSafeLayout, segments_of

logger = logging.getLogger(__name__)

# The layouts of queries and of keys that the user passed. None for the keys means the layout of the queries.
ExplicitLayouts = tuple[TraceSafeLayout, TraceSafeLayout | None]


class LayoutMode(ShardingMode):
    """A mode that knows which rank holds which tokens of queries, keys and masks.

    The explicit layouts of queries and keys, which the user passes to the mode, take precedence over the
    layouts of the sequences that were sharded through the mode. Without either, all ranks are assumed to hold
    equal parts.
    """

    def __init__(
        self,
        mesh: SequenceMesh,
        *,
        layout: SequenceLayout | None,
        key_layout: SequenceLayout | None,
        assume_equal: bool,
    ) -> None:
        super().__init__(mesh, assume_equal=assume_equal)
        if layout is None and key_layout is not None:
            raise ValueError("key_layout was given without layout; give both, or neither.")
        self._warned_of_equal_parts = False
        self._explicit: ExplicitLayouts | None = None
        if layout is not None:
            self._explicit = self._explicit_layouts(layout, key_layout)

    def _explicit_layouts(self, layout: SequenceLayout, key_layout: SequenceLayout | None) -> ExplicitLayouts:
        if key_layout is None:
            return self._trace_safe(layout), None
        return self._trace_safe(layout), self._trace_safe(key_layout)

    def _explicit_layout_of(self, kind: Literal["query", "key"], explicit: ExplicitLayouts) -> SequenceLayout:
        """Return the layout of the queries or keys in ``explicit``; without one for keys, it is that of the queries."""
        of_queries, of_keys = explicit
        if kind == "key" and of_keys is not None:
            return SequenceLayout(segments_of(of_keys), self._mesh.ranks)
        return SequenceLayout(segments_of(of_queries), self._mesh.ranks)

    @overload
    def shard(
        self,
        x: Tensor,
        dim: int,
        *,
        sequence: SequenceLayout | None = None,
        balance: Literal["causal"] | None = None,
    ) -> Tensor: ...
    @overload
    def shard(
        self,
        x: BlockMask,
        *,
        sequence: SequenceLayout | None = None,
        key_sequence: SequenceLayout | None = None,
    ) -> BlockMask: ...
    def shard(
        self,
        x: Tensor | BlockMask,
        dim: int | None = None,
        *,
        sequence: SequenceLayout | None = None,
        key_sequence: SequenceLayout | None = None,
        balance: Literal["causal"] | None = None,
    ) -> Tensor | BlockMask:
        """Return this rank's part of ``x``. Every rank passes the same whole ``x``.

        Args:
            x (`Tensor` or `BlockMask`): A tensor of any shape and length, or a flex attention mask over all
                tokens.
            dim (`int`, *optional*): The dim to shard. Required for a tensor; not allowed for a mask.
            sequence (:class:`SequenceLayout`, *optional*): The layout from :meth:`sequence`; for a mask, the
                layout of its queries. Defaults to equal parts of a tensor. For a mask it defaults to the
                explicit layout of the mode, or else to that of the sharded sequence with this number of
                tokens. Required for a tensor inside a compiled function.
            key_sequence (:class:`SequenceLayout`, *optional*): The layout of the keys of a mask. Defaults to
                ``sequence`` if that is passed and the mask has as many keys as queries; otherwise the default
                is found as for ``sequence``. Not allowed for a tensor.
            balance (`"causal"`, *optional*): See :meth:`sequence`. Not allowed for a mask, which follows the
                layout of the tokens that were sharded before it.

        Raises:
            ValueError: If ``dim`` is out of range, the length of ``x`` differs between ranks or from
                ``sequence``, or several sharded sequences fit a mask without ``sequence``. In eager code all
                ranks raise.
            TypeError: If an argument is missing, of another type, or not allowed for the type of ``x``.
            RuntimeError: If ``sequence`` is missing for a tensor inside a compiled function.
        """
        shard_mask = mask_sharder(x)
        if shard_mask is not None:
            if dim is not None or balance is not None:
                raise TypeError(
                    "cp.shard of a BlockMask takes no dim= and no balance=; say it with sequence=cp.sequence(...)."
                )
            return self._shard_block_mask(cast(BlockMask, x), shard_mask, sequence, key_sequence)
        if key_sequence is not None:
            raise TypeError("cp.shard of a tensor takes no key_sequence=.")
        # A missing dim is refused there, on every rank.
        return super().shard(cast(Tensor, x), cast(int, dim), sequence=sequence, balance=balance)

    def _shard_block_mask(
        self,
        mask: BlockMask,
        shard_mask: ShardMask,
        sequence: SequenceLayout | None,
        key_sequence: SequenceLayout | None,
    ) -> BlockMask:
        """Return this rank's part of ``mask``.
        In eager code the ranks compare it, unless ``assume_equal`` is set. Collective if they do.
        """
        if self._mesh.ranks == 1:
            return mask
        exchanges = not (self._assume_equal or torch.compiler.is_compiling())
        if exchanges:
            self._mesh.check_alive()
        try:
            num_queries, num_keys = mask.seq_lengths
            if sequence is not None and key_sequence is None and num_queries == num_keys:
                key_sequence = sequence
            query_layout = self._layout_of_mask(num_queries, sequence, "query")
            key_layout = self._layout_of_mask(num_keys, key_sequence, "key")
            sharded: BlockMask = shard_mask(mask, query_layout, key_layout, self._mesh)
        except (TypeError, ValueError, RuntimeError) as error:
            # RuntimeError is that of a device, which computes the rank's blocks.
            if exchanges:
                agree(error, self._mesh)
            raise
        if exchanges:
            lengths = {
                "query lengths per rank": query_layout.sizes(),
                "key lengths per rank": key_layout.sizes(),
            }
            agree({"block_mask": [*mask.shape], **lengths}, self._mesh)
        return sharded

    def _layout_of_mask(
        self, total: int, sequence: SequenceLayout | None, kind: Literal["query", "key"]
    ) -> SequenceLayout:
        """Return the layout of the queries or keys of a mask over all tokens: ``sequence``, else the explicit
        layout of the mode, else that of the sharded sequence with ``total`` tokens, else equal parts.
        """
        if sequence is not None:
            return self._require_ranks(sequence)
        if self._explicit is not None:
            return self._explicit_layout_of(kind, self._explicit)
        return layout_of_total(total, segments_of(self._known), self._mesh.ranks, kind=kind)

    def _only_sequence(self, num_tokens: int) -> SequenceLayout:
        """Return the layout of the only sequence that was sharded through this mode; if there is none, the
        explicit layout of the queries or keys that gives this rank ``num_tokens`` tokens, or that of the
        queries if neither does; without explicit layouts, equal parts. Raise ``ValueError`` if several fit.
        """
        is_sharded = any(not segment.replicated for segment in segments_of(self._known))
        if is_sharded or self._explicit is None:
            return super()._only_sequence(num_tokens)
        of_queries = self._explicit_layout_of("query", self._explicit)
        of_keys = self._explicit_layout_of("key", self._explicit)
        if of_keys.size(self._mesh.rank) != num_tokens:
            return of_queries
        if of_queries.size(self._mesh.rank) == num_tokens and of_queries != of_keys:
            raise ValueError(
                f"the layouts of the queries and of the keys both give this rank {num_tokens} tokens. Say which one "
                "this is: cp.gather(y, dim, sequence=layout)."
            )
        return of_keys

    def replicated(self, x: Tensor, dim: int = -2) -> Tensor:
        """Declare that every rank holds all tokens of ``x``, and return ``x`` unchanged.

        The mode then treats keys of this length as replicated, so cross-attention to them sends nothing. If
        replicated tokens are concatenated with sharded ones, pass the order with :meth:`using`.

        Args:
            x (`Tensor`): A tensor that is equal on all ranks.
            dim (`int`, *optional*, defaults to `-2`): The dim of the tokens.

        Raises:
            ValueError: If ``dim`` is out of range.
        """
        if not -x.ndim <= dim < x.ndim:
            raise ValueError(f"dim={dim} is out of range for a tensor of shape {list(x.shape)}.")
        self._remember(Segment("replicated", x.shape[dim], replicated=True))
        return x

    def local_mask(self, mask: Tensor, *, sequence: SequenceLayout | None = None) -> Tensor:
        """Return a mask over all keys of the sequence, gathered from each rank's ``mask`` over its own keys,
        a collective.

        This happens automatically in SDPA calls with a mask whose length shows that it covers this rank's
        keys only.

        Args:
            mask (`Tensor`): A mask whose last dim has the keys of this rank.
            sequence (:class:`SequenceLayout`, *optional*): The layout of the keys. Required inside a compiled
                function and if several sequences were sharded through this mode.

        Raises:
            ValueError: If the last dim does not have the length of this rank's part. In eager code all ranks
                raise.
            RuntimeError: If ``sequence`` is missing inside a compiled function.
        """
        if sequence is None and torch.compiler.is_compiling():
            raise RuntimeError("inside a compiled function cp.local_mask needs sequence=, as cp.gather does.")
        layout = self._agree_on_layout(mask, -1, sequence, is_whole=False)
        if self._mesh.ranks == 1:
            return mask
        return gather_tokens(mask, -1, layout, self._mesh)

    @contextmanager
    def using(self, layout: SequenceLayout, *, key_layout: SequenceLayout | None = None) -> Iterator[None]:
        """Return a context in which attention calls use ``layout`` instead of the layouts known to this mode.

        Args:
            layout (:class:`SequenceLayout`): The layout of the queries, and of the keys unless ``key_layout``
                is passed.
            key_layout (:class:`SequenceLayout`, *optional*): The layout of the keys.

        Raises:
            TypeError: If a layout is no :class:`SequenceLayout`.
            ValueError: If a layout is for another number of ranks.
        """
        before = self._explicit
        self._set_explicit(self._explicit_layouts(layout, key_layout))
        try:
            yield
        finally:
            self._set_explicit(before)

    def _set_explicit(self, layouts: ExplicitLayouts | None) -> None:
        """Set the explicit layouts. A subclass caches plans by state, so every change must be noted."""
        self._explicit = layouts
        if not torch.compiler.is_compiling():
            self._note_state()

    def set_layout(self, layout: SequenceLayout) -> None:
        """Use ``layout`` for the queries and keys of all later attention calls under this mode.

        Args:
            layout (:class:`SequenceLayout`): The layout of the queries and keys.

        Raises:
            TypeError: If the layout is no :class:`SequenceLayout`.
            ValueError: If the layout is for another number of ranks.
        """
        self._set_explicit(self._explicit_layouts(layout, None))

    def _layouts(
        self, num_queries: int, num_keys: int, ordered: bool
    ) -> tuple[SequenceLayout, SequenceLayout]:
        """Return the layouts of ``num_queries`` queries and ``num_keys`` keys on this rank.

        MeshAttention caches the results in eager code for each state that :meth:`_note_state` passes on, so
        this must depend on the explicit layouts and the known sequences only.
        """
        query_layout = self._layout_of(num_queries, "query", ordered)
        has_key_layout = self._explicit is not None and self._explicit[1] is not None
        if num_keys == num_queries and not has_key_layout:
            return query_layout, query_layout
        return query_layout, self._layout_of(num_keys, "key", ordered)

    def _layout_of(self, num_tokens: int, kind: Literal["query", "key"], ordered: bool) -> SequenceLayout:
        """Return the layout of a query or key with ``num_tokens`` tokens on this rank: the explicit layout of
        the mode, else that of the sharded sequences that fit, else equal parts. Raise ``ValueError`` if none
        fits, or several do.
        """
        mesh = self._mesh
        if self._explicit is not None:
            layout = self._explicit_layout_of(kind, self._explicit)
            if num_tokens != layout.size(mesh.rank):
                raise ValueError(
                    f"{kind} has {num_tokens} tokens, but the layout gives this rank {layout.size(mesh.rank)} of "
                    f"{layout.total}. Pass the layout that it was sharded by (cp.using(layout, key_layout=...))."
                )
            return layout
        if not self._known:
            self._warn_of_equal_parts(num_tokens)
            return even_layout(num_tokens * mesh.ranks, mesh.ranks)
        segments = segments_of(self._known)
        if torch.compiler.is_compiling():
            return sequence_of_symbolic_length(
                num_tokens, segments, mesh.rank, mesh.ranks, kind=kind, ordered=ordered
            )
        return sequence_of_length(num_tokens, segments, mesh.rank, mesh.ranks, kind=kind, ordered=ordered)

    def _warn_of_equal_parts(self, num_tokens: int) -> None:
        """Log a warning once if nothing was sharded inside this mode, which a user may have forgotten.

        A mode that was not entered (depth 0) is one of :mod:`.functional`, whose callers pass parts by definition.
        """
        if torch.compiler.is_compiling():
            return
        ranks = self._mesh.ranks
        if ranks == 1 or self._depth == 0 or self._warned_of_equal_parts:
            return
        self._warned_of_equal_parts = True
        logger.warning(
            "nothing was sharded through this mode, and it has no layout: the %d tokens of each rank are taken for one "
            "of %d equal parts of %d tokens. If every rank holds all tokens, each computes all of them, and a causal "
            "result is wrong: shard the inputs (x = cp.shard(x, dim=1), and position_ids with them) and gather the "
            "output (cp.gather); run what is not to be parallel under UnifiedAttnMode.disable(). generate() does not "
            "shard: use propose_plan, or decode with cp.using(...). If these are parts, say so: "
            "layout=SequenceLayout((Segment('x', %d),), %d).",
            num_tokens,
            ranks,
            num_tokens * ranks,
            num_tokens * ranks,
            ranks,
        )
