"""The streams of a block: the tensors in its arguments and outputs, also those in fields of dataclasses.

:mod:`.block_roles` reads and returns streams by these functions. Tests: tests/cache/test_dataclass_streams.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

# Streams are the inputs or outputs of a block group, in the order of BlockGroup.streams. If the blocks return
# None for a stream, its item is None.
Streams = tuple[Tensor | None, ...]
# The names of the fields that lead from an argument to a tensor, and the tensor.
FieldValue = tuple[tuple[str, ...], Any]
# The shapes of a block's streams, with None for a stream whose value is None.
StreamShapes = list[tuple[int, ...] | None]


class StreamValues(NamedTuple):
    """The streams that are passed to one call of a block.

    Args:
        arguments: The values of the parameters that hold streams; None if one was not passed.
        tensors: The tensors of all streams, with None for a stream that is None.
        are_plain: Whether each stream is a whole parameter, and a tensor or None, as in most models.
    """

    arguments: dict[str, Any]
    tensors: tuple[Any, ...]
    are_plain: bool


def as_output_tuple(output: Any) -> tuple[Any, ...]:
    """Return the output of a block as a tuple: a tensor or a dataclass is its only item."""
    if isinstance(output, Tensor) or is_dataclass(output):
        return (output,)
    return tuple(output)


def fields_of_stream(name: str, streams: tuple[str, ...], arguments: Mapping[str, Any]) -> list[FieldValue]:
    """Return the paths of the fields that hold the tensors of the stream ``name``, and the tensors.

    A stream that is None has one entry, None. ``streams`` are all streams of the block, for messages.

    Raises:
        TypeError: The stream has no such field, or is neither None, a tensor, nor a dataclass that holds
            tensors.
    """
    parameter, *path = name.split(".")
    value = arguments[parameter]
    for field_name in path:
        if value is None:
            break
        if not hasattr(value, field_name):
            raise TypeError(
                f"BlockGroup(streams={streams}): a {type(value).__name__} has no field {field_name!r}."
            )
        value = getattr(value, field_name)
    leaves = _tensor_fields(tuple(path), value)
    if not leaves:
        raise TypeError(
            f"BlockGroup(streams={streams}): {name} is a {type(value).__name__}; expected a tensor, a "
            "dataclass that holds tensors, or None."
        )
    return leaves


def _tensor_fields(path: tuple[str, ...], value: Any) -> list[FieldValue]:
    """Return the tensors in ``value``, whose own path is ``path``, by path; None counts as one tensor."""
    if value is None or isinstance(value, Tensor):
        return [(path, value)]
    if not is_dataclass(value):
        return []
    items = [(each.name, getattr(value, each.name)) for each in fields(value)]
    return [leaf for name, item in items if item is not None for leaf in _tensor_fields((*path, name), item)]


def named_tensors_in(items: Iterable[tuple[str, Any]]) -> list[tuple[str, Tensor]]:
    """Return the tensors in these named arguments, also those in fields of dataclasses, with their names."""
    leaves = [(".".join(path), x) for name, value in items for path, x in _tensor_fields((name,), value)]
    return [(name, x) for name, x in leaves if x is not None]


def with_field(value: Any, path: tuple[str, ...], new: Any) -> Any:
    """Return the dataclass ``value`` with ``new`` in the field at ``path``."""
    if len(path) > 1:
        new = with_field(getattr(value, path[0]), path[1:], new)
    return replace(value, **{path[0]: new})


def shapes_of(streams: Iterable[Any]) -> StreamShapes:
    """Return the shape of each stream; None for a stream that is None."""
    shapes: StreamShapes = []
    for x in streams:
        if isinstance(x, Tensor):
            shapes.append(tuple(x.shape))
        else:
            shapes.append(None)
    return shapes


def shape_error(cls: str, streams: tuple[str, ...], before: StreamShapes, after: StreamShapes) -> ValueError:
    """Return the error for a block of the class ``cls`` that changed the shapes of its ``streams``."""
    shapes = f"was given {streams} of shapes {before}, and returned shapes {after}"
    if _are_sharded(before, after):
        return ValueError(
            f"{cls} {shapes}: tokens were sharded or gathered inside this block, by a hook on it or by its own code. "
            "The cache runs outside the block and its hooks, and needs the same tokens before and after it. Shard "
            "before the block stack: the model's inputs, or with a plan: Plan(inner={'blocks.0': {...: Split(...)}})."
        )
    return ValueError(
        f"{cls} {shapes}. Name in BlockGroup(streams=...) the parameters whose new values it returns, in the order in "
        "which it returns them."
    )


def _are_sharded(before: StreamShapes, after: StreamShapes) -> bool:
    """Whether the shapes of a stream differ in one dim that is neither the first (batch) nor the last (channels)."""
    if len(before) != len(after) or sorted(map(str, before)) == sorted(map(str, after)):
        return False
    for x, y in zip(before, after, strict=True):
        if not x or not y or len(x) != len(y) or x[0] != y[0] or x[-1] != y[-1]:
            continue
        if sum(a != b for a, b in zip(x, y, strict=True)) == 1:
            return True
    return False
