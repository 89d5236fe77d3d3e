"""Refusals by what stands on a model: backends that no mode sees, and hooks, guiders and caches of diffusers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from para_core.adapters.compatibility.context import CompatibilityContext, is_unet
from para_core.adapters.registry import plan_for
from para_core.cache.diffusers_caches import foreign_cache
from para_core.plans.module_matching import matching_modules
from para_core.plans.plan import AttentionByHeads

# These are scaled_dot_product_attention under a switch that says how it computes.
_SEEN = ("native", "_native_cudnn", "_native_efficient", "_native_flash", "_native_math")


def unseen_attention(case: CompatibilityContext) -> Mapping[str, Any] | None:
    """One module alone may have another backend, so it does not do to see that some attention was intercepted."""
    by_heads = _attention_by_heads(case) if case.sequence_ranks > 1 else ()
    for at, module in case.module.named_modules() if case.sequence_ranks > 1 else ():
        if at in by_heads:
            continue
        processor: Any = getattr(module, "processor", None)
        # A processor without this attribute calls scaled_dot_product_attention itself, whatever was set.
        if hasattr(processor, "_attention_backend"):
            backend = _name_of(processor._attention_backend)
            if backend not in _SEEN:
                return {"backend": backend, "at": at}
    return None


def _attention_by_heads(case: CompatibilityContext) -> set[str]:
    """Modules that have all tokens and a share of the heads: any backend of theirs is right."""
    plan = plan_for(case.module, adapter=case.adapter)
    patterns = () if plan is None else plan.attention.items()
    return {
        at
        for pattern, attention in patterns
        if isinstance(attention, AttentionByHeads)
        for at in matching_modules(case.module, pattern)
    }


# A method that names one of these computes scores itself, as processors of diffusers did before PyTorch 2.
_OWN_SCORES = {"get_attention_scores", "memory_efficient_attention", "baddbmm", "bmm"}
_SDPA = {"scaled_dot_product_attention", "dispatch_attention_fn"}


def attention_by_scores(case: CompatibilityContext) -> Mapping[str, Any] | None:
    """Find an attention processor that never calls SDPA; others of the same model may, so a call would not show it."""
    # Rows of a UNet attend by any processor: what it multiplies is sharded, too.
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
        # Set for all models: by the last set_attention_backend, attention_backend(...), or the environment.
        from diffusers.models.attention_dispatch import _AttentionBackendRegistry

        backend, _ = _AttentionBackendRegistry.get_active_backend()
    return str(getattr(backend, "value", backend))


def cache_of_diffusers(case: CompatibilityContext) -> Mapping[str, Any] | None:
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


def unfit_hook(case: CompatibilityContext) -> Mapping[str, Any] | None:
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


def unfit_guider(case: CompatibilityContext) -> Mapping[str, Any] | None:
    """One that would put an unfit hook on its transformer in the middle of a call."""
    guider = getattr(case.owner, "guider", None) if case.component and case.ranks > 1 else None
    for configs in () if guider is None else vars(guider).values():
        for config in configs if isinstance(configs, list) else [configs]:
            blurs = type(config).__name__ == "SmoothedEnergyGuidanceConfig" and case.sequence_ranks > 1
            drops = type(config).__name__ == "LayerSkipConfig" and _drops(config)
            if blurs or drops:
                return {"guider": type(guider).__name__, "reason": _BLURS if blurs else _DROPS}
    return None
