"""Load, fuse, unfuse and remove LoRAs of a transformer in pipeline stages, while the blocks of other stages
are freed.

``staged_transformer.py`` installs the wrappers. For weights in shards ``lora.py`` does the same. Tests:
tests/weights/test_lora.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from para_core.adapters.agree.arguments import agree_on_values
from para_core.adapters.agree.loras import describe_loras_of_model, lora_weights, merging_layers
from para_core.adapters.weights.lora import (
    ADDS,
    CHANGES,
    MERGES,
    agree_on_lora,
    agree_on_merge,
    check_initialization,
    on_all_ranks,
)
from para_core.distributed.mesh import GuidedMesh
from para_core.distributed.records import Record, describe_differences
from para_core.instance.record import Wrapper, empty_slots, fill_slots
from para_core.instance.slots import Slot
from para_core.weights.parameters import stand_ins, weights_of
from para_core.weights.stages import Stages, free_other_blocks


def agree_on_loras(module: nn.Module, mesh: GuidedMesh) -> None:
    """Raise ``ValueError`` on all ranks if they have loaded different LoRAs. Collective."""

    def explain(records: list[Record]) -> str:
        return (
            "the ranks of one mesh must call parallelize_pipe with equal models. "
            f"{'; '.join(describe_differences(records))}. Load the same LoRAs on all ranks before it."
        )

    describe = partial(describe_loras_of_model, "transformer", module)
    agree_on_values(describe, mesh, "parallelize_pipe", lambda: None, explain)


def wrappers_of_lora_methods(stages: Stages, mesh: GuidedMesh) -> dict[str, Wrapper]:
    """Return a wrapper of each method of the model of ``stages`` that adds or changes LoRAs, by its name."""
    wrappers: dict[str, Wrapper] = {}
    for name in CHANGES:
        if not hasattr(stages.module, name):
            continue
        run = _change_lora
        if name in ADDS:
            run = _add_lora
        elif name in MERGES:
            run = _merge_lora
        wrappers[name] = partial(run, stages, mesh)
    return wrappers


def _merge_lora(
    stages: Stages,
    mesh: GuidedMesh,
    call: Callable[..., Any],
    module: nn.Module,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run ``call``, a method of ``module`` that fuses or unfuses LoRAs. Collective."""
    agree_on_merge(mesh, module, args, kwargs)
    return _change_lora(stages, mesh, call, module, *args, **kwargs)


def _change_lora(
    stages: Stages,
    mesh: GuidedMesh,
    call: Callable[..., Any],
    module: nn.Module,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run ``call``, a method of ``module`` that changes loaded LoRAs. Collective.

    Weights of other stages' blocks are on the meta device. Merging a LoRA computes with them there without
    effect, but peft must not read their values.
    """
    layers = [layer for block in stages.other_blocks for layer in merging_layers(block)]
    with on_all_ranks(mesh):
        try:
            fill_slots(layers, Slot.STAGED_MERGE, {"merge": _merge_without_check})
            return call(module, *args, **kwargs)
        finally:
            empty_slots(layers, Slot.STAGED_MERGE)


def _merge_without_check(call: Callable[..., Any], layer: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Merge a LoRA into a layer whose weights are freed, without peft's check for NaN, which would read them."""
    bound = inspect.signature(call).bind(layer, *args, **kwargs)
    bound.arguments["safe_merge"] = False
    return call(*bound.args, **bound.kwargs)


def _add_lora(
    stages: Stages,
    mesh: GuidedMesh,
    call: Callable[..., Any],
    module: nn.Module,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Add a LoRA to all blocks, then free its weights in the blocks of other stages. Collective.

    During the call stand-ins on this rank's device replace these blocks' weights, because peft reads their
    devices and dtypes. They hold zeros, or NaN for the weights of earlier LoRAs, which the call may write to
    (:func:`~para_core.weights.parameters.stand_ins`). So the LoRA must not be initialized from weights
    (:func:`check_initialization`).
    """
    with on_all_ranks(mesh):
        check_initialization(module, args, kwargs)
        agree_on_lora(mesh, args, kwargs)
        device = next(stages.blocks[stages.block_range.start].block.parameters()).device
        lora_ids = {id(x) for x in lora_weights(module)}
        freed = [weight for block in stages.other_blocks for weight in weights_of(block)]
        try:
            with stand_ins(freed, device, lora_ids):
                return call(module, *args, **kwargs)
        finally:
            free_other_blocks(stages)
