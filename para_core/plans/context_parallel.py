"""Functions that apply a plan to a module and remove it, with the names and arguments of diffusers and MindONE.

Users call them; nothing else in this package does. Tests: tests/plans/test_context_parallel.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from para_core.attention.attention_options import AttnOptions
from para_core.distributed.create_mesh import check_distinct_gpus, init_context_parallel_mesh
from para_core.distributed.mesh import SequenceMesh, check_process_group, one_rank, sequence_mesh
from para_core.option_values import RotateMethod
from para_core.plans.apply import apply_plan, remove_plan
from para_core.plans.plan import Plan


@dataclass(frozen=True)
class ContextParallelConfig:
    """Options of :func:`apply_context_parallel`: the mesh, and how ring ranks exchange keys and values.

    Args:
        ring_degree (`int`, *optional*): Number of ranks along ``ring``. Defaults to 1, or the size in
            ``mesh``.
        ulysses_degree (`int`, *optional*): Number of ranks along ``ulysses``. Defaults to 1, or the size in
            ``mesh``. Without ``mesh``, the product of both degrees must be the world size.
        rotate_method (`"alltoall"`, `"allgather"`, `"2d"` or `"gathered"`, defaults to `"alltoall"`):
            ``"alltoall"`` passes keys and values from rank to rank around the ring, ``"allgather"`` gathers
            them at once, ``"2d"`` arranges ranks in a grid, and gathers queries along its rows and keys along
            its columns, and ``"gathered"`` gathers all before one attention, with the bits of one process.
        mesh (`DeviceMesh`, *optional*): A mesh with the dims ``ring`` and ``ulysses`` in any order; if it has
            both, its other dims are left out. Defaults to a new mesh of all ranks.
    """

    ring_degree: int | None = None
    ulysses_degree: int | None = None
    rotate_method: RotateMethod = "alltoall"
    mesh: DeviceMesh | None = None


@dataclass(frozen=True)
class ParallelConfig:
    """A container for :class:`ContextParallelConfig`, with the class and attribute name that diffusers uses."""

    context_parallel_config: ContextParallelConfig


def apply_context_parallel(module: nn.Module, parallel_config: Any, plan: Plan | Mapping[str, Any]) -> None:
    """Run ``module`` on several ranks with its tokens sharded and gathered by ``plan``. From then on every
    rank must call the module.

    :func:`remove_context_parallel` undoes it.

    Args:
        module (`nn.Module`): The module, changed in place.
        parallel_config (`ContextParallelConfig` or `ParallelConfig`): The sizes of the mesh. The classes of
            diffusers with these names are also accepted. Their options ``ulysses_anything`` and
            ``ring_anything`` (uneven sizes) are always on, and ``convert_to_fp32`` is ignored: parts of an
            output are always merged in float32.
        plan (`Plan` or `Mapping[str, Any]`): A plan, or a diffusers ``_cp_plan``.

    Raises:
        TypeError: ``parallel_config`` or its mesh is of another type.
        ValueError: ``parallel_config`` contains tensor parallelism or an unknown ``rotate_method``, its
            degrees do not fit the ranks or its mesh, or the plan does not fit the module.
        RuntimeError: Several ranks are needed and no process group is initialised, or two ranks use the same
            GPU with NCCL.
    """
    if getattr(parallel_config, "tensor_parallel_config", None) is not None:
        raise ValueError(
            "parallel_config holds a tensor_parallel_config; sequences are sharded here, not weights. Pass a "
            "ContextParallelConfig(ring_degree=..., ulysses_degree=...)."
        )
    config = getattr(parallel_config, "context_parallel_config", parallel_config)
    if not (hasattr(config, "ring_degree") and hasattr(config, "ulysses_degree")):
        raise TypeError(
            f"parallel_config is {parallel_config!r}; expected a ContextParallelConfig, or a ParallelConfig that "
            "holds one."
        )
    rotate_method: Any = getattr(config, "rotate_method", "alltoall")
    options = AttnOptions(rotate_method=rotate_method)
    apply_plan(module, plan, _mesh_of_config(config, module), options=options)


def remove_context_parallel(module: nn.Module, plan: Plan | Mapping[str, Any] | None = None) -> None:
    """Undo :func:`apply_context_parallel`.

    Args:
        module (`nn.Module`): The module, changed in place.
        plan (`Plan` or `Mapping[str, Any]`, *optional*): Ignored; accepted because diffusers' method has it.
    """
    remove_plan(module)


def _mesh_of_config(config: Any, module: nn.Module) -> SequenceMesh:
    """Return the mesh of ``config``: the one that it holds, or a new one of all ranks.

    Raise ``ValueError`` if a degree is no positive integer, or if the degrees do not fit the mesh or the ranks.
    """
    for name in ("ring_degree", "ulysses_degree"):
        degree = getattr(config, name)
        if degree is not None and (isinstance(degree, bool) or not isinstance(degree, int) or degree < 1):
            raise ValueError(f"{name} is {degree!r}; expected a positive integer, or None for 1.")
    mesh = getattr(config, "mesh", None)
    if mesh is not None:
        return _read_mesh(mesh, config)
    device_type = next((x.device.type for x in module.parameters()), "cpu")
    return _make_mesh(config.ring_degree or 1, config.ulysses_degree or 1, device_type)


def _read_mesh(mesh: DeviceMesh, config: Any) -> SequenceMesh:
    """Return the ring × ulysses ranks of ``mesh``. Raise ``ValueError`` if the degrees of ``config`` differ."""
    # sequence_mesh() refuses what is no mesh.
    names = getattr(mesh, "mesh_dim_names", None) or ()
    wanted = tuple(name for name in names if name in ("ring", "ulysses"))
    sub_mesh = mesh
    if len(wanted) == 2 and len(names) > 2:
        # torch slices dims in the order of the mesh only.
        sub_mesh = mesh[wanted]
    sequence = sequence_mesh(sub_mesh)
    # The class of diffusers has replaced a degree that was left out by 1, so its 1 may mean nothing.
    unset = (None,) if isinstance(config, ContextParallelConfig) else (None, 1)
    degrees = {"ring": config.ring_degree, "ulysses": config.ulysses_degree}
    if any(degree not in (*unset, getattr(sequence, name).size) for name, degree in degrees.items()):
        raise ValueError(
            f"the mesh has ring × ulysses = {sequence.ring.size} × {sequence.ulysses.size}, but the degrees say "
            f"{config.ring_degree} × {config.ulysses_degree}. Leave one of both out."
        )
    check_distinct_gpus(mesh, sequence)
    return sequence


def _make_mesh(ring: int, ulysses: int, device_type: str) -> SequenceMesh:
    """Return a new mesh of all ranks. Raise ``ValueError`` if their number is not ``ring * ulysses``."""
    has_group = dist.is_available() and dist.is_initialized()
    if ring * ulysses == 1 and not has_group:
        return one_rank(device_type)
    check_process_group("apply_context_parallel")
    ranks = dist.get_world_size()
    if ring * ulysses != ranks:
        raise ValueError(
            f"ring_degree × ulysses_degree is {ring} × {ulysses} = {ring * ulysses}, but there are {ranks} ranks. "
            "Change the degrees, or pass mesh= a slice of a larger mesh."
        )
    if ranks == 1:
        return one_rank(device_type)
    return sequence_mesh(
        init_context_parallel_mesh(device_type, max_ring_dim_size=ring, max_ulysses_dim_size=ulysses)
    )
