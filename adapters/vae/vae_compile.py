"""Make a row-sharded autoencoder usable inside compiled functions.

Dynamo sees the autoencoder as one opaque call, because it cannot trace tensors with tags or sizes of other
ranks. AOTAutograd then traces the call by running its Python code, so the sharding mode works as in eager
mode.

Only ``run.py`` calls it, which then runs the function in place of ``encode`` or ``decode``. Tests:
tests/spatial/test_vaes.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from para_core.adapters.vae.families import tiling_settings
from para_core.torch_internals import nonstrict_trace

# Replaces None among the arguments, which nonstrict_trace does not accept.
_NONE = "para_core: None"


class _WithWeights(nn.Module):
    """Module around ``compute`` that owns the autoencoder, so that its weights are graph inputs, not constants."""

    def __init__(self, vae: nn.Module, compute: Callable[..., Any]) -> None:
        super().__init__()
        self.vae, self.compute = vae, compute

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        # Viewing with int sizes specializes the graph to them, because layouts need plain numbers.
        return self.compute(x.view([int(size) for size in x.shape]), *args, **kwargs)


def make_traceable(vae: nn.Module, compute: Callable[..., Any], *, forgets_frames: str) -> Callable[..., Any]:
    """Return a function with the arguments and result of ``compute`` that ``torch.compile`` can capture.

    ``compute`` is a function of an image and further arguments that reads the weights of ``vae``. It is
    captured without graph breaks, once per size of the image. A change of the tiling or slicing settings of
    ``vae`` recompiles. ``forgets_frames`` names the method of ``vae`` that drops frames that its modules
    store; empty without one.
    """
    module = _WithWeights(vae, compute)
    settings = tuple(tiling_settings(vae))

    def run(weights: dict[str, Tensor], guarded: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``compute`` with ``weights`` by name. ``guarded`` is not read: Dynamo guards on it."""
        # The autoencoder drops the frames after this call. When the graph is traced, they are still those of
        # an earlier trace.
        if forgets_frames:
            getattr(vae, forgets_frames)()
        positional = tuple([_decode_none(value) for value in args])
        named = {name: _decode_none(value) for name, value in kwargs.items()}
        return functional_call(module, weights, positional, named)

    opaque = nonstrict_trace(run)

    def call(*args: Any, **kwargs: Any) -> Any:
        """Call ``run``, which Dynamo does not trace into, with the weights and settings of now."""
        weights = {
            **dict(module.named_parameters(remove_duplicate=False)),
            **dict(module.named_buffers(remove_duplicate=False)),
        }
        # Dynamo makes a float that has changed symbolic, which cannot become text; calling hex() keeps it a
        # constant. The text is an argument only so that another value of a setting compiles another graph.
        values = [getattr(vae, name) for name in settings]
        guarded = str([value.hex() if isinstance(value, float) else value for value in values])
        positional = tuple([_encode_none(value) for value in args])
        named = {name: _encode_none(value) for name, value in kwargs.items()}
        return opaque(weights, guarded, positional, named)

    return call


def _encode_none(value: Any) -> Any:
    if value is None:
        return _NONE
    return value


def _decode_none(value: Any) -> Any:
    if isinstance(value, str) and value == _NONE:
        return None
    return value
