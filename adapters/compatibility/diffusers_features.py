"""Checks of features of diffusers: processors that compute scores, hooks, guiders, caches, parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from para_core.adapters.attention_names import processors_of
from para_core.adapters.registry import supported
from para_core.adapters.weights.sharded_component import mesh_of_diffusers
from para_core.cache.attachment import foreign_cache
from para_core.instance_patching import has_compiled_parts, original_class, submodules_of

# Functions by which a processor computes attention scores without SDPA, as in diffusers before PyTorch 2.
_OWN_SCORES = {"get_attention_scores", "memory_efficient_attention", "baddbmm", "bmm"}
_SDPA = {"scaled_dot_product_attention", "dispatch_attention_fn"}


def refuse_scores_of_processor(module: nn.Module, name: str, sequence_ranks: int) -> None:
    """Refuse an attention processor that computes scores itself."""
    # Check all processors, because one that computes scores may stand among others that call SDPA.
    refused = {cls for cls in set(map(type, processors_of(module))) if _computes_scores(cls)}
    if not refused:
        return
    processors = ((path, type(getattr(part, "processor", None))) for path, part in module.named_modules())
    path, cls = next((path, cls) for path, cls in processors if cls in refused)
    raise RuntimeError(
        f"{name} attends with the processor {cls.__name__} in {path!r}, which does not call "
        f"scaled_dot_product_attention: each of {sequence_ranks} ranks would attend to its own tokens only. "
        f"Set one that does: {name}.set_attn_processor(AttnProcessor2_0()), from "
        "diffusers.models.attention_processor."
    )


def _computes_scores(processor: type) -> bool:
    """Return whether a class of processors computes attention scores itself, by the names that its code uses."""
    call = next((vars(base)["__call__"] for base in processor.__mro__ if "__call__" in vars(base)), None)
    names = set(getattr(getattr(call, "__code__", None), "co_names", ()))
    return bool(names & _OWN_SCORES) and not names & _SDPA


def refuse_cache_of_diffusers(module: nn.Module, name: str) -> None:
    """Refuse a cache of diffusers on the transformer."""
    cache = foreign_cache(module)
    if cache is not None:
        raise RuntimeError(
            f"{name} has a cache of diffusers ({cache}), which decides per rank: ranks would skip different steps, and "
            f"wait for each other. Call {name}.disable_cache(), and use apply_cache_on_pipe(pipe, ...), which decides "
            "for all ranks."
        )


def refuse_compiled_weights_of_diffusers(module: nn.Module, name: str, called: Any) -> None:
    """Refuse a compiled model whose weights come from a GGUF file or use layerwise casting."""
    if called is module and not has_compiled_parts(module):
        return
    is_gguf = type(vars(module).get("hf_quantizer")).__name__ == "GGUFQuantizer"
    if is_gguf or any(type(hook).__name__ == "LayerwiseCastingHook" for _, hook in hooks_of(module)):
        reason = "comes from a GGUF file" if is_gguf else "casts its weights while layers compute"
        raise RuntimeError(
            f"{name} {reason} and is compiled. Dynamo cannot trace diffusers' layers of that kind while attention is "
            f"intercepted. Use it uncompiled, or with weights in 16 bits{f': {name}.dequantize()' if is_gguf else ''}."
        )


# Hooks of diffusers that only move or cast weights. Their results on a part of the tokens are right, so several ranks
# may use them.
_WEIGHT_HOOKS = (
    "GroupOffloadingHook",
    "LazyPrefetchGroupOffloadingHook",
    "LayerExecutionTrackerHook",
    "LayerwiseCastingHook",
    "PeftInputAutocastDisableHook",
)
# Hooks that skip layers. Their results on a part of the tokens are right, unless they apply random dropout.
_SKIP_HOOKS = ("TransformerBlockSkipHook", "AttentionProcessorSkipHook", "FeedForwardSkipHook")
_DROPS = "it drops activations at random, and each rank would draw its own values. Skip whole layers (dropout=1.0)"
_BLURS = (
    "it blurs the queries of the full image, and a rank has a part of them. Use ranks for guidance only "
    "(max_ring_dim_size=1, max_ulysses_dim_size=1), or another guider"
)
_OWN_PARALLELISM = "it also shards tokens. Load the transformer without parallel_config"
_UNKNOWN = "it may need tokens of other ranks. Remove it, or unparallelize_pipe(pipe)"


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
        reason: str | None = _OWN_PARALLELISM if kind.startswith("ContextParallel") else _UNKNOWN
        if kind in _SKIP_HOOKS:
            reason = _DROPS if _drops(hook) else None
        elif kind == "SmoothedEnergyGuidanceHook":
            reason = _BLURS if sequence_ranks > 1 else None
        if reason is not None:
            raise RuntimeError(f"{name} has diffusers' {kind} at {path!r}: {reason}.")


def _drops(hook_or_config: Any) -> bool:
    return bool(0 < hook_or_config.dropout < 1)


def refuse_guider(pipe: Any, sequence_ranks: int) -> None:
    """Refuse a guider that skips layers with dropout or blurs queries."""
    guider = getattr(pipe, "guider", None)
    for configs in () if guider is None else vars(guider).values():
        for config in configs if isinstance(configs, list) else [configs]:
            blurs = type(config).__name__ == "SmoothedEnergyGuidanceConfig" and sequence_ranks > 1
            if blurs or (type(config).__name__ == "LayerSkipConfig" and _drops(config)):
                reason = _BLURS if blurs else _DROPS
                raise RuntimeError(f"pipe.guider is a {type(guider).__name__}: {reason}.")


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
            "number, which is that of one rank. Use the pipeline without perturbed attention. "
            f"Supported are {supported()}."
        )
