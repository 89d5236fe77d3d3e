"""The checks of a denoiser, by phase: before it is parallelized, and before each parallel call.

A check is a function that raises if the model has a feature or an option that para_core cannot combine with
what the user asks for. It is defined next to that feature. The first line of its docstring, "Refuse …", names
the combination; docs/refusals.md is made from these lines. ``benchmarks/refusals.py`` finds a check by its
global name in the body of :func:`check_parallelize` or :func:`check_parallel_call`, so call it there itself,
and not by a helper.

The functions of ``adapters/parallel`` call these phases; those of the cache are in
``adapters/cache/checks.py``. A model that is called without its pipeline calls
:func:`check_same_call_of_model`, which also compares its arguments between ranks. Tests:
tests/adapters/compatibility/test_checks.py, and tests/adapters/agree/ for the comparison.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from para_core.adapters.adapter import Adapter
from para_core.adapters.agree.arguments import agree_on_values
from para_core.adapters.compatibility.diffusers_features import (
    check_compiled_weights_of_diffusers,
    check_guider,
    check_hooks_of_diffusers,
    check_no_cache_of_diffusers,
    check_no_parallelism_of_diffusers,
)
from para_core.adapters.denoisers import DenoiserKind, denoisers_by_kind, kind_of
from para_core.adapters.inspect.attention_names import (
    check_attention_is_seen,
    check_attention_named_once,
    check_one_attention_backend,
    processor_backends,
)
from para_core.adapters.model_checks import (
    check_adapter_type,
    check_class_has_plan,
    check_has_transformer,
    check_mesh_not_replaced,
    check_model_not_replaced,
    check_not_fsdp1,
    check_not_wrapped,
    check_pipeline_of_model,
    require_plan,
)
from para_core.adapters.registry import component_of, decoders_of, transformers_of
from para_core.adapters.weights.features import features
from para_core.adapters.weights.shard import check_one_device
from para_core.distributed.mesh import GuidedMesh, SequenceMesh
from para_core.distributed.records import Record, describe_differences
from para_core.instance.private_class import original_class
from para_core.modes.interceptor import check_replaced_attention


@dataclass(frozen=True)
class CheckedModel:
    """One denoiser to check, and what was applied to it.

    Args:
        owner: The pipeline of ``module``, or ``module`` itself.
        module: The denoiser; None if the pipeline has none.
        component: Path of ``module`` in the pipeline; empty without a pipeline.
        adapter: Adapter that the user passed; None without one.
        applied: Ranks over which the tokens or rows of ``module`` were sharded when it was parallelized; None
            before that, or if they are not sharded.
        kind: Kind of a denoiser that is no transformer; None for a transformer.
    """

    owner: Any
    module: Any
    component: str = ""
    adapter: Adapter | None = None
    applied: SequenceMesh | None = None
    kind: DenoiserKind | None = None

    @property
    def name(self) -> str:
        """Name of the model in messages: its path in the pipeline, or ``transformer``, or the name of its kind."""
        if self.component:
            return f"pipe.{self.component}"
        if self.kind is None:
            return "transformer"
        return self.kind.name

    @property
    def called(self) -> Any:
        """The object that the pipeline calls: ``module``, the compiled module around it, or its replacement."""
        if not self.component:
            return self.module
        return component_of(self.owner, self.component)


def models_to_check(pipe: Any, adapter: Adapter | None = None) -> list[CheckedModel]:
    """Return an entry for each transformer of ``pipe``, or else for its other denoisers.

    If it has neither, return one entry whose ``module`` is None, which the checks then refuse.
    """
    models = [CheckedModel(pipe, module, name, adapter) for name, module in transformers_of(pipe).items()]
    if not models:
        models = [
            CheckedModel(pipe, module, path, adapter, kind=kind)
            for kind, path, module in denoisers_by_kind(pipe)
        ]
    return models or [CheckedModel(pipe, None)]


def models_to_parallelize(pipe: Any, adapter: Adapter | None) -> list[CheckedModel]:
    """Return the models of ``pipe`` to parallelize: :func:`models_to_check`, or none if the pipeline only decodes."""
    if decoders_of(pipe):
        return []
    return models_to_check(pipe, adapter)


def check_parallelize(models: Sequence[CheckedModel], mesh: GuidedMesh | None = None) -> None:
    """Run the checks before ``models`` are parallelized. The first check that fails raises.

    ``mesh=None`` leaves out the checks that need the mesh.
    """
    for model in models:
        owner, module, adapter = model.owner, model.module, model.adapter
        check_has_transformer(owner, module)
        check_adapter_type(adapter, module)
        check_not_fsdp1(module, model.name)
        check_not_wrapped(module, model.name, adapter)
        if model.kind is not None:
            model.kind.check_parallelize(owner, module, mesh)
        else:
            check_class_has_plan(owner, module, adapter)
            require_plan(owner, module, adapter)
        check_one_device(module, model.name)
        check_one_device(owner, "the pipeline")
        check_no_parallelism_of_diffusers(module)
        if mesh is None:
            continue
        for feature in features().values():
            for check in feature.parallelize_checks:
                check(module, model.name, mesh, adapter)
        if mesh.ranks > 1:
            check_pipeline_of_model(owner, module, adapter)


def check_parallel_call(models: Sequence[CheckedModel], mesh: GuidedMesh) -> None:
    """Run the checks before a parallel call of ``models`` on ``mesh``. The first check that fails raises."""
    for model in models:
        module, name = model.module, model.name
        if model.component:
            check_model_not_replaced(model.called, module, name)
            check_mesh_not_replaced(module, name, model.applied)
        for feature in features().values():
            for check in feature.call_checks:
                check(module, name, model.called, mesh)
        if model.kind is not None:
            model.kind.check_parallel_call(module, name, model.called)
        if mesh.sequence.ranks > 1:
            check_compiled_weights_of_diffusers(module, name, model.called)
            backends = processor_backends(module)
            check_attention_is_seen(backends, name, mesh.sequence.ranks)
            check_one_attention_backend(backends, name)
            check_attention_named_once(backends, module, name)
            check_replaced_attention(mesh.sequence.ranks)
        if mesh.ranks > 1:
            check_no_cache_of_diffusers(module, name)
            check_hooks_of_diffusers(module, name, mesh.sequence.ranks)
            check_guider(model.owner, mesh.sequence.ranks)


def check_same_call_of_model(
    module: Any, mesh: GuidedMesh, inputs: Mapping[str, Any], *, assume_equal: bool
) -> None:
    """Raise on every rank if the call of ``module`` is refused on one rank, or if ``inputs`` differ between
    ranks. Collective.

    ``inputs`` are arguments and settings by name. ``assume_equal`` skips the comparison and its exchange;
    then a rank whose call is refused raises alone.
    """
    mesh.check_alive()
    models = [CheckedModel(module, module, kind=kind_of(module))]
    if assume_equal:
        check_parallel_call(models, mesh)
        return
    name = original_class(module).__name__

    def explain(records: list[Record]) -> str:
        return (
            f"the ranks of one mesh must call this {name} with equal arguments. "
            f"{'; '.join(describe_differences(records))}. If another pipeline shares this transformer (from_pipe), its "
            "random numbers and arguments must be equal as well: parallelize_pipe(the_other_pipe, mesh=mesh). In a "
            "loop of your own, draw random numbers from a generator with the same seed on all ranks."
        )

    agree_on_values(lambda: inputs, mesh, f"this {name}", partial(check_parallel_call, models, mesh), explain)
