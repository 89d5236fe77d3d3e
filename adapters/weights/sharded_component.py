"""The record of a component whose weights are sharded, and the methods that it refuses from then on.

``shard.py`` makes the record after it has sharded the component, and ``one_way.py`` asks for it. The sharding
is not here, nor are the methods for LoRAs (``lora.py``). Tests: tests/weights/test_fsdp.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import OffloadPolicy

from para_core.adapters.inspect.components import components_with_blocks
from para_core.adapters.weights.features import method_of, require_method
from para_core.distributed.agree import agree
from para_core.distributed.mesh import AnyMesh
from para_core.distributed.records import Signature
from para_core.instance.private_class import unwrapped_class
from para_core.instance.record import fill_slot, slot_owner
from para_core.instance.slots import Slot
from para_core.torch_internals import parse_to

_FUSED = "Projections that are fused or taken apart now would not be sharded."
_SAVED = "A file that is saved now would hold a part of them."
# Methods that fail on sharded weights. Each value is the sentence of the message that says why.
_REFUSED_METHODS = {
    "fuse_qkv_projections": _FUSED,
    "unfuse_qkv_projections": _FUSED,
    "_load_ip_adapter_weights": "An IP-Adapter that is loaded now would not be sharded.",
    "save_pretrained": _SAVED,
    "save_lora_adapter": _SAVED,
}
# Methods that do what ``to`` does with these arguments, but do not call it.
_MOVES: dict[str, torch.dtype | torch.device] = {
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "float": torch.float32,
    "double": torch.float64,
    "cpu": torch.device("cpu"),
    "cuda": torch.device("cuda"),
}


@dataclass(frozen=True, eq=False)
class ShardedComponent:
    """A component of a pipeline, and how para_core has sharded its weights.

    Args:
        module: The component.
        method: The name of the method.
        mesh: The ranks that share the weights.
        offload_policy: FSDP2's policy, if one was given.
        guard: The guard of the pipeline of the component.
    """

    module: nn.Module
    method: str
    mesh: DeviceMesh
    offload_policy: OffloadPolicy | None
    guard: MoveGuard

    def wrap(self) -> None:
        """Wrap the methods of the module that would fail on sharded weights, or save only a part of them.

        They then raise; ``to``, and what is short for it, raise only for moves that the method of sharding
        cannot make (:meth:`move`). Fills :attr:`Slot.WEIGHTS` with this record as owner, by which
        :func:`sharded_component` and :func:`~para_core.adapters.weights.one_way.is_split` know the component.
        """
        refused = {
            method: partial(_raise_on_shards, problem)
            for method, problem in _REFUSED_METHODS.items()
            if hasattr(self.module, method)
        }
        moves = {method: partial(self._move_to, target) for method, target in _MOVES.items()}
        fill_slot(self.module, Slot.WEIGHTS, {"to": self.move, **moves, **refused}, owner=self)

    def _move_to(
        self,
        target: torch.dtype | torch.device,
        call: Callable[..., Any],
        module: nn.Module,
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run ``call``, a method such as ``module.half`` that moves to ``target``, as :meth:`move` runs ``to``."""
        return self.move(lambda module, _: call(module, *args, **kwargs), module, target)

    def move(self, call: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """Run ``module.to``. Raise ``RuntimeError`` if the method of sharding cannot change the dtype or
        device type.

        If accelerate's model offload asks for the move, it is ignored instead.
        """
        if require_method(self.method).can_move:
            return call(module, *args, **kwargs)
        device, dtype, *_ = parse_to(*args, **kwargs)
        weights = list(module.parameters())
        dtypes = {x.dtype for x in weights if x.is_floating_point() and dtype not in (None, x.dtype)}
        devices = {x.device for x in weights if device is not None and x.device.type != device.type}
        if dtypes:
            self._raise_on_move(dtypes, dtype)
        if devices:
            if self.guard.offloading or hasattr(module, "_hf_hook"):
                return module
            self._raise_on_move(devices, device)
        return call(module, *args, **kwargs)

    def _raise_on_move(self, present: set[Any], wanted: Any) -> None:
        """Raise ``RuntimeError``: the weights have the dtypes or devices ``present``, and ``wanted`` was asked for."""
        raise RuntimeError(
            f"the weights of this {unwrapped_class(self.module).__name__} are sharded by FSDP2, as "
            f"{' and '.join(sorted(map(str, present)))}, and stay so; asked for was {wanted}. Load the "
            "pipeline again, and convert and move it before its weights are sharded (shard_weights, or "
            "weights= of parallelize_pipe)."
        )


def sharded_component(module: nn.Module) -> ShardedComponent | None:
    """Return the record of a component that para_core has sharded; None for others."""
    return slot_owner(module, Slot.WEIGHTS, ShardedComponent)


def is_distributed(module: nn.Module) -> bool:
    """Whether the weights of ``module`` are sharded, by para_core or by the user's own ``fully_shard``."""
    return method_of(module) is not None


def compare_calls(module: nn.Module, ranks: AnyMesh) -> None:
    """Wrap ``module``, whose weights are sharded, so that all of ``ranks`` compare that they make each call
    of it. Each call of it is then collective. Adds to the slot that :meth:`ShardedComponent.wrap` has filled.

    A rank that makes another call then raises on all of them, and a missing rank is named in the log; FSDP2
    alone would hang. Do not use this for a transformer, which is called in each step, and whose plan compares
    its inputs between ranks already.
    """
    name = f"the {unwrapped_class(module).__name__}"
    wrapper = partial(_agree_and_call, ranks, name, Signature.of({"call": name}))
    fill_slot(module, Slot.WEIGHTS, {"__call__": wrapper})


def _agree_and_call(
    ranks: AnyMesh,
    name: str,
    record: Signature,
    call: Callable[..., Any],
    module: nn.Module,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Compare with all ``ranks`` that they call the module ``name``, then run the call. Collective."""
    if not torch.compiler.is_compiling():
        agree(record, ranks, call=name)
    return call(module, *args, **kwargs)


def _raise_on_shards(
    problem: str, call: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any
) -> Any:
    """Raise ``RuntimeError`` in place of ``call``. ``problem`` is a sentence that says what would go wrong."""
    raise RuntimeError(
        f"the weights of this {unwrapped_class(module).__name__} are sharded. {problem} Load the pipeline "
        "again, and do it before its weights are sharded (shard_weights, or weights= of parallelize_pipe)."
    )


class MoveGuard:
    """Wrappers of the methods of one pipeline that would move or save its sharded components.

    FSDP2 remembers the dtype and the device of the sharded weights, so the next call after ``module.to(...)``
    would fail. accelerate's model offload may still move the other components; the sharded ones stay in
    place. The components of a pipeline share one guard, because one call of ``enable_model_cpu_offload``
    moves all.
    """

    def __init__(self) -> None:
        # Whether ``pipe.enable_model_cpu_offload`` is running.
        self.offloading = False

    @staticmethod
    def of(pipe: Any) -> MoveGuard:
        """Return the guard of ``pipe``. If it has none yet, install one."""
        guard = slot_owner(pipe, Slot.WEIGHTS, MoveGuard)
        if guard is not None:
            return guard
        guard = MoveGuard()
        methods = {
            "enable_model_cpu_offload": guard.offload,
            "enable_sequential_cpu_offload": guard.offload_layers,
            "save_pretrained": guard.save,
        }
        present = {method: around for method, around in methods.items() if hasattr(pipe, method)}
        fill_slot(pipe, Slot.WEIGHTS, present, owner=guard)
        return guard

    def offload(self, call: Callable[..., Any], pipe: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Run ``pipe.enable_model_cpu_offload``.

        During that call sharded components ignore moves to the host.
        """
        before, self.offloading = self.offloading, True
        try:
            return call(pipe, *args, **kwargs)
        finally:
            self.offloading = before

    def offload_layers(self, call: Callable[..., Any], pipe: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Run ``pipe.enable_sequential_cpu_offload``.

        Raise ``RuntimeError`` before any layer is moved if a component is sharded.
        """
        for module in components_with_blocks(pipe).values():
            if is_distributed(module):
                raise RuntimeError(
                    f"the weights of this {unwrapped_class(module).__name__} are sharded, and sequential offload takes "
                    "each rank's part for a whole weight. Use pipe.enable_model_cpu_offload(), which leaves sharded "
                    "components in place, or load the pipeline again, and keep the parts in host memory: "
                    "shard_weights(pipe, mesh, offload_policy=CPUOffloadPolicy())."
                )
        return call(pipe, *args, **kwargs)

    def save(self, call: Callable[..., Any], pipe: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Run ``pipe.save_pretrained``.

        Raise ``RuntimeError`` before any file is written if a component is sharded.
        """
        for module in components_with_blocks(pipe).values():
            if is_distributed(module):
                _raise_on_shards(_SAVED, call, module)
        return call(pipe, *args, **kwargs)
