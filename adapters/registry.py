"""Look up adapters and plans of models, the models of a pipeline, and the mesh on which they run.

All rooms of ``adapters`` ask here; nothing is changed. Adapters themselves are in ``adapters/models``, the
errors about unsupported models in ``model_checks.py``. Encoders and autoencoders are found by
``adapters/inspect/components.py``. Tests: tests/adapters/compatibility/test_checks.py,
tests/adapters/test_pipelines.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import attrgetter
from os import PathLike
from typing import Any, Literal

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from para_core.adapters.adapter import Adapter, Text
from para_core.adapters.denoisers import kind_of, mesh_of_denoiser, other_denoisers_of
from para_core.adapters.models import ADAPTERS
from para_core.cache.blocks import CachedBlocks
from para_core.distributed.mesh import GuidedMesh, SequenceMesh
from para_core.instance.modules import uncompiled
from para_core.instance.private_class import original_class
from para_core.instance.record import slot_owner
from para_core.instance.slots import Slot
from para_core.plans.plan import Plan
from para_core.plans.published_plan import convert_published_plan
from para_core.plans.region import mesh_of_plan
from para_core.weights.tensor_plan import TensorPlan, published_tensor_plan

_DESCRIBE_BLOCKS = "pass adapter=Adapter(transformer='…', pipelines='…', blocks=CachedBlocks(...))."
# Usual names of the components that denoise. Wan 2.2 has two, for the two parts of its schedule, and Ideogram
# 4 has one for each CFG branch. A component with such a name counts as a transformer whatever its class: a
# class without a plan is then refused with a reason, or described by adapter=.
USUAL_NAMES = ("transformer", "transformer_2", "unconditional_transformer")
_CLASSES = frozenset(adapter.transformer for adapter in ADAPTERS)
# Component name of the decoder of LTX-2.5, which is a diffusion model over pixels.
DIFFUSION_DECODER = "diffusion_decoder"


def plan_for(module: nn.Module, text: Text | None = None, adapter: Adapter | None = None) -> Plan | None:
    """Return the plan of ``module``: its adapter's, or else the one that its class publishes (``_cp_plan``),
    or None.

    ``text`` says whether the plan shards or replicates text tokens; None for the faster way. ``adapter`` has
    priority over the library's. Raises ``ValueError`` if ``text`` is unknown, or the text of this model
    cannot be sharded, or not be replicated (:meth:`Plan.with_replicated`).
    """
    if text not in (None, "shard", "replicate"):
        raise ValueError(f"text is {text!r}; expected 'shard', 'replicate', or None for the faster one.")
    adapter = adapter_for(module, adapter)
    published: Any = getattr(module, "_cp_plan", None)
    if adapter is not None and adapter.plan is not None:
        plan, segment, default = adapter.plan, "text", adapter.text
        if adapter.complete is not None:
            plan = adapter.complete(plan, uncompiled(module))
    elif published is not None:
        plan, segment, default = convert_published_plan(published), "encoder_hidden_states", "shard"
    else:
        return None
    if (text or default) == "replicate":
        return plan.with_replicated(segment)
    if text == "shard" and not plan.splits(segment):
        raise ValueError(
            f"text='shard' was given, but {original_class(module).__name__} needs all text tokens on every rank: it "
            "makes masks or positions for the whole sequence, or only its keys are text. Leave text= out."
        )
    return plan


def tensor_plan_for(module: nn.Module, adapter: Adapter | None = None) -> TensorPlan | None:
    """Return the tensor plan of ``module``: its adapter's, or else the one that its class publishes
    (``_tp_plan``).

    None if there is neither, and for classes without an adapter. ``adapter`` has priority over the library's.
    """
    adapter = adapter_for(module, adapter)
    if adapter is None:
        # Ignore the _tp_plan of other classes: those of the transformers library have another format.
        return None
    if adapter.tensor is not None:
        return adapter.tensor
    published: Any = getattr(module, "_tp_plan", None)
    if not published:
        return None
    return published_tensor_plan(published)


def adapter_for(module: nn.Module, adapter: Adapter | None = None) -> Adapter | None:
    """Return the adapter for the class of ``module``, or for the nearest of its base classes; None if there
    is none.

    ``adapter`` has priority over the library's for the same class: that of a nearer class comes before both, and
    one for another model counts for nothing. ``module`` is not the wrapper of ``torch.compile``, whose class has no
    adapter; nor may it be in the other functions here that take a module and an adapter.
    """
    candidates = list(ADAPTERS)
    if adapter is not None:
        candidates.insert(0, adapter)
    names = [cls.__name__ for cls in type(module).__mro__]
    return next(
        (candidate for name in names for candidate in candidates if candidate.transformer == name), None
    )


def planned_class(module: nn.Module, adapter: Adapter | None) -> type:
    """Return the class whose code the plan of ``module`` describes: that of the adapter, or the one that
    publishes a plan; the class of ``module`` itself if there is neither.
    """
    adapter, classes = adapter_for(module, adapter), original_class(module).__mro__
    if adapter is not None and adapter.plan is not None:
        return next(cls for cls in classes if cls.__name__ == adapter.transformer)
    return next((cls for cls in classes if "_cp_plan" in vars(cls)), classes[0])


def require_adapter(module: nn.Module, adapter: Adapter | None) -> Adapter:
    """Return the adapter of :func:`adapter_for`. Raise ``TypeError`` if there is none."""
    adapter = adapter_for(module, adapter)
    if adapter is None:
        raise TypeError(f"no adapter describes {original_class(module).__name__}: {_DESCRIBE_BLOCKS}")
    return adapter


def require_blocks(module: nn.Module, adapter: Adapter | None) -> CachedBlocks:
    """Return the block stack that the adapter for ``module`` describes. Raise ``TypeError`` if there is none."""
    blocks = require_adapter(module, adapter).blocks
    if blocks is None:
        raise TypeError(
            f"no adapter describes the blocks of {original_class(module).__name__}: {_DESCRIBE_BLOCKS}"
        )
    return blocks


def transformers_of(pipe: Any) -> dict[str, nn.Module]:
    """Return the transformers of ``pipe`` by component name, without the wrappers of ``torch.compile``.

    These are the modules under one of the usual names, and, under any name, modules whose class has an
    adapter or publishes a plan. Text encoders, VAEs, ControlNets and UNets have neither. A module under two
    names has one entry.
    """
    # A pipeline that is an nn.Module keeps its components in ``_modules``; properties have usual names.
    attributes = {**getattr(pipe, "__dict__", {}), **getattr(pipe, "_modules", {})}
    others = []
    for name, part in attributes.items():
        if name in USUAL_NAMES or not isinstance(part, nn.Module):
            continue
        module = uncompiled(part)
        if (
            is_transformer_class(type(wrapped_model(module) or module))
            or getattr(module, "_cp_plan", None) is not None
        ):
            others.append(name)
    modules: dict[str, nn.Module] = {}
    for name in (*USUAL_NAMES, *sorted(others)):
        module = uncompiled(getattr(pipe, name, None))
        if isinstance(module, nn.Module) and module not in modules.values():
            modules[name] = module
    return modules


def wrapped_model(wrapper: Any) -> nn.Module | None:
    """Return the model inside ``wrapper``, a module such as ``DistributedDataParallel``; None if it is no
    wrapper.

    Wrappers for training keep the model in their attribute ``module``, and may be nested. A class that is not
    torch's counts as a wrapper only if the class of the model is supported.
    """
    model: Any = wrapper
    while not _is_known_class(model):
        wrapped = uncompiled(getattr(model, "module", None))
        if not isinstance(wrapped, nn.Module):
            break
        model = wrapped
    if model is wrapper or not (_is_known_class(model) or isinstance(wrapper, _TRAINING_WRAPPERS)):
        return None
    found: nn.Module = model
    return found


_TRAINING_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel, FullyShardedDataParallel)


def _is_known_class(module: nn.Module) -> bool:
    """Whether ``module`` is a supported transformer or other denoiser."""
    return is_transformer_class(type(module)) or kind_of(module) is not None


def check_pipeline_or_model(kind: Literal["pipeline", "model"], instance: Any, other: str) -> None:
    """Raise ``TypeError`` if ``instance`` is a model and a pipeline is expected, or it is no model and one is
    expected.

    ``other`` completes the message: what to call with an object of the other kind.
    """
    if instance is None or isinstance(instance, (str, bytes, PathLike, int, float, Mapping, Sequence)):
        kind_given = "None"
        if instance is not None:
            kind_given = f"a {type(instance).__name__}"
        raise TypeError(
            f"expected a {kind}, got {kind_given}. Pass the object that from_pretrained(...) returned."
        )
    if isinstance(instance, type):
        raise TypeError(
            f"expected a {kind}, got the class {instance.__name__}. Pass the object that "
            f"{instance.__name__}.from_pretrained(...) returned."
        )
    module = uncompiled(instance)
    is_model = isinstance(module, nn.Module)
    if is_model and kind == "pipeline" and not is_transformer_class(type(module)):
        # A pipeline may be an nn.Module, too.
        parts = transformers_of(module) or other_denoisers_of(module) or decoders_of(module)
        is_model = not (parts or hasattr(module, "components"))
    if is_model != (kind == "model"):
        raise TypeError(f"expected a {kind}, and got a {original_class(module).__name__}. {other}")


def is_transformer_class(cls: Any) -> bool:
    """Whether an adapter describes this class or one of its base classes, or the class publishes a plan."""
    if isinstance(cls, type) and not _CLASSES.isdisjoint(map(attrgetter("__name__"), cls.__mro__)):
        return True
    return getattr(cls, "_cp_plan", None) is not None


def decoders_of(pipe: Any) -> dict[str, nn.Module]:
    """Return the diffusion decoder of ``pipe`` by name; empty unless the pipeline only decodes."""
    module = uncompiled(getattr(pipe, DIFFUSION_DECODER, None))
    if not isinstance(module, nn.Module) or transformers_of(pipe) or other_denoisers_of(pipe):
        return {}
    return {DIFFUSION_DECODER: module}


def all_components(pipe: Any) -> dict[str, Any]:
    """Return all components of ``pipe`` by name; of a pipeline that is not of diffusers, its attributes."""
    components: dict[str, Any] | None = getattr(pipe, "components", None)
    if components is None:
        components = {**getattr(pipe, "__dict__", {}), **getattr(pipe, "_modules", {})}
    return components


def component_of(pipe: Any, path: str) -> Any:
    """Return the component of ``pipe`` at a dotted ``path`` such as ``controlnet.nets.0``; None if there is none."""
    return reduce(lambda owner, name: getattr(owner, name, None), path.split("."), pipe)


def mesh_of(pipe: Any) -> GuidedMesh | None:
    """Return the mesh on which ``pipe`` runs; None if it is not parallel, or no pipeline."""
    # The owner is a ParallelCall, whose file imports this one.
    mesh = getattr(slot_owner(pipe, Slot.PARALLEL_PIPE, object), "mesh", None)
    if isinstance(mesh, GuidedMesh):
        return mesh
    return None


def applied_mesh(module: Any) -> SequenceMesh | None:
    """Return the ranks that share the tokens or rows of ``module``, which may be this rank alone; None if
    ``module`` is not parallel.
    """
    return mesh_of_plan(module) or mesh_of_denoiser(module)
