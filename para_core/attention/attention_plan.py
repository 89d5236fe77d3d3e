"""The plan of one attention call: which algorithms its spec needs, and which rank sends what to which rank in each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from para_core.attention.grid import GridPlan, choose_grid
from para_core.attention.ring_plan import RingPlan
from para_core.attention.spec import AttentionSpec
from para_core.attention.tiles import join_neighbours
from para_core.attention.ulysses import Heads, UlyssesPlan
from para_core.distributed.cached_property import cached_property


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """The plans that follow from a spec. Each is computed at its first use and kept."""

    spec: AttentionSpec

    @cached_property
    def with_gradients(self) -> AttentionPlan:
        """The plan of this call if it keeps a gradient."""
        spec = self.spec.with_gradients
        return self if spec is self.spec else AttentionPlan(spec)

    @cached_property
    def heads(self) -> Heads:
        return Heads(self.spec.num_heads, self.spec.num_kv_heads, self.spec.mesh.ulysses.size)

    @cached_property
    def ulysses(self) -> UlyssesPlan | None:
        """The plan of Ulysses. None without other Ulysses ranks; a block then equals the tensors that a rank holds."""
        return None if self.spec.mesh.ulysses.size == 1 else UlyssesPlan(self.spec, self.heads)

    @cached_property
    def chunks(self) -> list[UlyssesPlan]:
        """The Ulysses plans, one for each of the ``ulysses_chunks`` parts of the heads."""
        return [UlyssesPlan(self.spec, heads) for heads in self.heads.cut(self.spec.options.ulysses_chunks)]

    @cached_property
    def ring(self) -> RingPlan:
        return RingPlan(self.spec)

    @cached_property
    def grid(self) -> GridPlan | None:
        """The plan of Attention2D. None unless ``rotate_method="2d"`` applies."""
        spec, options = self.spec, self.spec.options
        if options.rotate_method != "2d" or options.by_position or not self.ring.rotates:
            return None
        return GridPlan(self.ring, choose_grid(spec.mesh.ring.size, spec.num_heads, spec.num_kv_heads))

    @cached_property
    def is_local(self) -> bool:
        """Whether SDPA itself can compute a block: all keys are on this rank, in the order of the queries if that
        matters.
        """
        if self.spec.options.by_position or self.spec.mesh.ring.size > 1:
            return False
        if not self.spec.is_causal:
            return True
        queries, keys = join_neighbours(self.ring.query_runs), join_neighbours(self.ring.key_runs(0))
        return queries == keys and len(queries) <= 1


def read_plan(text: str, numbers: Sequence[int], scale: float | None) -> AttentionPlan:
    """Return the plan of the spec that :meth:`AttentionSpec.read` returns for these arguments."""
    return AttentionPlan(AttentionSpec.read(text, numbers, scale))


# For operators at run time, with plain integers: a graph needs the same plan in every step.
cached_plan = lru_cache(maxsize=256)(read_plan)
