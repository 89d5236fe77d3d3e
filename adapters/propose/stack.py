"""Guess the block stack of a model, which First Block Cache needs.

One call shows the blocks and their streams. Whether an optional argument changes the streams between blocks,
or the blocks that run, shows when the model is called without any optional argument, and then with each one
alone.

A guess may be wrong. :mod:`para_core.adapters.propose.completion`, the only caller, takes the first one with
which a cached call with all of its arguments is exact. Tests: tests/adapters/propose/test_structures.py.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from para_core.adapters.propose.block_groups import guess_blocks, is_chained
from para_core.adapters.propose.conditions import guess_conditions
from para_core.adapters.propose.observe import observe
from para_core.adapters.propose.records import ObservedCall
from para_core.adapters.propose.region import ObservedRegion
from para_core.cache.blocks import CachedBlocks
from para_core.comparison.cached_call import CachedCallError, error_of_cached_call
from para_core.instance.private_class import original_class

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StackGuess:
    """A guess of the block stack, the arguments of a call in which it can be cached, and reasons as
    sentences.
    """

    blocks: CachedBlocks
    inputs: Mapping[str, Any]
    reasons: tuple[str, ...] = ()


def guess_stacks(
    module: nn.Module, region: ObservedRegion, inputs: Mapping[str, Any], tolerance: float
) -> Iterator[StackGuess]:
    """Yield guesses of the block stack, the likeliest first.

    Args:
        module: The model.
        region: Its region, observed with all arguments.
        inputs: The arguments of the smaller call.
        tolerance: A call that skips blocks counts as exact if its relative error is smaller.
    """
    blocks = guess_blocks(region)
    if blocks is not None and all(group.chained for group in blocks.groups):
        yield StackGuess(blocks, inputs)
        yield from _guess_optional(module, region, inputs, tolerance)
        return
    # The model changes its streams between blocks. Perhaps an optional argument does, so try that first.
    yield from _guess_optional(module, region, inputs, tolerance)
    if blocks is not None:
        yield StackGuess(blocks, inputs)


def _guess_optional(
    module: nn.Module, region: ObservedRegion, inputs: Mapping[str, Any], tolerance: float
) -> Iterator[StackGuess]:
    """Yield the block stack of a call without optional arguments, if one of these changes what is cached.

    It lists the arguments with which the model changes streams between blocks (``between``), and those with
    which other blocks run or a cached call is not exact (``uncached``).
    """
    conditions = guess_conditions(region.small, region.large)
    plain = _leave_out(module, region, inputs, _optional_arguments(module, inputs, conditions))
    if plain is None:
        return
    # The larger call of this region still has all arguments, so the two calls are no longer one part in two sizes,
    # which ObservedRegion promises. Of guess_blocks, only the conditions compare them: take those from above.
    blocks = guess_blocks(replace(region, small=plain.observed))
    if blocks is None:
        return
    probe = _Probe(module, region, replace(blocks, conditions=conditions), plain, tolerance)
    effects = {name: probe.effect_of(name, inputs[name]) for name in plain.left_out}
    uncached = tuple(name for name, effect in effects.items() if effect.is_uncached)
    between = {name: effect.between for name, effect in effects.items() if effect.between}
    if not uncached and not between:
        return
    yield StackGuess(
        replace(_with_between(probe.blocks, between), uncached=uncached),
        {name: value for name, value in inputs.items() if name not in uncached},
        tuple([reason for effect in effects.values() for reason in effect.reasons]),
    )


def _optional_arguments(module: nn.Module, inputs: Mapping[str, Any], conditions: Sequence[str]) -> list[str]:
    """Return the names of ``inputs`` that have a default in ``forward`` and are no conditions.

    Booleans and strings are left out, because they decide what the model returns; and None, which models take
    for no argument.
    """
    parameters = inspect.signature(original_class(module).forward).parameters  # type: ignore[attr-defined]
    optional = []
    for name, value in inputs.items():
        has_default = name in parameters and parameters[name].default is not inspect.Parameter.empty
        if has_default and name not in conditions and not isinstance(value, (bool, str, type(None))):
            optional.append(name)
    return optional


@dataclass(frozen=True)
class _PlainCall:
    """A call without the optional arguments ``left_out``: its arguments, and its record."""

    inputs: Mapping[str, Any]
    observed: ObservedCall
    left_out: tuple[str, ...]


def _leave_out(
    module: nn.Module, region: ObservedRegion, inputs: Mapping[str, Any], optional: Sequence[str]
) -> _PlainCall | None:
    """Return the call without the ``optional`` arguments that the model can do without; None if it can do
    without none of them alone.

    They are tried one after the other, in the order of ``optional``. An argument that can only go together
    with a later one stays. The arguments that stay are in all calls that are compared, and so are not probed.
    """
    plain = None
    for name in optional:
        earlier = inputs if plain is None else plain.inputs
        fewer = {key: value for key, value in earlier.items() if key != name}
        observed = _observe_or_none(module, region, fewer)
        if observed is not None:
            left_out = () if plain is None else plain.left_out
            plain = _PlainCall(fewer, observed, (*left_out, name))
    return plain


@dataclass(frozen=True)
class _Effect:
    """The effect of an optional argument on a call.

    Args:
        between: Indices of the groups between whose blocks the model changes the streams.
        is_uncached: Whether a call with the argument cannot be cached.
        reasons: The reasons as sentences.
    """

    between: tuple[int, ...] = ()
    is_uncached: bool = False
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Probe:
    """Calls of a model with one optional argument, which are compared with the ``plain`` call, whose blocks
    are these.

    A call that skips blocks counts as exact if its relative error is below ``tolerance``.
    """

    module: nn.Module
    region: ObservedRegion
    blocks: CachedBlocks
    plain: _PlainCall
    tolerance: float

    def effect_of(self, name: str, value: Any) -> _Effect:
        """Return what the optional argument ``name`` with this ``value`` changes: nothing, if the model
        cannot be called with it alone.
        """
        inputs = {**self.plain.inputs, name: value}
        observed = _observe_or_none(self.module, self.region, inputs)
        if observed is None:
            # The effect is unknown. The caller of guess_stacks checks the guess in a call with all arguments.
            return _Effect()
        if _block_order(observed, self.blocks) != _block_order(self.plain.observed, self.blocks):
            reason = f"{name}: it changes which blocks run, so calls with it are not cached."
            return _Effect(is_uncached=True, reasons=(reason,))
        between = self._changed_groups(observed)
        try:
            blocks = _with_between(self.blocks, {name: between})
            error_of_cached_call(self.module, blocks, inputs, self.tolerance)
        except CachedCallError as error:
            reason = f"{name}: with it {error}, so calls with it are not cached."
            return _Effect(is_uncached=True, reasons=(reason,))
        reasons = []
        for index in between:
            lists = " and ".join(self.blocks.groups[index].lists)
            reasons.append(f"{name}: with it, the model changes the streams between the blocks of {lists}.")
        return _Effect(between, reasons=tuple(reasons))

    def _changed_groups(self, observed: ObservedCall) -> tuple[int, ...]:
        """Return the indices of the groups that are chained in the plain call, but not in the ``observed``
        one.
        """
        changed = []
        for index, group in enumerate(self.blocks.groups):
            calls = [call for name in group.lists for call in observed.calls_in_list(name)]
            if group.chained and not is_chained(calls, group.streams):
                changed.append(index)
        return tuple(changed)


def _observe_or_none(
    module: nn.Module, region: ObservedRegion, inputs: Mapping[str, Any]
) -> ObservedCall | None:
    """Return the record of a call with ``inputs``; None if the model fails, or leaves out the start of ``region``."""
    try:
        observed = observe(module, inputs, region.start.block, region.start.streams)
    # The model may raise anything if an argument that it needs, and so belongs to every call, is missing.
    except Exception as error:
        logger.debug("%s cannot be called with %s alone: %s", type(module).__name__, ", ".join(inputs), error)
        return None
    if all(call.name != region.start.block for call in observed.calls):
        return None
    return observed


def _block_order(observed: ObservedCall, blocks: CachedBlocks) -> list[str]:
    lists = [name for group in blocks.groups for name in group.lists]
    return [call.name for call in observed.calls if call.block_list in lists]


def _with_between(blocks: CachedBlocks, between: Mapping[str, Sequence[int]]) -> CachedBlocks:
    """Return ``blocks`` with these arguments as ``between`` of the groups with these indices."""
    groups = []
    for index, group in enumerate(blocks.groups):
        names = [name for name, indices in between.items() if index in indices]
        groups.append(replace(group, between=tuple(names)))
    return replace(blocks, groups=tuple(groups))
