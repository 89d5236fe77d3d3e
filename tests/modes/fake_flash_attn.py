"""A stand-in for flash_attn 2.8, which needs a GPU: operators, schemas and autograd functions.

As in ``flash_attn/flash_attn_interface.py``, a function calls an ``autograd.Function``, whose forward pads the head dim
to a multiple of 8, calls ``torch.ops.flash_attn._flash_attn_forward``, and saves lse and RNG state for the backward.
"""

import torch
import torch.nn.functional as F

_OUTPUTS = " -> (Tensor, Tensor, Tensor, Tensor)"
_OPTIONS = (
    "float dropout_p, float softmax_scale, bool causal, int window_size_left{0}, int window_size_right{0}, "
    "float softcap{1}, Tensor? alibi_slopes{2}"
)
_REQUIRED, _WITH_DEFAULTS = _OPTIONS.format("", "", ""), _OPTIONS.format("=-1", "=0.0", "=None")
_FORWARD = f"(Tensor q, Tensor k, Tensor v, {_REQUIRED}, bool return_softmax){_OUTPUTS}"
_VARLEN = (
    "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, int max_seqlen_q, int max_seqlen_k, "
    f"{_WITH_DEFAULTS}, bool return_softmax=False, Tensor? block_table=None, Tensor? leftpad_k=None, "
    f"Tensor? seqused_k=None, bool zero_tensors=False, int num_splits=0){_OUTPUTS}"
)
_BACKWARD = (
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(a!)? dq, Tensor(b!)? dk, "
    f"Tensor(c!)? dv, {_REQUIRED}, bool deterministic, Tensor? rng_state=None) -> Tensor"
)


def attention(q, k, v, scale, causal, window=(-1, -1)):
    """Return out and lse by definition: ``[B, S, H, D]``, grouped heads, masks aligned with the last query and key."""
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


@torch.library.custom_op("flash_attn::_flash_attn_forward", mutates_args=(), schema=_FORWARD)
def _flash_attn_forward(q, k, v, dropout_p, scale, causal, left, right, softcap, alibi_slopes, return_softmax):
    assert q.shape[-1] % 8 == 0 and dropout_p == softcap == 0 and alibi_slopes is None
    out, lse = attention(q, k, v, scale, causal, (left, right))
    return torch.empty_like(q).copy_(out), lse, q.new_empty(0), torch.empty(2, dtype=torch.int64)


@_flash_attn_forward.register_fake
def _(q, k, v, *options):
    lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
    return torch.empty_like(q), lse, q.new_empty(0), torch.empty(2, dtype=torch.int64)


@torch.library.custom_op("flash_attn::_flash_attn_varlen_forward", mutates_args=(), schema=_VARLEN)
def _flash_attn_varlen_forward(q, k, v, cu_q, cu_k, max_q, max_k, dropout_p, scale, causal, *options):
    out, lse = torch.zeros_like(q), q.new_zeros(q.shape[1], q.shape[0], dtype=torch.float32)
    for a, b, c, d in zip(cu_q.tolist(), cu_q.tolist()[1:], cu_k.tolist(), cu_k.tolist()[1:], strict=False):
        part, part_lse = attention(q[None, a:b], k[None, c:d], v[None, c:d], scale, causal)
        out[a:b], lse[:, a:b] = part[0].to(q.dtype), part_lse[0]
    return out, lse, q.new_empty(0), torch.empty(2, dtype=torch.int64)


@torch.library.custom_op("flash_attn::_flash_attn_backward", mutates_args=("dq", "dk", "dv"), schema=_BACKWARD)
def _flash_attn_backward(dout, q, k, v, out, lse, dq, dk, dv, dropout_p, scale, causal, left, right, *options):
    repeats = q.shape[2] // k.shape[2]
    q_, k_, v_, dout_, out_ = (x.transpose(1, 2) for x in (q, k, v, dout, out))
    k_, v_ = (x.repeat_interleave(repeats, dim=1) for x in (k_, v_))
    weights = (masked(q_ @ k_.mT * scale, causal, (left, right)) - lse[..., None]).exp()
    grad = weights * (dout_ @ v_.mT - (dout_ * out_).sum(-1, keepdim=True)) * scale
    dq.copy_((grad @ k_).transpose(1, 2))
    for target, result in ((dk, grad.mT @ q_), (dv, weights.mT @ dout_)):
        target.copy_(result.unflatten(1, (-1, repeats)).sum(2).transpose(1, 2))
    return dout.new_empty(0, dtype=torch.float32)


_wrapped_flash_attn_varlen_forward = torch.ops.flash_attn._flash_attn_varlen_forward
_wrapped_flash_attn_backward = torch.ops.flash_attn._flash_attn_backward


def pad(*tensors):
    size = tensors[0].shape[-1]
    return [F.pad(x, [0, 8 - size % 8]) for x in tensors] if size % 8 else tensors


class FlashAttnFunc(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, dropout_p, softmax_scale, causal, window, softcap, slopes, return_softmax, is_grad):
        is_grad = is_grad and any(x.requires_grad for x in [q, k, v])
        if softmax_scale is None:
            softmax_scale = q.shape[-1] ** (-0.5)
        head_size_og = q.size(3)
        q, k, v = pad(q, k, v)
        options = {"window_size_left": window[0], "window_size_right": window[1], "softcap": softcap}
        options |= {"alibi_slopes": slopes, "return_softmax": return_softmax and dropout_p > 0}
        out_padded, softmax_lse, S_dmask, rng_state = torch.ops.flash_attn._flash_attn_forward(
            q, k, v, dropout_p, softmax_scale, causal=causal, **options
        )
        if is_grad:
            ctx.save_for_backward(q, k, v, out_padded, softmax_lse, rng_state)
            ctx.options = (dropout_p, softmax_scale, causal, *window, softcap, slopes, False)
        out = out_padded[..., :head_size_og]
        return out if not return_softmax else (out, softmax_lse, S_dmask)

    @staticmethod
    def backward(ctx, dout, *args):
        q, k, v, out, softmax_lse, rng_state = ctx.saved_tensors
        (dout_padded,) = pad(dout)
        grads = [torch.empty_like(x) for x in (q, k, v)]
        _wrapped_flash_attn_backward(dout_padded, q, k, v, out, softmax_lse, *grads, *ctx.options, rng_state=rng_state)
        return *[x[..., : dout.shape[-1]] for x in grads], *[None] * 8


class FlashAttnVarlenFunc(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal):
        if softmax_scale is None:
            softmax_scale = q.shape[-1] ** (-0.5)
        head_size_og = q.size(2)
        q, k, v = pad(q, k, v)
        lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        options = {"window_size_left": -1, "window_size_right": -1, "softcap": 0.0, "block_table": None}
        out, *_ = _wrapped_flash_attn_varlen_forward(q, k, v, *lengths, 0.0, softmax_scale, causal=causal, **options)
        return out[..., :head_size_og]


def flash_attn_func(
    *qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, **more
):
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    assert set(more) <= {"deterministic", "return_attn_probs"}
    return FlashAttnFunc.apply(*qkv, *options, more.get("return_attn_probs", False), torch.is_grad_enabled())


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False
):
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return FlashAttnVarlenFunc.apply(q, k, v, *lengths, softmax_scale, causal)


def flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False):
    lengths = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return FlashAttnVarlenFunc.apply(*qkv.detach().unbind(1), *lengths, softmax_scale, causal)
