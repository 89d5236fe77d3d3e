"""The values of options that are names, the tables of what stands behind some of them, and three rules for values
that commands and the library share. Imports no torch, so that a command can validate its options at once.

The options themselves are declared in :mod:`.pipeline_options` and
:mod:`para_core.attention.attention_options`. Tests: tests/attention/test_backend_selection.py,
tests/weights/test_quantized_files.py, tests/cli/test_option_files.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, get_args


class AddedBackend(NamedTuple):
    """A backend of local attention that is not PyTorch's.

    Args:
        module: Its module in ``para_core.attention.backends``, which defines it as ``BACKEND``.
        is_exact: Whether its result is exact up to rounding. An approximate backend is used only if the user
            names it.
        exact_form: For an approximate backend, the one that replaces it in calls that require a gradient;
            None if PyTorch chooses.
    """

    module: str
    is_exact: bool = True
    exact_form: str | None = None


# To remove a backend, delete its files and its line.
ADDED_BACKENDS: Mapping[str, AddedBackend] = {
    "triton": AddedBackend("triton_exact"),
    "triton-int8": AddedBackend("triton_int8", is_exact=False, exact_form="triton"),
    "flash3": AddedBackend("flash3"),
    "flash4": AddedBackend("flash4"),
    "sage": AddedBackend("sage", is_exact=False),
}
# Backends of local attention.
BACKENDS: tuple[str, ...] = ("flash", "efficient", "cudnn", "math", *ADDED_BACKENDS)
if TYPE_CHECKING:
    Backend: TypeAlias = str
else:
    # Options are validated by their types at run time.
    Backend = Literal[BACKENDS]
# Approximate backends, each with what replaces it in calls that require a gradient; None if PyTorch chooses,
# also because the line of the exact form above was removed.
EXACT_FORM: Mapping[Backend, Backend | None] = {
    name: backend.exact_form if backend.exact_form in BACKENDS else None
    for name, backend in ADDED_BACKENDS.items()
    if not backend.is_exact
}


class RingEntry(NamedTuple):
    """A way in which keys reach the queries of other ring ranks.

    Args:
        path: Its class, as ``"module:name"`` in ``para_core.attention``.
        takes_wire: Whether it can send tensors in another format than their own.
        grid: The function that returns the shape of its grid of ring ranks, as ``"module:name"``; None if
            keys are sent to all ranks. It is called with the number of ranks, of query heads and of key
            heads.
        keeps_bits: Whether one attention to all keys computes a rank's queries, as in one process.
    """

    path: str
    takes_wire: bool = True
    grid: str | None = None
    keeps_bits: bool = False


# The values of rotate_method: keys are passed on from neighbour to neighbour; gathered at once, while a rank
# attends to its own; the ranks form a grid, in which queries are sent along rows and keys along columns; or
# all keys are gathered before one attention to them. To remove one, delete its files and its line.
RING_STYLES: Mapping[str, RingEntry] = {
    "alltoall": RingEntry("ring:Ring"),
    "allgather": RingEntry("ring:GatheredRing"),
    "2d": RingEntry("grid_2d:Grid2D", takes_wire=False, grid="grid_shape:choose_grid"),
    "gathered": RingEntry("gathered:GatheredKeys", takes_wire=False, keeps_bits=True),
}
ROTATE_METHODS = tuple(RING_STYLES)
# The first value of rotate_method with the bits of one process; None if the features that have them were
# removed.
METHOD_WITH_BITS = next((name for name, style in RING_STYLES.items() if style.keeps_bits), None)
if TYPE_CHECKING:
    RotateMethod: TypeAlias = str
else:
    # Options are validated by their types at run time.
    RotateMethod = Literal[ROTATE_METHODS]

# What computes the products of linear layers, with bits that do not depend on the number of rows.
Products = Literal["triton"]

# Where text encoders and autoencoders are: whole on each rank, sharded by FSDP2, in host memory, or on the
# first rank only.
TextEncoders = Literal["replicate", "fsdp", "offload", "first"]
VaePlacement = Literal["replicate", "offload", "first"]
# Schemes of torchao, of weights only or with dynamic activations.
Quantize = Literal["int8", "fp8", "int8-dynamic", "fp8-dynamic"]
QUANTIZE: tuple[Quantize, ...] = get_args(Quantize)
# What waits in host memory: the blocks of the transformer but the next ones, or each model that does not run.
Offload = Literal["blocks", "model"]


def check_quantize_fits(scheme: Quantize, weights: str | None) -> None:
    """Raise ``ValueError`` if ``scheme`` is unknown or does not work with this method of sharding weights.

    ``weights`` is ``"fsdp"``, ``"tensor"``, ``"stages"``, or None for replicated weights; the caller has checked it.
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


def num_resident(resident_blocks: int | None) -> int:
    """Return the number of first blocks that stay on the device, for the option ``resident_blocks``: by default 1."""
    if resident_blocks is None:
        return 1
    return resident_blocks


def require_unique_keys(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs of a JSON object, or of a mapping of YAML, as a dict.

    Raises:
        ValueError: Two have the same key, of which the last value would count in silence.
    """
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content:
            raise ValueError(f"{key[:40]!r} is there twice.")
        content[key] = value
    return content
