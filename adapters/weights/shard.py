"""Shard the weights of a pipeline over ranks, and gather them again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import OffloadPolicy

from para_core.adapters.default_mesh import Mesh, guided_mesh_for
from para_core.adapters.inspect.components import components_of
from para_core.adapters.model_checks import check_not_fsdp1, check_not_wrapped
from para_core.adapters.refusal import refusal
from para_core.adapters.registry import mesh_of, require_kind, tensor_plan_for, transformers_of
from para_core.adapters.weights.offloaded_modules import require_not_offloaded
from para_core.adapters.weights.sharded_component import (
    METHODS,
    Method,
    MoveGuard,
    ShardedComponent,
    gather_component,
    is_distributed,
    mesh_of_diffusers,
    replicated_in_blocks,
    sharded_component,
)
from para_core.distributed.agree import Record, check_consistent, first_difference, raising_on_all, signature
from para_core.distributed.mesh import MESH_DIMS, PIPE_DIM, TENSOR_DIM, GuidedMesh, SequenceMesh
from para_core.instance.private_class import original_class
from para_core.instance.record import empty_slot, fill_slot, is_filled, restored_on_failure, slot_owner
from para_core.instance.slots import Slot
from para_core.user_warnings import ParaCoreWarning, warn_user
from para_core.weights.fsdp import require_shardable, shard_mesh
from para_core.weights.group import as_ranks, sequence_ranks, timeout_of, weights_mesh
from para_core.weights.tensor_plan import TensorPlan, require_tensor_plan_fits

Pipeline = TypeVar("Pipeline")


def shard_weights(
    pipe: Pipeline,
    mesh: Mesh | GuidedMesh | None = None,
    *,
    method: Method = "fsdp",
    components: Sequence[str] | None = None,
    offload_policy: OffloadPolicy | None = None,
) -> Pipeline:
    """Shard the weights of a pipeline's transformers and text encoders. Every rank of the mesh must call this function.

    With ``"fsdp"`` (PyTorch's FSDP2) each sequence rank holds 1 / n of each block. It gathers a block just before the
    block runs, while the previous block computes. The result is bit-equal to that of replicated weights.

    With ``"tensor"`` (PyTorch's tensor parallelism) each rank along the mesh dim ``tensor`` holds and computes 1 / n of
    the heads and hidden units of each transformer block. No weight is gathered; the result differs in the order of sums
    over ranks. Only the layers that the tensor plan of an adapter or of diffusers (``_tp_plan``) names are sharded.
    Text encoders have no such plan: shard them by ``"fsdp"`` in a second call.

    Sharded weights are for inference: the parameters take no gradients. This function may be called before or after
    :func:`parallelize_pipe` and :func:`apply_cache_on_pipe`; :func:`unshard_weights` undoes it. LoRAs may be loaded,
    fused and removed at any time; once the weights are sharded, all ranks must do so together. Do not call
    ``pipe.to(device)``: sharded components move to the device of the mesh block by block. Move the other components one
    by one (``pipe.vae.to(device)``).

    Args:
        pipe (`DiffusionPipeline`): A pipeline into which every rank has loaded the same weights.
        mesh (`DeviceMesh`, `ProcessGroup` or `GuidedMesh`, *optional*): Ranks that share the weights, as for
            :func:`parallelize_pipe`. ``"fsdp"`` shards over its sequence ranks, and ranks along ``batch`` hold copies.
            ``"tensor"`` requires a mesh with a dim ``tensor``. ``"fsdp"`` also takes a `DeviceMesh` without the dims of
            this library, of one dim or of two (``replicate × shard``); all of its ranks must then call the pipeline
            equally often. Defaults to the mesh on which the pipeline is parallel, or else to the default of
            :func:`parallelize_pipe`.
        method (`"fsdp"` or `"tensor"`, *optional*, defaults to `"fsdp"`): How the weights are sharded.
        components (`Sequence[str]`, *optional*): Names of the components to shard. Defaults to all components that
            ``method`` can shard.
        offload_policy (`OffloadPolicy`, *optional*): FSDP2's policy for offloading.
            ``torch.distributed.fsdp.CPUOffloadPolicy()`` keeps this rank's part of the weights in host memory. Only for
            ``method="fsdp"``.

    Returns:
        ``pipe`` itself.

    Raises:
        TypeError: If a component cannot be sharded.
        ValueError: If a component cannot be sharded by ``method``, or the mesh does not fit.
        RuntimeError: Under the same conditions as :func:`parallelize_pipe`, for example if ranks hold different
            weights.
    """
    shard_components(pipe, mesh, method, components, offload_policy)
    return pipe


def _check_options(pipe: Any, method: Method, offload_policy: OffloadPolicy | None) -> None:
    require_kind("pipeline", pipe, "Pass the pipeline: shard_weights(pipe, mesh, components=['transformer']).")
    if method not in METHODS:
        raise ValueError(f"method is {method!r}; expected 'fsdp' or 'tensor'.")
    if offload_policy is not None and not isinstance(offload_policy, OffloadPolicy):
        raise TypeError(
            f"offload_policy is {offload_policy!r}; expected a policy of FSDP2, such as "
            "torch.distributed.fsdp.CPUOffloadPolicy(), or None."
        )
    if method == "tensor" and offload_policy is not None:
        raise ValueError("offload_policy is FSDP2's; leave it out with method='tensor', or give method='fsdp'.")


def check_shard(pipe: Any) -> None:
    """Raise ``ValueError`` if weights of ``pipe`` are spread over several devices or moved by accelerate."""
    for name, module in transformers_of(pipe).items():
        check_not_fsdp1(module, f"pipe.{name}")
        check_not_wrapped(module, f"pipe.{name}")
        refuse_several_devices(module, "the transformer")
    refuse_several_devices(pipe, "the pipeline")
    refuse_moved_weights(pipe)


def refuse_several_devices(spread: Any, what: str) -> None:
    """Refuse a transformer or pipeline that is spread over several devices."""
    devices = sorted({str(device) for device in (getattr(spread, "hf_device_map", None) or {}).values()})
    if len(devices) > 1:
        raise ValueError(
            f"{what} is spread over the devices {devices} by its device_map, for one process; here each device has its "
            "own process. Load it without device_map, and shard its weights over the devices of all ranks: "
            "parallelize_pipe(pipe, mesh=mesh, weights='fsdp')."
        )


def refuse_moved_weights(pipe: Any) -> None:
    """Refuse weights that accelerate moves to the device layer by layer."""
    for name, part in pipe.components.items():
        for path, module in part.named_modules() if isinstance(part, nn.Module) else ():
            hook = getattr(module, "_hf_hook", None)
            # Model offload (CpuOffload) is allowed: it moves whole components and leaves sharded ones alone.
            if hook is not None and type(hook).__name__ != "CpuOffload":
                raise refusal(
                    ValueError,
                    f"pipe.{name} is moved by a hook of accelerate, layer by layer ({type(hook).__name__} on "
                    f"{path or 'the component'}: enable_sequential_cpu_offload, device_map). Its weights are on the "
                    "meta device and are loaded for each call of a layer, so there is nothing to shard.",
                    "Call pipe.remove_all_hooks() first. pipe.enable_model_cpu_offload() works with sharded weights, "
                    "and shard_weights(pipe, mesh, offload_policy=torch.distributed.fsdp.CPUOffloadPolicy()) keeps "
                    "each rank's shard in host memory.",
                )


def shard_components(
    pipe: Any,
    mesh: Mesh | GuidedMesh | None,
    method: Method,
    components: Sequence[str] | None = None,
    offload_policy: OffloadPolicy | None = None,
    *,
    keep: bool = False,
    from_files: bool = False,
) -> list[nn.Module]:
    """Shard the weights like :func:`shard_weights`, and return the sharded components.

    ``keep`` skips components that are already sharded with the same settings. ``from_files`` says that the weights are
    memory-mapped from files. To read as little of them as possible, ranks then do not compare values, and no copy is
    kept for a rollback: components are not restored if sharding fails.
    """
    mesh = mesh_of(pipe) if mesh is None else mesh
    if mesh is None:
        # The default mesh is chosen for the models, so check first that they can be sharded.
        _check_options(pipe, method, offload_policy)
        _components_to_shard(pipe, method, components)
    # FSDP2 gets a DeviceMesh without any dim name of this library unchanged.
    foreign = isinstance(mesh, DeviceMesh) and not set(mesh.mesh_dim_names or ()) & {*MESH_DIMS, PIPE_DIM}
    own = mesh if method == "fsdp" and isinstance(mesh, DeviceMesh) and foreign else None
    ranks = guided_mesh_for(mesh, pipe, method) if own is None else as_ranks(own)
    # If one rank raised alone, the others would wait for it in the first call.
    with raising_on_all(ranks, "weights cannot be sharded"):
        _check_options(pipe, method, offload_policy)
        check_shard(pipe)
        chosen, plans = _components_to_shard(pipe, method, components)
        transformers = transformers_of(pipe)
        if isinstance(ranks, GuidedMesh):
            require_mesh_fits(ranks, method, of_transformer=bool(chosen.keys() & transformers.keys()))
        # Refuse the placements of parallelize_pipe. Allow accelerate's model offload, which leaves shards alone
        # (check_shard refused its other hooks), and diffusers' group offload of a transformer, which moves them.
        placed = {
            name: module
            for name, module in chosen.items()
            if is_filled(module, Slot.OFFLOADED_BLOCK) or not (name in transformers or hasattr(module, "_hf_hook"))
        }
        require_not_offloaded(placed, "Shard other components alone (components=[...]).")
        for name, module in chosen.items():
            if mesh_of_diffusers(module) is not None:
                raise ValueError(
                    f"pipe.{name} is sharded by diffusers' TensorParallelConfig already. It runs as it is: "
                    "parallelize_pipe(pipe, mesh=mesh), without weights=; to shard the rest, shard_weights(pipe, "
                    "mesh, components=['text_encoder', ...])."
                )
            plan = plans.get(name)
            if plan is None:
                require_shardable(module, replicated_in_blocks(module))
            else:
                require_tensor_plan_fits(module, plan, ranks.tensor.size if isinstance(ranks, GuidedMesh) else 1)
        # Reading one element of a memory-mapped weight loads a whole page, so values of files are not compared.
        record = {"method": method, "offload_policy": repr(offload_policy)}
        record |= _weights_record(chosen, values=not from_files)
    way_out = "Pass equal options, and load the same weights on every rank, with the same changes (LoRA, dtype)."
    check_consistent(signature(record), ranks, explain=lambda records: f"{first_difference(records)} {way_out}")
    with raising_on_all(ranks, "weights could not be sharded"):
        shared = _device_mesh(ranks, method) if own is None else own
        sharded = {
            name: ShardedComponent(module, method, shared, ranks, plans.get(name), offload_policy)
            for name, module in chosen.items()
        }
    instances = [pipe, *[part for module in chosen.values() for part in module.modules()]]
    with restored_on_failure(instances), ExitStack() as rollback:
        for component in sharded.values():
            if not (keep and component.is_applied()):
                component.replace_earlier(rollback, hold_weights=not from_files)
        with raising_on_all(ranks, "weights could not be sharded"):
            guard = _move_guard_of(pipe)
            for name, component in sharded.items():
                component.refuse_late(guard)
                if name not in transformers:
                    component.await_all_ranks()
        rollback.pop_all()
    return list(chosen.values())


def _components_to_shard(
    pipe: Any, method: Method, components: Sequence[str] | None
) -> tuple[dict[str, nn.Module], dict[str, TensorPlan]]:
    """Return the components to shard by name, and the tensor plan of each. With ``"fsdp"`` there are no plans.

    Raises:
        ValueError: If a component cannot be sharded by ``method``, or there is none to shard.
    """
    if method == "tensor" and components is None:
        components = list(transformers_of(pipe))
        if not components:
            raise ValueError(
                f"method='tensor' shards transformers, and {original_class(pipe).__name__} has none. method='fsdp' "
                "shards its text encoders."
            )
    chosen, plans = components_of(pipe, components), {}
    if not chosen:
        raise ValueError(
            f"components is {components!r}: there is nothing to shard. This {original_class(pipe).__name__} has "
            f"{', '.join(components_of(pipe)) or 'no component that can be sharded'}; None stands for all of them."
        )
    if method == "fsdp":
        return chosen, {}
    for name, module in chosen.items():
        plan = tensor_plan_for(module)
        if plan is None:
            raise ValueError(
                f"there is no tensor plan for pipe.{name}, a {original_class(module).__name__}. method='fsdp' shards "
                "any model; a plan is Adapter(..., tensor=TensorPlan(...))."
            )
        plans[name] = plan
    return chosen, plans


def _weights_record(modules: Mapping[str, nn.Module], *, values: bool) -> Record:
    """Return a description of each weight by parameter name: its shape and dtype and, with ``values``, an element."""
    record = {}
    for part, module in modules.items():
        for name, x in module.named_parameters():
            record[f"{part}.{name}"] = f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')}"
            # Reading a DTensor is a collective, and a quantized weight may have no element to read.
            if values and type(x) is nn.Parameter and not x.is_meta and x.numel() > 0:
                record[f"{part}.{name}"] += f", first {x.detach()[(0,) * x.ndim].item()!r}"
    return record


def require_mesh_fits(guided: GuidedMesh, method: str, *, of_transformer: bool = True) -> None:
    """Raise ``ValueError`` unless ``method`` can shard weights (of a transformer, or only others) over ``guided``."""
    if method == "tensor" and guided.tensor.group is None:
        raise ValueError(
            "method='tensor' needs a mesh with a dim 'tensor' of more than one rank: "
            "init_context_parallel_mesh(max_tensor_dim_size=n), where n divides both the number of ranks and the "
            "transformer's number of heads. method='fsdp' takes any number of ranks."
        )
    if method == "fsdp" and of_transformer and guided.tensor.size > 1:
        raise ValueError(
            f"the mesh has {guided.tensor.size} ranks along 'tensor', which share the heads of a transformer, and "
            "weights are to be sharded by method='fsdp'. Use method='tensor' (text encoders: shard_weights(pipe, "
            "mesh, components=['text_encoder', ...])), or a mesh without 'tensor'."
        )
    if method == "fsdp" and guided.sequence.ranks == 1:
        raise ValueError(
            f"the mesh has {guided.batch.size} × 1 ranks (batch × sequence), and weights are sharded over the sequence "
            "ranks: there is nothing to share. Give fewer ranks to 'batch' (max_batch_dim_size=1)."
        )


def _device_mesh(ranks: GuidedMesh | SequenceMesh, method: Method) -> DeviceMesh:
    """Return the mesh of the ranks that share weights: sequence ranks for ``"fsdp"``, else ranks along ``tensor``."""
    sequence = ranks.sequence if isinstance(ranks, GuidedMesh) else ranks
    if method == "fsdp":
        return weights_mesh(sequence_ranks(sequence), sequence.device_type, timeout=timeout_of(sequence))
    group: Any = ranks.tensor.group if isinstance(ranks, GuidedMesh) else None
    mesh: DeviceMesh = DeviceMesh.from_group(group, sequence.device_type, mesh_dim_names=(TENSOR_DIM,))
    return mesh


def weights_groups(pipe: Any) -> set[dist.ProcessGroup]:
    """Return the process groups over which FSDP2 gathers the weights of ``pipe``."""
    meshes = [shard_mesh(module) for module in components_of(pipe).values()]
    return {group for mesh in meshes if mesh is not None for group in mesh.get_all_groups()}


def unshard_weights(pipe: Pipeline, *, components: Sequence[str] | None = None) -> Pipeline:
    """Undo :func:`shard_weights` and return ``pipe``. All ranks that share weights must call this.

    Components whose weights are not sharded stay unchanged; those that diffusers sharded (``TensorParallelConfig``)
    stay sharded, with a warning.

    Args:
        pipe (`DiffusionPipeline`): The pipeline.
        components (`Sequence[str]`, *optional*): Names of the components to gather. Defaults to all components.

    Raises:
        RuntimeError: If a sharded weight was replaced, for example by quantization, so that it cannot be gathered.
    """
    require_kind("pipeline", pipe, "Pass the pipeline: unshard_weights(pipe, components=['transformer']).")
    chosen = components_of(pipe, components)
    for name, module in chosen.items():
        if mesh_of_diffusers(module) is not None:
            warn_user(
                f"pipe.{name} stays sharded: diffusers' TensorParallelConfig did it when it was loaded, and nothing "
                "undoes that. To hold it on every rank, load it without parallel_config.",
                ParaCoreWarning,
            )
    gather_modules(pipe, chosen.values())
    return pipe


def gather_modules(pipe: Any, modules: Iterable[nn.Module]) -> None:
    """Gather the weights of ``modules``, which may have left ``pipe`` since they were sharded. A collective call."""
    for module in modules:
        gather_component(module)
    if not any(map(is_distributed, components_of(pipe).values())):
        empty_slot(pipe, Slot.WEIGHTS)


def release_shards(pipe: Any, names: Collection[str] | None = None) -> Callable[[], None]:
    """Gather the weights of the components in ``names``, and return a function that shards them again.

    Both are collective calls. ``names=None`` stands for all components; unknown names are ignored.
    """
    shard_again = restore_shards(pipe, names)
    unshard_weights(pipe, components=[name for name in components_of(pipe) if names is None or name in names])
    return shard_again


def restore_shards(pipe: Any, names: Collection[str] | None = None) -> Callable[[], None]:
    """Return a function that shards components again as they are sharded now. It skips those that are still sharded.

    Calling it is collective. ``names`` are as in :func:`release_shards`. Wrappers that refuse methods are not restored.
    """
    chosen = [module for name, module in components_of(pipe).items() if names is None or name in names]
    earlier = [component for component in map(sharded_component, chosen) if component is not None]

    def shard_again() -> None:
        for component in earlier:
            if not is_distributed(component.module):
                component.apply()

    return shard_again


def _move_guard_of(pipe: Any) -> MoveGuard:
    """Return the :class:`MoveGuard` of ``pipe``. If it has none yet, install its wrappers."""
    guard = slot_owner(pipe, Slot.WEIGHTS, MoveGuard)
    if guard is None:
        guard = MoveGuard()
        methods = {"enable_model_cpu_offload": guard.offload, "save_pretrained": guard.save}
        present = {method: around for method, around in methods.items() if hasattr(pipe, method)}
        fill_slot(pipe, Slot.WEIGHTS, present, owner=guard)
    return guard
