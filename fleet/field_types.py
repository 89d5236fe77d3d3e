"""Whether a JSON value fits the annotation of a field, as far as the annotation speaks of numbers, texts and lists of them."""

from __future__ import annotations

import types
from typing import Any, Union, get_args, get_origin

_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list: "a list",
    tuple: "a list",
}


def fits(value: Any, annotation: Any) -> bool:
    """Whether ``value`` may be given where ``annotation`` is expected; of one that says something else, nothing is known.

    ``None`` fits, as pipelines give it to fields that are no ``Optional``; so does a list of texts where a text is expected,
    which many of them take for a batch.

    >>> fits(3, float), fits("much", float), fits(True, int), fits([1, "2"], float | list[float])
    (True, False, False, False)
    """
    if value is None:
        return True
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return any(fits(value, part) for part in parts if part is not type(None))
    if origin in (list, tuple):
        return isinstance(value, list) and all(any(fits(item, part) for part in parts) for item in value)
    if annotation in (list, tuple):
        return isinstance(value, list)
    if annotation is str:
        return isinstance(value, str) or (isinstance(value, list) and all(isinstance(item, str) for item in value))
    if annotation in (int, float):
        kinds = int if annotation is int else (int, float)
        return isinstance(value, kinds) and not isinstance(value, bool)
    return isinstance(value, bool) if annotation is bool else True


def expected(annotation: Any) -> str:
    """In words.

    >>> expected(float | list[float] | None)
    'a number or a list of numbers'
    """
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(expected(part) for part in parts if part is not type(None)))
    if origin in (list, tuple) and parts and parts[0] in (int, float, str):
        return f"a list of {_NAMES[parts[0]].removeprefix('a ')}s"
    return _NAMES.get(origin or annotation, str(annotation))
