"""Intercept calls: plain functions for every mode and for a plan's region.

The function that computes an intercepted call is passed in (``handler``); nothing here knows how it does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from para_core.attention.multi_head import multi_head_attention
from para_core.attention.sdpa_call import SdpaCall, SdpaHandler
from para_core.modes.attention_by_hand import is_softmax
from para_core.modes.flash_attention import (
    FLASH_OPERATORS,
    OPERATOR_TYPES,
    OTHER_OPERATORS,
    Fail,
    attention_kind,
    flash_attention,
    is_called_by_a_graph,
    refuse_operator,
)
from para_core.torch_internals import (
    FUSED_ATTENTION_FUNCTIONS,
    DisableTorchFunction,
    HigherOrderOperator,
    InvokeSubgraphHOP,
    SpareDispatchKey,
    TracingContext,
    flex_attention_operator,
    no_frame_of_its_own,
    set_grad_enabled,
    without_side_effect_checks,
)

SDPA = F.scaled_dot_product_attention
UNFLATTEN = Tensor.unflatten
_MULTI_HEAD = F.multi_head_attention_forward
# Operators that run functions: torch.cond, and what Dynamo makes of torch.utils.checkpoint.
RUN_FUNCTIONS = (torch.ops.higher_order.cond, torch.ops.higher_order.tag_activation_checkpoint)


def raise_here(error: Exception) -> NoReturn:
    """Raise ``error`` on this rank; the other ranks of a plan have equal arguments, and raise it too."""
    raise error


def intercept(
    mode: TorchFunctionMode,
    handler: SdpaHandler,
    ranks: int,
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Any,
    *,
    flex: Callable[..., Any] | None = None,
    fail: Fail = raise_here,
) -> Any:
    """Run ``func(*args, **kwargs)``, which was called inside ``mode``, with its attention computed by ``handler``.

    Args:
        flex: what the operator of ``flex_attention`` becomes; called with it, its arguments and its keyword arguments.
            None: it is refused.
        fail: raises an exception about the arguments of an attention call, in a user's mode on every rank.

    Raises:
        RuntimeError: it computes attention where no mode can see it.
    """
    if func is SDPA:
        call = SdpaCall(*args, **kwargs)
        if torch.compiler.is_compiling() or not THREAD_STATE.handlers:
            return handler(call)
        with _DISPATCH_KEY.excluded():  # The innermost interception counts.
            return handler(call)
    if func is UNFLATTEN and torch.compiler.is_compiling():
        # Dynamo cannot trace the method under a mode: it is Python that calls super().
        return torch.unflatten(*args, **kwargs)
    if func in RUN_FUNCTIONS:
        return run_functions(mode, func, args, kwargs)
    if func is _MULTI_HEAD:
        return multi_head_attention(handler, *args, **kwargs)
    if func is flex_attention_operator and flex is not None:
        return flex(func, args, kwargs)
    if func in FUSED_ATTENTION_FUNCTIONS or func is flex_attention_operator:
        raise RuntimeError(
            f"{getattr(func, '__name__', func)} computes attention without scaled_dot_product_attention, so it "
            f"cannot run on {ranks} ranks: each would attend to its own tokens only. Use "
            "F.scaled_dot_product_attention, or run this call under UnifiedAttnMode.disable()."
        )
    if type(func) is InvokeSubgraphHOP:
        raise RuntimeError(
            f"torch.compiler.nested_compile_region on {ranks} ranks: no mode can be entered in it, so attention "
            "inside would "
            "see this rank's tokens only. Leave nested_compile_region out."
        )
    if type(func) in OPERATOR_TYPES:
        kind = attention_kind(func)
        if kind is not None and not is_called_by_a_graph(func):
            if kind == "flash":
                return flash_attention(handler, fail, func, args, kwargs)
            refuse_operator(func, fail)
    return func(*args, **kwargs)


def call_original(func: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> Any:
    """Run ``func(*args, **kwargs)`` in a mode that intercepts nothing now."""
    if func is UNFLATTEN and torch.compiler.is_compiling():
        return torch.unflatten(*args, **kwargs)
    return func(*args, **kwargs)


class Disabled(TorchFunctionMode):
    """Hands attention on under a name that what is outside does not intercept."""

    def __enter__(self) -> Disabled:
        self._guard = None
        if not torch.compiler.is_compiling():
            self._guard = _DISPATCH_KEY.excluded()
            self._guard.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        if self._guard is not None:
            self._guard.__exit__(*raised)
            self._guard = None

    @no_frame_of_its_own
    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is SDPA:
            return torch.ops.aten.scaled_dot_product_attention.default(*args, **kwargs)
        # A checkpoint in here must not be bound to an outer mode, nor a softmax count as attention that it missed.
        hidden = func is _MULTI_HEAD or func in FUSED_ATTENTION_FUNCTIONS or isinstance(func, HigherOrderOperator)
        if not torch.compiler.is_compiling():
            hidden = hidden or func is set_grad_enabled or is_softmax(func)
        if hidden or (type(func) in OPERATOR_TYPES and attention_kind(func) is not None):
            with DisableTorchFunction():
                return func(*args, **kwargs)
        return call_original(func, args, kwargs)


def unintercepted(attn_func: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """Return ``attn_func``, so that an outer mode does not intercept the attention that it computes on one device."""
    if attn_func is None:
        return None

    def run(*args: Any, **kwargs: Any) -> Any:
        with Disabled():
            return attn_func(*args, **kwargs)

    return run


# -- operators that run functions


def run_functions(mode: TorchFunctionMode, func: HigherOrderOperator, args: Sequence[Any], kwargs: Any) -> Any:
    """``func`` with ``mode`` inside the functions that it is given: it is dispatched to modes itself, which are off in
    there.
    """
    return func(*[_under(mode, arg) if callable(arg) else arg for arg in args], **kwargs)


class _ReenteredMode(TorchFunctionMode):
    """``mode`` once more, made and entered inside a branch: what is from outside cannot be entered there."""

    def __init__(self, mode: TorchFunctionMode) -> None:
        super().__init__()
        self._mode = mode

    @no_frame_of_its_own
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._mode.__torch_function__(func, types, args, kwargs)


def _under(mode: TorchFunctionMode, function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with _ReenteredMode(mode):
            return function(*args)

    return lambda *args: inside_branch(run, *args)


def inside_branch(function: Callable[..., Any], *args: Any) -> Any:
    """Return ``function(*args)``, which may enter modes that it makes, in a function that an operator was given."""
    # Dynamo calls the stack of modes changed, though it is at the end what it was.
    return without_side_effect_checks(function, *args)


# -- at the dispatcher: for eager code that keeps no gradient
#
# A mode sees every function of torch, and the host pays for each: an empty one around FLUX's transformer costs a third
# of its host time. The dispatcher can be asked about one operator alone, by this thread alone: with a key that no other
# kernel has, which a thread switches on for itself. All other operators fall through it at no cost.


class ThreadState(threading.local):
    """The handlers of SDPA calls in this thread, the innermost last."""

    def __init__(self) -> None:
        self.handlers: list[SdpaHandler] = []
        self.is_active: list[Callable[[], bool]] = []


# Public for the modes that test it before each SDPA call.
THREAD_STATE = ThreadState()


def outer_attention(call: SdpaCall) -> Tensor:
    """Compute ``call`` as it would be without the innermost :func:`at_the_dispatcher`. For its handler."""
    handlers = THREAD_STATE.handlers
    return handlers[-2](call) if len(handlers) > 1 else call.on_one_device()


def _dispatched(*args: Any, **kwargs: Any) -> Tensor:
    return _handle_dispatched(SdpaCall(*args, **kwargs))


def _handle_dispatched(call: SdpaCall) -> Tensor:
    # Where backends trace, torch 2.11 does not say that it compiles.
    if torch.compiler.is_compiling() or TracingContext.try_get() is not None:
        # A graph is cached under a key that knows nothing of this dispatch: that of one rank could be taken for it.
        raise RuntimeError(
            "scaled_dot_product_attention in a function that was compiled on its own, inside a parallel model: the "
            "graph would "
            "attend to this rank's tokens only. Compile the model, or modules of it; or call this function uncompiled."
        )
    with _DISPATCH_KEY.excluded():
        return THREAD_STATE.handlers[-1](call)


def _kernel_of(namespace: str, name: str) -> Callable[..., Any]:
    """Return what an attention operator of another package becomes at the dispatcher."""

    def dispatched(*args: Any, **kwargs: Any) -> Any:
        operator = getattr(getattr(torch.ops, namespace), name)
        if not THREAD_STATE.is_active[-1]():
            with _DISPATCH_KEY.excluded():
                return operator(*args, **kwargs)
        if attention_kind(operator) == "flash":
            return flash_attention(_handle_dispatched, raise_here, operator, args, kwargs)
        refuse_operator(operator, raise_here)

    return dispatched


# Registered by the first model that runs this way, not by importing this module.
_DISPATCH_KEY = SpareDispatchKey(
    "TESTING_ONLY_GenericMode",
    {
        ("aten", "scaled_dot_product_attention"): _dispatched,
        **{operator: _kernel_of(*operator) for operator in (*FLASH_OPERATORS, *OTHER_OPERATORS)},
    },
)


def dispatcher_is_available() -> bool:
    """Whether :func:`at_the_dispatcher` can be used in this process. Otherwise a mode intercepts attention, with the
    same result.
    """
    return _DISPATCH_KEY.is_available()


@contextmanager
def at_the_dispatcher(handler: SdpaHandler, is_active: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Inside, in this thread, ``handler`` computes every ``scaled_dot_product_attention``; nothing else is intercepted.

    Not for traced code, which modes are for, and not where a gradient is kept: what autograd runs later it runs
    outside.

    Args:
        is_active: whether attention operators of other packages are intercepted now. ``handler`` decides for itself.

    Raises:
        RuntimeError: not :func:`dispatcher_is_available`.
    """
    if not dispatcher_is_available():
        raise RuntimeError("attention cannot be intercepted at the dispatcher of this torch. Use a mode.")
    THREAD_STATE.handlers.append(handler)
    THREAD_STATE.is_active.append(is_active)
    try:
        with _DISPATCH_KEY.included():
            yield
    finally:
        THREAD_STATE.handlers.pop()
        THREAD_STATE.is_active.pop()


def not_at_the_dispatcher() -> AbstractContextManager[Any]:
    """Inside, in this thread, nothing becomes what :func:`at_the_dispatcher` says: the dispatcher does not ask."""
    return _DISPATCH_KEY.excluded()
