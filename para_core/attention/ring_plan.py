"""The plan of a ring: which tokens each rank sends, and the contract of the ways to send them.

:class:`~para_core.attention.attention_plan.AttentionPlan` makes the plan and chooses the style. The styles
themselves are in :mod:`.ring`, :mod:`.direct_ring`, :mod:`.gathered` and :mod:`.grid_2d`, their gradients in
:mod:`para_core.attention.gradients`. Tests: tests/attention/test_exactness.py and
tests/attention/test_traffic.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from para_core.attention.attend import Attend
from para_core.attention.local_call import LocalAttentionCall
from para_core.attention.spec import AttentionSpec
from para_core.attention.tiles import Tiling
from para_core.distributed.cached_property import cached_property
from para_core.distributed.mesh import MeshDim
from para_core.layout.runs import join_neighbours
from para_core.layout.sequence import Run


class Hop(NamedTuple):
    """One step of the ring, in which this rank gets the keys and values (the block) of ring rank ``source``,
    which is ``step`` positions before this rank.
    """

    step: int
    source: int


# In this first step a rank computes with its own block and receives nothing. Its source is not read.
OWN_BLOCK = Hop(0, 0)


@dataclass(frozen=True, eq=False)
class RingPlan:
    """The plan of ring attention: which keys and values (a *block*) each rank sends and computes with at each step."""

    spec: AttentionSpec

    @cached_property
    def dim(self) -> MeshDim:
        """The mesh dim along which blocks are sent."""
        return self.spec.mesh.ring

    @cached_property
    def block_sizes(self) -> list[int]:
        """The number of keys that each ring rank sends: the sharded tokens of its Ulysses group."""
        return self.spec.keys.sizes(replicated=False)

    @property
    def rotates(self) -> bool:
        """Whether any block of keys and values has to be sent."""
        return self.spec.mesh.ring.size > 1 and bool(self.spec.key_layout.sharded)

    def source(self, step: int) -> int:
        """Return the index of the ring rank whose block this rank has at ``step``; this rank's own at step 0."""
        return (self.spec.mesh.ring.index - step) % self.spec.mesh.ring.size

    @cached_property
    def hops(self) -> list[Hop]:
        """The steps of the ring, without the first one, :data:`OWN_BLOCK`."""
        if not self.rotates:
            return []
        return [Hop(step, self.source(step)) for step in range(1, self.spec.mesh.ring.size)]

    @cached_property
    def has_replicated_keys(self) -> bool:
        """Whether this rank's block contains replicated keys, which are not sent."""
        return bool(self.spec.key_layout.replicated)

    @cached_property
    def sent_runs(self) -> list[Run]:
        """The sharded keys of this rank's block, which are sent, as runs ``(offset in the block, length)``."""
        return join_neighbours(self.spec.keys.offsets(self.dim.index, replicated=False))

    @cached_property
    def query_runs(self) -> list[Run]:
        """The positions of this rank's queries, as runs ``(start, length)`` in the order of the query tensor."""
        return self.spec.queries.runs(self.dim.index)

    def key_runs(self, step: int) -> list[Run]:
        """Return the positions of the keys that this rank has at ``step``, as runs ``(start, length)``.
        Replicated keys are among those of step 0 only, so that each rank attends to them once.
        """
        if step == 0:
            return self.spec.keys.runs(self.dim.index)
        return self.spec.keys.runs(self.source(step), replicated=False)

    @cached_property
    def tiling(self) -> Tiling:
        """The pieces of this rank's queries, and the tiles of the block of each step that they see: the default of
        :attr:`RingStyle.tiling`, in which the number of a block is the step at which this rank has it.
        """
        steps = 1
        if self.rotates:
            steps = self.spec.mesh.ring.size
        runs = [self.key_runs(step) for step in range(steps)]
        return Tiling(self.query_runs, runs, self.spec.positional_masks)


class RingStyle:
    """A way in which keys reach the queries of other ring ranks, for one plan.

    :data:`~para_core.option_values.RING_STYLES` lists the styles by their values of the option
    ``rotate_method``. The defaults here are for styles that bring keys to the queries that this rank holds.

    Attributes:
        gradient: The function that returns its gradient, as ``"module:name"`` in ``para_core.attention``.
        has_all_keys: Whether a rank gets the keys of all ring ranks before it attends to any. Such a style
            must implement :meth:`gather_call`, and block-sparse attention keeps it.
    """

    gradient: ClassVar[str]
    has_all_keys: ClassVar[bool] = False

    def __init__(self, plan: RingPlan) -> None:
        self.plan = plan

    @classmethod
    def of(cls, plan: RingPlan) -> RingStyle:
        """Return this style for ``plan``, or the style to use in its place if it does not support the call. Called
        by :attr:`AttentionPlan.style <para_core.attention.attention_plan.AttentionPlan.style>`.
        """
        return cls(plan)

    @cached_property
    def is_local(self) -> bool:
        """Whether one call of plain SDPA can compute attention after the Ulysses exchange.

        It can if there is only one ring rank: all keys are then on this rank. In a causal call, queries and
        keys must also be the same tokens, consecutive and in the order of the sequence.
        """
        plan = self.plan
        if plan.spec.mesh.ring.size > 1:
            return False
        if not plan.spec.is_causal:
            return True
        queries, keys = join_neighbours(plan.query_runs), join_neighbours(plan.key_runs(0))
        return queries == keys and len(queries) <= 1

    def gather_call(self, call: LocalAttentionCall) -> LocalAttentionCall:
        """Return ``call``, to this rank's keys, with all keys. Collective. For styles with
        :attr:`has_all_keys`: :func:`~para_core.attention.usp.attend_block` calls no other. The mask of
        ``call`` has a column for each key of the sequence already, or one.
        """
        raise NotImplementedError

    def select_queries(self, out: Tensor) -> Tensor:
        """Return the results of this rank's queries from ``out``, that of a call that :meth:`gather_call` returned.
        Called by :func:`~para_core.attention.usp.attend_block`, like that method.
        """
        return out

    @cached_property
    def tiling(self) -> Tiling:
        """The pieces of this rank's queries, and the tiles of each block of keys that they see. A style overrides
        it if its blocks are not those of the steps of the ring.
        """
        return self.plan.tiling

    @cached_property
    def mask_tiling(self) -> Tiling:
        """The keys that each row of the mask tensor of the call sees, with all keys of the sequence as one block."""
        queries = [*self.plan.query_runs, *self.other_queries]
        return Tiling(queries, [[(0, self.plan.spec.key_layout.total)]], self.plan.spec.positional_masks)

    @property
    def other_queries(self) -> Sequence[Run]:
        """The positions of queries of other ranks that this rank computes, too. Their rows follow those of
        this rank's queries in the mask of the call (:func:`~para_core.attention.masks.mask_of_block`). Only
        the grid has any.
        """
        return ()

    def add_other_rows(self, mask: Tensor) -> Tensor:
        """Return ``mask``, the rows of this rank's queries, followed by those of :attr:`other_queries`. Collective.
        Called by :func:`~para_core.attention.masks.mask_of_block` if each rank has the rows of its own queries.
        """
        return mask

    def over_ring(self, attend: Attend) -> Attend:
        """Return attention to the keys of all ring ranks, which is collective, given attention to one block.

        The returned function is called once per call, with this rank's block. It calls ``attend`` for each
        block, with the number that the block has in the tiling of its accumulator.
        """
        raise NotImplementedError
