"""Bind functions that a backward computes again to the call of a planned model in which they ran first.

:mod:`.region` hands this to :mod:`para_core.modes.recomputation`, which finds the functions. Tests: the cases
with a checkpoint in tests/plans/test_exactness.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from para_core.modes import fused_encoder
from para_core.plans.interception import Interception
from para_core.plans.planned_attention import PlannedAttention
from para_core.torch_internals import is_in_backward

if TYPE_CHECKING:
    from para_core.plans.region import Region


def bind_to_call(
    region: Region, planned: PlannedAttention, function: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a function that, if a backward calls it, runs ``function`` with the segments and attention of
    now.

    Outside of a backward it runs ``function`` in the call that is under way, as it is. All ranks must run
    their backwards in the same order, because ``function`` has collectives.
    """
    planned = planned.copy_for_calls(planned.calls)
    segments = dict(region.executor.segments)
    continues = region.interceptions[-1].continues

    def run(*args: Any, **kwargs: Any) -> Any:
        if not is_in_backward():
            return function(*args, **kwargs)
        before = region.executor.segments
        interception = Interception(planned.copy_for_calls(planned.calls), at_dispatcher=False)
        interception.continues = continues
        region.interceptions.append(interception)
        region.executor.segments = dict(segments)
        try:
            with fused_encoder.disable_if(region.has_encoders), interception.intercept_calls():
                return function(*args, **kwargs)
        finally:
            region.interceptions.pop()
            region.executor.segments = before

    return run
