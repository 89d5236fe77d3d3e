"""The block stack of a model, and which of its blocks this rank computes if the model runs in pipeline
stages.

Here are only the types: ``adapters/inspect/block_stack.py`` makes the stack of a model, and :mod:`.stages`
installs the stages, which other features find by :func:`stages_of`. Tests: tests/weights/test_stages.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from para_core.distributed.mesh import MeshDim
from para_core.distributed.point_to_point import Links
from para_core.instance.record import slot_owner
from para_core.instance.slots import Slot


@dataclass(frozen=True)
class StackedBlock:
    """A transformer block of a model, with its token streams (such as image and text) and its cost in any
    unit.

    ``streams`` are the names of the parameters of ``forward`` that hold tokens, in the order in which the
    block returns their new values. A block with one stream returns a tensor, not a tuple.
    """

    block: nn.Module
    streams: tuple[str, ...]
    cost: float


class PipelineStages(Protocol):
    """The pipeline stages of a model, as code outside of :mod:`para_core.weights.stages` uses them.

    Attributes:
        blocks: All blocks of the model, in the order in which they run.
        ranges: The indices of the blocks of each stage.
        block_range: The indices of the blocks that this rank computes.
        dim: The mesh dim ``pipe``.
        links: The connections to the other stages.
        other_blocks: The blocks that other stages compute.
    """

    blocks: Sequence[StackedBlock]
    ranges: Sequence[range]
    block_range: range
    dim: MeshDim
    links: Links

    @property
    def other_blocks(self) -> Sequence[nn.Module]: ...

    def own_output(self) -> AbstractContextManager[None]:
        """Inside this context, let a call of the model return this rank's own output, which is not sent.
        PipeFusion calls the model on patches in it.
        """
        ...


def stages_of(module: nn.Module) -> PipelineStages | None:
    """Return the pipeline stages of ``module``; None without stages."""
    # A Stages, whose file imports this one.
    owner: Any = slot_owner(module, Slot.STAGES, object)
    stages: PipelineStages | None = owner
    return stages
