"""One component of a pipeline whose weights are sharded: applying it, undoing it, and what its methods refuse
meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import OffloadPolicy

from para_core.adapters.components import blocks_of, components_of
from para_core.adapters.consistency.loras import lora_weights
from para_core.adapters.weights.lora import follow_loras, leave_loras
from para_core.distributed.consistency import raising_on_all
from para_core.distributed.mesh import GuidedMesh, SequenceMesh
from para_core.instance_patching import WrapperPriority, unwrap, unwrapped_class, wrap_method, wrapper
from para_core.torch_internals import buffer_slots, parameter_slots, parse_to
from para_core.weights.fsdp import discard_shards, gather_blocks, is_sharded, shard_blocks, shard_mesh
from para_core.weights.tensor import discard_tensors, gather_tensors, shard_tensors, tensor_mesh
from para_core.weights.tensor_plan import TensorPlan

Method = Literal["fsdp", "tensor"]
METHODS: tuple[Method, ...] = ("fsdp", "tensor")

KEY = "weights"
_FUSED = "projections that are fused or taken apart now would not be"
# What goes wrong by these methods of diffusers and transformers once weights are sharded.
_LATE = {
    **dict.fromkeys(("fuse_qkv_projections", "unfuse_qkv_projections"), _FUSED),
    "_load_ip_adapter_weights": "an IP-Adapter that is loaded now would not be",
    **dict.fromkeys(("save_pretrained", "save_lora_adapter"), "a file that is saved now would hold a part of them"),
}


@dataclass(frozen=True, eq=False)
class ShardedComponent:
    """Return how the weights of ``module`` are sharded.

    Args:
        mesh: The ranks that share them.
        ranks: All ranks that load and change LoRAs together; None: not known, because others sharded the module.
        plan: Of tensor parallelism.
    """

    module: nn.Module
    method: Method
    mesh: DeviceMesh
    ranks: GuidedMesh | SequenceMesh | None
    plan: TensorPlan | None = None
    offload_policy: OffloadPolicy | None = None

    def apply(self) -> None:
        """Shard the weights, which every rank holds."""
        if self.plan is None:
            shard_blocks(
                self.module,
                blocks_of(self.module),
                self.mesh,
                offload_policy=self.offload_policy,
                replicated=lora_weights(self.module),
            )
        else:
            shard_tensors(self.module, self.plan, self.mesh)
        follow_loras(self.module, self.ranks)

    def is_applied(self) -> bool:
        """Whether the module is sharded in this manner now."""
        earlier = sharded_component(self.module)
        return (
            earlier is not None
            and (earlier.method, earlier.plan) == (self.method, self.plan)
            and earlier.offload_policy is None
            and self.offload_policy is None
            and torch.equal(earlier.mesh.mesh, self.mesh.mesh)
        )

    def replace_earlier(self, rollback: ExitStack, *, hold_weights: bool) -> None:
        """Shard the weights in this manner in place of an earlier one; if a rank fails, all ranks raise.

        Args:
            rollback: Gets what puts the module back to where it is now. All ranks call that together.
            hold_weights: Whether ``rollback`` holds the whole weights, and puts the same tensors back.
        """
        ranks: Any = self.ranks
        with raising_on_all(ranks, "weights could not be gathered"):
            earlier = sharded_component(self.module)
            gather_component(self.module)
        if earlier is not None:
            rollback.callback(earlier.apply)
        if hold_weights:
            rollback.callback(self._put_back, _HeldWeights(self.module))
        with raising_on_all(ranks, "weights could not be sharded"):
            self.apply()

    def _put_back(self, held: _HeldWeights) -> None:
        """Undo :meth:`apply` wherever it stopped on this rank. No other rank is asked."""
        discard_shards(self.module)
        discard_tensors(self.module)
        leave_loras(self.module)
        held.put_back()

    def refuse_late(self, placement: Placement) -> None:
        """Let methods that would fail on sharded weights, or lose them, raise."""
        wrap_method(self.module, "to", KEY, _Move(self, placement).move, order=WrapperPriority.PLAN)
        for method, problem in _LATE.items():
            if hasattr(self.module, method):
                wrap_method(self.module, method, KEY, partial(_too_late, problem), order=WrapperPriority.PLAN)


class _HeldWeights:
    """The parameters and buffers of a module, whatever takes their place later."""

    def __init__(self, module: nn.Module) -> None:
        self._tensors = [
            (held, name, x, x.data, x.requires_grad)
            for owner in module.modules()
            for held in _dicts_of(owner)
            for name, x in held.items()
            if x is not None
        ]

    def put_back(self) -> None:
        for held, name, x, data, requires_grad in self._tensors:
            if x.data is not data:
                x.data = data
            x.requires_grad_(requires_grad)
            held[name] = x


def _dicts_of(owner: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    return parameter_slots(owner), buffer_slots(owner)


def sharded_component(module: nn.Module) -> ShardedComponent | None:
    """Return how ``module`` is sharded; None if it is not."""
    move = getattr(wrapper(module, "to", KEY), "__self__", None)
    if isinstance(move, _Move):
        return move.component
    # By the user's own fully_shard, of which the policy is not known.
    mesh = shard_mesh(module) if is_sharded(module) else None
    return None if mesh is None else ShardedComponent(module, "fsdp", mesh, None)


def is_distributed(module: nn.Module) -> bool:
    """Whether ranks share the weights of ``module``."""
    return is_sharded(module) or tensor_mesh(module) is not None


def gather_component(module: nn.Module) -> None:
    """Give every rank all weights of ``module``. All ranks call it."""
    if is_sharded(module):
        gather_blocks(module)
    if tensor_mesh(module) is not None:
        gather_tensors(module)
    unwrap(module, KEY)
    leave_loras(module)


def _too_late(problem: str, call: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        f"the weights of this {unwrapped_class(module).__name__} are sharded, and {problem}. "
        "Call unshard_weights(pipe) first, on every rank, and shard_weights(pipe, mesh) again afterwards."
    )


class Placement:
    """Keeps track of the placement of one pipeline's sharded weights: FSDP2 remembers the dtype and the device of what
    it sharded, and would fail in the next call after ``module.to(...)``. Model offload (accelerate's) moves the other
    components, and leaves these alone.
    """

    def __init__(self) -> None:
        self._offloading = False

    def offload(self, call: Callable[..., Any], pipe: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Around ``pipe.enable_model_cpu_offload``, which moves all components to the host first. It runs behind each
        generation, too.
        """
        before, self._offloading = self._offloading, True
        try:
            return call(pipe, *args, **kwargs)
        finally:
            self._offloading = before

    def save(self, call: Callable[..., Any], pipe: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Around ``pipe.save_pretrained``, which would write other components before it comes to a sharded one."""
        for module in components_of(pipe).values():
            if is_distributed(module):
                _too_late(_LATE["save_pretrained"], call, module)
        return call(pipe, *args, **kwargs)

    def move(self, call: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """Around ``module.to``."""
        device, dtype, *_ = parse_to(*args, **kwargs)
        held = list(module.parameters()) if is_sharded(module) else []
        kinds = {x.dtype for x in held if x.is_floating_point() and dtype not in (None, x.dtype)}
        places = {x.device for x in held if device is not None and x.device.type != device.type}
        if places and not kinds and (self._offloading or hasattr(module, "_hf_hook")):
            return module
        if kinds or places:
            wanted = dtype if kinds else device
            raise RuntimeError(
                f"the weights of this {unwrapped_class(module).__name__} are sharded by FSDP2, as "
                f"{' and '.join(sorted(map(str, kinds or places)))}, and "
                f"stay so; asked for was {wanted}. Convert and move the pipeline before shard_weights; or "
                "unshard_weights(pipe), on every "
                "rank, then pipe.to(...), then shard_weights(pipe, mesh) again."
            )
        return call(module, *args, **kwargs)


@dataclass(frozen=True, eq=False)
class _Move:
    """Wrap ``module.to`` of one component."""

    component: ShardedComponent
    placement: Placement

    def move(self, call: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return self.placement.move(call, module, *args, **kwargs)
