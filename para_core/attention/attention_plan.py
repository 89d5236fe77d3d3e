"""The plan of one attention call: which algorithms it needs, and which tokens each rank sends to which rank.

:class:`~para_core.attention.mesh_attention.MeshAttention` makes a plan for each set of shapes and flags. The
operators of a graph get its spec as text and read the plan back (:func:`cached_plan`). What is computed by a
plan is in :mod:`.usp`. Tests: tests/attention/test_exactness.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from para_core.attention.features import load
from para_core.attention.ring_plan import RingPlan, RingStyle
from para_core.attention.spec import AttentionSpec
from para_core.attention.ulysses import Heads, UlyssesPlan
from para_core.distributed.cached_property import cached_property
from para_core.option_values import RING_STYLES

# They are imported here and not at first use, because Dynamo cannot trace an import.
_STYLES: dict[str, type[RingStyle]] = {name: load(style.path) for name, style in RING_STYLES.items()}


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """The communication plan of one attention call.

    Each algorithm's part is computed from ``spec`` when it is first used, and kept with the plan. Plans are
    compared by identity, so that they can be keys of caches.

    Args:
        spec: The call, without the sizes of batch and heads.
        one_shape: Whether all calls with this plan have tensors of the same shapes, dtype and device. They
            are then not looked up in each exchange. True only for plans that
            :class:`~para_core.attention.mesh_attention.MeshAttention` keeps by shapes, or uses for one call.
    """

    spec: AttentionSpec
    one_shape: bool = False

    @cached_property
    def with_gradients(self) -> AttentionPlan:
        """The plan to use if the call requires a gradient; see :attr:`AttnOptions.with_gradients`."""
        options = self.spec.options.with_gradients
        if options is self.spec.options:
            return self
        spec = replace(self.spec, options=options, options_text=options.as_text())
        return AttentionPlan(spec, self.one_shape)

    @cached_property
    def heads(self) -> Heads:
        return Heads(self.spec.num_heads, self.spec.num_kv_heads, self.spec.mesh.ulysses.size)

    @cached_property
    def ulysses(self) -> UlyssesPlan | None:
        """The plan of the Ulysses exchange; None if there is only one Ulysses rank, so that no exchange is needed."""
        if self.spec.mesh.ulysses.size == 1:
            return None
        return UlyssesPlan(self.spec, self.heads, ordered=self.spec.orders_queries, one_shape=self.one_shape)

    @cached_property
    def ordered_ulysses(self) -> UlyssesPlan | None:
        """Like :attr:`ulysses`, but with queries in the order of the sequence in every call: flex attention
        passes their indices to the user's functions.
        """
        if self.ulysses is None or self.spec.orders_queries:
            return self.ulysses
        return UlyssesPlan(self.spec, self.heads, ordered=True, one_shape=self.one_shape)

    @cached_property
    def ring(self) -> RingPlan:
        return RingPlan(self.spec)

    @cached_property
    def style(self) -> RingStyle:
        """The way in which keys reach the queries of other ring ranks."""
        options = self.spec.options
        kind = _STYLES[options.rotate_method]
        for option in options.others:
            kind = option.style_of(kind)
        return kind.of(self.ring)

    @cached_property
    def is_local(self) -> bool:
        """Whether one call of plain SDPA computes attention after the Ulysses exchange, perhaps to keys that
        the style gathers before. It cannot if an option selects keys.
        """
        return not self.spec.options.by_position and self.style.is_local


def read_plan(text: str, numbers: Sequence[int], scale: float | None) -> AttentionPlan:
    """Return the plan of the call whose spec ``text`` and ``numbers`` encode; see :meth:`AttentionSpec.read`."""
    return AttentionPlan(AttentionSpec.read(text, numbers, scale))


# read_plan with a cache, for operators at run time: a graph needs the same plan in every step. While tracing,
# lengths may be symbolic, so they cannot be keys of the cache.
cached_plan = lru_cache(maxsize=256)(read_plan)
