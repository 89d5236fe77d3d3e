"""Recognize attention operators of other packages, which a mode must compute over the mesh or refuse.

A feature of :mod:`para_core.modes.registry` may compute some of them; all others are refused.
"""

from __future__ import annotations

import re
import sys
from functools import lru_cache
from typing import Any

import torch

from para_core.attention.sdpa_call import Fail
from para_core.modes.registry import Route, route_of_operator
from para_core.torch_internals import CustomOpDef, OpOverload, OpOverloadPacket

# An operator is an OpOverload or an OpOverloadPacket.
Operator = Any

OPERATOR_TYPES = (OpOverload, OpOverloadPacket)
_COMPUTES_ATTENTION = re.compile(r"attention|attn|fmha")
_FORWARD_OF_A_LIBRARY = re.compile(r"(mha_|flash_)?(varlen_)?fwd(_kvcache\w*)?")
_COMPUTES_SOMETHING_ELSE = re.compile(
    r"backward|bwd|grad|mask|bias|combine|merge|metadata|rotary|rope|norm|quant|entropy|cache_(update|append)"
)

# Operators of other packages that interceptor.py intercepts at the dispatcher, as (namespace, name). Eager
# inference under a plan enters no mode, and the dispatcher intercepts only operators that are registered by
# name.
DISPATCHED_OPERATORS = (
    ("flash_attn", "_flash_attn_forward"),
    ("flash_attn", "_flash_attn_varlen_forward"),
    ("flash_attn_3", "_flash_attn_forward"),
    ("flash_attn_3", "fwd"),
    # diffusers defines this operator on import, whether or not FlashAttention is installed.
    ("_diffusers_flash_attn_3", "_flash_attn_forward"),
    ("xformers", "efficient_attention_forward_cutlass"),
    ("xformers_flash", "flash_fwd"),
    ("xformers_flash3", "flash_fwd"),
)
# Maximum number of stack frames that are searched for the Python function of a custom operator.
_MAX_FRAMES = 6
_DISPATCHED_NAMESPACES = frozenset(namespace for namespace, _ in DISPATCHED_OPERATORS)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def computes_attention(operator: Operator) -> bool:
    """Whether an operator computes attention in a way that a mode must compute over the mesh or refuse."""
    return _computes_attention(operator)


@lru_cache(maxsize=4096)
def _computes_attention(operator: Operator) -> bool:
    namespace, name = str(operator).lower().split(".")[:2]
    if namespace == "para_core":
        return False
    # Let overloads pass: users call packets, while overloads are called by compiled graphs and by this
    # package (by Disabled(), for example, to bypass outer modes). Let the packet of
    # scaled_dot_product_attention pass, too, because modes handle it like F.scaled_dot_product_attention.
    if namespace == "aten" and (isinstance(operator, OpOverload) or name == "scaled_dot_product_attention"):
        return False
    if _COMPUTES_SOMETHING_ELSE.search(name):
        return False
    if _COMPUTES_ATTENTION.search(name):
        return True
    of_library = re.search("flash|attn|fa2|fa3", namespace) is not None
    return of_library and _FORWARD_OF_A_LIBRARY.fullmatch(name) is not None


def overload_of(operator: Operator) -> OpOverload:
    """Return the first overload of an operator that is a packet, else the operator."""
    if isinstance(operator, OpOverload):
        return operator
    overload: OpOverload = getattr(operator, operator.overloads()[0])
    return overload


def has_other_builds() -> bool:
    """Whether a build of FlashAttention is loaded that only a mode can intercept, because its namespace is
    not in ``DISPATCHED_OPERATORS``, such as one from the Hugging Face Hub.
    """
    # A comprehension or generator would add Python calls to each call of a model.
    for namespace in vars(torch.ops):  # noqa: SIM110
        if "flash_attn" in namespace and namespace not in _DISPATCHED_NAMESPACES:
            return True
    return False


def is_called_by_a_graph(operator: Operator) -> bool:
    """Whether a compiled graph is calling ``operator``. Such a call was already handled when the graph was
    traced.

    Graphs call overloads. The Python function of a ``torch.library.custom_op`` (FlashAttention-3 has one)
    also calls an overload, but the stack then shows this function as the caller.
    """
    if torch.compiler.is_compiling() or not isinstance(operator, OpOverload):
        return False
    frame = sys._getframe(1)
    depth = 0
    # Between the two frames are those of torch's call of the mode; more frames would only cost time.
    while frame.f_back is not None and depth < _MAX_FRAMES:
        frame = frame.f_back
        depth += 1
        if frame.f_code is CustomOpDef.__call__.__code__:
            return False
    return True


def require_route(operator: Operator, fail: Fail) -> Route:
    """Return the function of a feature that computes ``operator`` over a mesh.

    Raises:
        RuntimeError: No feature computes it. ``fail`` raises the error, which has the way out.
    """
    route = route_of_operator(operator)
    if route is not None:
        return route
    fail(
        RuntimeError(
            f"{operator} computes attention without scaled_dot_product_attention, so it cannot run on several ranks: "
            "each would attend to its own tokens only. Use F.scaled_dot_product_attention or flash_attn_func, which "
            "run over all ranks (in diffusers set_attention_backend('native'), in transformers "
            "attn_implementation='sdpa'); for attention to whole tensors, run this call under "
            "UnifiedAttnMode.disable()."
        )
    )
