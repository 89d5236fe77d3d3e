"""Record a model call as events (:mod:`.events`), which are passed to a function as they happen.

The counts of the planner, comparisons with the unmodified model, proposals of plans and ``same_bits=True``,
which follows tokens, use it. A mode sees functions, hooks see modules, and a dispatch mode sees operators.
Tests: tests/recorder/test_recorder.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from para_core.attention.sdpa_call import SdpaCall, SdpaHandler
from para_core.modes.foreign_operators import OPERATOR_TYPES, is_called_by_a_graph
from para_core.modes.interceptor import SDPA, SDPA_OPERATOR
from para_core.modes.registry import (
    MeshAccess,
    Route,
    SdpaOwner,
    route_of_function,
    route_of_operator,
)
from para_core.recorder.events import (
    AttentionEnd,
    AttentionStart,
    Event,
    FunctionCall,
    ModuleEnd,
    ModuleStart,
    OperatorCall,
)
from para_core.torch_internals import (
    DisableTorchFunction,
    OpOverload,
    TorchDispatchMode,
    function_mode_stack,
)


class _RunningModule(NamedTuple):
    """A module whose call is running: how many modules were running before it, and whether it entered the
    mode.
    """

    module: nn.Module
    depth: int
    entered: bool


class Recorder(TorchFunctionMode):
    """A mode that passes each event of a model call to ``handle``, in order of time.

    Inside ``handle`` functions of torch are neither recorded nor intercepted; with ``operators`` their
    operators are reported, except while an operator is handled. Attention that a plan or an outer mode
    computes over several ranks is recorded with this rank's tensors. Nothing inside a compiled function is
    recorded, so call it under ``torch.compiler.set_stance("force_eager")``.

    The recorder may be entered several times. The hook before a module enters it again if another mode is
    innermost, so that it sees the calls as the model makes them, and the hook after the module leaves it: each
    running module notes in ``_calls`` whether it entered. The innermost entry reports a function. Meanwhile
    ``_is_busy`` is set, so that outer entries, which the same call reaches next, only pass it on.

    Args:
        handle: Called with each event.
        compute_attention: Computes the recorded SDPA calls, and the attention functions that are computed by
            one. Defaults to SDPA itself, which outer modes intercept.

    Attributes:
        running: Names of the modules that have not returned, the innermost last. After an error, the
            innermost module is the one that failed; record the next call by a new recorder.

    Example:
        >>> events = []
        >>> with Recorder(events.append).watch(model):  # doctest: +SKIP
        ...     model(x)
    """

    def __init__(
        self, handle: Callable[[Event], None], *, compute_attention: SdpaHandler = SdpaCall.original
    ) -> None:
        super().__init__()
        self.running: list[str] = []
        self._handle = handle
        self._compute_attention = compute_attention
        self._time = 0
        self._calls: list[_RunningModule] = []
        # Whether a function is running, which only the innermost entry reports.
        self._is_busy = False

    @contextmanager
    def watch(self, module: nn.Module, *, operators: bool = False) -> Iterator[None]:
        """Record the calls of ``module`` and of its submodules inside the ``with`` block, and all functions.

        Args:
            module: The model. Hooks are registered on its modules, and removed at the end.
            operators: Whether to report an :class:`OperatorCall` for each operator, too.
        """
        with ExitStack() as stack:
            for name, submodule in module.named_modules():
                for hook in self._add_hooks(name, submodule):
                    stack.callback(hook.remove)
            if operators:
                stack.enter_context(_OperatorMode(self))
            stack.enter_context(self)
            yield

    def _add_hooks(self, name: str, module: nn.Module) -> list[RemovableHandle]:
        """Register hooks that report the calls of ``module``, and return their handles."""

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            # A plan enters its own modes around some modules.
            entered = function_mode_stack()[-1:] != [self]
            self._calls.append(_RunningModule(module, len(self.running), entered))
            self.running.append(name)
            if entered:
                self.__enter__()  # type: ignore[no-untyped-call]
            self._report(ModuleStart(self._next_time(), name, module, args, kwargs))

        def after(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            # An earlier hook of this module may have raised, so that the one above did not run.
            if not self._calls or self._calls[-1].module is not module:
                return
            call = self._calls.pop()
            if call.entered:
                self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            # torch passes None as the output of a module that raised, while its error is handled. A module
            # that returns None to a caller that handles an error looks the same, and has no ModuleEnd either.
            has_raised = output is None and sys.exc_info()[0] is not None
            if not has_raised:
                del self.running[call.depth :]
                self._report(ModuleEnd(self._next_time(), name, module, output))

        return [
            module.register_forward_pre_hook(before, with_kwargs=True),
            # Call the hook also if the module raises, because it leaves the mode.
            module.register_forward_hook(after, with_kwargs=True, always_call=True),
        ]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_busy or torch.compiler.is_compiling():
            return func(*args, **kwargs)
        self._is_busy = True
        try:
            output = self._call(func, args, kwargs)
        finally:
            self._is_busy = False
        self._report(FunctionCall(self._next_time(), self._name(), func, args, kwargs, output))
        return output

    def _call(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return ``func(*args, **kwargs)``, and report the attention call in it."""
        if func is SDPA or func is SDPA_OPERATOR:
            return self.run_sdpa(SdpaCall(*args, **kwargs), func)
        route = _route_of(func)
        if route is None:
            return func(*args, **kwargs)
        owner = _RecordedCall(self, func, args)
        output = route(owner, func, args, kwargs)
        owner.end(output)
        return output

    def run_sdpa(self, call: SdpaCall, function: Callable[..., Any]) -> Tensor:
        """Return the output of an SDPA call, as which ``function`` is computed, and report it."""
        self.start_attention(call, function, is_sdpa=True)
        output = self._compute_attention(call)
        self.end_attention(call, function, output, is_sdpa=True)
        return output

    def start_attention(self, call: SdpaCall, function: Callable[..., Any], *, is_sdpa: bool) -> None:
        """Report the start of an attention call."""
        self._report(AttentionStart(self._next_time(), self._name(), call, function, is_sdpa))

    def end_attention(
        self, call: SdpaCall, function: Callable[..., Any], output: Tensor, *, is_sdpa: bool
    ) -> None:
        """Report the end of an attention call."""
        self._report(AttentionEnd(self._next_time(), self._name(), call, function, is_sdpa, output))

    def _next_time(self) -> int:
        """Count an event, and return its number."""
        self._time += 1
        return self._time

    def _name(self) -> str:
        """Return the name of the innermost running module."""
        if not self.running:
            return ""
        return self.running[-1]

    def _report(self, event: Event) -> None:
        """Pass ``event`` to the handler, whose own functions must not become events."""
        with DisableTorchFunction():
            self._handle(event)

    def report_operator(self, operator: OpOverload, args: Sequence[Any], kwargs: Any, output: Any) -> None:
        """Report a call of ``operator``, which returned ``output``."""
        self._report(OperatorCall(self._next_time(), self._name(), operator, args, kwargs, output))


def _route_of(func: Callable[..., Any]) -> Route | None:
    """Return what computes ``func`` by other functions, if it is an attention function that a mode can intercept."""
    if type(func) not in OPERATOR_TYPES:
        return route_of_function(func)
    if is_called_by_a_graph(func):
        return None
    return route_of_operator(func)


class _RecordedCall(SdpaOwner):
    """The owner of one call of ``function`` with ``args``, by which a feature of
    :mod:`para_core.modes.registry` computes it.
    """

    def __init__(self, recorder: Recorder, function: Callable[..., Any], args: Sequence[Any]) -> None:
        self._recorder, self._function, self._args = recorder, function, args
        self._other_call: SdpaCall | None = None

    def attend(self, call: SdpaCall) -> Tensor:
        return self._recorder.run_sdpa(call, self._function)

    def begin_other_call(self, *, counts: bool) -> MeshAccess | None:
        """Report the start of a call that is no SDPA, and let it run as it is.

        Query, key and value are the first arguments by position: a mode sees the operator of
        ``flex_attention``, which torch calls so, however the user passed them.
        """
        query, key, value = self._args[:3]
        self._other_call = SdpaCall(query, key, value)
        self._recorder.start_attention(self._other_call, self._function, is_sdpa=False)
        return None

    def end(self, output: Any) -> None:
        """Report the end of a call that is no SDPA. The first of its outputs is that of attention."""
        if self._other_call is None:
            return
        if not isinstance(output, Tensor):
            output = output[0]
        self._recorder.end_attention(self._other_call, self._function, output, is_sdpa=False)


class _OperatorMode(TorchDispatchMode):
    """A mode that lets ``recorder`` report each operator."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        self._recorder.report_operator(func, args, kwargs, output)
        return output
