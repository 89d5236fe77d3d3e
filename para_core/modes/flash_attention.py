"""Run FlashAttention's operators over the mesh.

``flash_attn_func`` and its variants are ``torch.autograd.Function`` classes around operators of
torch.library. Modes intercept these operators. Written for flash_attn 2.8.4
(``flash_attn/flash_attn_interface.py``; versions before 2.7 have no such operators) and FlashAttention-3
(``hopper/flash_attn_interface.py``, ``hopper/flash_api.cpp``).

A feature of :mod:`.registry`. The kernels as a backend of local attention (``backend="flash3"``) are another
matter, in :mod:`para_core.attention.backends`. Tests: tests/modes/test_flash_attention.py, with the stand-in
tests/modes/fake_flash_attn.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from para_core.attention.sdpa_call import LengthCheck, SdpaCall, SdpaHandler
from para_core.modes.foreign_operators import OPERATOR_TYPES, Operator, overload_of
from para_core.modes.registry import AttentionOwner, register_operator
from para_core.torch_internals import DisableTorchFunctionSubclass, schema_of, version_of

# The names of FlashAttention's forward operators. They are the same in all namespaces: flash_attn,
# flash_attn_3, and the namespaces of builds from the Hugging Face Hub, which end in a hash.
_FORWARDS = ("_flash_attn_forward", "_flash_attn_varlen_forward", "fwd", "varlen_fwd")

# Arguments of FlashAttention that are converted to arguments of SDPA (_READ), or that may be ignored, because
# they do not change the result of a supported call (_WITHOUT_EFFECT). Any other argument that is set raises
# an error.
_READ = {
    "q",
    "k",
    "v",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "softmax_scale",
    "causal",
    "is_causal",
    "window_size_left",
    "window_size_right",
}
_WITHOUT_EFFECT = {
    # Only one sequence is computed, and cu_seqlens says its length.
    "max_seqlen_q",
    "max_seqlen_k",
    "num_splits",
    "pack_gqa",
    "sm_margin",
    "scheduler_metadata",
    "zero_tensors",
    "deterministic",
    # Without rotary_cos, which is refused, these say nothing.
    "rotary_interleaved",
    "is_rotary_interleaved",
}

# ((query, key, value), output), where output has an autograd graph that leads to the three inputs.
_Graph = tuple[Sequence[Tensor], Tensor]


def is_flash_attention(operator: Operator) -> bool:
    """Whether an operator is a forward of FlashAttention, with query, key and value as its first arguments."""
    namespace, name = str(operator).lower().split(".")[:2]
    if "flash_attn" not in namespace or name not in _FORWARDS:
        return False
    schema = schema_of(overload_of(operator))
    returns_tensors = all(str(result.type) == "Tensor" for result in schema.returns)
    return returns_tensors and [argument.name for argument in schema.arguments[:3]] == ["q", "k", "v"]


class _FlashCall(NamedTuple):
    """The arguments of a FlashAttention operator, converted to those of ``scaled_dot_product_attention``."""

    is_varlen: bool  # Whether tensors are [S, H, D] instead of [B, S, H, D].
    is_causal: bool
    scale: float | None
    # None if the lengths need no check: attention is not causal, and cu_seqlens cover all tokens or are absent.
    lengths: LengthCheck | None


def attend_by_flash_operator(
    owner: AttentionOwner, operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Tensor, ...]:
    """Run a forward operator of FlashAttention as an SDPA call, computed by ``owner``, and return all its
    outputs.

    The first is the attention output in the shape of ``q``. The second is a placeholder for the lse: in eager
    code any use of it raises an error, in compiled code its values are NaN. The others are :func:`_placeholders`.

    Raises:
        ValueError: The call uses dropout, a sliding window, softcap, ALiBi, a KV cache or several sequences.
        RuntimeError: An input requires a gradient inside a compiled function.
    """
    names, num_outputs = _operator_signature(operator)
    arguments = {**dict(names), **dict(zip([name for name, _ in names], args, strict=False)), **kwargs}
    try:
        call = _convert_arguments(str(operator), arguments)
    except ValueError as error:
        owner.fail(error)
    tensors = (arguments["q"], arguments["k"], arguments["v"])
    compiling = torch.compiler.is_compiling()
    if compiling and any(x.requires_grad for x in tensors):
        raise RuntimeError(
            f"{operator} with a gradient, inside a compiled function, on several ranks: use "
            "F.scaled_dot_product_attention, call it uncompiled, or compile under torch.no_grad()."
        )
    if compiling or torch.is_grad_enabled() or not any(x.requires_grad for x in tensors):
        out = _run_as_sdpa(owner.attend, call, *tensors)
        graph = None
    else:
        # Gradients are disabled although an input requires one, so FlashAttention's autograd.Function is the
        # caller. Its backward passes the lse to the backward operator, so store the output with its autograd
        # graph on the lse.
        inputs = [x.detach().requires_grad_(x.requires_grad) for x in tensors]
        with torch.enable_grad():
            graph = (inputs, _run_as_sdpa(owner.attend, call, *inputs))
        out = graph[1].detach()
    shape: tuple[int, ...] = (out.shape[0], out.shape[2], out.shape[1])
    if call.is_varlen:
        shape = (out.shape[1], out.shape[0])
    if compiling:
        lse = out.new_full(shape, torch.nan, dtype=torch.float32)
    else:
        lse = _UnknownLse.make(shape, graph)
    return (out, lse, *_placeholders(out, num_outputs - 2, has_dropout="dropout_p" in arguments))


def _placeholders(out: Tensor, num_others: int, *, has_dropout: bool) -> list[Tensor]:
    """Return placeholders for the outputs of an operator after ``out`` and the lse."""
    others = [out.new_empty(0) for _ in range(num_others)]
    if has_dropout and others:
        # The last output of the operator is the RNG state of dropout, two int64 values.
        others[-1] = torch.empty(2, dtype=torch.int64, device=out.device)
    return others


def _run_as_sdpa(handler: SdpaHandler, call: _FlashCall, *tensors: Tensor) -> Tensor:
    """Return the attention output in the layout of FlashAttention, whose query, key and value are ``tensors``."""
    batched: Sequence[Tensor] = tensors
    if call.is_varlen:
        batched = [x[None] for x in tensors]
    # FlashAttention takes [B, S, H, D], SDPA takes [B, H, S, D].
    query, key, value = [x.transpose(1, 2) for x in batched]
    enable_gqa = query.shape[1] != key.shape[1]
    out = handler(
        SdpaCall(query, key, value, None, 0.0, call.is_causal, call.scale, enable_gqa, call.lengths)
    )
    out = out.transpose(1, 2).contiguous()
    if call.is_varlen:
        return out[0]
    return out


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _operator_signature(operator: Operator) -> tuple[tuple[tuple[str, Any], ...], int]:
    """Return the operator's arguments as ``((name, default), ...)``, and the number of its outputs.
    Dynamo takes the result for a constant.
    """
    return _cached_operator_signature(operator)


@lru_cache(maxsize=64)
def _cached_operator_signature(operator: Operator) -> tuple[tuple[tuple[str, Any], ...], int]:
    schema = schema_of(overload_of(operator))
    return tuple([(argument.name, argument.default_value) for argument in schema.arguments]), len(
        schema.returns
    )


def _convert_arguments(operator: str, arguments: Mapping[str, Any]) -> _FlashCall:
    """Return the arguments of a FlashAttention operator converted to those of SDPA. Raise ``ValueError`` for
    a feature that is not supported over several ranks.
    """
    for name, value in arguments.items():
        if name in _READ or name in _WITHOUT_EFFECT or value is None:
            continue
        if isinstance(value, Tensor) or value:  # Each remaining option is turned off by 0, 0.0 or False.
            shown = f"= {value}"
            if isinstance(value, Tensor):
                shown = f"of shape {list(value.shape)}"
            raise ValueError(
                f"{operator} got {name} {shown}, which is not computed over several ranks. Leave {name} out, or use "
                "F.scaled_dot_product_attention with a mask for all tokens."
            )
    window_left = arguments.get("window_size_left", -1)
    right = arguments.get("window_size_right", -1)
    if arguments.get("causal") or arguments.get("is_causal"):
        right = 0
    if window_left >= 0 or right > 0:
        raise ValueError(
            f"{operator} got window_size ({window_left}, {right}), and a sliding window is not computed over several "
            "ranks. Use F.scaled_dot_product_attention with a mask for all tokens, or window_size=(-1, -1)."
        )
    is_causal = right == 0
    num_queries, num_keys = _varlen_totals(operator, arguments)
    lengths = None
    if is_causal or num_queries is not None or num_keys is not None:
        lengths = LengthCheck(operator, lower_right=is_causal, num_queries=num_queries, num_keys=num_keys)
    is_varlen = arguments.get("cu_seqlens_q") is not None
    return _FlashCall(is_varlen, is_causal, arguments.get("softmax_scale"), lengths)


def _varlen_totals(operator: str, arguments: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Return the numbers of queries and keys of the sequence that ``cu_seqlens_q`` and ``cu_seqlens_k``
    describe.

    A number is None if it equals the length of ``q`` or ``k``. Both are None if the call has neither
    argument.

    Raises:
        ValueError: The call has only one of the two arguments, or these describe several sequences, or one
            that does not begin at token 0.
        RuntimeError: The call is inside a compiled function, where the values of ``cu_seqlens`` are unknown.
    """
    offsets = (arguments.get("cu_seqlens_q"), arguments.get("cu_seqlens_k"))
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
        values = _read_offsets(tensor)
        num_sequences = sum([end > start for start, end in pairwise(values)])
        if values[0] != 0 or num_sequences > 1:
            raise ValueError(
                f"{operator} got cu_seqlens_{name} {_shorten_offsets(values)}: {num_sequences} sequence(s) from token "
                f"{values[0]} on. Over several ranks one sequence is computed, which begins at token 0. If the second "
                "is padding (HunyuanVideo, Mochi), trim the text to its valid tokens before the model; otherwise call "
                "the model once for each sequence."
            )
        if values[-1] == x.shape[0]:
            totals.append(None)
        else:
            totals.append(values[-1])
    return totals[0], totals[1]


# The values of cu_seqlens tensors. They are cached, because reading a tensor synchronizes with its device,
# and all layers of a model get the same tensor.
_VALUES = WeakTensorKeyDictionary()


def _read_offsets(offsets: Any) -> list[int]:
    """Return the values of a ``cu_seqlens`` tensor. Waits for its device unless they are cached."""
    if offsets.is_inference():  # An inference tensor has no version counter, so cached values could be stale.
        return list(offsets.tolist())
    version, values = _VALUES.get(offsets, (None, []))
    if version != version_of(offsets):
        values = offsets.tolist()
        _VALUES[offsets] = (version_of(offsets), values)
    return list(values)


def _shorten_offsets(values: Sequence[int]) -> str:
    if len(values) <= 6:
        return str(list(values))
    return f"{list(values[:5])}… ({len(values)} entries)"


class _UnknownLse(Tensor):
    """A placeholder for the lse that FlashAttention returns. On several ranks the real lse is not computed.

    The ``torch.autograd.Function`` of FlashAttention saves the placeholder and passes it to the backward
    operator. This class then calls :func:`_backward` instead of the operator. Any other use of its values
    raises RuntimeError.
    """

    graph: _Graph | None

    @staticmethod
    def make(shape: Sequence[int], graph: _Graph | None) -> _UnknownLse:
        """Return a placeholder for an lse of this ``shape``. ``graph`` is None if :func:`_backward` is not needed."""
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
        if getattr(func, "__name__", "") not in (
            "__get__",
            "__set__",
            "detach",
            "size",
            "dim",
            "as_subclass",
        ):
            raise RuntimeError(
                "the lse (return_attn_probs=True) of FlashAttention is not computed over several ranks. Leave "
                "return_attn_probs out, or run this call under UnifiedAttnMode.disable()."
            )
        with DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def _backward(operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Run a backward operator of FlashAttention over the mesh: write the gradients into ``dq``, ``dk`` and
    ``dv``.

    Return an empty tensor in place of the operator's result, which the caller ignores. Raise ``RuntimeError``
    if ``softmax_lse`` is not a placeholder with an autograd graph, or ``dq``, ``dk`` or ``dv`` is missing.
    """
    names, _ = _operator_signature(operator)
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


register_operator(is_flash_attention, attend_by_flash_operator)
