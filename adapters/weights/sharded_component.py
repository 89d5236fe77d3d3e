"""Shard and gather the weights of one pipeline component, and refuse methods that would fail on sharded weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed import get_process_group_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import OffloadPolicy
from torch.distributed.tensor import DTensor

from para_core.adapters.agree.loras import lora_weights
from para_core.adapters.inspect.components import blocks_of, components_of
from para_core.adapters.refusal import refusal
from para_core.adapters.registry import adapter_for
from para_core.adapters.weights.lora import follow_loras, leave_loras
from para_core.distributed.agree import Signature, check_consistent, raising_on_all, signature
from para_core.distributed.mesh import GuidedMesh, MeshDim, SequenceMesh
from para_core.instance.modules import is_compiled
from para_core.instance.private_class import unwrapped_class
from para_core.instance.record import empty_slot, fill_slot, slot_owner
from para_core.instance.slots import Slot
from para_core.plans.region import mesh_of_plan
from para_core.torch_internals import COMPILED_CALL, buffer_slots, compile_context, parameter_slots, parse_to
from para_core.weights.fsdp import discard_shards, gather_blocks, is_sharded, shard_blocks, shard_mesh
from para_core.weights.tensor import discard_tensors, gather_tensors, shard_tensors, tensor_mesh
from para_core.weights.tensor_plan import TensorPlan

Method = Literal["fsdp", "tensor"]
METHODS: tuple[Method, ...] = ("fsdp", "tensor")

_FUSED = "Projections that are fused or taken apart now would not be sharded."
# Methods that fail on sharded weights. Each value is the sentence of the message that says why.
_LATE = {
    **dict.fromkeys(("fuse_qkv_projections", "unfuse_qkv_projections"), _FUSED),
    "_load_ip_adapter_weights": "An IP-Adapter that is loaded now would not be sharded.",
    **dict.fromkeys(("save_pretrained", "save_lora_adapter"), "A file that is saved now would hold a part of them."),
}


def replicated_in_blocks(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that FSDP2 leaves on every rank: those of LoRAs, and of ``Adapter.called_outside``."""
    adapter = adapter_for(module)
    names = () if adapter is None else adapter.called_outside
    return [*lora_weights(module), *(x for name in names for x in module.get_submodule(name).parameters())]


@dataclass(frozen=True, eq=False)
class ShardedComponent:
    """One component of a pipeline and how its weights are sharded over ``mesh``. ``plan`` is None for ``"fsdp"``."""

    module: nn.Module
    method: Method
    mesh: DeviceMesh
    # All ranks that change LoRAs together. None if unknown, because the user sharded the module directly.
    ranks: GuidedMesh | SequenceMesh | None
    plan: TensorPlan | None = None
    offload_policy: OffloadPolicy | None = None
    guard: MoveGuard | None = None

    def apply(self) -> None:
        """Shard the weights, which every rank must hold in full. Every rank must call this method."""
        if self.plan is None:
            shard_blocks(
                self.module,
                blocks_of(self.module),
                self.mesh,
                offload_policy=self.offload_policy,
                replicated=replicated_in_blocks(self.module),
            )
        else:
            shard_tensors(self.module, self.plan, self.mesh)
        follow_loras(self.module, self.ranks)

    def is_applied(self) -> bool:
        """Whether the module is already sharded with these settings. Always False with an offload policy."""
        earlier = sharded_component(self.module)
        return (
            earlier is not None
            and (earlier.method, earlier.plan) == (self.method, self.plan)
            and earlier.offload_policy is None
            and self.offload_policy is None
            and torch.equal(earlier.mesh.mesh, self.mesh.mesh)
        )

    def replace_earlier(self, rollback: ExitStack, *, hold_weights: bool) -> None:
        """Gather the weights if they are sharded, and shard them with these settings. If a rank fails, all ranks raise.

        ``rollback`` receives callbacks that restore the module; if one rank runs it, all ranks must. With
        ``hold_weights`` it keeps the gathered weights in memory, and restores them without communication even if
        sharding failed half-way.
        """
        ranks: Any = self.ranks
        with raising_on_all(ranks, "weights could not be gathered"):
            earlier = sharded_component(self.module)
            gather_component(self.module)
        if earlier is not None:
            rollback.callback(earlier.apply)
        if hold_weights:
            rollback.callback(self._holding_weights())
        with raising_on_all(ranks, "weights could not be sharded"):
            self.apply()

    def _holding_weights(self) -> Callable[[], None]:
        """Return a function that undoes a complete or partial :meth:`apply` on this rank, without communication."""
        tensors = [
            (held, name, x, x.data, x.requires_grad)
            for owner in self.module.modules()
            for held in (parameter_slots(owner), buffer_slots(owner))
            for name, x in held.items()
            if x is not None
        ]

        def put_back() -> None:
            discard_shards(self.module)
            discard_tensors(self.module)
            leave_loras(self.module)
            for held, name, x, data, requires_grad in tensors:
                if x.data is not data:
                    x.data = data
                held[name] = x.requires_grad_(requires_grad)

        return put_back

    def await_all_ranks(self) -> None:
        """Wrap the module so that a call which some ranks do not make names them, instead of hanging in FSDP2.

        Do not use this for a transformer, which is called in each step and compares its inputs between ranks itself.
        """
        if self.ranks is not None:
            name = f"the {unwrapped_class(self.module).__name__}"
            around = partial(_run_on_all_ranks, self.ranks, name, signature({"call": name}))
            fill_slot(self.module, Slot.WEIGHTS, {"__call__": around})

    def refuse_late(self, guard: MoveGuard) -> None:
        """Wrap methods that would fail on sharded weights, or save only a part of them, so that they raise."""
        component = replace(self, guard=guard)
        late = {name: partial(_too_late, problem) for name, problem in _LATE.items() if hasattr(self.module, name)}
        fill_slot(self.module, Slot.WEIGHTS, {"to": component.move, **late}, owner=component)

    def move(self, call: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """Run ``module.to``. Raise ``RuntimeError`` if it would change the dtype or device type of FSDP2 weights.

        If accelerate's model offload asks for the move, it is ignored instead.
        """
        device, dtype, *_ = parse_to(*args, **kwargs)
        held = list(module.parameters()) if is_sharded(module) else []
        kinds = {x.dtype for x in held if x.is_floating_point() and dtype not in (None, x.dtype)}
        devices = {x.device for x in held if device is not None and x.device.type != device.type}
        offloading = (self.guard is not None and self.guard.offloading) or hasattr(module, "_hf_hook")
        if devices and not kinds and offloading:
            return module
        if kinds or devices:
            wanted = dtype if kinds else device
            raise RuntimeError(
                f"the weights of this {unwrapped_class(module).__name__} are sharded by FSDP2, as "
                f"{' and '.join(sorted(map(str, kinds or devices)))}, and stay so; asked for was {wanted}. Convert and "
                "move the pipeline before shard_weights; or unshard_weights(pipe), on every rank, then pipe.to(...), "
                "then shard_weights(pipe, mesh) again."
            )
        return call(module, *args, **kwargs)


def sharded_component(module: nn.Module) -> ShardedComponent | None:
    """Return the settings with which ``module`` is sharded; None if it is not sharded."""
    component = slot_owner(module, Slot.WEIGHTS, ShardedComponent)
    if component is not None:
        return component
    # Otherwise the module was sharded by the user's own fully_shard. Its offload policy is unknown.
    mesh = shard_mesh(module) if is_sharded(module) else None
    return None if mesh is None else ShardedComponent(module, "fsdp", mesh, None)


def is_distributed(module: nn.Module) -> bool:
    """Whether the weights of ``module`` are sharded, by FSDP2 or by tensor parallelism."""
    return is_sharded(module) or tensor_mesh(module) is not None


def gather_component(module: nn.Module) -> None:
    """Gather the weights of ``module``, so that every rank holds all of them again. This is a collective call."""
    if is_sharded(module):
        gather_blocks(module)
    if tensor_mesh(module) is not None:
        gather_tensors(module)
    empty_slot(module, Slot.WEIGHTS)
    leave_loras(module)


def _run_on_all_ranks(
    ranks: GuidedMesh | SequenceMesh,
    name: str,
    record: Signature,
    call: Callable[..., Any],
    module: nn.Module,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not torch.compiler.is_compiling():
        check_consistent(record, ranks, call=name)
    return call(module, *args, **kwargs)


def _too_late(problem: str, call: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        f"the weights of this {unwrapped_class(module).__name__} are sharded. {problem} "
        "Call unshard_weights(pipe) first, on every rank, and shard_weights(pipe, mesh) again afterwards."
    )


class MoveGuard:
    """Wrappers for one pipeline that refuse to move or save its sharded components.

    FSDP2 remembers the dtype and the device of the sharded weights, so the next call after ``module.to(...)`` would
    fail. accelerate's model offload may still move the other components; the sharded ones stay in place.
    """

    def __init__(self) -> None:
        # Whether ``pipe.enable_model_cpu_offload`` is running.
        self.offloading = False

    def offload(self, call: Callable[..., Any], pipe: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Run ``pipe.enable_model_cpu_offload``. During that call sharded components ignore moves to the host."""
        before, self.offloading = self.offloading, True
        try:
            return call(pipe, *args, **kwargs)
        finally:
            self.offloading = before

    def save(self, call: Callable[..., Any], pipe: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Run ``pipe.save_pretrained``. Raise ``RuntimeError`` before any file is written if a component is sharded."""
        for module in components_of(pipe).values():
            if is_distributed(module):
                _too_late(_LATE["save_pretrained"], call, module)
        return call(pipe, *args, **kwargs)


def mesh_of_diffusers(module: Any) -> DeviceMesh | None:
    """Return the mesh over which diffusers sharded ``module`` by a ``TensorParallelConfig``; None if it did not."""
    config = getattr(getattr(module, "_parallel_config", None), "tensor_parallel_config", None)
    mesh: DeviceMesh | None = None if config is None else config._mesh
    return mesh


def refuse_other_tensor_ranks(module: nn.Module, name: str, dim: MeshDim) -> None:
    """Refuse a transformer whose heads are sharded over other ranks than those along the mesh dim tensor."""
    sharded = tensor_mesh(module) or mesh_of_diffusers(module)
    shared = [] if sharded is None else sharded.mesh.flatten().tolist()
    ranks = [] if dim.group is None else get_process_group_ranks(dim.group)
    if shared != ranks:
        raise RuntimeError(
            f"{name} has its heads sharded over {shared or 'no'} ranks, and the mesh dim 'tensor' of this rank has "
            f"{ranks or 'none'}. Call parallelize_pipe(pipe, mesh=mesh, weights='tensor') with a mesh of "
            "init_context_parallel_mesh(max_tensor_dim_size=...). For a model that diffusers' "
            "TensorParallelConfig(mesh=mesh['tensor']) sharded, pass the same mesh without weights=."
        )


def refuse_shards_beyond_sequence(module: nn.Module, name: str) -> None:
    """Refuse weights sharded over ranks that may run different blocks."""
    mesh, applied = shard_mesh(module) if is_sharded(module) else None, mesh_of_plan(module)
    shared, sequence = 1 if mesh is None else mesh.size(), 1 if applied is None else applied.ranks
    if shared > sequence:
        raise refusal(
            RuntimeError,
            f"{name} has its weights sharded over {shared} ranks, and its sequence over {sequence}. The other ranks "
            "may run other blocks, for another branch of guidance or because a cache skips other steps, and "
            "ranks would wait for each other.",
            "Shard weights over the sequence ranks: shard_weights(pipe, mesh) with the mesh of parallelize_pipe.",
        )


def refuse_cached_graph_of_shards(module: nn.Module, name: str, called: Any) -> None:
    """Refuse a cache in a model that is compiled as one graph and whose weights are sharded.

    Raise ``RuntimeError`` if the weights of ``module`` are sharded (FSDP2 or tensor parallelism), and either ``module``
    was compiled in place, or ``called``, the component that the pipeline calls, is its compiled wrapper.
    """
    by_fsdp = is_sharded(module)
    by_tensor = tensor_mesh(module) is not None or mesh_of_diffusers(module) is not None
    if (by_fsdp or by_tensor) and (called is not module or is_compiled(module)):
        method = "fsdp" if by_fsdp else "tensor"
        raise refusal(
            RuntimeError,
            f"{name} is compiled as one graph, with a cache, and its weights are sharded (weights={method!r}). The "
            "branches of torch.cond support neither hooks of FSDP2 nor DTensors.",
            f"Compile its blocks: {name}.compile_repeated_blocks(fullgraph=True); or leave out one of the three.",
        )


def refuse_graph_of_fsdp(module: nn.Module, name: str, called: Any) -> None:
    """Refuse one graph (fullgraph=True) for a model whose weights are sharded by FSDP2."""
    if is_sharded(module) and (_is_compiled_without_breaks(called) or _is_compiled_without_breaks(module)):
        raise refusal(
            RuntimeError,
            f"{name} is compiled with fullgraph=True, and its weights are sharded (weights='fsdp'). FSDP2 gathers the "
            "weights of each block in a hook, where the graph breaks.",
            f"Compile its blocks: {name}.compile_repeated_blocks(fullgraph=True); or leave fullgraph=True out.",
        )


def _is_compiled_without_breaks(module: Any) -> bool:
    """Whether ``module`` itself was compiled with ``fullgraph=True``, by ``torch.compile`` or in place."""
    state = module.__dict__
    contexts = [state.get("dynamo_ctx")]
    contexts += [compile_context(compiled) for compiled in (state.get(COMPILED_CALL), state.get("forward"))]
    return any(getattr(context, "fullgraph", False) for context in contexts)


def refuse_late_quantization(module: nn.Module, name: str) -> None:
    """Refuse weights that were quantized after FSDP2 sharded them."""
    for path, parameter in module.named_parameters() if is_sharded(module) else ():
        if type(parameter) is not nn.Parameter and not isinstance(parameter, DTensor):
            raise RuntimeError(
                f"{path} of {name} became a {type(parameter).__name__} after FSDP2 sharded its weights, and FSDP2 "
                "would restore the old weight. Load the pipeline again, and quantize before sharding "
                "(int8_weight_only_quantized_training()), or after weights='tensor'."
            )
