"""Checks of a model or pipeline in three phases.

Before it is loaded, of its class (``fleet/build.py``, which calls :func:`check_component_classes`; tested by
tests/fleet/test_model_files.py); before it is changed, of its class and of what is around it
(``check_parallelize`` in ``adapters/compatibility/checks.py``, ``check_cache`` in
``adapters/cache/checks.py`` and others); and before each call of a parallel pipeline, that nobody replaced
the model or its plan (``check_parallel_call``).

``benchmarks/refusals.py`` lists on docs/refusals.md each check that one of these phases calls by its name, if
its docstring begins with "Refuse". It takes the error and the advice from its ``raise`` statements as they are
written, so a renamed local may need another line in its table of words. Each has a case in
``tests/adapters/compatibility/test_checks.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import repeat
from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from para_core.adapters.adapter import Adapter, Text
from para_core.adapters.closest_names import closest_supported
from para_core.adapters.denoisers import denoiser_kinds
from para_core.adapters.models import ADAPTERS
from para_core.adapters.models.unsupported import REFUSED
from para_core.adapters.refusal import refusal
from para_core.adapters.registry import (
    DIFFUSION_DECODER,
    USUAL_NAMES,
    adapter_for,
    applied_mesh,
    is_transformer_class,
    plan_for,
    wrapped_model,
)
from para_core.distributed.mesh import SequenceMesh
from para_core.instance.modules import submodules_of, uncompiled
from para_core.instance.private_class import original_class
from para_core.plans.plan import Plan


def check_has_transformer(owner: Any, module: Any) -> None:
    """Refuse parallelism for a pipeline without a transformer."""
    if module is None:
        name = original_class(owner).__name__
        raise refusal(
            TypeError,
            f"{name} is not supported: it has no transformer. The closest names of those that are supported: "
            f"{closest_supported(name)}.",
            "Use one of the pipelines of docs/pipelines.md, or give each rank its own prompts.",
        )


def check_component_classes(pipeline: str, components: Mapping[str, Any]) -> None:
    """Refuse a pipeline before it is loaded, given the classes of its components in the index of its folder.

    The transformers and the UNet of the loaded pipeline are checked again, with what their instances say.
    Without any components nothing is refused.
    """
    transformers = {
        name: cls for name, cls in components.items() if name in USUAL_NAMES or is_transformer_class(cls)
    }
    for cls in transformers.values():
        names = [base.__name__ for base in cls.__mro__]
        adapter = next(
            (adapter for name in names for adapter in ADAPTERS if adapter.transformer == name), None
        )
        if getattr(cls, "_cp_plan", None) is None and (adapter is None or adapter.plan is None):
            reason = next(
                (REFUSED[name] for name in names if name in REFUSED), "no plan describes what it shards"
            )
            raise TypeError(
                f"{pipeline} is not supported: {cls.__name__} has no plan, because {reason}. The closest names of "
                f"those that are supported: {closest_supported(pipeline, cls.__name__)}."
            )
    if transformers or DIFFUSION_DECODER in components or not components:
        return
    if not any(kind.check_components(pipeline, components) for kind in denoiser_kinds()):
        raise TypeError(
            f"{pipeline} is not supported: it has no transformer. The closest names of those that are supported: "
            f"{closest_supported(pipeline)}."
        )


def check_not_fsdp1(module: nn.Module, name: str) -> None:
    """Refuse a model that FSDP1, FullyShardedDataParallel, has sharded."""
    if any(map(isinstance, submodules_of(module), repeat(FullyShardedDataParallel))):
        raise TypeError(
            f"{name} is sharded by FullyShardedDataParallel (FSDP1), which keeps the weights of a module in one flat "
            f"tensor: neither it nor the {original_class(wrapped_model(module) or module).__name__} inside it can run "
            "here. Load the model again without it; to shard the weights, pass weights='fsdp' to parallelize_pipe, "
            "which is FSDP2."
        )


def check_not_wrapped(module: nn.Module, name: str, adapter: Adapter | None = None) -> None:
    """Refuse a model inside a wrapper for training, such as DistributedDataParallel.

    Call :func:`check_not_fsdp1` before: FSDP1 is such a wrapper too, and its message has another way out.
    """
    inner = None
    if adapter_for(module, adapter) is None:
        inner = wrapped_model(module)
    if inner is not None:
        raise TypeError(
            f"{name} is a {original_class(module).__name__} around a {original_class(inner).__name__}: a wrapper for "
            "training, which has no part in inference (accelerator.prepare wraps each model that it gets). Take the "
            f"model out: {name} = {name}{'.module' * _depth_of(inner, module)}"
        )


def _depth_of(inner: nn.Module, wrapper: Any) -> int:
    """Return how many wrappers are around ``inner``, each with the next one in its attribute ``module``."""
    depth = 0
    while wrapper is not inner:
        wrapper = uncompiled(wrapper.module)
        depth += 1
    return depth


def check_adapter_type(adapter: Any, module: nn.Module) -> None:
    """Refuse an adapter= that is not an Adapter."""
    if adapter is not None and not isinstance(adapter, Adapter):
        raise refusal(
            TypeError,
            f"adapter is {adapter!r}; expected an Adapter, or None.",
            f"Pass adapter=Adapter(transformer={original_class(module).__name__!r}, pipelines='…', "
            "blocks=CachedBlocks(...), plan=Plan(...)), or leave it out.",
        )


def check_class_has_plan(owner: Any, module: nn.Module, adapter: Adapter | None) -> None:
    """Refuse a transformer class that cannot run on several ranks."""
    reason = next((REFUSED[cls.__name__] for cls in type(module).__mro__ if cls.__name__ in REFUSED), None)
    if reason is not None and plan_for(module, adapter=adapter) is None:
        name = original_class(module).__name__
        raise refusal(
            TypeError,
            f"{original_class(owner).__name__} is not supported: {name} has no plan, because {reason}. The closest "
            f"names of those that are supported: {closest_supported(name)}.",
            "Give each rank its own prompts, or use one of the pipelines of docs/pipelines.md.",
        )


def require_plan(owner: Any, module: nn.Module, adapter: Adapter | None, text: Text | None = None) -> Plan:
    """Return the plan of :func:`plan_for`.
    Raise ``TypeError``, which names the pipeline ``owner``, without one.
    """
    plan = plan_for(module, text, adapter)
    if plan is None:
        raise TypeError(
            f"{original_class(owner).__name__} is not supported: there is no plan for "
            f"{original_class(module).__name__}. A plan says in about ten lines what the model shards and gathers: "
            f"parallelize_pipe(pipe, mesh=mesh, adapter=Adapter(transformer={original_class(module).__name__!r}, "
            "pipelines=..., plan=Plan(...))). propose_plan finds most plans; docs/new_model.md shows how to write one. "
            "The closest names of those that are supported: "
            f"{closest_supported(original_class(owner).__name__, original_class(module).__name__)}; docs/pipelines.md "
            "has all."
        )
    return plan


def check_model_not_replaced(called: Any, module: nn.Module, name: str) -> None:
    """Refuse a transformer that replaced the one that was parallelized.

    Raise ``RuntimeError`` unless ``called``, the component that the pipeline calls, is ``module``, compiled
    or not.
    """
    if uncompiled(called) is not module:
        raise RuntimeError(
            f"{name} is another module than when the pipe was parallelized, and would run on one rank. Call "
            "parallelize_pipe(pipe, mesh=...) again."
        )


def check_mesh_not_replaced(module: nn.Module, name: str, applied: SequenceMesh | None) -> None:
    """Refuse a transformer whose plan was replaced or removed after its pipeline was parallelized."""
    if applied_mesh(module) != applied:
        raise RuntimeError(
            f"{name} got another mesh, or was unparallelized, after the pipe was parallelized, perhaps through a pipe "
            "that shares it. Call parallelize_pipe(pipe, mesh=...) again, or unparallelize_pipe(pipe)."
        )


def check_pipeline_of_model(owner: Any, module: nn.Module, adapter: Adapter | None) -> None:
    """Refuse a pipeline whose way to call its transformer is wrong on a part of the tokens."""
    adapter = adapter_for(module, adapter)
    if adapter is None:
        return
    reason = next(
        (reason for name, reason in adapter.refused_pipelines.items() if hasattr(owner, name)), None
    )
    if reason is not None:
        raise refusal(
            TypeError,
            f"{original_class(owner).__name__} is not supported: {reason}.",
            "Use a pipeline without it.",
        )
