"""Gather the outputs of a module whose tokens a plan has sharded.

The segments that a gather refers to were noted by :mod:`.split_rules` earlier in the same call. Outputs of
split samples are gathered in :mod:`.samples`. :mod:`.region` calls :meth:`GatheredOutputs.gather_outputs` for
the model, and :mod:`.submodule_calls` for the modules that a plan names. Tests:
tests/plans/test_exactness.py, tests/plans/test_plan.py.
"""

from __future__ import annotations

from collections.abc import Collection, MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from para_core.dataclass_fields import change_field, fields_of, has_fields
from para_core.distributed.mesh import SequenceMesh
from para_core.layout.sequence import Segment, SequenceLayout
from para_core.plans.call_segments import SegmentsOfCall, groups_of
from para_core.plans.plan import Gather

# Maximum number of known gathers of one plan. A full table is emptied.
_MOST_KNOWN = 256


class _KnownGather(NamedTuple):
    """The result of a plain :class:`Gather` for one segment: the layout of the output along the dim ``dim``,
    which is not negative.
    """

    dim: int
    layout: SequenceLayout


class GatheredOutputs(SegmentsOfCall):
    """The part of a :class:`~para_core.plans.apply_rules.RuleExecutor` that gathers a module's outputs."""

    def __init__(self, mesh: SequenceMesh, coarse: Collection[str] = ()) -> None:
        super().__init__(mesh, coarse)
        # In eager code, the layouts of outputs, by the dim of the rule, segment, number of tokens or groups,
        # and of dims.
        self._known_gathers: dict[tuple[int, Segment, int, int], _KnownGather] = {}

    def gather_outputs(self, output: Any, gathers: Sequence[Gather | None]) -> Any:
        """Return a module's output with its i-th entry or field gathered by ``gathers[i]``, if neither is
        None. Gathers for further entries than there are do nothing. Collective.

        ``output`` is a tensor, a tuple or list, a dataclass, or a dict or ``ModelOutput`` of diffusers, which
        is changed in place.

        Raises:
            TypeError: ``output`` is none of these.
        """
        if isinstance(output, Tensor):
            return self._gather(output, gathers[0])
        if type(output) is tuple:
            parts = list(output)
            for index, gather in enumerate(gathers[: len(parts)]):
                parts[index] = self._gather(parts[index], gather)
            return tuple(parts)
        if has_fields(output):
            for name, gather in zip(fields_of(output), gathers, strict=False):
                if gather is not None:
                    without_field = replace(gather, field="")
                    output = change_field(
                        output, gather.field or name, partial(self._gather, gather=without_field)
                    )
            return output
        if isinstance(output, (tuple, list)):
            gathered = [self._gather(value, gather) for value, gather in zip(output, gathers, strict=False)]
            return type(output)([*gathered, *output[len(gathered) :]])
        if not isinstance(output, MutableMapping):
            raise TypeError(
                f"the plan gathers an output that is a {type(output).__name__}; expected a tensor, tuple, list, dict "
                "or dataclass. Name a module inside it that returns the tensor."
            )
        # Change a ModelOutput in place, because its entries are also attributes. It has no entry for a field
        # that is None, so count its fields.
        names = list(getattr(output, "__dataclass_fields__", output))
        for name, gather in zip(names, gathers, strict=False):
            if name in output:
                output[name] = self._gather(output[name], gather)
        return output

    def _gather(self, value: Any, gather: Gather | None) -> Any:
        """Return ``value`` with the tokens of all ranks. Collective, unless there is no rule or no value.

        In eager code the layout of a plain gather is looked up from the second call on.
        """
        if gather is None or value is None:
            return value
        if gather.field:
            return change_field(value, gather.field, partial(self._gather, gather=replace(gather, field="")))
        segment = self.segments.get(gather.segment)
        if segment is None:
            segment = self.segment(gather.segment)
        is_plain = gather.per == 1 and not (gather.after_replicated or gather.then_replicated)
        if is_plain and not torch.compiler.is_compiling():
            known_gather = self._known_gathers.get((gather.dim, segment, value.shape[gather.dim], value.ndim))
            if known_gather is not None:
                return self.put_together(value, known_gather.dim, known_gather.layout)
        # The key of the table is the segment as noted, although its groups may be gathered below.
        noted_segment = segment
        if gather.after_replicated or gather.then_replicated:
            tokens = segment.size(self.mesh.rank, self.mesh.ranks)
            layout = self._layout_with_prefix(value, gather.dim, segment, tokens)
            if not gather.after_replicated:
                layout = SequenceLayout(layout.segments[::-1], self.mesh.ranks)
            return self.put_together(value, gather.dim, layout)
        # A tensor has an entry for each token, or one for each group. The numbers differ on every rank or on
        # none, because a sharded segment of groups has one on each rank: see _segment_of_groups().
        groups = groups_of(segment)
        if value.shape[gather.dim] == groups.size(self.mesh.rank, self.mesh.ranks):
            segment = groups
        layout = SequenceLayout((segment,), self.mesh.ranks)
        dim = gather.dim % value.ndim
        if gather.per != 1:
            value = torch.unflatten(value, dim, (layout.size(self.mesh.rank), -1))
        if segment.replicated:
            gathered = self.with_equal_bits(value, dim, segment)
        else:
            gathered = self.put_together(value, dim, layout)
            if is_plain and not torch.compiler.is_compiling():
                if len(self._known_gathers) >= _MOST_KNOWN:
                    self._known_gathers.clear()
                key = gather.dim, noted_segment, value.shape[dim], value.ndim
                self._known_gathers[key] = _KnownGather(dim, layout)
        if gather.per != 1:
            return gathered.flatten(dim, dim + 1)
        return gathered
