"""Questions to a plan: which segments the calls of a ``OneForEach`` see, and which segments consist of rows or frames.

:mod:`.submodule_calls` asks the first in each call of such a module, :mod:`.region` the second, and the observer
of ``benchmarks/pipelines`` both. Tests:
tests/adapters/test_transformers.py (Qwen-Image 2.1) and tests/plans/test_exactness.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from para_core.plans.plan import (
    Attention,
    Entries,
    Gather,
    OneForEach,
    Plan,
    ShardRule,
    Split,
)


def attention_calls(
    attention: OneForEach,
    parameters: tuple[str, ...],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> tuple[Attention, ...]:
    """Return the segments of each attention call that a module makes when it is called with ``args`` and
    ``kwargs``, by its positional ``parameters``. The last entry also applies to all further calls.

    ``attention.parameter`` is a list or tuple; None, or an argument that is left out, has no entries.
    """
    entries = {**dict(zip(parameters, args, strict=False)), **kwargs}.get(attention.parameter) or ()
    return (attention.each,) * len(entries) + (attention.last,)


def coarse_segments(plan: Plan) -> frozenset[str]:
    """Return the names of the segments whose entries are image rows or frames, that is, several tokens each.

    :mod:`.call_segments` requires fewer entries of them on a rank. A segment also counts if only a companion of its
    tokens has several entries for each (``Split(like=..., per=2)``), and entries with a halo are rows.
    """
    rules: list[ShardRule | Gather | None] = []
    for shard_rule in plan.shard_rules:
        if isinstance(shard_rule, Entries):
            rules += shard_rule.cuts
        else:
            rules.append(shard_rule)
    for output_rule in plan.outputs.values():
        if isinstance(output_rule, Sequence):
            rules += output_rule
        else:
            rules.append(output_rule)
    names = [halo.segment for halo in plan.halos.values()]
    for rule in rules:
        name = None
        if isinstance(rule, Split) and (rule.per != 1 or rule.together):
            name = rule.segment or rule.like
        elif isinstance(rule, Gather) and rule.per != 1:
            name = rule.segment
        if name is not None:
            names.append(name)
    return frozenset(names)
