"""The description of a model's transformer blocks for a cache.

Adapters hold one for each model (``adapters/models/``), and users write one for their own. It is compared
with a model in :mod:`.block_roles`. Tests: tests/cache/test_options.py; tests/cache/test_graph.py for
``chained`` and ``between``, tests/cache/test_steps.py for ``conditions``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class BlockGroup:
    """Consecutive transformer blocks with the same inputs and outputs, which a cache skips together.

    Args:
        lists (`tuple[str, ...]`): Names of the model's module lists that contain the blocks, in the order in
            which they run.
        streams (`tuple[str, ...]`, defaults to `("hidden_states",)`): Parameters of a block's ``forward``
            whose new values it returns, in the order in which it returns them. A block with one stream
            returns the tensor itself. If a parameter is a dataclass, its name means all fields with tensors,
            and ``"video.x"`` means one field. A block returns integers and bools as it gets them. One that
            writes to a stream in place is refused at its first step; a compiled graph copies the stream first.
        measured (`str`, defaults to `"hidden_states"`): The stream whose change is compared from step to
            step.
        chained (`bool`, defaults to `False`): Whether the model only passes the streams from block to block,
            and gives all blocks the same other arguments. A compiled graph then skips all blocks of the group
            with one ``torch.cond``.
        between (`tuple[str, ...]`, defaults to `()`): Names of arguments of the model, such as residuals of a
            ControlNet. If one of them is passed, the model computes something between its blocks although
            ``chained`` is set. Without ``chained`` they have no effect.
        samples (`int`, defaults to `0`): Index of the batch dim of all streams: 0 for ``[B, S, C]``, 1 for
            ``[S, B, C]``.

    Raises:
        TypeError: ``lists``, ``streams`` or ``between`` is not a tuple of names.
        ValueError: ``lists`` or ``streams`` is empty, ``measured`` is not a stream, or ``samples`` is neither
            0 nor 1.
    """

    lists: tuple[str, ...]
    streams: tuple[str, ...] = ("hidden_states",)
    measured: str = "hidden_states"
    chained: bool = False
    between: tuple[str, ...] = ()
    samples: int = 0

    def __post_init__(self) -> None:
        for name in ("lists", "streams", "between"):
            _check_names("BlockGroup", name, getattr(self, name))
        if not self.lists or not self.streams:
            raise ValueError(
                f"BlockGroup(lists={self.lists}, streams={self.streams}): name at least one list and one stream."
            )
        if self.measured not in self.streams:
            raise ValueError(f"measured is {self.measured!r}; expected one of the streams {self.streams}.")
        if self.samples not in (0, 1):
            raise ValueError(f"samples is {self.samples!r}; expected 0 for [B, S, C], or 1 for [S, B, C].")


@dataclass(frozen=True)
class CachedBlocks:
    """The block stack of a model, in groups.

    A new group begins where the tensors that a block takes and returns change, for example where text and
    image tokens are concatenated.

    Args:
        groups (`tuple[BlockGroup, ...]`): The groups in the order in which they run.
        conditions (`tuple[str, ...]`, *optional*): Arguments of the model that differ between CFG branches
            and stay equal from step to step, or fields of dataclasses in them (``"video.text"``). They
            identify the branch if the pipeline does not name it. Defaults to ``encoder_hidden_states``, if
            the model has it. With ``()`` only calls within one step are told apart, by any argument that
            differs between them.
        uncached (`tuple[str, ...]`, defaults to `()`): Names of arguments of the model, such as layers to
            skip. A call with one of them runs without the cache.
        modulated (`Callable`, *optional*): ``modulated(block, arguments)`` returns the input ``[B, S, C]`` of
            the first block after its normalization and modulation by the timestep, given the block and its
            arguments. Required for rules that decide a step before the first block runs.

    Raises:
        TypeError: ``groups`` is not a tuple of `BlockGroup`, or ``conditions`` or ``uncached`` is not a tuple
            of names.
        ValueError: There is no group.
    """

    groups: tuple[BlockGroup, ...]
    conditions: tuple[str, ...] | None = None
    uncached: tuple[str, ...] = ()
    modulated: Callable[[nn.Module, Mapping[str, Any]], Tensor] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.groups, tuple) or not all(
            isinstance(group, BlockGroup) for group in self.groups
        ):
            raise TypeError(
                f"CachedBlocks(groups={self.groups!r}): expected a tuple of BlockGroups: "
                "CachedBlocks((BlockGroup(...),))."
            )
        if not self.groups:
            raise ValueError("CachedBlocks(groups=()): name at least one BlockGroup.")
        for name in ("conditions", "uncached"):
            if getattr(self, name) is not None:
                _check_names("CachedBlocks", name, getattr(self, name))


def _check_names(cls: str, name: str, value: Any) -> None:
    if not isinstance(value, tuple) or not all(isinstance(item, str) for item in value):
        example = "('…',)"
        if isinstance(value, str):
            example = f"('{value}',)"
        raise TypeError(f"{cls}({name}={value!r}): expected a tuple of names: {name}={example}.")
