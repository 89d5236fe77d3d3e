"""The kinds of events that a recorder reports of a model call: modules that start and end, attention calls
that start and end, finished functions of torch, and finished operators of the dispatcher.

Their tensors are those of the call itself, never copies: an event that is kept keeps its tensors, and shows
the values of later writes in place. Whoever compares values later must clone them while the event is handled.
:mod:`.recorder` makes the events. What runs inside another call lies between its start and its end: an attention call
gives AttentionStart, the OperatorCalls inside it, AttentionEnd, then its FunctionCall. A call that raises has a start
only. While a graph is traced there are no FunctionCalls, and OperatorCalls come only if the recorder was asked for
them. ``adapters/planner/count.py`` relies on this order. Tests: tests/recorder/test_recorder.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor, nn

from para_core.attention.sdpa_call import SdpaCall
from para_core.torch_internals import OpOverload


@dataclass(frozen=True, eq=False)
class ModuleStart:
    """The start of a call of a module.

    Args:
        time: Number of the event. The events of a recorder are numbered in order of time.
        name: Name of the module in the watched model; ``""`` for the model itself.
        module: The module.
        args, kwargs: The arguments of the call.
    """

    time: int
    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class ModuleEnd:
    """The end of a call of a module that did not raise.

    Args:
        time: Number of the event.
        name: Name of the module in the watched model; ``""`` for the model itself.
        module: The module.
        output: What the module returned.
    """

    time: int
    name: str
    module: nn.Module
    output: Any


@dataclass(frozen=True, eq=False)
class AttentionStart:
    """The start of an attention call.

    Args:
        time: Number of the event.
        name: Name of the innermost module that is running; ``""`` outside of submodules.
        call: The arguments, as those of ``scaled_dot_product_attention``.
        function: The function or operator that the model calls.
        is_sdpa: Whether the call is computed as an SDPA call. Otherwise, as in ``flex_attention``, ``call``
            has query, key and value only.
    """

    time: int
    name: str
    call: SdpaCall
    function: Callable[..., Any]
    is_sdpa: bool


@dataclass(frozen=True, eq=False)
class AttentionEnd:
    """The end of an attention call, with its output ``[..., H, S_q, D_v]``.

    The other attributes are those of :class:`AttentionStart`, with another ``time``.
    """

    time: int
    name: str
    call: SdpaCall
    function: Callable[..., Any]
    is_sdpa: bool
    output: Tensor


@dataclass(frozen=True, eq=False)
class FunctionCall:
    """A finished call of a function of torch, attention included; calls of such functions inside of it are no events.

    Args:
        time: Number of the event.
        name: Name of the innermost module that is running; ``""`` outside of submodules.
        function: The function, a method of ``Tensor``, or an operator of ``torch.ops``.
        args, kwargs: The arguments of the call.
        output: What the function returned.
    """

    time: int
    name: str
    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    output: Any


@dataclass(frozen=True, eq=False)
class OperatorCall:
    """A finished call of an operator, as the dispatcher runs it.

    The attributes are those of :class:`FunctionCall`, with the ``operator``, an overload of ``torch.ops``, in
    place of ``function``.
    """

    time: int
    name: str
    operator: OpOverload
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    output: Any


Event: TypeAlias = ModuleStart | ModuleEnd | AttentionStart | AttentionEnd | FunctionCall | OperatorCall
