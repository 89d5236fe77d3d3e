"""Load a pipeline on all ranks of a node at once; each rank keeps its shard of the weights.

``fleet/build.py`` calls :func:`from_pretrained_sharded`, as users do. The steps before are in files of their
own: ``download.py``, and ``mapped_files.py``, which makes the weights memory-mapped. The sharding itself is
in ``adapters/weights/shard.py``; this file casts, moves and quantizes weights after it. Tests:
tests/weights/test_load.py, tests/weights/test_quantized_files.py, tests/weights/test_tensor.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from para_core.adapters.agree.options import agree_on_options
from para_core.adapters.default_mesh import Mesh, guided_mesh_for
from para_core.adapters.parallel.download import download_once_per_node, folder_of
from para_core.adapters.parallel.mapped_files import (
    check_safetensors,
    component_folders,
    dtypes_of,
    files_in,
    map_each_weight,
    uninitialized_memory,
)
from para_core.adapters.parallel.parallelize import parallelize_pipe
from para_core.adapters.registry import transformers_of
from para_core.adapters.weights.feature import ShardMethod, WeightsMethod
from para_core.adapters.weights.features import require_method, require_quantizer, shard_methods
from para_core.adapters.weights.shard import prepare_sharding
from para_core.adapters.weights.sharded_component import is_distributed
from para_core.declared_options import join_words
from para_core.distributed.agree import together
from para_core.distributed.create_mesh import init_context_parallel_mesh
from para_core.distributed.mesh import GuidedMesh, check_process_group
from para_core.instance.modules import uncompiled
from para_core.option_values import Quantize, check_quantize_fits

# What stands in the place of arguments of from_pretrained that are refused.
_INSTEAD = {
    "device_map": "each rank has its own device, that of the mesh.",
    "torch_dtype": "use dtype=.",
    "quantization_config": "FSDP2 and tensor parallelism shard plain weights; quantize= quantizes the transformers.",
    "low_cpu_mem_usage": "weights are memory-mapped from the files.",
}


def from_pretrained_sharded(
    pipeline: Any,
    name: str | Path,
    *,
    mesh: Mesh | None = None,
    weights: WeightsMethod | Literal["stages"] = "fsdp",
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
        **options: Other arguments of ``from_pretrained``, also components, such as ``vae=``, which keep their
            dtype. ``device_map``, ``torch_dtype``, ``quantization_config`` and ``low_cpu_mem_usage`` are
            refused.

    Returns:
        The parallel pipeline, with all components on the device of the mesh.

    Raises:
        TypeError: If the pipeline is not supported.
        ImportError: If ``quantize`` needs torchao and it is not installed.
        ValueError: If an option is invalid or does not fit the mesh, or, with ``"fsdp"`` and ``"tensor"``,
            the weights have other names, shapes or dtypes on another rank. Those of stages are not compared.
        RuntimeError: If there is no process group; or, on every rank, if a file is missing, incomplete or
            corrupt on one rank, or a download fails.
    """
    check_process_group("from_pretrained_sharded")
    compared = {"weights": weights, "quantize": quantize, "dtype": dtype}
    with agree_on_options("from_pretrained_sharded", mesh, compared):
        _check_values(weights, dtype, options)
    if mesh is None:
        # Not the default mesh of parallelize_pipe, which is predicted for a pipeline that is loaded.
        mesh = init_context_parallel_mesh()
    guided = guided_mesh_for(mesh, None)
    method = _require_method_that_fits(weights, quantize, guided)
    download_once_per_node(pipeline, name, guided, options)
    with together(guided, f"{name} could not be loaded (download incomplete files again)"):
        pipe = _load_mapped(pipeline, folder_of(pipeline, name, options), options)
        loaded = _modules(pipe, passed=options.keys())
    # Stages are made here: they free the blocks of other ranks before a rank has read them.
    parallelize_pipe(pipe, mesh=mesh)
    quantizes_first = method is not None and method.quantizes_first
    if quantize is not None and quantizes_first:
        with together(guided, "weights could not be quantized"):
            _quantize_mapped(pipe, quantize, dtype, loaded)
    # Cast and move only parts of the weights, after sharding: a rank has no room for all of them.
    if method is not None:
        prepare_sharding(pipe, guided, weights, compare_values=False).run()
    with together(guided, "the components that are not sharded could not be placed"):
        if dtype is not None:
            for module in loaded:
                _cast_weights(module, dtype)
        if guided.sequence.device_type != "cpu":
            _move_unsharded(pipe, guided.sequence.device_type)
        elif method is None or method.keeps_bits:
            # A method that does not keep bits adds its parts in another order anyway.
            _copy_from_files(loaded)
        # Scales depend on the dtype.
        if quantize is not None and not quantizes_first:
            require_quantizer().quantize(pipe, quantize)
    return pipe


def _check_values(weights: str, dtype: object, options: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` if ``weights`` or ``dtype`` is unknown, or ``options`` have one that is refused."""
    if weights not in (*shard_methods(), "stages"):
        expected = join_words(map(repr, (*shard_methods(), "stages")))
        raise ValueError(f"weights is {weights!r}; expected {expected}.")
    if not (dtype is None or isinstance(dtype, torch.dtype)):
        raise ValueError(f"dtype is {dtype!r}; expected a dtype of torch, such as torch.bfloat16, or None.")
    for option, instead in _INSTEAD.items():
        if options.get(option) is not None:
            raise ValueError(f"from_pretrained_sharded takes no {option}: {instead}")


def _require_method_that_fits(
    weights: str, quantize: Quantize | None, mesh: GuidedMesh
) -> ShardMethod | None:
    """Return the method that shards weights as ``weights`` says; None for stages, which hold whole blocks.

    Raise ``ValueError`` if it does not fit ``mesh`` or ``quantize``, on all ranks, and ``ImportError`` if a
    rank lacks a package.
    """
    if (weights == "stages") != (mesh.pipe.size > 1):
        raise ValueError(
            f"weights is {weights!r}, and the mesh has {mesh.pipe.size} rank(s) along 'pipe': 'stages' goes with "
            "init_context_parallel_mesh(max_pipe_dim_size=...), the others with a mesh without it."
        )
    method = None
    if weights != "stages":
        method = require_method(weights)
        method.check_mesh(mesh, True)
    if quantize is not None:
        check_quantize_fits(quantize, weights)
        with together(mesh, "weights cannot be quantized"):
            require_quantizer().check_scheme(quantize)
    return method


def _load_mapped(pipeline: Any, folder: Path, options: Mapping[str, Any]) -> Any:
    """Return the pipeline in ``folder``. Its weights are memory-mapped from the files, each by itself, but
    for the components among ``options``.
    """
    folders = component_folders(folder, passed=options.keys())
    check_safetensors(folders)
    files = files_in(folders, options.get("variant"))
    with uninitialized_memory():
        pipe = pipeline.from_pretrained(
            folder, **{**options, "dtype": dtypes_of(files), "low_cpu_mem_usage": True}
        )
    for path in files:
        component = uncompiled(pipe.components.get(path.parent.name))
        if isinstance(component, nn.Module):
            map_each_weight(component, path)
    return pipe


def _quantize_mapped(
    pipe: Any, scheme: Quantize, dtype: torch.dtype | None, loaded: Sequence[nn.Module]
) -> None:
    """Quantize the transformers of ``pipe``, before FSDP2 shards them, as if those among ``loaded`` had been
    cast to ``dtype``.

    None keeps the dtypes of the files. The scale of a row depends on the dtype, so the cast cannot come after.
    """
    if dtype is not None:
        for transformer in transformers_of(pipe).values():
            if any(transformer is module for module in loaded):
                require_quantizer().cast_linears(transformer, dtype, _kept_in_float32(transformer, dtype))
    require_quantizer().quantize(pipe, scheme, gatherable=True)


def _copy_from_files(modules: Sequence[nn.Module]) -> None:
    """Clone the weights of ``modules`` that stay unsharded on this CPU, so that they no longer refer to the
    memory-mapped files.

    Tensors in a file are not aligned as those that torch allocates, and kernels may sum unaligned data in
    another order. Clones are aligned, so the result has the bits of a pipeline whose weights were copied or
    cast.
    """
    for module in modules:
        for x in (*module.parameters(), *module.buffers()):
            if not x.is_meta and not isinstance(x, DTensor):
                x.data = x.data.clone()


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


def _modules(pipe: Any, passed: Collection[str] = ()) -> list[nn.Module]:
    """Return the components of ``pipe`` that are modules, without those named in ``passed``."""
    parts = [uncompiled(part) for name, part in pipe.components.items() if name not in passed]
    return [part for part in parts if isinstance(part, nn.Module)]


def _cast_weights(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast the floating-point weights and stored buffers of ``module`` as ``from_pretrained`` does: to
    ``dtype``, and to float32 what its class keeps so.

    A weight or buffer that several modules share, such as the embedding of T5, stays shared, in the dtype of
    its first name. Replaces parameters, so call this before the first call of a sharded module: there FSDP2
    reads the parameters of its modules again.
    """
    kept = _kept_in_float32(module, dtype)
    # By id of the weight before. A weight is not freed while a module still has it to look up.
    cast: dict[int, nn.Parameter] = {}
    for path, owner in module.named_modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            if not parameter.is_floating_point():
                continue
            if id(parameter) not in cast:
                target = torch.float32 if _names_part_of(f"{path}.{name}", kept) else dtype
                # A weight that has its dtype stays the same object, also under its other names.
                cast[id(parameter)] = parameter
                if parameter.dtype != target:
                    data = parameter.detach().to(target)
                    cast[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
            if cast[id(parameter)] is not parameter:
                owner.register_parameter(name, cast[id(parameter)])
    # Buffers that are not in the files are made by the class, in the dtype that it needs.
    stored = module.state_dict().keys()
    cast_buffers: dict[int, Tensor] = {}
    for path, buffer in list(module.named_buffers(remove_duplicate=False)):
        if path in stored and buffer.is_floating_point():
            if id(buffer) not in cast_buffers:
                target = torch.float32 if _names_part_of(path, kept) else dtype
                cast_buffers[id(buffer)] = buffer.to(target)
            owner_path, _, name = path.rpartition(".")
            module.get_submodule(owner_path).register_buffer(name, cast_buffers[id(buffer)])


def _names_part_of(path: str, names: Collection[str]) -> bool:
    """Whether one of ``names`` is a run of whole components of the dotted ``path``."""
    return any(f".{name}." in f".{path}." for name in names)


def _kept_in_float32(module: nn.Module, dtype: torch.dtype) -> set[str]:
    """Return the names of modules and weights that the class of ``module`` keeps in float32. A name may have
    several components: "gate.weight".
    """
    kept = set(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
    # transformers applies this list for float16 only; diffusers, which has no strict list, for every dtype.
    if dtype == torch.float16 or not hasattr(module, "_keep_in_fp32_modules_strict"):
        kept |= set(getattr(module, "_keep_in_fp32_modules", None) or ())
    return kept
