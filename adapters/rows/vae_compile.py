"""An autoencoder on rows inside of a compiled function: one call to Dynamo, which the tracer behind it follows operator by operator.

Dynamo cannot follow tags on tensors and sizes that know those of all ranks. The tracer of AOTAutograd runs Python, so there the mode
works as in eager code; what it leaves in the graph are operators, and collectives in program order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

# What stands for None, which is no argument of torch._dynamo.nonstrict_trace.
from para_core.torch_internals import nonstrict_trace

_NONE = "para_core: None"


class _Held(nn.Module):
    """``compute`` with the autoencoder's weights as its own: a graph takes them as inputs, and bakes none in."""

    def __init__(self, vae: nn.Module, compute: Callable[..., Any]) -> None:
        super().__init__()
        self.vae, self.compute = vae, compute

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        # The same image, of which no size is a symbol: layouts are numbers.
        return self.compute(x.view([int(size) for size in x.shape]), *args, **kwargs)


def traceable(vae: nn.Module, compute: Callable[..., Any]) -> Callable[..., Any]:
    """``compute(image, *args, **kwargs)``, which reads weights of ``vae``, for compiled functions: captured whole, once for each size.

    Settings of ``vae`` for tiling and slicing are guarded, too: another one compiles anew.
    """
    held = _Held(vae, compute)
    settings = tuple([name for name in vars(vae) if name.startswith(("tile_", "use_"))])

    def run(weights: dict[str, Tensor], guarded: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = tuple([None if _is_none(value) else value for value in args])
        named = {name: None if _is_none(value) else value for name, value in kwargs.items()}
        return functional_call(held, weights, given, named)

    opaque = nonstrict_trace(run)

    def call(*args: Any, **kwargs: Any) -> Any:
        weights = dict(held.named_parameters(remove_duplicate=False)) | dict(held.named_buffers(remove_duplicate=False))
        guarded = str([getattr(vae, name) for name in settings])
        given = tuple([_NONE if value is None else value for value in args])
        named = {name: _NONE if value is None else value for name, value in kwargs.items()}
        return opaque(weights, guarded, given, named)

    return call


def _is_none(value: Any) -> bool:
    return isinstance(value, str) and value == _NONE
