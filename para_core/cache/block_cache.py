"""First Block Cache on one model, in eager code and in a compiled graph.

Each block gets a hook (:mod:`para_core.cache.attachment`). The hook of the first block measures the residual and
decides the step. The hooks of the other blocks run or skip their blocks. In a skipped step, the hook of the last block
of a group adds the stored residual to the input of the group. Computations of the model between its blocks (such as
residuals of a ControlNet) also run in skipped steps, but have no effect there, because the stored residual has them.

In a graph, skippable blocks are in a branch of ``torch.cond``: one ``cond`` for all blocks of a group if the model does
nothing between them, otherwise one per block, all with the same predicate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from para_core.cache.argument_values import is_clock
from para_core.cache.attachment import BlockHookHost, attach, detach, require_no_foreign_cache
from para_core.cache.blocks import BlockRole, CachedBlocks, as_tuple, roles_of, tensors_in
from para_core.cache.branches import MOST_BRANCHES, Agree, Branches, conditions_of
from para_core.cache.call_digest import CallDigest, digest_of
from para_core.cache.cond import GroupBlocks, Streams, cond
from para_core.cache.decision import (
    DecisionInput,
    DecisionOutcome,
    DecisionParams,
    NumberDecider,
    Step,
    TensorDecider,
    Verdict,
    blocks_before_deciding,
    forced_if_mixed,
)
from para_core.cache.options import CacheOptions
from para_core.cache.report import Readings, StepRecord, Stopwatch
from para_core.cache.residuals import CacheState
from para_core.distributed.collectives import all_gather
from para_core.distributed.mesh import SequenceMesh
from para_core.foreign_errors import is_data_dependent
from para_core.instance.private_class import original_class
from para_core.modes.unified import UnifiedAttnMode
from para_core.plans.current_call import attention_is_skipped, on_all_stages, ranks_sharing_samples
from para_core.plans.module_matching import parameters_of
from para_core.plans.region import mesh_of_plan
from para_core.torch_internals import function_mode_stack
from para_core.user_warnings import CacheWarning, WarningLog


class BlockCache:
    """The First Block Cache of one model with one set of options. Not thread-safe.

    Args:
        module: The model.
        blocks: The description of its block stack.
        options: The user's options.
        mesh: As in :func:`~para_core.cache.apply.apply_cache`.

    Raises:
        ValueError: The model does not have the blocks that ``blocks`` describes, no block would be skipped, or one of
            diffusers' own caches is enabled on the model.
    """

    def __init__(
        self, module: nn.Module, blocks: CachedBlocks, options: CacheOptions, mesh: SequenceMesh | None = None
    ) -> None:
        require_no_foreign_cache(module)
        self.module = module
        self.blocks = blocks
        self.options = options
        # The threshold may be changed at any time. Changing other options needs a new cache.
        self.threshold = options.residual_diff_threshold
        first_blocks = blocks_before_deciding(original_class(module).__name__, blocks, options)
        self.roles = roles_of(module, blocks, first_blocks, options.last_blocks)
        self._given_mesh = mesh
        self.mesh = mesh
        # Whether the hooks currently run all blocks, as without a cache.
        self.idle = False
        self._warnings = WarningLog()
        # The report needs the number of CFG branches in a batch, and the number of samples in it (0 if unknown).
        self.num_branches, self.batch = 1, 0
        # The name of the argument that made the last call run without the cache; None if the cache was used.
        self.uncached_by: str | None = None
        self._conditions = conditions_of(module, blocks)
        self._clocks = tuple(name for name in parameters_of(module) if is_clock(name))
        self._branches = self._new_branches()
        self.readings = Readings()
        self.step = Step()
        parameter = next(module.parameters(), None)
        device = torch.device("cpu") if parameter is None else parameter.device
        self.params = DecisionParams.of(self.step, options, self.threshold)
        # The values of self.params as one tensor, because a graph reads them from the device.
        self.params_on_device = self.params.tensor(device)
        # For each block group, whether the model may compute something between its blocks in the current call.
        self.unchained = [not group.chained for group in blocks.groups]
        self._group_blocks = [
            GroupBlocks([block for block, role in self.roles if role.skipped and role.group == index])
            for index in range(len(blocks.groups))
        ]
        self.outcome = DecisionOutcome(None, Verdict.WARMUP, 0, 1)
        self._forget_states()

    def attach(self) -> BlockHookHost:
        """Install the hooks if they are not installed, and return the object that holds them."""
        return attach(self.module, self.roles, self)

    def detach(self) -> None:
        """Remove this cache's hooks, unless another cache shares them, and drop its residuals."""
        self.reset()
        detach(self.module, self)

    def as_text(self) -> dict[str, str]:
        """Return all options, with the current threshold, as ``{name: text}``, which ranks can compare."""
        return self.options.as_text(self.threshold)

    def run(
        self,
        call: Callable[[], Any],
        arguments: Mapping[str, Any],
        step_of: Callable[[str], Step],
        moment: int | None = None,
    ) -> Any:
        """Run one call of the model with the cache, and return its output. The model or its blocks may be compiled.

        ``call()`` calls the model with ``arguments``, by name. ``step_of(branch)`` returns the position of the call of
        this CFG branch in the schedule. ``moment`` changes from step to step; None if only the arguments can tell.

        Raises:
            RuntimeError: The model already runs with this cache, two calls of one step were taken for one branch, or
                the user's policy function branches on values of tensors, so it cannot be compiled.
        """
        if getattr(self.module, "_cache_config", None) is not None:
            require_no_foreign_cache(self.module)
        host = self.attach()
        if host.running is not None:
            raise RuntimeError(
                f"this {type(self.module).__name__} with a cache is already running, probably in another thread. Both "
                "would use the same cache. Use one thread, or a copy of the model for each."
            )
        self.uncached_by = next((name for name in self.blocks.uncached if arguments.get(name) is not None), None)
        if self.uncached_by is not None:
            with self.paused():
                return call()
        self.find_mesh()
        device = next((x.device for x in arguments.values() if isinstance(x, Tensor)), self.params_on_device.device)
        branch, repeated, begins = self._branches.identify(arguments, host.branch, moment, self._agreement(device))
        if branch is None:
            self.reset_states()
            self._warnings.warn("branches", self._branches.why_unknown(), CacheWarning)
            with self.paused():
                return call()
        # Ask for the step before looking up the state: for the first call of a section of a video, step_of() resets the
        # cache.
        step = step_of(branch)
        if repeated:
            step = replace(step, forced=Verdict.REPEATED)
        state = self.state_of(branch)
        signature = tuple((name, *_form(x)) for name, x in tensors_in(sorted(arguments.items())))
        if begins or state.signature != signature:
            state.clear()
            state.signature = signature
        self.state, self.step = state, step
        self.unchained = [
            not group.chained or any(arguments.get(name) is not None for name in group.between)
            for group in self.blocks.groups
        ]
        self.params = DecisionParams.of(step, self.options, self.threshold)
        # Create a new tensor instead of overwriting the previous tensor, which the device may still have to read.
        self.params_on_device = self.params.tensor(device)
        stopwatch = Stopwatch(device)
        decider = state.decider
        host.running, host.thread = self, get_ident()
        try:
            output = call()
            if isinstance(state.decider, TensorDecider):
                # Clone tensors, because the next replay of a CUDA graph overwrites them.
                values: list[Any] = [x.clone() if isinstance(x, Tensor) else x for x in self.outcome]
                self.outcome = DecisionOutcome(*values)
                if state.decider is not decider:
                    state.leave_graph()
        except BaseException as error:
            self.reset()
            if self.options.policy is not None and is_data_dependent(error):
                raise RuntimeError(
                    f"policy={self.as_text()['policy']} cannot be compiled. In a graph the numbers of an Observation "
                    "are 0-dim tensors: write & and | in place of `and` and `or`, and torch.where in place of `if`."
                ) from error
            raise
        finally:
            host.running = None
        stopwatch.stop()
        self._branches.decided(self.outcome)
        position = step.index, branch, self.num_branches, self.batch, self.threshold
        self.readings.append(StepRecord(*position, self.outcome, self.options.num_residuals, stopwatch))
        return output

    def announce(self, arguments: Mapping[str, Any], moment: int | None) -> None:
        """Identify the CFG branch of the next call of the model from its ``arguments``: :meth:`Branches.announce`."""
        if self.attach().branch is None:
            self._branches.announce(arguments, moment)

    def _new_branches(self) -> Branches:
        name = original_class(self.module).__name__
        return Branches(self._conditions, name, lambda key, text: self._warnings.warn(key, text, CacheWarning))

    def _agreement(self, device: torch.device) -> Agree | None:
        """Return the function by which ranks agree on values of arguments; None if each rank has all of them.

        Without a plan, the arguments may be this rank's part of the inputs, which may be equal on one rank only.
        """
        mesh = self.mesh
        if mesh is None or mesh_of_plan(self.module) is not None:
            return None

        def agree(values: Tensor) -> Tensor:
            values = values.to(device)
            for dim in mesh.dims:
                values = all_gather(values[None], [1] * dim.size, 0, dim).amax(dim=0)
            return values

        return agree

    def find_mesh(self) -> None:
        """Set ``mesh`` for the next call, because a plan may have been applied or removed since the last one.

        Dynamo may trace this method. Then the mesh of a mode around the call is not looked up.
        """
        self.mesh = self._given_mesh or mesh_of_plan(self.module)
        if self.mesh is None and not torch.compiler.is_compiling():
            modes = function_mode_stack()
            self.mesh = next((mode._mesh for mode in reversed(modes) if isinstance(mode, UnifiedAttnMode)), None)

    def state_of(self, branch: str) -> CacheState:
        """Return the state of ``branch``; create it if needed. At most 8 states are kept, those used last."""
        state = self.states.pop(branch, None) or self._empty_state()
        self.states[branch] = state
        for oldest in list(self.states)[:-MOST_BRANCHES]:
            self.states.pop(oldest).clear()
        return state

    @contextmanager
    def in_branch(self, name: str) -> Iterator[None]:
        """Use the state of the CFG branch ``name`` inside the ``with`` block.

        This selects the state for a graph of the whole model, which cannot look it up by name itself.
        """
        before, self.state = self.state, self.state_of(name)
        try:
            yield
        finally:
            self.state = before

    def _empty_state(self) -> CacheState:
        return CacheState(len(self.blocks.groups), self.options.num_residuals)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Run the model without the cache inside the ``with`` block."""
        before, self.idle = self.idle, True
        try:
            yield
        finally:
            self.idle = before

    def reset(self) -> None:
        """Drop all stored residuals and forget all branches. The report is kept."""
        self.reset_states()
        self._branches = self._new_branches()
        for group in self._group_blocks:
            group.refresh()

    def reset_states(self) -> None:
        for state in (*self.states.values(), self.state):
            state.clear()
        self._forget_states()

    def _forget_states(self) -> None:
        self.states: dict[str, CacheState] = {}
        self.state = self._empty_state()
        # The state of the current call. Two attributes are lists whose items are set, because Dynamo 2.13 loses the new
        # value of an attribute that is set after torch.cond.
        self._group_outputs: list[Streams | None] = [None] * len(self.blocks.groups)
        self._entries: list[Streams | None] = [None] * len(self.blocks.groups)
        self._before: tuple[Any, ...] | None = None
        # In a graph that identifies no branches, a tensor that is 1 if calls of several branches share the state.
        self._mixed: Tensor | None = None
        self._skip: bool | Tensor | None = None
        self._skip_on_device: Any = None

    def compare_in_graph(self, arguments: Mapping[str, Any]) -> None:
        """Compare a call that a graph makes with the last call of the state, which may have been of another branch.

        A graph cannot look up the state of a branch. If the calls of several branches share one, all are computed.
        """
        device = next((x.device for x in arguments.values() if isinstance(x, Tensor)), self.params_on_device.device)
        now, last = digest_of(arguments, self._conditions, self._clocks, device), self.state.last_call
        mixed = None
        if last is None:
            self.state.last_call = now
        elif last.conditions.shape == now.conditions.shape and last.clock.shape == now.clock.shape:
            agree = self._agreement(device)
            mixed = last.update(now, (lambda x: x) if agree is None else agree)
        else:
            mixed = torch.ones_like(now.mixed)
            self.state.last_call = CallDigest(now.conditions, now.clock, mixed)
        self._mixed = mixed

    def run_block(
        self, role: BlockRole, block: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run or skip one transformer block, and return its output.

        The output of a skipped block is its input or, in a graph, may be an uninitialised tensor. Only the last block
        of a group returns the forecast output of the group.
        """
        if self.idle:
            return call(block, *args, **kwargs)
        given = role.given(args, kwargs)
        inputs = role.tensors(given)
        if role.opens and not role.skipped:
            self._before = inputs
        elif role.opens and self.blocks.modulated is not None:
            self._decide(self.blocks.modulated(block, {**dict(zip(role.parameters, args, strict=False)), **kwargs}))
            if self._skip is True:
                attention_is_skipped(self.module)
        if not role.skipped:
            output = call(block, *args, **kwargs)
            if role.decides:
                output = on_all_stages(self.module, block, output)
                outputs = role.checked_outputs(block, inputs, output)
                before = self._before or ()
                measured = role.measured_index(given, before, outputs)
                self._decide(outputs[measured] - before[measured])
                self._before = None
                if self._skip is True:
                    attention_is_skipped(self.module)
            return output
        if role.enters:
            self._entries[role.group] = inputs
        if self._skip is None or self._skip is False:
            output = call(block, *args, **kwargs)
            if role.exits:
                entries, outputs = self._entries[role.group] or (), role.checked_outputs(block, inputs, output)
                in_graph = isinstance(self.state.decider, TensorDecider)
                self.state.groups[role.group].store(entries, outputs, in_graph=in_graph)
        elif self._skip is True:
            output = role.as_output(given, self._forecast(role) if role.exits else inputs)
        elif role.chained and not self.unchained[role.group] and not role.has_fields(given):
            output = role.as_output(given, self._run_group_in_graph(role, inputs, args, kwargs))
        else:
            blocks = self._group_blocks[role.group]

            def compute() -> Streams:
                return role.checked_outputs(block, inputs, blocks.call(block, call, *args, **kwargs))

            output = role.as_output(given, self._run_in_graph(role, inputs, compute))
        if role.exits:
            self._entries[role.group] = None
        return output

    def _decide(self, residual: Tensor) -> None:
        """Decide whether to skip the remaining blocks. Set ``_skip`` to a bool, in a graph to a bool tensor.

        ``_skip`` is None, and the blocks run, if no earlier step can be compared with this one. ``residual`` is the
        tensor that the rule compares: the first-block residual or the modulated input of the first block.
        """
        state = self.state
        traced = torch.compiler.is_compiling()
        sample = residual.detach()[..., :: self.options.downsample].movedim(self.blocks.groups[0].samples, 0)
        # Some models pass tokens as ``[S, C]``, so add a batch dim of 1.
        if sample.dim() < 3:
            sample = sample[None]
        params = self.params_on_device if traced else self.params
        if traced and self._mixed is not None:
            params = forced_if_mixed(self.params_on_device, self._mixed)
        inputs = DecisionInput(sample, self.options, params, self.mesh, ranks_sharing_samples(self.module))
        decider = state.decider
        if decider is None or isinstance(decider, TensorDecider) != traced or _form(decider.first) != _form(sample):
            self._skip, self.outcome = None, DecisionOutcome(None, Verdict.WARMUP, 0, inputs.samples)
            state.drop_residuals()
            state.decider = TensorDecider(inputs) if traced else NumberDecider(inputs)
            return
        self._skip, self.outcome = decider.decide(inputs)
        if isinstance(self._skip, Tensor):
            self._skip_on_device = self._skip
            # Copy the decision to the host once, because otherwise every torch.cond would wait for the device.
            self._skip = self._skip.to("cpu")

    def _forecast(self, role: BlockRole) -> Streams:
        """Return the forecast output of the block group of ``role``: its input plus weighted stored residuals."""
        decider: Any = self.state.decider
        params = self.params_on_device if isinstance(decider, TensorDecider) else self.params
        weights = decider.weights(self.options, params)
        return self.state.groups[role.group].forecast(self._entries[role.group] or (), weights)

    def _run_in_graph(self, role: BlockRole, inputs: tuple[Any, ...], compute: Callable[[], Streams]) -> Streams:
        """Return the streams of one block in a graph, in which a ``torch.cond`` for this block runs or skips it."""
        if role.exits:
            return self._end_group_in_graph(role, inputs, compute)

        def skipped() -> Streams:
            # The values are not used, because the last block of the group replaces the outputs of skipped blocks.
            return tuple([x.new_empty(x.shape) for x in inputs])

        return cond(self._skip, skipped, compute, list(range(len(inputs))), inputs)

    def _run_group_in_graph(
        self, role: BlockRole, inputs: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Streams:
        """Return the streams of one block in a graph in which one ``torch.cond`` runs or skips the whole group.

        The call of the group's first block contains this ``cond``. The calls of the other blocks return their inputs.
        """
        if not role.enters:
            before = self._group_outputs[role.group] or (None,) * len(inputs)
            # Use a list, not a generator: Dynamo 2.13 evaluates a generator beyond the item at which all() stops.
            if not all([x is y for x, y in zip(inputs, before, strict=True)]):  # noqa: C419
                raise RuntimeError(
                    f"{type(self.module).__name__} does something between the blocks of "
                    f"{self.blocks.groups[role.group].lists}. Name the arguments that make it do so in "
                    "BlockGroup(between=...), or leave chained= out."
                )
            if role.exits:
                self._group_outputs[role.group] = None
            return inputs
        streams = role.streams
        indices = [streams.index(name) if name in streams else None for name in role.parameters[: len(args)]]

        def compute() -> Streams:
            values = inputs
            for call in self._group_blocks[role.group]:
                positional = [x if index is None else values[index] for index, x in zip(indices, args, strict=False)]
                named = {name: values[streams.index(name)] if name in streams else x for name, x in kwargs.items()}
                values = as_tuple(call(*positional, **named))
            return values

        outputs = self._end_group_in_graph(role, inputs, compute)
        if not role.exits:
            self._group_outputs[role.group] = outputs
        return outputs

    def _end_group_in_graph(self, role: BlockRole, inputs: Streams, compute: Callable[[], Streams]) -> Streams:
        """Return the output of a block group in a graph, computed or forecast, and store its residual if computed."""
        residuals = self.state.groups[role.group]
        present = [i for i, history in enumerate(residuals.histories) if history is not None]
        outputs = cond(self._skip, lambda: self._forecast(role), compute, present, inputs)
        residuals.store_unless(self._skip_on_device, self._entries[role.group] or (), outputs)
        return outputs


def _form(x: Tensor) -> tuple[Any, ...]:
    return tuple(x.shape), x.dtype, x.device
