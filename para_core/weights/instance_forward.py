"""Wrap a ``forward`` that is set on one instance and hides the method of its class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from para_core.instance_patching import Around


class ForwardOfInstance:
    """A wrapper of the ``forward`` attribute of one instance, such as a ``forward`` that a hook of accelerate has set.

    Other code may keep a reference to the wrapper and wrap it again. After :meth:`remove`, such a leftover wrapper only
    calls the original ``forward``.
    """

    def __init__(self, instance: Any, around: Around) -> None:
        self._instance, self._around = instance, around
        self._before: Callable[..., Any] = vars(instance)["forward"]
        self._removed = False

    @classmethod
    def put_on(cls, instance: Any, around: Around) -> ForwardOfInstance:
        """Replace the ``forward`` attribute of ``instance`` by a wrapper that calls ``around``, and return it."""
        forward = cls(instance, around)
        instance.forward = forward
        return forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._removed:
            return self._before(*args, **kwargs)
        return self._around(lambda _, *rest, **named: self._before(*rest, **named), self._instance, *args, **kwargs)

    def remove(self) -> None:
        """Make the wrapper only call the original ``forward``, and restore the ``forward`` attribute of the instance
        unless other code has replaced it.
        """
        self._removed = True
        if vars(self._instance).get("forward") is self:
            self._instance.forward = self._before
