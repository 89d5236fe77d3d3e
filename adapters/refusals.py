"""What of a diffusers transformer keeps it from running on several ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from para_core.cache.foreign import foreign_cache

# These are scaled_dot_product_attention under a switch that says how it computes.
_SEEN = ("native", "_native_cudnn", "_native_efficient", "_native_flash", "_native_math")


def unseen_attention(transformer: nn.Module, ranks: int, name: str) -> str | None:
    """Why ``transformer`` cannot run on ``ranks`` sequence ranks with the backends that it attends with; None if it can.

    One module alone may have another backend (``block.attn.set_attention_backend``), so it does not do to see that some
    attention was intercepted.

    Args:
        name: what the user calls it, for the message.
    """
    if ranks == 1:
        return None
    for place, module in transformer.named_modules():
        processor: Any = getattr(module, "processor", None)
        # A processor without this attribute calls scaled_dot_product_attention itself, whatever was set.
        if hasattr(processor, "_attention_backend"):
            backend = _name_of(processor._attention_backend)
            if backend not in _SEEN:
                return (
                    f"{name} attends with diffusers' backend {backend!r} in {place!r}, which does not go through "
                    f"scaled_dot_product_attention: on {ranks} ranks each would attend to its own tokens only. Switch to a "
                    f"native one: {name}.set_attention_backend('native')."
                )
    return None


def _rank_local_cache(transformer: nn.Module, ranks: int, name: str) -> str | None:
    """Why a cache of diffusers keeps ``transformer`` from running on ``ranks``; None if it does not.

    Args:
        name: what the user calls it, for the message.
    """
    found = None if ranks == 1 else foreign_cache(transformer)
    if found is None:
        return None
    return (
        f"{name} has a cache of diffusers ({found}), which decides on each rank alone: ranks would skip different steps, and wait "
        f"for each other. Call {name}.disable_cache(), and apply_cache_on_pipe(pipe, ...), with which they decide together."
    )


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


def unfit_hook(transformer: nn.Module, ranks: int, sequence_ranks: int, name: str) -> str | None:
    """Why a hook of diffusers, a cache among them, keeps ``transformer`` from running on ``ranks``; None if none does.

    Hooks of the user's own are not judged.

    Args:
        ranks, sequence_ranks: of the whole mesh, and those that share tokens.
        name: what the user calls it, for the message.
    """
    if ranks == 1:
        return None
    cache = _rank_local_cache(transformer, ranks, name)
    if cache is not None:
        return cache
    for place, hook in _hooks(transformer):
        reason = _against(hook, sequence_ranks)
        if reason is not None:
            return f"{name} has diffusers' {type(hook).__name__} at {place!r}: {reason}."
    return None


def unfit_guider(pipe: Any, ranks: int, sequence_ranks: int) -> str | None:
    """Why the guider of ``pipe`` would put an unfit hook on its transformer in the middle of a call; None if it would not."""
    guider = getattr(pipe, "guider", None)
    if guider is None or ranks == 1:
        return None
    for configs in vars(guider).values():
        for config in configs if isinstance(configs, list) else [configs]:
            blurs = type(config).__name__ == "SmoothedEnergyGuidanceConfig" and sequence_ranks > 1
            drops = type(config).__name__ == "LayerSkipConfig" and _drops(config)
            if blurs or drops:
                return f"pipe.guider is a {type(guider).__name__}: {_BLURS if blurs else _DROPS}."
    return None


def _hooks(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for place, part in module.named_modules():
        registry: Any = part.__dict__.get("_diffusers_hook")
        for hook in () if registry is None else registry.hooks.values():
            yield place, hook


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


def _name_of(backend: Any) -> str:
    if backend is None:
        # Set for all models: by the last set_attention_backend, attention_backend(...), or the environment.
        from diffusers.models.attention_dispatch import _AttentionBackendRegistry

        backend, _ = _AttentionBackendRegistry.get_active_backend()
    return str(getattr(backend, "value", backend))
