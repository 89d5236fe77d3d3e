"""Recognize attention operators of other packages, which a mode must compute over the mesh or refuse.

A feature of :mod:`para_core.modes.registry` may compute some of them; all others are refused. Callers:
:mod:`.interceptor`, for modes and the dispatcher; flash_attention.py; the recorder; and ``Region``, which
asks whether a mode is needed. Tests: tests/modes/test_foreign_operators.py has a table of names,
test_flash_attention.py the calls.
"""

from __future__ import annotations

import re
import sys
from functools import lru_cache
from types import FrameType
from typing import Any

import torch

from para_core.attention.sdpa_call import Fail
from para_core.modes.registry import Route, route_of_operator
from para_core.torch_internals import CustomOpDef, OpOverload, OpOverloadPacket

# An operator is an OpOverload or an OpOverloadPacket.
Operator = Any

OPERATOR_TYPES = (OpOverload, OpOverloadPacket)
# Names of attention: torch_attn::_varlen_attn, transformers_msa::sparse_atten (but not "attenuate"), xformers' fmha,
# torchao::fp8_fa3_rope_sdpa.
_COMPUTES_ATTENTION = re.compile(r"atten(?!u)|attn|fmha|sdpa")
# Namespaces whose forward has no such name: flash_attn and builds of it from the Hub, xformers_flash,
# _vllm_fa2_C and _vllm_fa3_C (FlashAttention 2 and 3 of vLLM), sgl_kernel (FlashAttention 3 of SGLang).
_LIBRARIES = re.compile(r"flash|attn|fa2|fa3|sgl_kernel")
# Their forwards: fwd, varlen_fwd, mha_fwd, flash_fwd, fwd_kvcache_mla, varlen_fwd_sparse. fwd_combine is none.
_FORWARD_OF_A_LIBRARY = re.compile(r"(mha_|flash_)?(varlen_)?fwd(_(kvcache|sparse)\w*)?")
# Names that contain one of attention, but that compute a gradient, merge parts of an output, or prepare arguments:
# flash_attn_varlen_bwd, merge_attn_states, flash_attn_combine, get_attn_scheduler_metadata, create_attention_mask.
# Each alternative must be certain: an operator that is taken for something else attends to one rank's tokens, with no
# error, while a refusal names the way out. So masked_attention, attention_pair_bias and rope_sdpa do not match.
_COMPUTES_SOMETHING_ELSE = re.compile(
    r"backward|bwd|merge_att|(?<!_no)_grad$|_(combine|metadata|entropy|masks?|cache_(update|append))$"
)
# Arguments that an operator takes besides query, key and value: unified_attention_with_output, attn_with_mask.
_OTHER_ARGUMENTS = re.compile(r"_with_\w*")

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
    if _COMPUTES_ATTENTION.search(name):
        return _COMPUTES_SOMETHING_ELSE.search(_OTHER_ARGUMENTS.sub("", name)) is None
    return _LIBRARIES.search(namespace) is not None and _FORWARD_OF_A_LIBRARY.fullmatch(name) is not None


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

    Graphs call overloads, from code that torch generates or from torch itself (``fx.Interpreter``). An
    overload that other code calls, as ``sgl_kernel`` does, is called by no graph; nor is one that the Python
    function of a ``torch.library.custom_op`` calls (FlashAttention-3 has one). Code without a module name
    counts as generated.

    Call this function from a mode: it looks for the caller outside of this package.
    """
    if torch.compiler.is_compiling() or not isinstance(operator, OpOverload):
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__") or ""
        # Skip what stands between the mode and the caller: this package, the call of the operator, and modes of users
        # and of torch (torch.device is one).
        passes_on = module.startswith("para_core.") or module == OpOverload.__module__
        if not passes_on and frame.f_code.co_name != "__torch_function__":
            if frame.f_code is CustomOpDef.__call__.__code__:
                return False
            return module == "" or module.startswith("torch.")
        frame = frame.f_back
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
