"""Sharding the weights of a pipeline over ranks, and putting them together again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import OffloadPolicy

from para_core.adapters.mesh_choice import Mesh, guided_mesh_for
from para_core.adapters.one_call import mesh_of
from para_core.adapters.refusals import When, cases_of, refuse
from para_core.adapters.supported import tensor_plan_for, transformers_of
from para_core.adapters.weights.components import blocks_of, components_of
from para_core.instance import Order, original_class, unwrap, wrap_method
from para_core.mesh import MESH_DIMS, TENSOR_DIM, GuidedMesh
from para_core.weights.fsdp import gather_blocks, is_sharded, shard_blocks
from para_core.weights.group import sequence_ranks, weights_mesh
from para_core.weights.tensor import gather_tensors, shard_tensors, tensor_mesh

Pipeline = TypeVar("Pipeline")
Method = Literal["fsdp", "tensor"]
METHODS: tuple[Method, ...] = ("fsdp", "tensor")

_KEY = "weights"
# Methods of diffusers and transformers that put a LoRA into a model, or take one out of it.
_LORA = ("load_lora_adapter", "add_adapter", "load_adapter", "fuse_lora", "unfuse_lora", "unload_lora")


def shard_weights(
    pipe: Pipeline,
    mesh: Mesh | GuidedMesh | None = None,
    *,
    method: Method = "fsdp",
    components: Sequence[str] | None = None,
    offload_policy: OffloadPolicy | None = None,
) -> Pipeline:
    """Hold the weights of this one pipeline's transformers and text encoders once on several ranks, not once on each.

    ``"fsdp"``, PyTorch's FSDP2: a rank of the sequence holds 1 / n of each block, and gathers a block just before it runs, the next one
    while it computes. Bit-equal to replicated weights.

    ``"tensor"``, PyTorch's tensor parallelism: a rank along the mesh dim ``tensor`` holds and computes 1 / n of the heads and hidden units of
    each block of the transformers; nothing is gathered, and sums over ranks come in another order. What adapters or diffusers
    (``_tp_plan``) name is sharded; text encoders are not: ``"fsdp"`` shards those, in a second call.

    For inference: parameters take no gradients afterwards. Goes with :func:`parallelize_pipe` and :func:`apply_cache_on_pipe`, in any
    order; :func:`unshard_weights` undoes it. Load a LoRA before (``"tensor"``: fuse it). Leave ``pipe.to(device)`` out: what is sharded
    goes to the device of the mesh block by block; move the rest (``pipe.vae.to(device)``).

    Args:
        pipe: every rank has loaded the same weights.
        mesh: as for :func:`parallelize_pipe`; its sequence ranks share weights, those along ``batch`` have copies; for
            ``"tensor"``, with that dim. Or for ``"fsdp"`` another DeviceMesh without these dims, as FSDP2 takes it: of one dim, or
            ``replicate × shard``; all of its ranks then call the pipeline equally often. Left out: the mesh on which the pipeline is
            parallel, or as for :func:`parallelize_pipe`.
        method: ``"fsdp"`` or ``"tensor"``.
        components: names; left out: all that the method can shard.
        offload_policy: ``torch.distributed.fsdp.CPUOffloadPolicy()`` keeps each rank's part of ``"fsdp"`` in host memory.

    Returns:
        ``pipe``.

    Raises:
        TypeError, ValueError: a component cannot be sharded, or the mesh does not fit.
        RuntimeError: as for :func:`parallelize_pipe`.
    """
    if method not in METHODS:
        raise ValueError(f"method is {method!r}; expected 'fsdp' or 'tensor'.")
    if method == "tensor" and offload_policy is not None:
        raise ValueError("offload_policy is FSDP2's; leave it out with method='tensor', or give method='fsdp'.")
    refuse(When.SHARD, *cases_of(pipe))
    shard_components(pipe, mesh, method, components, offload_policy)
    return pipe


def shard_components(
    pipe: Any,
    mesh: Mesh | GuidedMesh | None,
    method: Method,
    components: Sequence[str] | None = None,
    offload_policy: OffloadPolicy | None = None,
    done_with: Callable[[Tensor], None] | None = None,
) -> None:
    """:func:`shard_weights` of a pipeline that is not refused.

    Args:
        done_with: called with each whole weight once this rank has its part.
    """
    if components is None and method == "tensor":
        components = list(transformers_of(pipe))
    chosen = components_of(pipe, components)
    plans = {name: tensor_plan_for(module) for name, module in chosen.items()} if method == "tensor" else {}
    unknown = [name for name, plan in plans.items() if plan is None]
    if unknown:
        raise ValueError(
            f"there is no tensor plan for pipe.{unknown[0]}, a {original_class(chosen[unknown[0]]).__name__}. method='fsdp' shards any model; "
            "a plan is Adapter(..., tensor=TensorPlan(...))."
        )
    shared = _tensor_ranks(mesh, pipe) if method == "tensor" else _sequence_ranks(mesh, pipe)
    unshard_weights(pipe, components=list(chosen))
    for name, module in chosen.items():
        plan = plans.get(name)
        if plan is None:
            shard_blocks(module, blocks_of(module), shared, offload_policy=offload_policy, done_with=done_with)
        else:
            shard_tensors(module, plan, shared, done_with=done_with)
        _refuse_lora(module)


def _tensor_ranks(mesh: Mesh | GuidedMesh | None, pipe: Any) -> DeviceMesh:
    guided = guided_mesh_for(mesh_of(pipe) if mesh is None else mesh, pipe)
    if guided.tensor.group is None:
        raise ValueError(
            "method='tensor' needs a mesh with a dim 'tensor' of more than one rank: "
            "init_context_parallel_mesh(max_tensor_dim_size=2)."
        )
    found: DeviceMesh = DeviceMesh.from_group(
        guided.tensor.group, guided.sequence.device_type, mesh_dim_names=(TENSOR_DIM,)
    )
    return found


def _sequence_ranks(mesh: Mesh | GuidedMesh | None, pipe: Any) -> DeviceMesh:
    """What FSDP2 takes for ``mesh``."""
    if isinstance(mesh, DeviceMesh) and not set(mesh.mesh_dim_names or ()) & set(MESH_DIMS):
        return mesh
    guided = guided_mesh_for(mesh_of(pipe) if mesh is None else mesh, pipe)
    ranks = sequence_ranks(guided.sequence)
    if len(ranks) == 1:
        raise ValueError(
            f"the mesh has {guided.batch.size} × 1 ranks (batch × sequence), and weights are shared by the sequence ranks: there is "
            "nothing to share. Give fewer ranks to 'batch' (max_batch_dim_size=1)."
        )
    return weights_mesh(ranks, guided.sequence.device_type)


def unshard_weights(pipe: Pipeline, *, components: Sequence[str] | None = None) -> Pipeline:
    """Undo :func:`shard_weights`: every rank holds all weights again. All ranks call it; returns ``pipe``."""
    for module in components_of(pipe, components).values():
        if is_sharded(module):
            gather_blocks(module)
        if tensor_mesh(module) is not None:
            gather_tensors(module)
        unwrap(module, _KEY)
    return pipe


def _refuse_lora(module: nn.Module) -> None:
    for method in _LORA:
        if hasattr(module, method):
            wrap_method(module, method, _KEY, _too_late, order=Order.PLAN)


def _too_late(call: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        f"the weights of this {original_class(module).__name__} are sharded, and a LoRA that is loaded, fused or removed now would not be. "
        "Call unshard_weights(pipe) first, change the LoRA, and shard_weights(pipe, mesh) again."
    )
