"""Describe the block stack of a transformer to what distributes its blocks over ranks or moves them to the
host: the blocks in order, their costs, and why a model cannot run in pipeline stages.

Pipeline stages, PipeFusion, the offload of blocks and the planner use it. Tests: tests/weights/test_stages.py.
"""

from __future__ import annotations

import re
from itertools import chain

from torch import nn

from para_core.adapters.adapter import Adapter
from para_core.adapters.registry import adapter_for, require_blocks
from para_core.weights.stack import StackedBlock

# Matches names of layers that process one vector per sample, or only text tokens. They take little time
# relative to the size of their weights, so the cost of a block leaves them out. A name that is missing here makes
# stages uneven, and changes no result.
_CHEAP = re.compile(r"norm|mod|adaln|scale_shift|context|txt|add_[qkv]|add_out|(^|\.)text", re.IGNORECASE)


def why_no_stages(module: nn.Module, adapter: Adapter | None = None) -> str | None:
    """Return why ``module`` cannot run in pipeline stages, as a part of a sentence; None if it can."""
    adapter = adapter_for(module, adapter)
    if adapter is None or adapter.blocks is None:
        return "its block stack is not described (Adapter(..., blocks=CachedBlocks(...)))"
    if adapter.called_outside:
        return (
            f"it calls {', '.join(adapter.called_outside)} outside of the block, which one stage alone holds"
        )
    if not all(group.chained for group in adapter.blocks.groups):
        return (
            "its adapter does not say that blocks pass only tokens to each other (BlockGroup(chained=True))"
        )
    return None


def stack_of(module: nn.Module, adapter: Adapter | None = None) -> list[StackedBlock]:
    """Return a :class:`StackedBlock` for each block of ``module``, in the order in which the blocks run.

    Raises ``TypeError`` if no adapter describes the blocks.
    """
    return [
        StackedBlock(block, group.streams, cost_of(block))
        for group in require_blocks(module, adapter).groups
        for block in chain.from_iterable(module.get_submodule(name).children() for name in group.lists)
    ]


def cost_of(block: nn.Module) -> float:
    """Return the relative cost of ``block``: the elements of its weight matrices for image or video tokens."""
    matrices = {name: x.numel() for name, x in block.named_parameters() if x.ndim > 1}
    return (
        sum(size for name, size in matrices.items() if not _CHEAP.search(name)) or sum(matrices.values()) or 1
    )
