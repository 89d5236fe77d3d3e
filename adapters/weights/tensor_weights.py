"""Weights sharded by tensor parallelism: the method ``"tensor"`` of shard_weights, and the checks of calls
with such weights.

``features.py`` finds :data:`FEATURE`; ``shard.py`` calls the method. The sharding itself is in
``para_core/weights/tensor.py``. Tests: tests/weights/test_tensor.py.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed import get_process_group_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import OffloadPolicy

from para_core.adapters.adapter import Adapter
from para_core.adapters.inspect.diffusers_mesh import mesh_of_diffusers
from para_core.adapters.refusal import refusal
from para_core.adapters.registry import tensor_plan_for
from para_core.adapters.weights.feature import Feature, ShardMethod
from para_core.cache.options import CacheOptions
from para_core.distributed.mesh import TENSOR_DIM, AnyMesh, GuidedMesh
from para_core.instance.modules import is_compiled
from para_core.instance.private_class import original_class
from para_core.weights.tensor import gathered_tensors, shard_new_loras, shard_tensors, tensor_mesh
from para_core.weights.tensor_checks import check_tensor_plan
from para_core.weights.tensor_plan import TensorPlan


def _check_tensor_mesh(mesh: GuidedMesh, has_transformer: bool) -> None:
    if mesh.tensor.group is None:
        raise ValueError(
            "method='tensor' needs a mesh with a dim 'tensor' of more than one rank: "
            "init_context_parallel_mesh(max_tensor_dim_size=n), where n divides both the number of ranks "
            "and the transformer's number of heads. method='fsdp' takes any number of ranks."
        )


def _check_tensor_component(name: str, module: nn.Module, ranks: AnyMesh, adapter: Adapter | None) -> None:
    plan = _require_tensor_plan(module, f"pipe.{name}", adapter)
    check_tensor_plan(module, plan, ranks.tensor.size if isinstance(ranks, GuidedMesh) else 1)


def _require_tensor_plan(module: nn.Module, name: str, adapter: Adapter | None) -> TensorPlan:
    """Return the tensor plan of ``module``. Raise ``ValueError``, which names it ``name``, if there is none."""
    plan = tensor_plan_for(module, adapter)
    if plan is None:
        raise ValueError(
            f"there is no tensor plan for {name}, a {original_class(module).__name__}. method='fsdp' shards "
            "any model; a plan is parallelize_pipe(..., adapter=Adapter(..., tensor=TensorPlan(...)))."
        )
    return plan


def _make_tensor_mesh(mesh: GuidedMesh) -> DeviceMesh:
    """Return a mesh of the ranks along ``tensor``, which :func:`_check_tensor_mesh` has found to have a group."""
    group: Any = mesh.tensor.group
    tensor: DeviceMesh = DeviceMesh.from_group(group, mesh.sequence.device_type, mesh_dim_names=(TENSOR_DIM,))
    return tensor


def _shard_by_plan(
    module: nn.Module, mesh: DeviceMesh, offload_policy: OffloadPolicy | None, adapter: Adapter | None
) -> None:
    shard_tensors(module, _require_tensor_plan(module, "a component", adapter), mesh)


def check_tensor_ranks(module: nn.Module, name: str, called: Any, mesh: GuidedMesh) -> None:
    """Refuse a transformer whose heads are sharded over other ranks than those along the mesh dim tensor."""
    group, sharded = mesh.tensor.group, tensor_mesh(module) or mesh_of_diffusers(module)
    sharing = [] if sharded is None else sharded.mesh.flatten().tolist()
    ranks = [] if group is None else get_process_group_ranks(group)
    if sharing != ranks:
        raise RuntimeError(
            f"{name} has its heads sharded over {sharing or 'no'} ranks, and the mesh dim 'tensor' of this "
            f"rank has {ranks or 'none'}. Call parallelize_pipe(pipe, mesh=mesh, weights='tensor') with a "
            "mesh of init_context_parallel_mesh(max_tensor_dim_size=...). For a model that diffusers' "
            "TensorParallelConfig(mesh=mesh['tensor']) sharded, pass the same mesh without weights=."
        )


def check_cached_graph_of_tensors(module: nn.Module, name: str, called: Any, options: CacheOptions) -> None:
    """Refuse a cache in a model that is compiled as one graph and whose heads are sharded over tensor ranks."""
    is_sharded = tensor_mesh(module) is not None or mesh_of_diffusers(module) is not None
    if is_sharded and (called is not module or is_compiled(module)):
        raise refusal(
            RuntimeError,
            f"{name} is compiled as one graph, with a cache, and its weights are sharded (weights='tensor'). "
            "The branches of torch.cond support no DTensors.",
            f"Compile its blocks: {name}.compile_repeated_blocks(fullgraph=True); or leave out one of the three.",
        )


FEATURE = Feature(
    mesh_dim=TENSOR_DIM,
    method=ShardMethod(
        check_mesh=_check_tensor_mesh,
        check_component=_check_tensor_component,
        make_mesh=_make_tensor_mesh,
        shard=_shard_by_plan,
        mesh_of=tensor_mesh,
        gather_layers=gathered_tensors,
        shard_loras=shard_new_loras,
        can_move=True,
    ),
    call_checks=(check_tensor_ranks,),
    cached_call_checks=(check_cached_graph_of_tensors,),
)
