"""First Block Cache in a compiled graph, where skippable blocks are in a branch of ``torch.cond``.

There is one ``cond`` for all blocks of a group if the model does nothing between them, otherwise one per
block, all with the same predicate. A graph cannot look up the state of a CFG branch; if the calls of several
branches share one, all of them are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from para_core.cache.blocks import BlockRole, as_tuple
from para_core.cache.call_digest import CallDigest, digest_of
from para_core.cache.cond import GroupBlocks, Streams, cond
from para_core.cache.decision import force_if_mixed

if TYPE_CHECKING:
    from para_core.cache.block_cache import BlockCache


def _return_unchanged(values: Tensor) -> Tensor:
    return values


class GraphForm:
    """The part of ``cache`` that runs while a graph is traced, with its state of the current call."""

    def __init__(self, cache: BlockCache) -> None:
        self.cache = cache
        self._groups = []
        for index in range(len(cache.blocks.groups)):
            blocks = [block for block, role in cache.roles if role.skipped and role.group == index]
            self._groups.append(GroupBlocks(blocks))
        self.forget()

    def forget(self) -> None:
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

    def compare(self, arguments: Mapping[str, Any]) -> None:
        """Compare a call that the graph makes with the last call of the state, which may have been another branch's."""
        cache = self.cache
        device = cache.device_of(arguments)
        now = digest_of(arguments, cache.conditions, cache.clocks, device)
        last = cache.state.last_call
        mixed = None
        if last is None:
            cache.state.last_call = now
        elif last.conditions.shape == now.conditions.shape and last.clock.shape == now.clock.shape:
            agree = cache.agreement(device)
            if agree is None:
                agree = _return_unchanged
            mixed = last.update(now, agree)
        else:
            mixed = torch.ones_like(now.mixed)
            cache.state.last_call = CallDigest(now.conditions, now.clock, mixed)
        self._mixed = mixed

    def params(self) -> Tensor:
        """Return the numbers by which the step is decided, as a tensor on the device."""
        params = self.cache.params_on_device
        if self._mixed is None:
            return params
        return force_if_mixed(params, self._mixed)

    def copy_to_host(self, skip: Tensor) -> Tensor:
        """Return the decision ``skip`` on the CPU, copied once, because otherwise every torch.cond would wait
        for the device.
        """
        self._skip_on_device = skip
        return skip.to("cpu")

    def run_block(
        self,
        role: BlockRole,
        block: nn.Module,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Return the output of one block, which a ``torch.cond`` runs or skips."""
        given = role.given(args, kwargs)
        inputs = role.tensors(given)
        if role.chained and not self.cache.unchained[role.group] and not role.has_fields(given):
            return role.as_output(given, self._run_group(role, inputs, args, kwargs))
        blocks = self._groups[role.group]

        def compute() -> Streams:
            return role.check_outputs(block, inputs, blocks.call(block, call, *args, **kwargs))

        if role.exits:
            return role.as_output(given, self._end_group(role, inputs, compute))

        def allocate() -> Streams:
            # The values are not used, because the last block of the group replaces the outputs of skipped
            # blocks.
            return tuple([x.new_empty(x.shape) for x in inputs])

        return role.as_output(
            given, cond(self.cache.skip, allocate, compute, list(range(len(inputs))), inputs)
        )

    def _run_group(
        self, role: BlockRole, inputs: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Streams:
        """Return the streams of one block in a graph in which one ``torch.cond`` runs or skips the whole
        group.

        The call of the group's first block contains this ``cond``. The calls of the other blocks return their
        inputs.
        """
        if not role.enters:
            before = self._outputs[role.group] or (None,) * len(inputs)
            # Use a list, not a generator: Dynamo 2.13 evaluates a generator beyond the item at which all()
            # stops.
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
                values = as_tuple(call(*positional, **named))
            return values

        outputs = self._end_group(role, inputs, compute)
        if not role.exits:
            self._outputs[role.group] = outputs
        return outputs

    def _end_group(self, role: BlockRole, inputs: Streams, compute: Callable[[], Streams]) -> Streams:
        """Return the output of a block group, computed or forecast, and store its residual if computed."""
        cache = self.cache
        residuals = cache.state.groups[role.group]
        present = [i for i, history in enumerate(residuals.histories) if history is not None]
        outputs = cond(cache.skip, lambda: cache.forecast(role), compute, present, inputs)
        residuals.store_unless(self._skip_on_device, cache.entries[role.group] or (), outputs)
        return outputs
