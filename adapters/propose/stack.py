"""Derive the block stack of a model, which First Block Cache needs, from its observed calls.

The optional arguments that change the block stack are found by calling the model without each of them.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise
from typing import Any

import torch
from torch import nn

from para_core.adapters.propose.candidates import ObservedRegion, streams_of
from para_core.adapters.propose.observe import ModuleCall, ObservedCall, TensorRecord, observe, tensors_of
from para_core.cache.apply import apply_cache, model_cache_report, require_cache
from para_core.cache.blocks import BlockGroup, CachedBlocks
from para_core.cache.decision import Step
from para_core.instance.private_class import original_class
from para_core.torch_internals import tree_leaves
from para_core.verify.parts import largest_error
from para_core.verify.virtual_ranks import fresh, with_same_weights

logger = logging.getLogger(__name__)


def guess_blocks(region: ObservedRegion) -> CachedBlocks | None:
    """Return the block stack of the observed model: the module lists from the start of ``region`` that call attention.

    Return None if there is no such list, or if a block returns a tensor that updates none of its parameters.
    """
    began = region.calls()[0][0].began
    groups: list[BlockGroup] = []
    previous: list[ModuleCall] = []
    for name in dict.fromkeys(call.block_list for call in region.small.calls if call.block_list is not None):
        calls = region.small.of_list(name)
        # A list in which nothing calls attention holds modules that are no transformer blocks, such as norms.
        if calls[0].began < began or not region.small.attends(calls[0].began, calls[-1].ended):
            continue
        streams = _parameters(streams_of(calls))
        if not all(streams):
            return None
        measured = next((name for name in map(_parameter, region.start.streams) if name in streams), streams[0])
        # The dim of the samples in the streams is 1 for [S, B, C], and 0 otherwise.
        samples = int(region.start.dim == 0 and region.samples() is not None)
        group = BlockGroup((name,), streams, measured, chained=is_chained(calls, streams), samples=samples)
        if groups and groups[-1].streams == streams and _passes_on(previous[-1], calls[0], streams):
            chained = groups[-1].chained and group.chained and is_chained([previous[-1], calls[0]], streams)
            groups[-1] = replace(groups[-1], lists=(*groups[-1].lists, name), chained=chained)
        else:
            groups.append(group)
        previous = calls
    return CachedBlocks(tuple(groups), conditions=conditions_of(region.small, region.large)) if groups else None


def conditions_of(small: ObservedCall, large: ObservedCall) -> tuple[str, ...]:
    """Return the names of the arguments that distinguish CFG branches.

    These are sequences (text); if there are none, embeddings with one vector per sample; if there are none either,
    labels. Left out are arguments that grow with the tokens, and vectors and numbers whose names suggest a time step.
    """
    kinds: dict[str, list[str]] = {"sequence": [], "embedding": [], "label": []}
    sample = _image_arguments(small, large)
    for name, value in small.inputs.items():
        if name in sample:
            continue
        pairs = [*zip(tensors_of(value), tensors_of(large.inputs.get(name)), strict=False)]
        fixed = [record for record, larger in pairs if record.shape == larger.shape]
        # A list holds one tensor per sample, without the batch dim, so its tensors have one dim fewer.
        in_list = isinstance(value, (list, tuple))
        floating = [x.shape for x in fixed if x.dtype.is_floating_point]
        if any(len(shape) + in_list >= 3 for shape in floating):
            kinds["sequence"].append(name)
        elif not _TIME_NAME.search(name) and any(len(shape) == 2 and shape[1] > 1 for shape in floating):
            kinds["embedding"].append(name)
        elif not _TIME_NAME.search(name) and len(floating) < len(fixed):
            kinds["label"].append(name)
    return tuple(next((names for names in kinds.values() if names), []))


def _image_arguments(small: ObservedCall, large: ObservedCall) -> list[str]:
    """Return the names of the arguments that hold the image if both calls have equal shapes; otherwise ``[]``.

    The calls have equal shapes if the model accepts one image size only. Of the arguments from which the tokens were
    computed, those with the most dims hold the image.
    """

    def sizes(observed: ObservedCall) -> dict[str, list[tuple[int, ...]]]:
        return {name: [x.shape for x in tensors_of(value)] for name, value in observed.inputs.items()}

    shapes = sizes(small)
    if shapes != sizes(large):
        return []
    most = max((len(shape) for name in small.sources for shape in shapes[name]), default=0)
    return [name for name in small.sources if any(len(shape) == most for shape in shapes[name])]


# Matches names of arguments that change between steps, or with the strength of guidance.
_TIME_NAME = re.compile(r"^[trs]$|time|step|sigma|noise|guidance|scale|alpha")


def _parameter(name: str) -> str:
    """Return the parameter of the argument ``name``, which may be the path of a field."""
    return name.partition(".")[0]


def _parameters(streams: tuple[str, ...]) -> tuple[str, ...]:
    """Return the parameters of ``streams``, with one entry for all fields of a dataclass, which the cache names."""
    kept = [stream for i, stream in enumerate(streams) if _parameter(stream) not in map(_parameter, streams[:i])]
    return tuple(_parameter(stream) for stream in streams if "." not in stream or stream in kept)


def _passes_on(call: ModuleCall, following: ModuleCall, streams: tuple[str, ...]) -> bool:
    by_stream = [[x for name, x in following.arguments.items() if _parameter(name) == stream] for stream in streams]
    received = [x.identity for values in by_stream for x in tensors_of(values)]
    return received == [x.identity for x in tensors_of(call.output)]


def is_chained(calls: list[ModuleCall], streams: tuple[str, ...]) -> bool:
    """Whether the model only passes the streams from block to block, with equal other arguments for all blocks."""
    values = [
        [value for name, value in sorted(call.arguments.items()) if _parameter(name) not in streams] for call in calls
    ]
    others = [
        [x.identity if isinstance(x, TensorRecord) else repr(x) for x in tree_leaves(of_call)] for of_call in values
    ]
    passed_on = all(_passes_on(call, following, streams) for call, following in pairwise(calls))
    return passed_on and all(other == others[0] for other in others)


def cached_error(module: nn.Module, blocks: CachedBlocks, inputs: Mapping[str, Any], tolerance: float) -> float | str:
    """Return the relative error of a call that skips ``blocks``, or as the end of a sentence why it is not exact.

    The model is called twice with the same inputs. The first-block residual has then not changed, so the second output
    equals that of the uncached model if ``blocks`` describes the model correctly.
    """
    copy = with_same_weights(module)
    with torch.no_grad():
        expected = module(**fresh(inputs))
        try:
            # Any positive threshold would do: calls with equal inputs have equal residuals.
            apply_cache(copy, blocks, residual_diff_threshold=0.5)
            cache = require_cache(copy)
            for step in range(2):
                # The step is said, because calls with equal inputs look like two calls of one step.
                arguments = fresh(inputs)
                call = partial(original_class(copy).__call__, copy, **arguments)
                out = cache.run(call, arguments, lambda _: Step(), moment=step)
            error = largest_error(out, expected)
        # With a wrong block stack the cached model may raise anything, which means that the guess is wrong.
        except Exception as failure:
            return f"fails ({type(failure).__name__}: {failure})"
    skipped = any(row.hit for row in model_cache_report(copy).rows)
    return error if skipped and error < tolerance else "is not exact"


@dataclass(frozen=True)
class StackGuess:
    """A guess of the block stack, the arguments of a call in which it can be cached, and reasons as sentences."""

    blocks: CachedBlocks
    inputs: Mapping[str, Any]
    reasons: tuple[str, ...] = ()


def stacks(
    module: nn.Module, region: ObservedRegion, inputs: Mapping[str, Any], tolerance: float
) -> Iterator[StackGuess]:
    """Yield guesses of the block stack, the likeliest first. ``inputs`` are those of the smaller call.

    A call that skips blocks counts as exact if its relative error is below ``tolerance``.
    """
    guess = guess_blocks(region)
    is_chained_guess = guess is not None and all(group.chained for group in guess.groups)
    guesses = [] if guess is None else [StackGuess(guess, inputs)]
    others = _without_options(module, region, inputs, tolerance)
    yield from chain(guesses, others) if is_chained_guess else chain(others, guesses)


def _without_options(
    module: nn.Module, region: ObservedRegion, inputs: Mapping[str, Any], tolerance: float
) -> Iterator[StackGuess]:
    """Yield the block stack of a call without optional arguments, if it can be guessed.

    It lists the optional arguments with which the model changes tokens between blocks (``between``), and those with
    which other blocks run or a cached call is not exact (``uncached``).
    """
    conditions = conditions_of(region.small, region.large)
    # Optional arguments have a default in ``forward``. Booleans and strings decide what the model returns.
    parameters = inspect.signature(original_class(module).forward).parameters  # type: ignore[attr-defined]
    defaults = {name for name, x in parameters.items() if x.default is not inspect.Parameter.empty} - {*conditions}
    optional = [name for name, x in inputs.items() if name in defaults and not isinstance(x, (bool, str, type(None)))]
    plain, observed = dict(inputs), None
    left_out = []
    for name in optional:
        fewer = {key: value for key, value in plain.items() if key != name}
        observed_fewer = _observe_or_none(module, region, fewer)
        if observed_fewer is not None:
            plain, observed = fewer, observed_fewer
            left_out.append(name)
    blocks = None if observed is None else guess_blocks(replace(region, small=observed))
    if blocks is None or observed is None:
        return
    blocks = replace(blocks, conditions=conditions)
    between: dict[int, list[str]] = {}
    uncached, reasons = [], []
    for name in left_out:
        alone = {**plain, name: inputs[name]}
        with_it = _observe_or_none(module, region, alone)
        if with_it is None:
            continue
        if _block_order(with_it, blocks) != _block_order(observed, blocks):
            uncached.append(name)
            reasons.append(f"{name}: it changes which blocks run, so calls with it are not cached.")
            continue
        indices = [
            i
            for i, group in enumerate(blocks.groups)
            if group.chained
            and not is_chained([call for name in group.lists for call in with_it.of_list(name)], group.streams)
        ]
        with_between = _with_between(blocks, {i: [name] for i in indices})
        problem = cached_error(module, with_between, alone, tolerance)
        if isinstance(problem, str):
            uncached.append(name)
            reasons.append(f"{name}: with it a call that skips blocks {problem}, so calls with it are not cached.")
            continue
        for i in indices:
            between.setdefault(i, []).append(name)
            lists = " and ".join(blocks.groups[i].lists)
            reasons.append(f"{name}: with it, the model changes the streams between the blocks of {lists}.")
    if between or uncached:
        stack = replace(_with_between(blocks, between), uncached=tuple(uncached))
        cached = {name: value for name, value in inputs.items() if name not in uncached}
        yield StackGuess(stack, cached, tuple(reasons))


def _observe_or_none(module: nn.Module, region: ObservedRegion, inputs: Mapping[str, Any]) -> ObservedCall | None:
    try:
        return observe(module, inputs, region.start.block, region.start.streams)
    # The model may raise anything if an argument that it needs, and so belongs to every call, is missing.
    except Exception as error:
        logger.debug("%s cannot be called with %s alone: %s", type(module).__name__, ", ".join(inputs), error)
        return None


def _block_order(observed: ObservedCall, blocks: CachedBlocks) -> list[str]:
    lists = [name for group in blocks.groups for name in group.lists]
    return [call.name for call in observed.calls if call.block_list in lists]


def _with_between(blocks: CachedBlocks, between: Mapping[int, Sequence[str]]) -> CachedBlocks:
    groups = [replace(group, between=tuple(between.get(i, ()))) for i, group in enumerate(blocks.groups)]
    return replace(blocks, groups=tuple(groups))
