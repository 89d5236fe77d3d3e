"""First Block Cache on one model: its settings, the states of its CFG branches, and one call of the model.

The blocks that matter to the cache get hooks (:mod:`para_core.cache.attachment`). The hook of the last of the
``first_blocks`` measures the residual and decides the step; with a rule that compares the input of block 0,
that block's hook decides before it runs. The hooks of the other blocks run or skip their blocks. In a skipped
step, the hook of the last skipped block of a group returns the group's input plus the forecast residual.
Computations of the model between its blocks (such as residuals of a ControlNet) also run in skipped steps,
but have no effect there, because the stored residual has them.

Made by :mod:`.apply` for a model, and by ``adapters/cache/pipeline.py`` for a pipeline. The blocks themselves
run in :mod:`.block_run`, the graph's part is in :mod:`.graph`. Tests: tests/cache/test_state.py,
tests/cache/test_steps.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass, replace
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from para_core.cache.argument_values import is_clock
from para_core.cache.attachment import (
    BlockHookHost,
    Roles,
    already_running,
    attach,
    check_no_foreign_cache,
    detach,
)
from para_core.cache.block_roles import roles_of, submodules_on_path
from para_core.cache.block_run import left_out
from para_core.cache.blocks import CachedBlocks
from para_core.cache.branch_search import MOST_BRANCHES, Agree
from para_core.cache.branches import Branches, conditions_of
from para_core.cache.decision import DecisionOutcome, Step, Verdict, blocks_before_deciding, step_of
from para_core.cache.options import CacheOptions
from para_core.cache.registry import OBSERVERS, traced_form
from para_core.cache.residuals import CacheState
from para_core.cache.streams import Streams, named_tensors_in
from para_core.distributed.collectives import all_gather
from para_core.distributed.mesh import MeshDim, SequenceMesh
from para_core.foreign_errors import is_data_dependent
from para_core.instance.modules import uncompiled
from para_core.instance.private_class import original_class
from para_core.instance.record import Filling, filled_slots
from para_core.instance.slots import Slot
from para_core.modes.unified import UnifiedAttnMode
from para_core.plans.module_matching import parameters_of
from para_core.plans.region import Region
from para_core.torch_internals import function_mode_stack
from para_core.user_warnings import CacheWarning, WarningLog

# Returns the index of the step of the next call of a CFG branch, the number of steps, and the timestep.
Position = Callable[[str], tuple[int, int, float]]
# Maximum number of outcomes that a cache keeps of the calls of a generation. A loop that never calls
# reset_cache would otherwise accumulate them without limit.
_MOST_OUTCOMES = 4096
_NOT_FILLED = Filling({})


def _without_schedule(branch: str) -> tuple[int, int, float]:
    """Return the position of each call of a model that is called without a pipeline."""
    return 0, 1, 0.0


class BlockCache:
    """The First Block Cache of one model with one set of options. Not thread-safe.

    Args:
        module: The model.
        blocks: The description of its block stack.
        options: The user's options.
        mesh: The ranks that hold parts of one sequence. Defaults to those of the plan, or of the mode around
            the call.

    Raises:
        ValueError: The model does not have the blocks or arguments that ``blocks`` describes, no block would
            be skipped, the rule compares an input that ``blocks`` does not describe, or one of diffusers' own
            caches is enabled on the model.
    """

    def __init__(
        self, module: nn.Module, blocks: CachedBlocks, options: CacheOptions, mesh: SequenceMesh | None = None
    ) -> None:
        check_no_foreign_cache(module)
        self.module = module
        # The object whose calls apply_cache has replaced: the module, or what torch.compile made of it.
        self.applied_to = module
        self.blocks = blocks
        self.options = options
        # The threshold may be changed at any time. Changing other options needs a new cache.
        self.threshold = options.residual_diff_threshold
        self.roles = self._read_roles()
        self._host = BlockHookHost()
        self._given_mesh = mesh
        self.mesh: SequenceMesh | None = None
        # What runs around the current call: the plan of the model, its pipeline stages, and the mesh dims of
        # several ranks over which one sequence is sharded.
        self.region: Region | None = None
        self.stages: Any = None
        self.dims: tuple[MeshDim, ...] = ()
        # Whether the arguments may be this rank's part of the inputs: there is a mesh, and no plan. Two of
        # them may then be equal on this rank and differ on another one.
        self.arguments_are_parts = False
        # Whether the hooks currently run all blocks, as without a cache.
        self.idle = False
        self._warnings = WarningLog()
        # The number of CFG branches in a batch, and the number of samples in it (0 if unknown). They only
        # serve the report, and a pipeline sets them before each call.
        self.num_branches = 1
        self.batch = 0
        # The name of the argument that made the last call run without the cache; None if the cache was used.
        self.uncached_by: str | None = None
        self.conditions = conditions_of(module, blocks)
        self.clocks = tuple(name for name in parameters_of(module) if is_clock(name))
        self._branches = self._new_branches()
        self.observers = [make() for make in OBSERVERS]
        self.outcomes: deque[DecisionOutcome] = deque(maxlen=_MOST_OUTCOMES)
        # The step and the outcome of the current or last call: run() sets the step, and decide()
        # (block_run.py) or a graph the outcome. Before the first call the outcome stands for nothing that was
        # decided.
        self.step = Step()
        self.outcome = DecisionOutcome(None, Verdict.WARMUP, 0, 1)
        self._device = torch.device("cpu")
        # The inputs of each group in the current call; None until the step is decided. It is a list whose
        # items are set, because Dynamo 2.13 loses the new value of an attribute that is set after torch.cond.
        self.entries: list[Streams | None] | None = None
        # The traced form reads the module, blocks, options, threshold, roles and step, so it comes after
        # these. _forget_states resets it, so it comes before that.
        self.traced = traced_form(self)
        self._forget_states()

    def _read_roles(self) -> Roles:
        """Return the roles of the blocks that the model has now, and remember where these blocks were found."""
        name = original_class(self.module).__name__
        first_blocks = blocks_before_deciding(name, self.blocks, self.options)
        roles = roles_of(self.module, self.blocks, first_blocks, self.options.last_blocks)
        # Only now: a call after an error must look for the blocks again. These are the dicts of the modules
        # themselves, which run() compares with their present content to find blocks that were replaced since.
        self._holders = [
            submodules
            for group in self.blocks.groups
            for list_name in group.lists
            for submodules in submodules_on_path(self.module, list_name)
        ]
        self._held = [submodules.copy() for submodules in self._holders]
        return roles

    def _follow_replaced_blocks(self) -> None:
        """Begin again with the blocks that the model has now, if some were replaced: they have no hooks yet.

        A block that ``torch.compile`` has wrapped since keeps its hooks, inside the wrapper.
        """
        roles = self._read_roles()
        if [(uncompiled(block), role) for block, role in roles] == [
            (uncompiled(block), role) for block, role in self.roles
        ]:
            return
        self.roles = roles
        self.traced = traced_form(self)
        # The branches stay: with CFG parallelism, all ranks must number them alike.
        self.reset_states()

    def attach(self) -> BlockHookHost:
        """Install the hooks if they are not installed, and return the object that holds them. Raises as
        :func:`~para_core.cache.attachment.attach`.
        """
        host = attach(self.module, self.roles, self)
        # If the host already has hooks of equal roles, use its list: run() compares the lists by identity, to
        # notice that another cache has replaced the hooks since.
        self.roles = host.roles
        self._host = host
        return host

    def detach(self) -> None:
        """Remove this cache's hooks, unless another cache shares them, and drop its residuals."""
        self.reset()
        self._host = BlockHookHost()
        detach(self.module, self)

    def as_text(self) -> dict[str, str]:
        """Return all options, with the current threshold, as ``{name: text}``, which ranks can compare."""
        return self.options.as_text(self.threshold)

    def run(
        self,
        call: Callable[[], Any],
        arguments: Mapping[str, Any],
        position: Position = _without_schedule,
        moment: int | None = None,
    ) -> Any:
        """Run one call of the model with the cache, and return its output. The model or its blocks may be
        compiled.

        Collective if several ranks decide together: each of them makes this call, for the same branch.

        Args:
            call: Calls the model with ``arguments``.
            arguments: The arguments of the call, by name.
            position: ``position(branch)`` returns the position of the call of this CFG branch in the
                schedule.
            moment: A number that changes from step to step; None if only the arguments can tell.

        Raises:
            TypeError: An argument lacks a field that ``conditions`` of the blocks name.
            ValueError: Blocks were replaced, and the model no longer has those that its description names; or
                one of diffusers' own caches was enabled on the model.
            RuntimeError: The model already runs with this cache, two calls of one step were taken for one
                branch, the call left out a block that the cache needs, or the user's policy function branches
                on values of tensors, so it cannot be compiled.
        """
        if getattr(self.module, "_cache_config", None) is not None:
            check_no_foreign_cache(self.module)
        # What is inside the blocks does not matter here.
        if self._holders != self._held:
            self._follow_replaced_blocks()
        host = self._host
        if host.roles is not self.roles:
            host = self.attach()
        if host.running is not None:
            raise already_running(self.module)
        self.uncached_by = None
        for name in self.blocks.uncached:
            if arguments.get(name) is not None:
                self.uncached_by = name
                with self.pause():
                    return call()
        self.look_up_plan()
        device = self._device = self.device_of(arguments)
        agree = None
        if self.arguments_are_parts:
            agree = self.agreement(device)
        branch_call = self._branches.identify(arguments, host.local.branch, moment, agree)
        if branch_call.name is None:
            self.reset_states()
            with self.pause():
                return call()
        # Ask for the step before looking up the state: for the first call of a section of a video, position()
        # resets the cache.
        self.step = step_of(self.options, *position(branch_call.name))
        if branch_call.repeated:
            self.step = replace(self.step, forced=Verdict.REPEATED)
        self.state = self.state_of(branch_call.name)
        signature = _tensor_forms(arguments)
        is_other = self.state.signature != signature
        if agree is not None:
            # Of a sequence with one token more, the part may be as long as before on all ranks but one.
            is_other = bool(agree(torch.tensor([int(is_other)])).item())
        if branch_call.begins or is_other:
            self.state.clear()
            self.state.signature = signature
        self.entries = None
        self.traced.begin_call(arguments, device)
        for observer in self.observers:
            observer.begin(self, branch_call.name, device)
        output = self._call_blocks(host, call)
        if branch_call.branch is not None:
            branch_call.branch.outcome = self.outcome
        self.outcomes.append(self.outcome)
        for observer in self.observers:
            observer.end(self.outcome)
        return output

    def _call_blocks(self, host: BlockHookHost, call: Callable[[], Any]) -> Any:
        """Return ``call()``, in which the hooks of ``host`` use this cache."""
        earlier_decider = self.state.decider
        # Set the thread before the cache, because the hooks in another thread compare it once they see the
        # cache.
        host.thread = get_ident()
        host.running = self
        try:
            output = call()
            # A group that was entered and not left has stored nothing, or returned its input in place of the forecast.
            if self.entries is not None and any(self.entries):
                raise left_out(self.module)
            decider = self.state.decider
            if decider is not None and decider.in_graph:
                self.traced.end_call(decider is not earlier_decider)
            return output
        except BaseException as error:
            # A call that failed midway may have stored the residuals of some groups only.
            self.reset()
            if self.options.policy is not None and is_data_dependent(error):
                raise RuntimeError(
                    f"policy={self.as_text()['policy']} cannot be compiled. In a graph the numbers of an Observation "
                    "are 0-dim tensors: write & and | in place of `and` and `or`, and torch.where in place of `if`."
                ) from error
            raise
        finally:
            host.running = None

    def announce(self, arguments: Mapping[str, Any], moment: int | None) -> None:
        """Identify the CFG branch of the next call of the model from its ``arguments``: :meth:`Branches.announce`."""
        if self.attach().local.branch is None:
            self._branches.announce(arguments, moment)

    def _new_branches(self) -> Branches:
        name = original_class(self.module).__name__
        return Branches(self.conditions, name, lambda key, text: self._warnings.warn(key, text, CacheWarning))

    def agreement(self, device: torch.device) -> Agree:
        """Return the function by which the ranks of the mesh agree on values. A call of it is collective."""
        dims = self.dims

        def agree(values: Tensor) -> Tensor:
            values = values.to(device)
            for dim in dims:
                values = all_gather(values[None], [1] * dim.size, 0, dim).amax(dim=0)
            return values

        return agree

    def device_of(self, arguments: Mapping[str, Any]) -> torch.device:
        """Return the device of the first tensor among ``arguments`` and fields of them, or that of the last call."""
        # Most models have a tensor among the arguments themselves. Look at fields only if not: it costs more
        # calls.
        for value in arguments.values():
            if isinstance(value, Tensor):
                return value.device
        tensors = named_tensors_in(arguments.items())
        if not tensors:
            return self._device
        return tensors[0][1].device

    def look_up_plan(self) -> None:
        """Look up what runs around the next call: a plan may have been applied or removed since the last one.

        Dynamo may trace this method. Then the mesh of a mode around the call is not looked up, so
        :func:`~para_core.cache.apply.apply_cache` needs ``mesh``.
        """
        fillings = filled_slots(self.module)
        region: Any = fillings.get((Slot.PLAN, ""), _NOT_FILLED).owner
        self.region = region
        self.stages = fillings.get((Slot.STAGES, ""), _NOT_FILLED).owner
        mesh = self._given_mesh
        if mesh is None and region is not None:
            mesh = region.mesh
        if mesh is None and not torch.compiler.is_compiling():
            for mode in reversed(function_mode_stack()):
                if isinstance(mode, UnifiedAttnMode):
                    mesh = mode._mesh
                    break
        if mesh is not self.mesh:
            self.mesh = mesh
            self.dims = ()
            if mesh is not None:
                self.dims = tuple([dim for dim in mesh.dims if dim.size > 1])
        self.arguments_are_parts = mesh is not None and region is None

    def state_of(self, branch: str) -> CacheState:
        """Return the state of ``branch``; create it if needed. At most ``MOST_BRANCHES`` states are kept,
        those used last.
        """
        state = self.states.pop(branch, None)
        if state is None:
            state = self._empty_state()
        self.states[branch] = state
        while len(self.states) > MOST_BRANCHES:
            self.states.pop(next(iter(self.states))).clear()
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
        return CacheState(len(self.blocks.groups), self.options.chosen_forecast.num_residuals)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Run the model without the cache inside the ``with`` block."""
        before = self.idle
        self.idle = True
        try:
            yield
        finally:
            self.idle = before

    def begin_generation(self) -> None:
        """Drop all stored residuals, branches and outcomes, and what observers know of earlier calls."""
        self.reset()
        self.outcomes.clear()
        for observer in self.observers:
            observer.clear()

    def reset(self) -> None:
        """Drop all stored residuals and forget all branches. The outcomes of the generation are kept."""
        self.reset_states()
        self._branches = self._new_branches()
        self.traced.refresh()

    def reset_states(self) -> None:
        """Drop all stored residuals."""
        for state in (*self.states.values(), self.state):
            state.clear()
        self._forget_states()

    def _forget_states(self) -> None:
        """Begin with an empty state, without branches, and with nothing of a current call."""
        self.states: dict[str, CacheState] = {}
        self.state = self._empty_state()
        self.traced.reset()
        self.entries = None
        # The inputs of block 0, until the step is decided.
        self.before: Streams | None = None
        # Whether to skip the remaining blocks: a bool, in a graph a bool tensor, None if nothing can be
        # compared.
        self.skip: bool | Tensor | None = None


def _tensor_forms(arguments: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the shape, dtype and device of each tensor among ``arguments``, by name, for which residuals are valid."""
    forms: list[Any] = []
    for name in sorted(arguments):
        value = arguments[name]
        if isinstance(value, Tensor):
            forms.append((name, value.shape, value.dtype, value.device))
        elif is_dataclass(value):
            forms += [(path, x.shape, x.dtype, x.device) for path, x in named_tensors_in([(name, value)])]
    return tuple(forms)
