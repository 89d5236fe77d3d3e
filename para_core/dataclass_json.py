"""Write a dataclass as JSON and read it again. In graphs, options, meshes and calls are strings of this form.

Called in :mod:`para_core.attention.attention_options`, :mod:`para_core.attention.spec` and
:mod:`para_core.distributed.mesh`. Tests: tests/test_dataclasses.py.
"""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import torch

Instance = TypeVar("Instance")


def to_json(value: Any) -> str:
    """Return the dataclass ``value`` as JSON, which :func:`from_json` reads.

    Its fields may be dataclasses, dtypes, and what JSON can express. Equal fields of equal types give equal
    text: 1 and 1.0 do not, and a dict is written in its order. Dynamo can trace this function if the fields
    are constants of the graph.

    Raises:
        TypeError: A field is something else, such as a tensor.
    """
    text: str = _dump(_nested_fields(value))
    return text


def _nested_fields(value: Any) -> dict[str, Any]:
    """Return the fields of the dataclass ``value`` by name, with dataclasses among them as dicts, too."""
    values = {}
    for field in fields(value):
        content = getattr(value, field.name)
        # Dynamo cannot trace is_dataclass of a string that comes from a process group.
        if not isinstance(content, str) and is_dataclass(content):
            content = _nested_fields(content)
        values[field.name] = content
    return values


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _dump(values: dict[str, Any]) -> str:
    # Dynamo cannot trace the JSON encoder, so it calls this function while tracing and treats the result as a
    # constant. This is correct because the values are constants of the graph.
    return json.dumps(values, default=_dtype_name)


def _dtype_name(value: Any) -> str:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    raise TypeError(
        f"{value!r} is a {type(value).__name__}; expected a dataclass, a dtype, or a value of JSON."
    )


def from_json(kind: type[Instance], text: str) -> Instance:
    """Return the value of the dataclass ``kind`` that :func:`to_json` wrote as ``text``.

    A tuple comes back as a list, so ``kind`` must convert it if the difference matters to it.

    Raises:
        ValueError: ``text`` is not JSON, its fields are not those of ``kind``, or it names a dtype that torch
            lacks.
    """
    value: Instance = _read_fields(kind, json.loads(text))
    return value


def _read_value(annotation: Any, value: Any) -> Any:
    """Convert ``value``, read from JSON, to the type ``annotation``.

    Of a union the first dtype or dataclass among its members decides, and None stays None. Other values, also
    those inside lists and dicts, are returned as they are.
    """
    if value is None:
        return None
    members = (annotation,)
    # The arguments of other generics are what a value contains, such as those of a list.
    if get_origin(annotation) in (Union, UnionType):
        members = get_args(annotation)
    for member in members:
        if member is torch.dtype:
            return _read_dtype(value)
        if is_dataclass(member):
            return _read_fields(member, value)
    return value


def _read_dtype(name: Any) -> torch.dtype:
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype of torch; expected a name such as 'bfloat16'.")
    return dtype


def _read_fields(kind: Any, values: Any) -> Any:
    """Return the dataclass ``kind`` with the fields ``values``, read from JSON. Raise ValueError for other fields."""
    names = [field.name for field in fields(kind)]
    if not isinstance(values, dict) or sorted(values) != sorted(names):
        raise ValueError(
            f"the JSON of a {kind.__name__} is {values!r}; expected an object with the fields {names}."
        )
    annotations = get_type_hints(kind)
    return kind(**{name: _read_value(annotations[name], value) for name, value in values.items()})
