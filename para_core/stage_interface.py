"""Interface of a model that runs in stages, for rooms below :mod:`para_core.weights.stages`."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn

from para_core.instance_patching import wrapper

STAGES = "stages"


class Staged(Protocol):
    """A model in stages. Each block is computed by one rank along ``pipe``; on the others it returns its input."""

    def on_all(self, block: nn.Module, output: Any) -> Any:
        """Return on every rank what ``block`` returned on the rank that computes it. Collective; only during a call of
        the model.
        """


def on_all_stages(module: nn.Module, block: nn.Module, output: Any) -> Any:
    """Return on every rank what ``block`` returned on the rank that computes it. Returns ``output`` if ``module`` has
    no stages.
    """
    stages: Staged | None = getattr(wrapper(module, "__call__", STAGES), "__self__", None)
    return output if stages is None else stages.on_all(block, output)
