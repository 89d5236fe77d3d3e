"""What of a pipeline can be sharded: the transformers and the text encoders, and the blocks of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from torch import nn

from para_core.adapters.registry import TRANSFORMERS, adapter_for
from para_core.instance_patching import original_class, uncompiled

# What encodes a prompt, or the image that is given with it.
_ENCODERS = ("text_encoder", "image_encoder")


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
        [] if known is None or known.blocks is None else [name for stage in known.blocks.stages for name in stage.lists]
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
