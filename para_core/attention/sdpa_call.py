"""The arguments of an intercepted call of ``scaled_dot_product_attention``: a named tuple, and their validation.

The modes of :mod:`para_core.modes` bind the calls that they intercept, and :mod:`.mesh_attention` validates
them by the functions below. What depends on the layouts, such as the last two dims of a mask, is checked in
:mod:`.masks` and :mod:`.call_agreement`. Tests: tests/attention/test_inputs.py and tests/test_bad_input.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.fx.experimental.symbolic_shapes import guard_or_true

from para_core.torch_internals import (
    FORWARD_AD_LEVEL,
    TransformType,
    forward_ad_globals,
    function_mode_stack,
    innermost_transform,
)

# The dtypes of masks. SDPA takes no other float, such as float8, and then a rank without a mask could not
# make one like those of the others.
MASK_DTYPES = (torch.bool, torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class LengthCheck:
    """The lengths that a FlashAttention call requires of the whole sequences, checked when their layouts are
    known.

    ``name`` is that of the calling function, for error messages. With ``lower_right`` the call is causal and
    aligns its mask with the last query and key, as FlashAttention does; over several ranks both lengths must
    then be equal. ``num_queries`` and ``num_keys`` are the lengths that the call passes (``cu_seqlens``), or
    None.
    """

    name: str
    lower_right: bool = False
    num_queries: int | None = None
    num_keys: int | None = None

    def check(self, num_queries: int, num_keys: int) -> None:
        """Raise ``ValueError`` if the call does not allow ``num_queries`` queries and ``num_keys`` keys in all."""
        for kind, told, total in (("query", self.num_queries, num_queries), ("key", self.num_keys, num_keys)):
            if told is not None and told != total:
                raise ValueError(
                    f"{self.name} was told that the {kind} has {told} tokens; expected those that this rank holds, or "
                    f"all {total} of the sequence. Pass the offsets of the tokens that are in the tensor."
                )
        if self.lower_right and num_queries != num_keys:
            raise ValueError(
                f"{self.name} got causal=True with {num_queries} queries and {num_keys} keys. It aligns the mask with "
                "the last query and key, which is not computed over several ranks. Pass causal=False for a single "
                "query; otherwise use F.scaled_dot_product_attention with a mask for all tokens."
            )


class SdpaCall(NamedTuple):
    """The arguments of one call of ``scaled_dot_product_attention``, and conditions on lengths of
    FlashAttention's operators.

    ``SdpaCall(*args, **kwargs)`` binds the arguments of an intercepted call like SDPA's signature. The class
    is a named tuple because Dynamo can trace its construction, which takes only a microsecond in eager code.
    ``query`` is ``[..., H, S_q, D]``, ``key`` and ``value`` are ``[..., H_kv, S_k, D]`` and ``[..., H_kv,
    S_k, D_v]``, and ``attn_mask`` is bool or float, broadcastable to ``[..., H, S_q, S_k]``. Only
    :mod:`para_core.modes.flash_attention` sets ``lengths``.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    lengths: LengthCheck | None = None

    def with_tensors(self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> SdpaCall:
        """Return a copy of this call with other tensors.
        Unlike ``_replace``, Dynamo of torch 2.11 can trace it.
        """
        flags = (self.dropout_p, self.is_causal, self.scale, self.enable_gqa, self.lengths)
        return SdpaCall(query, key, value, attn_mask, *flags)

    def expanded(self) -> SdpaCall | None:
        """Return this call with query, key and value expanded to one batch and number of heads, as SDPA
        broadcasts them.

        Return None if nothing is to be expanded, or if the shapes do not fit; :func:`check_arguments` then
        raises.
        """
        tensors, num_dims = self[:3], 2
        if self.enable_gqa:
            num_dims = 3
        shapes = [x.shape[:-num_dims] for x in tensors]
        if shapes[0] == shapes[1] == shapes[2] or any(x.ndim < 3 for x in tensors):
            return None
        try:
            leading = torch.broadcast_shapes(*shapes)
        except RuntimeError:
            return None
        query, key, value = (x.expand(*leading, *x.shape[-num_dims:]) for x in tensors)
        return self.with_tensors(query, key, value, self.attn_mask)

    def on_one_device(self) -> Tensor:
        """Compute the call on this rank alone, with SDPA's ``aten`` operator, which attention modes let through."""
        call = self
        if self.is_causal and self.attn_mask is not None:
            call = self._with_causal_mask(self.attn_mask)
        out: Tensor = torch.ops.aten.scaled_dot_product_attention.default(
            *call[:6], scale=self.scale, enable_gqa=self.enable_gqa
        )
        return out

    def _with_causal_mask(self, mask: Tensor) -> SdpaCall:
        """Return this call with a causal ``mask`` in place of ``is_causal``, because some kernels refuse both."""
        sizes = self.query.shape[-2], self.key.shape[-2]
        future = torch.ones(sizes, dtype=torch.bool, device=mask.device).triu(1)
        hidden: float = float("-inf")
        if mask.dtype == torch.bool:
            hidden = False
        mask = mask.masked_fill(future, hidden)
        return SdpaCall(
            self.query, self.key, self.value, mask, self.dropout_p, False, self.scale, self.enable_gqa
        )

    def original(self) -> Tensor:
        """Compute the call with ``F.scaled_dot_product_attention``, which outer modes intercept."""
        # An outer mode over ranks needs is_causal, because a causal mask of this rank's tokens would not do.
        if (
            self.is_causal
            and self.attn_mask is not None
            and not torch.compiler.is_compiling()
            and not function_mode_stack()
        ):
            return self.on_one_device()
        return F.scaled_dot_product_attention(*self[:6], scale=self.scale, enable_gqa=self.enable_gqa)


# An SdpaHandler is a function that computes an intercepted call of SDPA.
SdpaHandler = Callable[[SdpaCall], Tensor]
# A function that raises the exception it gets: on this rank, as all ranks have equal arguments under a plan;
# or on all ranks, for a mode that a user enters, in which they may have different ones.
Fail = Callable[[Exception], NoReturn]


# The following functions validate the arguments of a call before anything is sent. They see one rank's
# arguments, so their caller makes all ranks raise: MeshAttention.raise_everywhere.


def check_kind(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None) -> None:
    """Raise ``TypeError`` unless query, key, value and the mask, if there is one, are dense tensors, neither
    nested tensors nor DTensors.
    """
    tensors = {"query": query, "key": key, "value": value}
    if attn_mask is not None:
        tensors["attn_mask"] = attn_mask
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; expected a tensor.")
        if x.is_nested:
            raise TypeError(
                f"{name} is a nested tensor; attention over several ranks takes dense ones. Pad it "
                "(x.to_padded_tensor(0.0)) and pass attn_mask, or attend under UnifiedAttnMode.disable()."
            )
        if isinstance(x, DTensor):
            raise TypeError(
                f"{name} is a DTensor; attention over several ranks takes this rank's part as a plain tensor: "
                "x.to_local()."
            )


def check_arguments(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, enable_gqa: bool
) -> None:
    """Raise ``ValueError`` for arguments that SDPA refuses or that are not supported on several ranks."""
    if not (query.ndim == key.ndim == value.ndim >= 3):
        raise ValueError(
            f"query, key and value must have the same number of dims, [B, H, S, D]; got {_shapes(query, key, value)}."
        )
    if not (query.dtype == key.dtype == value.dtype):
        raise ValueError(
            f"query, key and value must have one dtype; got {query.dtype}, {key.dtype}, {value.dtype}. Cast them."
        )
    if not query.is_floating_point():
        raise ValueError(
            f"query, key and value have dtype {query.dtype}; expected a float, such as torch.bfloat16."
        )
    if not (query.device == key.device == value.device):
        raise ValueError(
            f"query, key and value must be on one device; got {query.device}, {key.device}, {value.device}."
        )
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"query and key must have the same head dim; got {_shapes(query, key, value)}.")
    if not _equal_shapes(key.shape[:-1], value.shape[:-1]):
        raise ValueError(
            f"key and value must have the same batch, heads and length; got {_shapes(query, key, value)}."
        )
    if query.shape[:-3] != key.shape[:-3]:
        raise ValueError(
            f"query and key must have the same batch; got {_shapes(query, key, value)}. Only a batch of 1 is expanded."
        )
    num_heads, num_kv_heads = query.shape[-3], key.shape[-3]
    if num_heads != num_kv_heads and not enable_gqa:
        raise ValueError(
            f"query has {num_heads} heads and key {num_kv_heads}; pass enable_gqa=True for grouped heads."
        )
    if num_heads != num_kv_heads and (num_kv_heads == 0 or num_heads % num_kv_heads):
        raise ValueError(
            f"enable_gqa needs query heads divisible by key heads; got {num_heads} and {num_kv_heads}."
        )
    if attn_mask is not None:
        _check_mask(attn_mask, query)
    check_dropout(dropout_p)


def _shapes(query: Tensor, key: Tensor, value: Tensor) -> str:
    return f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"


def _equal_shapes(shape: torch.Size, other: torch.Size) -> bool:
    """Whether two shapes are equal. While tracing, sizes whose comparison depends on data count as equal."""
    if len(shape) != len(other):
        return False
    return all(guard_or_true(length == expected) for length, expected in zip(shape, other, strict=True))


def _check_mask(mask: Tensor, query: Tensor) -> None:
    """Raise ``ValueError`` for a wrong dtype, device, or leading dims.

    The last two dims depend on the layouts: :func:`~para_core.attention.masks.infer_mask_extents` checks
    them.
    """
    if mask.dtype not in MASK_DTYPES:
        raise ValueError(
            f"attn_mask has dtype {mask.dtype}; expected bool (True: may attend), or a float of 16 bits or more that "
            "is added."
        )
    if mask.layout != torch.strided:
        raise ValueError(f"attn_mask has the layout {mask.layout}; pass a dense one: mask.to_dense().")
    if mask.device != query.device:
        raise ValueError(f"attn_mask is on {mask.device}, query on {query.device}; move the mask.")
    if mask.ndim > query.ndim:
        raise ValueError(f"attn_mask {list(mask.shape)} has more dims than query {list(query.shape)}.")
    leading = mask.shape[:-2]
    wanted = query.shape[query.ndim - 2 - len(leading) : -2]
    if any(size not in (1, full) for size, full in zip(leading, wanted, strict=True)):
        raise ValueError(
            f"attn_mask {list(mask.shape)} does not broadcast over batch and heads of query {list(query.shape)}."
        )


def check_dropout(dropout_p: float) -> None:
    """Raise ``ValueError`` unless ``dropout_p`` is 0."""
    if dropout_p != 0.0:
        raise ValueError(
            f"dropout_p={dropout_p} cannot be the same on several ranks as on one: each draws its own random numbers. "
            "Pass dropout_p=0.0 (model.eval())."
        )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def check_transforms() -> bool:
    """Raise ``RuntimeError`` inside ``torch.func.vmap`` and in forward-mode AD, which collectives do not
    support.

    Otherwise return True: Dynamo runs this once, while tracing, and needs a result to treat as a constant.
    """
    interpreter = innermost_transform()
    kind = None
    if interpreter is not None:
        kind = interpreter.key()
    if kind == TransformType.Vmap:
        raise RuntimeError(
            "attention over several ranks inside torch.func.vmap: a collective has no batching rule. Put the mapped "
            "dim into the batch dim of query, key and value instead."
        )
    if kind == TransformType.Jvp or forward_ad_globals[FORWARD_AD_LEVEL] >= 0:
        raise RuntimeError(
            "attention over several ranks in forward-mode AD (torch.func.jvp, torch.autograd.forward_ad): tangents "
            "would be lost. "
            "Use reverse mode (torch.func.vjp, .backward()), or attend on one rank under UnifiedAttnMode.disable()."
        )
    return True
