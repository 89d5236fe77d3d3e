"""The values of options that are names.
Imports no torch, so that a command can validate its options at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, get_args

# Backends of local attention.
Backend = Literal["flash", "efficient", "cudnn", "math", "triton", "triton-int8", "flash3", "flash4", "sage"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)
# Approximate backends, each with the exact backend that replaces it in calls that require a gradient (None:
# PyTorch chooses). An approximate backend is used only if the user names it.
EXACT_FORM: Mapping[Backend, Backend | None] = {"triton-int8": "triton", "sage": None}


class RingEntry(NamedTuple):
    """A way in which keys reach the queries of other ring ranks.

    Args:
        path: Its class, as ``"module:name"`` in ``para_core.attention``.
        takes_wire: Whether it can send tensors in another format than their own.
        grid: The function that returns the shape of its grid of ring ranks, as ``"module:name"``; None if keys are
            sent to all ranks. It is called with the number of ranks, of query heads and of key heads.
    """

    path: str
    takes_wire: bool = True
    grid: str | None = None


# The values of rotate_method: keys are passed on from neighbour to neighbour, or gathered at once, or the ranks form
# a grid, in which queries are sent along rows and keys along columns. To remove one, delete its files and its line.
RING_STYLES: Mapping[str, RingEntry] = {
    "alltoall": RingEntry("ring:Ring"),
    "allgather": RingEntry("ring:GatheredRing"),
    "2d": RingEntry("grid_2d:Grid2D", takes_wire=False, grid="grid_shape:choose_grid"),
}
ROTATE_METHODS = tuple(RING_STYLES)
if TYPE_CHECKING:
    RotateMethod: TypeAlias = str
else:
    # Options are validated by their types at run time.
    RotateMethod = Literal[ROTATE_METHODS]

# Placements of weights, and schemes of torchao.
TextEncoders = Literal["replicate", "fsdp", "offload", "first"]
TEXT_ENCODERS: tuple[TextEncoders, ...] = get_args(TextEncoders)
VaePlacement = Literal["replicate", "offload", "first"]
VAE_PLACEMENTS: tuple[VaePlacement, ...] = get_args(VaePlacement)
Quantize = Literal["int8", "fp8", "int8-dynamic", "fp8-dynamic"]
QUANTIZE: tuple[Quantize, ...] = get_args(Quantize)


def require_quantize_fits(scheme: Quantize, weights: str | None) -> None:
    """Raise ``ValueError`` if ``scheme`` is unknown or does not work with this method of sharding weights.

    ``weights`` is ``"fsdp"``, ``"tensor"``, ``"stages"``, or None for replicated weights.
    """
    if scheme not in QUANTIZE:
        raise ValueError(f"quantize is {scheme!r}; expected one of {', '.join(QUANTIZE)}.")
    reason = None
    if weights == "fsdp" and scheme != "int8":
        reason = "of the quantized weights of torchao, FSDP2 can gather those in int8 only"
    elif weights == "tensor" and scheme.endswith("-dynamic"):
        reason = "the scale of a token needs the largest of all its features, and a rank holds a part of them"
    if reason is not None:
        raise ValueError(
            f"quantize={scheme!r} with weights={weights!r}: {reason}. Use quantize='int8', or replicate the weights."
        )


def num_resident(given: int | None) -> int:
    """Return the number of first blocks that stay on the device, for the option ``resident_blocks``: by default 1."""
    if given is None:
        return 1
    return given
