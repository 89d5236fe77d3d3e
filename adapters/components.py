"""The transformers and text encoders of a pipeline, and the blocks of each, as sharding, stages and the planner take them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from torch import nn

from para_core.adapters.registry import TRANSFORMERS, adapter_for, plan_for
from para_core.adapters.spec import Adapter, Text
from para_core.instance_patching import original_class, uncompiled
from para_core.weights.patch_plan import PatchPlan, patch_plan
from para_core.weights.stages import StagedBlock

# What encodes a prompt, or the image that is given with it.
_ENCODERS = ("text_encoder", "image_encoder")
# Names of layers that see one vector for each sample, or the few tokens of text: little time, however many weights.
_QUICK = re.compile(r"norm|mod|adaln|scale_shift|context|txt|add_[qkv]|add_out|(^|\.)text", re.IGNORECASE)


def components_of(pipe: Any, names: Sequence[str] | None = None) -> dict[str, nn.Module]:
    """Components by name, as they were before ``torch.compile``.

    Args:
        names: None: all transformers and encoders that have blocks.

    Raises:
        ValueError: the pipeline has no such component, or it has no blocks.
    """
    parts: dict[str, Any] = {name: uncompiled(part) for name, part in pipe.components.items()}
    possible = {
        name: part
        for name, part in parts.items()
        # An autoencoder is called by parts, which FSDP2 does not see.
        if (name in TRANSFORMERS or name.startswith(_ENCODERS)) and isinstance(part, nn.Module) and blocks_of(part)
    }
    if names is None:
        return possible
    if isinstance(names, str):
        raise TypeError(f"components is {names!r}; expected a sequence of names: components=[{names!r}].")
    unknown = [name for name in names if name not in possible]
    if unknown:
        raise ValueError(
            f"components names {unknown[0]!r}; of this {original_class(pipe).__name__}, what can be sharded is "
            f"{', '.join(possible)}."
        )
    return {name: possible[name] for name in names}


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """The blocks of a transformer or of a text encoder, in the order in which they run.

    The stacks that its adapter names, and every other outermost ``ModuleList`` of several alike modules that hold parameters.
    """
    known = adapter_for(module)
    named = (
        [] if known is None or known.blocks is None else [name for group in known.blocks.groups for name in group.lists]
    )
    others = [name for name in _outermost_lists(module) if name not in named]
    # What runs before the stack (refiners of text, blocks of a condition) is mostly defined before it, too.
    return list(chain.from_iterable(module.get_submodule(name).children() for name in (*others, *named)))


def _outermost_lists(module: nn.Module, prefix: str = "") -> Iterator[str]:
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList):
            if len(child) > 1 and len({type(one) for one in child}) == 1 and _has_parameters(child):
                yield prefix + name
        else:
            yield from _outermost_lists(child, f"{prefix}{name}.")


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def why_no_stages(module: nn.Module, adapter: Adapter | None = None) -> str | None:
    """Why ``module`` cannot run in stages; None if it can."""
    known = adapter_for(module, adapter)
    if known is None or known.blocks is None:
        return "its block stack is not described (Adapter(..., blocks=CachedBlocks(...)))"
    if not all(group.chained for group in known.blocks.groups):
        return "it hands more from block to block than tokens, or it is not known that it does not (BlockGroup(chained=True))"
    return None


def stack_of(module: nn.Module, adapter: Adapter | None = None) -> list[StagedBlock]:
    """Its blocks, in the order in which they run; each costs as many weights as the tokens of an image or video go through."""
    known = adapter_for(module, adapter)
    if known is None or known.blocks is None:
        raise ValueError(f"the blocks of {original_class(module).__name__} are not described.")
    return [
        StagedBlock(block, group.streams, cost_of(block))
        for group in known.blocks.groups
        for block in chain.from_iterable(module.get_submodule(name).children() for name in group.lists)
    ]


def cost_of(block: nn.Module) -> float:
    """Weights of its matrices, but for modulations (of one vector per sample) and those of text alone (of few tokens)."""
    matrices = {name: x.numel() for name, x in block.named_parameters() if x.ndim > 1}
    return sum(size for name, size in matrices.items() if not _QUICK.search(name)) or sum(matrices.values()) or 1


def patch_plan_for(module: nn.Module, adapter: Adapter | None = None) -> PatchPlan | str:
    """How a supported transformer is split into patches, or why it is not."""
    known: Any = adapter_for(module, adapter)
    text: Text | None = None if known.empty_text else "replicate"
    return patch_plan(plan_for(module, text, adapter), module, known.frames)
