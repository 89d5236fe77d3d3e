"""Predict which mesh is fastest for a pipeline or a published model, from the counted work of one generation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from para_core.adapters.planner.published import PUBLISHED, find_published, published_runs
from para_core.adapters.planner.sizes import require_size
from para_core.adapters.planner.stored import stored_workload
from para_core.option_values import Quantize, TextEncoders, VaePlacement
from para_core.planner.cost import Machine, Runtime
from para_core.planner.hardware import Device, Host, Link, Topology, device_named, link_named, measured_figures
from para_core.planner.mesh_plan import MeshPlan, make_plan, require_positive
from para_core.planner.prediction import Workload
from para_core.planner.weights import SHARING, Choices, Demanded, Offload, Sharing
from para_core.weights.pipefusion_options import PipeFusion


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
    weights: Sequence[Sharing] | Demanded = SHARING,
    mesh: Mapping[str, int] | None = None,
    memory: float | None = None,
    text_encoders: TextEncoders | None = None,
    vae_placement: VaePlacement | None = None,
    offload: bool | Offload = True,
    quantize: Quantize | None = None,
    pipefusion: PipeFusion | None = None,
    measured: str | Path | None = None,
) -> MeshPlan:
    """Predict seconds, bytes and memory of every mesh of ``ranks`` ranks for one generation, the fastest first.

    Nothing is downloaded or computed: operations and bytes are counted on the model without weights.

    Args:
        pipe_or_name (`DiffusionPipeline`, `str` or `Workload`): A pipeline with a transformer, the name or the Hub
            repository of a published model (``"FLUX.1-dev"``, ``"Wan 2.2 A14B"``, …) in any spelling, or counted work.
        ranks (`int`): Number of ranks.
        device (`str` or `Device`, defaults to `"H100"`): The device of each rank: a name, your own figures as
            ``"name,GB,TFLOPs,link"``, or a :class:`Device`.
        link (`str` or `Link`, *optional*): Link between the devices of a host; ``"nvlink"`` and ``"pcie"`` mean the
            generation of that link which the device has. Defaults to the usual one of the device.
        between (`str` or `Link`, defaults to `"infiniband"`): Link between hosts.
        ranks_per_host (`int`, *optional*): Ranks per host. Defaults to 8, and to 72 for a GB200.
        height, width, frames, steps (`int`, *optional*): Sizes of the generation. Default to those of the pipeline, or
            to the published ones.
        compiled (`bool`, defaults to `True`): Whether the transformer is compiled. In eager code the host takes longer.
        weights (`str` or `Sequence[str]`, defaults to `("tensor", "stages", "fsdp")`): One way to shard weights that
            every mesh must use, as in :func:`parallelize_pipe` (``"replicate"``, ``"fsdp"`` or ``"tensor"``), or ways
            that meshes may use: ``"stages"`` adds a ``pipe`` mesh dim; ``"fsdp"`` is tried if the weights do not fit
            otherwise; ``()`` replicates them.
        mesh (`Mapping[str, int]`, *optional*): Largest sizes of mesh dims. Only the mesh that follows from them is
            predicted, as :func:`init_context_parallel_mesh` chooses it. Defaults to every mesh.
        memory (`float`, *optional*): Bytes that a rank may hold. Defaults to the memory of the device less 6 GB.
        text_encoders (`"replicate"`, `"fsdp"`, `"offload"` or `"first"`, *optional*): Placement of the text encoders,
            as in :func:`parallelize_pipe`. Defaults to the default of that function, and to ``"first"`` (on one rank
            ``"offload"``) for meshes that do not fit otherwise.
        vae_placement (`"replicate"`, `"offload"` or `"first"`, *optional*): The same for the VAE. Defaults to
            ``"replicate"``, and to ``"first"`` (on one rank ``"offload"``) if no mesh fits otherwise.
        offload (`bool`, `"blocks"` or `"model"`, defaults to `True`): Whether meshes that do not fit may keep
            transformer blocks in host memory. ``"blocks"``: every mesh keeps some there. ``"model"``: only the
            component that runs is on the device, as with diffusers' ``enable_model_cpu_offload``.
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
        ValueError: If a name, device, link or size is invalid, or two choices exclude each other.
    """
    require_positive("ranks", ranks)
    choices = Choices(weights, text_encoders, vae_placement, offload, quantize, pipefusion, dict(mesh or {}))
    if ranks_per_host is not None:
        require_positive("ranks_per_host", ranks_per_host)
    if memory is not None and not 0 < memory < float("inf"):
        raise ValueError(f"memory is {memory!r}; expected a positive number of bytes.")
    accelerator, host = device_named(device), Host()
    inside = link_named(link, accelerator)
    if measured is not None:
        accelerator, inside, host = measured_figures(measured, accelerator, inside, host)
    per_host = ranks_per_host or (72 if accelerator.name == "GB200" else 8)
    topology = Topology(inside, link_named(between, accelerator), per_host)
    machine = Machine(accelerator, topology, host, Runtime(compiled=compiled), room=memory)
    if isinstance(pipe_or_name, Workload):
        work = pipe_or_name
    else:
        work = workload(pipe_or_name, height=height, width=width, frames=frames, steps=steps)
    return make_plan(work, machine, ranks, choices)


def workload(
    pipe_or_name: Any,
    *,
    height: int | None = None,
    width: int | None = None,
    frames: int | None = None,
    steps: int | None = None,
    ends: bool = True,
) -> Workload:
    """Return the work of one generation with a pipeline or a published model. Arguments as in :func:`plan_mesh`.

    Without ``ends`` the seconds of encoding and decoding with a pipeline are left out.
    """
    options = {"height": height, "width": width, "frames": frames}
    changed: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    for name, value in {**changed, "steps": steps}.items():
        if value is not None:
            require_positive(name, value)
    if not isinstance(pipe_or_name, str):
        # Imported here, because a published model needs no torch.
        from para_core.adapters.planner.pipe_workload import pipe_workload

        return pipe_workload(pipe_or_name, changed, steps, ends=ends)
    name = find_published(pipe_or_name)
    model = PUBLISHED[name]
    sizes = replace(model.sizes, **changed)
    require_size(name, sizes, is_video=model.sizes.frames > 1)
    work = stored_workload(name, sizes, steps or model.steps)
    return replace(work, published=published_runs(name, sizes, work.steps))
