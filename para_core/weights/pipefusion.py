"""PipeFusion (arXiv:2405.14430): all pipeline stages work at the same time, on different patches. Not exact.

The tokens of an image are split into patches. Stage ``s`` computes patch ``m`` while stage ``s - 1`` computes
patch ``m + 1``. A patch attends to stored keys and values of all patches, some of which are from the previous
step (:mod:`~para_core.weights.stale_keys`). The output of the model arrives patch by patch
(:mod:`~para_core.weights.patches`), and the scheduler's operations on it are recorded and run per patch, so
patch ``m`` of the next step starts as soon as patch ``m`` of this step has arrived. The result depends on the
number of patches, but not on the number of stages: a single process computes the same numbers.

``adapters/weights/fused_pipe.py`` makes one :class:`Fusion` for each transformer, and enters its
``generation`` around each call of the pipeline. Tests: tests/weights/test_pipefusion.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from para_core.instance.modules import has_compiled_parts, is_compiled
from para_core.instance.record import empty_slot, empty_slots, fill_slot, fill_slots, slot_owner
from para_core.instance.slots import Slot
from para_core.layout.sequence import Run
from para_core.lazy_tensors import Expected, LazyTensor, LiveTensors, materialize
from para_core.modes.interceptor import at_the_dispatcher, dispatcher_is_available
from para_core.plans.current_call import interception_of
from para_core.plans.module_matching import parameters_of
from para_core.plans.region import region_of
from para_core.torch_internals import pytree
from para_core.weights.patch_hooks import (
    PatchAttnMode,
    PatchHooks,
    PatchRuleExecutor,
    patch_attention_handler,
)
from para_core.weights.patch_plan import PatchPlan
from para_core.weights.patches import Arrival, source_of_patches
from para_core.weights.pipefusion_options import FEWEST_STEPS, PipeFusion, PipeFusionReport
from para_core.weights.stack import PipelineStages, stages_of
from para_core.weights.stale_keys import StaleKeys


@dataclass
class _FusedBranch:
    """The state of one CFG branch that is kept from step to step.

    ``keys`` are the stored keys and values; ``signature`` has the names, shapes and dtypes of the input
    tensors. ``output`` is the expected output; None before the first whole call, or if the output is not a
    single tensor.
    """

    keys: StaleKeys
    signature: tuple[Any, ...]
    output: Expected | None = None


class Fusion:
    """The runner of one model with PipeFusion, in pipeline stages or in a single process.

    For inference in one thread.

    Args:
        blocks: The blocks of the model, of all stages.
        branch_of: Returns the name of the CFG branch of a call, given its arguments by name.
        step_of: Returns the index of the current step and the number of steps, given the name of a CFG
            branch.

    Attributes:
        report: Statistics of the last generation.
        few_steps: Whether the last generation had too few steps for patches.
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
        self.report, self.few_steps = PipeFusionReport(), False
        self._plan, self._branch_of, self._step_of = plan, branch_of, step_of
        self._parameters = parameters_of(module)
        self._hooks = PatchHooks(module, plan.plan)
        self._stages: PipelineStages | None = stages_of(module)
        # The blocks that this rank computes.
        self._blocks = blocks
        if self._stages is not None:
            self._blocks = [blocks[index] for index in self._stages.block_range]
        # None outside of a generation, where a call of the model is exact and keeps nothing.
        self._branches: dict[str, _FusedBranch] | None = None
        # The stored keys and values that the current model call uses; None outside of a call.
        self._keys: StaleKeys | None = None
        # Whether attention in the current model call is intercepted by a mode instead of the dispatcher.
        self._in_graphs = False
        # Outputs of earlier model calls whose patches may still be in flight.
        self._pending: list[Arrival] = []
        self._live = LiveTensors()
        # Number of tensors that this rank had sent before each of the last two patched calls.
        self._sent_before: list[int] = []

    def install(self) -> None:
        """Wrap the model and the blocks that this rank computes."""
        fill_slot(self.module, Slot.PIPEFUSION, {"__call__": self.run}, owner=self)
        fill_slots(self._blocks, Slot.FUSED_BLOCK, {"__call__": self._run_block})
        self._hooks.install()

    def remove(self) -> None:
        """Undo :meth:`install`."""
        self._hooks.remove()
        empty_slot(self.module, Slot.PIPEFUSION)
        empty_slots(self._blocks, Slot.FUSED_BLOCK)

    @contextmanager
    def generation(self) -> Iterator[None]:
        """Clear the statistics, and run one generation in the ``with`` block. Not reentrant.

        On exit, wait for all patches in flight, and free the stored keys. If the block raises, do not wait,
        but mark the links between stages as broken.
        """
        self.report, self.few_steps, self._sent_before = PipeFusionReport(), False, []
        branches: dict[str, _FusedBranch] = {}
        self._branches = branches
        try:
            yield
            for arrival in self._pending:
                arrival.up_to(arrival.num_patches - 1)
            if self._stages is not None:
                self._stages.links.drain()
        except BaseException:
            if self._stages is not None:
                self._stages.links.mark_broken()
            raise
        finally:
            self._live.become_tensors()
            self._count(key_bytes=sum(branch.keys.nbytes for branch in branches.values()))
            self._branches, self._pending, self._keys = None, [], None

    def _count(self, **increments: float) -> None:
        """Add ``increments`` to the fields of :attr:`report` with their names."""
        totals: dict[str, Any] = {
            name: getattr(self.report, name) + value for name, value in increments.items()
        }
        self.report = replace(self.report, **totals)

    def _run_block(self, call: Callable[..., Any], block: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """Run a call of a block, whose attention uses the stored keys if the model runs with them."""
        if self._keys is None:
            return call(block, *args, **kwargs)
        if not self._in_graphs:
            with at_the_dispatcher(self._keys.attend):
                return call(block, *args, **kwargs)
        # Pass contiguous tensors that are no views and have the default strides of their shape. Dynamo would
        # compile another graph for a slice of a larger tensor: even a contiguous slice (with a batch of one,
        # or no tokens) may have other strides than a new tensor, and its base has another shape.
        args, kwargs = pytree.tree_map_only(
            Tensor, lambda x: x.contiguous().view(-1).view(x.shape).detach(), (args, kwargs)
        )
        interception = interception_of(self.module)
        plan_off: AbstractContextManager[None] = nullcontext()
        if interception is not None:
            plan_off = interception.switch_off()
        with (
            plan_off,
            patch_attention_handler(self._keys.attend_in_graph),
            PatchAttnMode((0,)),
        ):
            return call(block, *args, **kwargs)

    def run(self, call: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """Run a call of the model, and return its output: patch by patch, or exactly, as outside of a
        generation. With stages, all of them make this call.

        Raise ``RuntimeError`` if the model was compiled as a whole, or gradients are enabled.
        """
        if torch.compiler.is_compiling() or is_compiled(module):
            raise RuntimeError(
                f"this {type(module).__name__} runs with PipeFusion, and was compiled as a whole, but a "
                "graph cannot return patch after patch. Compile its blocks: "
                "transformer.compile_repeated_blocks(fullgraph=True)."
            )
        if torch.is_grad_enabled():
            # Gradients would be wrong, because attention uses keys of other steps.
            raise RuntimeError(
                f"this {type(module).__name__} runs with PipeFusion, and was called with gradients enabled. "
                "Call it under torch.no_grad(), or leave pipefusion= out."
            )
        if self._branches is None:
            return call(module, *args, **kwargs)
        arguments = {**dict(zip(self._parameters, args, strict=False)), **kwargs}
        # The attention of patches is intercepted at the dispatcher, or by a mode in compiled blocks. If the
        # plan itself intercepts by a mode (by_mode), patches need one too: it sees calls before the
        # dispatcher does. Decide once per call and not per patch, because has_compiled_parts looks at all
        # modules.
        region = region_of(module)
        by_mode = region is not None and not region.may_use_dispatcher(module)
        self._in_graphs = (
            by_mode or not dispatcher_is_available() or any(map(has_compiled_parts, self._blocks))
        )
        name = self._branch_of(arguments)
        index, total = self._step_of(name)
        self.few_steps = self.few_steps or total < FEWEST_STEPS
        tensors = {key: x for key, x in sorted(arguments.items()) if isinstance(x, Tensor)}
        signature = tuple((key, tuple(x.shape), x.dtype) for key, x in tensors.items())
        branch, compute = self._branches.get(name), partial(call, module)
        if (
            branch is None
            or branch.signature != signature
            or branch.output is None
            or self.options.is_whole(index, total)
        ):
            # A call without patches does not need the keys of the previous step. Rebinding `branch` frees
            # them before.
            branch = self._branches[name] = _FusedBranch(StaleKeys(self._hooks), signature)
            return self._run_whole(compute, branch, materialize(arguments))
        return self._run_patches(compute, branch.keys, branch.output, arguments)

    def _run_whole(
        self, compute: Callable[..., Any], branch: _FusedBranch, arguments: Mapping[str, Any]
    ) -> Any:
        """Run the model on all tokens at once, and store their keys and the output's shape in ``branch``."""
        self._count(whole_calls=1)
        output = self._run_patch(compute, branch.keys, arguments, 0, 1)
        tensors = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor)]
        branch.output = None
        if len(tensors) == 1:
            branch.output = Expected(tensors[0].to("meta"), tensors[0].device)
        return output

    def _run_patch(
        self,
        compute: Callable[..., Any],
        keys: StaleKeys,
        arguments: Mapping[str, Any],
        patch: int,
        num_patches: int,
    ) -> Any:
        """Run the model on patch ``patch`` of ``num_patches``, and return its output."""
        tokens = arguments["hidden_states"]
        num_frames = None
        if self._plan.kind == "frames":
            num_frames = tokens.shape[self._plan.dim] // self._plan.together
        executor = PatchRuleExecutor(self._plan, patch, num_patches, num_frames)
        keys.begin()
        self._hooks.begin(executor, in_graphs=self._in_graphs)
        self._keys = keys
        try:
            _, kwargs = executor.apply_to_arguments(
                self._plan.plan.inputs, self._parameters, (), dict(arguments)
            )
            return compute(**kwargs)
        finally:
            self._hooks.begin(None)
            self._keys = None

    def _run_patches(
        self, compute: Callable[..., Any], keys: StaleKeys, expected: Expected, arguments: Mapping[str, Any]
    ) -> Any:
        """Run the model on one patch after the other, and return an output whose patches may still be in
        flight.
        """
        stages, dim, start = self._stages, self._plan.dim, time.perf_counter()
        tokens = arguments["hidden_states"]
        source = source_of_patches(tokens)
        overlapping = source is not None and not source.is_complete
        waited, sent = 0.0, 0
        if stages is not None:
            waited, sent = stages.links.seconds_waited, stages.links.bytes_sent
        runs = self._plan.runs(tokens, self.options.num_patches)
        whole = torch.empty(expected.like.shape, dtype=expected.like.dtype, device=expected.device)
        arrival = Arrival(whole, runs, self._live, dim)
        self._pending = [earlier for earlier in self._pending if not earlier.is_complete] + [arrival]
        own_output: AbstractContextManager[None] = nullcontext()
        if stages is not None:
            own_output = stages.own_output()
            # Release the tensors that this rank had sent before the last two patched calls. They have
            # arrived, because their receivers have since sent this rank data of the last call.
            self._sent_before.append(stages.links.sent)
            if len(self._sent_before) > 2:
                stages.links.drain(self._sent_before.pop(0))
        with own_output:
            for patch, run in enumerate(runs):
                if source is not None and (stages is None or stages.dim.index == 0):
                    arguments = {**arguments, "hidden_states": source.up_to(patch)}
                elif source is not None:
                    # Stages after the first receive embedded tokens from the previous stage. Nothing checks that
                    # the model reads the values of hidden_states before its blocks only, as all that are
                    # described do.
                    zeros = torch.zeros(tokens.shape, dtype=tokens.dtype, device=tokens.device)
                    arguments = {**arguments, "hidden_states": zeros}
                output = self._run_patch(compute, keys, arguments, patch, self.options.num_patches)
                self._exchange_output(output, whole.narrow(dim, *run), arrival, run)
        if source is not None:
            # All patches of the tokens have arrived: this stage or an earlier one has computed with them.
            # Reading the value releases the recorded scheduler operations of the step.
            source.value()
        if stages is not None:
            waited, sent = stages.links.seconds_waited - waited, stages.links.bytes_sent - sent
        seconds = time.perf_counter() - start
        self._count(
            patched_calls=1,
            overlapping_calls=overlapping,
            seconds=seconds,
            seconds_waited=waited,
            bytes_sent=sent,
        )
        patched = LazyTensor.make(arrival, expected)
        return pytree.tree_map_only(Tensor, lambda _: patched, output)

    def _exchange_output(self, output: Any, like: Tensor, arrival: Arrival, run: Run) -> None:
        """Add the last stage's output for the patch ``run``, (first index, length), to ``arrival``.

        The last stage starts to send its ``output`` to all other stages, and these start to receive a tensor
        with the shape, dtype and device of ``like``. Their own ``output`` is not used.
        """
        stages = self._stages
        if stages is not None and stages.dim.index < stages.dim.size - 1:
            # Start to receive only after this rank has computed its patch, because on NCCL a pending receive
            # blocks the stream: the last stage needs the tokens that this rank has just sent. If the host
            # waited for the device while computing them, both ranks would hang.
            buffer = torch.empty(like.shape, dtype=like.dtype, device=like.device)
            arrival.add(stages.links.receive(buffer, stages.dim.size - 1).wait)
            return
        computed: Tensor = next(x for x in pytree.tree_leaves(output) if isinstance(x, Tensor))
        if not self._plan.returns_patch:
            computed = computed.narrow(self._plan.dim, *run).contiguous()
        arrival.add(lambda: computed)
        if stages is not None:
            for stage in range(stages.dim.size - 1):
                stages.links.send(computed, stage)


def fusion_of(module: nn.Module) -> Fusion | None:
    """Return the :class:`Fusion` that is installed on ``module``; None without PipeFusion."""
    return slot_owner(module, Slot.PIPEFUSION, Fusion)
