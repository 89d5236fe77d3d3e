"""Tests of where weights are: on several devices, moved by hooks, sharded, or in stages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed import get_process_group_ranks
from torch.distributed.tensor import DTensor

from para_core.adapters.compatibility.context import CompatibilityContext, is_unet
from para_core.adapters.components import why_no_stages
from para_core.adapters.registry import adapter_for, component_of
from para_core.instance_patching import is_compiled, is_compiled_without_breaks
from para_core.plans.region import mesh_of_plan
from para_core.weights.fsdp import is_sharded, shard_mesh
from para_core.weights.pipefusion import fusion_of
from para_core.weights.stages import stages_of
from para_core.weights.tensor import tensor_mesh


def several_devices(case: CompatibilityContext) -> Mapping[str, Any] | None:
    return _devices_of(case.module, "the transformer")


def pipe_on_several_devices(case: CompatibilityContext) -> Mapping[str, Any] | None:
    return _devices_of(case.owner, "the pipeline") if case.component else None


def _devices_of(spread: Any, what: str) -> Mapping[str, Any] | None:
    devices = {str(device) for device in (getattr(spread, "hf_device_map", None) or {}).values()}
    return {"spread": what, "devices": sorted(devices)} if len(devices) > 1 else None


def placed_by_accelerate(case: CompatibilityContext) -> Mapping[str, Any] | None:
    """Find a hook of accelerate that moves weights layer by layer.

    Model offload moves a whole component, and leaves sharded ones alone.
    """
    for name, part in getattr(case.owner, "components", {}).items():
        for at, module in part.named_modules() if isinstance(part, nn.Module) else ():
            hook = getattr(module, "_hf_hook", None)
            if hook is not None and type(hook).__name__ != "CpuOffload":
                return {"placed": f"pipe.{name}", "at": at or "the component", "hook": type(hook).__name__}
    return None


def config_of_diffusers(module: Any) -> Any:
    return getattr(module, "_parallel_config", None)


def tensors_of_diffusers(module: Any) -> Any:
    """Return the mesh over which diffusers sharded ``module`` by a ``TensorParallelConfig``; None if it did not."""
    config = getattr(config_of_diffusers(module), "tensor_parallel_config", None)
    return None if config is None else config._mesh


def tensor_ranks_differ(case: CompatibilityContext) -> Mapping[str, Any] | None:
    """Find heads that are sharded over other ranks than those along ``tensor``.

    These would exchange tokens of different heads.
    """
    if case.module is None or case.mesh is None:
        return None
    sharded = tensor_mesh(case.module) or tensors_of_diffusers(case.module)
    shared = [] if sharded is None else sharded.mesh.flatten().tolist()
    dim = case.mesh.tensor
    ranks = [] if dim.group is None else get_process_group_ranks(dim.group)
    return None if shared == ranks else {"shared": shared or "no", "ranks": ranks or "none"}


def unet_on_tensor_ranks(case: CompatibilityContext) -> Mapping[str, Any] | None:
    """Find a UNet on ranks along ``tensor``. A UNet has no tensor plan, so these ranks would compute the same rows."""
    size = 1 if case.mesh is None else case.mesh.tensor.size
    return {"tensor_ranks": size} if size > 1 and is_unet(case) else None


def shared_beyond_sequence(case: CompatibilityContext) -> Mapping[str, Any] | None:
    """Find weights that are gathered from ranks that may run other blocks, and then do not join the gather."""
    if case.module is None or not is_sharded(case.module):
        return None
    mesh, applied = shard_mesh(case.module), mesh_of_plan(case.module)
    shared, sequence = 1 if mesh is None else mesh.size(), 1 if applied is None else applied.ranks
    if shared <= sequence:
        return None
    if case.options is not None:
        return {"shared": shared, "sequence": sequence, "reason": "a cache that skips other steps"}
    guides = case.mesh is not None and case.mesh.batch.size > 1
    return {"shared": shared, "sequence": sequence, "reason": "other branches of guidance"} if guides else None


def _stages(case: CompatibilityContext) -> int:
    return 1 if case.mesh is None or case.module is None else case.mesh.pipe.size


def no_stages(case: CompatibilityContext) -> Mapping[str, Any] | None:
    if _stages(case) == 1:
        return None
    reason = "it is a UNet, whose blocks pass residuals to each other" if is_unet(case) else None
    reason = reason or why_no_stages(case.module, case.adapter)
    return None if reason is None else {"reason": reason}


def placed_stages(case: CompatibilityContext) -> Mapping[str, Any] | None:
    """Find weights that a hook moves or that are sharded, because a stage frees blocks."""
    if _stages(case) == 1:
        return None
    if any(hasattr(part, "_hf_hook") for part in case.module.modules()):
        return {"placed": "is moved by a hook of accelerate", "undo": "pipe.remove_all_hooks()"}
    if not case.unshards and (is_sharded(case.module) or tensor_mesh(case.module) is not None):
        return {"placed": "has its weights sharded", "undo": "unshard_weights(pipe)"}
    return None


def compiled_stages(case: CompatibilityContext) -> bool:
    return case.module is not None and stages_of(case.module) is not None and _is_one_graph(case)


def compiled_fusion(case: CompatibilityContext) -> bool:
    return case.module is not None and fusion_of(case.module) is not None and _is_one_graph(case)


def _is_one_graph(case: CompatibilityContext) -> bool:
    """Whether the whole model was compiled: in place, its ``forward``, or as the pipeline's component."""
    replaced = bool(case.component) and component_of(case.owner, case.component) is not case.module
    return replaced or is_compiled(case.module)


def uncached_stages(case: CompatibilityContext) -> Mapping[str, Any] | None:
    """Find options of a cache that need blocks or weights of other stages."""
    if case.module is not None and fusion_of(case.module) is not None:
        return {
            "reason": "under PipeFusion a step computes patches with keys of the previous step, which must not be "
            "skipped"
        }
    stages = None if case.module is None else stages_of(case.module)
    adapter = None if stages is None else adapter_for(case.module, case.adapter)
    if stages is None or adapter is None or adapter.blocks is None or case.options is None:
        return None
    if len(adapter.blocks.groups) > 1:
        return {"reason": "it has two block groups, and the residual of the first is on another stage"}
    if case.options.decides_before_blocks:
        return {"reason": "its rule reads weights of the first block, which only the first stage has"}
    last = len(stages.ranges[-1])
    if case.options.last_blocks >= last:
        return {"reason": f"last_blocks={case.options.last_blocks} always run, and the last stage has {last} blocks"}
    return None


def cached_in_one_graph(case: CompatibilityContext) -> Mapping[str, Any] | None:
    """Find hooks of FSDP2 or DTensors inside a graph with ``torch.cond``, which supports neither."""
    if case.module is None or case.options is None or not _is_one_graph(case):
        return None
    by_fsdp = is_sharded(case.module)
    by_tensor = tensor_mesh(case.module) is not None or tensors_of_diffusers(case.module) is not None
    return {"method": "fsdp" if by_fsdp else "tensor"} if by_fsdp or by_tensor else None


def sharded_without_breaks(case: CompatibilityContext) -> bool:
    """Whether a model with weights sharded by FSDP2 was compiled with ``fullgraph=True``. Its hooks break the graph."""
    if case.module is None or not is_sharded(case.module):
        return False
    component = component_of(case.owner, case.component) if case.component else case.module
    return is_compiled_without_breaks(component) or is_compiled_without_breaks(case.module)


def changed_since_sharded(case: CompatibilityContext) -> Mapping[str, Any] | None:
    if case.module is None or not is_sharded(case.module):
        return None
    for name, parameter in case.module.named_parameters():
        if type(parameter) is not nn.Parameter and not isinstance(parameter, DTensor):
            return {"at": name, "kind": type(parameter).__name__}
    return None
