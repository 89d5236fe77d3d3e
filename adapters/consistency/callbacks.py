"""A user's callbacks, which get control in the middle of a pipeline's call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from para_core.instance_patching import WrapperPriority, unwrap, wrap_method


@contextmanager
def around_callbacks(
    kwargs: Mapping[str, Any], key: str, run: Callable[..., Any], *, order: WrapperPriority
) -> Iterator[dict[str, Any]]:
    """Inside, the callbacks among the arguments of a pipeline's call run as ``run(callback, *args, **kwargs)``.

    Yields:
        The arguments to call with.
    """
    callbacks = {name: f for name, f in kwargs.items() if name.startswith("callback") and callable(f)}
    with ExitStack() as stack:
        yield {**kwargs, **{name: stack.enter_context(_around(f, key, run, order)) for name, f in callbacks.items()}}


@contextmanager
def _around(callback: Any, key: str, run: Callable[..., Any], order: WrapperPriority) -> Iterator[Any]:
    if not hasattr(callback, "tensor_inputs"):
        yield partial(run, callback)
        return
    # Of diffusers' own, pipelines ask of what class they are.
    wrap_method(callback, "__call__", key, run, order=order, plain_copies=True)
    try:
        yield callback
    finally:
        unwrap(callback, key)
