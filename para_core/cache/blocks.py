"""What a cache has to know of a model: its block stack."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Stage:
    """Blocks through which the same tensors run, one block after the other.

    Args:
        lists: names of the module lists that hold the blocks, in the order in which they run.
        streams: parameters of a block's ``forward`` whose changed values it returns, in the order in which it returns them.
            A block of one stream returns the tensor itself.
        measured: the stream whose change is compared from step to step.
        chained: the model only hands the streams from block to block, and gives each the same other arguments; a compiled
            graph then skips all blocks of the stage at once.
        between: arguments of the model with which it does more than that (residuals of a ControlNet).
    """

    lists: tuple[str, ...]
    streams: tuple[str, ...] = ("hidden_states",)
    measured: str = "hidden_states"
    chained: bool = False
    between: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("lists", "streams", "between"):
            _require_names("Stage", name, getattr(self, name))
        if not self.lists or not self.streams:
            raise ValueError(
                f"Stage(lists={self.lists}, streams={self.streams}): name at least one list and one stream."
            )
        if self.measured not in self.streams:
            raise ValueError(f"measured is {self.measured!r}; expected one of the streams {self.streams}.")


@dataclass(frozen=True)
class CachedBlocks:
    """The block stack of a model, in stages: another begins where the tensors change their form (text joins the image).

    Args:
        stages: in the order in which they run.
        conditions: arguments of the model that tell the branches of guidance apart where the pipeline does not name them.
        uncached: arguments with which the model is called without the cache (those that leave out blocks).
    """

    stages: tuple[Stage, ...]
    conditions: tuple[str, ...] = ("encoder_hidden_states",)
    uncached: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.stages, tuple) or not all(isinstance(stage, Stage) for stage in self.stages):
            raise TypeError(
                f"CachedBlocks(stages={self.stages!r}): expected a tuple of Stages: CachedBlocks((Stage(...),))."
            )
        if not self.stages:
            raise ValueError("CachedBlocks(stages=()): name at least one Stage.")
        for name in ("conditions", "uncached"):
            _require_names("CachedBlocks", name, getattr(self, name))


def _require_names(what: str, name: str, given: Any) -> None:
    if not isinstance(given, tuple) or not all(isinstance(one, str) for one in given):
        example = f"('{given}',)" if isinstance(given, str) else "('…',)"
        raise TypeError(f"{what}({name}={given!r}): expected a tuple of names: {name}={example}.")
