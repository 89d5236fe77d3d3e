"""PipeFusion (arXiv:2405.14430): stages work at once, each on another patch of the image. Approximate, and off unless asked for.

The tokens of an image are split into patches. Stage ``s`` computes patch ``m`` while stage ``s - 1`` computes ``m + 1``: a patch attends
to keys and values of the others as they were at the step before (:mod:`~para_core.weights.stale_keys`). What the model returns comes in
patches, too (:mod:`~para_core.weights.patches`), and the scheduler's step is recorded: patch ``m`` of the next step begins as soon as patch
``m`` of this one is back, without waiting for the others. What is computed depends on the number of patches alone, not on that of the
stages: one process computes the same numbers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from para_core.cfg.deferred import Expected, LiveDeferred, materialize
from para_core.instance_patching import (
    WrapperPriority,
    has_compiled_parts,
    is_compiled,
    unwrap,
    wrap_alike,
    wrap_method,
    wrapper,
)
from para_core.modes.interceptor import at_the_dispatcher, dispatcher_is_available
from para_core.plans.module_matching import parameters_of
from para_core.plans.region import intercepts_by_mode, suspend_interception
from para_core.torch_internals import pytree
from para_core.weights.patch_operator import PatchAttnMode, attending_by
from para_core.weights.patch_plan import PatchCuts, PatchPlaces, PatchPlan, Rows
from para_core.weights.patches import Arrival, Patched
from para_core.weights.stages import Stages, stages_of
from para_core.weights.stale_keys import StaleKeys

_KEY = "pipefusion"
# With fewer, each differs too much from the one before: all are computed whole.
FEWEST_STEPS = 8


@dataclass(frozen=True)
class PipeFusion:
    """How :func:`~para_core.adapters.parallelize_pipe` runs stages on patches. Not exact.

    Args:
        num_patches: of the tokens of an image. More leave stages idle for less time, and cost the host more.
        warmup_steps: the first steps, at least one, are computed whole, and exactly.
        cooldown_steps: the last steps, too.
    """

    num_patches: int = 4
    warmup_steps: int = 1
    cooldown_steps: int = 0

    def __post_init__(self) -> None:
        least = {"num_patches": 1, "warmup_steps": 1, "cooldown_steps": 0}
        for name, smallest in least.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"PipeFusion({name}={value!r}): expected an integer.")
            if value < smallest:
                why = ": patches need the keys of a step before" if name == "warmup_steps" else ""
                raise ValueError(f"PipeFusion({name}={value}): expected at least {smallest}{why}.")

    def is_whole(self, index: int, total: int) -> bool:
        """Whether step ``index`` of ``total`` is computed whole."""
        return total < FEWEST_STEPS or index < self.warmup_steps or index >= total - self.cooldown_steps


@dataclass(frozen=True)
class PipeFusionReport:
    """What PipeFusion did in the last generation, on this rank.

    Args:
        whole_calls, patched_calls: of the model: exact ones, and those in patches.
        overlapping_calls: of the latter, those that began before the step before had ended. All but the first, where the scheduler's step is
            of single elements (Euler, DPM++ 2M); with others (UniPC) stages wait once a step. Of several branches, the first begins a step.
        key_bytes: of keys and values held, of all branches of guidance.
        bytes_sent: to other stages.
        seconds, seconds_waited: of patched calls, and how much of that this stage waited for others (on NCCL the host does not wait).
    """

    whole_calls: int = 0
    patched_calls: int = 0
    overlapping_calls: int = 0
    key_bytes: int = 0
    bytes_sent: int = 0
    seconds: float = 0.0
    seconds_waited: float = 0.0


@dataclass
class _Branch:
    """Of one branch of guidance: the keys of the step before, and the form of what the model is given and gives."""

    keys: StaleKeys
    form: tuple[Any, ...]
    output: Expected | None = None
    calls: int = 0


@dataclass
class _Counted:
    whole: int = 0
    patched: int = 0
    overlapping: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    sent: int = 0
    marks: list[int] = field(default_factory=list)


class Fusion:
    """One model on patches, over the stages that were applied to it; without stages, alone. For eager code, one thread, inference.

    Args:
        branch_of: of the arguments of a call by name, the name of its branch of guidance.
        step_of: of a branch, the index of the step under way, and how many there are.
    """

    def __init__(
        self,
        module: nn.Module,
        options: PipeFusion,
        plan: PatchPlan,
        blocks: list[nn.Module],
        branch_of: Callable[[Mapping[str, Any]], str],
        step_of: Callable[[str], tuple[int, int]],
    ) -> None:
        self.module, self.options = module, options
        self._plan, self._branch_of, self._step_of = plan, branch_of, step_of
        self._parameters = parameters_of(module)
        self._places = PatchPlaces(module, plan.plan)
        self._stages: Stages | None = stages_of(module)
        self._own = blocks if self._stages is None else [blocks[index] for index in self._stages.own]
        self._branches: dict[str, _Branch] = {}
        # Of the call under way; whether a mode makes an operator of its attention.
        self._keys: StaleKeys | None = None
        self._in_graphs = False
        # What may still be on its way.
        self._coming: list[Arrival] = []
        self._live = LiveDeferred()
        self._counted = _Counted()
        self.few_steps = False

    def install(self) -> None:
        wrap_method(self.module, "__call__", _KEY, self.run, order=WrapperPriority.STAGES)
        wrap_alike(self._own, "__call__", _KEY, self._block, order=WrapperPriority.STAGED_BLOCK)
        self._places.install()

    def remove(self) -> None:
        self._places.remove()
        for module in (self.module, *self._own):
            unwrap(module, _KEY)

    # -- a generation

    def begin(self) -> None:
        self._branches, self._coming, self._counted, self.few_steps = {}, [], _Counted(), False
        self._report = PipeFusionReport()

    def end(self, *, failed: bool = False) -> None:
        """Wait for all patches that are in flight; after an exception, mark the links as broken instead."""
        links = None if self._stages is None else self._stages.links
        try:
            if not failed:
                for arrival in self._coming:
                    arrival.up_to(arrival.num_patches - 1)
                if links is not None:
                    links.drain()
        except BaseException:
            failed = True
            raise
        finally:
            if failed and links is not None:
                links.mark_broken()
            self._finish()

    def _finish(self) -> None:
        """Write the report and drop what belongs to the generation."""
        self._live.become_tensors()
        counted = self._counted
        held = sum(branch.keys.nbytes for branch in self._branches.values())
        self._report = PipeFusionReport(
            counted.whole,
            counted.patched,
            counted.overlapping,
            held,
            counted.sent,
            counted.seconds,
            counted.waited,
        )
        self._branches, self._coming, self._keys = {}, [], None

    def report(self) -> PipeFusionReport:
        """Of the last generation."""
        return self._report

    # -- around the model and its blocks

    def _block(self, call: Callable[..., Any], block: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if self._keys is None:
            return call(block, *args, **kwargs)
        if not self._in_graphs:
            with at_the_dispatcher(self._keys.attend):
                return call(block, *args, **kwargs)
        args, kwargs = pytree.tree_map_only(Tensor, _with_own_strides, (args, kwargs))
        with (
            suspend_interception(self.module),
            attending_by(self._keys.attend_in_graph),
            PatchAttnMode(self._places.default),
        ):
            return call(block, *args, **kwargs)

    def run(self, call: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(self._parameters, args, strict=False)), **kwargs}
        self._refuse(module)
        # Not once for each patch: it looks at all modules.
        # A mode of the plan sees attention before the dispatcher does, so patches need a mode inside of it.
        by_mode = intercepts_by_mode(module) or not dispatcher_is_available()
        self._in_graphs = by_mode or any(map(has_compiled_parts, self._own))
        name = self._branch_of(given)
        index, total = self._step_of(name)
        self.few_steps = self.few_steps or total < FEWEST_STEPS
        form = tuple((key, tuple(x.shape), x.dtype) for key, x in sorted(given.items()) if isinstance(x, Tensor))
        branch = self._branches.get(name)
        if branch is None or branch.form != form or branch.output is None or self.options.is_whole(index, total):
            return self._whole(call, module, name, form, given)
        return self._patched(call, module, branch, given)

    def _refuse(self, module: nn.Module) -> None:
        if torch.compiler.is_compiling() or is_compiled(module):
            raise RuntimeError(
                f"this {type(module).__name__} runs under PipeFusion, and was compiled as a whole: a graph cannot return patch after patch. "
                "Compile its blocks: transformer.compile_repeated_blocks(fullgraph=True)."
            )
        # It would be of something else.
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"this {type(module).__name__} runs under PipeFusion, and was called with gradients enabled. Call it under torch.no_grad(); "
                "or leave pipefusion= out."
            )

    def _whole(
        self, call: Callable[..., Any], module: nn.Module, name: str, form: tuple[Any, ...], given: Mapping[str, Any]
    ) -> Any:
        """All tokens at once, exactly; keys are held for the patches of the next step."""
        given = materialize(dict(given))
        branch = self._branches.setdefault(name, _Branch(StaleKeys(self._places), form))
        branch.form = form
        self._counted.whole += 1
        output = self._call(call, module, branch, self._cuts(given, 0, 1), given)
        tensors = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor)]
        branch.output = Expected(tensors[0].to("meta"), tensors[0].device) if len(tensors) == 1 else None
        return output

    def _cuts(self, given: Mapping[str, Any], patch: int, num_patches: int) -> PatchCuts:
        tokens = given["hidden_states"]
        units = None if tokens.ndim == 3 else tokens.shape[self._plan.dim] // self._plan.together
        return PatchCuts(self._plan, patch, num_patches, units)

    def _call(
        self, call: Callable[..., Any], module: nn.Module, branch: _Branch, cuts: PatchCuts, given: Mapping[str, Any]
    ) -> Any:
        """One patch, or (of one) all tokens."""
        branch.keys.begin(whole=cuts.mesh.ranks == 1)
        self._places.begin(cuts, in_graphs=self._in_graphs)
        self._keys = branch.keys
        try:
            _, given = cuts.arguments(self._plan.plan.inputs, self._parameters, (), dict(given))
            return call(module, **given)
        finally:
            self._places.begin(None)
            self._keys = None

    def _patched(self, call: Callable[..., Any], module: nn.Module, branch: _Branch, given: Mapping[str, Any]) -> Any:
        stages, counted = self._stages, self._counted
        start = time.perf_counter()
        overlapping = isinstance(given["hidden_states"], Patched) and not given["hidden_states"].source.is_complete
        waited, sent = (0.0, 0) if stages is None else (stages.links.seconds_waited, stages.links.bytes_sent)
        tokens = given["hidden_states"]
        rows = self._plan.rows(tokens, self.options.num_patches)
        expected: Any = branch.output
        whole = torch.empty(expected.like.shape, dtype=expected.like.dtype, device=expected.device)
        arrival = Arrival(whole, rows, self._plan.dim)
        self._begin_call(arrival)
        if stages is not None:
            stages.whole = False
        try:
            for patch, own in enumerate(rows):
                output = self._one_patch(call, module, branch, self._given(given, patch), arrival, patch, own)
        finally:
            if stages is not None:
                stages.whole = True
        if isinstance(tokens, Patched):
            # All of it has come, for this stage has computed with it, or behind one that has. Nothing grows from step to step.
            tokens.value()
        counted.patched, counted.overlapping = counted.patched + 1, counted.overlapping + overlapping
        counted.seconds += time.perf_counter() - start
        if stages is not None:
            counted.waited += stages.links.seconds_waited - waited
            counted.sent += stages.links.bytes_sent - sent
        found = Patched.of_source(arrival, expected, self._live)
        return pytree.tree_map_only(Tensor, lambda _: found, output)

    def _begin_call(self, arrival: Arrival) -> None:
        """What was sent two calls ago has been taken: whoever sent tokens of the last call here had it."""
        self._coming = [one for one in self._coming if not one.is_complete] + [arrival]
        if self._stages is not None:
            marks = self._counted.marks
            marks.append(self._stages.links.sent)
            if len(marks) > 2:
                self._stages.links.drain(marks.pop(0))

    def _one_patch(
        self,
        call: Callable[..., Any],
        module: nn.Module,
        branch: _Branch,
        given: Mapping[str, Any],
        arrival: Arrival,
        patch: int,
        own: Rows,
    ) -> Any:
        """Patch ``patch`` through this rank's blocks, and what becomes of its noise."""
        stages = self._stages
        like: Any = branch.output
        noise = like.like.narrow(self._plan.dim, *own)
        output = self._call(call, module, branch, self._cuts(given, patch, self.options.num_patches), given)
        if stages is not None and not stages.is_last:
            # Only now: the noise depends on the tokens that this rank has just sent, and on NCCL a receive occupies the device until its
            # tensor is here. If the host had to wait for the device while it computes those tokens, both ranks would wait for ever.
            buffer = torch.empty(noise.shape, dtype=noise.dtype, device=like.device)
            arrival.comes(stages.links.receive(buffer, stages.dim.size - 1).wait)
        if stages is None or stages.is_last:
            made: Tensor = next(x for x in pytree.tree_leaves(output) if isinstance(x, Tensor))
            if not self._plan.returns_patch:
                made = made.narrow(self._plan.dim, *own).contiguous()
            arrival.comes(lambda: made)
            for stage in range(0 if stages is None else stages.dim.size - 1):
                stages.links.send(made, stage)  # type: ignore[union-attr]
        return output

    def _given(self, given: Mapping[str, Any], patch: int) -> Mapping[str, Any]:
        """The arguments as far as patch ``patch`` needs them; stages behind the first take zeros for latents, whose embeddings tell the form
        of what they receive."""
        tokens = given["hidden_states"]
        if not isinstance(tokens, Patched):
            return given
        first = self._stages is None or self._stages.dim.index == 0
        some = (
            tokens.source.up_to(patch) if first else torch.zeros(tokens.shape, dtype=tokens.dtype, device=tokens.device)
        )
        return {**given, "hidden_states": some}


def _with_own_strides(x: Tensor) -> Tensor:
    """Return ``x`` with the strides of a tensor of its shape alone, and as no view.

    A part of text and image tokens in one tensor has other strides than a tensor of its own, even where it is contiguous (a batch of one, or no
    tokens), and a base of another shape: Dynamo makes a graph for each.
    """
    return x.contiguous().view(-1).view(x.shape).detach()


def fusion_of(module: nn.Module) -> Fusion | None:
    """What :class:`Fusion` put around ``module``, if it did."""
    found = getattr(wrapper(module, "__call__", _KEY), "__self__", None)
    return found if isinstance(found, Fusion) else None
