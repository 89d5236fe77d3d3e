"""An attribute that is found when it is first asked for, and kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

import torch

Value = TypeVar("Value")


class lazy(Generic[Value]):
    """``functools.cached_property`` for code that is traced, too: Dynamo does not trace the lock that it has on Python 3.11.

    While a graph is traced nothing is kept, for lengths are symbolic then.
    """

    def __init__(self, find: Callable[[Any], Value]) -> None:
        self._find = find
        self.__doc__ = find.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> lazy[Value]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> Value: ...
    def __get__(self, instance: object | None, owner: type) -> Value | lazy[Value]:
        if instance is None:
            return self
        found = self._find(instance)
        if not torch.compiler.is_compiling():
            vars(instance)[self._name] = found
        return found
