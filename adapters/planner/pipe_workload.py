"""The work of one generation, counted on a published model or a pipeline without its weights. Imports torch."""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from para_core.adapters.inspect.components import components_of, text_encoders_of, vaes_of
from para_core.adapters.planner import count
from para_core.adapters.planner.inputs import INPUTS, default_guidance, default_sizes, number_of_heads
from para_core.adapters.planner.published import PUBLISHED
from para_core.adapters.planner.sizes import DecoderCounts, GenerationSizes, require_size
from para_core.adapters.registry import plan_for, transformers_of
from para_core.instance.modules import uncompiled
from para_core.instance.private_class import original_class
from para_core.planner.prediction import Workload

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PublishedModules:
    """The modules of a published model without weights."""

    transformer: Any
    vae: Any
    encoder: nn.Module


def published_modules(name: str) -> PublishedModules:
    """Create the transformer, the autoencoder and the largest text encoder of a published model on the meta device."""
    import diffusers

    model = PUBLISHED[name]
    with count.on_meta():
        transformer = getattr(diffusers, model.transformer)(**model.config).eval()
        vae = getattr(diffusers, model.vae)(**model.vae_config).eval()
        return PublishedModules(transformer, vae, model.encoder())


def counted_workload(name: str, sizes: GenerationSizes, steps: int, modules: PublishedModules) -> Workload:
    """Return the work of one generation with a published model, counted on its ``modules``."""
    model = PUBLISHED[name]
    with count.on_meta():
        decoder = count.decoder_counts(modules.vae, model.latent_channels)
    with count.without_data():
        calls = count.count_calls(modules.transformer, sizes)
    return Workload(
        name=f"{name}, {sizes}",
        calls=calls,
        branches=model.branches,
        steps=steps,
        weights=count.weights_of(
            modules.transformer,
            [modules.encoder],
            vae=count.bytes_of(modules.vae),
            other=0.0,
            transformers=model.transformers,
        ),
        encoder=count.encoder_operations([modules.encoder], sizes.text) * model.prompts,
        decoder=decoder.operations(sizes, model.tiled),
        heads=number_of_heads(modules.transformer) or 1,
        frames=sizes.frames,
        encodings=model.prompts,
        height=sizes.height,
        width=sizes.width,
    )


def pipe_workload(pipe: Any, changed: dict[str, Any], steps: int | None, *, ends: bool = True) -> Workload:
    """Return the work of one generation with ``pipe``.

    Without ``ends``, encoding and decoding are left out: they are equal on every mesh, and counting takes a second.
    """
    transformers = transformers_of(pipe)
    if not transformers:
        raise count.UnknownModelError(
            f"{type(pipe).__name__} has no transformer; expected a pipeline with one, or the name of a published model."
        )
    transformer = next(iter(transformers.values()))
    if type(transformer).__name__ not in INPUTS:
        raise count.UnknownModelError(
            f"the inputs of {type(transformer).__name__} are unknown; expected one of {', '.join(INPUTS)}."
        )
    sizes, default_steps = default_sizes(pipe, transformer, changed)
    # The inputs of a modular pipeline are those of its blocks.
    of_blocks = {getattr(x, "name", None) for x in getattr(getattr(pipe, "blocks", None), "inputs", ())}
    takes_frames = "num_frames" in {*inspect.signature(original_class(pipe).__call__).parameters, *of_blocks}
    require_size(original_class(pipe).__name__, sizes, is_video=takes_frames or "frames" not in changed)
    dtype = next((x.dtype for x in transformer.parameters() if x.is_floating_point()), torch.bfloat16)
    with count.without_data(dtype):
        calls = count.count_calls(transformer, replace(sizes, dtype=dtype))
    decoder = _decoder_of(pipe) if ends else None
    plan = plan_for(transformer)
    guides = default_guidance(pipe, transformer) is not None and plan is not None and not plan.batched
    encoders = [module for name, module in components_of(pipe).items() if name not in transformers]
    vaes, texts = vaes_of(pipe).values(), text_encoders_of(pipe)
    # The samples of both branches are in one batch of some models. Their prompts are encoded one after the other, too.
    prompts = 2 if default_guidance(pipe, transformer) is not None else 1
    inside = {id(x) for x in (*transformers.values(), *encoders, *vaes)}
    modules = {id(x): x for x in map(uncompiled, pipe.components.values()) if isinstance(x, nn.Module)}
    other = sum(count.bytes_of(x) for key, x in modules.items() if key not in inside)
    return Workload(
        name=f"{name_of(pipe)}, {sizes}",
        calls=calls,
        branches=2 if guides else 1,
        steps=steps or default_steps,
        weights=count.weights_of(
            transformer, encoders, vae=sum(map(count.bytes_of, vaes)), other=other, transformers=len(transformers)
        ),
        encoder=count.encoder_operations(list(texts.values()), sizes.text) * prompts if ends else 0.0,
        decoder=0.0 if decoder is None else decoder.operations(sizes),
        heads=number_of_heads(transformer) or 1,
        frames=sizes.frames,
        encodings=prompts,
        uncounted=("decoding",) if ends and decoder is None else (),
        height=sizes.height,
        width=sizes.width,
    )


def name_of(pipe: Any) -> str:
    """Return the last part of the folder or repository from which ``pipe`` was made; its class if that is unknown."""
    path = str(getattr(pipe, "name_or_path", None) or "").rstrip("/")
    return path.rpartition("/")[2] or original_class(pipe).__name__


def _decoder_of(pipe: Any) -> DecoderCounts | None:
    """Return the operations of decoding with the autoencoder of ``pipe``; None if it cannot be counted."""
    vae: Any = next(iter(vaes_of(pipe).values()), None)
    if vae is None:
        return None
    config = dict(vae.config)
    channels = next((config[name] for name in ("latent_channels", "z_dim") if isinstance(config.get(name), int)), None)
    if channels is None:
        return None
    try:
        with count.on_meta():
            return count.decoder_counts(type(vae).from_config(vae.config).eval(), channels)
    except Exception as error:
        # The class may be the user's own, so counting may raise anything. The plan says that decoding is not included.
        logger.debug("decoding with %s is not counted: %s", type(vae).__name__, error)
        return None
