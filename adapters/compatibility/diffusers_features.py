"""Checks of features of diffusers that a parallel call cannot have: its caches, hooks, guiders and parallelism.

``checks.py`` calls all of them. Attention backends of diffusers are checked in
``adapters/inspect/attention_names.py``. Tests: tests/adapters/compatibility/test_checks.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from para_core.adapters.inspect.diffusers_mesh import mesh_of_diffusers
from para_core.adapters.refusal import refusal
from para_core.cache.attachment import find_foreign_cache
from para_core.instance.modules import has_compiled_parts, submodules_of


def check_no_parallelism_of_diffusers(module: Any) -> None:
    """Refuse a model under diffusers' own parallelism."""
    if getattr(module, "_parallel_config", None) is not None and mesh_of_diffusers(module) is None:
        raise ValueError(
            "the transformer already runs under diffusers' own enable_parallelism(config=...). Use one of the two: "
            "load it without parallel_config, and call parallelize_pipe(pipe, mesh=...) alone."
        )


def check_no_cache_of_diffusers(module: nn.Module, name: str) -> None:
    """Refuse a cache of diffusers on the transformer."""
    cache = find_foreign_cache(module)
    if cache is not None:
        raise RuntimeError(
            f"{name} has a cache of diffusers ({cache}), which decides per rank: ranks would skip different steps, and "
            f"wait for each other. Call {name}.disable_cache(), and use apply_cache_on_pipe(pipe, ...), which decides "
            "for all ranks."
        )


def check_compiled_weights_of_diffusers(module: nn.Module, name: str, called: Any) -> None:
    """Refuse a compiled model whose weights come from a GGUF file or use layerwise casting."""
    if called is module and not has_compiled_parts(module):
        return
    is_gguf = type(vars(module).get("hf_quantizer")).__name__ == "GGUFQuantizer"
    if is_gguf or any(type(hook).__name__ == "LayerwiseCastingHook" for _, hook in hooks_of(module)):
        reason = "casts its weights while layers compute"
        if is_gguf:
            reason = "comes from a GGUF file"
        raise refusal(
            RuntimeError,
            f"{name} {reason} and is compiled. Dynamo cannot trace diffusers' layers of that kind while attention is "
            "intercepted.",
            f"Use it uncompiled, or with weights in 16 bits (of a GGUF file: {name}.dequantize()).",
        )


# Hooks of diffusers that only move or cast weights. Their results on a part of the tokens are right. Any hook of
# diffusers that is in neither list is refused.
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
        if registry is None:
            continue
        for hook in registry.hooks.values():
            yield path, hook


def check_hooks_of_diffusers(module: nn.Module, name: str, sequence_ranks: int) -> None:
    """Refuse a hook of diffusers that may need tokens of other ranks."""
    for path, hook in hooks_of(module):
        kind = type(hook).__name__
        if not type(hook).__module__.startswith("diffusers.") or kind in _WEIGHT_HOOKS:
            continue
        if kind in _SKIP_HOOKS:
            if _drops_at_random(hook):
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


def _drops_at_random(hook_or_config: Any) -> bool:
    return bool(0 < hook_or_config.dropout < 1)


def check_guider(pipe: Any, sequence_ranks: int) -> None:
    """Refuse a guider that skips layers with dropout or blurs queries."""
    # A pipeline with two transformers, such as Wan 2.2, has a guider for each.
    for name in ("guider", "guider_2"):
        guider = getattr(pipe, name, None)
        if guider is None:
            continue
        for config in _configs_of(guider):
            if type(config).__name__ == "SmoothedEnergyGuidanceConfig" and sequence_ranks > 1:
                raise refusal(
                    RuntimeError,
                    f"pipe.{name} is a {type(guider).__name__}: it blurs the queries of the full image, and a rank has "
                    "a part of them.",
                    "Use ranks for guidance only (max_ring_dim_size=1, max_ulysses_dim_size=1), or another guider.",
                )
            if type(config).__name__ == "LayerSkipConfig" and _drops_at_random(config):
                raise refusal(
                    RuntimeError,
                    f"pipe.{name} is a {type(guider).__name__}: it drops activations at random, and each rank would "
                    "draw its own values.",
                    "Skip whole layers (dropout=1.0).",
                )


def _configs_of(guider: Any) -> list[Any]:
    """Return the attributes of ``guider``; of those that are lists, the entries."""
    configs: list[Any] = []
    for value in vars(guider).values():
        configs += value if isinstance(value, list) else [value]
    return configs
