"""Wrap a ``forward`` that is an attribute of one instance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from para_core.instance_patching import Around


class ForwardOfInstance:
    """A wrapper of the ``forward`` attribute of an instance, such as a hook of accelerate, which hides its class's.

    Code that runs later may keep a reference and wrap it again, so after :meth:`remove` it only calls the original.
    """

    def __init__(self, instance: Any, around: Around) -> None:
        self._instance, self._around = instance, around
        self._before: Callable[..., Any] = vars(instance)["forward"]
        self._removed = False

    @classmethod
    def put_on(cls, instance: Any, around: Around) -> ForwardOfInstance:
        """Wrap the ``forward`` attribute of ``instance`` in ``around``."""
        forward = cls(instance, around)
        instance.forward = forward
        return forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._removed:
            return self._before(*args, **kwargs)
        return self._around(lambda _, *rest, **named: self._before(*rest, **named), self._instance, *args, **kwargs)

    def remove(self) -> None:
        """Stop calling the wrapper. Restores the attribute of the instance, unless it was replaced since."""
        self._removed = True
        if vars(self._instance).get("forward") is self:
            self._instance.forward = self._before
