"""Attention on meta tensors, as on a GPU: every call checks the preconditions of its kernels (kernel_rules.py)."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode

from para_core.attention import local
from para_core.attention.local import local_attention_backward, local_attention_with_lse
from para_core.attention.local_call import LocalAttentionCall
from tests.attention.kernel_rules import PRECONDITIONS
from tests.operators import ASK_THE_HOST

B, H = 2, 4
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
aten = torch.ops.aten

COPIES = {aten.copy_, aten._to_copy, aten.clone, aten.constant_pad_nd, aten.contiguous, aten.cat, aten.index_select}


class Watcher(TorchDispatchMode):
    """A mode that checks the preconditions of each fused kernel, and lists these kernels and the copies."""

    def __init__(self):
        super().__init__()
        self.kernels, self.copies = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket not in ASK_THE_HOST, f"{func} waits for the device"
        if func in PRECONDITIONS:
            PRECONDITIONS[func](*args, **(kwargs or {}))
            self.kernels.append(str(func).split("_attention")[0].split("_")[-1])
        if func.overloadpacket in COPIES:
            self.copies.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def run(monkeypatch):
    """Return a function that runs a call and its gradient by a backend, and returns out and a watcher of each."""

    def attend(backend, query, key, value=None, mask=None, **options):
        # torch cannot choose for meta tensors.
        monkeypatch.setattr(local, "choose_backend", lambda *_: getattr(SDPBackend, backend.upper()).value)
        call = LocalAttentionCall(query, key, key if value is None else value, mask=mask, **options)
        with Watcher() as forward:
            out, lse = local_attention_with_lse(call)
        assert lse.shape == query.shape[:3] and lse.dtype == F32
        with Watcher() as backward:
            grads = local_attention_backward(call, torch.empty_like(out), out, lse)
        for grad, x in zip(grads[:3], call[:3], strict=True):
            assert grad.shape == x.shape and grad.dtype == x.dtype
        return out, forward, backward

    return attend


MEMORY = ("BHSD", "BSHD", "packed")
MASKS = ("none", "causal", "bool", "bool rows", "float", "float32")
DTYPES = {
    "flash_attention": (F16, BF16),
    "efficient_attention": (F32, F16, BF16),
    "cudnn_attention": (F16, BF16),
    "math": (F32, BF16),
}


def make(memory, heads, length, head_dim, dtype):
    """Return a tensor ``[B, heads, length, head_dim]`` on the meta device."""
    if memory == "BHSD":
        return torch.empty(B, heads, length, head_dim, dtype=dtype, device="meta")
    if memory == "BSHD":
        return torch.empty(B, length, heads, head_dim, dtype=dtype, device="meta").transpose(1, 2)
    # It is the second of three tensors in one buffer, as in a fused projection.
    return torch.empty(B, length, 3, heads, head_dim, dtype=dtype, device="meta")[:, :, 1].transpose(1, 2)


def make_mask(kind, num_queries, num_keys, dtype):
    shapes = {"bool": (B, 1, 1, num_keys), "bool rows": (1, H, num_queries, num_keys)}
    dtypes = {"bool": torch.bool, "bool rows": torch.bool, "float": dtype, "float32": F32}
    if kind in ("none", "causal"):
        return None
    return torch.empty(shapes.get(kind, (B, 1, num_queries, num_keys)), dtype=dtypes[kind], device="meta")


def takes(backend, dtype, head_dim, mask):
    """Return whether SDPA's own choice (transformers/cuda/sdp_utils.cpp) allows ``backend``."""
    if backend == "flash_attention":
        return mask in ("none", "causal")
    return head_dim % 8 == 0 or backend == "math" or (backend == "efficient_attention" and dtype == F32)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("backend", DTYPES)
def test_each_kernel_gets_its_layout_without_copies(run, backend, mask):
    sizes = [(H, 64, 64), (H, 37, 37), (H, 37, 53), (H // 2, 64, 64), (H // 2, 37, 37)]
    for dtype, head_dim, memory, (key_heads, S_q, S_k) in product(DTYPES[backend], (36, 64), MEMORY, sizes):
        if not takes(backend, dtype, head_dim, mask) or (mask == "causal" and S_q != S_k):
            continue
        if memory != "BHSD" and (key_heads, S_q, S_k) not in sizes[:3:2]:
            continue
        case = f"{memory}, {dtype}, head dim {head_dim}, {key_heads} key heads, {S_q} × {S_k}"
        query, key = make(memory, H, S_q, head_dim, dtype), make(memory, key_heads, S_k, head_dim, dtype)
        options = {"mask": make_mask(mask, S_q, S_k, dtype), "is_causal": mask == "causal"}
        out, forward, backward = run(backend, query, key, **options)
        assert out.shape == query.shape and out.dtype == dtype, case
        if memory != "BHSD" and head_dim % 8 == 0:
            out.transpose(1, 2).view(B, S_q, -1)
        if backend == "math":
            assert not forward.kernels and not backward.kernels
            continue
        assert len(forward.kernels) == len(backward.kernels) == 1, case
        if head_dim % 8 or S_k % 8 or (backend == "efficient_attention" and key_heads != H):
            continue  # These masks are padded or expanded.
        copies = {"bool": 1, "bool rows": 1, "float32": int(dtype != F32)}.get(mask, 0)
        assert len(forward.copies) == copies, f"{case}: {forward.copies}"
        if backward.kernels == ["efficient"] and backend != "efficient_attention":
            # The backward uses another kernel than the forward. It expands heads, and needs out in a certain layout.
            copies += int(memory == "BHSD") + 2 * int(key_heads != H)
        assert len(backward.copies) == copies, f"{case}: {backward.copies}"


def test_unsupported_backward_uses_another_backend(run):
    def kernels(backend, *head_dims):
        tensors = [make("BSHD", H, 37, head_dim, BF16) for head_dim in head_dims]
        *_, backward = run(backend, tensors[0], tensors[0], tensors[-1])
        return backward.kernels

    flash = {128: ["flash"], 192: ["flash"], 200: ["efficient"], 210: [], 250: ["flash"], 256: ["flash"]}
    assert {head_dim: kernels("flash_attention", head_dim) for head_dim in flash} == flash
    cudnn = {64: ["cudnn"], 128: ["cudnn"], 192: ["efficient"], 256: ["efficient"]}
    assert {head_dim: kernels("cudnn_attention", head_dim) for head_dim in cudnn} == cudnn
    assert kernels("cudnn_attention", 128, 64) == ["efficient"]
