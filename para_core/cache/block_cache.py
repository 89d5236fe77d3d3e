"""First Block Cache on one model: around its blocks, in eager code and in a compiled graph.

The blocks stay where they are, in the lists where they stand. Around each runs what lives in a private subclass
(``para_core.instance``): the first block is measured, those behind it are computed or passed by, and behind the last
one of a stage the stored residual is added. What a model does between its blocks (a ControlNet's residuals) is done on
skipped steps too, and then has no effect: the stored residual contains it.

In a graph the skipped blocks are a branch of ``torch.cond``: all of a stage in one where the model does nothing between
them, else each in one of its own, on one predicate.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from para_core.cache.attachment import attach
from para_core.cache.blocks import CachedBlocks, Role, argument, roles_of
from para_core.cache.branches import MOST_BRANCHES, Branches
from para_core.cache.decision import Question, Step, begin, decide_in_graph, decide_now
from para_core.cache.foreign import require_no_foreign_cache
from para_core.cache.options import CacheOptions, forecast_weights
from para_core.cache.report import Observed, Reading, Stopwatch, Verdict
from para_core.cache.residuals import BranchState, History
from para_core.instance import original_class
from para_core.mesh import SequenceMesh
from para_core.modes.unified import UnifiedAttnMode
from para_core.plans.region import plan_mesh


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
        self.roles = roles_of(module, blocks, options.first_blocks, options.last_blocks)
        self._given_mesh = mesh
        self.mesh = mesh
        # Whether a graph was compiled with it.
        self.traced = False
        # Whether the model runs as if there were no cache.
        self.idle = False
        # Whether it was said that branches cannot be told apart.
        self._told = False
        # Branches of guidance in the whole batch, and its size, of which a plan may give this rank a part; 0: not known.
        self.branches, self.batch = 1, 0
        self._branches = Branches(blocks.conditions)
        self.states: dict[str, BranchState] = {}
        self.state = BranchState()
        self.readings: list[Reading] = []
        self.step = Step()
        parameter = next(module.parameters(), None)
        device = torch.device("cpu") if parameter is None else parameter.device
        self.step_numbers = self.step.numbers(options, device)
        # Of each stage, whether the model does something between its blocks in this call.
        self.unchained = [not stage.chained for stage in blocks.stages]
        # Of each stage, the blocks that may be skipped, and what calls them without a cache around.
        self._stage_blocks = [
            [
                (block, original_class(block).__call__)
                for block, role in self.roles
                if role.skipped and role.stage == place
            ]
            for place in range(len(blocks.stages))
        ]
        # Of the call under way.
        # A list: an attribute that is set behind torch.cond stays what it was, in Dynamo 2.13.
        self._stage_outputs: list[tuple[Tensor | None, ...] | None] = [None] * len(blocks.stages)
        self._before: Tensor | None = None
        self._entries: list[tuple[Tensor | None, ...] | None] = [None] * len(blocks.stages)
        self._skip: bool | Tensor | None = None
        self._skip_on_device: Any = None
        self.observed: Observed = (None, Verdict.WARMUP)

    # -- around the model

    def run(self, call: Callable[[], Any], given: Mapping[str, Any], step_of: Callable[[str], Step]) -> Any:
        """One call of the model in eager code, or of what was compiled of it.

        Args:
            given: the arguments of the call, by name.
            step_of: where in the schedule this call of a branch is.
        """
        if getattr(self.module, "_cache_config", None) is not None:
            require_no_foreign_cache(self.module)
        site = attach(self)
        if site.running is not None:
            raise RuntimeError(
                f"this {type(self.module).__name__} with a cache is already running, in another thread? Both would use the "
                "same cache. Use one thread, or a copy of the model for each."
            )
        if any(given.get(name) is not None for name in self.blocks.uncached):
            with self.paused():
                return call()
        branch = site.branch or self._branches.name_of(given)
        if branch is None:
            return self._run_without_branches(call)
        state = self.state_of(branch)
        signature = tuple((name, *_form(x)) for name, x in sorted(given.items()) if isinstance(x, Tensor))
        if state.signature != signature:
            state.clear()
            state.signature = signature
        step = step_of(branch)
        self.state, self.step = state, step
        self.find_mesh()
        self.unchained = [
            not stage.chained or any(given.get(name) is not None for name in stage.between)
            for stage in self.blocks.stages
        ]
        device = next((x.device for x in given.values() if isinstance(x, Tensor)), self.step_numbers.device)
        # A new tensor: an accelerator may still read the one before.
        self.step_numbers = step.numbers(self.options, device)
        stopwatch = Stopwatch(self.step_numbers.device)
        site.running, site.thread = self, get_ident()
        try:
            output = call()
        except BaseException as error:
            self.reset()
            if self.options.policy is not None and _is_of_graph(error):
                raise RuntimeError(
                    f"policy={self.options.as_text()['policy']} cannot be compiled. In a graph the numbers of an Observation are 0-dim "
                    "tensors: write & and | in place of `and` and `or`, and torch.where in place of `if`."
                ) from error
            raise
        finally:
            site.running = None
        threshold = self.options.residual_diff_threshold
        samples = 1 if state.first is None else state.first.shape[0]
        branches = self.branches if self.batch == 0 else self.branches * samples // self.batch
        branches = branches if branches > 0 and samples % branches == 0 else 1
        names = [branch] if branches == 1 else [f"{branch}/{i}" for i in range(branches)]
        self.readings.append(Reading(step.index, names, samples, threshold, self.observed, stopwatch.stop()))
        return output

    def _run_without_branches(self, call: Callable[[], Any]) -> Any:
        self.reset_states()
        if not self._told:
            self._told = True
            conditions = " and ".join(self.blocks.conditions)
            warnings.warn(
                f"{conditions} of this {type(self.module).__name__} change from step to step, so its branches of guidance cannot be "
                "told apart, and all steps are computed. Call it inside `with model.cache_context(name)`, or name in "
                "CachedBlocks(conditions=...) what stays from step to step.",
                stacklevel=6,
            )
        with self.paused():
            return call()

    def find_mesh(self) -> None:
        """A plan may have been applied, or removed, since the last call. Traced where the whole call is."""
        self.mesh = self._given_mesh or plan_mesh(self.module)
        if self.mesh is None and not torch.compiler.is_compiling():
            modes = torch.overrides._get_current_function_mode_stack()
            self.mesh = next((mode._mesh for mode in reversed(modes) if isinstance(mode, UnifiedAttnMode)), None)

    def state_of(self, branch: str) -> BranchState:
        """What is held of a branch; of too many, the oldest goes."""
        state = self.states.pop(branch, None) or BranchState()
        self.states[branch] = state
        for oldest in list(self.states)[:-MOST_BRANCHES]:
            self.states.pop(oldest).clear()
        return state

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
        self._branches = Branches(self.blocks.conditions)

    def reset_states(self) -> None:
        for state in (*self.states.values(), self.state):
            self.traced = self.traced or state.traced
            state.clear()
        self.states, self.state = {}, BranchState()
        self._before, self._skip, self._skip_on_device = None, None, None
        self._stage_outputs = [None] * len(self.blocks.stages)
        self._entries = [None] * len(self.blocks.stages)

    # -- around a block

    def run_block(
        self,
        role: Role,
        block: nn.Module,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        given = tuple([argument(name, role.parameters, args, kwargs) for name in role.streams])
        measured = given[role.streams.index(role.measured)]
        if role.opens:
            self._before = measured
        if not role.skipped:
            output = call(block, *args, **kwargs)
            if role.decides:
                outputs = _as_tuple(output)
                _require_streams(role, block, given, outputs)
                self._decide(outputs[role.streams.index(role.measured)] - self._before)
                self._before = None
            return output
        if role.enters:
            self._entries[role.stage] = given
        if self._skip is None or self._skip is False:
            output = call(block, *args, **kwargs)
            if role.exits:
                outputs = _as_tuple(output)
                _require_streams(role, block, given, outputs)
                self._store(role, outputs)
        elif self._skip is True:
            output = _like(role, self._forecast(role) if role.exits else given)
        elif role.chained and not self.unchained[role.stage]:
            output = self._run_stage_in_graph(role, given, args, kwargs)
        else:
            output = self._run_in_graph(role, given, lambda: _as_tuple(call(block, *args, **kwargs)))
        if role.exits:
            self._entries[role.stage] = None
        return output

    # -- deciding

    def _decide(self, residual: Tensor) -> None:
        """Whether the blocks that follow are skipped; ``_skip`` is None where nothing is stored yet."""
        state = self.state
        traced = torch.compiler.is_compiling()
        sample = residual.detach()[..., :: self.options.downsample]
        if sample.dim() < 3:
            # Tokens without a batch.
            sample = sample[None]
        asked = Question(sample, self.options, self.step, self.step_numbers, self.mesh)
        first = state.first
        if first is None or state.traced != traced or _form(first) != _form(sample):
            self._skip = None
            state.stages = [[] for _ in self.blocks.stages]
            self.observed = begin(state, asked, traced)
        elif traced:
            self._skip_on_device, self.observed = decide_in_graph(state, asked, first)
            # Once: each branch of the graph reads it, and would else wait for the device.
            self._skip = self._skip_on_device.to("cpu")
        else:
            self._skip, self.observed = decide_now(state, asked, first)

    # -- skipping, and what is stored for it

    @property
    def _num_residuals(self) -> int:
        return self.options.forecast_order + 1

    def _store(self, role: Role, outputs: tuple[Tensor | None, ...]) -> None:
        """The residual of a stage that was computed."""
        histories = self.state.stages[role.stage]
        entries = self._entries[role.stage] or ()
        new = [_residual(x, y) for x, y in zip(outputs, entries, strict=True)]
        if not histories:
            room = self._num_residuals if self.state.traced else 1
            # In a graph all have their place from the start; weights of 0 are given to those not known yet.
            histories.extend([None if x is None else [x, *[torch.zeros_like(x) for _ in range(room - 1)]] for x in new])
            return
        for history, residual in zip(histories, new, strict=True):
            if history is not None and residual is not None:
                history.insert(0, residual)
                del history[self._num_residuals :]

    def _forecast(self, role: Role) -> tuple[Tensor | None, ...]:
        """What a stage of skipped blocks gives."""
        numbers, times = self.state.numbers, self.state.times
        weights: Any = [1.0]
        if self.options.forecast_order > 0 and numbers is not None:
            times_stored = numbers[-self._num_residuals :]
            weights = forecast_weights(times_stored, self.step_numbers[1], numbers[2]).unbind()
        elif self.options.forecast_order > 0:
            known = torch.tensor(len(times))
            weights = forecast_weights(torch.tensor(times), torch.tensor(self.step.time), known).tolist()
        entries = self._entries[role.stage] or ()
        histories = self.state.stages[role.stage]
        return tuple([_forecast(x, history, weights) for x, history in zip(entries, histories, strict=True)])

    def _run_in_graph(
        self, role: Role, given: tuple[Any, ...], compute: Callable[[], tuple[Tensor | None, ...]]
    ) -> Any:
        """One block."""
        if not role.exits:
            # What it would give is replaced where the stage ends, so nothing is to be in it.
            return _like(role, self._cond(role, lambda: tuple([_nothing_like(x) for x in given]), compute, given))
        outputs = self._cond(role, lambda: self._forecast(role), compute, given)
        self._store_in_graph(role, outputs)
        return _like(role, outputs)

    def _cond(
        self,
        role: Role,
        skipped: Callable[[], tuple[Tensor | None, ...]],
        computed: Callable[[], tuple[Tensor | None, ...]],
        given: tuple[Any, ...],
    ) -> tuple[Tensor | None, ...]:
        """``skipped()`` or ``computed()``."""
        histories = self.state.stages[role.stage]
        ends_stage = role.exits or (role.chained and not self.unchained[role.stage])
        present = [i for i in range(len(given)) if not ends_stage or histories[i] is not None]

        def own(make: Callable[[], tuple[Tensor | None, ...]]) -> Callable[[], tuple[Tensor, ...]]:
            def made() -> tuple[Tensor, ...]:
                values = make()
                return tuple([_own(values[i]) for i in present])

            return made

        skip: Any = self._skip
        found = torch.cond(skip, own(skipped), own(computed), ())
        outputs: list[Tensor | None] = [None] * len(given)
        for i, x in zip(present, found, strict=True):
            outputs[i] = x
        return tuple(outputs)

    def _run_stage_in_graph(
        self, role: Role, given: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """All blocks of a stage at its first one; the others hand on what they are given."""
        if not role.enters:
            before = self._stage_outputs[role.stage] or (None,) * len(given)
            # No generator: Dynamo 2.13 runs it further than any() does.
            if not all([x is y for x, y in zip(given, before, strict=True)]):  # noqa: C419
                raise RuntimeError(
                    f"{type(self.module).__name__} does something between the blocks of {self.blocks.stages[role.stage].lists}. "
                    "Name the arguments that make it do so in Stage(between=...), or leave chained= out."
                )
            if role.exits:
                self._stage_outputs[role.stage] = None
            return _like(role, given)
        streams = role.streams
        places = [streams.index(name) if name in streams else None for name in role.parameters[: len(args)]]

        def compute() -> tuple[Tensor | None, ...]:
            values = given
            for block, call in self._stage_blocks[role.stage]:
                positional = [x if place is None else values[place] for place, x in zip(places, args, strict=False)]
                named = {name: values[streams.index(name)] if name in streams else x for name, x in kwargs.items()}
                values = _as_tuple(call(block, *positional, **named))
            return values

        outputs = self._cond(role, lambda: self._forecast(role), compute, given)
        self._store_in_graph(role, outputs)
        if not role.exits:
            self._stage_outputs[role.stage] = outputs
        return _like(role, outputs)

    def _store_in_graph(self, role: Role, outputs: tuple[Tensor | None, ...]) -> None:
        skip = self._skip_on_device
        entries = self._entries[role.stage] or ()
        for history, x, entry in zip(self.state.stages[role.stage], outputs, entries, strict=True):
            residual = _residual(x, entry)
            if history is None or residual is None:
                continue
            for older, newer in zip(reversed(history[1:]), reversed(history[:-1]), strict=True):
                older.copy_(torch.where(skip, older, newer))
            history[0].copy_(torch.where(skip, history[0], residual))


def _require_streams(role: Role, block: nn.Module, given: tuple[Any, ...], returned: tuple[Any, ...]) -> None:
    """Raise unless a block returned its streams in the order that its role names."""
    before, after = ([None if x is None else tuple(x.shape) for x in tensors] for tensors in (given, returned))
    if len(before) != len(after) or any(x != y for x, y in zip(before, after, strict=False) if None not in (x, y)):
        raise ValueError(
            f"{original_class(block).__name__} was given {role.streams} of shapes {before}, and returned shapes {after}. Name "
            "in Stage(streams=...) the parameters whose changed values it returns, in the order in which it returns them."
        )


def _residual(output: Tensor | None, entry: Tensor | None) -> Tensor | None:
    return None if output is None or entry is None else output.detach() - entry.detach()


def _forecast(entry: Tensor | None, history: History, weights: Any) -> Tensor | None:
    if entry is None or history is None:
        return None
    if len(weights) == 1:
        return entry + history[0]
    total = entry
    for weight, residual in zip(weights, history, strict=False):
        total = total + (weight * residual).to(entry.dtype)
    return total


def _is_of_graph(error: BaseException) -> bool:
    """Whether something could not be traced since it depends on the values of tensors."""
    return type(error).__module__ == "torch._dynamo.exc" and "data-dependent" in str(error).lower()


def _nothing_like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _own(x: Tensor | None) -> Tensor:
    """A tensor of its own in the order of its dims, as both branches of ``torch.cond`` have to return it."""
    if x is None:
        raise RuntimeError("a block returned None where it returned a tensor before; call it without the cache.")
    return x.clone(memory_format=torch.contiguous_format)


def _as_tuple(output: Any) -> tuple[Any, ...]:
    return (output,) if isinstance(output, Tensor) else tuple(output)


def _like(role: Role, values: tuple[Any, ...]) -> Any:
    return values[0] if len(role.streams) == 1 else values


def _form(x: Tensor) -> tuple[Any, ...]:
    return tuple(x.shape), x.dtype, x.device
