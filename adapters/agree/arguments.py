"""Compare the arguments of one call of a pipeline or a model between the ranks of a mesh, in one exchange.

The calls of pipelines (``adapters/parallel/call.py``), of models (``adapters/compatibility/checks.py``), of
autoencoders and of LoRA methods begin with :func:`agree_on_values`. Which values are compared is decided
there; the exchange is in ``para_core/distributed/agree.py``. Tests: tests/adapters/agree/test_arguments.py.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from datetime import timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from hashlib import blake2b
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from para_core.distributed.agree import agree
from para_core.distributed.fingerprints import PendingFingerprints
from para_core.distributed.mesh import AnyMesh
from para_core.distributed.records import Record, describe_differences

# Maximum number of characters that describe one value. Of a longer text half as many are shown, with a hash of all.
_MAX_CHARACTERS = 60


# Arguments whose names contain one of these words say what is generated, if their values are no numbers;
# others say how. If what is generated differs, the message offers a mesh for each group of ranks.
_IMAGE_WORDS = ("prompt", "image", "latents", "generator", "mask", "video", "audio", "embeds")
# The kinds of NumPy's dtypes of bools, numbers, bytes and texts, whose scalars Python has as well.
_KINDS_OF_PYTHON = frozenset("biufcSU")
# The texts of numbers, bools and of values that are absent.
_NUMBER = re.compile(r"-?\d|True|False|nan|-?inf")


@dataclass(frozen=True)
class StageValue:
    """A value that the ranks of pipeline stage ``stage`` must have in common; other stages have another, or none."""

    stage: int
    value: Any


def agree_on_values(
    values: Callable[[], Mapping[str, Any]],
    mesh: AnyMesh,
    what: str,
    check: Callable[[], None],
    explain: Callable[[list[Record]], str],
) -> None:
    """Raise on every rank if ``values()`` differs between ranks. Collective, one exchange.

    Every rank of ``mesh`` must call this function, and makes the call ``what``. Before ``values``, which
    returns arguments and state by name, ``check`` is called, which raises if this rank cannot take part.
    Neither may communicate.
    Whatever either raises is exchanged: a rank that raised alone would leave the others in the exchange.

    Raises:
        ValueError: If a value differs between two ranks. ``explain`` returns the message, from the texts of
            the values of each rank, by name.
        TypeError, ValueError, ImportError, RuntimeError: What ``check`` or ``values`` raised on one rank.
            Other types become a RuntimeError.
    """
    local: Record | Exception
    stages: Mapping[str, int] = {}
    try:
        check()
        pending = PendingRecord(values())
        local, stages = pending.wait(), pending.stages
    except (TypeError, ValueError, ImportError, RuntimeError) as error:
        local = error
    except Exception as error:
        local = RuntimeError(f"{type(error).__name__}: {error}")
    agree_on_texts(local, stages, mesh, explain, call=what)


def difference_of_pipeline_calls(pipeline: str, records: list[Record]) -> str:
    """Return an error message about ranks that call ``pipeline`` with different arguments or state."""
    fields = "; ".join(describe_differences(records))
    names = [name for name in set().union(*records) if len({record.get(name) for record in records}) > 1]
    # Numbers such as num_images_per_prompt and image_guidance_scale are settings.
    contents = [name for name in names if not any(_NUMBER.match(record.get(name, "0")) for record in records)]
    if any(word in name for name in contents for word in _IMAGE_WORDS):
        return (
            f"the ranks of one mesh must call the {pipeline} with equal arguments. {fields}. For different images on "
            "different ranks give each group of ranks a mesh of its own (a slice of a larger mesh)."
        )
    if any("callback" in name for name in names):
        return (
            f"the ranks of one mesh must call the {pipeline} with equal arguments. {fields}. Pass the callback on all "
            "ranks. What only one rank should do (show progress, save) it does after looking at the rank inside: if "
            "dist.get_rank() == 0."
        )
    return (
        f"the ranks of one mesh must call the {pipeline} with equal arguments. {fields}. Pass the same arguments on "
        "all ranks, also if only one rank uses the result, and make the same changes to the pipeline on all ranks."
    )


class PendingRecord:
    """A short text for each of ``values`` that is not None, by name.

    The devices of tensors compute their fingerprints until :meth:`wait` is called. All reads of values are
    made or queued at once, so a value may change before :meth:`wait`.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.stages = {name: value.stage for name, value in values.items() if isinstance(value, StageValue)}
        pieces = {name: list(_pieces(value)) for name, value in values.items() if value is not None}
        tensors: list[Tensor] = []
        # A text with None in place of each tensor, whose fingerprint comes there.
        self._pieces: dict[str, list[str | None]] = {}
        for name, value_pieces in pieces.items():
            self._pieces[name] = []
            for piece in value_pieces:
                if isinstance(piece, Tensor):
                    tensors.append(piece)
                    self._pieces[name].append(None)
                else:
                    self._pieces[name].append(piece)
        self._fingerprints = PendingFingerprints(tensors)

    def wait(self) -> Record:
        """Return the texts. Waits for each device once, for all tensors."""
        digits = iter(self._fingerprints.wait())
        record = {}
        for name, value_pieces in self._pieces.items():
            texts = [next(digits) if piece is None else piece for piece in value_pieces]
            record[name] = _limit_text("".join(texts))
        return record


def agree_on_texts(
    local: Record | Exception,
    stages: Mapping[str, int],
    mesh: AnyMesh,
    explain: Callable[[list[Record]], str],
    *,
    call: str = "this call",
) -> None:
    """Raise ``ValueError`` on every rank if records differ. Collective; see :func:`agree`, also for ``call``.

    ``stages`` has the fields of ``local`` that only the ranks of one pipeline stage have in common, with that
    stage, which is the same for all fields. A rank without such fields counts as one of stage 0.
    """
    numbers = [0, 0]
    checked: Record | Exception
    if isinstance(local, Exception):
        checked = local
    else:
        checked = {name: text for name, text in local.items() if name not in stages}
        encoded = json.dumps({name: local[name] for name in stages}).encode()
        numbers = [
            max(stages.values(), default=0),
            int.from_bytes(blake2b(encoded, digest_size=7).digest(), "big"),
        ]
    rows = agree(checked, mesh, numbers, explain=explain, call=call)
    first_ranks: dict[int, int] = {}
    for rank, (stage, digits) in enumerate(rows):
        first = first_ranks.setdefault(stage, rank)
        if digits != rows[first][1]:
            raise ValueError(
                f"ranks {first} and {rank} of the mesh both compute pipeline stage {stage}, and differ in "
                f"{' and '.join(stages)}. Change the pipeline in the same way on all ranks."
            )


def _hash(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def describe_value(value: Any) -> str:
    """Return a short text that is equal for equal values, also in another process. 1, 1.0 and True differ."""
    text: str = describe_all({"": value})[""]
    return text


def describe_all(values: Mapping[str, Any]) -> Record:
    """Return the text of :func:`describe_value` for each of ``values``, by name; ``"None"`` for None."""
    texts = PendingRecord(values).wait()
    return {name: texts.get(name, "None") for name in values}


def _limit_text(text: str) -> str:
    if len(text) <= _MAX_CHARACTERS:
        return text
    return f"{text[: _MAX_CHARACTERS // 2]}… ({_hash(text.encode())})"


def _pieces(value: Any) -> Iterator[str | Tensor]:
    """Yield strings and tensors that, joined with each tensor's fingerprint in its place, describe ``value``."""
    if _is_numpy_scalar(value):
        # Another rank may have it as a value of Python.
        yield repr(value.item())
    elif isinstance(value, Enum):
        # Its value may be any object, and its name is unique, also that of several flags. Flags without a name,
        # such as none of them, have a number.
        yield f"{type(value).__name__}.{value.name or value.value}"
    elif value is None or isinstance(
        value, (str, bytes, bytearray, bool, int, float, complex, range, Decimal, Fraction)
    ):
        yield repr(value)
    elif isinstance(value, StageValue):
        yield from _pieces(value.value)
    elif isinstance(value, Tensor):
        yield f"tensor{list(value.shape)} {str(value.dtype).removeprefix('torch.')} "
        yield value
    elif isinstance(value, torch.Generator):
        yield f"generator {_hash(value.get_state().numpy().data)}"
    elif isinstance(value, (torch.dtype, timedelta)):
        yield str(value)
    elif isinstance(value, Mapping):
        # Equal mappings may have their items in another order.
        items = [(f"{key!r}: ", item) for key, item in value.items()]
        yield from _join_pieces("{}", sorted(items, key=itemgetter(0)))
    elif isinstance(value, (set, frozenset)):
        # The order of a set of texts differs between processes.
        yield f"{type(value).__name__} {sorted(map(describe_value, value))}"
    elif isinstance(value, (list, tuple)):
        yield from _join_pieces("[]", [("", item) for item in value])
    elif is_dataclass(value) and not isinstance(value, type):
        # Some pipelines take dataclasses, for example the conditions of LTX-Video.
        yield from _pieces({field.name: getattr(value, field.name) for field in fields(value)})
    elif hasattr(value, "tobytes") and not isinstance(value, type):
        # PIL images and numpy arrays have tobytes. A PIL image has a mode and a size for dtype and shape.
        kind = getattr(value, "dtype", getattr(value, "mode", None))
        shape = getattr(value, "shape", getattr(value, "size", None))
        yield f"{type(value).__name__} {kind} {shape} "
        if getattr(kind, "hasobject", False):
            # The bytes of an array of Python objects are addresses.
            yield from _pieces(value.tolist())
        elif getattr(value, "mode", None) in ("P", "PA"):
            # The bytes of a PIL image with a palette are indices. The colors may differ, too.
            yield _hash(value.tobytes() + value.convert("RGBA").tobytes())
        else:
            yield _hash(value.tobytes())
    else:
        # Callbacks and other objects have no values to compare between processes, and a path may differ between
        # hosts, so compare their class only.
        yield f"a {type(value).__name__}"


def _is_numpy_scalar(value: Any) -> bool:
    """Whether ``value`` is a number, bool, text or bytes of NumPy, also in an array without dims.

    Looks at attributes, because NumPy need not be installed.
    """
    kind = getattr(getattr(value, "dtype", None), "kind", None)
    return kind in _KINDS_OF_PYTHON and value.shape == ()


def _join_pieces(brackets: str, items: Sequence[tuple[str, Any]]) -> Iterator[str | Tensor]:
    yield brackets[0]
    for index, (prefix, item) in enumerate(items):
        if index:
            yield ", "
        yield prefix
        yield from _pieces(item)
    yield brackets[1]
