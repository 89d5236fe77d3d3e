"""What a cache has to know of a model: its block stack, and what is done at which block."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from para_core.instance_patching import original_class
from para_core.plans.module_matching import parameters_of


@dataclass(frozen=True)
class BlockGroup:
    """Blocks through which the same tensors run, one block after the other.

    Args:
        lists: names of the module lists that hold the blocks, in the order in which they run.
        streams: parameters of a block's ``forward`` whose changed values it returns, in the order in which it returns them.
            A block of one stream returns the tensor itself.
        measured: the stream whose change is compared from step to step.
        chained: the model only hands the streams from block to block, and gives each the same other arguments; a compiled
            graph then skips all blocks of the group at once.
        between: arguments of the model with which it does more than that (residuals of a ControlNet).
        samples: the dim of ``measured`` that holds the samples of a batch: 1 of ``[S, B, C]``.
    """

    lists: tuple[str, ...]
    streams: tuple[str, ...] = ("hidden_states",)
    measured: str = "hidden_states"
    chained: bool = False
    between: tuple[str, ...] = ()
    samples: int = 0

    def __post_init__(self) -> None:
        for name in ("lists", "streams", "between"):
            _require_names("BlockGroup", name, getattr(self, name))
        if not self.lists or not self.streams:
            raise ValueError(
                f"BlockGroup(lists={self.lists}, streams={self.streams}): name at least one list and one stream."
            )
        if self.measured not in self.streams:
            raise ValueError(f"measured is {self.measured!r}; expected one of the streams {self.streams}.")


@dataclass(frozen=True)
class CachedBlocks:
    """The block stack of a model, in groups: another begins where the tensors change their form (text joins the image).

    Args:
        groups: in the order in which they run.
        conditions: arguments of the model that tell the branches of guidance apart where the pipeline does not name them. Defaults
            to ``encoder_hidden_states``, if the model takes it.
        uncached: arguments with which the model is called without the cache (those that leave out blocks).
        modulated: of the first block and its arguments by name, the modulated input ``[B, S, C]``: what it computes at little
            cost from the tokens and the time. For rules that decide before it.
    """

    groups: tuple[BlockGroup, ...]
    conditions: tuple[str, ...] | None = None
    uncached: tuple[str, ...] = ()
    modulated: Callable[[nn.Module, Mapping[str, Any]], Tensor] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.groups, tuple) or not all(isinstance(group, BlockGroup) for group in self.groups):
            raise TypeError(
                f"CachedBlocks(groups={self.groups!r}): expected a tuple of BlockGroups: CachedBlocks((BlockGroup(...),))."
            )
        if not self.groups:
            raise ValueError("CachedBlocks(groups=()): name at least one BlockGroup.")
        for name in ("conditions", "uncached"):
            if getattr(self, name) is not None:
                _require_names("CachedBlocks", name, getattr(self, name))


def _require_names(what: str, name: str, given: Any) -> None:
    if not isinstance(given, tuple) or not all(isinstance(one, str) for one in given):
        example = f"('{given}',)" if isinstance(given, str) else "('…',)"
        raise TypeError(f"{what}({name}={given!r}): expected a tuple of names: {name}={example}.")


@dataclass(frozen=True)
class Role:
    """What is done at a block. Blocks of one role share a class, and so a graph."""

    group: int
    streams: tuple[str, ...]
    parameters: tuple[str, ...]
    measured: str
    opens: bool
    decides: bool
    enters: bool
    skipped: bool
    exits: bool
    chained: bool


def _blocks_of(module: nn.Module, group: BlockGroup) -> list[nn.Module]:
    found: list[nn.Module] = []
    for name in group.lists:
        try:
            listed = module.get_submodule(name)
        except AttributeError:
            raise ValueError(
                f"{type(module).__name__} has no {name!r}, which the description of its blocks names. Name its module "
                "lists in BlockGroup(lists=...)."
            ) from None
        found.extend(listed.children())
    return found


def roles_of(
    module: nn.Module, blocks: CachedBlocks, first_blocks: int = 1, last_blocks: int = 0
) -> list[tuple[nn.Module, Role]]:
    """Each block at which something is done, in the order in which they run, and what.

    Args:
        first_blocks, last_blocks: so many always run.

    Raises:
        ValueError: the model has no such blocks, or none would ever be skipped.
    """
    found = [(place, group, block) for place, group in enumerate(blocks.groups) for block in _blocks_of(module, group)]
    first, stop = first_blocks, len(found) - last_blocks
    in_first_group = sum(place == 0 for place, _, _ in found)
    if first >= stop or first > in_first_group:
        raise ValueError(
            f"{type(module).__name__} has {len(found)} blocks, {in_first_group} of them in its first group; with "
            f"first_blocks={first} and last_blocks={last_blocks} none is left to skip. Choose fewer."
        )
    skipped = range(first, stop)
    roles = []
    for index, (place, group, block) in enumerate(found):
        parameters = parameters_of(block)
        missing = [name for name in group.streams if name not in parameters]
        if missing:
            raise ValueError(f"{type(block).__name__} has no parameter {missing[0]!r}; its forward takes {parameters}.")
        of_group = [i for i in skipped if found[i][0] == place]
        role = Role(
            group=place,
            streams=group.streams,
            parameters=parameters,
            measured=group.measured,
            opens=index == 0,
            decides=index == first - 1,
            enters=bool(of_group) and index == of_group[0],
            skipped=index in skipped,
            exits=bool(of_group) and index == of_group[-1],
            chained=group.chained,
        )
        if role.opens or role.decides or role.skipped:
            roles.append((block, role))
    return roles


def argument(name: str, parameters: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    if name in kwargs:
        return kwargs[name]
    place = parameters.index(name)
    return args[place] if place < len(args) else None


def as_tuple(output: Any) -> tuple[Any, ...]:
    return (output,) if isinstance(output, Tensor) else tuple(output)


def like(role: Role, values: tuple[Any, ...]) -> Any:
    return values[0] if len(role.streams) == 1 else values


def require_streams(role: Role, block: nn.Module, given: tuple[Any, ...], returned: tuple[Any, ...]) -> None:
    """Raise unless a block returned its streams in the order that its role names."""
    before, after = ([None if x is None else tuple(x.shape) for x in tensors] for tensors in (given, returned))
    if len(before) == len(after) and all(x == y for x, y in zip(before, after, strict=True) if None not in (x, y)):
        return
    cls, shapes = (
        original_class(block).__name__,
        f"was given {role.streams} of shapes {before}, and returned shapes {after}",
    )
    reordered = sorted(map(str, before)) == sorted(map(str, after))
    if not reordered and len(before) == len(after) and any(map(_only_shorter, before, after)):
        raise ValueError(
            f"{cls} {shapes}: tokens were sharded (or gathered) inside of this block, by a hook on it or by its own code. The cache runs around "
            "the block and its hooks, and measures tokens that are sharded alike before and after it. Shard before the block stack: the "
            "model's inputs, or with a plan: Plan(inner={'blocks.0': {...: Split(...)}})."
        )
    raise ValueError(
        f"{cls} {shapes}. Name in BlockGroup(streams=...) the parameters whose changed values it returns, in the order in which it returns them."
    )


def _only_shorter(before: tuple[int, ...] | None, after: tuple[int, ...] | None) -> bool:
    """Whether two shapes differ in one dim between the batch and the channels."""
    if before is None or after is None or len(before) != len(after):
        return False
    differing = [dim for dim, (x, y) in enumerate(zip(before, after, strict=True)) if x != y]
    return len(differing) == 1 and 0 < differing[0] < len(before) - 1
