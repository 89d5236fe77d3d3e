"""Predict which mesh is fastest for a diffusers pipeline, without running it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from para_core.adapters.components import Quantize, TextEncoders, VaePlacement
from para_core.adapters.planner.workload import require_positive, workload
from para_core.planner.choices import Choices
from para_core.planner.cost import Machine, Runtime
from para_core.planner.hardware import Device, Host, Link, Topology, device_named, link_named, measured_figures
from para_core.planner.mesh_plan import MeshPlan, make_plan, require_ranks
from para_core.planner.prediction import SHARING, Sharing
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
    require_ranks(ranks)
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
