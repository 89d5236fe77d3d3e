"""Handle attention operators of other packages inside a mode: run FlashAttention over the mesh, refuse all others.

``flash_attn_func`` and its variants are ``torch.autograd.Function`` classes around operators of torch.library. Modes
intercept these operators. Written for flash_attn 2.8.4 (``flash_attn/flash_attn_interface.py``; versions before 2.7
have no such operators) and FlashAttention-3 (``hopper/flash_attn_interface.py``, ``hopper/flash_api.cpp``).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from para_core.attention.sdpa_call import Fail, LengthCheck, SdpaCall, SdpaHandler
from para_core.torch_internals import (
    CustomOpDef,
    DisableTorchFunctionSubclass,
    OpOverload,
    OpOverloadPacket,
    schema_of,
    version_of,
)

# An operator is an OpOverload or an OpOverloadPacket.
Operator = Any

OPERATOR_TYPES = (OpOverload, OpOverloadPacket)
# The names of FlashAttention's forward operators, which can run over a mesh. They are the same in all namespaces:
# flash_attn, flash_attn_3, and the namespaces of builds from the Hugging Face Hub, which end in a hash.
_ROUTED = ("_flash_attn_forward", "_flash_attn_varlen_forward", "fwd", "varlen_fwd")
_COMPUTES_ATTENTION = re.compile(r"attention|attn|fmha")
_FORWARD_OF_A_LIBRARY = re.compile(r"(mha_|flash_)?(varlen_)?fwd(_kvcache\w*)?")
_COMPUTES_SOMETHING_ELSE = re.compile(
    r"backward|bwd|grad|mask|bias|combine|merge|metadata|rotary|rope|norm|quant|entropy|cache_(update|append)"
)

# Arguments of FlashAttention that are converted to arguments of SDPA (_READ), or that may be ignored, because they do
# not change the result of a supported call (_WITHOUT_EFFECT). Any other argument that is set raises an error.
_READ = {"q", "k", "v", "softmax_scale", "causal", "is_causal", "window_size_left", "window_size_right"} | {
    f"{name}_{x}" for name in ("cu_seqlens", "max_seqlen") for x in "qk"
}
_WITHOUT_EFFECT = {"num_splits", "pack_gqa", "sm_margin", "scheduler_metadata", "zero_tensors", "deterministic"} | {
    "rotary_interleaved",
    "is_rotary_interleaved",
}

# Operators of other packages that interceptor.py intercepts at the dispatcher, as (namespace, name). Eager inference
# under a plan enters no mode, and the dispatcher intercepts only operators that are registered by name.
FLASH_OPERATORS = (
    ("flash_attn", "_flash_attn_forward"),
    ("flash_attn", "_flash_attn_varlen_forward"),
    ("flash_attn_3", "_flash_attn_forward"),
    ("flash_attn_3", "fwd"),
    # diffusers defines this operator on import, whether or not FlashAttention is installed.
    ("_diffusers_flash_attn_3", "_flash_attn_forward"),
)
_INTERCEPTED_NAMESPACES = frozenset(namespace for namespace, _ in FLASH_OPERATORS)
OTHER_OPERATORS = (
    ("xformers", "efficient_attention_forward_cutlass"),
    ("xformers_flash", "flash_fwd"),
    ("xformers_flash3", "flash_fwd"),
)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def attention_kind(operator: Operator) -> str | None:
    """Return how a mode must handle an operator: ``"flash"`` if :func:`flash_attention` can run it over the mesh,
    ``"other"`` if it computes attention otherwise, None if a mode need not intercept it.
    """
    return _attention_kind(operator)


@lru_cache(maxsize=4096)
def _attention_kind(operator: Operator) -> str | None:
    namespace, name = str(operator).lower().split(".")[:2]
    if namespace == "para_core":
        return None
    if namespace == "aten":
        # Let overloads pass: users call packets, while overloads are called by compiled graphs and by this package
        # (by Disabled(), for example, to bypass outer modes). Let the packet of scaled_dot_product_attention pass, too,
        # because modes handle it like F.scaled_dot_product_attention.
        if isinstance(operator, OpOverload) or name == "scaled_dot_product_attention":
            return None
    elif "flash_attn" in namespace and name in _ROUTED:
        schema = schema_of(_overload(operator))
        tensors = all(str(result.type) == "Tensor" for result in schema.returns)
        if tensors and [argument.name for argument in schema.arguments[:3]] == ["q", "k", "v"]:
            return "flash"
    if _COMPUTES_SOMETHING_ELSE.search(name):
        return None
    of_library = re.search("flash|attn|fa2|fa3", namespace) and _FORWARD_OF_A_LIBRARY.fullmatch(name)
    return "other" if of_library or _COMPUTES_ATTENTION.search(name) else None


def _overload(operator: Operator) -> OpOverload:
    if isinstance(operator, OpOverload):
        return operator
    overload: OpOverload = getattr(operator, operator.overloads()[0])
    return overload


def has_other_builds() -> bool:
    """Whether a build of FlashAttention is loaded that only a mode can intercept, because its namespace is not in
    ``FLASH_OPERATORS``, such as one from the Hugging Face Hub.
    """
    # A generator would add a Python call for each namespace to each call of a model.
    builds = {namespace for namespace in vars(torch.ops) if "flash_attn" in namespace}
    return not builds <= _INTERCEPTED_NAMESPACES


def is_called_by_a_graph(operator: Operator) -> bool:
    """Whether a compiled graph is calling ``operator``. Such a call was already handled when the graph was traced.

    Graphs call overloads. The Python function of a ``torch.library.custom_op`` (FlashAttention-3 has one) also calls an
    overload, but the stack then shows this function as the caller.
    """
    if torch.compiler.is_compiling() or not isinstance(operator, OpOverload):
        return False
    frame, depth = sys._getframe(1), 0
    while frame.f_back is not None and depth < 6:
        frame, depth = frame.f_back, depth + 1
        if frame.f_code is CustomOpDef.__call__.__code__:
            return False
    return True


def refuse_operator(operator: Operator, fail: Fail) -> NoReturn:
    """Call ``fail`` with a RuntimeError that says that ``operator`` computes attention that cannot run over a mesh."""
    fail(
        RuntimeError(
            f"{operator} computes attention without scaled_dot_product_attention, so it cannot run on several ranks: "
            "each would attend to its own tokens only. Use F.scaled_dot_product_attention or flash_attn_func, which "
            "run over all ranks (in diffusers set_attention_backend('native'), in transformers "
            "attn_implementation='sdpa'); for attention to whole tensors, run this call under "
            "UnifiedAttnMode.disable()."
        )
    )


class _FlashCall(NamedTuple):
    """The arguments of a FlashAttention operator, converted to those of ``scaled_dot_product_attention``."""

    is_varlen: bool  # Whether tensors are [S, H, D] instead of [B, S, H, D].
    is_causal: bool
    scale: float | None
    lengths: LengthCheck | None


def flash_attention(
    handler: SdpaHandler, fail: Fail, operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Tensor, ...]:
    """Run a forward operator of FlashAttention as an SDPA call, computed by ``handler``, and return all its outputs.

    The first is the attention output in the shape of ``q``. The second is a placeholder for the lse: in eager code any
    use of it raises an error, in compiled code its values are NaN. The other outputs are placeholders too.

    Raises:
        ValueError: The call uses dropout, a sliding window, softcap, ALiBi, a KV cache or several sequences.
        RuntimeError: An input requires a gradient inside a compiled function.
    """
    names, num_outputs = _signature(operator)
    arguments = {**dict(names), **dict(zip([name for name, _ in names], args, strict=False)), **kwargs}
    try:
        call = _read(str(operator), arguments)
    except ValueError as error:
        fail(error)
    tensors = (arguments["q"], arguments["k"], arguments["v"])
    compiling = torch.compiler.is_compiling()
    if compiling and any(x.requires_grad for x in tensors):
        raise RuntimeError(
            f"{operator} with a gradient, inside a compiled function, on several ranks: use "
            "F.scaled_dot_product_attention, call it uncompiled, or compile under torch.no_grad()."
        )
    if compiling or torch.is_grad_enabled() or not any(x.requires_grad for x in tensors):
        out, graph = _run_as_sdpa(handler, call, *tensors), None
    else:
        # Gradients are disabled although an input requires one, so FlashAttention's autograd.Function is the caller.
        # Its backward passes the lse to the backward operator, so store the output with its autograd graph on the lse.
        inputs = [x.detach().requires_grad_(x.requires_grad) for x in tensors]
        with torch.enable_grad():
            graph = (inputs, _run_as_sdpa(handler, call, *inputs))
        out = graph[1].detach()
    query = arguments["q"]
    shape = (query.shape[1], query.shape[0]) if call.is_varlen else (query.shape[0], query.shape[2], query.shape[1])
    rest = [query.new_empty(0) for _ in range(num_outputs - 2)]
    if "dropout_p" in arguments and rest:
        # The last output of the operator is the RNG state of dropout, two int64 values.
        rest[-1] = torch.empty(2, dtype=torch.int64, device=query.device)
    if compiling:
        return (out, query.new_full(shape, torch.nan, dtype=torch.float32), *rest)
    return (out, _UnknownLse.make(shape, graph), *rest)


def _run_as_sdpa(handler: SdpaHandler, call: _FlashCall, *tensors: Tensor) -> Tensor:
    # FlashAttention takes [B, S, H, D], SDPA takes [B, H, S, D].
    query, key, value = [(x[None] if call.is_varlen else x).transpose(1, 2) for x in tensors]
    enable_gqa = query.shape[1] != key.shape[1]
    out = handler(SdpaCall(query, key, value, None, 0.0, call.is_causal, call.scale, enable_gqa, call.lengths))
    out = out.transpose(1, 2).contiguous()
    return out[0] if call.is_varlen else out


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _signature(operator: Operator) -> tuple[tuple[tuple[str, Any], ...], int]:
    """Return the operator's arguments as ``((name, default), ...)``, and the number of its outputs."""
    return _cached_signature(operator)


@lru_cache(maxsize=64)
def _cached_signature(operator: Operator) -> tuple[tuple[tuple[str, Any], ...], int]:
    schema = schema_of(_overload(operator))
    return tuple([(argument.name, argument.default_value) for argument in schema.arguments]), len(schema.returns)


def _read(operator: str, arguments: Mapping[str, Any]) -> _FlashCall:
    """Return the arguments of a FlashAttention operator converted to those of SDPA. Raise ``ValueError`` for a
    feature that is not supported over several ranks.
    """
    for name, value in arguments.items():
        if name in _READ or name in _WITHOUT_EFFECT or value is None:
            continue
        if isinstance(value, Tensor) or value:  # Each remaining option is turned off by 0, 0.0 or False.
            shown = f"of shape {list(value.shape)}" if isinstance(value, Tensor) else f"= {value}"
            raise ValueError(
                f"{operator} got {name} {shown}, which is not computed over several ranks. Leave {name} out, or use "
                "F.scaled_dot_product_attention with a mask for all tokens."
            )
    left, right = arguments.get("window_size_left", -1), arguments.get("window_size_right", -1)
    right = 0 if arguments.get("causal") or arguments.get("is_causal") else right
    if left >= 0 or right > 0:
        raise ValueError(
            f"{operator} got window_size ({left}, {right}), and a sliding window is not computed over several ranks. "
            "Use F.scaled_dot_product_attention with a mask for all tokens, or window_size=(-1, -1)."
        )
    is_causal = right == 0
    num_queries, num_keys = _varlen_totals(operator, arguments)
    lengths = None
    if is_causal or num_queries is not None or num_keys is not None:
        lengths = LengthCheck(operator, lower_right=is_causal, num_queries=num_queries, num_keys=num_keys)
    is_varlen = arguments.get("cu_seqlens_q") is not None
    return _FlashCall(is_varlen, is_causal, arguments.get("softmax_scale"), lengths)


def _varlen_totals(operator: str, arguments: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Return the numbers of queries and keys of the sequence that ``cu_seqlens_q`` and ``cu_seqlens_k`` describe.

    A number is None if it equals the length of ``q`` or ``k``. Both are None if the call has neither argument.

    Raises:
        ValueError: The call has only one of the two arguments, or these describe several sequences, or one that does
            not begin at token 0.
        RuntimeError: The call is inside a compiled function, where the values of ``cu_seqlens`` are unknown.
    """
    offsets = arguments.get("cu_seqlens_q"), arguments.get("cu_seqlens_k")
    if offsets == (None, None):
        return None, None
    if offsets[0] is None or offsets[1] is None:
        raise ValueError(f"{operator} got one of cu_seqlens_q and cu_seqlens_k; expected both, or none.")
    if torch.compiler.is_compiling():
        raise RuntimeError(
            f"{operator} inside a compiled function on several ranks: how many sequences cu_seqlens_q describes is not "
            "known while tracing. Call flash_attn_func for a single sequence, or leave this call uncompiled."
        )
    totals: list[int | None] = []
    for name, tensor, x in zip("qk", offsets, (arguments["q"], arguments["k"]), strict=True):
        values = _values(tensor)
        num_sequences = sum([end > start for start, end in pairwise(values)])
        if values[0] != 0 or num_sequences > 1:
            raise ValueError(
                f"{operator} got cu_seqlens_{name} {_shortened(values)}: {num_sequences} sequence(s) from token "
                f"{values[0]} on. Over several ranks one sequence is computed, which begins at token 0. If the second "
                "is padding (HunyuanVideo, Mochi), trim the text to its valid tokens before the model; otherwise call "
                "the model once for each sequence."
            )
        totals.append(None if values[-1] == x.shape[0] else values[-1])
    return totals[0], totals[1]


# The values of cu_seqlens tensors. They are cached, because reading a tensor synchronizes with its device, and all
# layers of a model get the same tensor.
_VALUES = WeakTensorKeyDictionary()


def _values(offsets: Any) -> list[int]:
    if offsets.is_inference():  # An inference tensor has no version counter, so cached values could be stale.
        return list(offsets.tolist())
    version, values = _VALUES.get(offsets, (None, []))
    if version != version_of(offsets):
        values = offsets.tolist()
        _VALUES[offsets] = (version_of(offsets), values)
    return list(values)


def _shortened(values: Sequence[int]) -> str:
    return str(list(values)) if len(values) <= 6 else f"{list(values[:5])}… ({len(values)} entries)"


class _UnknownLse(Tensor):
    """A placeholder for the lse that FlashAttention returns. On several ranks the real lse is not computed.

    The ``torch.autograd.Function`` of FlashAttention saves the placeholder and passes it to the backward operator. This
    class then calls :func:`_backward` instead of the operator. Any other use of its values raises RuntimeError.
    """

    graph: tuple[Sequence[Tensor], Tensor] | None

    @staticmethod
    def make(shape: Sequence[int], graph: tuple[Sequence[Tensor], Tensor] | None) -> _UnknownLse:
        """Return a placeholder for an lse of this ``shape``.

        ``graph`` is ``((query, key, value), output)``, where ``output`` has an autograd graph that leads to the three
        inputs; None if :func:`_backward` is not needed.
        """
        lse = torch.empty(tuple(shape), dtype=torch.float32, device="meta").as_subclass(_UnknownLse)
        lse.graph = graph
        return lse

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, OPERATOR_TYPES):
            return _backward(func, args, kwargs)
        if getattr(func, "__name__", "") not in ("__get__", "__set__", "detach", "size", "dim", "as_subclass"):
            raise RuntimeError(
                "the lse (return_attn_probs=True) of FlashAttention is not computed over several ranks. Leave "
                "return_attn_probs out, or run this call under UnifiedAttnMode.disable()."
            )
        with DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def _backward(operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Run a backward operator of FlashAttention over the mesh: write the gradients into ``dq``, ``dk`` and ``dv``.

    Return an empty tensor in place of the operator's result, which the caller ignores. Raise ``RuntimeError`` if
    ``softmax_lse`` is not a placeholder with an autograd graph, or ``dq``, ``dk`` or ``dv`` is missing.
    """
    names, _ = _signature(operator)
    arguments = {**dict(names), **dict(zip([name for name, _ in names], args, strict=False)), **kwargs}
    lse = arguments.get("softmax_lse")
    grads = [arguments.get(name) for name in ("dq", "dk", "dv")]
    if not isinstance(lse, _UnknownLse) or lse.graph is None or any(grad is None for grad in grads):
        raise RuntimeError(
            f"{operator}: on several ranks the gradient of FlashAttention is computed for flash_attn_func(q, k, v) "
            "with a head dim that is a multiple of 8, and not for packed or padded tensors. Use "
            "F.scaled_dot_product_attention to train."
        )
    inputs, out = lse.graph
    wanted = [x for x in inputs if x.requires_grad]
    computed = iter(torch.autograd.grad(out, wanted, arguments["dout"], retain_graph=True))
    for x, grad in zip(inputs, grads, strict=True):
        if x.requires_grad and grad is not None:
            grad.copy_(next(computed))
    dout: Tensor = arguments["dout"]
    return dout.new_empty(0, dtype=torch.float32)
