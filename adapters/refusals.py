"""What is refused before a call: a pipeline, a transformer, or what stands on it. One table, :data:`REFUSALS`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from torch import nn
from torch.distributed import get_process_group_ranks
from torch.distributed.tensor import DTensor

from para_core.adapters.adapter import Adapter
from para_core.adapters.models.unets import unet_adapter, why_refused_unet
from para_core.adapters.supported import (
    adapter_for,
    cached,
    component_of,
    plan_for,
    supported,
    transformers_of,
    unets_of,
    why_refused,
)
from para_core.adapters.unet_rows import unet_mesh
from para_core.adapters.weights.stages import why_no_stages
from para_core.cache.foreign import foreign_cache
from para_core.cache.options import CacheOptions
from para_core.instance import has_compiled_parts, original_class, uncompiled
from para_core.mesh import GuidedMesh, SequenceMesh
from para_core.plans.region import plan_mesh
from para_core.weights.fsdp import is_sharded, shard_mesh
from para_core.weights.pipefusion import fusion_of
from para_core.weights.stages import stages_of
from para_core.weights.tensor import tensor_mesh


class When(Enum):
    """Before what a refusal is asked for."""

    PARALLELIZE = auto()
    PARALLEL_CALL = auto()
    CACHE = auto()
    CACHED_CALL = auto()
    SHARD = auto()


@dataclass(frozen=True)
class Case:
    """One transformer, or UNet, that is about to be run, and what is known of how.

    Args:
        owner: its pipe, or the transformer itself.
        module: it; None: the pipe has none.
        component: its name in the pipe; empty without a pipe.
        adapter: what its user says of it.
        mesh: the ranks; None: not known yet, or one.
        applied: the ranks that share its tokens, or rows, by what was applied to it.
        options: of its cache.
    """

    owner: Any
    module: Any
    component: str = ""
    adapter: Adapter | None = None
    mesh: GuidedMesh | None = None
    applied: SequenceMesh | None = None
    options: CacheOptions | None = None

    @property
    def ranks(self) -> int:
        return 1 if self.mesh is None else self.mesh.ranks

    @property
    def sequence_ranks(self) -> int:
        """Those that share tokens."""
        return 1 if self.mesh is None else self.mesh.sequence.ranks

    @property
    def words(self) -> dict[str, Any]:
        """What a sentence may say of any case."""
        return {
            "owner": original_class(self.owner).__name__,
            "cls": original_class(self.module).__name__,
            "name": f"pipe.{self.component}" if self.component else "unet" if _is_unet(self) else "transformer",
            "adapter": self.adapter,
            "sequence_ranks": self.sequence_ranks,
            "supported": supported(),
            "cached": cached(),
        }


@dataclass(frozen=True)
class Refusal:
    """One row.

    Args:
        what: what is refused, before what.
        test: finds it: words for the sentence beside those of the case, or whether it is there; None: it is not.
        sentence: what came, why it cannot be, and the way out.
        error: raised where no other rank has to know.
    """

    what: str
    when: tuple[When, ...]
    test: Callable[[Case], Mapping[str, Any] | bool | None]
    sentence: str
    error: type[Exception] = RuntimeError


def cases_of(pipe: Any, adapter: Adapter | None = None, mesh: GuidedMesh | None = None) -> list[Case]:
    """One for each transformer, or UNet, of ``pipe``; where it has none, one without."""
    modules = transformers_of(pipe) or unets_of(pipe)
    found = [Case(pipe, module, name, adapter, mesh) for name, module in modules.items()]
    return found or [Case(pipe, None)]


def refuse(when: When, *cases: Case) -> None:
    """Raise if one of ``cases`` is refused."""
    for refusal, message in _refused(when, cases):
        raise refusal.error(message)


def reason_against(when: When, *cases: Case) -> str | None:
    """Why one of ``cases`` is refused; None if none is. For calls, of which all ranks have to know."""
    return next((message for _, message in _refused(when, cases)), None)


def _refused(when: When, cases: tuple[Case, ...]) -> Iterator[tuple[Refusal, str]]:
    for case in cases:
        for refusal in REFUSALS:
            found = when in refusal.when and refusal.test(case)
            if found is not None and found is not False:
                yield refusal, refusal.sentence.format(**case.words, **({} if found is True else found))


# -- tests


def applied_mesh(module: Any) -> SequenceMesh | None:
    """The ranks that share tokens, or rows, of what ``module`` computes; None if none do."""
    return plan_mesh(module) or unet_mesh(module)


def _is_unet(case: Case) -> bool:
    return case.module is not None and unet_adapter(case.module) is not None


def _unfit_unet(case: Case) -> Mapping[str, Any] | None:
    return {"reason": why_refused_unet(case.module)} if case.component == "unet" and not _is_unet(case) else None


def _compiled_unet(case: Case) -> bool:
    if not _is_unet(case):
        return False
    replaced = bool(case.component) and component_of(case.owner, case.component) is not case.module
    return replaced or has_compiled_parts(case.module)


def _has_no_plan(case: Case) -> bool:
    return plan_for(case.module, adapter=case.adapter) is None and not _is_unet(case)


def _unfit_class(case: Case) -> Mapping[str, Any] | None:
    reason = why_refused(case.module)
    return {"reason": reason} if reason is not None and _has_no_plan(case) else None


def _unknown_blocks(case: Case) -> bool:
    known = adapter_for(case.module, case.adapter)
    return known is None or known.blocks is None


def _several_devices(case: Case) -> Mapping[str, Any] | None:
    return _devices_of(case.module, "the transformer")


def _pipe_on_several_devices(case: Case) -> Mapping[str, Any] | None:
    return _devices_of(case.owner, "the pipeline") if case.component else None


def _devices_of(spread: Any, what: str) -> Mapping[str, Any] | None:
    devices = {str(device) for device in (getattr(spread, "hf_device_map", None) or {}).values()}
    return {"spread": what, "devices": sorted(devices)} if len(devices) > 1 else None


def _placed_by_accelerate(case: Case) -> Mapping[str, Any] | None:
    for name, part in getattr(case.owner, "components", {}).items():
        if hasattr(part, "_hf_hook"):
            return {"placed": f"pipe.{name}"}
    return None


def _config_of_diffusers(module: Any) -> Any:
    return getattr(module, "_parallel_config", None)


def _tensors_of_diffusers(module: Any) -> Any:
    """The mesh over which diffusers sharded ``module`` when it loaded it with a ``TensorParallelConfig``; None if it did not."""
    config = getattr(_config_of_diffusers(module), "tensor_parallel_config", None)
    return None if config is None else config._mesh


def _tensor_ranks_differ(case: Case) -> Mapping[str, Any] | None:
    """Ranks that hold other heads than the mesh says would exchange tokens as if they were those of one sequence."""
    if case.module is None or case.mesh is None:
        return None
    sharded = tensor_mesh(case.module) or _tensors_of_diffusers(case.module)
    shared = [] if sharded is None else sharded.mesh.flatten().tolist()
    dim = case.mesh.tensor
    ranks = [] if dim.group is None else get_process_group_ranks(dim.group)
    return None if shared == ranks else {"shared": shared or "no", "ranks": ranks or "none"}


def _shared_beyond_sequence(case: Case) -> Mapping[str, Any] | None:
    """Weights that are gathered from ranks which may run fewer blocks than this one, and would then never answer."""
    if case.module is None or not is_sharded(case.module):
        return None
    mesh, applied = shard_mesh(case.module), plan_mesh(case.module)
    shared, sequence = 1 if mesh is None else mesh.size(), 1 if applied is None else applied.ranks
    if shared <= sequence:
        return None
    if case.options is not None:
        return {"shared": shared, "sequence": sequence, "reason": "a cache of their own steps"}
    guides = case.mesh is not None and case.mesh.batch.size > 1
    return {"shared": shared, "sequence": sequence, "reason": "branches of guidance of their own"} if guides else None


def _stages(case: Case) -> int:
    return 1 if case.mesh is None or case.module is None else case.mesh.pipe.size


def _no_stages(case: Case) -> Mapping[str, Any] | None:
    if _stages(case) == 1:
        return None
    reason = "it is a UNet, whose blocks give each other residuals" if _is_unet(case) else None
    reason = reason or why_no_stages(case.module, case.adapter)
    return None if reason is None else {"reason": reason}


def _placed_stages(case: Case) -> Mapping[str, Any] | None:
    """Blocks that are freed on a rank cannot be moved, or be gathered from others."""
    if _stages(case) == 1:
        return None
    if any(hasattr(part, "_hf_hook") for part in case.module.modules()):
        return {"placed": "is moved by a hook of accelerate", "undo": "pipe.remove_all_hooks()"}
    if is_sharded(case.module) or tensor_mesh(case.module) is not None:
        return {"placed": "has its weights sharded", "undo": "unshard_weights(pipe)"}
    return None


def _compiled_stages(case: Case) -> bool:
    if case.module is None or stages_of(case.module) is None:
        return False
    replaced = bool(case.component) and component_of(case.owner, case.component) is not case.module
    return replaced or case.module._compiled_call_impl is not None


def _uncached_stages(case: Case) -> Mapping[str, Any] | None:
    """What a cache needs that only some of the stages have."""
    if case.module is not None and fusion_of(case.module) is not None:
        return {
            "reason": "under PipeFusion a step computes patches, with keys of the step before, which may not be skipped"
        }
    stages = None if case.module is None else stages_of(case.module)
    known = None if stages is None else adapter_for(case.module, case.adapter)
    if stages is None or known is None or known.blocks is None or case.options is None:
        return None
    if len(known.blocks.stages) > 1:
        return {"reason": "text joins the image between its blocks, and what is stored there is on another stage"}
    if case.options.decides_before_blocks:
        return {"reason": "its rule asks the weights of the first block, which the first stage alone has"}
    last = len(stages.ranges[-1])
    if case.options.last_blocks >= last:
        return {"reason": f"last_blocks={case.options.last_blocks} always run, and the last stage has {last}"}
    return None


def _cached_in_one_graph(case: Case) -> Mapping[str, Any] | None:
    """What ``torch.cond`` takes no part of: the hooks of FSDP2, or DTensors."""
    if case.module is None or case.options is None:
        return None
    replaced = bool(case.component) and component_of(case.owner, case.component) is not case.module
    if not (replaced or case.module._compiled_call_impl is not None):
        return None
    by_fsdp = is_sharded(case.module)
    by_tensor = tensor_mesh(case.module) is not None or _tensors_of_diffusers(case.module) is not None
    return {"method": "fsdp" if by_fsdp else "tensor"} if by_fsdp or by_tensor else None


def _changed_since_sharded(case: Case) -> Mapping[str, Any] | None:
    if case.module is None or not is_sharded(case.module):
        return None
    for name, parameter in case.module.named_parameters():
        if type(parameter) is not nn.Parameter and not isinstance(parameter, DTensor):
            return {"at": name, "kind": type(parameter).__name__}
    return None


def _perturbed_joint_attention(case: Case) -> bool:
    joint = original_class(case.module).__name__ == "SD3Transformer2DModel"
    return joint and case.ranks > 1 and hasattr(case.owner, "pag_applied_layers")


def _was_replaced(case: Case) -> bool:
    return bool(case.component) and uncompiled(component_of(case.owner, case.component)) is not case.module


def _no_scheduler(case: Case) -> Mapping[str, Any] | None:
    needs = () if case.options is None else case.options.needs_schedule
    return {"option": needs[0]} if needs and getattr(case.owner, "scheduler", None) is None else None


# These are scaled_dot_product_attention under a switch that says how it computes.
_SEEN = ("native", "_native_cudnn", "_native_efficient", "_native_flash", "_native_math")


def _unseen_attention(case: Case) -> Mapping[str, Any] | None:
    """One module alone may have another backend, so it does not do to see that some attention was intercepted."""
    for at, module in case.module.named_modules() if case.sequence_ranks > 1 else ():
        processor: Any = getattr(module, "processor", None)
        # A processor without this attribute calls scaled_dot_product_attention itself, whatever was set.
        if hasattr(processor, "_attention_backend"):
            backend = _name_of(processor._attention_backend)
            if backend not in _SEEN:
                return {"backend": backend, "at": at}
    return None


def _name_of(backend: Any) -> str:
    if backend is None:
        # Set for all models: by the last set_attention_backend, attention_backend(...), or the environment.
        from diffusers.models.attention_dispatch import _AttentionBackendRegistry

        backend, _ = _AttentionBackendRegistry.get_active_backend()
    return str(getattr(backend, "value", backend))


def _cache_of_diffusers(case: Case) -> Mapping[str, Any] | None:
    found = foreign_cache(case.module) if case.ranks > 1 else None
    return None if found is None else {"cache": found}


# Of diffusers' hooks that are no caches. These move and cast weights, and know nothing of tokens.
_OF_WEIGHTS = (
    "GroupOffloadingHook",
    "LazyPrefetchGroupOffloadingHook",
    "LayerExecutionTrackerHook",
    "LayerwiseCastingHook",
    "PeftInputAutocastDisableHook",
)
# Each token skips for itself, so a rank's tokens skip as all would; but what is dropped is drawn by each rank for its own.
_SKIPS = ("TransformerBlockSkipHook", "AttentionProcessorSkipHook", "FeedForwardSkipHook")
_DROPS = "it drops activations at random, and each rank would draw for its own tokens. Skip layers wholly (dropout=1.0)"
_BLURS = (
    "it blurs the queries of a whole image, of which a rank has a part. Give ranks to guidance alone "
    "(max_ring_dim_size=1, max_ulysses_dim_size=1), or guide otherwise"
)
_OWN_PARALLELISM = "it shards tokens, too. Load the transformer without parallel_config"
_UNKNOWN = "of which nobody knows whether it needs the tokens of other ranks. Remove it, or unparallelize_pipe(pipe)"


def hooks_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Each hook in diffusers' registries, with the name of the module that it is on."""
    for at, part in module.named_modules():
        registry: Any = part.__dict__.get("_diffusers_hook")
        for hook in () if registry is None else registry.hooks.values():
            yield at, hook


def _unfit_hook(case: Case) -> Mapping[str, Any] | None:
    """Hooks of the user's own are not judged."""
    for at, hook in hooks_of(case.module) if case.ranks > 1 else ():
        reason = _against(hook, case.sequence_ranks)
        if reason is not None:
            return {"hook": type(hook).__name__, "at": at, "reason": reason}
    return None


def _against(hook: Any, sequence_ranks: int) -> str | None:
    cls = type(hook)
    if not cls.__module__.startswith("diffusers.") or cls.__name__ in _OF_WEIGHTS:
        return None
    if cls.__name__ in _SKIPS:
        return _DROPS if _drops(hook) else None
    if cls.__name__ == "SmoothedEnergyGuidanceHook":
        return _BLURS if sequence_ranks > 1 else None
    return _OWN_PARALLELISM if cls.__name__.startswith("ContextParallel") else _UNKNOWN


def _drops(hook_or_config: Any) -> bool:
    return bool(0 < hook_or_config.dropout < 1)


def _unfit_guider(case: Case) -> Mapping[str, Any] | None:
    """One that would put an unfit hook on its transformer in the middle of a call."""
    guider = getattr(case.owner, "guider", None) if case.component and case.ranks > 1 else None
    for configs in () if guider is None else vars(guider).values():
        for config in configs if isinstance(configs, list) else [configs]:
            blurs = type(config).__name__ == "SmoothedEnergyGuidanceConfig" and case.sequence_ranks > 1
            drops = type(config).__name__ == "LayerSkipConfig" and _drops(config)
            if blurs or drops:
                return {"guider": type(guider).__name__, "reason": _BLURS if blurs else _DROPS}
    return None


# What stands first is said first.
REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "a pipeline without a transformer, in parallel",
        (When.PARALLELIZE,),
        lambda case: case.module is None,
        "{owner} is not supported: it has no transformer. Supported are {supported}.",
        TypeError,
    ),
    Refusal(
        "a UNet that is not known",
        (When.PARALLELIZE,),
        _unfit_unet,
        "{owner} is not supported: whether rows of an image can be sharded in {cls} is not known: {reason}. Give each rank prompts "
        "of its own instead. Supported are {supported}.",
        TypeError,
    ),
    Refusal(
        "a pipeline without a transformer, with a cache",
        (When.CACHE,),
        lambda case: case.module is None,
        "{owner} cannot be cached: it has no transformer.",
        TypeError,
    ),
    Refusal(
        "a cache on a UNet",
        (When.CACHE,),
        _is_unet,
        "{owner} cannot be cached: First Block Cache skips the blocks behind the first, of which each gives one tensor of the size "
        "that it is given. Those of {cls} give each other residuals of many sizes.",
        TypeError,
    ),
    Refusal(
        "what is no adapter",
        (When.PARALLELIZE, When.CACHE),
        lambda case: case.adapter is not None and not isinstance(case.adapter, Adapter),
        "adapter is {adapter!r}; expected an Adapter, or None: adapter=Adapter(transformer={cls!r}, pipelines='…', "
        "blocks=CachedBlocks(...), plan=Plan(...)).",
        TypeError,
    ),
    Refusal(
        "a transformer of which it is known why it has no plan",
        (When.PARALLELIZE,),
        _unfit_class,
        "{owner} is not supported: {cls} has no plan, for {reason}. Give each rank prompts of its own instead. Supported are "
        "{supported}.",
        TypeError,
    ),
    Refusal(
        "a transformer without a plan",
        (When.PARALLELIZE,),
        _has_no_plan,
        "{owner} is not supported: there is no plan for {cls}. What it shards and gathers can be said in some ten lines, a "
        "plan: parallelize_pipe(pipe, mesh=mesh, adapter=Adapter(transformer={cls!r}, pipelines=..., plan=Plan(...))). "
        "propose_plan finds most of them; docs/new_model.md shows how. Supported are {supported}.",
        TypeError,
    ),
    Refusal(
        "a cache on blocks that are not known",
        (When.CACHE,),
        _unknown_blocks,
        "{owner} cannot be cached: the blocks of {cls} are not known. Known are {cached}. Describe them: "
        "apply_cache_on_pipe(pipe, adapter=Adapter(transformer='…', pipelines='…', blocks=CachedBlocks((Stage(('blocks',)),)))).",
        TypeError,
    ),
    Refusal(
        "a cache that follows a schedule, without a scheduler",
        (When.CACHE, When.CACHED_CALL),
        _no_scheduler,
        "{option} needs a scheduler, and this {owner} has none. Leave it out.",
        ValueError,
    ),
    *(
        Refusal(
            f"a {what} on several devices",
            (When.PARALLELIZE, When.SHARD),
            test,
            "{spread} is spread over the devices {devices} by its device_map, for one process; here each device has a process. Load "
            "it without device_map, and shard its weights over the devices of all ranks: parallelize_pipe(pipe, mesh=mesh, "
            "weights='fsdp').",
            ValueError,
        )
        for what, test in (("transformer", _several_devices), ("pipeline", _pipe_on_several_devices))
    ),
    Refusal(
        "weights that accelerate moves",
        (When.SHARD,),
        _placed_by_accelerate,
        "{placed} is moved by a hook of accelerate (enable_model_cpu_offload, enable_sequential_cpu_offload, device_map), and FSDP2 "
        "places what it shards. Call pipe.remove_all_hooks() first; to keep weights in host memory, shard_weights(pipe, mesh, "
        "offload_policy=torch.distributed.fsdp.CPUOffloadPolicy()).",
        ValueError,
    ),
    Refusal(
        "heads that other ranks share than the mesh says",
        (When.PARALLEL_CALL,),
        _tensor_ranks_differ,
        "{name} has its heads sharded over {shared} ranks, and the dim 'tensor' of the mesh has here {ranks}. Call parallelize_pipe(pipe, "
        "mesh=mesh, weights='tensor') with a mesh of init_context_parallel_mesh(max_tensor_dim_size=...); one that diffusers' "
        "TensorParallelConfig(mesh=mesh['tensor']) sharded takes the same mesh, without weights=.",
    ),
    Refusal(
        "stages of a model whose blocks hand on more than tokens",
        (When.PARALLELIZE,),
        _no_stages,
        "{cls} cannot run in stages: {reason}. Use a mesh without 'pipe' (max_pipe_dim_size); weights='fsdp' shards any model.",
        TypeError,
    ),
    Refusal(
        "stages of weights that something else places",
        (When.PARALLELIZE,),
        _placed_stages,
        "{name} {placed}, and a stage frees the blocks of others. Call {undo} before parallelize_pipe(pipe, mesh=mesh), or use a mesh "
        "without 'pipe'.",
        ValueError,
    ),
    Refusal(
        "stages in one graph",
        (When.PARALLEL_CALL,),
        _compiled_stages,
        "{name} was compiled as a whole, and a graph cannot wait for another stage. Use it uncompiled, and compile its blocks: "
        "transformer.compile_repeated_blocks(fullgraph=True).",
    ),
    Refusal(
        "a cache over stages that cannot decide or store",
        (When.CACHED_CALL,),
        _uncached_stages,
        "{name} runs in stages, and cannot be cached so: {reason}. Use a mesh without 'pipe' (and no pipefusion=), other options, or "
        "remove_cache_from_pipe(pipe).",
    ),
    Refusal(
        "weights that ranks share which need not run the same blocks",
        (When.PARALLEL_CALL, When.CACHED_CALL),
        _shared_beyond_sequence,
        "{name} has its weights sharded over {shared} ranks, and {sequence} share its sequence: the others have {reason}, would run other "
        "blocks, and wait for each other. Shard weights over the sequence ranks: shard_weights(pipe, mesh), mesh being that of "
        "parallelize_pipe.",
    ),
    Refusal(
        "a cache in one graph over weights that ranks share",
        (When.CACHED_CALL,),
        _cached_in_one_graph,
        "{name} is compiled as a whole, with a cache, and its weights are shared (weights={method!r}): the branches of torch.cond take neither "
        "hooks of FSDP2 nor DTensors. Compile its blocks instead: {name}.compile_repeated_blocks(fullgraph=True); or leave out one of "
        "the three.",
    ),
    Refusal(
        "weights that were quantized after FSDP2 sharded them",
        (When.PARALLEL_CALL, When.CACHED_CALL),
        _changed_since_sharded,
        "{at} of {name} is a {kind} since its weights were sharded by FSDP2, which would put back what it was. Load the pipeline anew, and "
        "quantize before (int8_weight_only_quantized_training()), or behind weights='tensor'.",
    ),
    Refusal(
        "diffusers' own parallelism",
        (When.PARALLELIZE,),
        lambda case: _config_of_diffusers(case.module) is not None and _tensors_of_diffusers(case.module) is None,
        "the transformer already runs under diffusers' own enable_parallelism(config=...). Use one of the two: load it without "
        "parallel_config, and call parallelize_pipe(pipe, mesh=...) alone.",
        ValueError,
    ),
    Refusal(
        "perturbed attention over joint tokens",
        (When.PARALLELIZE,),
        _perturbed_joint_attention,
        "{owner} is not supported: its perturbed attention hides image tokens from each other by a mask that covers those of "
        "one rank only. Use the pipeline without perturbed attention. Supported are {supported}.",
        TypeError,
    ),
    Refusal(
        "another transformer than the one that was parallelized",
        (When.PARALLEL_CALL,),
        _was_replaced,
        "{name} is another one than when the pipe was parallelized, and would run on each rank alone. Call "
        "parallelize_pipe(pipe, mesh=...) again.",
    ),
    Refusal(
        "another transformer than the one that was cached",
        (When.CACHED_CALL,),
        _was_replaced,
        "{name} is another one than when the cache was applied. Call apply_cache_on_pipe(pipe, ...) again.",
    ),
    Refusal(
        "a transformer whose plan was replaced or removed",
        (When.PARALLEL_CALL,),
        lambda case: bool(case.component) and applied_mesh(case.module) != case.applied,
        "{name} was given another mesh, or unparallelized, after the pipe was parallelized (through a pipe that shares it?). "
        "Call parallelize_pipe(pipe, mesh=...) again, or unparallelize_pipe(pipe).",
    ),
    Refusal(
        "a compiled UNet",
        (When.PARALLEL_CALL,),
        _compiled_unet,
        "{name} was compiled, and a compiled graph does not see how many rows each rank holds. Use it uncompiled, or "
        "unparallelize_pipe(pipe).",
    ),
    Refusal(
        "attention that is no scaled_dot_product_attention",
        (When.PARALLEL_CALL,),
        _unseen_attention,
        "{name} attends with diffusers' backend {backend!r} in {at!r}, which does not go through scaled_dot_product_attention: "
        "on {sequence_ranks} ranks each would attend to its own tokens only. Switch to a native one: "
        "{name}.set_attention_backend('native').",
    ),
    Refusal(
        "a cache of diffusers",
        (When.PARALLEL_CALL,),
        _cache_of_diffusers,
        "{name} has a cache of diffusers ({cache}), which decides on each rank alone: ranks would skip different steps, and "
        "wait for each other. Call {name}.disable_cache(), and apply_cache_on_pipe(pipe, ...), with which they decide together.",
    ),
    Refusal(
        "another hook of diffusers that needs more than a rank's tokens, or may",
        (When.PARALLEL_CALL,),
        _unfit_hook,
        "{name} has diffusers' {hook} at {at!r}: {reason}.",
    ),
    Refusal(
        "a guider that puts on such a hook",
        (When.PARALLEL_CALL,),
        _unfit_guider,
        "pipe.guider is a {guider}: {reason}.",
    ),
)
