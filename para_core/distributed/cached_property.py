"""A cached property that Dynamo can trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

import torch

Value = TypeVar("Value")


class cached_property(Generic[Value]):
    """A replacement for ``functools.cached_property``, which on Python 3.11 takes a lock that Dynamo cannot
    trace; that of Python 3.12 takes none.

    While Dynamo traces a graph, values are not cached, because they may contain symbolic lengths.
    """

    def __init__(self, compute: Callable[[Any], Value]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> cached_property[Value]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> Value: ...
    def __get__(self, instance: object | None, owner: type) -> Value | cached_property[Value]:
        if instance is None:
            return self
        value = self._compute(instance)
        if not torch.compiler.is_compiling():
            vars(instance)[self._name] = value
        return value
