"""The interface of a model in pipeline stages, for code that cannot import :mod:`para_core.weights.stages`, such as the
cache.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn

from para_core.instance_patching import wrapper

STAGES = "stages"


class Staged(Protocol):
    """A model in pipeline stages. One rank along ``pipe`` computes a block; on the other ranks the block returns its
    input.
    """

    def on_all(self, block: nn.Module, output: Any) -> Any:
        """Send the output of ``block`` from the rank that computes the block to all ranks of ``pipe``, and return it.

        Collective. Only during a call of the model.
        """


def on_all_stages(module: nn.Module, block: nn.Module, output: Any) -> Any:
    """Send the output of ``block`` from the rank that computes the block to all ranks of ``pipe``, and return it.
    Collective.

    If ``module`` has no stages, return ``output``.

    Args:
        output: The output of ``block`` on this rank.
    """
    stages: Staged | None = getattr(wrapper(module, "__call__", STAGES), "__self__", None)
    return output if stages is None else stages.on_all(block, output)
