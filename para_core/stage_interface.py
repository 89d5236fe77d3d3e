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
        """Return the output of ``block`` of the rank that computes it, on every rank. Collective; only during a model
        call.
        """


def on_all_stages(module: nn.Module, block: nn.Module, output: Any) -> Any:
    """Return the output of ``block`` of the rank that computes it, on every rank. Collective.

    If ``module`` has no stages, return ``output``.

    Args:
        output: The output of ``block`` on this rank.
    """
    stages: Staged | None = getattr(wrapper(module, "__call__", STAGES), "__self__", None)
    return output if stages is None else stages.on_all(block, output)
