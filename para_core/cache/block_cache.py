"""First Block Cache on one model: around its blocks, in eager code and in a compiled graph.

The blocks stay where they are, in the lists where they stand. Around each runs what lives in a private subclass
(``para_core.instance_patching``): the first block is measured, those behind it are computed or passed by, and behind the last
one of a group the stored residual is added. What a model does between its blocks (a ControlNet's residuals) is done on
skipped steps too, and then has no effect: the stored residual contains it.

In a graph the skipped blocks are a branch of ``torch.cond``: all of a group in one where the model does nothing between
them, else each in one of its own, on one predicate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from para_core.cache.attachment import BlockHookHost, attach, detach
from para_core.cache.blocks import CachedBlocks, Role, argument, as_tuple, like, require_streams, roles_of
from para_core.cache.branches import MOST_BRANCHES, Branches, conditions_of, names_in_batch
from para_core.cache.cond import either, nothing_like
from para_core.cache.decision import (
    DecisionInput,
    DecisionParams,
    NumberDecider,
    Observed,
    Step,
    StepRecord,
    Stopwatch,
    TensorDecider,
    Verdict,
    blocks_before_deciding,
    policy_cannot_be_compiled,
)
from para_core.cache.diffusers_caches import require_no_foreign_cache
from para_core.cache.options import CacheOptions
from para_core.cache.plain_weights import GroupBlocks
from para_core.cache.report import Readings
from para_core.cache.residuals import BranchState, Streams
from para_core.distributed.mesh import SequenceMesh
from para_core.foreign_errors import is_data_dependent
from para_core.instance_patching import original_class
from para_core.modes.unified import UnifiedAttnMode
from para_core.plans.region import attention_is_skipped, mesh_of_plan, ranks_sharing_samples
from para_core.staged import on_all_stages
from para_core.torch_internals import function_mode_stack
from para_core.user_warnings import CacheWarning, WarningLog


class BlockCache:
    """One model's cache under one set of options. Not for two threads.

    Args:
        module: the model.
        blocks: its block stack.
        options: what the user set.
        mesh: the ranks that hold the tokens of one sequence, which decide together; None: those of the plan that runs
            the model, if any.

    Raises:
        ValueError: the model has no such blocks, none would ever be skipped, or diffusers has a cache on it.
    """

    def __init__(
        self, module: nn.Module, blocks: CachedBlocks, options: CacheOptions, mesh: SequenceMesh | None = None
    ) -> None:
        require_no_foreign_cache(module)
        self.module = module
        self.blocks = blocks
        self.options = options
        # May be set at any time; every other option needs another cache.
        self.threshold = options.residual_diff_threshold
        first_blocks = blocks_before_deciding(original_class(module).__name__, blocks, options)
        self.roles = roles_of(module, blocks, first_blocks, options.last_blocks)
        self._given_mesh = mesh
        self.mesh = mesh
        # Whether a graph was compiled with it.
        self.traced = False
        # Whether the model runs as if there were no cache.
        self.idle = False
        self._warnings = WarningLog()
        # Branches of guidance in the whole batch, and its size, of which a plan may give this rank a part; 0: not known.
        self.branches, self.batch = 1, 0
        # The argument for whose sake the last call ran without the cache.
        self.uncached_by: str | None = None
        self._branches = Branches(conditions_of(module, blocks))
        self.states: dict[str, BranchState] = {}
        self.state = self._empty_state()
        self.readings = Readings()
        self.step = Step()
        parameter = next(module.parameters(), None)
        device = torch.device("cpu") if parameter is None else parameter.device
        self.terms = DecisionParams.of(self.step, options, self.threshold)
        # The same for graphs.
        self.terms_on_device = self.terms.tensor(device)
        # Of each group, whether the model does something between its blocks in this call.
        self.unchained = [not group.chained for group in blocks.groups]
        self._group_blocks = [
            GroupBlocks([block for block, role in self.roles if role.skipped and role.group == place])
            for place in range(len(blocks.groups))
        ]
        # Of the call under way.
        # A list: an attribute that is set behind torch.cond stays what it was, in Dynamo 2.13.
        self._group_outputs: list[Streams | None] = [None] * len(blocks.groups)
        self._before: Tensor | None = None
        self._entries: list[Streams | None] = [None] * len(blocks.groups)
        self._skip: bool | Tensor | None = None
        self._skip_on_device: Any = None
        self.observed = Observed(None, Verdict.WARMUP, 0, 1)

    def attach(self) -> BlockHookHost:
        """Where this cache runs, with what stands around the blocks; again and again."""
        return attach(self.module, self.roles, self)

    def detach(self) -> None:
        """Undo :meth:`attach`, and forget all steps."""
        self.reset()
        detach(self.module, self.roles, self, traced=self.traced)

    def as_text(self) -> dict[str, str]:
        """Its options by name, for comparing ranks."""
        return {**self.options.as_text(), "residual_diff_threshold": str(self.threshold)}

    # -- around the model

    def run(self, call: Callable[[], Any], given: Mapping[str, Any], step_of: Callable[[str], Step]) -> Any:
        """One call of the model in eager code, or of what was compiled of it.

        Args:
            given: the arguments of the call, by name.
            step_of: where in the schedule this call of a branch is.
        """
        if getattr(self.module, "_cache_config", None) is not None:
            require_no_foreign_cache(self.module)
        site = self.attach()
        if site.running is not None:
            raise RuntimeError(
                f"this {type(self.module).__name__} with a cache is already running, in another thread? Both would use the "
                "same cache. Use one thread, or a copy of the model for each."
            )
        self.uncached_by = next((name for name in self.blocks.uncached if given.get(name) is not None), None)
        if self.uncached_by is not None:
            with self.paused():
                return call()
        branch = site.branch or self._branches.name_of(given)
        if branch is None:
            return self._run_without_branches(call)
        # Before the state is looked up, because a call that begins a section of a video resets the cache.
        step = step_of(branch)
        state = self.state_of(branch)
        signature = tuple((name, *_form(x)) for name, x in sorted(given.items()) if isinstance(x, Tensor))
        if state.signature != signature:
            state.clear()
            state.signature = signature
        self.state, self.step = state, step
        self.find_mesh()
        self.unchained = [
            not group.chained or any(given.get(name) is not None for name in group.between)
            for group in self.blocks.groups
        ]
        device = next((x.device for x in given.values() if isinstance(x, Tensor)), self.terms_on_device.device)
        self.terms = DecisionParams.of(step, self.options, self.threshold)
        # A new tensor: an accelerator may still read the one before.
        self.terms_on_device = self.terms.tensor(device)
        stopwatch = Stopwatch(device)
        decider = state.decider
        site.running, site.thread = self, get_ident()
        try:
            output = call()
            if isinstance(state.decider, TensorDecider):
                self.observed = self.observed.outside_graph()
                if state.decider is not decider:
                    state.leave_graph()
        except BaseException as error:
            self.reset()
            if self.options.policy is not None and is_data_dependent(error):
                raise policy_cannot_be_compiled(self.options) from error
            raise
        finally:
            site.running = None
        samples = int(self.observed.samples)
        names = names_in_batch(branch, samples, self.branches, self.batch)
        room = self.options.num_residuals
        self.readings.append(
            StepRecord(step.index, names, samples, self.threshold, self.observed, room, stopwatch.stop())
        )
        return output

    def _run_without_branches(self, call: Callable[[], Any]) -> Any:
        self.reset_states()
        self._warnings.warn("branches", self._branches.why_unknown(type(self.module).__name__), CacheWarning)
        with self.paused():
            return call()

    def announce(self, given: Mapping[str, Any]) -> None:
        """Tell that the model is called with the arguments ``given``, maybe on another rank: so all ranks number branches alike."""
        if self.attach().branch is None:
            self._branches.announce(given)

    def find_mesh(self) -> None:
        """A plan may have been applied, or removed, since the last call. Traced where the whole call is."""
        self.mesh = self._given_mesh or mesh_of_plan(self.module)
        if self.mesh is None and not torch.compiler.is_compiling():
            modes = function_mode_stack()
            self.mesh = next((mode._mesh for mode in reversed(modes) if isinstance(mode, UnifiedAttnMode)), None)

    def state_of(self, branch: str) -> BranchState:
        """What is held of a branch; of too many, the oldest goes."""
        state = self.states.pop(branch, None) or self._empty_state()
        self.states[branch] = state
        for oldest in list(self.states)[:-MOST_BRANCHES]:
            self.states.pop(oldest).clear()
        return state

    @contextmanager
    def in_branch(self, name: str) -> Iterator[None]:
        """Inside, a call is of the branch ``name``: for a graph of the whole model, which does not ask for it."""
        before, self.state = self.state, self.state_of(name)
        try:
            yield
        finally:
            self.state = before

    def _empty_state(self) -> BranchState:
        return BranchState(len(self.blocks.groups), self.options.num_residuals)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, the model runs as if there were no cache."""
        before, self.idle = self.idle, True
        try:
            yield
        finally:
            self.idle = before

    def reset(self) -> None:
        """Forget all steps, and let their memory go; the report stays."""
        self.reset_states()
        self._branches = Branches(self._branches.conditions)
        for group in self._group_blocks:
            group.refresh()

    def reset_states(self) -> None:
        for state in (*self.states.values(), self.state):
            self.traced = self.traced or isinstance(state.decider, TensorDecider)
            state.clear()
        self.states, self.state = {}, self._empty_state()
        self._before, self._skip, self._skip_on_device = None, None, None
        self._group_outputs = [None] * len(self.blocks.groups)
        self._entries = [None] * len(self.blocks.groups)

    # -- around a block

    def run_block(
        self,
        role: Role,
        block: nn.Module,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """One block: computed, or not."""
        if self.idle:
            return call(block, *args, **kwargs)
        given = tuple([argument(name, role.parameters, args, kwargs) for name in role.streams])
        measured = given[role.streams.index(role.measured)]
        if role.opens and not role.skipped:
            self._before = measured
        elif role.opens and self.blocks.modulated is not None:
            self._decide(self.blocks.modulated(block, {**dict(zip(role.parameters, args, strict=False)), **kwargs}))
            if self._skip is True:
                attention_is_skipped(self.module)
        if not role.skipped:
            output = call(block, *args, **kwargs)
            if role.decides:
                output = on_all_stages(self.module, block, output)
                outputs = as_tuple(output)
                require_streams(role, block, given, outputs)
                self._decide(outputs[role.streams.index(role.measured)] - self._before)
                self._before = None
            return output
        if role.enters:
            self._entries[role.group] = given
        if self._skip is None or self._skip is False:
            output = call(block, *args, **kwargs)
            if role.exits:
                outputs = as_tuple(output)
                require_streams(role, block, given, outputs)
                self._store(role, outputs)
        elif self._skip is True:
            output = like(role, self._forecast(role) if role.exits else given)
        elif role.chained and not self.unchained[role.group]:
            output = self._run_group_in_graph(role, given, args, kwargs)
        else:
            blocks = self._group_blocks[role.group]
            output = self._run_in_graph(role, given, lambda: as_tuple(blocks.call(block, call, *args, **kwargs)))
        if role.exits:
            self._entries[role.group] = None
        return output

    # -- deciding

    def _decide(self, residual: Tensor) -> None:
        """Whether the blocks that follow are skipped; ``_skip`` is None where nothing is stored yet."""
        state = self.state
        traced = torch.compiler.is_compiling()
        # Blocks of the first group decide.
        sample = residual.detach()[..., :: self.options.downsample].movedim(self.blocks.groups[0].samples, 0)
        if sample.dim() < 3:
            # Tokens without a batch.
            sample = sample[None]
        terms = self.terms_on_device if traced else self.terms
        inputs = DecisionInput(sample, self.options, terms, self.mesh, ranks_sharing_samples(self.module))
        decider = state.decider
        if decider is None or isinstance(decider, TensorDecider) != traced or _form(decider.first) != _form(sample):
            self._skip, self.observed = None, Observed(None, Verdict.WARMUP, 0, inputs.samples)
            state.begin_anew()
            state.decider = TensorDecider(inputs) if traced else NumberDecider(inputs)
            return
        skip, self.observed = decider.decide(inputs)
        if traced:
            self._skip_on_device = skip
            # Once: each branch of the graph reads it, and would else wait for the device.
            skip = skip.to("cpu")
        self._skip = skip

    # -- skipping, and what is stored for it

    def _store(self, role: Role, outputs: Streams) -> None:
        """The residual of a group that was computed."""
        group, entries = self.state.groups[role.group], self._entries[role.group] or ()
        if group.histories:
            group.store(entries, outputs)
        else:
            group.begin(entries, outputs, group.room if isinstance(self.state.decider, TensorDecider) else 1)

    def _forecast(self, role: Role) -> Streams:
        """What a group of skipped blocks is taken to return."""
        decider: Any = self.state.decider
        terms = self.terms_on_device if isinstance(decider, TensorDecider) else self.terms
        weights = decider.weights(self.options, terms)
        return self.state.groups[role.group].forecast(self._entries[role.group] or (), weights)

    def _run_in_graph(self, role: Role, given: tuple[Any, ...], compute: Callable[[], Streams]) -> Any:
        """One block."""
        if not role.exits:
            # What it would give is replaced where the group ends, so nothing is to be in it.
            return like(role, self._cond(role, lambda: tuple([nothing_like(x) for x in given]), compute, given))
        return like(role, self._end_group_in_graph(role, given, compute))

    def _cond(
        self, role: Role, skipped: Callable[[], Streams], computed: Callable[[], Streams], given: Streams
    ) -> Streams:
        """``skipped()`` or ``computed()``."""
        histories = self.state.groups[role.group].histories
        ends_group = role.exits or (role.chained and not self.unchained[role.group])
        present = [i for i in range(len(given)) if not ends_group or histories[i] is not None]
        return either(self._skip, skipped, computed, present, given)

    def _run_group_in_graph(
        self, role: Role, given: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """All blocks of a group at its first one; the others hand on what they are given."""
        if not role.enters:
            before = self._group_outputs[role.group] or (None,) * len(given)
            # No generator: Dynamo 2.13 runs it further than any() does.
            if not all([x is y for x, y in zip(given, before, strict=True)]):  # noqa: C419
                raise RuntimeError(
                    f"{type(self.module).__name__} does something between the blocks of {self.blocks.groups[role.group].lists}. "
                    "Name the arguments that make it do so in BlockGroup(between=...), or leave chained= out."
                )
            if role.exits:
                self._group_outputs[role.group] = None
            return like(role, given)
        streams = role.streams
        places = [streams.index(name) if name in streams else None for name in role.parameters[: len(args)]]

        def compute() -> Streams:
            values = given
            for call in self._group_blocks[role.group]:
                positional = [x if place is None else values[place] for place, x in zip(places, args, strict=False)]
                named = {name: values[streams.index(name)] if name in streams else x for name, x in kwargs.items()}
                values = as_tuple(call(*positional, **named))
            return values

        outputs = self._end_group_in_graph(role, given, compute)
        if not role.exits:
            self._group_outputs[role.group] = outputs
        return like(role, outputs)

    def _end_group_in_graph(self, role: Role, given: Streams, compute: Callable[[], Streams]) -> Streams:
        """What the group returns, computed or forecast; its residual is stored if computed."""
        outputs = self._cond(role, lambda: self._forecast(role), compute, given)
        group, entries = self.state.groups[role.group], self._entries[role.group] or ()
        group.store_unless(self._skip_on_device, entries, outputs)
        return outputs


def _form(x: Tensor) -> tuple[Any, ...]:
    return tuple(x.shape), x.dtype, x.device
