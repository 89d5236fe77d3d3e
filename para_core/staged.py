"""What other rooms ask of a model whose blocks are distributed over ranks in stages (:mod:`para_core.weights.stages`)."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn

from para_core.instance_patching import wrapper

STAGES = "stages"


class Staged(Protocol):
    """A model, each block of which one rank along ``pipe`` computes; on the others it hands on what it was given."""

    def on_all(self, block: nn.Module, output: Any) -> Any:
        """What ``block`` returned on the rank that computes it, on all ranks. All of them call this in a call of the model."""


def staged(module: nn.Module) -> Staged | None:
    """Of a model that runs in stages; None of one that does not."""
    found: Staged | None = getattr(wrapper(module, "__call__", STAGES), "__self__", None)
    return found


def on_all_stages(module: nn.Module, block: nn.Module, output: Any) -> Any:
    """What ``block`` returned on the rank that computes it; ``output`` where ``module`` runs in no stages."""
    stages = staged(module)
    return output if stages is None else stages.on_all(block, output)
