"""Optional features of interception: what each adds to every mode and plan.

A feature is a file of this folder that calls the functions below, or appends to ``RECOMPUTATION``, when it is
imported. ``__init__`` imports it, in one line. Without that line the attention functions and operators that
the feature computes are refused like any other that cannot be intercepted.

The features are :mod:`.multi_head`, :mod:`.flex_attention`, :mod:`.flash_attention` and
:mod:`.recomputation`. ``PLANNED_CALLS`` is written by :mod:`para_core.plans.region`, for the last of them.
Tests: tests/lift_out.py removes them one by one; tests/modes/test_dispatcher.py and
tests/modes/test_unified.py check what is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType
from typing import Any, NoReturn, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from para_core.attention.attention_options import AttnOptions
from para_core.attention.mesh_attention import ChooseLayouts
from para_core.attention.sdpa_call import SdpaCall
from para_core.distributed.mesh import SequenceMesh
from para_core.layout.sequence import SequenceLayout
from para_core.torch_internals import FUSED_ATTENTION_FUNCTIONS, flex_attention_operator


@dataclass(frozen=True)
class MeshAccess:
    """The mesh, the layouts and the options of one attention call, for a feature that computes the call itself."""

    mesh: SequenceMesh
    layouts: ChooseLayouts
    options: AttnOptions
    assume_equal: bool


class AttentionOwner(Protocol):
    """A mode or plan that intercepts attention, as a feature sees it."""

    def attend(self, call: SdpaCall) -> Tensor:
        """Return the output of an SDPA call, computed over the mesh."""

    def fail(self, error: Exception) -> NoReturn:
        """Raise ``error``, on every rank if the ranks compare their calls."""

    def begin_other_call(self, *, counts: bool) -> MeshAccess | None:
        """Begin an attention call that is no SDPA. Return what computes it over the mesh.

        Args:
            counts: Whether the call is one of the model's attention calls; False while it is only prepared.

        Returns:
            None if one device computes the call, because no key is sharded.

        Raises:
            RuntimeError: The owner computes SDPA calls only.
        """


class SdpaOwner:
    """The base class of owners that compute ``scaled_dot_product_attention`` only, and no other attention."""

    def fail(self, error: Exception) -> NoReturn:
        """Raise ``error``."""
        raise error

    def begin_other_call(self, *, counts: bool) -> MeshAccess | None:
        """Raise ``RuntimeError``: this attention cannot be computed over ranks here."""
        raise RuntimeError(
            "only scaled_dot_product_attention is computed over several ranks here. Use "
            "F.scaled_dot_product_attention, or run this call under UnifiedAttnMode.disable()."
        )


# Called as route(owner, func, args, kwargs); returns what func(*args, **kwargs) returns.
Route = Callable[[AttentionOwner, Callable[..., Any], Sequence[Any], Any], Any]
# Returns a wrapper of a function that runs it under the mode or plan that made the binding.
Bind = Callable[[Callable[..., Any]], Callable[..., Any]]
# Called as shard(mask, query_layout, key_layout, mesh); returns this rank's part of a mask over all tokens.
ShardMask = Callable[[Any, SequenceLayout, SequenceLayout, SequenceMesh], Any]


@dataclass(frozen=True)
class Recomputation:
    """Functions that keep what a backward pass runs again inside the mode or plan of the forward.

    Args:
        gradients_disabled: Called with a binding when code inside a mode disables gradients.
        attention_called: Called with a mode or plan and a binding when code inside it calls attention, and
            with the number of ``saved_tensors_hooks`` that were set before a plan's call.
        during_call: Returns a context for one call of a model with a plan, given a binding and the model.
        check_exchanges: Raises ``RuntimeError`` if a backward would run parts of a model without their
            exchanges.
    """

    gradients_disabled: Callable[[Bind], None]
    attention_called: Callable[[object, Bind, int], None]
    during_call: Callable[[Bind, nn.Module], AbstractContextManager[None]]
    check_exchanges: Callable[[nn.Module], None]


# Functions that compute attention in one piece, without scaled_dot_product_attention. A mode refuses those
# that no feature computes, and ``Disabled`` hides them all from outer modes.
ATTENTION_FUNCTIONS = (F.multi_head_attention_forward, flex_attention_operator, *FUSED_ATTENTION_FUNCTIONS)
# Pairs, and not dicts, because Dynamo compares functions by identity, and need not hash them.
_FUNCTIONS: list[tuple[Callable[..., Any], Route]] = []
_OPERATORS: list[tuple[Callable[[Any], bool], Route]] = []
_NEEDS_MODE: list[Callable[[nn.Module], bool]] = []
_EXPLANATIONS: list[Callable[[BaseException | None], None]] = []
# modes/unified.py, plans/interception.py and plans/planned_attention.py loop over this list themselves, which
# saves a Python call in each attention call.
RECOMPUTATION: list[Recomputation] = []
# The code of the functions that run a whole call of a model with a plan. A stack is searched up to them.
PLANNED_CALLS: set[CodeType] = set()
_MASK_SHARDERS: list[tuple[type, ShardMask]] = []


def register_function(function: Callable[..., Any], route: Route) -> None:
    """Compute calls of ``function``, one of ``ATTENTION_FUNCTIONS``, by ``route``. Raise ``ValueError`` for another."""
    if function not in ATTENTION_FUNCTIONS:
        raise ValueError(f"{function} is not in ATTENTION_FUNCTIONS, so Disabled() would not hide it.")
    _FUNCTIONS.append((function, route))


def register_operator(matches: Callable[[Any], bool], route: Route) -> None:
    """Compute operators of ``torch.ops`` for which ``matches(operator)`` is true by ``route``.

    Raises:
        RuntimeError: An operator was looked up before: the result is kept, and graphs take it for a constant.
    """
    # No result is kept of the other look-ups, so the other functions here need no such check.
    if _index_of_operator.cache_info().currsize:
        raise RuntimeError("register operators on import, before the first call of a model.")
    _OPERATORS.append((matches, route))


def register_needs_mode(needs_mode: Callable[[nn.Module], bool]) -> None:
    """Intercept attention of models for which ``needs_mode(model)`` is true by a mode, and not at the dispatcher."""
    _NEEDS_MODE.append(needs_mode)


def register_explanation(explain: Callable[[BaseException | None], None]) -> None:
    """Call ``explain(error)`` with what left a mode or plan. It may raise a clearer error from ``error``."""
    _EXPLANATIONS.append(explain)


def register_mask(kind: type, shard: ShardMask) -> None:
    """Shard masks of the type ``kind``, which are no tensors, by ``shard``."""
    _MASK_SHARDERS.append((kind, shard))


def mask_sharder(value: Any) -> ShardMask | None:
    """Return what shards ``value`` if it is a mask of a registered type, else None."""
    for kind, shard in _MASK_SHARDERS:
        if isinstance(value, kind):
            return shard
    return None


def route_of_function(function: Callable[..., Any]) -> Route | None:
    """Return what computes calls of ``function`` over a mesh; None if no feature does."""
    for registered, route in _FUNCTIONS:
        if registered is function:
            return route
    return None


def route_of_operator(operator: Any) -> Route | None:
    """Return what computes ``operator`` of another package over a mesh; None if no feature does."""
    index: int | None = _constant_index(operator)
    if index is None:
        return None
    return _OPERATORS[index][1]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _constant_index(operator: Any) -> int | None:
    # Dynamo takes a number as a constant result, but no function.
    return _index_of_operator(operator)


@lru_cache(maxsize=4096)
def _index_of_operator(operator: Any) -> int | None:
    for index, (matches, _) in enumerate(_OPERATORS):
        if matches(operator):
            return index
    return None


def needs_mode(module: nn.Module) -> bool:
    """Whether ``module`` calls a function that only a mode intercepts."""
    return any(needs(module) for needs in _NEEDS_MODE)


def explain(error: BaseException | None) -> None:
    """Raise a clearer error from ``error`` if a feature knows what it means.

    Raises:
        ValueError: An input was prepared for one device.
    """
    for explanation in _EXPLANATIONS:
        explanation(error)


@contextmanager
def bind_recomputation(bind: Bind | None, module: nn.Module) -> Iterator[None]:
    """Bind by ``bind`` what the backward of ``module`` runs again after the ``with`` block. Does nothing if
    ``bind`` is None.
    """
    with ExitStack() as stack:
        if bind is not None:
            for recomputation in RECOMPUTATION:
                stack.enter_context(recomputation.during_call(bind, module))
        yield


def check_exchanges(module: nn.Module) -> None:
    """Raise ``RuntimeError`` if a backward would run parts of ``module`` again without their exchanges."""
    for recomputation in RECOMPUTATION:
        recomputation.check_exchanges(module)
