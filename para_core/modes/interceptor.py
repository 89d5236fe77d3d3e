"""Intercept attention calls, in torch function modes or at the dispatcher.

Callers pass an owner, which computes an intercepted call; features of :mod:`para_core.modes.registry` add
functions.

The owners are :mod:`.unified` and :mod:`para_core.plans.interception`. Which operators of other packages
compute attention is in :mod:`.foreign_operators`. Tests: tests/modes/test_dispatcher.py,
tests/modes/test_unified.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from para_core.attention.sdpa_call import SdpaCall, SdpaHandler
from para_core.modes.foreign_operators import (
    DISPATCHED_OPERATORS,
    OPERATOR_TYPES,
    computes_attention,
    is_called_by_a_graph,
    require_route,
)
from para_core.modes.handwritten import may_be_scores
from para_core.modes.registry import ATTENTION_FUNCTIONS, AttentionOwner, SdpaOwner, route_of_function
from para_core.torch_internals import (
    DisableTorchFunction,
    HigherOrderOperator,
    InvokeSubgraphHOP,
    SpareDispatchKey,
    TracingContext,
    no_frame_of_its_own,
    scaled_dot_product_attention,
    set_grad_enabled,
    without_side_effect_checks,
)

SDPA = scaled_dot_product_attention
# The same function when a model calls the operator by its name in torch.ops.
SDPA_OPERATOR = torch.ops.aten.scaled_dot_product_attention
_UNFLATTEN = Tensor.unflatten
# Operators whose positional arguments include functions: torch.cond, and the operator to which Dynamo lowers
# torch.utils.checkpoint.
RUN_FUNCTIONS = (torch.ops.higher_order.cond, torch.ops.higher_order.tag_activation_checkpoint)


def intercept(
    mode: TorchFunctionMode, owner: AttentionOwner, func: Callable[..., Any], args: Sequence[Any], kwargs: Any
) -> Any:
    """Return the result of ``func(*args, **kwargs)``, called inside ``mode``, with attention computed by
    ``owner``.

    UnifiedAttnMode repeats the first branch, to save a Python call per SDPA call: change both.

    Raises:
        RuntimeError: ``func`` computes attention in a form that cannot be intercepted.
        ValueError: A call that a feature computes has an unsupported argument.
    """
    if func is SDPA or func is SDPA_OPERATOR:
        call = SdpaCall(*args, **kwargs)
        if torch.compiler.is_compiling() or not DISPATCHER_CONTEXTS.entered:
            return owner.attend(call)
        # This mode handles the call, so the dispatcher must not intercept it again.
        with _DISPATCH_KEY.excluded():
            return owner.attend(call)
    if func is _UNFLATTEN and torch.compiler.is_compiling():
        # Dynamo cannot trace Tensor.unflatten under a mode, because this Python method calls super().
        return torch.unflatten(*args, **kwargs)
    if func in RUN_FUNCTIONS:
        return run_functions(mode, func, args, kwargs)
    route = route_of_function(func)
    if route is not None:
        return route(owner, func, args, kwargs)
    if func in ATTENTION_FUNCTIONS:
        raise RuntimeError(
            f"{getattr(func, '__name__', func)} computes attention without scaled_dot_product_attention, so it "
            "cannot be intercepted: on several ranks each would attend to its own tokens only. Use "
            "F.scaled_dot_product_attention, or run this call under UnifiedAttnMode.disable()."
        )
    if type(func) is InvokeSubgraphHOP:
        raise RuntimeError(
            "torch.compiler.nested_compile_region inside a mode or plan: no mode can be entered in it, so on several "
            "ranks attention inside would see this rank's tokens only. Leave nested_compile_region out."
        )
    if type(func) in OPERATOR_TYPES and computes_attention(func) and not is_called_by_a_graph(func):
        return require_route(func, owner.fail)(owner, func, args, kwargs)
    return func(*args, **kwargs)


def call_original(func: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> Any:
    """Return ``func(*args, **kwargs)``, called inside a mode that does not intercept it.
    For Dynamo, ``Tensor.unflatten`` is replaced here, as in :func:`intercept`.
    """
    if func is _UNFLATTEN and torch.compiler.is_compiling():
        return torch.unflatten(*args, **kwargs)
    return func(*args, **kwargs)


def check_replaced_attention(ranks: int) -> None:
    """Refuse a function that has replaced torch's own scaled_dot_product_attention.

    Raises:
        RuntimeError: It was replaced. The calls of the other function cannot be intercepted on ``ranks``
            ranks.
    """
    function: Any = F.scaled_dot_product_attention
    if function is SDPA:
        return
    kind = type(function)
    name = f"{getattr(function, '__module__', kind.__module__)}.{getattr(function, '__qualname__', kind.__qualname__)}"
    raise RuntimeError(
        f"torch.nn.functional.scaled_dot_product_attention was replaced by {name}, and calls that this function "
        f"computes itself cannot be intercepted: each of {ranks} ranks would attend to its own tokens only. Restore "
        "torch's function, and compute local attention by the other one: attn_func=. For SageAttention that is "
        "backend='sage'."
    )


class Disabled(TorchFunctionMode):
    """A mode that hides attention calls from outer modes and from the dispatcher, so they run on this rank alone."""

    def __init__(self) -> None:
        super().__init__()
        # One guard for each time that this mode is entered in eager code, the innermost last.
        self._guards: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> Disabled:
        if not torch.compiler.is_compiling():
            guard = _DISPATCH_KEY.excluded()
            guard.__enter__()
            self._guards.append(guard)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        if self._guards and not torch.compiler.is_compiling():
            self._guards.pop().__exit__(*raised)

    @no_frame_of_its_own
    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is SDPA or func is SDPA_OPERATOR:
            return torch.ops.aten.scaled_dot_product_attention.default(*args, **kwargs)
        # Hide these calls too. At set_grad_enabled an outer mode would bind the function of a surrounding
        # checkpoint to itself, and it would report a softmax as attention that was computed by hand.
        hidden = func in ATTENTION_FUNCTIONS or isinstance(func, HigherOrderOperator)
        if not torch.compiler.is_compiling():
            hidden = hidden or func is set_grad_enabled or may_be_scores(func)
        if hidden or (type(func) in OPERATOR_TYPES and computes_attention(func)):
            with DisableTorchFunction():
                return func(*args, **kwargs)
        return call_original(func, args, kwargs)


def without_interception(attn_func: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """Return a wrapper of ``attn_func`` in which no mode intercepts attention; None if ``attn_func`` is None."""
    if attn_func is None:
        return None

    def run(*args: Any, **kwargs: Any) -> Any:
        with Disabled():
            return attn_func(*args, **kwargs)

    return run


def run_functions(
    mode: TorchFunctionMode, func: HigherOrderOperator, args: Sequence[Any], kwargs: Any
) -> Any:
    """Return the result of ``func``, one of ``RUN_FUNCTIONS``, with ``mode`` entered inside each function
    among its arguments.

    This is necessary because modes see the operator itself but are off inside the functions that it runs.
    """
    wrapped = list(args)
    for index, arg in enumerate(args):
        if callable(arg):
            wrapped[index] = _enter_in_branch(mode, arg)
    return func(*wrapped, **kwargs)


class _ReenteredMode(TorchFunctionMode):
    """A mode that forwards all calls to ``mode``, for branches of ``torch.cond``, where Dynamo cannot enter a
    mode that was constructed outside of the branch.
    """

    def __init__(self, mode: TorchFunctionMode) -> None:
        super().__init__()
        self._mode = mode

    @no_frame_of_its_own
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._mode.__torch_function__(func, types, args, kwargs)


def _enter_in_branch(mode: TorchFunctionMode, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper that runs ``function`` under ``mode``, for a branch of a higher-order operator."""

    def run(*args: Any) -> Any:
        with _ReenteredMode(mode):
            return function(*args)

    return lambda *args: run_in_branch(run, *args)


def run_in_branch(function: Callable[..., Any], *args: Any) -> Any:
    """Return ``function(*args)``, in a branch of a higher-order operator, and allow ``function`` to enter modes."""
    # Dynamo would refuse a branch that enters a mode, because a change of the mode stack counts as a side
    # effect, even if the stack is restored at the end.
    return without_side_effect_checks(function, *args)


# The rest of this file intercepts attention at the dispatcher, for eager code without gradients. A mode would
# cost host time in every torch function. A dispatch key that no other kernel uses intercepts only the
# operators that are registered for the key, and only in threads that include the key; all others fall through
# it.


class _Handling(NamedTuple):
    """The arguments of one :func:`at_the_dispatcher` context."""

    handler: SdpaHandler
    is_active: Callable[[], bool]


class _DispatcherContexts(threading.local):
    """The :func:`at_the_dispatcher` contexts that this thread has entered, the innermost last."""

    def __init__(self) -> None:
        self.entered: list[_Handling] = []


# The name is public, because UnifiedAttnMode asks before each SDPA call whether a context was entered.
DISPATCHER_CONTEXTS = _DispatcherContexts()


def outer_attention(call: SdpaCall) -> Tensor:
    """Return the output of ``call``, computed by the handler of the next outer :func:`at_the_dispatcher`
    context. If there is none, compute it on one device. Only the handler of the innermost context may call
    this function.
    """
    if len(DISPATCHER_CONTEXTS.entered) <= 1:
        return call.on_one_device()
    return DISPATCHER_CONTEXTS.entered[-2].handler(call)


def _handle_dispatched(call: SdpaCall) -> Tensor:
    """Return the output of an SDPA call that the dispatcher intercepted.
    Raise ``RuntimeError`` while tracing.
    """
    # Check the tracing context too, because in torch 2.11 is_compiling() is False while a compiler backend
    # traces.
    if torch.compiler.is_compiling() or TracingContext.try_get() is not None:
        # Interception cannot be traced here: the cache key of a graph does not include this dispatch key, so
        # a graph that was cached on a single rank could be reused.
        raise RuntimeError(
            "scaled_dot_product_attention in a function that was compiled on its own, inside a parallel model: the "
            "graph would attend to this rank's tokens only. Compile the model, or modules of it; or call this "
            "function uncompiled."
        )
    with _DISPATCH_KEY.excluded():
        return DISPATCHER_CONTEXTS.entered[-1].handler(call)


class _DispatchedCalls(SdpaOwner):
    """The owner of calls that the dispatcher intercepts: the handler of the innermost :func:`at_the_dispatcher`."""

    def attend(self, call: SdpaCall) -> Tensor:
        return _handle_dispatched(call)


_DISPATCHED_CALLS = _DispatchedCalls()


def _kernel_of(namespace: str, name: str) -> Callable[..., Any]:
    """Return a dispatcher kernel for an attention operator of another package. It computes the operator over
    the mesh, or refuses it, and runs the original operator if ``is_active()`` of the innermost context is
    False.
    """

    def dispatched(*args: Any, **kwargs: Any) -> Any:
        operator = getattr(getattr(torch.ops, namespace), name)
        if not DISPATCHER_CONTEXTS.entered[-1].is_active():
            with _DISPATCH_KEY.excluded():
                return operator(*args, **kwargs)
        return require_route(operator, _DISPATCHED_CALLS.fail)(_DISPATCHED_CALLS, operator, args, kwargs)

    return dispatched


# The kernels are registered when the key is first used, so importing this module does not change torch.
_DISPATCH_KEY = SpareDispatchKey(
    "TESTING_ONLY_GenericMode",
    {
        ("aten", "scaled_dot_product_attention"): lambda *args, **kwargs: _handle_dispatched(
            SdpaCall(*args, **kwargs)
        ),
        **{operator: _kernel_of(*operator) for operator in DISPATCHED_OPERATORS},
    },
)


def dispatcher_is_available() -> bool:
    """Whether :func:`at_the_dispatcher` works with this version of torch.
    If not, use a mode; the results are equal.
    """
    return _DISPATCH_KEY.is_available()


@contextmanager
def at_the_dispatcher(handler: SdpaHandler, is_active: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Return a context in which ``handler`` computes every ``scaled_dot_product_attention`` of this thread.

    ``handler`` also computes FlashAttention operators; those of ``DISPATCHED_OPERATORS`` that no feature
    computes raise RuntimeError. Such operators are intercepted only while ``is_active()`` is True, and SDPA
    always: ``handler`` must test it. Use a mode instead in traced code and for calls that require a gradient,
    because autograd runs the backward outside of this context. Raise ``RuntimeError`` if
    :func:`dispatcher_is_available` is False.
    """
    if not dispatcher_is_available():
        raise RuntimeError("attention cannot be intercepted at the dispatcher of this torch. Use a mode.")
    DISPATCHER_CONTEXTS.entered.append(_Handling(handler, is_active))
    try:
        with _DISPATCH_KEY.included():
            yield
    finally:
        DISPATCHER_CONTEXTS.entered.pop()


def not_at_the_dispatcher() -> AbstractContextManager[Any]:
    """Return a context that turns off the interception of :func:`at_the_dispatcher` in this thread."""
    return _DISPATCH_KEY.excluded()
