"""Read and replace fields of dataclasses and named tuples, nested in each other and in lists, tuples and
dicts.

A field is named by its path: ``"video.x"`` is the field ``x`` of the argument ``video``. A dataclass that is
also a mapping, such as a ``ModelOutput`` of diffusers, counts as a mapping.

Plans, pipeline stages, comparisons and ``adapters/propose/`` reach into arguments and outputs by this; a
cache has its own (:mod:`para_core.cache.streams`). Tests: tests/test_dataclasses.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from para_core.torch_internals import tree_leaves, tree_map


def has_fields(value: Any) -> bool:
    """Whether ``value`` is an instance of a dataclass, but no mapping, or a named tuple."""
    return _is_named_tuple(value) or (is_dataclass(value) and not isinstance(value, (type, Mapping)))


def _is_named_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def fields_of(value: Any) -> dict[str, Any]:
    """Return the fields of ``value``, which :func:`has_fields`, by name.
    Fields that are not set are left out.
    """
    if _is_named_tuple(value):
        names = value._fields
    else:
        names = [field.name for field in fields(value)]
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def with_fields(value: Any, changes: Mapping[str, Any]) -> Any:
    """Return a copy of ``value``, which :func:`has_fields`, with the fields ``changes``.

    ``__init__`` and ``__post_init__`` do not run, because they may derive other attributes from the changed
    fields.
    """
    if _is_named_tuple(value):
        return value._replace(**changes)
    copied = object.__new__(type(value))
    # Use object.__setattr__, because a frozen dataclass refuses its own. A class with slots has no __dict__.
    for name, attribute in {**getattr(value, "__dict__", {}), **fields_of(value), **changes}.items():
        object.__setattr__(copied, name, attribute)
    return copied


def like_sequence(value: Sequence[Any], items: Iterable[Any]) -> Any:
    """Return a list, tuple or named tuple of the type of ``value`` with other ``items``."""
    kind: Callable[..., Any] = type(value)
    if _is_named_tuple(value):
        return kind(*items)
    return kind(items)


def change_field(value: Any, path: str, change: Callable[[Any], Any]) -> Any:
    """Return a copy of ``value`` in which the field ``path`` is replaced by ``change(field)``. A None is not
    changed.

    With an empty path this is ``change(value)``. A field may also be an entry of a mapping; the
    result then has a plain dict in its place.

    Raises:
        TypeError: ``value``, or a field on the path, does not have the next field.
    """
    if value is None or not path:
        if value is None:
            return None
        return change(value)
    name, _, rest = path.partition(".")
    entries: Mapping[str, Any] = {}
    if isinstance(value, Mapping):
        entries = value
        if name not in value and _is_model_output(value):
            # It has no entry for a field that is None.
            entries = fields_of(value)
    elif has_fields(value):
        entries = fields_of(value)
    if name not in entries:
        raise TypeError(
            f"the plan names the field {name!r} of a {type(value).__name__}; expected a dataclass, named tuple or dict "
            f"with that field. Its fields are {list(entries) or 'none'}."
        )
    changed = {name: change_field(entries[name], rest, change)}
    if isinstance(value, Mapping):
        return {**value, **changed}
    return with_fields(value, changed)


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Return a copy of ``value``, nested containers and dataclasses, with ``function(leaf)`` for each leaf."""
    if has_fields(value):
        return with_fields(
            value, {name: map_leaves(function, field) for name, field in fields_of(value).items()}
        )
    if _is_model_output(value):
        # Not by its class, which may take no None, nor entries that are no fields.
        copied = copy(value)
        for name, entry in value.items():
            copied[name] = map_leaves(function, entry)
        return copied

    def map_leaf(leaf: Any) -> Any:
        if has_fields(leaf) or _is_model_output(leaf):
            return map_leaves(function, leaf)
        return function(leaf)

    return tree_map(map_leaf, value, is_leaf=_is_model_output)


def leaves_of(value: Any) -> list[Any]:
    """Return the leaves of nested lists, tuples, dicts and dataclasses, in order."""
    leaves: list[Any] = []
    for leaf in tree_leaves(value, is_leaf=has_fields):
        if has_fields(leaf):
            inner = list(fields_of(leaf).values())
        elif _is_model_output(leaf):  # of a class that is not registered as a pytree
            inner = list(leaf.values())
        else:
            leaves.append(leaf)
            continue
        leaves += leaves_of(inner)
    return leaves


def leaf_kinds(value: Any) -> tuple[Any, ...]:
    """Return the shape and dtype of each tensor among the leaves of ``value``, each bool and string, and the
    type of all else, such as the number of a step. Calls are told apart by these kinds of their arguments.
    """
    kinds: list[Any] = []
    for leaf in leaves_of(value):
        if isinstance(leaf, Tensor):
            kinds.append((tuple(leaf.shape), leaf.dtype))
        elif isinstance(leaf, (bool, str)):
            kinds.append(leaf)
        else:
            kinds.append(type(leaf))
    return tuple(kinds)


def _is_model_output(value: Any) -> bool:
    """Whether ``value`` is an output of diffusers or transformers, a dataclass that is also a dict of its fields.

    The dict has no entries for fields that are None. A pytree contains only the entries of the dict, so it
    cannot rebuild ``value`` if such a field is required.
    """
    return isinstance(value, dict) and is_dataclass(value)


def by_path(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``arguments`` with each value that :func:`has_fields` replaced by its fields, by path, at any depth."""
    flat: dict[str, Any] = {}
    for name, value in arguments.items():
        if has_fields(value):
            flat |= by_path({f"{name}.{field}": entry for field, entry in fields_of(value).items()})
        else:
            flat[name] = value
    return flat
