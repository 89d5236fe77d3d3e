"""Attention in float64, by its formula, and the allowed error of a result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.job import OK, WRONG
from benchmarks.harness import relative_error
from para_core.attention.local_call import LocalAttentionCall

# lse is float32 in all kernels, so this bounds their sums and exponentials, whatever the dtype of query.
LSE_BOUND = 1e-4


@dataclass(frozen=True)
class Inputs:
    """The tensors of one attention call: ``[B, H, S, D]``. ``mask`` has 4 dims and is bool or float, or it is None."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad_out: Tensor
    mask: Tensor | None = None
    is_causal: bool = False

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value

    @property
    def call(self) -> LocalAttentionCall:
        return LocalAttentionCall(*self.qkv, self.mask, self.is_causal)

    @property
    def lse_bound(self) -> float:
        """Return the allowed error of lse. Fused kernels on CUDA round a float32 mask to the dtype of query."""
        rounds_mask = self.mask is not None and self.mask.dtype == torch.float32 != self.query.dtype
        return max(LSE_BOUND, torch.finfo(self.query.dtype).eps / 8) if rounds_mask else LSE_BOUND

    @property
    def heads_per_key_head(self) -> int:
        return self.query.shape[1] // self.key.shape[1]


MASKS = ("none", "causal", "bool key padding", "bool full", "float", "float32")


def make_inputs(
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    mask: str = "none",
    memory: str = "contiguous",
    key_heads: int | None = None,
    seed: int = 0,
) -> Inputs:
    """Return normal numbers that are the same in every process. Each query sees a key.

    Args:
        shape: ``[B, H, S, D]``.
        mask: one of ``MASKS``; "float" is in ``dtype``.
        memory: "contiguous"; "transposed", from ``[B, S, H, D]``; "packed", a slice of ``[B, S, 3, H, D]``.
    """
    generator = torch.Generator().manual_seed(seed)
    batch, heads, tokens, head_dim = shape
    drawn = [
        torch.randn(batch, count, tokens, head_dim, generator=generator).to(device, dtype)
        for count in (heads, key_heads or heads, key_heads or heads, heads)
    ]
    if memory == "packed":
        table = torch.stack([x.transpose(1, 2) for x in drawn[:3]], dim=2)
        drawn[:3] = [x.transpose(1, 2) for x in table.unbind(2)]
    if memory != "contiguous":
        drawn = [
            x if memory == "packed" and i < 3 else x.transpose(1, 2).contiguous().transpose(1, 2)
            for i, x in enumerate(drawn)
        ]
    attn_mask = None if mask in ("none", "causal") else _mask(mask, shape, dtype, generator).to(device)
    return Inputs(*drawn, mask=attn_mask, is_causal=mask == "causal")


def _mask(kind: str, shape: tuple[int, int, int, int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    batch, heads, tokens, _ = shape
    if kind == "bool key padding":
        lengths = torch.linspace(tokens, tokens // 2 + 1, batch).long() - 1
        return (torch.arange(tokens) < lengths[:, None])[:, None, None, :]
    if kind == "bool full":
        return (torch.rand(batch, 1, tokens, tokens, generator=generator) < 0.7) | torch.eye(tokens, dtype=torch.bool)
    bias = torch.randn(1, heads, tokens, tokens, generator=generator)
    return bias.to(torch.float32 if kind == "float32" else dtype)


@dataclass(frozen=True)
class Results:
    """The results of a call: ``out``, the gradients, and ``lse`` if it is returned. None means that it was not
    computed.
    """

    out: Tensor
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    lse: Tensor | None = None

    def errors(self, exact: Results) -> dict[str, float]:
        """Return ‖x − exact‖ / ‖exact‖ of each computed result."""
        pairs = {name: (getattr(self, name), getattr(exact, name)) for name in ("out", "lse", "dq", "dk", "dv")}
        return {name: relative_error(x, y) for name, (x, y) in pairs.items() if x is not None}


def exact(inputs: Inputs) -> Results:
    """Compute attention by its formula in float64, and its gradients by autograd."""
    query, key, value = (x.double().detach().requires_grad_() for x in inputs.qkv)
    groups = inputs.heads_per_key_head
    keys, values = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scores = query @ keys.transpose(-1, -2) * query.shape[-1] ** -0.5
    if inputs.mask is not None and inputs.mask.dtype == torch.bool:
        scores = scores.masked_fill(~inputs.mask, float("-inf"))
    elif inputs.mask is not None:
        scores = scores + inputs.mask.double()
    if inputs.is_causal:
        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), float("-inf"))
    out = torch.softmax(scores, dim=-1) @ values
    out.backward(inputs.grad_out.double())
    return Results(out.detach(), query.grad, key.grad, value.grad, torch.logsumexp(scores, dim=-1).detach())


def sdpa(inputs: Inputs) -> Results:
    """Return PyTorch's SDPA in the dtype of the inputs, under the switches of the caller."""
    # detach would keep the strides and share the memory, which another call's autograd may need.
    query, key, value = (x.detach().requires_grad_() for x in inputs.qkv)
    mask = inputs.mask
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(query.dtype)  # Fused kernels on CUDA accept no other mask.
    grouped = inputs.heads_per_key_head > 1
    out = F.scaled_dot_product_attention(query, key, value, mask, is_causal=inputs.is_causal, enable_gqa=grouped)
    out.backward(inputs.grad_out)
    return Results(out.detach(), query.grad, key.grad, value.grad)


# This is three times SDPA's usual error in 16 bits. A larger error of SDPA is not rounding, so it does not raise the
# bound.
OWN_AT_MOST = 0.01


def judge(errors: dict[str, float], own: dict[str, float], dtype: torch.dtype, *, lse_bound: float = LSE_BOUND) -> str:
    """Return ``ok`` if each error is at most twice SDPA's own plus a slack, because SDPA's may be nearly 0."""
    slack = max(torch.finfo(dtype).eps / 16, 1e-6)
    bounds = {name: lse_bound if name == "lse" else 2 * min(own[name], OWN_AT_MOST) + slack for name in errors}
    return OK if all(error <= bounds[name] for name, error in errors.items()) else WRONG


def compare(results: Results, inputs: Inputs, expected: Results) -> dict[str, Any]:
    """Return the verdict on ``results``, their errors, and those of SDPA."""
    errors, own = results.errors(expected), sdpa(inputs).errors(expected)
    return {
        "verdict": judge(errors, own, inputs.query.dtype, lse_bound=inputs.lse_bound),
        "errors": errors,
        "SDPA": own,
    }
