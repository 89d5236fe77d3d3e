"""Load, fuse, unfuse and remove LoRAs of models whose weights are sharded.

With FSDP2, LoRA weights stay replicated; with tensor parallelism they are sharded like the layer that they adapt.
Merging a LoRA gathers one layer at a time, and each rank keeps its part of the result.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import is_dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from para_core.adapters.agree.arguments import require_equal
from para_core.adapters.agree.loras import lora_layers, lora_weights
from para_core.distributed.agree import Record, differing_fields, raising_on_all
from para_core.distributed.mesh import GuidedMesh, SequenceMesh
from para_core.instance.private_class import original_class
from para_core.instance.record import empty_slot, empty_slots, fill_slot, fill_slots
from para_core.instance.slots import Slot
from para_core.weights.fsdp import is_sharded, shard_mesh, sharded_parameters, whole_blocks
from para_core.weights.parameters import forget_gradients, stand_ins, weights_of
from para_core.weights.tensor import shard_new_loras, tensor_mesh, whole_tensors

# Names of the LoRA methods of models. Those of pipelines call these, or merge the LoRA into each layer.
ADDS = ("load_lora_adapter", "add_adapter", "load_adapter")
CHANGES = (*ADDS, "fuse_lora", "unfuse_lora", "unload_lora", "delete_adapters", "delete_adapter")

Ranks = GuidedMesh | SequenceMesh | None


def on_all_ranks(ranks: Ranks) -> AbstractContextManager[object]:
    """Return a context that raises an exception of one of ``ranks`` on all of them. With None it does nothing."""
    return nullcontext() if ranks is None else raising_on_all(ranks, "a LoRA could not be changed")


def require_equal_lora(ranks: Ranks, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise ``ValueError`` on all of ``ranks`` if they add different LoRAs. With None it does nothing.

    Ranks that hold different parts of the weights cannot compare these later. ``args`` and ``kwargs`` are the arguments
    of the method that adds a LoRA: its weights by name, a configuration, or the path of a file, which is not compared,
    because it may differ between hosts.
    """
    if ranks is None:
        return
    named = {**{f"argument {index}": value for index, value in enumerate(args)}, **kwargs}
    values = {
        name: value
        for name, value in named.items()
        if isinstance(value, (Mapping, bool)) or is_dataclass(value) or name == "adapter_name"
    }

    def explain(records: list[Record]) -> str:
        return (
            "the ranks of one mesh must call the method that adds a LoRA with equal arguments. "
            f"{'; '.join(differing_fields(records))}. Load the same file, or add the same weights, on all ranks."
        )

    require_equal(lambda: values, ranks, "the method that adds a LoRA", lambda: None, explain)


def follow_loras(module: nn.Module, ranks: Ranks) -> None:
    """Wrap the LoRA methods of ``module``, so that they work although its weights are sharded.

    All of ``ranks`` must then call such a method together, and a failure on one rank raises on all. With ``ranks=None``
    only the rank that fails raises.
    """
    changes = {name: partial(_change, ranks, name in ADDS) for name in CHANGES if hasattr(module, name)}
    fill_slot(module, Slot.LORA, changes)
    _wrap_merges(module)


def leave_loras(module: nn.Module) -> None:
    """Undo :func:`follow_loras`."""
    empty_slots([module, *lora_layers(module)], Slot.LORA)


def _change(ranks: Ranks, adds: bool, call: Callable[..., Any], module: Any, /, *args: Any, **kwargs: Any) -> Any:
    before, names = lora_layers(module), set(getattr(module, "peft_config", None) or ())
    with on_all_ranks(ranks):
        try:
            if not adds:
                return call(module, *args, **kwargs)
            require_own_values(module, args, kwargs)
            require_equal_lora(ranks, args, kwargs)
            with _as_whole(module):
                added = call(module, *args, **kwargs)
            forget_gradients(module)
            return added
        finally:
            present = {id(layer) for layer in lora_layers(module)}
            for layer in before:
                if id(layer) not in present:
                    empty_slot(layer, Slot.LORA)
            try:
                if tensor_mesh(module) is not None:
                    shard_new_loras(module)
            except ValueError:
                # Remove the new adapters with the methods of the class, because those of the instance communicate.
                cls: Any = original_class(module)
                if names:
                    cls.delete_adapters(module, [name for name in module.peft_config if name not in names])
                else:
                    cls.unload_lora(module)
                raise
            finally:
                mesh = shard_mesh(module)
                if mesh is not None and is_sharded(module) and mesh.device_type != "cpu":
                    # peft creates LoRA weights on the device of the layer's weights: the host, if these are offloaded.
                    for weight in lora_weights(module):
                        weight.data = weight.data.to(mesh.device_type)
                _wrap_merges(module)


def require_own_values(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise ``ValueError`` if a LoRA would be initialized from the weights of its layer (DoRA, PiSSA and others).

    Zeros replace the weights that this rank lacks while a LoRA is added, so these methods would compute wrong values.
    ``args`` and ``kwargs`` are the arguments of the call that adds the LoRA.
    """
    for config in (*args, *kwargs.values()):
        start = getattr(config, "init_lora_weights", None)
        if getattr(config, "use_dora", False) or (isinstance(start, str) and start != "gaussian"):
            raise ValueError(
                f"a LoRA with use_dora={config.use_dora}, init_lora_weights={start!r} begins with values that are "
                f"computed from all weights of this {original_class(module).__name__}, which are sharded or in stages. "
                "Add it before parallelize_pipe(pipe, mesh=mesh), or load it from a file (pipe.load_lora_weights)."
            )


@contextmanager
def _as_whole(module: nn.Module) -> Iterator[None]:
    """Give the weights of ``module`` their global shapes in the ``with`` block, because peft sizes adapters by them.

    The weights of existing adapters are gathered. Zeros that take no memory replace the other sharded weights.
    """
    with ExitStack() as stack:
        if tensor_mesh(module) is not None:
            parts = [getattr(layer, name) for layer in lora_layers(module) for name in layer.adapter_layer_names]
            stack.enter_context(whole_tensors(module, parts))
        sharded = [held for held in weights_of(module) if isinstance(held[0], DTensor)]
        for owner in module.modules():
            if any(isinstance(x, DTensor) for x in owner.parameters(recurse=False)):
                # Disable FSDP2's hook, which would take the zeros for newly loaded weights.
                stack.callback(setattr, owner, "_load_state_dict_post_hooks", owner._load_state_dict_post_hooks)
                owner._load_state_dict_post_hooks = OrderedDict()
        mesh = tensor_mesh(module) or shard_mesh(module)
        if mesh is not None:
            stack.enter_context(stand_ins(sharded, torch.device(mesh.device_type)))
        yield


def _wrap_merges(module: nn.Module) -> None:
    # The layers of all blocks share one class, so the compiled graph of one block fits the others.
    around = partial(_with_whole, module if tensor_mesh(module) is not None else None)
    fill_slots(lora_layers(module), Slot.LORA, {"merge": around, "unmerge": around})


def _with_whole(
    tensors_of: nn.Module | None, call: Callable[..., Any], layer: nn.Module, /, *args: Any, **kwargs: Any
) -> Any:
    """Run a merge of ``layer`` with gathered weights. ``tensors_of`` is the tensor-parallel model; None for FSDP2."""
    with whole_blocks(layer, sharded_parameters(layer)) if tensors_of is None else whole_tensors(tensors_of, [layer]):
        return call(layer, *args, **kwargs)
