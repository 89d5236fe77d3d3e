"""Attention on a GPU without a GPU: each backend runs on meta tensors, and every call checks the preconditions of its
kernels.

The kernels check few of their preconditions (kernel_rules.py), so the watcher here does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode

from para_core.attention import local
from para_core.attention.local import local_attention_backward, local_attention_with_lse
from para_core.attention.local_call import LocalAttentionCall
from tests.attention.kernel_rules import PRECONDITIONS

B, H = 2, 4
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
aten = torch.ops.aten

ASK_THE_HOST = {aten._local_scalar_dense, aten.is_nonzero, aten.item, aten.equal, aten.nonzero, aten.masked_select}
COPIES = {aten.copy_, aten._to_copy, aten.clone, aten.constant_pad_nd, aten.contiguous, aten.cat, aten.index_select}
ALLOCATIONS = {aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided, aten.new_empty_strided}


class Watcher(TorchDispatchMode):
    """A mode that checks the preconditions of each fused kernel, and counts the other launches."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[str] = []
        self.copies: list[str] = []
        self.launches: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet, name = func.overloadpacket, str(func)
        assert packet not in ASK_THE_HOST, f"{name} waits for the device"
        if func in PRECONDITIONS:
            PRECONDITIONS[func](*args, **(kwargs or {}))
            self.kernels.append(name)
        if packet in COPIES:
            self.copies.append(name)
        if not func.is_view and packet not in ALLOCATIONS:
            self.launches.append(name)
        return func(*args, **(kwargs or {}))


# -- The cases.

BACKENDS = {
    "flash": (SDPBackend.FLASH_ATTENTION, (F16, BF16)),
    "efficient": (SDPBackend.EFFICIENT_ATTENTION, (F32, F16, BF16)),
    "cudnn": (SDPBackend.CUDNN_ATTENTION, (F16, BF16)),
    "math": (SDPBackend.MATH, (F32, BF16)),
}
HEAD_DIMS = (36, 64, 96, 128, 256)
MASKS = ("none", "causal", "bool", "bool rows", "float", "float32")
MEMORY = ("BHSD", "BSHD", "packed")
# Each tuple has the numbers of key heads, of queries and of keys.
SIZES = ((H, 64, 64), (H, 37, 37), (H, 37, 53), (H // 2, 64, 64), (H // 2, 37, 37))


def takes(backend: str, dtype: torch.dtype, head_dim: int, mask: str) -> bool:
    """Return whether SDPA's own choice (transformers/cuda/sdp_utils.cpp) allows ``backend``."""
    if dtype not in BACKENDS[backend][1]:
        return False
    if backend == "flash":
        return mask in ("none", "causal")
    return head_dim % 8 == 0 or backend == "math" or (backend == "efficient" and dtype == F32)


CASES = [
    pytest.param(backend, dtype, head_dim, mask, id=f"{backend}-{str(dtype)[6:]}-{head_dim}-{mask}")
    for backend in BACKENDS
    for dtype in (F32, F16, BF16)
    for head_dim in HEAD_DIMS
    for mask in MASKS
    if takes(backend, dtype, head_dim, mask)
]


def make(memory: str, heads: int, length: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Return a tensor ``[B, heads, length, head_dim]`` on the meta device."""
    if memory == "BHSD":
        return torch.empty(B, heads, length, head_dim, dtype=dtype, device="meta")
    if memory == "BSHD":
        return torch.empty(B, length, heads, head_dim, dtype=dtype, device="meta").transpose(1, 2)
    # It is the second of three tensors in one buffer, as in a fused projection.
    return torch.empty(B, length, 3, heads, head_dim, dtype=dtype, device="meta")[:, :, 1].transpose(1, 2)


def make_mask(kind: str, num_queries: int, num_keys: int, dtype: torch.dtype) -> Tensor | None:
    shapes = {"bool": (B, 1, 1, num_keys), "bool rows": (1, H, num_queries, num_keys)}
    shape = shapes.get(kind, (B, 1, num_queries, num_keys))
    dtypes = {"bool": torch.bool, "bool rows": torch.bool, "float": dtype, "float32": F32}
    return None if kind in ("none", "causal") else torch.empty(shape, dtype=dtypes[kind], device="meta")


def every_call(mask: str) -> Iterator[tuple[str, int, int, int]]:
    """Return tuples (memory, number of key heads, of queries, of keys)."""
    for memory in MEMORY:
        for key_heads, num_queries, num_keys in SIZES if memory == "BHSD" else SIZES[:3:2]:
            if mask != "causal" or num_queries == num_keys:
                yield memory, key_heads, num_queries, num_keys


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Callable[[SDPBackend], None]:
    """Fix SDPA's choice, which torch cannot make for meta tensors."""

    def fix(backend: SDPBackend) -> None:
        monkeypatch.setattr(local, "choose_backend", lambda *_: backend.value)

    return fix


def mask_copies(mask: str, dtype: torch.dtype) -> int:
    """Return how often a mask with aligned rows is copied, to a bias or to query's dtype."""
    return {"bool": 1, "bool rows": 1, "float32": int(dtype != F32)}.get(mask, 0)


@pytest.mark.sample(8)
@pytest.mark.parametrize(("backend", "dtype", "head_dim", "mask"), CASES)
def test_each_kernel_gets_its_layout_without_copies(choose, backend, dtype, head_dim, mask):
    choose(BACKENDS[backend][0])
    for memory, key_heads, num_queries, num_keys in every_call(mask):
        case = f"{memory}, {key_heads} key heads, {num_queries} × {num_keys}"
        query = make(memory, H, num_queries, head_dim, dtype)
        key, value = (make(memory, key_heads, num_keys, head_dim, dtype) for _ in range(2))
        options = {"mask": make_mask(mask, num_queries, num_keys, dtype), "is_causal": mask == "causal"}

        with Watcher() as forward:
            out, lse = local_attention_with_lse(LocalAttentionCall(query, key, value, **options))
        assert out.shape == query.shape and out.dtype == dtype, case
        assert lse.shape == query.shape[:3] and lse.dtype == F32, case
        if memory != "BHSD" and head_dim % 8 == 0:
            out.transpose(1, 2).view(B, num_queries, -1)

        with Watcher() as backward:
            grads = local_attention_backward(
                LocalAttentionCall(query, key, value, **options), torch.empty_like(out), out, lse
            )
        for grad, x in zip(grads[:3], (query, key, value), strict=True):
            assert grad.shape == x.shape and grad.dtype == x.dtype, case

        if backend == "math":
            assert not forward.kernels and not backward.kernels
            continue
        assert len(forward.kernels) == len(backward.kernels) == 1, case
        if head_dim % 8 or num_keys % 8 or (backend == "efficient" and key_heads != H):
            continue  # These masks are padded or expanded.
        copies = mask_copies(mask, dtype)
        assert len(forward.copies) == copies, f"{case}: {forward.copies}"
        if "efficient" in backward.kernels[0] and backend != "efficient":
            # The backward uses another kernel than the forward. It expands heads, and needs out in a certain layout.
            copies += int(memory == "BHSD") + 2 * int(key_heads != H)
        assert len(backward.copies) == copies, f"{case}: {backward.copies}"
        if mask in ("none", "causal"):
            assert len(forward.launches) == 1, f"{case}: {forward.launches}"
            assert len(backward.launches) == 1 + copies or key_heads != H, f"{case}: {backward.launches}"


# A ring merges partial results in float32 and splits rows into pieces, which gives out, grad_out and lse other strides.
@pytest.mark.parametrize(
    ("backend", "dtype"), [("flash", BF16), ("efficient", F16), ("efficient", F32), ("cudnn", BF16)]
)
@pytest.mark.parametrize("out_memory", [*MEMORY, "float32", "rows"])
def test_gradient_accepts_any_layout_of_out_and_lse(choose, backend, dtype, out_memory):
    choose(BACKENDS[backend][0])
    for memory, key_heads, num_queries, num_keys in every_call("none"):
        query = make(memory, H, num_queries, 64, dtype)
        key, value = (make(memory, key_heads, num_keys, 64, dtype) for _ in range(2))
        lse = torch.empty(B, H, num_queries + 5, device="meta")[..., 5:]
        if out_memory == "rows":  # It is one piece of a longer row.
            out = make("BHSD", H, num_queries + 3, 64, dtype)[:, :, 3:]
        elif out_memory == "float32":
            out = make("BSHD", H, num_queries, 64, F32)
        else:
            out = make(out_memory, H, num_queries, 64, dtype)
        # sum() gives the gradient these strides.
        grad_out = torch.empty(B, 1, num_queries, 1, dtype=dtype, device="meta").expand(out.shape)
        with Watcher() as watcher:
            grads = local_attention_backward(LocalAttentionCall(query, key, value), grad_out, out, lse)
        assert len(watcher.kernels) == 1
        assert [grad.shape for grad in grads[:3]] == [x.shape for x in (query, key, value)]


@pytest.mark.parametrize("backend", ["efficient", "cudnn"])
def test_mask_may_be_a_view_or_broadcast(choose, backend):
    choose(BACKENDS[backend][0])
    query, key = (make("BSHD", H, length, 64, BF16) for length in (37, 48))
    whole = torch.empty(B, 1, 37, 200, device="meta", dtype=BF16)
    parts = [whole[..., start : start + 48] for start in (0, 5, 8, 48)]
    one_column = [whole[..., :1], whole[:1, :, :1, :1].bool(), whole[..., :1].float()]
    transposed = torch.empty(48, 37, device="meta", dtype=BF16).t()[None, None]
    for mask in [*parts, *one_column, transposed, *[part.bool() for part in parts], *[part.float() for part in parts]]:
        with Watcher() as watcher:
            out, lse = local_attention_with_lse(LocalAttentionCall(query, key, key, mask=mask))
            local_attention_backward(LocalAttentionCall(query, key, key, mask=mask), out, out, lse)
        assert len(watcher.kernels) == 2
    with Watcher() as watcher:
        local_attention_with_lse(LocalAttentionCall(query, key, key, mask=parts[2]))
    assert watcher.copies == [], "an aligned part of a mask is passed as it lies"


def test_wide_mask_is_cast_before_backends():
    query = make("BSHD", H, 37, 64, BF16)
    for dtype in (F32, torch.float64, F16, BF16):
        mask = torch.empty(B, 1, 1, 37, dtype=dtype, device="meta")
        mask = LocalAttentionCall(query, query, query, mask).fold().mask
        assert mask is not None and mask.dtype == BF16


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
@pytest.mark.parametrize("num_keys", [37, 40])
def test_bool_mask_becomes_bias_of_0_and_minus_infinity(dtype, num_keys):
    mask = torch.rand(B, 1, 3, num_keys) > 0.5  # The mask is on the CPU, because meta tensors have no values.
    query, key = (torch.empty(B, H, length, 8, dtype=dtype) for length in (3, num_keys))
    result = LocalAttentionCall(query, key, key, mask, is_causal=False, scale=None).bias
    assert result is not None and result.dtype == dtype
    assert torch.equal(result, torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, -torch.inf))


def test_unsupported_backward_uses_another_backend(choose):
    def kernel(backend: str, head_dim: int, value_dim: int | None = None) -> str:
        choose(BACKENDS[backend][0])
        query, value = make("BSHD", H, 37, head_dim, BF16), make("BSHD", H, 37, value_dim or head_dim, BF16)
        out, lse = torch.empty_like(value), torch.empty(B, H, 37, device="meta")
        with Watcher() as watcher:
            local_attention_backward(LocalAttentionCall(query, query, value), out, out, lse)
        return watcher.kernels[0].split("_attention")[0].split("_")[-1] if watcher.kernels else "math"

    assert [kernel("flash", head_dim) for head_dim in (128, 192, 200, 210, 250, 256)] == [
        *["flash", "flash", "efficient", "math", "flash", "flash"]
    ]
    assert [kernel("cudnn", head_dim) for head_dim in (64, 128, 192, 256)] == [
        "cudnn",
        "cudnn",
        "efficient",
        "efficient",
    ]
    assert kernel("cudnn", 128, 64) == "efficient"


def test_gradient_of_mask_needs_no_kernel(choose):
    choose(SDPBackend.EFFICIENT_ATTENTION)
    x, mask = make("BSHD", H, 37, 64, BF16), make_mask("float", 37, 37, BF16)
    with Watcher() as watcher:
        *_, grad_mask = local_attention_backward(
            LocalAttentionCall(x, x, x, mask=mask), x, x, torch.empty(B, H, 37, device="meta"), mask_gradient=True
        )
    assert grad_mask is not None and grad_mask.shape == (B, H, 37, 37) and not watcher.kernels


# -- The watcher itself.


def lse_of(num_queries: int) -> Tensor:
    return torch.empty(B, H, math.ceil(num_queries / 32) * 32, device="meta")


def efficient_backward(**changed: Tensor) -> None:
    x = make("BSHD", H, 37, 64, BF16)
    inputs = {"grad_out": x, "query": x, "key": x, "value": x, "bias": None, "out": x, "lse": lse_of(37), **changed}
    seed = torch.empty((), dtype=torch.int64, device="meta")
    aten._scaled_dot_product_efficient_attention_backward(*inputs.values(), seed, seed, 0.0, [True, True, True, False])


def flash_backward(head_dim: int, lse: Tensor) -> None:
    x, seed = make("BSHD", H, 37, head_dim, BF16), torch.empty((), dtype=torch.int64, device="meta")
    aten._scaled_dot_product_flash_attention_backward(x, x, x, x, x, lse, None, None, 37, 37, 0.0, False, seed, seed)


def cudnn_backward(**changed: Tensor) -> None:
    x, seed = make("BSHD", H, 37, 64, BF16), torch.empty((), dtype=torch.int64, device="meta")
    lse = torch.empty(B, H, 37, 1, device="meta")
    inputs = {"grad_out": x, "query": x, "key": x, "value": x, "out": x, "lse": lse, **changed}
    aten._scaled_dot_product_cudnn_attention_backward(
        *inputs.values(), seed, seed, None, None, None, 37, 37, 0.0, False
    )


def efficient(bias: Tensor | None = None, key_heads: int = H) -> None:
    query, key = make("BSHD", H, 37, 64, BF16), make("BSHD", key_heads, 37, 64, BF16)
    aten._scaled_dot_product_efficient_attention(query, key, key, bias, True)


def bias(dtype: torch.dtype = BF16, num_keys: int = 40) -> Tensor:
    return torch.empty(B, H, 37, num_keys, dtype=dtype, device="meta")[..., :37]


VIOLATIONS = {
    "out has strides": lambda: efficient_backward(out=make("BHSD", H, 37, 64, BF16)),
    "lse has 37 rows": lambda: efficient_backward(lse=torch.empty(B, H, 37, device="meta")),
    "bias is torch.float32, query": lambda: efficient(bias(F32)),
    "not multiples of 8": lambda: efficient(bias(num_keys=37)),
    "bias is .2, 1, 1, 37": lambda: efficient(bias()[:, :1, :1]),
    "past its storage": lambda: efficient(torch.empty(37, dtype=BF16, device="meta").expand(B, H, 37, 37)),
    "no grouped heads": lambda: efficient(key_heads=1),
    "head dim 36": lambda: flash_backward(36, torch.empty(B, H, 37, device="meta")),
    "by its pointer alone": lambda: flash_backward(64, lse_of(37)[..., :37]),
    "grad_out has strides": lambda: cudnn_backward(grad_out=make("BHSD", H, 37, 64, BF16)),
    "float32: it is read as": lambda: aten._scaled_dot_product_cudnn_attention(
        *[make("BSHD", H, 37, 64, BF16)] * 3, bias(F32), True
    ),
    "waits for the device": lambda: torch.empty((), device="meta").item(),
}


@pytest.mark.parametrize("message", VIOLATIONS)
def test_the_watcher_sees_a_violation(message):
    with pytest.raises(AssertionError, match=message), Watcher():
        VIOLATIONS[message]()


def test_watcher_lets_correct_calls_pass():
    with Watcher() as watcher:
        efficient_backward()
        efficient_backward(bias=bias())
        efficient(bias())
        flash_backward(64, torch.empty(B, H, 37, device="meta"))
        cudnn_backward()
    assert len(watcher.kernels) == 5
