"""Shard the weights of a pipeline over ranks, for shard_weights and for ``weights=`` of parallelize_pipe.

:func:`prepare_sharding` validates everything on all ranks and changes nothing; :meth:`Sharding.run` then
shards. Nothing gathers the weights again. How weights are sharded is the matter of a method
(:class:`ShardMethod`), which this file looks up by name: ``fsdp_weights.py`` and ``tensor_weights.py``.
``adapters/parallel/resolve.py`` and ``load_sharded.py`` call it, too. Tests: tests/weights/test_fsdp.py,
tests/weights/test_tensor.py, tests/weights/test_load.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import OffloadPolicy

from para_core.adapters.adapter import Adapter
from para_core.adapters.agree.options import agree_on_options
from para_core.adapters.default_mesh import Mesh, guided_mesh_for
from para_core.adapters.inspect.components import components_with_blocks
from para_core.adapters.inspect.diffusers_mesh import mesh_of_diffusers
from para_core.adapters.model_checks import check_not_fsdp1, check_not_wrapped
from para_core.adapters.refusal import refusal
from para_core.adapters.registry import all_components, check_pipeline_or_model, mesh_of, transformers_of
from para_core.adapters.weights.feature import WeightsMethod
from para_core.adapters.weights.features import method_of, require_method, shard_methods
from para_core.adapters.weights.lora import follow_loras
from para_core.adapters.weights.offloaded_modules import check_not_offloaded
from para_core.adapters.weights.one_way import check_holds_all, check_usable, load_again, one_way
from para_core.adapters.weights.sharded_component import (
    MoveGuard,
    ShardedComponent,
    compare_calls,
    sharded_component,
)
from para_core.distributed.agree import agree, together
from para_core.distributed.mesh import MESH_DIMS, PIPE_DIM, AnyMesh, GuidedMesh
from para_core.distributed.records import Record, describe_first_difference
from para_core.instance.private_class import original_class
from para_core.instance.record import is_filled
from para_core.instance.slots import Slot
from para_core.weights.group import as_ranks

Pipeline = TypeVar("Pipeline")


def shard_weights(
    pipe: Pipeline,
    mesh: Mesh | GuidedMesh | None = None,
    *,
    method: WeightsMethod = "fsdp",
    components: Sequence[str] | None = None,
    offload_policy: OffloadPolicy | None = None,
) -> Pipeline:
    """Shard the weights of a pipeline's transformers and text encoders.

    Every rank of the mesh must call this function.

    With ``"fsdp"`` (PyTorch's FSDP2) each sequence rank holds 1 / n of each block. It gathers a block just
    before the block runs, while the previous block computes. The result is bit-equal to that of replicated
    weights.

    With ``"tensor"`` (PyTorch's tensor parallelism) each rank along the mesh dim ``tensor`` holds and
    computes 1 / n of the heads and hidden units of each transformer block. No weight is gathered; the result
    differs in the order of sums over ranks. Only the layers that the tensor plan of an adapter or of
    diffusers (``_tp_plan``) names are sharded. Text encoders have no such plan: shard them by ``"fsdp"`` in a
    second call.

    **Nothing undoes it**: to hold all weights on every rank, or to shard them in another way, load the
    pipeline again. Components that are already sharded with the same settings are skipped. Everything is
    looked up and checked before the first weight is sharded, and a refused call changes nothing. If sharding
    itself fails on a rank, for example for want of memory, every rank raises, and the pipeline raises
    whenever it is used.

    Sharded weights are for inference: the parameters take no gradients. This function may be called before or
    after :func:`parallelize_pipe` and :func:`apply_cache_on_pipe`. LoRAs may be loaded, fused and removed at
    any time; once the weights are sharded, all ranks must do so together. Do not call ``pipe.to(device)``:
    sharded components move to the device of the mesh block by block. Move the other components one by one
    (``pipe.vae.to(device)``).

    Args:
        pipe (`DiffusionPipeline`): A pipeline into which every rank has loaded the same weights.
        mesh (`DeviceMesh`, `ProcessGroup` or `GuidedMesh`, *optional*): Ranks that share the weights, as for
            :func:`parallelize_pipe`. ``"fsdp"`` shards over its sequence ranks, and ranks along ``batch``
            hold copies. ``"tensor"`` requires a mesh with a dim ``tensor``. ``"fsdp"`` also takes a
            `DeviceMesh` without the dims of this library, of one dim or of two (``replicate × shard``); all
            of its ranks must then call the pipeline equally often. Defaults to the mesh on which the pipeline
            is parallel, or else to the default of :func:`parallelize_pipe`.
        method (`"fsdp"` or `"tensor"`, *optional*, defaults to `"fsdp"`): How the weights are sharded.
        components (`Sequence[str]`, *optional*): Names of the components to shard. Defaults to all components
            that ``method`` can shard.
        offload_policy (`OffloadPolicy`, *optional*): FSDP2's policy for offloading.
            ``torch.distributed.fsdp.CPUOffloadPolicy()`` keeps this rank's part of the weights in host
            memory. Only for ``method="fsdp"``.

    Returns:
        ``pipe`` itself.

    Raises:
        TypeError: If ``pipe`` is no pipeline, an argument has a wrong type, or a transformer is inside a
            wrapper for training (DistributedDataParallel, FSDP1).
        ValueError: If a component does not exist or cannot be sharded by ``method``, if the mesh does not
            fit, if a component is offloaded, or if the ranks have different weights or options.
        RuntimeError: If a component is sharded with other settings, if sharding fails, if there are several
            ranks but no process group, or if two NCCL ranks use the same GPU.
    """
    sharding = prepare_sharding(pipe, mesh, method, components, offload_policy)
    with together(sharding.ranks, "weights cannot be sharded"):
        sharding.check_offloads()
    sharding.run()
    return pipe


@dataclass(frozen=True)
class Sharding:
    """A validated request to shard components of a pipeline, from :func:`prepare_sharding`. :meth:`run` does
    it. If components may be offloaded, call :meth:`check_offloads` before, on all ranks.

    Args:
        pipe: The pipeline.
        method: The name of the method.
        components: The components to shard by name, without those that are already sharded with the same
            settings.
        mesh: The ranks that share the weights.
        ranks: All ranks that change the weights together.
        offload_policy: FSDP2's policy for offloading; None without one.
        adapter: The adapter that the user passed; None without one.
    """

    pipe: Any
    method: str
    components: Mapping[str, nn.Module]
    mesh: DeviceMesh
    ranks: AnyMesh
    offload_policy: OffloadPolicy | None
    adapter: Adapter | None

    def check_offloads(self) -> None:
        """Raise ``ValueError`` if a component is offloaded in a way that cannot move shards.

        Two kinds of offload may stay: accelerate's model offload, whose moves of sharded components
        :meth:`ShardedComponent.move` ignores (:func:`check_can_be_sharded` has refused accelerate's other
        hooks), and diffusers' group offload of a transformer.
        """
        transformers = transformers_of(self.pipe)
        refused = {
            name: module
            for name, module in self.components.items()
            if is_filled(module, Slot.OFFLOADED_BLOCK)
            or not (name in transformers or hasattr(module, "_hf_hook"))
        }
        check_not_offloaded(refused, "Shard only other components (components=[...]).")

    def run(self) -> None:
        """Shard the weights. Collective.

        If it fails on one rank, all raise, and the pipeline must be loaded again.
        """
        if not self.components:
            return
        with one_way(self.pipe, self.components.values(), self.ranks, "sharding the weights"):
            method, guard = require_method(self.method), MoveGuard.of(self.pipe)
            transformers = transformers_of(self.pipe)
            for name, module in self.components.items():
                method.shard(module, self.mesh, self.offload_policy, self.adapter)
                follow_loras(module, method, self.mesh, self.ranks)
                ShardedComponent(module, self.method, self.mesh, self.offload_policy, guard).wrap()
                if name not in transformers:
                    compare_calls(module, self.ranks)


def prepare_sharding(
    pipe: Any,
    mesh: Mesh | GuidedMesh | None,
    method: str,
    components: Sequence[str] | None = None,
    offload_policy: OffloadPolicy | None = None,
    *,
    compare_values: bool = True,
    adapter: Adapter | None = None,
) -> Sharding:
    """Return the validated request to shard what the arguments of :func:`shard_weights` name. Collective.

    Changes nothing. The errors are those of :func:`shard_weights`, on every rank. ``compare_values=False``
    skips the comparison of values between ranks, for weights that are memory-mapped from files: reading one
    element loads a whole page. ``adapter`` is the one that the user passed.
    """
    if mesh is None:
        mesh = mesh_of(pipe)
    if not (isinstance(mesh, GuidedMesh) or _is_foreign(mesh)):
        # The groups of ``mesh`` may differ between ranks, and all of them choose the default mesh for the
        # models. So compare first, by a group that they share, and check that these can be sharded.
        options = {"method": method, "components": components, "offload_policy": offload_policy}
        with agree_on_options("shard_weights", mesh, options):
            _check_sharding_options(pipe, method, offload_policy)
            _choose_components(pipe, method, components)
    ranks, foreign_mesh = _ranks_of(mesh, pipe, method)
    # If one rank raised alone, the others would wait for it in the first call.
    with together(ranks, "weights cannot be sharded"):
        _check_sharding_options(pipe, method, offload_policy)
        check_usable(pipe)
        check_can_be_sharded(pipe, adapter)
        chosen = _choose_components(pipe, method, components)
        unsharded = {name: module for name, module in chosen.items() if method_of(module) is None}
        check_holds_all(pipe, unsharded.values(), f"method={method!r}")
        for name, module in unsharded.items():
            _check_component_fits(name, module, method, ranks, adapter)
        if isinstance(ranks, GuidedMesh):
            has_transformer = not chosen.keys().isdisjoint(transformers_of(pipe))
            require_method(method).check_mesh(ranks, has_transformer)
    _check_equal_on_ranks(unsharded, method, offload_policy, ranks, compare_values)
    with together(ranks, "weights cannot be sharded"):
        device_mesh: Any = foreign_mesh
        if isinstance(ranks, GuidedMesh):
            device_mesh = require_method(method).make_mesh(ranks)
        for name, module in chosen.items():
            if name not in unsharded:
                _check_same_settings(pipe, name, module, method, device_mesh, offload_policy)
    return Sharding(pipe, method, unsharded, device_mesh, ranks, offload_policy, adapter)


def _is_foreign(mesh: Any) -> TypeGuard[DeviceMesh]:
    """Whether ``mesh`` is a mesh of torch without the dims of this library."""
    return isinstance(mesh, DeviceMesh) and not set(mesh.mesh_dim_names or ()) & {*MESH_DIMS, PIPE_DIM}


def _ranks_of(mesh: Mesh | GuidedMesh | None, pipe: Any, method: str) -> tuple[AnyMesh, DeviceMesh | None]:
    """Return all ranks that change weights together, and ``mesh`` if it is foreign and ``method`` shards over
    it as it is; else None. Collective.
    """
    if not _is_foreign(mesh):
        return guided_mesh_for(mesh, pipe, method), None
    # The method decides how the mesh is read, so a rank with another one would raise alone.
    ranks = as_ranks(mesh)
    agree({"method": str(method)}, ranks)
    # An unknown method is refused later.
    if method in shard_methods() and require_method(method).takes_any_mesh:
        return ranks, mesh
    return guided_mesh_for(mesh, pipe, method), None


def _check_sharding_options(pipe: Any, method: str, offload_policy: OffloadPolicy | None) -> None:
    check_pipeline_or_model(
        "pipeline", pipe, "Pass the pipeline: shard_weights(pipe, mesh, components=['transformer'])."
    )
    shards_by = require_method(method)
    if offload_policy is not None and not isinstance(offload_policy, OffloadPolicy):
        raise TypeError(
            f"offload_policy is {offload_policy!r}; expected a policy of FSDP2, such as "
            "torch.distributed.fsdp.CPUOffloadPolicy(), or None."
        )
    if offload_policy is not None and not shards_by.takes_offload_policy:
        raise ValueError(
            f"offload_policy is FSDP2's; leave it out with method={method!r}, or give a method that takes it: 'fsdp'."
        )


def _choose_components(pipe: Any, method: str, components: Sequence[str] | None) -> dict[str, nn.Module]:
    """Return the components to shard by name. Raise ``ValueError`` if there is none."""
    if components is None and not require_method(method).shards_encoders:
        components = list(transformers_of(pipe))
        if not components:
            raise ValueError(
                f"method={method!r} shards transformers, and {original_class(pipe).__name__} has none. "
                "method='fsdp' shards its text encoders."
            )
    chosen = components_with_blocks(pipe, components)
    if not chosen:
        raise ValueError(
            f"components is {components!r}: there is nothing to shard. This {original_class(pipe).__name__} "
            f"has {', '.join(components_with_blocks(pipe)) or 'no component that can be sharded'}; None stands for "
            "all of them."
        )
    return chosen


def _check_component_fits(
    name: str, module: nn.Module, method: str, ranks: AnyMesh, adapter: Adapter | None
) -> None:
    """Raise ``ValueError`` if ``module``, the component ``name``, cannot be sharded by ``method``."""
    if mesh_of_diffusers(module) is not None:
        raise ValueError(
            f"pipe.{name} is sharded by diffusers' TensorParallelConfig already. It runs as it is: "
            "parallelize_pipe(pipe, mesh=mesh), without weights=; to shard the rest, shard_weights(pipe, "
            "mesh, components=['text_encoder', ...])."
        )
    require_method(method).check_component(name, module, ranks, adapter)


def _check_equal_on_ranks(
    modules: Mapping[str, nn.Module],
    method: str,
    offload_policy: OffloadPolicy | None,
    ranks: AnyMesh,
    values: bool,
) -> None:
    """Raise ``ValueError`` on all ranks if they have different options or weights. Collective.

    Compares names, shapes and dtypes of the weights and, with ``values``, the first element of each: enough
    to notice another checkpoint or a LoRA that was fused on one rank only, not a proof that all values are
    equal.
    """
    record = {
        "method": method,
        "offload_policy": repr(offload_policy),
        **_weights_record(modules, values=values),
    }
    way_out = (
        "Pass equal options, and load the same weights on every rank, with the same changes (LoRA, dtype)."
    )
    agree(record, ranks, explain=lambda records: f"{describe_first_difference(records)} {way_out}")


def _weights_record(modules: Mapping[str, nn.Module], *, values: bool) -> Record:
    """Return a text for each parameter by its name: shape, dtype and, with ``values``, the first element."""
    record = {}
    for component, module in modules.items():
        for name, x in module.named_parameters():
            record[f"{component}.{name}"] = f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')}"
            # Reading a DTensor is a collective, and a quantized weight may have no element to read.
            if values and type(x) is nn.Parameter and not x.is_meta and x.numel() > 0:
                record[f"{component}.{name}"] += f", first {x.detach()[(0,) * x.ndim].item()!r}"
    return record


def _check_same_settings(
    pipe: Any,
    name: str,
    module: nn.Module,
    method: str,
    mesh: DeviceMesh,
    offload_policy: OffloadPolicy | None,
) -> None:
    """Raise ``RuntimeError`` if ``module``, the component ``name``, is sharded with other settings than
    these.
    """
    earlier_method = method_of(module)
    earlier_mesh = None if earlier_method is None else require_method(earlier_method).mesh_of(module)
    component = sharded_component(module)
    # The policy of the user's own fully_shard is unknown.
    earlier_policy = offload_policy if component is None else component.offload_policy
    same_ranks = earlier_mesh is not None and torch.equal(earlier_mesh.mesh, mesh.mesh)
    if earlier_method == method and same_ranks and repr(earlier_policy) == repr(offload_policy):
        return
    ranks = [] if earlier_mesh is None else earlier_mesh.mesh.flatten().tolist()
    raise RuntimeError(
        f"pipe.{name} is sharded already: by {earlier_method!r} over the ranks {ranks}, with offload_policy "
        f"{earlier_policy!r}. Asked for were {method!r}, the ranks {mesh.mesh.flatten().tolist()} and "
        f"{offload_policy!r}, and nothing gathers the weights again. {load_again(pipe)} Or leave the weights "
        "as they are: leave weights= (of parallelize_pipe) or the component (of shard_weights) out."
    )


def check_can_be_sharded(pipe: Any, adapter: Adapter | None = None) -> None:
    """Raise ``ValueError`` if weights of ``pipe`` are spread over several devices or moved by accelerate, and
    ``TypeError`` if a transformer is inside a wrapper for training. ``adapter`` is the one that the user
    passed.
    """
    for name, module in transformers_of(pipe).items():
        check_not_fsdp1(module, f"pipe.{name}")
        check_not_wrapped(module, f"pipe.{name}", adapter)
        check_one_device(module, f"pipe.{name}")
    check_one_device(pipe, "the pipeline")
    check_unmoved_weights(pipe)


def check_one_device(model_or_pipe: Any, what: str) -> None:
    """Refuse a transformer or pipeline that is spread over several devices."""
    devices = sorted(
        {str(device) for device in (getattr(model_or_pipe, "hf_device_map", None) or {}).values()}
    )
    if len(devices) > 1:
        raise ValueError(
            f"{what} is spread over the devices {devices} by its device_map, for one process; here each "
            "device has its own process. Load it without device_map, and shard its weights over the devices "
            "of all ranks: parallelize_pipe(pipe, mesh=mesh, weights='fsdp')."
        )


def check_unmoved_weights(pipe: Any) -> None:
    """Refuse weights that accelerate moves to the device layer by layer."""
    parts = {name: part for name, part in all_components(pipe).items() if isinstance(part, nn.Module)}
    for name, part in parts.items():
        for path, module in part.named_modules():
            hook = getattr(module, "_hf_hook", None)
            # Model offload (CpuOffload) is allowed: it moves whole components and leaves sharded ones alone.
            if hook is not None and type(hook).__name__ != "CpuOffload":
                raise refusal(
                    ValueError,
                    f"pipe.{name} is moved by a hook of accelerate, layer by layer ({type(hook).__name__} on "
                    f"{path or 'the component'}: enable_sequential_cpu_offload, device_map). Its weights are "
                    "on the meta device and are loaded for each call of a layer, so there is nothing to "
                    "shard.",
                    "Call pipe.remove_all_hooks() first. pipe.enable_model_cpu_offload() works with sharded "
                    "weights, and shard_weights(pipe, mesh, "
                    "offload_policy=torch.distributed.fsdp.CPUOffloadPolicy()) keeps each rank's shard in "
                    "host memory.",
                )


def weights_groups(pipe: Any) -> set[dist.ProcessGroup]:
    """Return the process groups over which the weights of ``pipe`` are shared."""
    groups = set()
    for module in components_with_blocks(pipe).values():
        method = method_of(module)
        mesh = None if method is None else require_method(method).mesh_of(module)
        if mesh is not None:
            groups.update(mesh.get_all_groups())
    return groups
