"""Linear attention under a plan: sum over the tokens of all ranks instead of this rank's tokens only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from para_core.distributed.collectives import all_gather
from para_core.distributed.mesh import SequenceMesh
from para_core.modes.interceptor import SDPA, SDPA_OPERATOR, call_original
from para_core.plans.plan import LinearAttention
from para_core.torch_internals import no_frame_of_its_own


class SumsOverRanks(TorchFunctionMode):
    """Mode for one call of a linear attention module, in which the sums over tokens that the plan names are added up
    over all ranks.

    A call of ``scaled_dot_product_attention`` under this mode raises ``RuntimeError``, because its output would miss
    the tokens of other ranks.
    """

    def __init__(self, attention: LinearAttention, mesh: SequenceMesh) -> None:
        super().__init__()
        self.attention = attention
        self.mesh = mesh
        self.names = {name for name, _ in attention.sums}
        self.called: list[str] = []

    @no_frame_of_its_own
    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is SDPA or func is SDPA_OPERATOR:
            raise RuntimeError(
                f"scaled_dot_product_attention was called where the plan says {self.attention}. {_WAY_OUT}"
            )
        out = call_original(func, args, kwargs or {})
        name = getattr(func, "__name__", "")
        if name not in self.names:
            return out
        index = self.called.count(name)
        self.called.append(name)
        return sum_over_ranks(out, self.mesh) if (name, index) in self.attention.sums else out

    def require_summed(self) -> None:
        """Raise ``RuntimeError`` if the module did not make all the calls whose outputs the plan sums over ranks."""
        missing = [(name, index) for name, index in self.attention.sums if self.called.count(name) <= index]
        if missing:
            raise RuntimeError(f"the plan says {self.attention}, and {missing} were not called. {_WAY_OUT}")


_WAY_OUT = (
    "This module's attention processor is not the one that the plan was made for, so each rank would attend to its "
    "own tokens only: set that one again, or describe this one in Plan.attention."
)


def sum_over_ranks(x: Tensor, mesh: SequenceMesh) -> Tensor:
    """Return the sum of ``x`` over all sequence ranks, with the same bits on every rank. Collective."""
    for dim in mesh.dims:
        x = all_gather(x[None], [1] * dim.size, 0, dim).sum(dim=0)
    return x
