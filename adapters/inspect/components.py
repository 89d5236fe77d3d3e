"""Find the transformers, encoders and autoencoders of a pipeline, and the blocks of transformers and encoders.

The features of ``adapters/weights``, the planner and the fleet ask here. Transformers alone are found by
``adapters/registry.py``, and the block stack of a transformer by ``block_stack.py``. Tests:
tests/adapters/compatibility/test_checks.py, tests/weights/test_fsdp.py.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from torch import nn

from para_core.adapters.registry import adapter_for, all_components, transformers_of
from para_core.instance.modules import uncompiled
from para_core.instance.private_class import original_class, unwrapped_class

# Methods by which pipelines call an autoencoder. Pipelines also call vocoders, as modules, but these are
# small and stay on the device.
VAE_METHODS = ("encode", "decode")
# Names of the autoencoders for sound, in pipelines that also generate sound.
SOUND_VAES = ("audio_vae", "sound_tokenizer")

# Prefixes of the names of components that encode prompts or conditioning images.
_ENCODERS = ("text_encoder", "image_encoder")
# Matches the config entries that hold a number of blocks, such as ``num_layers`` and ``depth``. A model that names
# them differently costs time only: the copy that predicts the form of its output then has all blocks
# (adapters/cfg/output_form.py).
_DEPTH = re.compile(r"(num|n)_(\w+_)?(layers|blocks)|depth")


def components_with_blocks(pipe: Any, names: Sequence[str] | None = None) -> dict[str, nn.Module]:
    """Return the transformers and encoders of ``pipe`` that have blocks, by name, without compile wrappers.

    ``names`` are the components to return; None for all. Raises ``TypeError`` if it is a string, and
    ``ValueError`` if the pipeline has no such component, or the component has no blocks.
    """
    parts: dict[str, Any] = {name: uncompiled(part) for name, part in all_components(pipe).items()}
    transformers = transformers_of(pipe)
    possible = {
        name: part
        for name, part in parts.items()
        # Autoencoders are left out, because pipelines call their methods and submodules without calling the
        # module itself, which bypasses FSDP2's hooks.
        if (name in transformers or name.startswith(_ENCODERS))
        and isinstance(part, nn.Module)
        and blocks_of(part)
    }
    if names is None:
        return possible
    if isinstance(names, str):
        raise TypeError(f"components is {names!r}; expected a sequence of names: components=[{names!r}].")
    unknown = [name for name in names if name not in possible]
    if unknown:
        raise ValueError(
            f"components contains {unknown[0]!r}; expected components of this {original_class(pipe).__name__} that "
            "can be sharded: "
            f"{', '.join(possible) or 'none'}."
        )
    return {name: possible[name] for name in names}


def text_encoders_of(pipe: Any) -> dict[str, nn.Module]:
    """Return the text encoders of ``pipe`` by name, each without the wrapper of ``torch.compile``."""
    parts = {
        name: uncompiled(part)
        for name, part in all_components(pipe).items()
        if name.startswith("text_encoder")
    }
    return {name: part for name, part in parts.items() if isinstance(part, nn.Module)}


def encoders_with_blocks(pipe: Any) -> list[str]:
    """Return the names of the text encoders of ``pipe`` that have blocks, which FSDP2 can shard."""
    return [name for name in components_with_blocks(pipe) if name in text_encoders_of(pipe)]


def vaes_of(pipe: Any) -> dict[str, nn.Module]:
    """Return the autoencoders of ``pipe`` by name, ``vae`` first, each without the wrapper of ``torch.compile``."""
    parts = {name: uncompiled(getattr(pipe, name, None)) for name in ("vae", *SOUND_VAES)}
    return {name: part for name, part in parts.items() if isinstance(part, nn.Module)}


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """Return the blocks of a transformer or text encoder in the order in which they run; empty if there are
    none.

    The blocks are the block stack of the adapter and the entries of every other outermost ``ModuleList`` that
    holds several modules of one class with parameters.

    FSDP2 gathers the next block of this list while one computes, and the planner counts what is then gathered
    at one time, so a wrong order costs time or memory. It changes no result: therefore an adapter that the
    user passed is not needed here, and its lists, like all others, come in the order of the modules.
    """
    adapter = adapter_for(module)
    stack: list[str] = []
    if adapter is not None and adapter.blocks is not None:
        stack = [name for group in adapter.blocks.groups for name in group.lists]
    others = [name for name in _outermost_lists(module) if name not in stack]
    # Blocks outside the stack come first: most of them (text refiners, blocks of a condition) run before the
    # stack.
    return list(chain.from_iterable(module.get_submodule(name).children() for name in (*others, *stack)))


def config_and_depths(module: nn.Module) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the config with which the class of ``module`` makes it, and its entries that are numbers of blocks."""
    parameters = inspect.signature(unwrapped_class(module)).parameters
    config: Any = module.config
    config = {name: value for name, value in config.items() if name in parameters}
    depths = {
        name: x for name, x in config.items() if _DEPTH.fullmatch(name) and isinstance(x, int) and x > 0
    }
    return config, depths


def _outermost_lists(module: nn.Module, prefix: str = "") -> Iterator[str]:
    """Yield the paths of the outermost lists of blocks in ``module``, which itself has the path ``prefix``."""
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList):
            if (
                len(child) > 1
                and len(set(map(original_class, child))) == 1
                and next(child.parameters(), None) is not None
            ):
                yield prefix + name
        else:
            yield from _outermost_lists(child, f"{prefix}{name}.")
