"""The checks of a transformer or UNet, by phase: before it is parallelized, cached or sharded, and before each call.

A check is a function that raises if the model has a feature or an option that para_core cannot combine with what the
user asks for. It is defined next to that feature. The first line of its docstring, "Refuse …", names the combination;
docs/refusals.md is made from these lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from para_core.adapters.adapter import Adapter
from para_core.adapters.agree.arguments import require_equal
from para_core.adapters.inspect.attention_names import (
    processor_backends,
    refuse_attention_named_twice,
    refuse_mixed_attention,
    refuse_unseen_attention,
)
from para_core.adapters.inspect.components import mesh_of_diffusers
from para_core.adapters.inspect.scheduler_tracker import refuse_missing_scheduler
from para_core.adapters.refusal import refusal
from para_core.adapters.registry import (
    component_of,
    decoders_of,
    refuse_cache_on_unet,
    refuse_cache_without_transformer,
    refuse_class_without_plan,
    refuse_fsdp1,
    refuse_missing_transformer,
    refuse_other_mesh,
    refuse_other_type_of_adapter,
    refuse_replaced_cached_model,
    refuse_replaced_model,
    refuse_uncached_blocks,
    refuse_unknown_blocks,
    refuse_wrapped_model,
    require_plan,
    transformers_of,
    unet_adapter,
    unets_of,
)
from para_core.adapters.vae.unet import refuse_compiled_unet, refuse_tensor_ranks_of_unet, require_unet_adapter
from para_core.adapters.weights.features import features
from para_core.adapters.weights.shard import check_one_device, check_shard
from para_core.cache.apply import cache_options
from para_core.cache.attachment import foreign_cache
from para_core.cache.options import CacheOptions
from para_core.distributed.agree import Record, differing_fields
from para_core.distributed.mesh import GuidedMesh, SequenceMesh
from para_core.instance_patching import has_compiled_parts, original_class, submodules_of
from para_core.modes.interceptor import refuse_replaced_attention


@dataclass(frozen=True)
class CheckedModel:
    """One transformer or UNet to check, and what was applied to it.

    Args:
        owner: The pipeline of ``module``, or ``module`` itself.
        module: The transformer or UNet; None if the pipeline has none.
        component: Path of ``module`` in the pipeline; empty without a pipeline.
        adapter: Adapter that the user passed; None without one.
        applied: Ranks over which the tokens or rows of ``module`` were sharded when it was parallelized; None before
            that, or if they are not sharded.
    """

    owner: Any
    module: Any
    component: str = ""
    adapter: Adapter | None = None
    applied: SequenceMesh | None = None

    @property
    def is_unet(self) -> bool:
        return unet_adapter(self.module) is not None

    @property
    def name(self) -> str:
        """Name of the model in messages: its path in the pipeline, or ``unet`` or ``transformer``."""
        return f"pipe.{self.component}" if self.component else "unet" if self.is_unet else "transformer"

    @property
    def called(self) -> Any:
        """The object that the pipeline calls: ``module``, the compiled module around it, or its replacement."""
        return component_of(self.owner, self.component) if self.component else self.module


def models_to_check(pipe: Any, adapter: Adapter | None = None) -> list[CheckedModel]:
    """Return an entry for each transformer of ``pipe``, or else for its UNet and ControlNets.

    If it has neither, return one entry whose ``module`` is None, which the checks then refuse.
    """
    modules = transformers_of(pipe) or unets_of(pipe)
    return [CheckedModel(pipe, module, name, adapter) for name, module in modules.items()] or [CheckedModel(pipe, None)]


def models_to_parallelize(pipe: Any, adapter: Adapter | None = None) -> list[CheckedModel]:
    """Return the models of ``pipe`` to parallelize: :func:`models_to_check`, or none if the pipeline only decodes."""
    return [] if decoders_of(pipe) else models_to_check(pipe, adapter)


def check_parallelize(models: Sequence[CheckedModel], mesh: GuidedMesh | None = None) -> None:
    """Run the checks before ``models`` are parallelized. The first check that fails raises.

    ``mesh=None`` leaves out the checks that need the mesh.
    """
    for model in models:
        owner, module, adapter = model.owner, model.module, model.adapter
        refuse_missing_transformer(owner, module)
        refuse_other_type_of_adapter(adapter, module)
        refuse_fsdp1(module, model.name)
        refuse_wrapped_model(module, model.name, adapter)
        if model.component == "unet":
            require_unet_adapter(owner, module)
        if not model.is_unet:
            refuse_class_without_plan(owner, module, adapter)
            require_plan(owner, module, adapter)
        check_one_device(module, "the transformer")
        check_one_device(owner, "the pipeline")
        refuse_parallelism_of_diffusers(module)
        if mesh is None:
            continue
        if model.is_unet:
            refuse_tensor_ranks_of_unet(module, mesh)
        for feature in features().values():
            for check in feature.parallelize_checks:
                check(module, model.name, mesh, adapter)
        if mesh.ranks > 1:
            refuse_perturbed_joint_attention(owner, module)


def check_parallel_call(models: Sequence[CheckedModel], mesh: GuidedMesh) -> None:
    """Run the checks before a parallel call of ``models`` on ``mesh``. The first check that fails raises."""
    for model in models:
        module, name = model.module, model.name
        if model.component:
            refuse_replaced_model(model.called, module, name)
            refuse_other_mesh(module, name, model.applied)
        for feature in features().values():
            for check in feature.call_checks:
                check(module, name, model.called, mesh)
        if model.is_unet:
            refuse_compiled_unet(module, name, model.called)
            refuse_freeu(module, name)
        if mesh.sequence.ranks > 1:
            refuse_compiled_weights_of_diffusers(module, name, model.called)
            backends = processor_backends(module)
            refuse_unseen_attention(backends, name, mesh.sequence.ranks)
            refuse_mixed_attention(backends, name)
            refuse_attention_named_twice(backends, module, name)
            refuse_replaced_attention(mesh.sequence.ranks)
        if mesh.ranks > 1:
            refuse_cache_of_diffusers(module, name)
            refuse_hooks_of_diffusers(module, name, mesh.sequence.ranks)
            refuse_guider(model.owner, mesh.sequence.ranks)


def check_cache(model: CheckedModel, options: CacheOptions | None = None) -> None:
    """Run the checks before a cache with ``options`` is applied to ``model``. The first check that fails raises.

    ``options=None`` leaves out the checks that need them.
    """
    owner, module, adapter = model.owner, model.module, model.adapter
    if model.component:
        refuse_cache_of_transformer(model.called, module, model.name)
    refuse_cache_without_transformer(owner, module)
    refuse_cache_on_unet(owner, module)
    refuse_other_type_of_adapter(adapter, module)
    refuse_fsdp1(module, model.name)
    refuse_wrapped_model(module, model.name, adapter)
    refuse_uncached_blocks(owner, module, adapter)
    refuse_unknown_blocks(owner, module, adapter)
    if options is not None:
        refuse_missing_scheduler(owner, options)


def check_cached_call(model: CheckedModel, options: CacheOptions) -> None:
    """Run the checks before a cached call of the pipeline of ``model``. The first check that fails raises."""
    module, name = model.module, model.name
    refuse_replaced_cached_model(model.called, module, name)
    refuse_cache_of_transformer(model.called, module, name)
    refuse_missing_scheduler(model.owner, options)
    for feature in features().values():
        for check in feature.cached_call_checks:
            check(module, name, model.called, options)


# The field of a feature that has its checks of a phase. ``check_parallelize`` and others run them after their own.
CHECKS_OF_FEATURES: Mapping[Callable[..., None], str] = {
    check_parallelize: "parallelize_checks",
    check_parallel_call: "call_checks",
    check_cached_call: "cached_call_checks",
}
# The checks of each phase, by the name of the phase in docs/refusals.md.
PHASES: Mapping[str, Callable[..., None]] = {
    "`parallelize_pipe`": check_parallelize,
    "a parallel call": check_parallel_call,
    "`apply_cache_on_pipe`": check_cache,
    "a cached call": check_cached_call,
    "`shard_weights`": check_shard,
}


def require_same_call_of_model(module: Any, mesh: GuidedMesh, inputs: Mapping[str, Any], *, assume_equal: bool) -> None:
    """Raise on every rank if the call of ``module`` is refused on one rank, or if ``inputs`` differ between ranks.

    ``inputs`` are arguments and settings by name. ``assume_equal`` skips the comparison and its exchange; then a rank
    whose call is refused raises alone.
    """
    mesh.check_alive()
    models = [CheckedModel(module, module)]
    if assume_equal:
        check_parallel_call(models, mesh)
        return
    name = original_class(module).__name__

    def explain(records: list[Record]) -> str:
        return (
            f"the ranks of one mesh must call this {name} with equal arguments. "
            f"{'; '.join(differing_fields(records))}. If another pipeline shares this transformer (from_pipe), its "
            "random numbers and arguments must be equal as well: parallelize_pipe(the_other_pipe, mesh=mesh). In a "
            "loop of your own, draw random numbers from a generator with the same seed on all ranks."
        )

    require_equal(lambda: inputs, mesh, f"this {name}", partial(check_parallel_call, models, mesh), explain)


# -- The checks of features of diffusers: hooks, guiders, caches, parallelism.


def refuse_cache_of_diffusers(module: nn.Module, name: str) -> None:
    """Refuse a cache of diffusers on the transformer."""
    cache = foreign_cache(module)
    if cache is not None:
        raise RuntimeError(
            f"{name} has a cache of diffusers ({cache}), which decides per rank: ranks would skip different steps, and "
            f"wait for each other. Call {name}.disable_cache(), and use apply_cache_on_pipe(pipe, ...), which decides "
            "for all ranks."
        )


def refuse_cache_of_transformer(called: Any, module: nn.Module, name: str) -> None:
    """Refuse a cache of a pipeline whose transformer has a cache of its own."""
    if (cache_options(called) or cache_options(module)) is not None:
        raise ValueError(
            f"{name} has a cache of its own (apply_cache, apply_cache_on_transformer), and two caches would skip the "
            f"same blocks. Call para_core.remove_cache({name}), or leave out apply_cache_on_pipe(pipe, ...)."
        )


def refuse_compiled_weights_of_diffusers(module: nn.Module, name: str, called: Any) -> None:
    """Refuse a compiled model whose weights come from a GGUF file or use layerwise casting."""
    if called is module and not has_compiled_parts(module):
        return
    is_gguf = type(vars(module).get("hf_quantizer")).__name__ == "GGUFQuantizer"
    if is_gguf or any(type(hook).__name__ == "LayerwiseCastingHook" for _, hook in hooks_of(module)):
        reason = "comes from a GGUF file" if is_gguf else "casts its weights while layers compute"
        raise refusal(
            RuntimeError,
            f"{name} {reason} and is compiled. Dynamo cannot trace diffusers' layers of that kind while attention is "
            "intercepted.",
            f"Use it uncompiled, or with weights in 16 bits (of a GGUF file: {name}.dequantize()).",
        )


# Hooks of diffusers that only move or cast weights. Their results on a part of the tokens are right.
_WEIGHT_HOOKS = (
    "GroupOffloadingHook",
    "LazyPrefetchGroupOffloadingHook",
    "LayerExecutionTrackerHook",
    "LayerwiseCastingHook",
    "PeftInputAutocastDisableHook",
)
# Hooks that skip layers. Their results on a part of the tokens are right, unless they apply random dropout.
_SKIP_HOOKS = ("TransformerBlockSkipHook", "AttentionProcessorSkipHook", "FeedForwardSkipHook")


def hooks_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield every hook that diffusers registered on ``module`` or a submodule, with the path of that submodule."""
    # Few models have hooks, and named_modules() makes several Python calls per module.
    if not [part for part in submodules_of(module) if "_diffusers_hook" in part.__dict__]:
        return
    for path, submodule in module.named_modules():
        registry: Any = submodule.__dict__.get("_diffusers_hook")
        for hook in () if registry is None else registry.hooks.values():
            yield path, hook


def refuse_hooks_of_diffusers(module: nn.Module, name: str, sequence_ranks: int) -> None:
    """Refuse a hook of diffusers that may need tokens of other ranks."""
    for path, hook in hooks_of(module):
        kind = type(hook).__name__
        if not type(hook).__module__.startswith("diffusers.") or kind in _WEIGHT_HOOKS:
            continue
        if kind in _SKIP_HOOKS:
            if _drops(hook):
                raise refusal(
                    RuntimeError,
                    f"{name} has diffusers' {kind} at {path!r}: it drops activations at random, and each rank would "
                    "draw its own values.",
                    "Skip whole layers (dropout=1.0).",
                )
        elif kind == "SmoothedEnergyGuidanceHook":
            if sequence_ranks > 1:
                raise refusal(
                    RuntimeError,
                    f"{name} has diffusers' {kind} at {path!r}: it blurs the queries of the full image, and a rank has "
                    "a part of them.",
                    "Use ranks for guidance only (max_ring_dim_size=1, max_ulysses_dim_size=1), or another guider.",
                )
        elif kind.startswith("ContextParallel"):
            raise refusal(
                RuntimeError,
                f"{name} has diffusers' {kind} at {path!r}: it also shards tokens.",
                "Load the transformer without parallel_config.",
            )
        else:
            raise refusal(
                RuntimeError,
                f"{name} has diffusers' {kind} at {path!r}: it may need tokens of other ranks.",
                "Remove the hook, or unparallelize_pipe(pipe).",
            )


def _drops(hook_or_config: Any) -> bool:
    return bool(0 < hook_or_config.dropout < 1)


def refuse_guider(pipe: Any, sequence_ranks: int) -> None:
    """Refuse a guider that skips layers with dropout or blurs queries."""
    guider = getattr(pipe, "guider", None)
    for configs in () if guider is None else vars(guider).values():
        for config in configs if isinstance(configs, list) else [configs]:
            if type(config).__name__ == "SmoothedEnergyGuidanceConfig" and sequence_ranks > 1:
                raise refusal(
                    RuntimeError,
                    f"pipe.guider is a {type(guider).__name__}: it blurs the queries of the full image, and a rank has "
                    "a part of them.",
                    "Use ranks for guidance only (max_ring_dim_size=1, max_ulysses_dim_size=1), or another guider.",
                )
            if type(config).__name__ == "LayerSkipConfig" and _drops(config):
                raise refusal(
                    RuntimeError,
                    f"pipe.guider is a {type(guider).__name__}: it drops activations at random, and each rank would "
                    "draw its own values.",
                    "Skip whole layers (dropout=1.0).",
                )


def refuse_freeu(module: nn.Module, name: str) -> None:
    """Refuse FreeU, which filters the frequencies of whole images, in a UNet."""
    blocks = getattr(module, "up_blocks", ())
    if any(getattr(block, factor, None) for block in blocks for factor in ("s1", "s2", "b1", "b2")):
        raise refusal(
            RuntimeError,
            f"{name} has FreeU, which filters the frequencies of whole images, and each rank has some rows of them.",
            "Call pipe.disable_freeu(), or unparallelize_pipe(pipe).",
        )


def refuse_parallelism_of_diffusers(module: Any) -> None:
    """Refuse a model under diffusers' own parallelism."""
    if getattr(module, "_parallel_config", None) is not None and mesh_of_diffusers(module) is None:
        raise ValueError(
            "the transformer already runs under diffusers' own enable_parallelism(config=...). Use one of the two: "
            "load it without parallel_config, and call parallelize_pipe(pipe, mesh=...) alone."
        )


def refuse_perturbed_joint_attention(owner: Any, module: Any) -> None:
    """Refuse perturbed attention guidance over a joint sequence of text and image tokens."""
    if original_class(module).__name__ == "SD3Transformer2DModel" and hasattr(owner, "pag_applied_layers"):
        raise TypeError(
            f"{original_class(owner).__name__} is not supported: its perturbed attention masks image tokens by their "
            "number, which is that of one rank. Use the pipeline without perturbed attention."
        )
