"""What is done at which block of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from para_core.cache.blocks import CachedBlocks, Stage
from para_core.cache.options import CacheOptions
from para_core.plans.places import parameters_of


@dataclass(frozen=True)
class Role:
    """What is done at a block. Blocks of one role share a class, and so a graph."""

    stage: int
    streams: tuple[str, ...]
    parameters: tuple[str, ...]
    measured: str
    opens: bool
    decides: bool
    enters: bool
    skipped: bool
    exits: bool
    chained: bool


def _blocks_of(module: nn.Module, stage: Stage) -> list[nn.Module]:
    found: list[nn.Module] = []
    for name in stage.lists:
        try:
            listed = module.get_submodule(name)
        except AttributeError:
            raise ValueError(
                f"{type(module).__name__} has no {name!r}, which the description of its blocks names. Name its module "
                "lists in Stage(lists=...)."
            ) from None
        found.extend(listed.children())
    return found


def roles_of(module: nn.Module, blocks: CachedBlocks, options: CacheOptions) -> list[tuple[nn.Module, Role]]:
    """Each block at which something is done, in the order in which they run, and what."""
    found = [(place, stage, block) for place, stage in enumerate(blocks.stages) for block in _blocks_of(module, stage)]
    first, stop = options.first_blocks, len(found) - options.last_blocks
    in_first_stage = sum(place == 0 for place, _, _ in found)
    if first >= stop or first > in_first_stage:
        raise ValueError(
            f"{type(module).__name__} has {len(found)} blocks, {in_first_stage} of them in its first stage; with "
            f"first_blocks={first} and last_blocks={options.last_blocks} none is left to skip. Choose fewer."
        )
    skipped = range(first, stop)
    roles = []
    for index, (place, stage, block) in enumerate(found):
        parameters = parameters_of(block)
        missing = [name for name in stage.streams if name not in parameters]
        if missing:
            raise ValueError(f"{type(block).__name__} has no parameter {missing[0]!r}; its forward takes {parameters}.")
        of_stage = [i for i in skipped if found[i][0] == place]
        role = Role(
            stage=place,
            streams=stage.streams,
            parameters=parameters,
            measured=stage.measured,
            opens=index == 0,
            decides=index == first - 1,
            enters=bool(of_stage) and index == of_stage[0],
            skipped=index in skipped,
            exits=bool(of_stage) and index == of_stage[-1],
            chained=stage.chained,
        )
        if role.opens or role.decides or role.skipped:
            roles.append((block, role))
    return roles


def argument(name: str, parameters: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    if name in kwargs:
        return kwargs[name]
    place = parameters.index(name)
    return args[place] if place < len(args) else None
