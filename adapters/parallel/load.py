"""Loading a pipeline on all ranks of a node at once, of which each keeps its part of the weights."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from para_core.adapters.components import components_of
from para_core.adapters.parallel.pipeline import parallelize_pipe
from para_core.adapters.planner.mesh_choice import Mesh, guided_mesh_for
from para_core.adapters.weights.download import download_once_per_node, folder_of
from para_core.adapters.weights.shard import require_mesh_fits, shard_components
from para_core.adapters.weights.sharded_component import METHODS, Method
from para_core.distributed.consistency import raising_on_all
from para_core.distributed.create_mesh import init_context_parallel_mesh
from para_core.distributed.mesh import GuidedMesh, require_process_group
from para_core.instance_patching import uncompiled

# Names in the header of a safetensors file.
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def from_pretrained_sharded(
    pipeline: Any,
    name: str | Path,
    *,
    mesh: Mesh | None = None,
    weights: Method | Literal["stages"] = "fsdp",
    dtype: torch.dtype | None = None,
    **options: Any,
) -> Any:
    """``pipeline.from_pretrained(name)`` and ``parallelize_pipe(pipe, mesh=mesh, weights=weights)``, in the host memory of one copy.

    Every rank maps the safetensors files of its node, which the system holds once for all, reads its part of each weight, and unmaps
    the weight. Weights are cast after they were sharded.

    Args:
        pipeline: a class of diffusers.
        name: a folder, or a repository on the Hub, whose weights are safetensors. One rank of each node downloads it, while the others
            wait, however long it takes.
        mesh: as for :func:`parallelize_pipe`; left out: all ranks, as :func:`init_context_parallel_mesh` makes it.
        weights: as for :func:`shard_weights`; or ``"stages"``, with a mesh that has ``pipe``: of the blocks of other stages nothing is read.
        dtype: of floating-point weights; left out: that of the files. What a class keeps in float32 stays so.
        **options: of ``from_pretrained``; no ``device_map``.

    Returns:
        The pipeline; what is not sharded is on the device of the mesh, too.

    Raises:
        ValueError: an option does not fit.
        RuntimeError: on every rank, if a file is missing, incomplete or corrupt on one of them, or files differ.
    """
    require_process_group("from_pretrained_sharded")
    if weights not in (*METHODS, "stages"):
        raise ValueError(f"weights is {weights!r}; expected 'fsdp', 'tensor' or 'stages'.")
    for option in ("device_map", "torch_dtype", "quantization_config"):
        if options.get(option) is not None:
            raise ValueError(f"from_pretrained_sharded takes no {option}: {_INSTEAD[option]}")
    if mesh is None:
        mesh = init_context_parallel_mesh()
    guided = guided_mesh_for(mesh, None)
    if (weights == "stages") != (guided.pipe.size > 1):
        raise ValueError(
            f"weights is {weights!r}, and the mesh has {guided.pipe.size} rank(s) along 'pipe': 'stages' goes with "
            "init_context_parallel_mesh(max_pipe_dim_size=...), the others with a mesh without it."
        )
    if weights in METHODS:
        require_mesh_fits(guided, weights)
    pipe = _loaded_on_all(pipeline, name, guided, options)
    parallelize_pipe(pipe, mesh=mesh)
    if weights != "stages":
        shard_components(pipe, guided, weights, from_files=True)
    with raising_on_all(guided, "what is not sharded could not be placed"):
        _own_weights(pipe, weights)
        if dtype is not None:
            for part in _modules(pipe):
                _cast(part, dtype)
        if guided.sequence.device_type != "cpu":
            _move(pipe, weights, guided.sequence.device_type)
    return pipe


def _own_weights(pipe: Any, weights: str) -> None:
    """Out of the files what stays of them on this rank."""
    for part in components_of(pipe).values():
        for parameter in part.parameters():
            if weights == "stages" and not parameter.is_meta:
                parameter.data = parameter.data.clone()
            elif weights == "fsdp" and not isinstance(parameter, DTensor):
                # Small ones, out of the file: there they are not aligned, and kernels then add in another order.
                parameter.data = parameter.data.clone()


def _move(pipe: Any, weights: str, device: str) -> None:
    for part in _modules(pipe):
        if weights == "stages":
            for held in (*part.parameters(), *part.buffers()):
                held.data = held.data if held.is_meta else held.data.to(device)
        elif part not in components_of(pipe).values():
            part.to(device)


_INSTEAD = {
    "device_map": "each rank has a device of its own, that of the mesh.",
    "torch_dtype": "it is dtype=.",
    "quantization_config": "FSDP2 and tensor parallelism shard plain weights.",
}


def _modules(pipe: Any) -> list[nn.Module]:
    return [uncompiled(part) for part in pipe.components.values() if isinstance(uncompiled(part), nn.Module)]


def _loaded_on_all(pipeline: Any, name: str | Path, mesh: GuidedMesh, options: dict[str, Any]) -> Any:
    """Return the pipeline in the dtypes of its files, each weight mapped from its file; or raise on all ranks."""
    download_once_per_node(pipeline, name, mesh, options)
    with raising_on_all(mesh, f"{name} could not be loaded (of a file that is incomplete: download it again)"):
        folder = folder_of(pipeline, name, options)
        _require_safetensors(folder, given=set(options))
        files = _files_in(folder, options.get("variant"))
        with _nothing_filled():
            pipe = pipeline.from_pretrained(folder, dtype=_dtypes_of(files), low_cpu_mem_usage=True, **options)
        for path in files:
            component = uncompiled(pipe.components.get(path.parent.name))
            if isinstance(component, nn.Module):
                _map_weights_apart(component, path)
    return pipe


@contextmanager
def _nothing_filled() -> Iterator[None]:
    """``torch.empty`` without the values that deterministic algorithms write into it.

    Each weight is allocated before it goes to the meta device. If it was written to, its pages are in memory, and malloc may keep them.
    """
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]


_SAVE = "Pipeline.from_pretrained(...).save_pretrained(folder)"


def _require_safetensors(folder: Path, given: set[str]) -> None:
    """diffusers and transformers would look for other files, and name those as missing; components in ``given`` are not loaded."""
    for config in sorted(folder.glob("*/config.json")):
        part, known = config.parent, json.loads(config.read_text())
        # Neither is in the configs of tokenizers.
        if part.name in given or not ({"_class_name", "architectures"} & set(known)):
            continue
        names = sorted(path.name for path in part.glob("*.safetensors"))
        if not names:
            others = sorted(path.name for path in part.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".ckpt"))
            way_out = "Download it again."
            if others:
                way_out = f"It has {others[0]}: save it anew, {_SAVE}."
            raise FileNotFoundError(f"{part} has no safetensors file. {way_out}")
        if any(re.search(r"-\d+-of-\d+", name) for name in names) and not list(part.glob("*.safetensors.index*.json")):
            raise FileNotFoundError(
                f"{part} has {names[0]} and others, and no index of them (*.safetensors.index.json). Download it again."
            )


def _files_in(folder: Path, variant: str | None) -> list[Path]:
    """Weights of components; of a component that has it, of this variant alone."""
    by_variant: dict[Path, dict[str | None, list[Path]]] = {}
    # The Hub's cache has links in folders of components.
    for path in sorted(folder.glob("*/*.safetensors")):
        # diffusion_pytorch_model.fp16-00001-of-00002.safetensors
        parts = path.name.split(".")
        which = parts[1].split("-")[0] if len(parts) > 2 else None
        by_variant.setdefault(path.parent, {}).setdefault(which, []).append(path)
    chosen = [found.get(variant) or found.get(None) or [] for found in by_variant.values()]
    return [path for paths in chosen for path in paths]


def _dtypes_of(files: list[Path]) -> dict[str, torch.dtype]:
    """By component, what most of its floating-point weights are. Loaded so, they are mapped; otherwise each rank would copy all."""
    from safetensors import safe_open

    counted: dict[str, Counter[torch.dtype]] = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118  it is no dict
                kind = _DTYPES.get(file.get_slice(key).get_dtype())
                if kind is not None:
                    counted.setdefault(path.parent.name, Counter())[kind] += 1
    return {**{name: kinds.most_common(1)[0][0] for name, kinds in counted.items()}, "default": torch.float32}


# Bytes at each end of a weight by which it is compared with its file.
_END = 4096


def _map_weights_apart(component: nn.Module, path: Path) -> None:
    """Give each weight of ``component`` that stands in the file ``path`` a mapping of its own.

    A mapping goes, with all pages of it that were read, once no tensor refers to it. The weights of a file that was loaded share one, so what
    was read of them would stay until the last one is sharded. Nothing is read here but the ends of each weight; what the loader changed
    or renamed keeps the mapping that it has.
    """
    from safetensors import safe_open

    parameters = dict(component.named_parameters(remove_duplicate=False))
    with safe_open(path, framework="pt") as file:
        names = [key for key in file.keys() if key in parameters]  # noqa: SIM118  it is no dict
    for name in names:
        with safe_open(path, framework="pt") as file:
            weight: Tensor = file.get_tensor(name)
        if _have_equal_ends(parameters[name].data, weight):
            parameters[name].data = weight


def _have_equal_ends(x: Tensor, y: Tensor) -> bool:
    if x.is_meta or (x.dtype, x.shape, x.stride()) != (y.dtype, y.shape, y.stride()) or not y.is_contiguous():
        return False
    x_bytes, y_bytes = x.view(-1).view(torch.uint8), y.view(-1).view(torch.uint8)
    return torch.equal(x_bytes[:_END], y_bytes[:_END]) and torch.equal(x_bytes[-_END:], y_bytes[-_END:])


def _cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Each rank its part; but what the class keeps in float32."""
    kept = set(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
    # transformers means float16 by the other list.
    if dtype == torch.float16 or not hasattr(module, "_keep_in_fp32_modules_strict"):
        kept |= set(getattr(module, "_keep_in_fp32_modules", None) or ())
    for at, owner in module.named_modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            if parameter.is_floating_point() and not kept & {*at.split("."), name}:
                owner.register_parameter(name, nn.Parameter(parameter.detach().to(dtype), requires_grad=False))
