"""Comparing the arguments of one call over the ranks of a mesh: once per call of a pipeline, or of a model that is called by hand."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from para_core.distributed.consistency import Record, check_consistent, signature
from para_core.distributed.fingerprints import fingerprints
from para_core.distributed.mesh import GuidedMesh
from para_core.instance_patching import original_class

# Characters of a value in a record; a longer one is shortened and hashed.
_SHOWN = 60


def require_same_call(
    pipe: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    mesh: GuidedMesh,
    what: str,
    state: Callable[[bool], Mapping[str, Any]],
    problem: str | None = None,
) -> None:
    """Raise on every rank, naming what differs, unless all ranks call with the same arguments: one exchange.

    Args:
        what: what is called, for messages.
        state: Returns the state of the pipeline that must be equal, too; its argument is whether the call decodes latents.
        problem: why this rank cannot take part in the call; None if it can.

    Raises:
        ValueError: an argument differs between two ranks.
        TypeError: the arguments of a rank do not fit the signature of ``pipe``.
        RuntimeError: a rank has a ``problem``.
    """
    try:
        if problem is not None:
            raise RuntimeError(problem)
        signature_of_call = inspect.signature(original_class(pipe).__call__)
        given = _flat(signature_of_call.bind(pipe, *args, **kwargs).arguments)
        mine: Record | Exception = _record({**given, **state(given.get("output_type") != "latent")})
    except (TypeError, ValueError, RuntimeError) as error:
        mine = error
    _require_alike(
        mine,
        mesh,
        what,
        "For different images on different ranks give each group of ranks a mesh of its own (a slice of a larger mesh).",
    )


def require_same_inputs(given: Mapping[str, Any], mesh: GuidedMesh, what: str, problem: str | None = None) -> None:
    """Raise on every rank, naming what differs, unless all ranks give a module the same inputs: one exchange.

    Args:
        what, problem: as for :func:`require_same_call`.

    Raises:
        ValueError: an input differs between two ranks.
        RuntimeError: a rank has a ``problem``.
    """
    try:
        mine: Record | Exception = _record(given) if problem is None else RuntimeError(problem)
    except (TypeError, ValueError, RuntimeError) as error:
        mine = error
    _require_alike(
        mine,
        mesh,
        what,
        "If another pipeline shares this transformer (from_pipe), have its random numbers and arguments kept alike too: "
        "parallelize_pipe(the_other_pipe, mesh=mesh). In a loop of your own, draw random numbers from a generator of the "
        "same seed on all ranks.",
    )


def _record(given: Mapping[str, Any]) -> Record:
    """Describe each value that is not None. All tensors together cost one wait for the device."""
    pieces = {name: list(_pieces(value)) for name, value in given.items() if value is not None}
    tensors = [piece for of_value in pieces.values() for piece in of_value if isinstance(piece, Tensor)]
    digits = iter(fingerprints(tensors))
    return {
        name: _shortened("".join(next(digits) if isinstance(piece, Tensor) else piece for piece in of_value))
        for name, of_value in pieces.items()
    }


def _require_alike(mine: Record | Exception, mesh: GuidedMesh, what: str, way_out: str) -> None:
    def explain(records: list[Record]) -> str:
        rank, other = next((rank, other) for rank, other in enumerate(records) if other != records[0])
        names = sorted(name for name in {*other, *records[0]} if other.get(name) != records[0].get(name))
        differing = "; ".join(
            f"{name}: rank 0 has {records[0].get(name, 'nothing')}, rank {rank} has {other.get(name, 'nothing')}"
            for name in names
        )
        return (
            f"the ranks of one mesh must call {what} alike, and sequence rank {rank} differs from rank 0. {differing}. "
            f"{way_out}"
        )

    check_consistent(mine if isinstance(mine, Exception) else signature(mine), mesh, explain=explain)


def _flat(given: Mapping[str, Any]) -> dict[str, Any]:
    """``**kwargs`` of a call by their own names; ``self`` left out."""
    flat: dict[str, Any] = {}
    for name, value in given.items():
        if name == "kwargs" and isinstance(value, dict):
            flat.update(value)
        elif name != "self":
            flat[name] = value
    return flat


def _hash(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def describe(value: Any) -> str:
    """A short text that is equal for equal arguments, also in another process."""
    text: str = _record({"": value}).get("", "None")
    return text


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]}… ({_hash(text.encode())})"


def _pieces(value: Any) -> Iterator[str | Tensor]:
    """Yield what describes ``value``, in parts. A tensor stands for its fingerprint."""
    if value is None or isinstance(value, (str, bool, int, float)):
        yield repr(value)
    elif isinstance(value, Tensor):
        yield f"tensor{list(value.shape)} {str(value.dtype).removeprefix('torch.')} "
        yield value
    elif isinstance(value, torch.Generator):
        yield f"generator {_hash(value.get_state().numpy().data)}"
    elif isinstance(value, Mapping):
        yield from _joined("{}", [(f"{key!r}: ", item) for key, item in value.items()])
    elif isinstance(value, (list, tuple)):
        yield from _joined("[]", [("", item) for item in value])
    elif is_dataclass(value) and not isinstance(value, type):  # the frames that LTX-Video is given, and their places
        yield from _pieces({field.name: getattr(value, field.name) for field in fields(value)})
    elif hasattr(value, "tobytes"):  # PIL images, numpy arrays
        shape = getattr(value, "size", None) if not hasattr(value, "shape") else value.shape
        yield f"{type(value).__name__} {shape} {_hash(value.tobytes())}"
    else:
        # A callback, or an object of the user's: only its kind can be compared.
        yield f"a {type(value).__name__}"


def _joined(brackets: str, items: Sequence[tuple[str, Any]]) -> Iterator[str | Tensor]:
    yield brackets[0]
    for index, (prefix, item) in enumerate(items):
        yield f", {prefix}" if index else prefix
        yield from _pieces(item)
    yield brackets[1]
