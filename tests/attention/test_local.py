"""Attention on one device, with each backend that a CPU has, compared with float64."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from para_core.attention.backend_selection import require_backend
from para_core.attention.local import local_attention, local_attention_backward, local_attention_with_lse
from para_core.attention.local_call import LocalAttentionCall

B, H, S_Q, S_K, D = 2, 6, 7, 9, 16
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.fixture(params=[SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], ids=["flash", "math"])
def backend(request: pytest.FixtureRequest) -> Iterator[SDPBackend]:
    with sdpa_kernel([request.param]):
        yield request.param


def make(heads: int = H, key_heads: int = H, dtype: torch.dtype = torch.float32, num_keys: int = S_K) -> list[Tensor]:
    torch.manual_seed(0)
    sizes = (heads, S_Q), (key_heads, num_keys), (key_heads, num_keys)
    return [torch.randn(B, number, length, D).to(dtype) for number, length in sizes]


def make_mask(kind: str, dtype: torch.dtype) -> Tensor | None:
    torch.manual_seed(1)
    if kind == "none":
        return None
    if kind == "bool":  # The third row of the first sample sees no key.
        mask = torch.rand(B, 1, S_Q, S_K) > 0.4
        mask[0, :, 2] = False
        return mask
    shape = {"float": (B, 1, 1, S_K), "float64": (B, H, S_Q, S_K), "per query": (1, H, S_Q, 1)}[kind]
    return torch.randn(shape).to(torch.float64 if kind == "float64" else dtype)


def in_float64(
    qkv: list[Tensor], mask: Tensor | None = None, is_causal: bool = False, scale: float | None = None
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return leaves, output and lse in float64, from the definition."""
    leaves = [x.detach().double().requires_grad_() for x in qkv]
    query, key, value = leaves
    group = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(group, 1).mT * (D**-0.5 if scale is None else scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.double()
    if is_causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    weights = torch.softmax(scores, -1).masked_fill((scores == -torch.inf).all(-1, keepdim=True), 0.0)
    return leaves, weights @ value.repeat_interleave(group, 1), torch.logsumexp(scores, -1)


def check(actual: Tensor, expected: Tensor, dtype: torch.dtype, what: str) -> None:
    assert actual.shape == expected.shape, what
    error = (actual.double() - expected).norm() / expected.norm().clamp_min(1e-300)
    assert error < TOLERANCE[dtype], f"{what}: off by {error:.1e}"


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("key_heads", [6, 2, 1])
def test_out_lse_and_gradients_equal_float64(backend, dtype, key_heads):
    masks, causal, scales = ("none", "bool", "float", "float64", "per query"), (False, True), (None, 0.7)
    for kind, is_causal, scale in itertools.product(masks, causal, scales):
        what = f"mask {kind}, is_causal {is_causal}, scale {scale}"
        qkv, mask = make(key_heads=key_heads, dtype=dtype), make_mask(kind, dtype)
        options = {"mask": mask, "is_causal": is_causal, "scale": scale}
        leaves, exact_out, exact_lse = in_float64(qkv, **options)

        out, lse = local_attention_with_lse(LocalAttentionCall(*qkv, **options))
        check(out, exact_out, dtype, what)
        assert out.dtype == dtype and lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        finite = exact_lse > -torch.inf
        assert torch.equal(lse > -torch.inf, finite), what
        check(lse[finite], exact_lse[finite], dtype, what)
        if kind != "bool":  # SDPA's own rows without a key may be NaN.
            check(local_attention(LocalAttentionCall(*qkv, **options)), exact_out, dtype, what)

        grad_out = torch.randn_like(out)
        exact = torch.autograd.grad(exact_out, leaves, grad_out.double())
        grads = local_attention_backward(LocalAttentionCall(*qkv, **options), grad_out, out, lse)
        for grad, expected, x in zip(grads[:3], exact, qkv, strict=True):
            assert grad.dtype == x.dtype
            check(grad, expected, dtype, what)
        assert grads[3] is None


@pytest.mark.parametrize("key_heads", [6, 2])
def test_gradients_of_key_blocks_sum_to_the_whole(backend, key_heads):
    qkv, mask = make(key_heads=key_heads), make_mask("bool", torch.float32)
    leaves, exact_out, _ = in_float64(qkv, mask)
    out, lse = local_attention_with_lse(LocalAttentionCall(*qkv, mask=mask))
    grad_out = torch.randn_like(out)
    query, key, value = qkv
    parts = [
        local_attention_backward(
            LocalAttentionCall(query, key[:, :, block], value[:, :, block], mask=mask[..., block]), grad_out, out, lse
        )
        for block in (slice(0, 4), slice(4, 5), slice(5, None))
    ]
    exact = torch.autograd.grad(exact_out, leaves, grad_out.double())
    check(sum(part[0] for part in parts), exact[0], torch.float32, "query")
    for index in (1, 2):
        check(torch.cat([part[index] for part in parts], dim=2), exact[index], torch.float32, "key or value")


@pytest.mark.parametrize("key_heads", [6, 2])
def test_the_gradient_of_a_mask_equals_float64_before_broadcasting(backend, key_heads):
    qkv, mask = make(key_heads=key_heads), make_mask("float", torch.float32)
    leaf = mask.double().expand(B, H, S_Q, S_K).contiguous().requires_grad_()
    _, exact_out, _ = in_float64(qkv, leaf)
    out, lse = local_attention_with_lse(LocalAttentionCall(*qkv, mask=mask))
    grad_out = torch.randn_like(out)
    gradient = local_attention_backward(LocalAttentionCall(*qkv, mask=mask), grad_out, out, lse, mask_gradient=True)[3]
    check(gradient, torch.autograd.grad(exact_out, leaf, grad_out.double())[0], torch.float32, "mask")


@pytest.mark.parametrize("hidden", [False, -torch.inf], ids=["bool", "float"])
def test_rows_without_a_key_give_zeros_and_no_gradient(backend, hidden):
    qkv = make()
    mask = torch.ones(B, 1, S_Q, S_K, dtype=torch.bool) if hidden is False else torch.zeros(B, 1, S_Q, S_K)
    mask[:, :, 3] = hidden
    out, lse = local_attention_with_lse(LocalAttentionCall(*qkv, mask=mask))
    assert not out[:, :, 3].any() and (lse[:, :, 3] == -torch.inf).all()
    assert out.isfinite().all() and lse[:, :, :3].isfinite().all()
    grads = local_attention_backward(LocalAttentionCall(*qkv, mask=mask), torch.ones_like(out), out, lse)
    assert all(grad.isfinite().all() for grad in grads[:3]) and not grads[0][:, :, 3].any()


def test_out_of_range_finite_mask_hides_as_in_float(backend):
    qkv = make()
    mask = torch.zeros(B, 1, S_Q, S_K, dtype=torch.float64)
    mask[:, :, 2] = -1e300  # float32 has no number of this size: it ends at 3e38.
    mask[:, :, 4, 1:] = -1e300
    mask[:, :, 5] = -torch.inf
    _, exact, _ = in_float64(qkv, mask)
    out, lse = local_attention_with_lse(LocalAttentionCall(*qkv, mask=mask))
    check(out, exact, torch.float32, "out")
    assert lse[:, :, :5].isfinite().all() and (lse[:, :, 5] == -torch.inf).all()


@pytest.mark.parametrize("memory", ["BHSD", "BSHD", "packed"])
def test_the_result_lies_in_memory_as_sdpas_does(backend, memory):
    if memory == "packed":
        qkv = [x.transpose(1, 2) for x in torch.randn(B, S_Q, 3, H, D).unbind(2)]
    else:
        qkv = make(num_keys=S_Q)
        qkv = [x.transpose(1, 2).contiguous().transpose(1, 2) if memory == "BSHD" else x for x in qkv]
    _, exact, _ = in_float64(qkv)
    for mask in (None, torch.ones(B, 1, 1, S_Q, dtype=torch.bool)):
        out, _ = local_attention_with_lse(LocalAttentionCall(*qkv, mask=mask))
        check(out, exact, torch.float32, memory)
        if backend == SDPBackend.FLASH_ATTENTION:
            assert out.stride() == F.scaled_dot_product_attention(*qkv, attn_mask=mask).stride()
        if memory != "BHSD" or backend == SDPBackend.MATH:
            out.transpose(1, 2).view(B, S_Q, -1)


@pytest.mark.parametrize(
    ("query_shape", "key_shape"),
    [
        ((0, 3, 5, 8), (0, 3, 4, 8)),
        ((2, 0, 5, 8), (2, 0, 4, 8)),
        ((2, 3, 0, 8), (2, 3, 4, 8)),
        ((2, 3, 5, 8), (2, 3, 0, 8)),
        ((2, 4, 5, 8), (2, 2, 0, 8)),
        ((2, 3, 0, 8), (2, 3, 0, 8)),
    ],
)
@pytest.mark.parametrize("with_mask", [False, True])
def test_empty_tensors_give_zeros(backend, query_shape, key_shape, with_mask):
    query, key = torch.randn(query_shape), torch.randn(key_shape)
    value = torch.randn(*key_shape[:-1], 6)
    mask = torch.ones(1, 1, query_shape[2], key_shape[2], dtype=torch.bool) if with_mask else None
    out, lse = local_attention_with_lse(LocalAttentionCall(query, key, value, mask=mask))
    for empty in (out, local_attention(LocalAttentionCall(query, key, value, mask=mask))):
        assert empty.shape == (*query_shape[:-1], 6) and not empty.any()
        assert empty.transpose(1, 2).is_contiguous()
    assert lse.shape == query_shape[:-1] and (lse == -torch.inf).all()
    grads = local_attention_backward(LocalAttentionCall(query, key, value, mask=mask), torch.ones_like(out), out, lse)
    for grad, x in zip(grads[:3], (query, key, value), strict=True):
        assert grad.shape == x.shape and not grad.any()


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_attention_without_mask_is_one_launch():
    qkv = make(key_heads=2)
    with Operators() as forward:
        out, lse = local_attention_with_lse(LocalAttentionCall(*qkv))
    with Operators() as backward:
        local_attention_backward(LocalAttentionCall(*qkv), out, out, lse)
    for names in (forward.names, backward.names):
        launches = [
            name for name in names if not any(word in name for word in ("slice", "expand", "_fused_sdp_choice"))
        ]
        assert len(launches) == 1 and "flash" in launches[0], launches


@pytest.mark.parametrize("switches", [[SDPBackend.EFFICIENT_ATTENTION], [SDPBackend.CUDNN_ATTENTION]], ids=str)
@pytest.mark.parametrize("lengths", [(5, 4), (0, 4), (5, 0)], ids=str)
def test_missing_backend_raises_on_idle_rank(switches, lengths):
    query, key = (torch.randn(1, 2, length, D) for length in lengths)
    require_backend(query, key)
    with sdpa_kernel(switches):
        with pytest.raises(RuntimeError, match=rf"allow {switches[0].name}, .* takes torch.float32 .*SDPBackend.MATH"):
            require_backend(query, key)
        if 0 not in lengths:
            out, lse = torch.empty_like(query), torch.empty(query.shape[:3])
            with pytest.raises(RuntimeError, match=r"sdpa_kernel\(.*head dims 16 and 16 "):
                local_attention_with_lse(LocalAttentionCall(query, key, key))
            with pytest.raises(RuntimeError, match=r"sdpa_kernel\(.*head dims 16 and 16 "):
                local_attention_backward(LocalAttentionCall(query, key, key), out, out, lse)


def test_backend_check_covers_head_dims_and_mask():
    query, value, mask = torch.randn(1, 2, 5, 16), torch.randn(1, 2, 5, 8), torch.ones(1, 1, 5, 5, dtype=torch.bool)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        require_backend(query, query, mask=mask)
        with pytest.raises(RuntimeError, match="head dims 16 and 8 "):
            require_backend(query, value)
        with pytest.raises(RuntimeError, match=r"sdpa_kernel\(.*mask.* torch\.bool"):
            require_backend(query, value, mask=mask)
    with Operators() as operators:
        require_backend(query, value, mask=mask)
    assert operators.names == []
