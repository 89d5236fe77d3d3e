"""First Block Cache in a compiled graph, where skippable blocks are in a branch of ``torch.cond``.

There is one ``cond`` for all blocks of a group if the model does nothing between them, otherwise one per
block, all with the same predicate. A graph cannot look up the state of a CFG branch; if the calls of several
branches share one, all of them are computed.

A feature of :mod:`.registry`: :mod:`.block_cache` and :mod:`.block_run` call it as ``cache.traced``. The
model's hook calls ``begin_call`` and ``end_call`` around a call in eager code; if the hook is in the graph
too, it calls ``enter``. Inside the graph ``begin`` or ``decide`` comes before any ``run_block``. Tests:
tests/cache/test_graph.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from para_core.cache.block_roles import BlockRole
from para_core.cache.branch_search import Agree
from para_core.cache.call_digest import CallDigest, digest_call
from para_core.cache.cond import GroupBlocks, cond
from para_core.cache.decision import DecisionInput, DecisionOutcome
from para_core.cache.graph_decision import TensorDecider, force_if_mixed, limits_of
from para_core.cache.registry import register_traced_form
from para_core.cache.residuals import CacheState, Residuals
from para_core.cache.streams import Streams, as_output_tuple

if TYPE_CHECKING:
    from para_core.cache.block_cache import BlockCache


def _return_unchanged(values: Tensor) -> Tensor:
    return values


class GraphForm:
    """The part of ``cache`` that runs while a graph is traced, with its state of the current call."""

    def __init__(self, cache: BlockCache) -> None:
        self.cache = cache
        parameter = next(cache.module.parameters(), None)
        device = torch.device("cpu")
        if parameter is not None:
            device = parameter.device
        # For each block group, whether the model may compute something between its blocks in the current
        # call.
        self._unchained = [not group.chained for group in cache.blocks.groups]
        self._limits = limits_of(cache.options)
        # The numbers of the current step as one tensor, because a graph reads them from the device.
        self.numbers: Tensor
        self.begin_call({}, device)
        self._groups = []
        for index in range(len(cache.blocks.groups)):
            blocks = [block for block, role in cache.roles if role.skipped and role.group == index]
            self._groups.append(GroupBlocks(blocks))
        self.reset()

    def reset(self) -> None:
        """Drop the state of the current call."""
        # A list whose items are set, because Dynamo 2.13 loses the new value of an attribute that is set
        # after torch.cond.
        self._outputs: list[Streams | None] = [None] * len(self._groups)
        # In a graph that identifies no branches, a tensor that is 1 if calls of several branches share the
        # state.
        self._mixed: Tensor | None = None
        self._skip_on_device: Any = None

    def refresh(self) -> None:
        """Search the blocks again for quantized weights, because the user may have quantized some in the meantime."""
        for group in self._groups:
            group.refresh()

    def begin_call(self, arguments: Mapping[str, Any], device: torch.device) -> None:
        """Set the :class:`StepNumbers` that graphs read in an eager call of the model with ``arguments``."""
        cache = self.cache
        # Create a new tensor instead of overwriting the previous tensor, which the device may still have to
        # read, and copy it without waiting.
        step = cache.step
        # In the order of StepNumbers. The verdict 0, HIT, is never forced.
        numbers = [float(step.forced or 0), step.time, step.index, step.total, cache.threshold, *self._limits]
        self.numbers = torch.tensor(numbers, dtype=torch.float64).to(device, non_blocking=True)
        self._find_unchained(arguments)

    def _find_unchained(self, arguments: Mapping[str, Any]) -> None:
        """Note the block groups between whose blocks the model computes something in a call with ``arguments``."""
        for index, group in enumerate(self.cache.blocks.groups):
            self._unchained[index] = not group.chained
            for name in group.between:
                self._unchained[index] = self._unchained[index] or arguments.get(name) is not None

    def end_call(self, is_first: bool) -> None:
        """Clone the tensors that graphs returned in an eager call, because the next replay of a CUDA graph
        overwrites them. ``is_first`` is whether the call began the state of its branch.
        """
        values: list[Any] = list(self.cache.outcome)
        for index, value in enumerate(values):
            if isinstance(value, Tensor):
                values[index] = value.clone()
        self.cache.outcome = DecisionOutcome(*values)
        if is_first:
            leave_graph(self.cache.state)

    def enter(self, arguments: Mapping[str, Any]) -> None:
        """Compare a call that the graph makes with the last call of the state, which may have been another
        branch's.

        Collective if each rank has only its part of the arguments. The result, which :meth:`decide` uses,
        forces the step to be computed if the calls of several branches share the state.
        """
        cache = self.cache
        cache.entries = None
        self._find_unchained(arguments)
        device = cache.device_of(arguments)
        now = digest_call(arguments, cache.conditions, cache.clocks, device)
        last = cache.state.last_call
        mixed = None
        if last is None:
            cache.state.last_call = now
        elif last.conditions.shape == now.conditions.shape and last.clock.shape == now.clock.shape:
            agree: Agree = _return_unchanged
            if cache.arguments_are_parts:
                agree = cache.agreement(device)
            mixed = last.update(now, agree)
        else:
            mixed = torch.ones_like(now.mixed)
            cache.state.last_call = CallDigest(now.conditions, now.clock, mixed)
        self._mixed = mixed

    def begin(self, inputs: DecisionInput) -> TensorDecider:
        """Return the decider of a branch that begins with this call."""
        return TensorDecider(inputs, self._current_numbers())

    def decide(self, inputs: DecisionInput) -> None:
        """Decide the step with tensors, by the decider of the current branch."""
        cache = self.cache
        skip, cache.outcome = cache.state.decider.decide(inputs, self._current_numbers())
        self._skip_on_device = skip
        # Copy the decision to the host once, because otherwise every torch.cond would wait for the device.
        cache.skip = skip.to("cpu")

    def _current_numbers(self) -> Tensor:
        """Return the :class:`StepNumbers`, which force the step to be computed if branches share the state."""
        if self._mixed is None:
            return self.numbers
        return force_if_mixed(self.numbers, self._mixed)

    def run_block(
        self,
        role: BlockRole,
        block: nn.Module,
        entries: Streams,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Return the output of one block, which a ``torch.cond`` runs or skips."""
        streams = role.read(args, kwargs)
        inputs = streams.tensors
        if role.chained and not self._unchained[role.group] and streams.are_plain:
            return role.as_output(streams, self._run_group(role, inputs, entries, args, kwargs))
        blocks = self._groups[role.group]

        def compute() -> Streams:
            return role.require_outputs(block, inputs, blocks.call(block, call, *args, **kwargs))

        if role.exits:
            return role.as_output(streams, self._end_group(role, inputs, entries, compute))

        def allocate() -> Streams:
            # The values are not used, because the last block of the group replaces the outputs of skipped
            # blocks.
            return tuple([None if x is None else x.new_empty(x.shape) for x in inputs])

        present = [i for i, x in enumerate(inputs) if x is not None]
        outputs = cond(self.cache.skip, allocate, compute, present, inputs)
        return role.as_output(streams, outputs)

    def _run_group(
        self,
        role: BlockRole,
        inputs: tuple[Any, ...],
        entries: Streams,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Streams:
        """Return the streams of one block in a graph in which one ``torch.cond`` runs or skips the whole
        group.

        The call of the group's first block contains this ``cond``. The calls of the other blocks return their
        inputs.
        """
        if not role.enters:
            before = self._outputs[role.group] or (None,) * len(inputs)
            # Compare by identity: if the model passes on what the group's first block returned, nothing else
            # has run in between. Use a list, not a generator: Dynamo 2.13 evaluates a generator beyond the
            # item at which all() stops.
            if not all([x is y for x, y in zip(inputs, before, strict=True)]):  # noqa: C419
                raise RuntimeError(
                    f"{type(self.cache.module).__name__} does something between the blocks of "
                    f"{self.cache.blocks.groups[role.group].lists}. Name the arguments that make it do so in "
                    "BlockGroup(between=...), or leave chained= out."
                )
            if role.exits:
                self._outputs[role.group] = None
            return inputs
        streams = role.streams
        indices = [streams.index(name) if name in streams else None for name in role.parameters[: len(args)]]

        def compute() -> Streams:
            values = inputs
            for call in self._groups[role.group]:
                positional = [
                    x if index is None else values[index] for index, x in zip(indices, args, strict=False)
                ]
                named = {
                    name: values[streams.index(name)] if name in streams else x for name, x in kwargs.items()
                }
                values = as_output_tuple(call(*positional, **named))
            return values

        outputs = self._end_group(role, inputs, entries, compute)
        if not role.exits:
            self._outputs[role.group] = outputs
        return outputs

    def _end_group(
        self, role: BlockRole, inputs: Streams, entries: Streams, compute: Callable[[], Streams]
    ) -> Streams:
        """Return the output of a block group, computed or forecast, and store its residual if computed."""
        cache = self.cache
        residuals = cache.state.groups[role.group]
        present = [i for i, history in enumerate(residuals.histories) if history is not None]

        def forecast() -> Streams:
            weights = cache.state.decider.weights(cache.options, self.numbers)
            return residuals.forecast(entries, weights)

        outputs = cond(cache.skip, forecast, compute, present, inputs)
        _store_unless(self._skip_on_device, residuals, entries, outputs)
        return outputs


def _store_unless(skip: Tensor, residuals: Residuals, entries: Streams, outputs: Streams) -> None:
    """Store the residual ``outputs - entries`` in place, unless the bool tensor ``skip`` is True."""
    for history, output, entry in zip(residuals.histories, outputs, entries, strict=True):
        if not history or output is None or entry is None:
            continue
        residual = output.detach() - entry.detach()
        for older, newer in zip(reversed(history[1:]), reversed(history[:-1]), strict=True):
            older.copy_(torch.where(skip, older, newer))
        history[0].copy_(torch.where(skip, history[0], residual))


def leave_graph(state: CacheState) -> None:
    """Clone all tensors of ``state`` that a graph returned, before the next replay of a CUDA graph overwrites
    them.

    This is needed once per branch and generation, because later calls of the graph change the clones in
    place.
    """
    state.decider.leave_graph()
    for group in state.groups:
        histories: list[list[Tensor] | None] = []
        for history in group.histories:
            if history is None:
                histories.append(None)
            else:
                histories.append([x.clone() for x in history])
        group.histories = histories


register_traced_form(GraphForm)
