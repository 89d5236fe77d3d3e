"""Tests of attention that the mode cannot intercept, and of hooks, guiders and caches of diffusers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from para_core.adapters.compatibility.context import CompatibilityContext, is_unet
from para_core.adapters.registry import plan_for
from para_core.cache.diffusers_caches import foreign_cache
from para_core.plans.module_matching import matching_modules
from para_core.plans.plan import AttentionByHeads

# Backends of diffusers that call scaled_dot_product_attention, with or without a choice of its backend.
_SEEN = ("native", "_native_cudnn", "_native_efficient", "_native_flash", "_native_math")


def unseen_attention(case: CompatibilityContext) -> Mapping[str, Any] | None:
    """Find a module whose attention backend does not call SDPA.

    Each module may have another one, so all are checked.
    """
    by_heads = _attention_by_heads(case) if case.sequence_ranks > 1 else ()
    for at, module in case.module.named_modules() if case.sequence_ranks > 1 else ():
        if at in by_heads:
            continue
        processor: Any = getattr(module, "processor", None)
        # A processor without this attribute always calls scaled_dot_product_attention itself.
        if hasattr(processor, "_attention_backend"):
            backend = _name_of(processor._attention_backend)
            if backend not in _SEEN:
                return {"backend": backend, "at": at}
    return None


def _attention_by_heads(case: CompatibilityContext) -> set[str]:
    """Return the paths of modules that have all tokens and some of the heads, for which any backend is correct."""
    plan = plan_for(case.module, adapter=case.adapter)
    patterns = () if plan is None else plan.attention.items()
    return {
        at
        for pattern, attention in patterns
        if isinstance(attention, AttentionByHeads)
        for at in matching_modules(case.module, pattern)
    }


# Functions with which a processor computes scores itself, as processors of diffusers did before PyTorch 2.
_OWN_SCORES = {"get_attention_scores", "memory_efficient_attention", "baddbmm", "bmm"}
_SDPA = {"scaled_dot_product_attention", "dispatch_attention_fn"}


def attention_by_scores(case: CompatibilityContext) -> Mapping[str, Any] | None:
    """Find an attention processor that never calls SDPA.

    Other processors of the model may call it, so all are checked.
    """
    # In a UNet any processor is correct, because matrix products of sharded rows are intercepted as well.
    for at, module in case.module.named_modules() if case.sequence_ranks > 1 and not is_unet(case) else ():
        cls: Any = type(getattr(module, "processor", None))
        call = next((vars(base)["__call__"] for base in cls.__mro__ if "__call__" in vars(base)), None)
        code = getattr(call, "__code__", None)
        names = set() if code is None else set(code.co_names)
        if names & _OWN_SCORES and not names & _SDPA:
            return {"processor": cls.__name__, "at": at}
    return None


def _name_of(backend: Any) -> str:
    if backend is None:
        # The default of all models: from the last set_attention_backend, attention_backend(...), or the environment.
        from diffusers.models.attention_dispatch import _AttentionBackendRegistry

        backend, _ = _AttentionBackendRegistry.get_active_backend()
    return str(getattr(backend, "value", backend))


def cache_of_diffusers(case: CompatibilityContext) -> Mapping[str, Any] | None:
    cache = foreign_cache(case.module) if case.ranks > 1 else None
    return None if cache is None else {"cache": cache}


# Hooks of diffusers that move and cast weights, whatever the tokens are.
_WEIGHT_HOOKS = (
    "GroupOffloadingHook",
    "LazyPrefetchGroupOffloadingHook",
    "LayerExecutionTrackerHook",
    "LayerwiseCastingHook",
    "PeftInputAutocastDisableHook",
)
# Hooks that skip layers, equally for all tokens unless they use dropout.
_SKIP_HOOKS = ("TransformerBlockSkipHook", "AttentionProcessorSkipHook", "FeedForwardSkipHook")
_DROPS = "it drops activations at random, and each rank would draw its own values. Skip whole layers (dropout=1.0)"
_BLURS = (
    "it blurs the queries of the full image, and a rank has a part of them. Use ranks for guidance only "
    "(max_ring_dim_size=1, max_ulysses_dim_size=1), or another guider"
)
_OWN_PARALLELISM = "it also shards tokens. Load the transformer without parallel_config"
_UNKNOWN = "it may need tokens of other ranks. Remove it, or unparallelize_pipe(pipe)"


def hooks_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield each hook in diffusers' registries with the path of its module."""
    for at, part in module.named_modules():
        registry: Any = part.__dict__.get("_diffusers_hook")
        for hook in () if registry is None else registry.hooks.values():
            yield at, hook


def unfit_hook(case: CompatibilityContext) -> Mapping[str, Any] | None:
    """Find a hook of diffusers that is not correct on several ranks. Hooks of the user's own are allowed."""
    for at, hook in hooks_of(case.module) if case.ranks > 1 else ():
        reason = _reason_against(hook, case.sequence_ranks)
        if reason is not None:
            return {"hook": type(hook).__name__, "at": at, "reason": reason}
    return None


def _reason_against(hook: Any, sequence_ranks: int) -> str | None:
    cls = type(hook)
    if not cls.__module__.startswith("diffusers.") or cls.__name__ in _WEIGHT_HOOKS:
        return None
    if cls.__name__ in _SKIP_HOOKS:
        return _DROPS if _drops(hook) else None
    if cls.__name__ == "SmoothedEnergyGuidanceHook":
        return _BLURS if sequence_ranks > 1 else None
    return _OWN_PARALLELISM if cls.__name__.startswith("ContextParallel") else _UNKNOWN


def _drops(hook_or_config: Any) -> bool:
    return bool(0 < hook_or_config.dropout < 1)


def unfit_guider(case: CompatibilityContext) -> Mapping[str, Any] | None:
    """Find a guider that would add an incorrect hook to its transformer during a call."""
    guider = getattr(case.owner, "guider", None) if case.component and case.ranks > 1 else None
    for configs in () if guider is None else vars(guider).values():
        for config in configs if isinstance(configs, list) else [configs]:
            blurs = type(config).__name__ == "SmoothedEnergyGuidanceConfig" and case.sequence_ranks > 1
            drops = type(config).__name__ == "LayerSkipConfig" and _drops(config)
            if blurs or drops:
                return {"guider": type(guider).__name__, "reason": _BLURS if blurs else _DROPS}
    return None
