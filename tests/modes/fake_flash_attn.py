"""A stand-in for the package flash_attn, which needs a GPU: its operators, schemas and autograd functions, in PyTorch.

The structure is that of flash_attn 2.8 (``flash_attn/flash_attn_interface.py``): a function calls an
``autograd.Function``, whose forward pads the head dim to a multiple of 8, calls
``torch.ops.flash_attn._flash_attn_forward``, and saves lse and the state of the random numbers for a backward operator.
FlashAttention-3 (``hopper/flash_attn_interface.py``) is represented by its forward, which is called by its Python name.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def attention(q, k, v, scale, causal, window=(-1, -1)):
    """Return out and lse of FlashAttention by its definition: ``[B, S, H, D]``, grouped heads, masks aligned with the
    last query and key.
    """
    repeats = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2).float() for x in (q, k, v))
    k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
    scores = masked(q @ k.mT * scale, causal, window)
    return (scores.softmax(-1) @ v).transpose(1, 2).contiguous(), scores.logsumexp(-1)


def masked(scores, causal, window):
    S_q, S_k = scores.shape[-2:]
    position, key, right = torch.arange(S_q)[:, None] + S_k - S_q, torch.arange(S_k), 0 if causal else window[1]
    if right >= 0:
        scores = scores.masked_fill(key > position + right, -torch.inf)
    if window[0] >= 0:
        scores = scores.masked_fill(key < position - window[0], -torch.inf)
    return scores


def sequences(cu_q, cu_k):
    ends = zip(cu_q.tolist(), cu_q.tolist()[1:], cu_k.tolist(), cu_k.tolist()[1:], strict=False)
    return [(slice(a, b), slice(c, d)) for a, b, c, d in ends]


@torch.library.custom_op("flash_attn::_flash_attn_forward", mutates_args=())
def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    assert q.shape[-1] % 8 == 0 and dropout_p == softcap == 0 and alibi_slopes is None
    out, lse = attention(q, k, v, softmax_scale, causal, (window_size_left, window_size_right))
    return torch.empty_like(q).copy_(out), lse, q.new_empty(0), torch.empty(2, dtype=torch.int64)


@_flash_attn_forward.register_fake
def _(q, k, v, *options):
    lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
    return torch.empty_like(q), lse, q.new_empty(0), torch.empty(2, dtype=torch.int64)


@torch.library.custom_op("flash_attn::_flash_attn_varlen_forward", mutates_args=())
def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out, lse = torch.zeros_like(q), q.new_zeros(q.shape[1], q.shape[0], dtype=torch.float32)
    for rows, columns in sequences(cu_seqlens_q, cu_seqlens_k):
        part, part_lse = attention(q[None, rows], k[None, columns], v[None, columns], softmax_scale, causal)
        out[rows], lse[:, rows] = part[0].to(q.dtype), part_lse[0]
    return out, lse, q.new_empty(0), torch.empty(2, dtype=torch.int64)


@_flash_attn_varlen_forward.register_fake
def _(q, k, v, *args, **kwargs):
    lse = q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
    return torch.empty_like(q), lse, q.new_empty(0), torch.empty(2, dtype=torch.int64)


@torch.library.custom_op("flash_attn::_flash_attn_backward", mutates_args=("dq", "dk", "dv"))
def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    repeats = q.shape[2] // k.shape[2]
    q_, k_, v_, dout_, out_ = (x.transpose(1, 2) for x in (q, k, v, dout, out))
    k_, v_ = (x.repeat_interleave(repeats, dim=1) for x in (k_, v_))
    scores = masked(q_ @ k_.mT * softmax_scale, causal, (window_size_left, window_size_right))
    weights = (scores - softmax_lse[..., None]).exp()
    grad = weights * (dout_ @ v_.mT - (dout_ * out_).sum(-1, keepdim=True)) * softmax_scale
    dq.copy_((grad @ k_).transpose(1, 2))
    for target, result in ((dk, grad.mT @ q_), (dv, weights.mT @ dout_)):
        target.copy_(result.unflatten(1, (-1, repeats)).sum(2).transpose(1, 2))
    return dout.new_empty(0, dtype=torch.float32)


_wrapped_flash_attn_forward = torch.ops.flash_attn._flash_attn_forward
_wrapped_flash_attn_varlen_forward = torch.ops.flash_attn._flash_attn_varlen_forward
_wrapped_flash_attn_backward = torch.ops.flash_attn._flash_attn_backward


def pad(*tensors):
    size = tensors[0].shape[-1]
    return [F.pad(x, [0, 8 - size % 8]) for x in tensors] if size % 8 else tensors


class FlashAttnFunc(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        return_softmax,
        is_grad_enabled,
    ):
        is_grad = is_grad_enabled and any(x.requires_grad for x in [q, k, v])
        if softmax_scale is None:
            softmax_scale = q.shape[-1] ** (-0.5)
        head_size_og = q.size(3)
        q, k, v = pad(q, k, v)
        out_padded, softmax_lse, S_dmask, rng_state = _wrapped_flash_attn_forward(
            q,
            k,
            v,
            dropout_p,
            softmax_scale,
            causal=causal,
            window_size_left=window_size[0],
            window_size_right=window_size[1],
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            return_softmax=return_softmax and dropout_p > 0,
        )
        if is_grad:
            ctx.save_for_backward(q, k, v, out_padded, softmax_lse, rng_state)
            ctx.options = (dropout_p, softmax_scale, causal, *window_size, softcap, alibi_slopes, False)
        out = out_padded[..., :head_size_og]
        return out if not return_softmax else (out, softmax_lse, S_dmask)

    @staticmethod
    def backward(ctx, dout, *args):
        q, k, v, out, softmax_lse, rng_state = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        (dout_padded,) = pad(dout)
        _wrapped_flash_attn_backward(
            dout_padded, q, k, v, out, softmax_lse, dq, dk, dv, *ctx.options, rng_state=rng_state
        )
        return *[x[..., : dout.shape[-1]] for x in (dq, dk, dv)], *[None] * 8


class FlashAttnQKVPackedFunc(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, softmax_scale, causal, is_grad_enabled):
        is_grad = is_grad_enabled and qkv.requires_grad
        if softmax_scale is None:
            softmax_scale = qkv.shape[-1] ** (-0.5)
        q, k, v = qkv[:, :, 0].detach(), qkv[:, :, 1].detach(), qkv[:, :, 2].detach()
        head_size_og = q.size(3)
        q, k, v = pad(q, k, v)
        options = {
            "causal": causal,
            "window_size_left": -1,
            "window_size_right": -1,
            "softcap": 0.0,
            "alibi_slopes": None,
        }
        out_padded, softmax_lse, _, rng_state = _wrapped_flash_attn_forward(
            q, k, v, 0.0, softmax_scale, **options, return_softmax=False
        )
        if is_grad:
            ctx.save_for_backward(q, k, v, out_padded, softmax_lse, rng_state)
            ctx.options = (0.0, softmax_scale, causal, -1, -1, 0.0, None, False)
        return out_padded[..., :head_size_og]

    @staticmethod
    def backward(ctx, dout, *args):
        q, k, v, out, softmax_lse, rng_state = ctx.saved_tensors
        dqkv = q.new_empty(*q.shape[:-2], 3, *q.shape[-2:])
        (dout_padded,) = pad(dout)
        _wrapped_flash_attn_backward(
            dout_padded, q, k, v, out, softmax_lse, *dqkv.unbind(2), *ctx.options, rng_state=rng_state
        )
        return dqkv[..., : dout.shape[-1]], None, None, None


class FlashAttnVarlenFunc(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal):
        if softmax_scale is None:
            softmax_scale = q.shape[-1] ** (-0.5)
        head_size_og = q.size(2)
        q, k, v = pad(q, k, v)
        out_padded, *_ = _wrapped_flash_attn_varlen_forward(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            0.0,
            softmax_scale,
            causal=causal,
            window_size_left=-1,
            window_size_right=-1,
            softcap=0.0,
            alibi_slopes=None,
            return_softmax=False,
            block_table=None,
        )
        return out_padded[..., :head_size_og]


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    return FlashAttnFunc.apply(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        return_attn_probs,
        torch.is_grad_enabled(),
    )


def flash_attn_qkvpacked_func(qkv, dropout_p=0.0, softmax_scale=None, causal=False):
    return FlashAttnQKVPackedFunc.apply(qkv, softmax_scale, causal, torch.is_grad_enabled())


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False
):
    return FlashAttnVarlenFunc.apply(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal
    )


def flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False):
    return FlashAttnVarlenFunc.apply(
        *qkv.detach().unbind(1), cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, softmax_scale, causal
    )


# -- FlashAttention-3.


@torch.library.custom_op("flash_attn_3::_flash_attn_forward", mutates_args=())
def _flash_attn_3_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    qv: Tensor | None = None,
    out_: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out, lse = attention(q, k, v, softmax_scale, causal, (window_size_left, window_size_right))
    return torch.empty_like(q).copy_(out), lse, q.new_empty(0), q.new_empty(0)


class FlashAttn3Func(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, softmax_scale, causal):
        if softmax_scale is None:
            softmax_scale = q.shape[-1] ** (-0.5)
        out, softmax_lse, *_rest = _flash_attn_3_forward(
            q, k, v, None, None, None, None, softmax_scale=softmax_scale, causal=causal
        )
        ctx.save_for_backward(q, k, v, out, softmax_lse)
        return out


def flash_attn_3_func(q, k, v, softmax_scale=None, causal=False):
    return FlashAttn3Func.apply(q, k, v, softmax_scale, causal)
