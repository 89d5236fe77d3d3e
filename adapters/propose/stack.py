"""The block stack of a model, as it was seen in one call: what First Block Cache has to know."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from para_core.adapters.propose.candidates import Region, streams_of, tensors_of
from para_core.adapters.propose.observe import ModuleCall, ObservedCall, Seen
from para_core.cache.apply import apply_cache, model_cache_report
from para_core.cache.blocks import BlockGroup, CachedBlocks
from para_core.torch_internals import tree_leaves
from para_core.verify.virtual_ranks import fresh, with_same_weights

# Far above what one step changes.
_ALWAYS = 0.5


def guess_blocks(region: Region) -> CachedBlocks | None:
    """The groups of the lists in ``region``; None where a block's streams are not seen."""
    began = region.calls()[0][0].began
    groups: list[BlockGroup] = []
    before: list[ModuleCall] = []
    for name in dict.fromkeys(call.block_list for call in region.small.calls if call.block_list is not None):
        calls = region.small.of_list(name)
        if calls[0].began < began:
            continue
        streams = streams_of(calls, 0)
        if not all(streams):
            return None
        measured = next((one for one in region.start.streams if one in streams), streams[0])
        # Tokens first, of [S, B, C].
        samples = int(region.start.dim == 0 and region.samples() is not None)
        group = BlockGroup((name,), streams, measured, chained=is_chained(calls, streams), samples=samples)
        if groups and groups[-1].streams == streams and _hand_over(before[-1], calls[0], streams):
            chained = groups[-1].chained and group.chained and is_chained([before[-1], calls[0]], streams)
            groups[-1] = replace(groups[-1], lists=(*groups[-1].lists, name), chained=chained)
        else:
            groups.append(group)
        before = calls
    return CachedBlocks(tuple(groups), conditions=conditions_of(region.small, region.large)) if groups else None


def conditions_of(small: ObservedCall, large: ObservedCall) -> tuple[str, ...]:
    """Arguments of the model that tell branches of guidance apart: they do not grow with the tokens, and stay from step to step.

    A sequence for each sample (text), under whatever name; else an embedding for each sample; else labels. Whether a vector or a
    number changes from step to step does not show in two calls, so those that are named like a time step are left out.
    """
    kinds: dict[str, list[str]] = {"sequence": [], "embedding": [], "label": []}
    sample = _sample_of(small, large)
    for name, value in small.inputs.items():
        if name in sample:
            continue
        pairs = [*zip(tensors_of(value), tensors_of(large.inputs.get(name)), strict=False)]
        fixed = [one for one, other in pairs if one.shape == other.shape]
        # A list has an entry for each sample.
        kind = _kind_of(fixed, in_list=isinstance(value, (list, tuple)))
        if kind == "sequence" or (kind is not None and not _OF_TIME.search(name)):
            kinds[kind].append(name)
    return tuple(next((names for names in kinds.values() if names), []))


def _sample_of(small: ObservedCall, large: ObservedCall) -> list[str]:
    """The argument that holds the image, if none is seen to grow: an image whose tokens the model makes, of a single size."""

    def sizes(seen: ObservedCall) -> dict[str, list[tuple[int, ...]]]:
        return {name: [x.shape for x in tensors_of(value)] for name, value in seen.inputs.items()}

    before = sizes(small)
    if before != sizes(large):
        return []
    most = max((len(shape) for name in small.sources for shape in before[name]), default=0)
    return [name for name in small.sources if any(len(shape) == most for shape in before[name])]


# Names of arguments that change from step to step, or with how a model is guided.
_OF_TIME = re.compile(r"^[trs]$|time|step|sigma|noise|guidance|scale|alpha")


def _kind_of(tensors: list[Seen], *, in_list: bool) -> str | None:
    floating = [len(x.shape) + in_list for x in tensors if x.dtype.is_floating_point]
    if any(dims >= 3 for dims in floating):
        return "sequence"
    if any(x.dtype.is_floating_point and len(x.shape) == 2 and x.shape[1] > 1 for x in tensors):
        return "embedding"
    return "label" if any(not x.dtype.is_floating_point for x in tensors) else None


def _hand_over(call: ModuleCall, following: ModuleCall, streams: tuple[str, ...]) -> bool:
    handed = [following.given.get(name) for name in streams]
    return [getattr(one, "identity", None) for one in handed] == [one.identity for one in tensors_of(call.returned)]


def is_chained(calls: list[ModuleCall], streams: tuple[str, ...]) -> bool:
    """Whether the model only hands the streams on, and gives each block the same other arguments."""
    rest = [_identities({k: v for k, v in call.given.items() if k not in streams}) for call in calls]
    pairs = pairwise(calls)
    return all(one == rest[0] for one in rest) and all(_hand_over(one, other, streams) for one, other in pairs)


def _identities(given: Mapping[str, Any]) -> list[Any]:
    leaves = tree_leaves([value for _, value in sorted(given.items())])
    return [leaf.identity if isinstance(leaf, Seen) else repr(leaf) for leaf in leaves]


def cached_error(module: nn.Module, blocks: CachedBlocks, inputs: Mapping[str, Any]) -> float | None:
    """How far a call that skips blocks is from the same call that computes them; None if it skips none.

    Both have the same inputs, so nothing changes in between, and the cache is exact if it knows the blocks.
    """
    copy = with_same_weights(module)
    with torch.no_grad():
        expected = module(**fresh(inputs))
        apply_cache(copy, blocks, residual_diff_threshold=_ALWAYS)
        for _ in range(2):
            out = copy(**fresh(inputs))
    if not any(row.hit for row in model_cache_report(copy).rows):
        return None
    return error_of(out, expected)


def error_of(out: Any, expected: Any) -> float:
    """The largest ``‖out − expected‖ / ‖expected‖`` of all tensors; infinite where they differ in shape or are no numbers."""
    pairs = zip(_tensors(out), _tensors(expected), strict=True)
    errors = [
        float(((x.double() - y.double()).norm() / y.double().norm().clamp(min=1e-30)).nan_to_num(nan=torch.inf))
        if x.shape == y.shape
        else torch.inf
        for x, y in pairs
    ]
    return max(errors, default=torch.inf)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, torch.Tensor):
        return [value]
    return [x for one in value for x in _tensors(one)] if isinstance(value, (list, tuple)) else []
