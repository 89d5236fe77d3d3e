"""Look up adapters, plans, transformers and UNets, and refuse models that have none."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from functools import reduce
from itertools import repeat
from operator import attrgetter
from os import PathLike
from typing import Any, Literal

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from para_core.adapters.adapter import Adapter, Text
from para_core.adapters.models import ADAPTERS
from para_core.adapters.models.unets import UNETS, UnetAdapter
from para_core.adapters.models.unsupported import REFUSED
from para_core.adapters.refusal import refusal
from para_core.cache.blocks import CachedBlocks
from para_core.distributed.mesh import GuidedMesh, SequenceMesh
from para_core.instance.modules import submodules_of, uncompiled
from para_core.instance.private_class import original_class
from para_core.instance.record import slot_owner
from para_core.instance.slots import Slot
from para_core.plans.plan import Plan
from para_core.plans.published_plan import published_plan
from para_core.plans.region import mesh_of_plan
from para_core.weights.tensor_plan import TensorPlan, published_tensor_plan

_DESCRIBE_BLOCKS = "pass adapter=Adapter(transformer='…', pipelines='…', blocks=CachedBlocks(...))."
# Usual names of the components that denoise. Wan 2.2 has two, for the two parts of its schedule, and Ideogram 4 has one
# for each CFG branch. A component with such a name counts as a transformer whatever its class: a class without a plan
# is then refused with a reason, or described by adapter=.
USUAL_NAMES = ("transformer", "transformer_2", "unconditional_transformer")
_CLASSES = frozenset(adapter.transformer for adapter in ADAPTERS)
# Component name of the decoder of LTX-2.5, which is a diffusion model over pixels.
DIFFUSION_DECODER = "diffusion_decoder"


def plan_for(module: nn.Module, text: Text | None = None, adapter: Adapter | None = None) -> Plan | None:
    """Return the plan of ``module``: its adapter's, or else the one that its class publishes (``_cp_plan``), or None.

    ``text`` says whether the plan shards or replicates text tokens; None for the faster way. ``adapter`` has priority
    over the library's. Raises ``ValueError`` if ``text`` is unknown, or the text of this model cannot be sharded.
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
        plan, segment, default = published_plan(published), "encoder_hidden_states", "shard"
    else:
        return None
    if (text or default) == "replicate":
        return plan.with_replicated(segment)
    if text == "shard" and not plan.cuts(segment):
        raise ValueError(
            f"text='shard' was given, but {original_class(module).__name__} needs all text tokens on every rank: it "
            "makes masks or positions for the whole sequence, or only its keys are text. Leave text= out."
        )
    return plan


def tensor_plan_for(module: nn.Module) -> TensorPlan | None:
    """Return the tensor plan of ``module``: its adapter's, or else the one that its class publishes (``_tp_plan``).

    None if there is neither, and for classes without an adapter.
    """
    adapter = adapter_for(module)
    if adapter is None:
        # Ignore the _tp_plan of other classes: those of the transformers library have another format.
        return None
    if adapter.tensor is not None:
        return adapter.tensor
    published: Any = getattr(module, "_tp_plan", None)
    return published_tensor_plan(published) if published else None


def adapter_for(module: nn.Module, adapter: Adapter | None = None) -> Adapter | None:
    """Return the adapter for the class of ``module``, or for the nearest of its base classes; None if there is none.

    ``adapter`` has priority over the library's for the same class.
    """
    candidates = ADAPTERS if adapter is None else (adapter, *ADAPTERS)
    names = [cls.__name__ for cls in type(module).__mro__]
    return next((candidate for name in names for candidate in candidates if candidate.transformer == name), None)


def planned_class(module: nn.Module, adapter: Adapter | None = None) -> type:
    """Return the class whose code the plan of ``module`` describes: that of the adapter, or the one that publishes a
    plan; the class of ``module`` itself if there is neither.
    """
    adapter, classes = adapter_for(module, adapter), original_class(module).__mro__
    if adapter is not None and adapter.plan is not None:
        return next(cls for cls in classes if cls.__name__ == adapter.transformer)
    return next((cls for cls in classes if "_cp_plan" in vars(cls)), classes[0])


def require_adapter(module: nn.Module, adapter: Adapter | None = None) -> Adapter:
    """Return the adapter of :func:`adapter_for`. Raise ``TypeError`` if there is none."""
    adapter = adapter_for(module, adapter)
    if adapter is None:
        raise TypeError(f"no adapter describes {original_class(module).__name__}: {_DESCRIBE_BLOCKS}")
    return adapter


def require_blocks(module: nn.Module, adapter: Adapter | None = None) -> CachedBlocks:
    """Return the block stack that the adapter for ``module`` describes. Raise ``TypeError`` if there is none."""
    blocks = require_adapter(module, adapter).blocks
    if blocks is None:
        raise TypeError(f"no adapter describes the blocks of {original_class(module).__name__}: {_DESCRIBE_BLOCKS}")
    return blocks


def transformers_of(pipe: Any) -> dict[str, nn.Module]:
    """Return the transformers of ``pipe`` by component name, without the wrappers of ``torch.compile``.

    These are the modules under one of the usual names, and, under any name, modules whose class has an adapter or
    publishes a plan. Text encoders, VAEs, ControlNets and UNets have neither. A module under two names has one entry.
    """
    # A pipeline that is an nn.Module keeps its components in ``_modules``; properties have usual names.
    attributes = {**getattr(pipe, "__dict__", {}), **getattr(pipe, "_modules", {})}
    others = []
    for name, part in attributes.items():
        if name in USUAL_NAMES or not isinstance(part, nn.Module):
            continue
        module = uncompiled(part)
        if is_transformer_class(type(wrapped_model(module) or module)) or getattr(module, "_cp_plan", None) is not None:
            others.append(name)
    modules: dict[str, nn.Module] = {}
    for name in (*USUAL_NAMES, *sorted(others)):
        module = uncompiled(getattr(pipe, name, None))
        if isinstance(module, nn.Module) and module not in modules.values():
            modules[name] = module
    return modules


def wrapped_model(wrapper: Any) -> nn.Module | None:
    """Return the model inside ``wrapper``, a module such as ``DistributedDataParallel``; None if it is no wrapper.

    Wrappers for training keep the model in their attribute ``module``, and may be nested. A class that is not torch's
    counts as a wrapper only if the class of the model is supported.
    """
    inner: Any = wrapper
    while not _is_known_class(inner):
        deeper = uncompiled(getattr(inner, "module", None))
        if not isinstance(deeper, nn.Module):
            break
        inner = deeper
    if inner is wrapper or not (_is_known_class(inner) or isinstance(wrapper, _TRAINING_WRAPPERS)):
        return None
    model: nn.Module = inner
    return model


_TRAINING_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel, FullyShardedDataParallel)


def _is_known_class(module: nn.Module) -> bool:
    return is_transformer_class(type(module)) or unet_adapter(module) is not None


def require_kind(kind: Literal["pipeline", "model"], instance: Any, other: str) -> None:
    """Raise ``TypeError`` if ``instance`` is a model and a pipeline is expected, or it is no model and one is expected.

    ``other`` completes the message: what to call with an object of the other kind.
    """
    if instance is None or isinstance(instance, (str, bytes, PathLike, int, float, Mapping, Sequence)):
        kind_given = "None" if instance is None else f"a {type(instance).__name__}"
        raise TypeError(f"expected a {kind}, got {kind_given}. Pass the object that from_pretrained(...) returned.")
    if isinstance(instance, type):
        raise TypeError(
            f"expected a {kind}, got the class {instance.__name__}. Pass the object that "
            f"{instance.__name__}.from_pretrained(...) returned."
        )
    module = uncompiled(instance)
    is_model = isinstance(module, nn.Module)
    if is_model and kind == "pipeline" and not is_transformer_class(type(module)):
        # A pipeline may be an nn.Module, too.
        parts = transformers_of(module) or unets_of(module) or decoders_of(module)
        is_model = not (parts or hasattr(module, "components"))
    if is_model != (kind == "model"):
        raise TypeError(f"expected a {kind}, and got a {original_class(module).__name__}. {other}")


def is_transformer_class(cls: Any) -> bool:
    """Whether an adapter describes this class or one of its base classes, or the class publishes a plan."""
    if isinstance(cls, type) and not _CLASSES.isdisjoint(map(attrgetter("__name__"), cls.__mro__)):
        return True
    return getattr(cls, "_cp_plan", None) is not None


def unets_of(pipe: Any) -> dict[str, nn.Module]:
    """Return the UNet and the supported ControlNets of ``pipe`` by path; empty with a transformer or without a UNet."""
    unet = uncompiled(getattr(pipe, "unet", None))
    if not isinstance(unet, nn.Module) or transformers_of(pipe):
        return {}
    controlnet = uncompiled(getattr(pipe, "controlnet", None))
    nets = enumerate(getattr(controlnet, "nets", ()))
    paths = {"controlnet": controlnet, **{f"controlnet.nets.{index}": uncompiled(net) for index, net in nets}}
    return {"unet": unet, **{path: module for path, module in paths.items() if unet_adapter(module) is not None}}


def decoders_of(pipe: Any) -> dict[str, nn.Module]:
    """Return the diffusion decoder of ``pipe`` by name; empty unless the pipeline only decodes."""
    module = uncompiled(getattr(pipe, DIFFUSION_DECODER, None))
    if not isinstance(module, nn.Module) or transformers_of(pipe) or unets_of(pipe):
        return {}
    return {DIFFUSION_DECODER: module}


def unet_adapter(unet: Any) -> UnetAdapter | None:
    """Return the adapter for the class of ``unet``, or for the nearest of its base classes; None if there is none."""
    for cls in original_class(unet).__mro__:
        if cls.__name__ in UNETS:
            return UNETS[cls.__name__]
    return None


def component_of(pipe: Any, path: str) -> Any:
    """Return the component of ``pipe`` at a dotted ``path`` such as ``controlnet.nets.0``; None if there is none."""
    return reduce(lambda owner, name: getattr(owner, name, None), path.split("."), pipe)


def closest_supported(*names: str) -> str:
    """Return the five supported names that are closest to ``names``, class names, as one string for messages."""
    transformers = [(adapter.transformer, adapter.pipelines) for adapter in ADAPTERS]
    return _closest(
        [*transformers, *[(name, adapter.pipelines) for name, adapter in _supported_unets().items()]], names
    )


def closest_cached(*names: str) -> str:
    """Return the five names closest to ``names`` among what First Block Cache supports, as one string for messages."""
    return _closest([(adapter.transformer, adapter.pipelines) for adapter in ADAPTERS if adapter.blocks], names)


def supported_unets() -> str:
    """Return the names of the pipelines with a supported UNet, as one string for messages."""
    return "; ".join(adapter.pipelines for adapter in _supported_unets().values())


def _supported_unets() -> Mapping[str, UnetAdapter]:
    # ControlNets, which no pipeline consists of, have no names of pipelines.
    return {name: adapter for name, adapter in UNETS.items() if adapter.pipelines}


def _closest(kinds: Sequence[tuple[str, str]], names: Sequence[str]) -> str:
    """Return the pipelines of the five of ``kinds``, pairs of a class name and pipelines, most similar to ``names``."""

    def similarity(kind: tuple[str, str]) -> float:
        pairs = [(_stem(own), _stem(name)) for own in kind for name in names]
        return max(SequenceMatcher(None, own, name).ratio() for own, name in pairs)

    return "; ".join(pipelines for _, pipelines in sorted(kinds, key=similarity, reverse=True)[:5])


def _stem(name: str) -> str:
    """Return a class name in lower case without the words that most models share.

    >>> _stem("WanTransformer3DModel"), _stem("FluxFillPipeline")
    ('wan', 'fluxfill')
    """
    return re.sub(r"Transformer|Pipeline|Model|Condition|[123]D|[^A-Za-z0-9]", "", name).lower()


def mesh_of(pipe: Any) -> GuidedMesh | None:
    """Return the mesh on which ``pipe`` runs; None if it is not parallel."""
    return _mesh_in_slot(pipe, Slot.PARALLEL_PIPE)


def applied_mesh(module: Any) -> SequenceMesh | None:
    """Return the ranks over which the tokens or rows of ``module`` are sharded; None if they are not."""
    unet = _mesh_in_slot(module, Slot.PARALLEL_UNET)
    return mesh_of_plan(module) or (None if unet is None else unet.sequence)


def _mesh_in_slot(instance: Any, slot: Slot) -> GuidedMesh | None:
    mesh = getattr(slot_owner(instance, slot, object), "mesh", None)
    return mesh if isinstance(mesh, GuidedMesh) else None


def refuse_missing_transformer(owner: Any, module: Any) -> None:
    """Refuse parallelism for a pipeline without a transformer."""
    if module is None:
        name = original_class(owner).__name__
        raise refusal(
            TypeError,
            f"{name} is not supported: it has no transformer. The closest names of those that are supported: "
            f"{closest_supported(name)}.",
            "Use one of the pipelines of docs/pipelines.md, or give each rank its own prompts.",
        )


def refuse_unsupported_classes(pipeline: str, components: Mapping[str, Any]) -> None:
    """Refuse a pipeline before it is loaded, given the classes of its components in the index of its folder.

    The transformers and the UNet of the loaded pipeline are checked again, with what their instances say. Without any
    components nothing is refused.
    """
    transformers = {name: cls for name, cls in components.items() if name in USUAL_NAMES or is_transformer_class(cls)}
    for cls in transformers.values():
        names = [base.__name__ for base in cls.__mro__]
        adapter = next((adapter for name in names for adapter in ADAPTERS if adapter.transformer == name), None)
        if getattr(cls, "_cp_plan", None) is None and (adapter is None or adapter.plan is None):
            reason = next((REFUSED[name] for name in names if name in REFUSED), "no plan describes what it shards")
            raise TypeError(
                f"{pipeline} is not supported: {cls.__name__} has no plan, because {reason}. The closest names of "
                f"those that are supported: {closest_supported(pipeline, cls.__name__)}."
            )
    if transformers or DIFFUSION_DECODER in components or not components:
        return
    unet = components.get("unet")
    if unet is None:
        raise TypeError(
            f"{pipeline} is not supported: it has no transformer. The closest names of those that are supported: "
            f"{closest_supported(pipeline)}."
        )
    if not any(base.__name__ in UNETS for base in unet.__mro__):
        raise TypeError(
            f"{pipeline} is not supported: the rows of images in {unet.__name__} cannot be sharded. Supported are the "
            f"UNets of {supported_unets()}."
        )


def refuse_fsdp1(module: nn.Module, name: str) -> None:
    """Refuse a model that FSDP1, FullyShardedDataParallel, has sharded."""
    if any(map(isinstance, submodules_of(module), repeat(FullyShardedDataParallel))):
        raise TypeError(
            f"{name} is sharded by FullyShardedDataParallel (FSDP1), which keeps the weights of a module in one flat "
            f"tensor: neither it nor the {original_class(wrapped_model(module) or module).__name__} inside it can run "
            "here. Load the model again without it; to shard the weights, pass weights='fsdp' to parallelize_pipe, "
            "which is FSDP2."
        )


def refuse_wrapped_model(module: nn.Module, name: str, adapter: Adapter | None = None) -> None:
    """Refuse a model inside a wrapper for training, such as DistributedDataParallel."""
    inner = None if adapter_for(module, adapter) is not None else wrapped_model(module)
    if inner is not None:
        raise TypeError(
            f"{name} is a {original_class(module).__name__} around a {original_class(inner).__name__}: a wrapper for "
            "training, which has no part in inference (accelerator.prepare wraps each model that it gets). Take the "
            f"model out: {name} = {name}.module"
        )


def refuse_other_type_of_adapter(adapter: Any, module: nn.Module) -> None:
    """Refuse an adapter= that is not an Adapter."""
    if adapter is not None and not isinstance(adapter, Adapter):
        raise refusal(
            TypeError,
            f"adapter is {adapter!r}; expected an Adapter, or None.",
            f"Pass adapter=Adapter(transformer={original_class(module).__name__!r}, pipelines='…', "
            "blocks=CachedBlocks(...), plan=Plan(...)), or leave it out.",
        )


def refuse_class_without_plan(owner: Any, module: nn.Module, adapter: Adapter | None) -> None:
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
    """Return the plan of :func:`plan_for`. Raise ``TypeError``, which names the pipeline ``owner``, without one."""
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


def refuse_replaced_model(called: Any, module: nn.Module, name: str) -> None:
    """Refuse a transformer that replaced the one that was parallelized.

    Raise ``RuntimeError`` unless ``called``, the component that the pipeline calls, is ``module``, compiled or not.
    """
    if uncompiled(called) is not module:
        raise RuntimeError(
            f"{name} is another module than when the pipe was parallelized, and would run on one rank. Call "
            "parallelize_pipe(pipe, mesh=...) again."
        )


def refuse_other_mesh(module: nn.Module, name: str, applied: SequenceMesh | None) -> None:
    """Refuse a transformer whose plan was replaced or removed after its pipeline was parallelized."""
    if applied_mesh(module) != applied:
        raise RuntimeError(
            f"{name} got another mesh, or was unparallelized, after the pipe was parallelized, perhaps through a pipe "
            "that shares it. Call parallelize_pipe(pipe, mesh=...) again, or unparallelize_pipe(pipe)."
        )


def refuse_cache_without_transformer(owner: Any, module: Any) -> None:
    """Refuse a cache for a pipeline without a transformer."""
    if module is None:
        raise refusal(
            TypeError,
            f"{original_class(owner).__name__} cannot be cached: it has no transformer.",
            "Leave the cache out, or use one of the pipelines of docs/pipelines.md.",
        )


def refuse_cache_on_unet(owner: Any, module: nn.Module) -> None:
    """Refuse a cache on a UNet."""
    if unet_adapter(module) is not None:
        raise refusal(
            TypeError,
            f"{original_class(owner).__name__} cannot be cached: First Block Cache skips blocks whose output has the "
            f"size of their input. The blocks of {original_class(module).__name__} pass residuals of many sizes to "
            "each other.",
            "Leave the cache out; parallelize_pipe runs it on several ranks.",
        )


def refuse_uncached_blocks(owner: Any, module: nn.Module, adapter: Adapter | None) -> None:
    """Refuse a cache on blocks that cannot be skipped."""
    adapter = adapter_for(module, adapter)
    if adapter is not None and adapter.blocks is None and adapter.uncached is not None:
        raise TypeError(
            f"{original_class(owner).__name__} cannot be cached: {adapter.uncached} "
            f"({original_class(module).__name__}). Leave the cache out; parallelize_pipe runs it on several ranks."
        )


def refuse_unknown_blocks(owner: Any, module: nn.Module, adapter: Adapter | None) -> None:
    """Refuse a cache on blocks that no adapter describes."""
    adapter = adapter_for(module, adapter)
    if adapter is None or adapter.blocks is None:
        raise refusal(
            TypeError,
            f"{original_class(owner).__name__} cannot be cached: no adapter describes the blocks of "
            f"{original_class(module).__name__}. The closest names of those that are supported: "
            f"{closest_cached(original_class(module).__name__)}.",
            "Describe them: apply_cache_on_pipe(pipe, adapter=Adapter(transformer='…', pipelines='…', "
            "blocks=CachedBlocks((BlockGroup(('blocks',)),)))).",
        )


def refuse_replaced_cached_model(called: Any, module: nn.Module, name: str) -> None:
    """Refuse a transformer that replaced the one that has the cache."""
    if uncompiled(called) is not module:
        raise RuntimeError(
            f"{name} is another module than when the cache was applied. Call apply_cache_on_pipe(pipe, ...) again."
        )
