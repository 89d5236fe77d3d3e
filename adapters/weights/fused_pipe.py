"""Apply PipeFusion to the transformers of a diffusers pipeline.

:class:`~para_core.weights.pipefusion.Fusion` computes patch by patch. Here is what it needs to know of a
pipeline: the patch plan of each transformer, and the CFG branch and the step of each call. ``features.py``
finds :data:`FEATURE`. Tests: tests/weights/test_pipefusion.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import astuple
from functools import partial
from typing import Any

from torch import nn

from para_core.adapters.adapter import Adapter, Text
from para_core.adapters.inspect.block_stack import stack_of, why_no_stages
from para_core.adapters.inspect.scheduler_tracker import SchedulerTracker
from para_core.adapters.registry import plan_for, require_adapter, require_blocks
from para_core.adapters.weights.feature import ChangeRequest, Feature, FeatureChange
from para_core.adapters.weights.features import applied_changes
from para_core.cache.branches import Branches, conditions_of
from para_core.cache.options import CacheOptions
from para_core.distributed.mesh import GuidedMesh
from para_core.instance.modules import is_compiled
from para_core.instance.private_class import original_class
from para_core.instance.record import fill_slot
from para_core.instance.slots import Slot
from para_core.user_warnings import ParallelWarning, warn_user
from para_core.weights.patch_plan import PatchPlan, patch_plan
from para_core.weights.pipefusion import Fusion, fusion_of
from para_core.weights.pipefusion_options import FEWEST_STEPS, PipeFusion, PipeFusionReport


class FusedPipe(FeatureChange):
    """PipeFusion on the transformers of one pipeline, and the state of its current generation."""

    name = "PipeFusion"
    # Stages reach a step at different times, and would wait for each other in a comparison.
    overlaps_steps = True

    def __init__(
        self,
        transformers: Mapping[str, nn.Module],
        options: PipeFusion,
        mesh: GuidedMesh,
        adapter: Adapter | None,
    ) -> None:
        self.options = options
        self._transformers, self._mesh, self._adapter = transformers, mesh, adapter
        self._tracker = SchedulerTracker()
        # Whether a pipeline of one of the transformers may step with copies of its scheduler.
        self._with_copies = False
        # By id of the transformer, the names of the cache_context blocks that are entered now, innermost
        # last.
        self._names: dict[int, list[str]] = {}
        # By id of the transformer, the CFG branches of the generation, told apart by conditioning arguments.
        self._branches: dict[int, Branches] = {}
        # By component name; empty before apply().
        self.fusions: dict[str, Fusion] = {}

    def apply(self) -> None:
        """Turn on PipeFusion. The stages, if there are any, must be installed before."""
        for name, module in self._transformers.items():
            model = require_adapter(module, self._adapter)
            self._with_copies = self._with_copies or model.steps_with_copies
            plan = _require_patch_plan(module, self._mesh, self._adapter)
            blocks = [entry.block for entry in stack_of(module, self._adapter)]
            self._names[id(module)] = []
            self._branches[id(module)] = Branches(
                conditions_of(module, require_blocks(module, self._adapter))
            )
            if hasattr(module, "cache_context"):
                fill_slot(module, Slot.PIPEFUSION, {"cache_context": self._track_name})
            branch_of = partial(self._branch_of, module)
            self.fusions[name] = Fusion(module, self.options, plan, blocks, branch_of, self._step_of)
            self.fusions[name].install()

    def undo(self) -> None:
        """Turn PipeFusion off."""
        for fusion in self.fusions.values():
            # This empties the slot of the model, and so removes the wrapper of cache_context, too.
            fusion.remove()

    @contextmanager
    def _track_name(
        self, call: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any
    ) -> Iterator[None]:
        """Enter ``module.cache_context(name)``, and keep the name, which is that of a CFG branch."""
        names = self._names[id(module)]
        names.append(str(args[0] if args else kwargs["name"]))
        try:
            with call(module, *args, **kwargs):
                yield
        finally:
            names.pop()

    def _branch_of(self, module: nn.Module, arguments: Mapping[str, Any]) -> str:
        """Return the name of the CFG branch of a call; empty if it is unknown."""
        names = self._names[id(module)]
        # A pipeline that enters cache_context(name) names its CFG branch. Others are told apart by their
        # arguments. An empty name means that this fails: all steps then compute all tokens (_step_of).
        if names:
            return names[-1]
        return self._branches[id(module)].name_of(arguments) or ""

    def _step_of(self, branch: str) -> tuple[int, int]:
        """Return the step of the next call of ``branch``, and the number of steps. Call it once per call."""
        # The first step computes all tokens. Calls of an unknown CFG branch count as one, because the stored
        # keys of another branch would be wrong in silence.
        if not branch:
            return 0, FEWEST_STEPS
        position = self._tracker.next_position(branch)
        return position.step, position.num_steps

    @contextmanager
    def generation(self, pipe: Any, kwargs: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Track the steps of one generation of ``pipe`` in the ``with`` block.

        On exit, finish all pending transfers, and warn if the generation had too few steps for PipeFusion.
        Raise ``RuntimeError`` if ``pipe`` is running already.
        """
        with ExitStack() as stack:
            # First, because it raises in a call inside another one, whose generation must not be changed.
            stack.enter_context(self._tracker.follow(pipe, lambda: None, with_copies=self._with_copies))
            # Each generation has other prompts, so its branches have other arguments.
            self._branches = {key: Branches(branches.conditions) for key, branches in self._branches.items()}
            for fusion in self.fusions.values():
                stack.enter_context(fusion.generation())
            yield kwargs
        if any(fusion.few_steps for fusion in self.fusions.values()):
            warn_user(
                f"PipeFusion was off in this call of the {type(pipe).__name__}: with fewer than "
                f"{FEWEST_STEPS} steps each differs too much from the one before, so all were computed "
                "whole. Take more steps, or leave pipefusion= out.",
                ParallelWarning,
            )

    def report(self) -> PipeFusionReport:
        """Return the report of the last generation: the counts of all transformers, added up."""
        reports = [astuple(fusion.report) for fusion in self.fusions.values()]
        return PipeFusionReport(*map(sum, zip(*reports, strict=True)))


def changes_for_pipefusion(request: ChangeRequest) -> list[FusedPipe]:
    """Return the change that the option ``pipefusion`` asks for; none without it.

    Raise ``TypeError`` or ``ValueError`` if a transformer or the mesh does not fit.
    """
    options = request.options.get("pipefusion")
    if options is None:
        return []
    for module in request.transformers.values():
        _require_patch_plan(module, request.mesh, request.adapter)
    return [FusedPipe(request.transformers, options, request.mesh, request.adapter)]


def _require_patch_plan(module: nn.Module, mesh: GuidedMesh, adapter: Adapter | None) -> PatchPlan:
    """Return the plan that says how the arguments of ``module`` are split into patches of image tokens.

    Raises ``TypeError`` if there is none for this class, and ``ValueError`` on a mesh with ranks along
    ``tensor``.
    """
    try:
        plan = _patch_plan_of(module, adapter)
    except TypeError as error:
        raise TypeError(
            f"PipeFusion does not know patches of {original_class(module).__name__}: {error}. docs/stages.md "
            "lists the models for which it does. Leave pipefusion= out; stages without it are exact."
        ) from error
    if mesh.tensor.size > 1:
        raise ValueError(
            f"PipeFusion and a mesh of {mesh.tensor.size} ranks along 'tensor': each of them would have keys "
            "of some heads. Give these ranks to 'pipe', 'ring' or 'ulysses', or leave pipefusion= out."
        )
    return plan


def _patch_plan_of(module: nn.Module, adapter: Adapter | None) -> PatchPlan:
    """Return the plan by which PipeFusion splits ``module`` into patches. Raise ``TypeError`` with why it cannot."""
    reason = why_no_stages(module, adapter)
    if reason is not None:
        raise TypeError(reason)
    described = require_adapter(module, adapter)
    text: Text | None = "replicate"
    if described.empty_text:
        text = None
    return patch_plan(plan_for(module, text, adapter), module, described.frames)


def pipefusion_report(pipe: Any) -> PipeFusionReport:
    """Return what PipeFusion did in the last generation of ``pipe``, added up over its transformers.

    Args:
        pipe (`DiffusionPipeline`): A pipeline after ``parallelize_pipe(pipe, mesh=mesh,
            pipefusion=PipeFusion())``.

    Raises:
        ValueError: If the pipeline runs without PipeFusion.
    """
    for change in applied_changes(pipe):
        if isinstance(change, FusedPipe):
            return change.report()
    raise ValueError(
        f"this {original_class(pipe).__name__} runs without PipeFusion: parallelize_pipe(pipe, mesh=mesh, "
        "pipefusion=PipeFusion())."
    )


def check_compiled_pipefusion(module: nn.Module, name: str, called: Any, mesh: GuidedMesh) -> None:
    """Refuse PipeFusion in a transformer that is compiled as one graph."""
    if fusion_of(module) is not None and (called is not module or is_compiled(module)):
        raise RuntimeError(
            f"{name} runs under PipeFusion, and was compiled as one graph, which cannot return patch by "
            "patch. Use it uncompiled, and compile its blocks: "
            "transformer.compile_repeated_blocks(fullgraph=True)."
        )


def check_cache_under_pipefusion(module: nn.Module, name: str, called: Any, options: CacheOptions) -> None:
    """Refuse a cache under PipeFusion."""
    if fusion_of(module) is not None:
        raise RuntimeError(
            f"{name} cannot be cached: under PipeFusion a step computes patches with keys of the previous "
            "step, which must not be skipped. Leave pipefusion= out, or remove_cache_from_pipe(pipe)."
        )


FEATURE = Feature(
    option="pipefusion",
    changes=changes_for_pipefusion,
    call_checks=(check_compiled_pipefusion,),
    cached_call_checks=(check_cache_under_pipefusion,),
)
