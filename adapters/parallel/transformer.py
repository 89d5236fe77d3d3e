"""Run one transformer on several ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from torch import nn

from para_core.adapters.agree.options import agree_on_options
from para_core.adapters.compatibility.checks import CheckedModel, check_parallelize, check_same_call_of_model
from para_core.adapters.default_mesh import guided_mesh_for
from para_core.adapters.inspect.attention_names import attention_by_name, translated_attention
from para_core.adapters.model_checks import require_plan
from para_core.adapters.parallel.options import TransformerOptions
from para_core.adapters.parallel.parts import FeaturePart
from para_core.adapters.parallel.session import ParallelSession, Part, Undo, nothing, replace_session
from para_core.adapters.registry import check_pipeline_or_model, planned_class
from para_core.adapters.weights.feature import ChangeRequest
from para_core.adapters.weights.features import changes_for
from para_core.adapters.weights.one_way import check_can_be_undone, check_usable
from para_core.attention.attention_options import AttnOptions
from para_core.cache.apply import cache_options
from para_core.call_checks import check_comparable, make_check
from para_core.declared_options import takes_options
from para_core.distributed.agree import together
from para_core.distributed.agreed_inputs import AgreeOnInputs
from para_core.distributed.mesh import GuidedMesh
from para_core.instance.modules import uncompiled
from para_core.instance.record import empty_slots, fill_slot
from para_core.instance.slots import Slot
from para_core.plans.apply import apply_plan, remove_plan
from para_core.plans.module_matching import match_modules
from para_core.plans.plan import Plan

Transformer = TypeVar("Transformer", bound=nn.Module)


@takes_options(TransformerOptions)
def parallelize_transformer(transformer: nn.Module, options: TransformerOptions) -> nn.Module:
    """Run one transformer on all ranks of a mesh: each rank passes the same inputs and gets the full output.

    Use it in a denoising loop of your own; :func:`parallelize_pipe` also keeps random numbers and arguments
    equal on all ranks. In eager code, and if the transformer was compiled in place, each call first compares
    a fingerprint of its inputs over the ranks. If anything is invalid or fails on any rank, every rank raises
    and the transformer stays as it was.

    Args:
        transformer (`nn.Module`): A supported diffusers transformer, compiled or not.
        {options}

    Returns:
        ``transformer`` itself.

    Raises:
        TypeError: If the transformer is not supported.
        ValueError: If the mesh or an option does not fit the transformer.
        RuntimeError: As for :func:`parallelize_pipe`.
    """
    module, mesh = uncompiled(transformer), options.mesh
    model = CheckedModel(module, module, adapter=options.adapter)
    with agree_on_options("parallelize_transformer", mesh, options.compared):
        check_pipeline_or_model("model", transformer, "parallelize_pipe takes a pipeline.")
        options.check()
        if options.schedule is not None:
            raise ValueError(
                "backend= is an AttentionSchedule, and a transformer alone does not know the step of a generation. "
                "Pass it to parallelize_pipe, or name one backend."
            )
        if mesh is None:
            # The default mesh is chosen for the model, so check first that the model is supported.
            check_parallelize([model])
    guided = guided_mesh_for(mesh, module)
    with together(guided, f"this {type(module).__name__} cannot run on these ranks"):
        check_usable(module)
        check_parallelize([model], guided)
        part = resolve_transformer(module, guided, options, options.attention(None), called=transformer)
        compare = partial(agree_on_calls, mesh=guided, assume_equal=options.assume_equal)
        changes = changes_for(ChangeRequest(module, {"": module}, guided, vars(options), compare))
    replace_session(module, None, ParallelSession(guided, [part, *map(FeaturePart, changes)]))
    return transformer


def unparallelize_transformer(transformer: Transformer) -> Transformer:
    """Undo :func:`parallelize_transformer` and return ``transformer``.

    Raises:
        RuntimeError: If weights of the transformer are sharded, or other ranks hold some of its blocks (a
            mesh with ``pipe``). Load it again.
    """
    check_pipeline_or_model("model", transformer, "unparallelize_pipe takes a pipeline.")
    check_can_be_undone(uncompiled(transformer))
    remove_from_transformer(transformer)
    return transformer


def remove_from_transformer(transformer: nn.Module) -> None:
    """Remove the plan and the verification of ``transformer``, whatever its weights are."""
    empty_slots((transformer, uncompiled(transformer)), Slot.VERIFIED)
    remove_plan(uncompiled(transformer))


def resolve_transformer(
    module: nn.Module,
    mesh: GuidedMesh,
    options: TransformerOptions,
    attention: AttnOptions,
    *,
    batched: bool = True,
    called: nn.Module | None = None,
) -> TransformerPart:
    """Return the session part that runs ``module``, which is not compiled, on ``mesh``. Changes nothing.

    ``batched`` says whether samples may be sharded over the ``batch`` dim of the mesh. ``called`` is
    ``module`` or the compiled module around it, to verify its calls; None if the caller verifies them.
    """
    check_comparable(vars(options), options.approximations, mesh.pipe.size)
    plan = require_plan(module, module, options.adapter, options.text)
    if not batched:
        plan = replace(plan, batched={})
    if mesh.ranks > 1:
        match_modules(module, plan)
    if not options.verify:
        called = None
    return TransformerPart(module, plan, mesh, options, attention, called)


@dataclass(frozen=True)
class TransformerPart(Part):
    """The change that applies a plan to one transformer."""

    module: nn.Module
    plan: Plan
    mesh: GuidedMesh
    options: TransformerOptions
    attention: AttnOptions
    verified: nn.Module | None = None
    name = "the transformer"

    def apply(self) -> Undo:
        agree_on_inputs = None
        if self.mesh.ranks > 1:
            agree_on_inputs = agree_on_calls(
                self.module, mesh=self.mesh, assume_equal=self.options.assume_equal
            )
        apply_plan(
            self.module,
            self.plan,
            self.mesh.sequence,
            batch=self.mesh.batch,
            agree_on_inputs=agree_on_inputs,
            options=self.attention,
            attn_func=self.options.attn_func,
            cross_backend=self.options.cross_backend,
            on_one_rank=self.options.schedule is not None,
            call_context=partial(translated_attention, self.module),
            written_for=planned_class(self.module, self.options.adapter),
        )
        if self.verified is not None:
            fill_slot(self.verified, Slot.VERIFIED, {"__call__": make_check("verify")})
            return partial(remove_from_transformer, self.verified)
        return partial(remove_from_transformer, self.module)

    def clear(self) -> Undo:
        remove_plan(self.module)
        return nothing

    def suspend(self, undo: Undo, mesh: GuidedMesh) -> Undo:
        return self.clear()


def agree_on_calls(module: nn.Module, *, mesh: GuidedMesh, assume_equal: bool) -> AgreeOnInputs:
    """Return a function of the arguments of a call of the transformer ``module``, by name.

    It raises on every rank if the arguments or the transformer's settings differ between ranks.
    """

    def agree_on_inputs(kwargs: Mapping[str, Any]) -> None:
        options = cache_options(module)
        texts = {}
        if options is not None:
            texts = options.as_text()
        cached = {f"{option} of its cache": text for option, text in texts.items()}
        inputs = {**kwargs, **cached, **attention_by_name(module)}
        check_same_call_of_model(module, mesh, inputs, assume_equal=assume_equal)

    return agree_on_inputs
