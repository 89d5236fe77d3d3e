"""The interface of a model in pipeline stages, for code (such as the cache) that cannot import its implementation."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn

from para_core.instance_patching import wrapper

STAGES = "stages"


class Staged(Protocol):
    """A model in pipeline stages.

    Each block is computed by one rank along the mesh dim ``pipe``. On the other ranks, the block returns its input.
    """

    def on_all(self, block: nn.Module, output: Any) -> Any:
        """Return the ``output`` of ``block``, sent from the rank that computes the block to all ranks along ``pipe``.

        This is a collective call, which is only possible during a call of the model.
        """


def on_all_stages(module: nn.Module, block: nn.Module, output: Any) -> Any:
    """Return the ``output`` of ``block``, sent from the rank that computes the block to all ranks along ``pipe``.

    This is a collective call. If ``module`` has no pipeline stages, return ``output``.

    Args:
        module: The model.
        block: One of its transformer blocks.
        output: The output of ``block`` on this rank.
    """
    stages: Staged | None = getattr(wrapper(module, "__call__", STAGES), "__self__", None)
    return output if stages is None else stages.on_all(block, output)
