"""First Block Cache on one model, in eager code and in a compiled graph.

Each block gets a hook (:mod:`para_core.cache.attachment`). The hook of the first block measures the residual
and decides the step. The hooks of the other blocks run or skip their blocks. In a skipped step, the hook of
the last block of a group adds the stored residual to the input of the group. Computations of the model
between its blocks (such as residuals of a ControlNet) also run in skipped steps, but have no effect there,
because the stored residual has them.

In a graph, skippable blocks are in a branch of ``torch.cond``: one ``cond`` for all blocks of a group if the
model does nothing between them, otherwise one per block, all with the same predicate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass, replace
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from para_core.cache.argument_values import is_clock
from para_core.cache.attachment import BlockHookHost, attach, check_no_foreign_cache, detach
from para_core.cache.blocks import BlockRole, CachedBlocks, roles_of, tensors_in
from para_core.cache.branch_search import MOST_BRANCHES, Agree
from para_core.cache.branches import Branches, conditions_of
from para_core.cache.cond import Streams
from para_core.cache.decision import (
    DecisionInput,
    DecisionOutcome,
    DecisionParams,
    NumberDecider,
    Step,
    TensorDecider,
    Verdict,
    blocks_before_deciding,
)
from para_core.cache.graph import GraphForm
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
        ValueError: The model does not have the blocks that ``blocks`` describes, no block would be skipped,
            or one of diffusers' own caches is enabled on the model.
    """

    def __init__(
        self, module: nn.Module, blocks: CachedBlocks, options: CacheOptions, mesh: SequenceMesh | None = None
    ) -> None:
        check_no_foreign_cache(module)
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
        # The report needs the number of CFG branches in a batch, and the number of samples in it (0 if
        # unknown).
        self.num_branches = 1
        self.batch = 0
        # The name of the argument that made the last call run without the cache; None if the cache was used.
        self.uncached_by: str | None = None
        self.conditions = conditions_of(module, blocks)
        self.clocks = tuple(name for name in parameters_of(module) if is_clock(name))
        self._branches = self._new_branches()
        self.readings = Readings()
        self.step = Step()
        parameter = next(module.parameters(), None)
        device = torch.device("cpu")
        if parameter is not None:
            device = parameter.device
        self.params = DecisionParams.of(self.step, options, self.threshold)
        # The values of self.params as one tensor, because a graph reads them from the device.
        self.params_on_device = self.params.tensor(device)
        # For each block group, whether the model may compute something between its blocks in the current
        # call.
        self.unchained = [not group.chained for group in blocks.groups]
        self.graph = GraphForm(self)
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
        """Run one call of the model with the cache, and return its output. The model or its blocks may be
        compiled.

        ``call()`` calls the model with ``arguments``, by name. ``step_of(branch)`` returns the position of
        the call of this CFG branch in the schedule. ``moment`` changes from step to step; None if only the
        arguments can tell.

        Raises:
            RuntimeError: The model already runs with this cache, two calls of one step were taken for one
                branch, or the user's policy function branches on values of tensors, so it cannot be compiled.
        """
        if getattr(self.module, "_cache_config", None) is not None:
            check_no_foreign_cache(self.module)
        host = self.attach()
        if host.running is not None:
            raise RuntimeError(
                f"this {type(self.module).__name__} with a cache is already running, probably in another thread. Both "
                "would use the same cache. Use one thread, or a copy of the model for each."
            )
        self.uncached_by = None
        for name in self.blocks.uncached:
            if arguments.get(name) is not None:
                self.uncached_by = name
                break
        if self.uncached_by is not None:
            with self.pause():
                return call()
        self.find_mesh()
        device = self.device_of(arguments)
        branch, repeated, begins = self._branches.identify(
            arguments, host.branch, moment, self.agreement(device)
        )
        if branch is None:
            self.reset_states()
            self._warnings.warn("branches", self._branches.why_unknown(), CacheWarning)
            with self.pause():
                return call()
        # Ask for the step before looking up the state: for the first call of a section of a video, step_of()
        # resets the cache.
        step = step_of(branch)
        if repeated:
            step = replace(step, forced=Verdict.REPEATED)
        state = self.state_of(branch)
        signature = _signature(arguments)
        if begins or state.signature != signature:
            state.clear()
            state.signature = signature
        self.state = state
        self.step = step
        for index, group in enumerate(self.blocks.groups):
            self.unchained[index] = not group.chained
            for name in group.between:
                self.unchained[index] = self.unchained[index] or arguments.get(name) is not None
        self.params = DecisionParams.of(step, self.options, self.threshold)
        # Create a new tensor instead of overwriting the previous tensor, which the device may still have to
        # read.
        self.params_on_device = self.params.tensor(device)
        stopwatch = Stopwatch(device)
        decider = state.decider
        host.running = self
        host.thread = get_ident()
        try:
            output = call()
            if isinstance(state.decider, TensorDecider):
                # Clone tensors, because the next replay of a CUDA graph overwrites them.
                values: list[Any] = list(self.outcome)
                for index, value in enumerate(values):
                    if isinstance(value, Tensor):
                        values[index] = value.clone()
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
        self._branches.record_outcome(self.outcome)
        record = StepRecord(
            step=step.index,
            branch=branch,
            num_branches=self.num_branches,
            batch=self.batch,
            threshold=self.threshold,
            outcome=self.outcome,
            room=self.options.num_residuals,
            stopwatch=stopwatch,
        )
        self.readings.append(record)
        return output

    def announce(self, arguments: Mapping[str, Any], moment: int | None) -> None:
        """Identify the CFG branch of the next call of the model from its ``arguments``: :meth:`Branches.announce`."""
        if self.attach().branch is None:
            self._branches.announce(arguments, moment)

    def _new_branches(self) -> Branches:
        name = original_class(self.module).__name__
        return Branches(self.conditions, name, lambda key, text: self._warnings.warn(key, text, CacheWarning))

    def agreement(self, device: torch.device) -> Agree | None:
        """Return the function by which ranks agree on values of arguments; None if each rank has all of them.

        Without a plan, the arguments may be this rank's part of the inputs, which may be equal on one rank
        only.
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

    def device_of(self, arguments: Mapping[str, Any]) -> torch.device:
        """Return the device of the first tensor among ``arguments``, or that of the last call."""
        for value in arguments.values():
            if isinstance(value, Tensor):
                return value.device
        return self.params_on_device.device

    def find_mesh(self) -> None:
        """Set ``mesh`` for the next call, because a plan may have been applied or removed since the last one.

        Dynamo may trace this method. Then the mesh of a mode around the call is not looked up.
        """
        self.mesh = self._given_mesh or mesh_of_plan(self.module)
        if self.mesh is None and not torch.compiler.is_compiling():
            modes = function_mode_stack()
            self.mesh = next(
                (mode._mesh for mode in reversed(modes) if isinstance(mode, UnifiedAttnMode)), None
            )

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
        before = self.state
        self.state = self.state_of(name)
        try:
            yield
        finally:
            self.state = before

    def _empty_state(self) -> CacheState:
        return CacheState(len(self.blocks.groups), self.options.num_residuals)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Run the model without the cache inside the ``with`` block."""
        before = self.idle
        self.idle = True
        try:
            yield
        finally:
            self.idle = before

    def reset(self) -> None:
        """Drop all stored residuals and forget all branches. The report is kept."""
        self.reset_states()
        self._branches = self._new_branches()
        self.graph.refresh()

    def reset_states(self) -> None:
        for state in (*self.states.values(), self.state):
            state.clear()
        self._forget_states()

    def _forget_states(self) -> None:
        self.states: dict[str, CacheState] = {}
        self.state = self._empty_state()
        self.graph.forget()
        # The state of the current call: the inputs of each group, in a list whose items are set, because
        # Dynamo 2.13 loses the new value of an attribute that is set after torch.cond.
        self.entries: list[Streams | None] = [None] * len(self.blocks.groups)
        self._before: tuple[Any, ...] | None = None
        # Whether to skip the remaining blocks: a bool, in a graph a bool tensor, None if nothing can be
        # compared.
        self.skip: bool | Tensor | None = None

    def run_block(
        self,
        role: BlockRole,
        block: nn.Module,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run or skip one transformer block, and return its output.

        The output of a skipped block is its input or, in a graph, may be an uninitialised tensor. Only the
        last block of a group returns the forecast output of the group.
        """
        if self.idle:
            return call(block, *args, **kwargs)
        given = role.given(args, kwargs)
        inputs = role.tensors(given)
        if role.opens and not role.skipped:
            self._before = inputs
        elif role.opens and self.blocks.modulated is not None:
            self._decide(
                self.blocks.modulated(block, {**dict(zip(role.parameters, args, strict=False)), **kwargs})
            )
            if self.skip is True:
                attention_is_skipped(self.module)
        if not role.skipped:
            output = call(block, *args, **kwargs)
            if role.decides:
                output = on_all_stages(self.module, block, output)
                outputs = role.check_outputs(block, inputs, output)
                before = self._before or ()
                measured = role.measured_index(given, before, outputs)
                self._decide(outputs[measured] - before[measured])
                self._before = None
                if self.skip is True:
                    attention_is_skipped(self.module)
            return output
        if role.enters:
            self.entries[role.group] = inputs
        if self.skip is None or self.skip is False:
            output = call(block, *args, **kwargs)
            if role.exits:
                entries = self.entries[role.group] or ()
                outputs = role.check_outputs(block, inputs, output)
                in_graph = isinstance(self.state.decider, TensorDecider)
                self.state.groups[role.group].store(entries, outputs, in_graph=in_graph)
        elif self.skip is True:
            streams = inputs
            if role.exits:
                streams = self.forecast(role)
            output = role.as_output(given, streams)
        else:
            output = self.graph.run_block(role, block, call, args, kwargs)
        if role.exits:
            self.entries[role.group] = None
        return output

    def _decide(self, residual: Tensor) -> None:
        """Decide whether to skip the remaining blocks. Set ``skip`` to a bool, in a graph to a bool tensor.

        ``skip`` is None, and the blocks run, if no earlier step can be compared with this one. ``residual``
        is the tensor that the rule compares: the first-block residual or the modulated input of the first
        block.
        """
        state = self.state
        traced = torch.compiler.is_compiling()
        sample = residual.detach()[..., :: self.options.downsample].movedim(self.blocks.groups[0].samples, 0)
        # Some models pass tokens as ``[S, C]``, so add a batch dim of 1.
        if sample.dim() < 3:
            sample = sample[None]
        params: DecisionParams | Tensor = self.params
        if traced:
            params = self.graph.params()
        inputs = DecisionInput(sample, self.options, params, self.mesh, ranks_sharing_samples(self.module))
        decider = state.decider
        if (
            decider is None
            or isinstance(decider, TensorDecider) != traced
            or _form(decider.first) != _form(sample)
        ):
            self.skip = None
            self.outcome = DecisionOutcome(None, Verdict.WARMUP, 0, inputs.samples)
            state.drop_residuals()
            if traced:
                state.decider = TensorDecider(inputs)
            else:
                state.decider = NumberDecider(inputs)
            return
        self.skip, self.outcome = decider.decide(inputs)
        if isinstance(self.skip, Tensor):
            self.skip = self.graph.copy_to_host(self.skip)

    def forecast(self, role: BlockRole) -> Streams:
        """Return the forecast output of the block group of ``role``: its input plus weighted stored residuals."""
        decider: Any = self.state.decider
        params: DecisionParams | Tensor = self.params
        if isinstance(decider, TensorDecider):
            params = self.params_on_device
        weights = decider.weights(self.options, params)
        return self.state.groups[role.group].forecast(self.entries[role.group] or (), weights)


def _signature(arguments: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the shape, dtype and device of each tensor among ``arguments``, by name, for which residuals are valid."""
    forms = []
    for name in sorted(arguments):
        value = arguments[name]
        if isinstance(value, Tensor):
            forms.append((name, value.shape, value.dtype, value.device))
        elif is_dataclass(value):
            forms += [(path, x.shape, x.dtype, x.device) for path, x in tensors_in([(name, value)])]
    return tuple(forms)


def _form(x: Tensor) -> tuple[Any, ...]:
    return tuple(x.shape), x.dtype, x.device
