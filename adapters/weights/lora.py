"""Load, fuse, unfuse and remove LoRAs of models whose weights are sharded.

peft reads and writes weights as if each rank had all of them. So while a LoRA is added, zeros of the global
shapes stand in for sharded weights, and while it is merged, the weights of one layer at a time are gathered,
and each rank keeps its part of the result. The method of sharding says whether the weights of LoRAs are
sharded, too.

``shard.py`` calls :func:`follow_loras` for each component that it shards; ``staged_loras.py``, which does the
same for stages, shares the functions that compare. Tests: tests/weights/test_lora.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from para_core.adapters.agree.arguments import agree_on_values
from para_core.adapters.agree.loras import describe_loras_of_model, lora_layers
from para_core.adapters.weights.feature import ShardMethod
from para_core.distributed.agree import together
from para_core.distributed.mesh import AnyMesh
from para_core.distributed.records import Record, describe_differences
from para_core.instance.private_class import original_class
from para_core.instance.record import empty_slot, fill_slot, fill_slots
from para_core.instance.slots import Slot
from para_core.torch_internals import without_hooks_after_load
from para_core.weights.parameters import stand_ins, weights_of

# Names of the LoRA methods of models. Those of pipelines call these, or merge the LoRA into each layer.
ADDS = ("load_lora_adapter", "add_adapter", "load_adapter")
MERGES = ("fuse_lora", "unfuse_lora")
CHANGES = (*ADDS, *MERGES, "unload_lora", "delete_adapters", "delete_adapter")


def on_all_ranks(ranks: AnyMesh) -> AbstractContextManager[object]:
    """Return a context that raises an exception of one of ``ranks`` on all of them. Collective at its end."""
    return together(ranks, "a LoRA could not be changed")


def agree_on_lora(ranks: AnyMesh, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise ``ValueError`` on all of ``ranks`` if they add different LoRAs. Collective.

    Ranks that hold different parts of the weights cannot compare these later. ``args`` and ``kwargs`` are the
    arguments of the method that adds a LoRA: first its weights by name, a configuration, or the path of a
    file. A path is not compared, because it may differ between hosts, and so the weights in such a file are
    not: a pipeline reads the file and passes its weights, only a call of the model's own method passes a path.
    """
    positional = {f"argument {index}": value for index, value in enumerate(args)}
    # Only the first one may be a path: the second is the name of the adapter or the prefix of its weights.
    compared = ("adapter_name", "prefix", *list(positional)[1:])
    values = {
        name: value
        for name, value in {**positional, **kwargs}.items()
        if isinstance(value, (Mapping, bool)) or is_dataclass(value) or name in compared
    }

    def explain(records: list[Record]) -> str:
        return (
            "the ranks of one mesh must call the method that adds a LoRA with equal arguments. "
            f"{'; '.join(describe_differences(records))}. Load the same file, or add the same weights, on all "
            "ranks."
        )

    agree_on_values(lambda: values, ranks, "the method that adds a LoRA", lambda: None, explain)


def agree_on_merge(ranks: AnyMesh, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise ``ValueError`` on all of ``ranks`` if they fuse or unfuse different LoRAs. Collective.

    Ranks that hold different parts of the weights cannot compare the result later. ``args`` and ``kwargs``
    are the arguments of ``fuse_lora`` or ``unfuse_lora`` of the transformer ``module``. Text encoders have no
    such methods, so the scales of their LoRAs are only compared by the calls of the pipeline.
    """

    def values() -> dict[str, Any]:
        positional = {f"argument {index}": value for index, value in enumerate(args)}
        return {**positional, **kwargs, **describe_loras_of_model("transformer", module)}

    def explain(records: list[Record]) -> str:
        return (
            "the ranks of one mesh must fuse and unfuse equal LoRAs with equal arguments. "
            f"{'; '.join(describe_differences(records))}. Make the same calls on all ranks."
        )

    agree_on_values(values, ranks, "the method that fuses a LoRA", lambda: None, explain)


def follow_loras(module: nn.Module, method: ShardMethod, mesh: DeviceMesh, ranks: AnyMesh) -> None:
    """Wrap the LoRA methods of ``module``, whose weights ``method`` has sharded over ``mesh``, so that they
    work.

    All of ``ranks`` must then call such a method together, and a failure on one rank raises on all.
    """
    loras = _ShardedLoras(module, method, mesh, ranks)
    methods = dict.fromkeys([name for name in CHANGES if hasattr(module, name)], loras.change)
    methods |= {name: loras.add for name in methods if name in ADDS}
    methods |= {name: loras.merge for name in methods if name in MERGES}
    fill_slot(module, Slot.LORA, methods)
    loras.wrap_merges()


class _ShardedLoras:
    """The wrappers of the LoRA methods of ``module``, whose weights ``method`` has sharded over ``mesh``."""

    def __init__(self, module: nn.Module, method: ShardMethod, mesh: DeviceMesh, ranks: AnyMesh) -> None:
        self._module, self._method, self._mesh, self._ranks = module, method, mesh, ranks
        # Each access of a method makes another object, and layers share a private class, and so a compiled
        # graph, only if they have the same wrapper.
        self._merge_wrapper = self._merge

    def add(self, call: Callable[..., Any], module: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Run a method that adds a LoRA, with weights of global shapes. Collective.

        If it fails on one rank alone, the others keep the LoRA, although all raise. The next call of the
        pipeline then raises, because it compares which LoRAs are active (``agree/loras.py``).
        """
        names = set(getattr(module, "peft_config", None) or ())
        with on_all_ranks(self._ranks), self._following(module, names):
            check_initialization(module, args, kwargs)
            agree_on_lora(self._ranks, args, kwargs)
            with self._global_shapes(module):
                return call(module, *args, **kwargs)

    def merge(self, call: Callable[..., Any], module: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Run a method that fuses or unfuses LoRAs. Collective."""
        agree_on_merge(self._ranks, module, args, kwargs)
        return self.change(call, module, *args, **kwargs)

    def change(self, call: Callable[..., Any], module: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Run a method that changes or removes LoRAs. Collective.

        The arguments of a method that removes some are not compared: the next call of the pipeline compares
        which LoRAs are left.
        """
        names = set(getattr(module, "peft_config", None) or ())
        with on_all_ranks(self._ranks), self._following(module, names):
            return call(module, *args, **kwargs)

    @contextmanager
    def _following(self, module: Any, names: set[str]) -> Iterator[None]:
        """Wrap and shard the LoRA layers that the ``with`` block adds, and unwrap those that it removes.

        It does so after an error of the block, too, because peft may leave layers that it added before. If an
        added LoRA cannot be sharded, remove all but ``names``, and raise ``ValueError``.
        """
        before = lora_layers(module)
        try:
            yield
        finally:
            present = {id(layer) for layer in lora_layers(module)}
            for layer in before:
                if id(layer) not in present:
                    empty_slot(layer, Slot.LORA)
            try:
                self._method.shard_loras(module)
            except ValueError:
                _remove_loras(module, names)
                raise
            finally:
                self.wrap_merges()

    @contextmanager
    def _global_shapes(self, module: nn.Module) -> Iterator[None]:
        """Give weights their global shapes in the ``with`` block, because peft sizes adapters by them. Collective.

        The weights of existing adapters are gathered. Zeros that take no memory replace the other sharded
        weights.
        """
        with ExitStack() as stack:
            adapters = [
                getattr(layer, name) for layer in lora_layers(module) for name in layer.adapter_layer_names
            ]
            stack.enter_context(self._method.gather_layers(module, adapters))
            sharded = [entry for entry in weights_of(module) if isinstance(entry[0], DTensor)]
            for owner in module.modules():
                if any(isinstance(x, DTensor) for x in owner.parameters(recurse=False)):
                    # FSDP2's hook would take the zeros for newly loaded weights.
                    stack.enter_context(without_hooks_after_load(owner))
            stack.enter_context(stand_ins(sharded, torch.device(self._mesh.device_type)))
            yield

    def wrap_merges(self) -> None:
        """Wrap the LoRA layers of the module, so that merging a LoRA gathers the weights of the layer."""
        wrapper = self._merge_wrapper
        fill_slots(lora_layers(self._module), Slot.LORA, {"merge": wrapper, "unmerge": wrapper})

    def _merge(self, call: Callable[..., Any], layer: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """Merge or unmerge the LoRAs of ``layer`` with its whole weight. Collective."""
        with self._method.gather_layers(self._module, [layer]):
            return call(layer, *args, **kwargs)


def _remove_loras(module: Any, kept: set[str]) -> None:
    """Remove the LoRAs of ``module``, a transformer, that are not named in ``kept``.

    Text encoders lack these methods of diffusers. None comes here: of the methods of sharding only FSDP2 has
    :attr:`ShardMethod.shards_encoders`, and its ``shard_loras`` refuses no LoRA.
    """
    # Use the methods of the class, because those of the instance communicate.
    cls: Any = original_class(module)
    if kept:
        cls.delete_adapters(module, [name for name in module.peft_config if name not in kept])
    else:
        cls.unload_lora(module)


def check_initialization(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise ``ValueError`` if a LoRA would be initialized from the weights of the model (DoRA, PiSSA,
    ``modules_to_save`` and others).

    Zeros replace the weights that this rank lacks while a LoRA is added, so these methods would compute wrong
    values in silence. ``args`` and ``kwargs`` are the arguments of the call that adds the LoRA. Every text
    for ``init_lora_weights`` but ``"gaussian"`` is refused, so that one which a later peft adds is refused
    too. The configuration in a file whose path is passed to the model itself is not read.
    """
    configs = [dict(vars(config)) for config in (*args, *kwargs.values()) if is_dataclass(config)]
    # A pipeline passes the configs that a file holds for its components as ``metadata``, with names like
    # "transformer.init_lora_weights". load_lora_adapter reads those with the prefix that is its second
    # argument.
    of_file = dict(kwargs.get("metadata") or {})
    prefix = kwargs.get("prefix", "transformer")
    if len(args) > 1:
        prefix = args[1]
    if prefix is not None:
        of_file = {
            name.removeprefix(f"{prefix}."): value
            for name, value in of_file.items()
            if name.startswith(f"{prefix}.")
        }
    # The magnitudes of a DoRA are in its file, too, and replace the wrong ones that are computed first.
    of_file["use_dora"] = False
    for config in (*configs, of_file):
        saved = config.get("modules_to_save")
        if saved:
            raise ValueError(
                f"a LoRA with modules_to_save={saved} begins with copies of modules of this "
                f"{original_class(module).__name__}, whose weights are sharded or in stages. Add it before "
                "parallelize_pipe(pipe, mesh=mesh)."
            )
        has_dora, start = config.get("use_dora", False), config.get("init_lora_weights")
        if has_dora or (isinstance(start, str) and start != "gaussian"):
            raise ValueError(
                f"a LoRA with use_dora={has_dora}, init_lora_weights={start!r} begins with values "
                f"that are computed from all weights of this {original_class(module).__name__}, which are "
                "sharded or in stages. Add it before parallelize_pipe(pipe, mesh=mesh), or load it from a "
                "file that says no init_lora_weights (pipe.load_lora_weights)."
            )
