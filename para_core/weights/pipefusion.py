"""PipeFusion (arXiv:2405.14430): all stages work at once, each on another patch of the image. Not exact, and off by
default.

The tokens of an image are split into patches. Stage ``s`` computes patch ``m`` while stage ``s - 1`` computes patch
``m + 1``. A patch attends to the keys and values that the other patches had at the previous step
(:mod:`~para_core.weights.stale_keys`). The output of the model arrives in patches (:mod:`~para_core.weights.patches`),
and the scheduler's step is recorded, so that patch ``m`` of the next step starts as soon as patch ``m`` of this step
has arrived. The result depends on the number of patches, not on the number of stages: one process computes the same
numbers.
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
# With fewer steps, consecutive steps differ too much, so all steps are computed without patches.
FEWEST_STEPS = 8


@dataclass(frozen=True)
class PipeFusion:
    """Options of PipeFusion, for ``parallelize_pipe(pipe, pipefusion=PipeFusion(...))``. Not exact.

    Args:
        num_patches (`int`, defaults to `4`): Number of patches of an image. With more patches the stages are idle for
            less time, and the host has more work.
        warmup_steps (`int`, defaults to `1`): Number of steps at the start, at least one, that are computed without
            patches, exactly.
        cooldown_steps (`int`, defaults to `0`): Number of steps at the end that are computed without patches.

    Raises:
        TypeError, ValueError: A value is not an integer, or too small.
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
                why = ", because patches need the keys of an earlier step" if name == "warmup_steps" else ""
                raise ValueError(f"PipeFusion({name}={value}): expected at least {smallest}{why}.")

    def is_whole(self, index: int, total: int) -> bool:
        """Whether step ``index`` of ``total`` steps is computed without patches."""
        return total < FEWEST_STEPS or index < self.warmup_steps or index >= total - self.cooldown_steps


@dataclass(frozen=True)
class PipeFusionReport:
    """The record of PipeFusion's last generation on this rank.

    Args:
        whole_calls, patched_calls: Number of model calls without patches, which are exact, and with patches.
        overlapping_calls: Number of patched calls that started before the previous step had ended. These are all but
            the first if the scheduler computes elementwise (Euler, DPM++ 2M). With other schedulers (UniPC) the stages
            wait once per step.
        key_bytes: Bytes of the stored keys and values, of all CFG branches.
        bytes_sent: Bytes sent to other stages.
        seconds, seconds_waited: Duration of the patched calls, and how long this stage waited for others. On NCCL the
            host does not wait.
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
    """The state of one CFG branch: the keys of the previous step, and the forms of the model's inputs and output."""

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
    """PipeFusion on one model, with the stages that are applied to it, or on one process. For inference in eager code
    and one thread.

    Args:
        branch_of: Returns the name of the CFG branch for the arguments of a call by name.
        step_of: Returns the index of a branch's current step, and the number of steps.
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
        # The stored keys of the current call, and whether a mode turns its attention into operators.
        self._keys: StaleKeys | None = None
        self._in_graphs = False
        # Outputs whose patches may still be in flight.
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
        """Wait for all patches in flight. After an exception, mark the links as broken instead."""
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
        """Write the report and drop the state of the generation."""
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
        """Return the report of the last generation."""
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
        arguments = {**dict(zip(self._parameters, args, strict=False)), **kwargs}
        self._refuse(module)
        # A mode of the plan sees attention before the dispatcher does, so patches then need a mode inside of it. Once
        # per call and not per patch, because has_compiled_parts looks at all modules.
        by_mode = intercepts_by_mode(module) or not dispatcher_is_available()
        self._in_graphs = by_mode or any(map(has_compiled_parts, self._own))
        name = self._branch_of(arguments)
        index, total = self._step_of(name)
        self.few_steps = self.few_steps or total < FEWEST_STEPS
        form = tuple((key, tuple(x.shape), x.dtype) for key, x in sorted(arguments.items()) if isinstance(x, Tensor))
        branch = self._branches.get(name)
        if branch is None or branch.form != form or branch.output is None or self.options.is_whole(index, total):
            return self._whole(call, module, name, form, arguments)
        return self._patched(call, module, branch, arguments)

    def _refuse(self, module: nn.Module) -> None:
        if torch.compiler.is_compiling() or is_compiled(module):
            raise RuntimeError(
                f"this {type(module).__name__} runs with PipeFusion, and was compiled as a whole, but a graph cannot "
                "return patch after patch. "
                "Compile its blocks: transformer.compile_repeated_blocks(fullgraph=True)."
            )
        # The gradient would not be that of the model, because keys of other steps are used.
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"this {type(module).__name__} runs with PipeFusion, and was called with gradients enabled. Call it "
                "under torch.no_grad(), or leave pipefusion= out."
            )

    def _whole(
        self,
        call: Callable[..., Any],
        module: nn.Module,
        name: str,
        form: tuple[Any, ...],
        arguments: Mapping[str, Any],
    ) -> Any:
        """Compute all tokens at once, exactly, and store the keys for the patches of the next step."""
        arguments = materialize(dict(arguments))
        branch = self._branches.setdefault(name, _Branch(StaleKeys(self._places), form))
        branch.form = form
        self._counted.whole += 1
        output = self._call(call, module, branch, self._cuts(arguments, 0, 1), arguments)
        tensors = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor)]
        branch.output = Expected(tensors[0].to("meta"), tensors[0].device) if len(tensors) == 1 else None
        return output

    def _cuts(self, arguments: Mapping[str, Any], patch: int, num_patches: int) -> PatchCuts:
        tokens = arguments["hidden_states"]
        units = None if tokens.ndim == 3 else tokens.shape[self._plan.dim] // self._plan.together
        return PatchCuts(self._plan, patch, num_patches, units)

    def _call(
        self,
        call: Callable[..., Any],
        module: nn.Module,
        branch: _Branch,
        cuts: PatchCuts,
        arguments: Mapping[str, Any],
    ) -> Any:
        """Compute the patch of ``cuts``."""
        branch.keys.begin(whole=cuts.mesh.ranks == 1)
        self._places.begin(cuts, in_graphs=self._in_graphs)
        self._keys = branch.keys
        try:
            _, kwargs = cuts.arguments(self._plan.plan.inputs, self._parameters, (), dict(arguments))
            return call(module, **kwargs)
        finally:
            self._places.begin(None)
            self._keys = None

    def _patched(
        self, call: Callable[..., Any], module: nn.Module, branch: _Branch, arguments: Mapping[str, Any]
    ) -> Any:
        """Compute all patches, and return an output whose patches may still be in flight."""
        stages, counted = self._stages, self._counted
        start = time.perf_counter()
        tokens = arguments["hidden_states"]
        overlapping = isinstance(tokens, Patched) and not tokens.source.is_complete
        waited, sent = (0.0, 0) if stages is None else (stages.links.seconds_waited, stages.links.bytes_sent)
        rows = self._plan.rows(tokens, self.options.num_patches)
        expected: Any = branch.output
        whole = torch.empty(expected.like.shape, dtype=expected.like.dtype, device=expected.device)
        arrival = Arrival(whole, rows, self._plan.dim)
        self._begin_call(arrival)
        if stages is not None:
            stages.whole = False
        try:
            for patch, own in enumerate(rows):
                output = self._one_patch(
                    call, module, branch, self._arguments_of(arguments, patch), arrival, patch, own
                )
        finally:
            if stages is not None:
                stages.whole = True
        if isinstance(tokens, Patched):
            # Complete by now, because this stage or an earlier one has computed with it. Reading it drops the recorded
            # operations of the step.
            tokens.value()
        counted.patched, counted.overlapping = counted.patched + 1, counted.overlapping + overlapping
        counted.seconds += time.perf_counter() - start
        if stages is not None:
            counted.waited += stages.links.seconds_waited - waited
            counted.sent += stages.links.bytes_sent - sent
        patched = Patched.of_source(arrival, expected, self._live)
        return pytree.tree_map_only(Tensor, lambda _: patched, output)

    def _begin_call(self, arrival: Arrival) -> None:
        """Release the tensors that were sent two calls ago. Their receivers have them, because they sent tokens of the
        last call to this rank.
        """
        self._coming = [earlier for earlier in self._coming if not earlier.is_complete] + [arrival]
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
        arguments: Mapping[str, Any],
        arrival: Arrival,
        patch: int,
        own: Rows,
    ) -> Any:
        """Run ``patch`` through this rank's blocks. The last stage sends the noise to all stages, and the others start
        to receive it.
        """
        stages = self._stages
        like: Any = branch.output
        noise = like.like.narrow(self._plan.dim, *own)
        output = self._call(call, module, branch, self._cuts(arguments, patch, self.options.num_patches), arguments)
        if stages is not None and not stages.is_last:
            # After the computation, because the noise depends on the tokens that this rank has just sent, and on NCCL a
            # receive occupies the device until its tensor is here. If the host had to wait for the device while it
            # computes those tokens, both ranks would hang.
            buffer = torch.empty(noise.shape, dtype=noise.dtype, device=like.device)
            arrival.comes(stages.links.receive(buffer, stages.dim.size - 1).wait)
        if stages is None or stages.is_last:
            computed: Tensor = next(x for x in pytree.tree_leaves(output) if isinstance(x, Tensor))
            if not self._plan.returns_patch:
                computed = computed.narrow(self._plan.dim, *own).contiguous()
            arrival.comes(lambda: computed)
            for stage in range(0 if stages is None else stages.dim.size - 1):
                stages.links.send(computed, stage)  # type: ignore[union-attr]
        return output

    def _arguments_of(self, arguments: Mapping[str, Any], patch: int) -> Mapping[str, Any]:
        """Return the arguments with latents that are valid for patches 0 to ``patch``.

        Stages after the first get zeros: they need only the shape of the embedded tokens, which they receive.
        """
        tokens = arguments["hidden_states"]
        if not isinstance(tokens, Patched):
            return arguments
        if self._stages is None or self._stages.dim.index == 0:
            return {**arguments, "hidden_states": tokens.source.up_to(patch)}
        return {**arguments, "hidden_states": torch.zeros(tokens.shape, dtype=tokens.dtype, device=tokens.device)}


def _with_own_strides(x: Tensor) -> Tensor:
    """Return ``x`` with the strides of a new tensor of its shape, and not as a view.

    A part of a tensor of text and image tokens has other strides than a new tensor, even if it is contiguous (a batch
    of one, or no tokens), and a base of another shape. Dynamo would compile a graph for each.
    """
    return x.contiguous().view(-1).view(x.shape).detach()


def fusion_of(module: nn.Module) -> Fusion | None:
    """Return the :class:`Fusion` that is installed on ``module``, or None."""
    fusion = getattr(wrapper(module, "__call__", _KEY), "__self__", None)
    return fusion if isinstance(fusion, Fusion) else None
