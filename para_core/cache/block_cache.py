"""First Block Cache on one model: around its blocks, in eager code and in a compiled graph.

The blocks stay where they are, in the lists where they stand. Around each runs what lives in a private subclass
(``para_core.instance``): the first block is measured, those behind it are computed or passed by, and behind the last
one of a stage the stored residual is added. What a model does between its blocks (a ControlNet's residuals) is done on
skipped steps too, and then has no effect: the stored residual contains it.

In a graph the skipped blocks are a branch of ``torch.cond``: all of a stage in one where the model does nothing between
them, else each in one of its own, on one predicate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from para_core.boundaries import parameters_of
from para_core.cache.blocks import CachedBlocks, Stage
from para_core.cache.branches import MOST_BRANCHES, Branches
from para_core.cache.forecast import forecast_weights
from para_core.cache.options import CacheOptions, Observation
from para_core.cache.report import Observed, Reading, Stopwatch, Verdict
from para_core.cache.state import BranchState, History
from para_core.collectives import all_gather
from para_core.instance import Around, is_wrapped, original_class, unwrap, wrap_alike, wrap_method, wrapper
from para_core.mesh import SequenceMesh
from para_core.region import plan_mesh

_KEY = "cache"
# Inside of what a plan does at a block: it cuts what the first one is given.
_BLOCK_DEPTH = 1
# As numbers, which a graph can hold.
_HIT, _MISS, _WARMUP, _LIMIT, _NOT_FINITE = (
    float(verdict) for verdict in (Verdict.HIT, Verdict.MISS, Verdict.WARMUP, Verdict.LIMIT, Verdict.NOT_FINITE)
)


@dataclass(frozen=True)
class Step:
    """Where in the schedule a call is.

    Args:
        index, total: of the steps of the schedule; a call by hand has no schedule.
        time: on the schedule's own scale.
        must_compute: why this step is not to be skipped, if so.
    """

    index: int = 0
    total: int = 1
    time: float = 0.0
    must_compute: Verdict | None = None


@dataclass(frozen=True)
class _Role:
    """What is done at a block. Blocks of one role share a class, and so a graph."""

    stage: int
    streams: tuple[str, ...]
    parameters: tuple[str, ...]
    measured: str
    opens: bool
    decides: bool
    enters: bool
    skipped: bool
    exits: bool
    chained: bool


class BlockCache:
    """One model's cache under one set of options. Not for two threads.

    Args:
        module: the model.
        blocks: its block stack.
        options: what the user set.
        mesh: the ranks that hold the tokens of one sequence, which decide together; None: those of the plan that runs
            the model, if any.

    Raises:
        ValueError: the model has no such blocks, or none would ever be skipped.
    """

    def __init__(
        self, module: nn.Module, blocks: CachedBlocks, options: CacheOptions, mesh: SequenceMesh | None = None
    ) -> None:
        self.module = module
        self.blocks = blocks
        self.options = options
        self.roles = _roles(module, blocks, options)
        self._given_mesh = mesh
        self.mesh = mesh
        # Whether the model runs as if there were no cache.
        self.idle = False
        # Parts of the batch that are branches of their own.
        self.parts = 1
        self._branches = Branches(blocks.conditions)
        self.states: dict[str, BranchState] = {}
        self.state = BranchState()
        self.readings: list[Reading] = []
        self.step = Step()
        # For graphs: whether to compute, the time, the index, the total, the threshold.
        parameter = next(module.parameters(), None)
        self.step_numbers = self._numbers_of(self.step, torch.device("cpu") if parameter is None else parameter.device)
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

    def run(self, call: Callable[[], Any], given: Mapping[str, Any], step: Step) -> Any:
        """One call of the model in eager code, or of what was compiled of it.

        Args:
            given: the arguments of the call, by name.
        """
        attachment = attach(self)
        if attachment.running is not None:
            raise RuntimeError(
                f"this {type(self.module).__name__} with a cache is already running, in another thread? Both would use the "
                "same cache. Use one thread, or a copy of the model for each."
            )
        if any(given.get(name) is not None for name in self.blocks.uncached):
            with self.paused():
                return call()
        branch = attachment.branch or self._branches.name_of(given)
        state = self.state_of(branch)
        signature = tuple((name, *_form(x)) for name, x in sorted(given.items()) if isinstance(x, Tensor))
        if state.signature != signature:
            state.clear()
            state.signature = signature
        self.state, self.step, self.mesh = state, step, self._given_mesh or plan_mesh(self.module)
        self.unchained = [
            not stage.chained or any(given.get(name) is not None for name in stage.between)
            for stage in self.blocks.stages
        ]
        device = next((x.device for x in given.values() if isinstance(x, Tensor)), self.step_numbers.device)
        # A new tensor: an accelerator may still read the one before.
        self.step_numbers = self._numbers_of(step, device)
        stopwatch = Stopwatch(self.step_numbers.device)
        attachment.running = self
        try:
            output = call()
        except BaseException:
            self.reset()
            raise
        finally:
            attachment.running = None
        threshold = self.options.residual_diff_threshold
        self.readings.append(Reading(step.index, branch, threshold, self.observed, stopwatch.stop()))
        return output

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
        for state in self.states.values():
            state.clear()
        self.states, self.state = {}, BranchState()
        self._branches = Branches(self.blocks.conditions)
        self._before, self._skip, self._skip_on_device = None, None, None
        self._stage_outputs = [None] * len(self.blocks.stages)
        self._entries = [None] * len(self.blocks.stages)

    def _numbers_of(self, step: Step, device: torch.device) -> Tensor:
        numbers = [
            float(step.must_compute or 0),
            step.time,
            step.index,
            step.total,
            self.options.residual_diff_threshold,
        ]
        return torch.tensor(numbers, dtype=torch.float64).to(device, non_blocking=True)

    # -- around a block

    def run_block(
        self,
        role: _Role,
        block: nn.Module,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        given = tuple([_argument(name, role.parameters, args, kwargs) for name in role.streams])
        measured = given[role.streams.index(role.measured)]
        if role.opens:
            self._before = measured
        if not role.skipped:
            output = call(block, *args, **kwargs)
            if role.decides:
                after = _as_tuple(output)[role.streams.index(role.measured)]
                self._decide(after - self._before)
                self._before = None
            return output
        if role.enters:
            self._entries[role.stage] = given
        if self._skip is None or self._skip is False:
            output = call(block, *args, **kwargs)
            if role.exits:
                self._store(role, _as_tuple(output))
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
        first = state.first
        known = (
            first is not None
            and state.traced == traced
            and first.shape == sample.shape
            and first.dtype == sample.dtype
            and first.device == sample.device
        )
        if first is None or not known:
            self._skip = None
            self._begin(sample, traced)
        elif traced:
            self._decide_in_graph(sample, first)
        else:
            self._decide_now(sample, first)

    def _begin(self, sample: Tensor, traced: bool) -> None:
        """The first call of a branch: computed."""
        state = self.state
        state.first, state.traced, state.stages = sample.contiguous(), traced, [[] for _ in self.blocks.stages]
        parts = self._num_parts(sample)
        self.observed = (None,) * parts, Verdict.WARMUP
        if traced:
            # One call, no hit in a row, one computed; nothing carried; the time of this one.
            counted = sample.new_tensor([1.0, 0.0, 1.0, *[0.0] * parts], dtype=torch.float64)
            later = torch.zeros(self._num_residuals - 1, dtype=torch.float64, device=sample.device)
            state.numbers = torch.cat([counted, self.step_numbers[1:2], later])
        else:
            state.calls, state.hits_in_a_row, state.carried = 1, 0, (0.0,) * parts
            state.times = [self.step.time]

    def _decide_now(self, sample: Tensor, first: Tensor) -> None:
        state, options = self.state, self.options
        verdict = self.step.must_compute
        parts = self._num_parts(sample)
        differences: tuple[float | None, ...] = (None,) * parts
        if verdict is None and state.calls < options.warmup_steps:
            verdict = Verdict.WARMUP
        if verdict is None and options.max_consecutive_hits is not None:
            verdict = Verdict.LIMIT if state.hits_in_a_row >= options.max_consecutive_hits else None
        if verdict is None:
            # The one time that the host waits for the device.
            measured = self._measure(sample, first).tolist()
            found = tuple([x + y for x, y in zip(measured, state.carried, strict=True)])
            differences, verdict = found, self._verdict(found)
        state.calls += 1
        self._skip = verdict is Verdict.HIT
        if self._skip:
            state.hits_in_a_row += 1
            state.carried = found if options.rule.accumulates else state.carried
        else:
            state.hits_in_a_row, state.carried = 0, (0.0,) * parts
            state.times = [self.step.time, *state.times][: self._num_residuals]
        if not self._skip or options.rule.accumulates:
            state.first = sample.contiguous()
        self.observed = differences, verdict

    def _verdict(self, differences: tuple[float, ...]) -> Verdict:
        options = self.options
        if not all(math.isfinite(x) for x in differences):
            return Verdict.NOT_FINITE
        largest = max(differences)
        may_skip: Any = largest < options.residual_diff_threshold
        if options.policy is not None:
            step = self.step
            may_skip = options.policy(
                Observation(largest, options.residual_diff_threshold, step.index, step.total, self.state.hits_in_a_row)
            )
        return Verdict.HIT if bool(may_skip) else Verdict.MISS

    def _decide_in_graph(self, sample: Tensor, first: Tensor) -> None:
        state, options = self.state, self.options
        numbers = state.numbers
        if numbers is None:
            raise RuntimeError("the state of a cache has no numbers; reset_cache(model) makes it anew.")
        forced, time, index, total, threshold = self.step_numbers.unbind()
        calls, hits_in_a_row, computed = numbers[:3].unbind()
        parts = self._num_parts(sample)
        carried, times = numbers[3 : 3 + parts], numbers[3 + parts :]
        differences = self._measure(sample, first).double()
        if options.rule.accumulates:
            differences = differences + carried
        largest = differences.max()
        may_skip: Any = largest < threshold
        if options.policy is not None:
            may_skip = options.policy(Observation(largest, threshold, index, total, hits_in_a_row))
            may_skip = torch.as_tensor(may_skip, device=sample.device)
        verdict = torch.where(may_skip, _HIT, _MISS)
        verdict = torch.where(differences.isfinite().all(), verdict, _NOT_FINITE)
        if options.max_consecutive_hits is not None:
            verdict = torch.where(hits_in_a_row >= options.max_consecutive_hits, _LIMIT, verdict)
        verdict = torch.where(calls < options.warmup_steps, _WARMUP, verdict)
        verdict = torch.where(forced > 0, forced.to(verdict.dtype), verdict)
        skip = verdict == _HIT
        counted = torch.stack(
            [calls + 1, torch.where(skip, hits_in_a_row + 1, 0.0), torch.where(skip, computed, computed + 1)]
        )
        if options.rule.accumulates:
            carried = torch.where(skip, differences, 0.0)
        times = torch.where(skip, times, torch.cat([time[None], times[:-1]]))
        numbers.copy_(torch.cat([counted, carried, times]))
        first.copy_(sample if options.rule.accumulates else torch.where(skip, first, sample))
        self._skip_on_device = skip
        # Once: each branch of the graph reads it, and would else wait for the device.
        self._skip = skip.to("cpu")
        self.observed = differences, verdict

    def _measure(self, sample: Tensor, first: Tensor) -> Tensor:
        """``[P]`` differences, the same on all ranks that hold parts of this sequence."""
        rule, parts = self.options.rule, self._num_parts(sample)
        sums = rule.sums(sample.reshape(parts, -1), first.reshape(parts, -1))
        # Every rank adds up the same numbers in the same order, so none decides by another rounding.
        for dim in () if self.mesh is None else self.mesh.dims:
            if dim.size > 1:
                sums = all_gather(sums[None], [1] * dim.size, 0, dim).sum(dim=0)
        return rule.difference(sums)

    def _num_parts(self, sample: Tensor) -> int:
        return self.parts if sample.shape[0] % self.parts == 0 else 1

    # -- skipping, and what is stored for it

    @property
    def _num_residuals(self) -> int:
        return self.options.forecast_order + 1

    def _store(self, role: _Role, outputs: tuple[Tensor | None, ...]) -> None:
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

    def _forecast(self, role: _Role) -> tuple[Tensor | None, ...]:
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
        self, role: _Role, given: tuple[Any, ...], compute: Callable[[], tuple[Tensor | None, ...]]
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
        role: _Role,
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
        self, role: _Role, given: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
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

    def _store_in_graph(self, role: _Role, outputs: tuple[Tensor | None, ...]) -> None:
        skip = self._skip_on_device
        entries = self._entries[role.stage] or ()
        for history, x, entry in zip(self.state.stages[role.stage], outputs, entries, strict=True):
            residual = _residual(x, entry)
            if history is None or residual is None:
                continue
            for older, newer in zip(reversed(history[1:]), reversed(history[:-1]), strict=True):
                older.copy_(torch.where(skip, older, newer))
            history[0].copy_(torch.where(skip, history[0], residual))


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


def _nothing_like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _own(x: Tensor | None) -> Tensor:
    """A tensor of its own in the order of its dims, as both branches of ``torch.cond`` have to return it."""
    if x is None:
        raise RuntimeError("a block returned None where it returned a tensor before; call it without the cache.")
    return x.clone(memory_format=torch.contiguous_format)


def _as_tuple(output: Any) -> tuple[Any, ...]:
    return (output,) if isinstance(output, Tensor) else tuple(output)


def _like(role: _Role, values: tuple[Any, ...]) -> Any:
    return values[0] if len(role.streams) == 1 else values


def _form(x: Tensor) -> tuple[Any, ...]:
    return tuple(x.shape), x.dtype, x.device


def _argument(name: str, parameters: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    if name in kwargs:
        return kwargs[name]
    place = parameters.index(name)
    return args[place] if place < len(args) else None


def _blocks_of(module: nn.Module, stage: Stage) -> list[nn.Module]:
    found: list[nn.Module] = []
    for name in stage.lists:
        try:
            listed = module.get_submodule(name)
        except AttributeError:
            raise ValueError(
                f"{type(module).__name__} has no {name!r}, which the description of its blocks names. Name its module "
                "lists in Stage(lists=...)."
            ) from None
        found.extend(listed.children())
    return found


def _roles(module: nn.Module, blocks: CachedBlocks, options: CacheOptions) -> list[tuple[nn.Module, _Role]]:
    """Each block at which something is done, in the order in which they run, and what."""
    found = [(place, stage, block) for place, stage in enumerate(blocks.stages) for block in _blocks_of(module, stage)]
    first, stop = options.first_blocks, len(found) - options.last_blocks
    in_first_stage = sum(place == 0 for place, _, _ in found)
    if first >= stop or first > in_first_stage:
        raise ValueError(
            f"{type(module).__name__} has {len(found)} blocks, {in_first_stage} of them in its first stage; with "
            f"first_blocks={first} and last_blocks={options.last_blocks} none is left to skip. Choose fewer."
        )
    skipped = range(first, stop)
    roles = []
    for index, (place, stage, block) in enumerate(found):
        parameters = parameters_of(block)
        missing = [name for name in stage.streams if name not in parameters]
        if missing:
            raise ValueError(f"{type(block).__name__} has no parameter {missing[0]!r}; its forward takes {parameters}.")
        of_stage = [i for i in skipped if found[i][0] == place]
        role = _Role(
            stage=place,
            streams=stage.streams,
            parameters=parameters,
            measured=stage.measured,
            opens=index == 0,
            decides=index == first - 1,
            enters=bool(of_stage) and index == of_stage[0],
            skipped=index in skipped,
            exits=bool(of_stage) and index == of_stage[-1],
            chained=stage.chained,
        )
        if role.opens or role.decides or role.skipped:
            roles.append((block, role))
    return roles


# -- attaching


class Attachment:
    """What stands around the blocks of one model, for whichever cache runs there."""

    def __init__(self, cache: BlockCache) -> None:
        self.module = cache.module
        self.roles = cache.roles
        # Of the call under way, and of calls that no pipeline makes.
        self.running: BlockCache | None = None
        self.resident: BlockCache | None = None
        # Those for which it stands.
        self.owners: WeakSet[BlockCache] = WeakSet()
        # What diffusers' ``cache_context`` calls the branch under way.
        self.branch: str | None = None
        alike: dict[_Role, list[nn.Module]] = {}
        for block, role in cache.roles:
            alike.setdefault(role, []).append(block)
        for role, blocks in alike.items():
            wrap_alike(blocks, "__call__", _KEY, self._around_block(role), depth=_BLOCK_DEPTH)
        if hasattr(self.module, "cache_context"):
            wrap_method(self.module, "cache_context", _KEY, self._named)

    def _around_block(self, role: _Role) -> Around:
        def run_block(block: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            cache = self.running or self.resident
            if cache is None or cache.idle:
                return call(block, *args, **kwargs)
            return cache.run_block(role, block, call, args, kwargs)

        run_block.attachment = self  # type: ignore[attr-defined]
        return run_block

    @contextmanager
    def _named(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Iterator[None]:
        before, resident = self.branch, self.resident
        self.branch = str(args[0] if args else kwargs["name"])
        held = None if resident is None else resident.state
        if resident is not None:
            # For a graph of the whole model, which does not ask for the branch.
            resident.state = resident.state_of(self.branch)
        try:
            with call(module, *args, **kwargs):
                yield
        finally:
            self.branch = before
            if resident is not None and held is not None:
                resident.state = held

    def remove(self) -> None:
        """Give the blocks back as they were."""
        for block, _ in self.roles:
            unwrap(block, _KEY)
        if is_wrapped(self.module, _KEY):
            unwrap(self.module, _KEY)


def attach(cache: BlockCache) -> Attachment:
    """What stands around the blocks of ``cache``'s model: what stood there, if it fits."""
    found = _attachment_at(cache.roles[0][0])
    if found is None or found.roles != cache.roles:
        owners = () if found is None else tuple(found.owners)
        if found is not None:
            found.remove()
        found = Attachment(cache)
        found.owners.update(owners)
    found.owners.add(cache)
    return found


def detach(cache: BlockCache) -> None:
    """Undo :func:`attach`, unless another cache runs on the same model."""
    cache.reset()
    found = _attachment_at(cache.roles[0][0])
    if found is None:
        return
    found.owners.discard(cache)
    if found.resident is cache:
        found.resident = None
    if not found.owners:
        found.remove()


def _attachment_at(block: nn.Module) -> Attachment | None:
    found = getattr(wrapper(block, "__call__", _KEY), "attachment", None)
    return found if isinstance(found, Attachment) else None
