"""Load a pipeline on all ranks of a node at once; each rank keeps its shard of the weights.

``fleet/build.py`` calls :func:`from_pretrained_sharded`, as users do. The sharding itself is in
``adapters/weights/shard.py``, and the download before it in ``download.py``; this file only makes the weights
memory-mapped before it, and casts, moves and quantizes them after it. Tests: tests/weights/test_load.py.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from para_core.adapters.agree.options import agree_on_options
from para_core.adapters.default_mesh import Mesh, guided_mesh_for
from para_core.adapters.inspect.components import components_with_blocks
from para_core.adapters.parallel.download import download_once_per_node, folder_of
from para_core.adapters.parallel.parallelize import parallelize_pipe
from para_core.adapters.registry import transformers_of
from para_core.adapters.weights.feature import Method
from para_core.adapters.weights.features import require_method, require_quantizer, shard_methods
from para_core.adapters.weights.shard import prepare_sharding
from para_core.adapters.weights.sharded_component import is_distributed
from para_core.declared_options import join_words
from para_core.distributed.agree import together
from para_core.distributed.create_mesh import init_context_parallel_mesh
from para_core.distributed.mesh import check_process_group
from para_core.instance.modules import uncompiled
from para_core.option_values import Quantize, check_quantize_fits

# Maps the names of dtypes in the header of a safetensors file to dtypes of PyTorch.
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def from_pretrained_sharded(
    pipeline: Any,
    name: str | Path,
    *,
    mesh: Mesh | None = None,
    weights: Method | Literal["stages"] = "fsdp",
    quantize: Quantize | None = None,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> Any:
    """Load a pipeline, shard its weights and parallelize it, with host memory for one copy of the weights per
    node.

    Without ``quantize`` the result equals that of ``pipeline.from_pretrained(name)`` and
    ``parallelize_pipe(pipe, mesh=mesh, weights=weights)``. Every rank of the mesh must call this function.
    Each rank memory-maps the safetensors files, so that ranks of a node share their pages, reads its shard of
    each weight, and unmaps the weight. Weights are cast to ``dtype`` after sharding.

    Args:
        pipeline (`type[DiffusionPipeline]`): Pipeline class of diffusers.
        name (`str` or `Path`): Folder, or repository on the Hub, with safetensors weights. One rank of each
            node downloads it; the others wait for it without a time limit.
        mesh (`DeviceMesh` or `ProcessGroup`, *optional*): As in :func:`parallelize_pipe`. Defaults to
            ``init_context_parallel_mesh()`` of all ranks.
        weights (`"fsdp"`, `"tensor"` or `"stages"`, defaults to `"fsdp"`): As in :func:`shard_weights`.
            ``"stages"`` needs a mesh with a ``pipe`` dim; a rank then reads only the transformer blocks of
            its own stage.
        quantize (`"int8"` or `"fp8"`, *optional*): Quantizes the linear layers of the transformers with
            torchao, with one scale per weight row. ``"fsdp"`` takes only ``"int8"``, which is applied before
            sharding, from the mapped files; the other methods quantize after sharding, so that no rank holds
            all weights. **Not exact.**
        dtype (`torch.dtype`, *optional*): Dtype of floating-point weights, except those that their class
            keeps in float32. Defaults to the dtypes of the files.
        **options: Other arguments of ``from_pretrained``. ``device_map``, ``torch_dtype`` and
            ``quantization_config`` are refused.

    Returns:
        The parallel pipeline, with all components on the device of the mesh.

    Raises:
        TypeError: If the pipeline is not supported.
        ImportError: If ``quantize`` needs torchao and it is not installed.
        ValueError: If an option is invalid or does not fit the mesh, or the weights differ between ranks.
        RuntimeError: If there is no process group; or, on every rank, if a file is missing, incomplete or
            corrupt on one rank, or a download fails.
    """
    check_process_group("from_pretrained_sharded")
    compared = {"weights": weights, "quantize": quantize, "dtype": dtype}
    with agree_on_options("from_pretrained_sharded", mesh, compared):
        if weights not in (*shard_methods(), "stages"):
            expected = join_words(map(repr, (*shard_methods(), "stages")))
            raise ValueError(f"weights is {weights!r}; expected {expected}.")
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
    # With stages, weights are not sharded: each rank holds whole blocks.
    method = None
    if weights != "stages":
        method = require_method(weights)
    if method is not None:
        method.check_mesh(guided, True)
    if quantize is not None:
        check_quantize_fits(quantize, weights)
        with together(guided, "weights cannot be quantized"):
            require_quantizer().check_scheme(quantize)
    download_once_per_node(pipeline, name, guided, options)
    with together(guided, f"{name} could not be loaded (download incomplete files again)"):
        pipe = _load_mapped(pipeline, folder_of(pipeline, name, options), options)
    parallelize_pipe(pipe, mesh=mesh)
    quantizes_first = method is not None and method.quantizes_first
    if quantize is not None and quantizes_first:
        with together(guided, "weights could not be quantized"):
            _quantize_mapped(pipe, quantize, dtype)
    if method is not None:
        prepare_sharding(pipe, guided, weights, compare_values=False).run()
    with together(guided, "the components that are not sharded could not be placed"):
        if method is None or method.keeps_bits:
            _copy_from_files(pipe)
        if dtype is not None:
            for module in _modules(pipe):
                _cast_weights(module, dtype)
        if guided.sequence.device_type != "cpu":
            _move_unsharded(pipe, guided.sequence.device_type)
        if quantize is not None and not quantizes_first:
            require_quantizer().quantize(pipe, quantize)
    return pipe


def _load_mapped(pipeline: Any, folder: Path, options: Mapping[str, Any]) -> Any:
    """Return the pipeline in ``folder``, with weights that are memory-mapped from its files, each by itself."""
    _check_safetensors(folder, passed=set(options))
    files = _files_in(folder, options.get("variant"))
    with _uninitialized_memory():
        pipe = pipeline.from_pretrained(folder, dtype=_dtypes_of(files), low_cpu_mem_usage=True, **options)
    for path in files:
        component = uncompiled(pipe.components.get(path.parent.name))
        if isinstance(component, nn.Module):
            _map_each_weight(component, path)
    return pipe


def _quantize_mapped(pipe: Any, scheme: Quantize, dtype: torch.dtype | None) -> None:
    """Quantize the transformers of ``pipe``, before FSDP2 shards them, as if they had been cast to ``dtype``.

    None keeps the dtypes of the files. The scale of a row depends on the dtype, so the cast cannot come after.
    """
    if dtype is not None:
        for transformer in transformers_of(pipe).values():
            require_quantizer().cast_linears(transformer, dtype, _kept_in_float32(transformer, dtype))
    require_quantizer().quantize(pipe, scheme, gatherable=True)


def _copy_from_files(pipe: Any) -> None:
    """Clone the weights that stay unsharded on this rank, so that they no longer refer to the memory-mapped
    files.

    Tensors in a file are not aligned as those that torch allocates, and kernels may sum unaligned data in
    another order. Clones are aligned, so the result has the bits of a pipeline that was loaded in the usual
    way.
    """
    for part in components_with_blocks(pipe).values():
        for parameter in part.parameters():
            if not parameter.is_meta and not isinstance(parameter, DTensor):
                parameter.data = parameter.data.clone()


def _move_unsharded(pipe: Any, device: str) -> None:
    """Move the weights of ``pipe`` that are not sharded to ``device``; sharded components are there already."""
    for module in _modules(pipe):
        if is_distributed(module):
            continue
        if any(x.is_meta for x in module.parameters()):
            # A transformer in stages refuses to() and the weights of its freed blocks cannot move.
            for x in (*module.parameters(), *module.buffers()):
                if not x.is_meta:
                    x.data = x.data.to(device)
        else:
            module.to(device)


_INSTEAD = {
    "device_map": "each rank has its own device, that of the mesh.",
    "torch_dtype": "use dtype=.",
    "quantization_config": "FSDP2 and tensor parallelism shard plain weights; quantize= quantizes the transformers.",
}


def _modules(pipe: Any) -> list[nn.Module]:
    return [uncompiled(part) for part in pipe.components.values() if isinstance(uncompiled(part), nn.Module)]


@contextmanager
def _uninitialized_memory() -> Iterator[None]:
    """Turn off ``torch.utils.deterministic.fill_uninitialized_memory`` inside the ``with`` block.

    Loading allocates each weight with ``torch.empty`` before it moves it to the meta device. Filling that
    memory would make its pages resident, and malloc may keep them.
    """
    before = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = before  # type: ignore[attr-defined]


_SAVE = "Pipeline.from_pretrained(...).save_pretrained(folder)"


def _check_safetensors(folder: Path, passed: set[str]) -> None:
    """Raise ``FileNotFoundError`` if a model in ``folder`` lacks safetensors files, or the index of several
    such files.

    Without this check diffusers and transformers try other formats, and their error names a file of these
    formats. ``passed`` are the components that the caller passes to ``from_pretrained``, so they are not
    loaded.
    """
    for config in sorted(folder.glob("*/config.json")):
        part, settings = config.parent, json.loads(config.read_text())
        # The config of a model has one of these entries; the config of a tokenizer has neither and is
        # skipped.
        if part.name in passed or not settings.keys() & {"_class_name", "architectures"}:
            continue
        names = sorted(path.name for path in part.glob("*.safetensors"))
        if not names:
            others = sorted(
                path.name for path in part.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".ckpt")
            )
            way_out = "Download it again."
            if others:
                way_out = f"It has {others[0]}: save it again, {_SAVE}."
            raise FileNotFoundError(f"{part} has no safetensors file. {way_out}")
        if any(re.search(r"-\d+-of-\d+", name) for name in names) and not list(
            part.glob("*.safetensors.index*.json")
        ):
            raise FileNotFoundError(
                f"{part} has {names[0]} and others, and no index of them (*.safetensors.index.json). Download it again."
            )


def _files_in(folder: Path, variant: str | None) -> list[Path]:
    """Return the safetensors files of all components: those of ``variant`` if there are any, or those without one."""
    by_variant: dict[Path, dict[str | None, list[Path]]] = {}
    # Paths are not resolved: in the Hub's cache they are links to blobs, whose names tell neither part nor
    # variant.
    for path in sorted(folder.glob("*/*.safetensors")):
        # The variant is the part after the first dot: "fp16" in
        # diffusion_pytorch_model.fp16-00001-of-00002.safetensors.
        parts = path.name.split(".")
        which = None
        if len(parts) > 2:
            which = parts[1].split("-")[0]
        by_variant.setdefault(path.parent, {}).setdefault(which, []).append(path)
    return [path for paths in by_variant.values() for path in paths.get(variant) or paths.get(None) or []]


def _dtypes_of(files: list[Path]) -> dict[str, torch.dtype]:
    """Return the most common floating-point dtype of each component's weights; float32 under the key
    ``"default"``.

    ``from_pretrained`` maps weights of the requested dtype from the file and copies the others.
    """
    from safetensors import safe_open

    counted: dict[str, Counter[torch.dtype]] = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118  it is not a dict
                kind = _DTYPES.get(file.get_slice(key).get_dtype())
                if kind is not None:
                    counted.setdefault(path.parent.name, Counter())[kind] += 1
    return {**{name: kinds.most_common(1)[0][0] for name, kinds in counted.items()}, "default": torch.float32}


# Number of bytes at each end of a weight that are compared with the file, to see whether the loader changed
# the weight: one memory page of most hosts, because reading a byte makes the whole page resident.
_END = 4096


def _map_each_weight(component: nn.Module, path: Path) -> None:
    """Replace each weight of ``component`` by a separate memory mapping of the file ``path``.

    diffusers and transformers map each file once, so all pages read from it stay resident until the last
    weight of the file is sharded. A separate mapping, with the pages read from it, is freed with its weight.
    Weights that the loader renamed keep the mapping that they have, and so do those that it changed: their
    dtype, shape, strides or their first or last ``_END`` bytes differ from the file.
    """
    from safetensors import safe_open

    parameters = dict(component.named_parameters(remove_duplicate=False))
    with safe_open(path, framework="pt") as file:
        names = [key for key in file.keys() if key in parameters]  # noqa: SIM118  it is not a dict
    for name in names:
        with safe_open(path, framework="pt") as file:
            weight: Tensor = file.get_tensor(name)
        x = parameters[name].data
        same_layout = (x.dtype, x.shape, x.stride()) == (weight.dtype, weight.shape, weight.stride())
        if not x.is_meta and same_layout and weight.is_contiguous():
            before, mapped = (tensor.view(-1).view(torch.uint8) for tensor in (x, weight))
            if torch.equal(before[:_END], mapped[:_END]) and torch.equal(before[-_END:], mapped[-_END:]):
                parameters[name].data = weight


def _cast_weights(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast the floating-point weights and stored buffers of ``module``, as ``from_pretrained`` does, except
    those that its class keeps in float32.

    A weight or buffer that several modules share, such as the embedding of T5, stays shared.
    """
    kept = _kept_in_float32(module, dtype)
    # By id of the weight before. A weight is not freed while a module still has it to look up.
    cast: dict[int, nn.Parameter] = {}
    for path, owner in module.named_modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            castable = parameter.is_floating_point() and parameter.dtype != dtype
            if castable and not kept & {*path.split("."), name}:
                if id(parameter) not in cast:
                    cast[id(parameter)] = nn.Parameter(parameter.detach().to(dtype), requires_grad=False)
                owner.register_parameter(name, cast[id(parameter)])
    # Buffers that are not in the files are made by the class, in the dtype that it needs.
    stored = module.state_dict().keys()
    buffers = list(module.named_buffers(remove_duplicate=False))
    cast_buffers: dict[int, Tensor] = {}
    for path, buffer in buffers:
        if path in stored and buffer.is_floating_point() and not kept & {*path.split(".")}:
            if id(buffer) not in cast_buffers:
                cast_buffers[id(buffer)] = buffer.to(dtype)
            owner_path, _, name = path.rpartition(".")
            module.get_submodule(owner_path).register_buffer(name, cast_buffers[id(buffer)])


def _kept_in_float32(module: nn.Module, dtype: torch.dtype) -> set[str]:
    """Return the names of modules and weights that the class of ``module`` keeps in float32."""
    kept = set(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
    # transformers applies this list for float16 only; diffusers, which has no strict list, for every dtype.
    if dtype == torch.float16 or not hasattr(module, "_keep_in_fp32_modules_strict"):
        kept |= set(getattr(module, "_keep_in_fp32_modules", None) or ())
    return kept
