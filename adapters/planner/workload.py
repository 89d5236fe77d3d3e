"""Count the work of one generation, on a pipeline or on a published model without weights."""

from __future__ import annotations

import functools
import inspect
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from para_core.adapters.components import components_of
from para_core.adapters.planner.count import (
    UnknownModelError,
    bytes_of,
    count_calls,
    decoder_operations,
    encoder_operations,
    on_meta,
    weights_of,
    without_data,
)
from para_core.adapters.planner.inputs import INPUTS, GenerationSizes
from para_core.adapters.planner.pipeline_defaults import default_guidance, default_sizes, number_of_heads
from para_core.adapters.planner.published import PUBLISHED
from para_core.adapters.registry import plan_for, transformers_of
from para_core.adapters.vaes import vaes_of
from para_core.instance_patching import original_class, uncompiled
from para_core.planner.prediction import Workload


def workload(
    pipe_or_name: Any,
    *,
    height: int | None = None,
    width: int | None = None,
    frames: int | None = None,
    steps: int | None = None,
) -> Workload:
    """Return the work of one generation with a pipeline or a published model. Arguments as in :func:`plan_mesh`."""
    options = {"height": height, "width": width, "frames": frames}
    changed: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    for name, value in {**changed, "steps": steps}.items():
        if value is not None:
            require_positive(name, value)
    if isinstance(pipe_or_name, str):
        if pipe_or_name not in PUBLISHED:
            raise ValueError(
                f"{pipe_or_name!r} is no published model; expected one of {', '.join(PUBLISHED)}, or a pipeline."
            )
        model = PUBLISHED[pipe_or_name]
        sizes = replace(model.sizes, **changed)
        _require_size(pipe_or_name, sizes, is_video=model.sizes.frames > 1)
        return _published_workload(pipe_or_name, sizes, steps or model.steps)
    return _pipe_workload(pipe_or_name, changed, steps)


def require_positive(name: str, value: Any) -> None:
    """Raise ``ValueError`` if ``value`` is not a positive integer; ``name`` is the argument's name in the message."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is {value!r}; expected a positive integer.")


def _require_size(name: str, sizes: GenerationSizes, *, is_video: bool) -> None:
    if not is_video and sizes.frames > 1:
        raise ValueError(f"frames is {sizes.frames}, but {name} generates images: omit frames.")
    least = 2 * sizes.spatial  # For most models a token is 2 × 2 latent pixels.
    if min(sizes.height, sizes.width) < least:
        raise ValueError(
            f"{sizes.width} × {sizes.height} pixels are less than one token of {name}; expected at least {least} × "
            f"{least}."
        )


@functools.lru_cache(maxsize=8)
def _published_workload(name: str, sizes: GenerationSizes, steps: int) -> Workload:
    import diffusers

    model = PUBLISHED[name]
    with on_meta():
        transformer = getattr(diffusers, model.transformer)(**model.config).eval()
        vae = getattr(diffusers, model.vae)(**model.vae_config).eval()
        decoder = decoder_operations(vae, model.latent_channels, sizes, model.tiled)
        encoder = model.encoder()
    with without_data():
        calls = count_calls(transformer, sizes)
    return Workload(
        name=f"{name}, {_size(sizes)}",
        calls=calls,
        branches=model.branches,
        steps=steps,
        weights=weights_of(transformer, [encoder], vae=bytes_of(vae), other=0.0, transformers=model.transformers),
        encoder=encoder_operations(encoder, sizes.text) * model.prompts,
        decoder=decoder,
        heads=number_of_heads(transformer) or 1,
        frames=sizes.frames,
        encodings=model.prompts,
    )


def _size(sizes: GenerationSizes) -> str:
    pixels = f"{sizes.width} × {sizes.height}"
    return pixels if sizes.frames == 1 else f"{pixels} × {sizes.frames}"


def _pipe_workload(pipe: Any, changed: dict[str, Any], steps: int | None) -> Workload:
    """Return the work of one generation with ``pipe``.

    Leaves out the time of text encoders and VAE, which is equal on every mesh.
    """
    transformers = transformers_of(pipe)
    if not transformers:
        raise UnknownModelError(
            f"{type(pipe).__name__} has no transformer; expected a pipeline with one, or the name of a published model."
        )
    transformer = next(iter(transformers.values()))
    if type(transformer).__name__ not in INPUTS:
        raise UnknownModelError(
            f"the inputs of {type(transformer).__name__} are unknown; expected one of {', '.join(INPUTS)}."
        )
    sizes, default_steps = default_sizes(pipe, transformer, changed)
    takes_frames = "num_frames" in inspect.signature(original_class(pipe).__call__).parameters
    _require_size(original_class(pipe).__name__, sizes, is_video=takes_frames)
    dtype = next((x.dtype for x in transformer.parameters() if x.is_floating_point()), torch.bfloat16)
    with without_data(dtype):
        calls = count_calls(transformer, replace(sizes, dtype=dtype))
    plan = plan_for(transformer)
    guides = default_guidance(pipe, transformer) is not None and plan is not None and not plan.batched
    modules = {name: uncompiled(x) for name, x in pipe.components.items() if isinstance(x, nn.Module)}
    encoders = [module for name, module in components_of(pipe).items() if name not in transformers]
    vaes = vaes_of(pipe).values()
    inside = {id(x) for x in (*transformers.values(), *encoders, *vaes)}
    other = sum(bytes_of(x) for x in {id(x): x for x in modules.values() if id(x) not in inside}.values())
    return Workload(
        name=f"{original_class(pipe).__name__}, {_size(sizes)}",
        calls=calls,
        branches=2 if guides else 1,
        steps=steps or default_steps,
        weights=weights_of(
            transformer, encoders, vae=sum(map(bytes_of, vaes)), other=other, transformers=len(transformers)
        ),
        encoder=0.0,
        decoder=0.0,
        heads=number_of_heads(transformer) or 1,
        frames=sizes.frames,
    )
