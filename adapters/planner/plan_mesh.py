"""Predict which mesh is fastest for a pipeline or a published model, from the counted work of one generation."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from para_core.adapters.components import components_of, vaes_of
from para_core.adapters.planner import count
from para_core.adapters.planner.inputs import INPUTS, GenerationSizes, default_guidance, default_sizes, number_of_heads
from para_core.adapters.planner.published import PUBLISHED
from para_core.adapters.registry import plan_for, transformers_of
from para_core.instance_patching import original_class, uncompiled
from para_core.option_values import Quantize, TextEncoders, VaePlacement
from para_core.planner.cost import Machine, Runtime
from para_core.planner.hardware import Device, Host, Link, Topology, device_named, link_named, measured_figures
from para_core.planner.mesh_plan import MeshPlan, make_plan, require_positive
from para_core.planner.prediction import Workload
from para_core.planner.weights import SHARING, Choices, Sharing
from para_core.weights.pipefusion import PipeFusion


def plan_mesh(
    pipe_or_name: Any,
    *,
    ranks: int,
    device: str | Device = "H100",
    link: str | Link | None = None,
    between: str | Link = "infiniband",
    ranks_per_host: int | None = None,
    height: int | None = None,
    width: int | None = None,
    frames: int | None = None,
    steps: int | None = None,
    compiled: bool = True,
    weights: Sequence[Sharing] = SHARING,
    text_encoders: TextEncoders | None = None,
    vae_placement: VaePlacement | None = None,
    offload: bool = True,
    quantize: Quantize | None = None,
    pipefusion: PipeFusion | None = None,
    measured: str | Path | None = None,
) -> MeshPlan:
    """Predict seconds, bytes and memory of every mesh of ``ranks`` ranks for one generation, the fastest first.

    Nothing is downloaded or computed: operations and bytes are counted on the model without weights.

    Args:
        pipe_or_name (`DiffusionPipeline` or `str`): A pipeline with a transformer, or the name of a published model
            (``"FLUX.1-dev"``, ``"Wan 2.2 A14B"``, …).
        ranks (`int`): Number of ranks.
        device (`str` or `Device`, defaults to `"H100"`): The device of each rank, by name or with your own figures.
        link (`str` or `Link`, *optional*): Link between the devices of a host; ``"nvlink"`` and ``"pcie"`` mean the
            generation of that link which the device has. Defaults to the usual one of the device.
        between (`str` or `Link`, defaults to `"infiniband"`): Link between hosts.
        ranks_per_host (`int`, *optional*): Ranks per host. Defaults to 8, and to 72 for a GB200.
        height, width, frames, steps (`int`, *optional*): Sizes of the generation. Default to those of the pipeline, or
            to the published ones.
        compiled (`bool`, defaults to `True`): Whether the transformer is compiled. In eager code the host takes longer.
        weights (`Sequence[str]`, defaults to `("tensor", "stages", "fsdp")`): Ways to shard weights. ``"stages"`` adds
            a ``pipe`` mesh dim; ``"fsdp"`` is tried if the weights do not fit otherwise; ``()`` replicates them.
        text_encoders (`"replicate"`, `"fsdp"`, `"offload"` or `"first"`, *optional*): Placement of the text encoders,
            as in :func:`parallelize_pipe`. Defaults to the default of that function, and to ``"first"`` (on one rank
            ``"offload"``) for meshes that do not fit otherwise.
        vae_placement (`"replicate"`, `"offload"` or `"first"`, *optional*): The same for the VAE. Defaults to
            ``"replicate"``, and to ``"first"`` (on one rank ``"offload"``) if no mesh fits otherwise.
        offload (`bool`, defaults to `True`): Whether meshes that do not fit may keep transformer blocks in host memory.
        quantize (`str`, *optional*): Scheme of quantized weights (docs/weights.md), which is not exact. Its bytes are
            predicted, its speed is not. Defaults to exact weights, and to ``"int8"`` if no mesh fits otherwise.
        pipefusion (`PipeFusion`, *optional*): Include meshes whose stages work on patches, which approximates. Defaults
            to exact meshes only.
        measured (`str` or `Path`, *optional*): JSON file of ``python -m para_core.doctor`` or of ``make gpu-check``
            whose measured figures replace the planner's built-in ones.

    Returns:
        The :class:`MeshPlan`.

    Raises:
        TypeError: If the inputs of the transformer are unknown, or an argument has another type.
        ValueError: If a name, device, link or size is invalid.
    """
    require_positive("ranks", ranks)
    choices = Choices(weights, text_encoders, vae_placement, offload, quantize, pipefusion)
    if ranks_per_host is not None:
        require_positive("ranks_per_host", ranks_per_host)
    accelerator, host = device_named(device), Host()
    inside = link_named(link, accelerator)
    if measured is not None:
        accelerator, inside, host = measured_figures(measured, accelerator, inside, host)
    per_host = ranks_per_host or (72 if accelerator.name == "GB200" else 8)
    topology = Topology(inside, link_named(between, accelerator), per_host)
    machine = Machine(accelerator, topology, host, Runtime(compiled=compiled))
    work = workload(pipe_or_name, height=height, width=width, frames=frames, steps=steps)
    return make_plan(work, machine, ranks, choices)


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
    with count.on_meta():
        transformer = getattr(diffusers, model.transformer)(**model.config).eval()
        vae = getattr(diffusers, model.vae)(**model.vae_config).eval()
        decoder = count.decoder_operations(vae, model.latent_channels, sizes, model.tiled)
        encoder = model.encoder()
    with count.without_data():
        calls = count.count_calls(transformer, sizes)
    # Encoding takes 2 operations per token and weight of a linear layer, except the head.
    layers = [x.weight for name, x in encoder.named_modules() if isinstance(x, nn.Linear) and "lm_head" not in name]
    return Workload(
        name=f"{name}, {_size(sizes)}",
        calls=calls,
        branches=model.branches,
        steps=steps,
        weights=count.weights_of(
            transformer, [encoder], vae=count.bytes_of(vae), other=0.0, transformers=model.transformers
        ),
        encoder=2.0 * sizes.text * sum(weight.numel() for weight in layers) * model.prompts,
        decoder=decoder,
        heads=number_of_heads(transformer) or 1,
        frames=sizes.frames,
        encodings=model.prompts,
    )


def _size(sizes: GenerationSizes) -> str:
    pixels = f"{sizes.width} × {sizes.height}"
    return pixels if sizes.frames == 1 else f"{pixels} × {sizes.frames}"


def _pipe_workload(pipe: Any, changed: dict[str, Any], steps: int | None) -> Workload:
    """Return the work of one generation with ``pipe``, without encoding and decoding, which are equal on every mesh."""
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
    takes_frames = "num_frames" in inspect.signature(original_class(pipe).__call__).parameters
    _require_size(original_class(pipe).__name__, sizes, is_video=takes_frames)
    dtype = next((x.dtype for x in transformer.parameters() if x.is_floating_point()), torch.bfloat16)
    with count.without_data(dtype):
        calls = count.count_calls(transformer, replace(sizes, dtype=dtype))
    plan = plan_for(transformer)
    guides = default_guidance(pipe, transformer) is not None and plan is not None and not plan.batched
    encoders = [module for name, module in components_of(pipe).items() if name not in transformers]
    vaes = vaes_of(pipe).values()
    inside = {id(x) for x in (*transformers.values(), *encoders, *vaes)}
    modules = {id(x): x for x in map(uncompiled, pipe.components.values()) if isinstance(x, nn.Module)}
    other = sum(count.bytes_of(x) for key, x in modules.items() if key not in inside)
    return Workload(
        name=f"{original_class(pipe).__name__}, {_size(sizes)}",
        calls=calls,
        branches=2 if guides else 1,
        steps=steps or default_steps,
        weights=count.weights_of(
            transformer, encoders, vae=sum(map(count.bytes_of, vaes)), other=other, transformers=len(transformers)
        ),
        encoder=0.0,
        decoder=0.0,
        heads=number_of_heads(transformer) or 1,
        frames=sizes.frames,
    )
