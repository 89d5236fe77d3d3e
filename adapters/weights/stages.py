"""The blocks of a transformer of diffusers as stages take them: in order, with their streams, and what each costs."""

from __future__ import annotations

import re
from itertools import chain

from torch import nn

from para_core.adapters.adapter import Adapter
from para_core.adapters.supported import adapter_for
from para_core.instance import Order, original_class, unwrap, wrap_method
from para_core.mesh import MeshDim
from para_core.weights.stages import RequireEqual, StagedBlock, gather_stages, hold_stages, stages_of

_KEY = "weights in stages"
# Names of layers that see one vector for each sample, or the few tokens of text: little time, however many weights.
_QUICK = re.compile(r"norm|mod|adaln|scale_shift|context|txt|add_[qkv]|add_out|(^|\.)text", re.IGNORECASE)
# What would put weights into blocks that are not here, or move them.
_TOO_LATE = ("load_lora_adapter", "add_adapter", "load_adapter", "fuse_lora", "unfuse_lora", "unload_lora", "to")


def why_no_stages(module: nn.Module, adapter: Adapter | None = None) -> str | None:
    """Why ``module`` cannot run in stages; None if it can."""
    known = adapter_for(module, adapter)
    if known is None or known.blocks is None:
        return "its block stack is not described (Adapter(..., blocks=CachedBlocks(...)))"
    if not all(stage.chained for stage in known.blocks.stages):
        return (
            "it hands more from block to block than tokens, or it is not known that it does not (Stage(chained=True))"
        )
    return None


def stack_of(module: nn.Module, adapter: Adapter | None = None) -> list[StagedBlock]:
    """Its blocks, in the order in which they run; each costs as many weights as the tokens of an image or video go through."""
    known = adapter_for(module, adapter)
    if known is None or known.blocks is None:
        raise ValueError(f"the blocks of {original_class(module).__name__} are not described.")
    return [
        StagedBlock(block, stage.streams, cost_of(block))
        for stage in known.blocks.stages
        for block in chain.from_iterable(module.get_submodule(name).children() for name in stage.lists)
    ]


def cost_of(block: nn.Module) -> float:
    """Weights of its matrices, but for modulations (of one vector per sample) and those of text alone (of few tokens)."""
    matrices = {name: x.numel() for name, x in block.named_parameters() if x.ndim > 1}
    return sum(size for name, size in matrices.items() if not _QUICK.search(name)) or sum(matrices.values()) or 1


def hold_stage(
    module: nn.Module, dim: MeshDim, adapter: Adapter | None = None, require_equal: RequireEqual | None = None
) -> None:
    """Run a transformer in stages over ``dim``, and keep this rank's blocks alone."""
    hold_stages(module, stack_of(module, adapter), dim, require_equal=require_equal)
    for method in _TOO_LATE:
        if hasattr(module, method):
            wrap_method(module, method, _KEY, _too_late, order=Order.PLAN)


def release_stage(module: nn.Module) -> None:
    """Undo :func:`hold_stage`, if it was called: all ranks hold all blocks again, and all of them call this."""
    if stages_of(module) is not None:
        gather_stages(module)
        unwrap(module, _KEY)


def _too_late(call: object, module: nn.Module, /, *args: object, **kwargs: object) -> None:
    raise RuntimeError(
        f"this {original_class(module).__name__} runs in stages, and holds its own blocks alone: moving it, or changing a LoRA, would "
        "leave out the others. Do it before parallelize_pipe(pipe, mesh=mesh); unparallelize_pipe(pipe), on all ranks, gives all blocks back."
    )
