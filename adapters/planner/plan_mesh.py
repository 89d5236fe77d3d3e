"""The questions that others ask: which mesh is best, and how many bytes results of any size need on a rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from para_core.adapters.planner.choose import Choices, WeightsOption
from para_core.adapters.planner.mesh import MeshShape
from para_core.adapters.planner.predict import Machine, memory_of
from para_core.adapters.planner.predictions import Predictions, predict_meshes
from para_core.adapters.planner.published import find_published, published_workload
from para_core.adapters.planner.weights import Placement, default_text_encoders
from para_core.adapters.planner.work import Workload, require_positive
from para_core.devices import Device, Link, device_named, link_named
from para_core.option_values import Offload, Quantize, TextEncoders, VaePlacement

# The bytes per pixel are the slope between the bytes of square results with these sides, in pixels.
_SIDES = (512, 1024)
# Ranks with NVLink between all of them, by device, if not 8 as usual: a GB200 NVL72 is one rack.
_RANKS_PER_HOST = {"GB200": 72}
_MOST_RANKS = 65536  # Every mesh is predicted, which takes up to 10 seconds.


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
    weights: WeightsOption | None = None,
    mesh: Mapping[str, int] | None = None,
    memory: float | None = None,
    offload: bool | Offload = True,
    quantize: Quantize | None = None,
) -> Predictions:
    """Predict memory, traffic and a range of seconds of every mesh of ``ranks`` ranks for one generation.

    Nothing is downloaded or computed: operations and bytes are counted on the model without weights.

    Args:
        pipe_or_name (`DiffusionPipeline`, `str` or `Workload`): A pipeline with a transformer, counted work,
            or the name or Hub repository of a published model (``"FLUX.1-dev"``) in any spelling.
        ranks (`int`): Number of ranks, at most 65536.
        device (`str` or `Device`, defaults to `"H100"`): The device of each rank: a name, your own figures as
            ``"name,GB,TFLOPs,link"``, or a :class:`~para_core.devices.Device`.
        link (`str` or `Link`, *optional*): Link between the devices of a host: a name, or the GB/s that a
            device sends, which ``para_core doctor`` measures. Defaults to the usual one of the device.
        between (`str` or `Link`, defaults to `"infiniband"`): Link between hosts.
        ranks_per_host (`int`, *optional*): Ranks per host. Defaults to 8, and to 72 for a GB200.
        height, width, frames, steps (`int`, *optional*): Sizes of the generation. Default to those of the
            pipeline, or to the published ones.
        compiled (`bool`, defaults to `True`): Whether the transformer is compiled, which saves host time.
        weights (`"replicate"`, `"fsdp"` or `"tensor"`, *optional*): The way to shard weights on every mesh, as
            in :func:`parallelize_pipe`. By default any; ``"fsdp"`` only if a mesh does not fit otherwise.
        mesh (`Mapping[str, int]`, *optional*): Largest sizes of mesh dims. Only the mesh that follows from
            them is predicted, as :func:`init_context_parallel_mesh` chooses it. Defaults to every mesh.
        memory (`float`, *optional*): Bytes that a rank may hold. Defaults to those of the device less 6 GB.
        offload (`bool`, `"blocks"` or `"model"`, defaults to `True`): Whether meshes that do not fit may keep
            blocks in host memory, after text encoders and the VAE. ``"blocks"``: every mesh keeps some there.
            ``"model"``: only the component that runs is on the device (``enable_model_cpu_offload``).
        quantize (`str`, *optional*): Scheme of quantized weights (docs/weights.md), which is not exact, at
            the speed of exact ones. Defaults to exact weights, and to ``"int8"`` if no mesh fits otherwise.

    Returns:
        The :class:`~para_core.adapters.planner.predictions.Predictions`.

    Raises:
        TypeError: If the inputs of the transformer are unknown, or an argument has another type.
        ValueError: If a name, device, link or size is invalid, or two choices exclude each other.
    """
    if require_positive("ranks", ranks) > _MOST_RANKS:
        raise ValueError(f"ranks is {ranks}; expected at most {_MOST_RANKS}.")
    choices = Choices(weights, offload, quantize, dict(mesh or {}))
    if ranks_per_host is not None:
        require_positive("ranks_per_host", ranks_per_host)
    if memory is not None and not 0 < memory < float("inf"):
        raise ValueError(f"memory is {memory!r}; expected a positive number of bytes.")
    accelerator = device_named(device)
    inside = link_named(link, accelerator)
    per_host = ranks_per_host or _RANKS_PER_HOST.get(accelerator.name, 8)
    machine = Machine(accelerator, inside, link_named(between, accelerator), per_host, compiled, memory)
    if isinstance(pipe_or_name, Workload):
        work = pipe_or_name
    else:
        work = workload_of(pipe_or_name, height=height, width=width, frames=frames, steps=steps)
    return predict_meshes(work, machine, ranks, choices)


def workload_of(
    pipe_or_name: Any,
    *,
    height: int | None = None,
    width: int | None = None,
    frames: int | None = None,
    steps: int | None = None,
) -> Workload:
    """Return the work of one generation. The arguments and errors are as in :func:`plan_mesh`."""
    options = {"height": height, "width": width, "frames": frames}
    changed = {name: require_positive(name, value) for name, value in options.items() if value is not None}
    if steps is not None:
        require_positive("steps", steps)
    if isinstance(pipe_or_name, str):
        return published_workload(find_published(pipe_or_name), changed, steps)
    # Imported here, because a published model needs no torch.
    from para_core.adapters.planner.count import pipe_workload

    return pipe_workload(pipe_or_name, changed, steps)


def predict_bytes(
    pipe: Any,
    mesh: Mapping[str, int],
    *,
    fsdp: bool = False,
    resident: int | None = None,
    encoders: TextEncoders | None = None,
    vae: VaePlacement = "replicate",
    quantize: str | None = None,
) -> tuple[float, float]:
    """Return the bytes of a rank as ``(fixed bytes, bytes per pixel of all frames)``.

    Activations of the VAE are not included. ``pipe`` may lack weights, and ``mesh`` has the sizes of the mesh
    dims by name. The other arguments are as in ``parallelize_pipe``: whether it shards weights by FSDP2, how
    many blocks stay on the device (None for all), and where the text encoders and the VAE are.

    Raises:
        TypeError: The planner does not know the pipeline. A pipeline of the user's own may raise anything.
    """
    sizes: dict[str, Any] = dict(mesh)
    shape = MeshShape(**sizes, fsdp=fsdp)
    if encoders is None:
        encoders = "offload"
        if resident is None:
            encoders = default_text_encoders(shape)
    placement = Placement(encoders, resident, quantize, vae)
    works = [workload_of(pipe, height=side, width=side) for side in _SIDES]
    less, more = (memory_of(shape, work, placement) for work in works)
    few, many = (side * side * work.sizes.frames for side, work in zip(_SIDES, works, strict=True))
    per_pixel = (more - less) / (many - few)
    return less - per_pixel * few, per_pixel
