"""Run one transformer on several ranks.

The public functions serve denoising loops of a user's own. ``resolve.py`` calls :func:`resolve_transformer`
for each transformer of a pipeline, and :func:`make_call_agreement` for features that compare the inputs of a
call themselves. ``parallelize.py`` calls :func:`remove_from_transformer`. Session parts are explained in
``session.py``, and the plan is applied by ``para_core/plans/apply.py``. Tests:
tests/adapters/test_transformers.py, tests/adapters/agree/test_arguments.py,
tests/adapters/parallel/test_undo.py for what stays after a failure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from torch import nn

from para_core.adapters.agree.options import agree_on_options
from para_core.adapters.compatibility.checks import CheckedModel, check_parallelize, check_same_call_of_model
from para_core.adapters.default_mesh import guided_mesh_for
from para_core.adapters.inspect.attention_names import describe_attention, translated_attention
from para_core.adapters.model_checks import require_plan
from para_core.adapters.parallel.options import TransformerOptions
from para_core.adapters.parallel.parts import FeaturePart
from para_core.adapters.parallel.session import ParallelSession, Part, Undo, replace_session
from para_core.adapters.registry import check_pipeline_or_model, planned_class
from para_core.adapters.weights.feature import ChangeRequest
from para_core.adapters.weights.features import make_changes, transformer_slots
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
        ImportError: If ``backend``, ``cross_backend`` or ``products`` needs a library that is not installed.
        TypeError: If the transformer is not supported, or an option has a wrong type.
        ValueError: If the mesh or an option does not fit the transformer, or two options exclude each other.
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
        part = resolve_transformer(
            transformer, guided, options, options.attention(None), verifies=options.verify
        )
        compare = partial(make_call_agreement, mesh=guided, assume_equal=options.assume_equal)
        # The empty name stands for a transformer that is no component of a pipeline.
        changes = make_changes(ChangeRequest(module, {"": module}, guided, vars(options), compare))
    # Nobody keeps the session of a transformer alone, so there is no previous one to undo: its slots are
    # emptied by Part.clear() of the new parts (remove_from_transformer).
    replace_session(transformer, None, ParallelSession(guided, [part, *map(FeaturePart, changes)]))
    return transformer


def unparallelize_transformer(transformer: Transformer) -> Transformer:
    """Undo :func:`parallelize_transformer` and return ``transformer``.

    Args:
        transformer (`nn.Module`): The transformer, compiled or not. Nothing happens if it is not parallel.

    Raises:
        TypeError: If ``transformer`` is no model.
        RuntimeError: If weights of the transformer are sharded, or other ranks hold some of its blocks (a
            mesh with ``pipe``). Load it again.
    """
    check_pipeline_or_model("model", transformer, "unparallelize_pipe takes a pipeline.")
    check_can_be_undone(uncompiled(transformer))
    remove_from_transformer(transformer)
    return transformer


def remove_from_transformer(transformer: nn.Module) -> None:
    """Remove the plan of ``transformer``, compiled or not, its verification, and what options have put into
    its calls. Its weights stay as they are.

    Besides the contents of slots this changes only what a call of the plan makes again (numbers of heads, and
    the state of its checks): :func:`replace_session` restores the slots if the next session fails.
    """
    empty_slots((transformer, uncompiled(transformer)), Slot.VERIFIED, *transformer_slots())
    remove_plan(uncompiled(transformer))


def resolve_transformer(
    transformer: nn.Module,
    mesh: GuidedMesh,
    options: TransformerOptions,
    attention: AttnOptions,
    *,
    batched: bool = True,
    verifies: bool = False,
) -> TransformerPart:
    """Return the session part that runs ``transformer``, compiled or not, on ``mesh``. Changes nothing.

    ``batched`` says whether samples may be sharded over the ``batch`` dim of the mesh, and ``verifies``
    whether the part verifies all calls of ``transformer`` (``verify=True``); a pipeline verifies those of its
    generations itself.
    """
    module = uncompiled(transformer)
    check_comparable(vars(options), options.approximations, stages=mesh.pipe.size)
    plan = require_plan(module, module, options.adapter, options.text)
    if not batched:
        plan = replace(plan, batched={})
    if mesh.ranks > 1:
        # Called for its error: the plan names a module that the transformer lacks. One rank mostly runs
        # without the plan, so there this must not raise.
        match_modules(module, plan)
    return TransformerPart(transformer, plan, mesh, options, attention, verifies)


@dataclass(frozen=True)
class TransformerPart(Part):
    """The change that applies a plan to one transformer, compiled or not."""

    transformer: nn.Module
    plan: Plan
    mesh: GuidedMesh
    options: TransformerOptions
    attention: AttnOptions
    verifies: bool = False
    name = "the transformer"

    def apply(self) -> Undo:
        """Apply the plan, and wrap the transformer if it is verified."""
        module = uncompiled(self.transformer)
        agree_on_inputs = None
        if self.mesh.ranks > 1:
            agree_on_inputs = make_call_agreement(
                module, mesh=self.mesh, assume_equal=self.options.assume_equal
            )
        apply_plan(
            module,
            self.plan,
            self.mesh.sequence,
            batch=self.mesh.batch,
            agree_on_inputs=agree_on_inputs,
            options=self.attention,
            attn_func=self.options.attn_func,
            cross_backend=self.options.cross_backend,
            # A schedule sets the options of the plan's region at each step, so one rank needs the region too.
            on_one_rank=self.options.schedule is not None,
            call_context=partial(translated_attention, module),
            written_for=planned_class(module, self.options.adapter),
        )
        if self.verifies:
            # Of a compiled module its wrapper is verified, because the comparison must not be traced.
            fill_slot(self.transformer, Slot.VERIFIED, {"__call__": make_check("verify")})
        return partial(remove_from_transformer, self.transformer)

    def clear(self) -> None:
        remove_from_transformer(self.transformer)


def make_call_agreement(module: nn.Module, *, mesh: GuidedMesh, assume_equal: bool) -> AgreeOnInputs:
    """Return a function of the arguments of a call of the transformer ``module``, by name.

    It is collective, and raises on every rank if the arguments or the transformer's settings differ between
    ranks. With ``assume_equal`` it compares nothing, and only checks that this rank's call is supported.
    """

    def agree_on_inputs(kwargs: Mapping[str, Any]) -> None:
        options = cache_options(module)
        texts = {}
        if options is not None:
            texts = options.as_text()
        cached = {f"{option} of its cache": text for option, text in texts.items()}
        inputs = {**kwargs, **cached, **describe_attention(module)}
        check_same_call_of_model(module, mesh, inputs, assume_equal=assume_equal)

    return agree_on_inputs
