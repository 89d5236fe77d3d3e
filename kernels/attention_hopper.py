"""Attention forward on Hopper (sm_90), with tiles loaded by the copy engine (TMA).

**It has not run on a device**, so it is never used by default: ``python -m para_core.kernels.tune --hopper`` tries it
on the user's GPU, and keeps it if it gives the same results as the portable kernel (:mod:`para_core.kernels.attention`)
and is faster. It supports the calls that matter for long sequences: 16-bit dtypes, head dims 64, 128 and 256, no mask,
at most one key range per sample, causal or not, from scratch or continuing a partial result.

- The kernel describes its head's queries, keys and values to the copy engine. One thread requests a tile, so no other
  thread computes addresses, and loads in flight take no registers. Rows after the last visible key are read as zeros.
- With SPECIALIZED, some warps request tiles, and two groups of four other warps compute, each for half of the queries.
"""

from __future__ import annotations

from contextvars import copy_context
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from para_core.kernels.attention_configs import HOPPER, Config, KernelCall
from para_core.kernels.attention_kernel import LN_2, LOG2_E

DTYPES = (torch.float16, torch.bfloat16)
# The copy engine requires that addresses and row strides are multiples of this number of bytes.
_ALIGNED = 16


@triton.jit
def _tiles(
    acc, total, peak, q, keys, values, rows, first, last, shift, score_scale,
    CAUSAL: tl.constexpr, COMPARED: tl.constexpr, BLOCK_N: tl.constexpr, SPECIALIZED: tl.constexpr,
):  # fmt: skip
    """Add keys ``first`` … ``last - 1`` to the online softmax, and return its state ``(acc, total, peak)``.

    COMPARED: whether a tile may contain keys that some queries must not see, so that positions must be compared.
    """
    columns = tl.arange(0, BLOCK_N)
    for start in tl.range(first, last, BLOCK_N, warp_specialize=SPECIALIZED):
        scores = tl.dot(q, tl.trans(keys.load([start, 0])))
        if COMPARED:
            visible = (start + columns < last)[None, :]
            if CAUSAL:
                visible = visible & ((start + columns)[None, :] <= rows[:, None] + shift)
            scores = tl.where(visible, scores * score_scale, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(scores, 1))
            # If a row has seen no key yet, -inf minus -inf would be NaN, so use 0 as its origin.
            origin = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            weights = tl.exp2(scores - origin[:, None])
            shrink = tl.exp2(peak - origin)
        else:
            new_peak = tl.maximum(peak, tl.max(scores, 1) * score_scale)
            weights = tl.exp2(scores * score_scale - new_peak[:, None])
            shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.sum(weights, 1)
        v = values.load([start, 0])
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None])
        peak = new_peak
    return acc, total, peak


@triton.jit(do_not_specialize=["num_queries", "num_keys", "shift"])
def attention_hopper_kernel(
    query, key, value, ranges, out_so_far, lse_so_far, out, lse, step_qb, step_qh, step_q, step_kb, step_kh, step_k,
    step_vb, step_vh, step_v, step_rb, step_sb, step_sh, step_s, step_ob, step_oh, step_o, num_queries, num_keys,
    shift, score_scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, HAS_RANGE: tl.constexpr,
    ALL_SEEN: tl.constexpr, CONTINUES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SPECIALIZED: tl.constexpr,
):  # fmt: skip
    """Compute the same as the portable ``attention_kernel``. Heads and rows must be aligned to 16 bytes."""
    num_tiles = tl.cdiv(num_queries, BLOCK_M)
    tile = tl.program_id(0) % num_tiles
    if CAUSAL:
        # Programs with the most keys start first, so that short programs fill the gaps at the end.
        tile = num_tiles - 1 - tile
    head = tl.program_id(0) // num_tiles
    sample = (head // HEADS).to(tl.int64)
    head = (head % HEADS).to(tl.int64)
    first = 0
    last = num_keys
    if HAS_RANGE:
        first = tl.maximum(tl.load(ranges + sample * step_rb), 0)
        last = tl.maximum(tl.minimum(tl.load(ranges + sample * step_rb + 1), num_keys), first)

    start_m = tile * BLOCK_M
    rows = start_m + tl.arange(0, BLOCK_M)
    queries = tl.make_tensor_descriptor(
        query + sample * step_qb + head * step_qh, [num_queries, D], [step_q, 1], [BLOCK_M, D]
    )
    q = queries.load([start_m, 0])
    k_head = key + sample * step_kb + head // GROUP * step_kh
    v_head = value + sample * step_vb + head // GROUP * step_vh
    # A descriptor needs at least 1 row. It ends at the last visible key, because rows after it may hold inf, and
    # 0 · inf is NaN.
    num_rows = tl.maximum(last, 1)
    keys = tl.make_tensor_descriptor(k_head, [num_rows, D], [step_k, 1], [BLOCK_N, D])
    values = tl.make_tensor_descriptor(v_head, [num_rows, D], [step_v, 1], [BLOCK_N, D])

    dims = tl.arange(0, D)
    exists = rows < num_queries
    lse_rows = (sample * HEADS + head) * num_queries + rows
    if CONTINUES:
        peak = tl.load(lse_so_far + lse_rows, mask=exists, other=float("-inf")) * LOG2_E
        total = tl.where(peak == float("-inf"), 0.0, 1.0)
        s_rows = out_so_far + sample * step_sb + head * step_sh + rows.to(tl.int64)[:, None] * step_s
        acc = tl.load(s_rows + dims[None, :], mask=exists[:, None], other=0.0) * total[:, None]
    else:
        peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, D], tl.float32)

    plain = last
    if not ALL_SEEN:
        seen_by_all = last
        if CAUSAL:
            seen_by_all = tl.minimum(last, start_m + shift + 1)
            last = tl.minimum(last, start_m + BLOCK_M + shift)
        plain = first
        if not SPECIALIZED:
            plain += tl.maximum(seen_by_all - first, 0) // BLOCK_N * BLOCK_N
    # The compiler can specialize warps only in a kernel with a single loop (Triton 3.6 and 3.9 fail with two).
    for COMPARED in tl.static_range(1 if SPECIALIZED and not ALL_SEEN else 0, 1 if ALL_SEEN else 2):
        acc, total, peak = _tiles(
            acc, total, peak, q, keys, values, rows, plain if COMPARED else first, last if COMPARED else plain, shift,
            score_scale, CAUSAL, COMPARED, BLOCK_N, SPECIALIZED,
        )  # fmt: skip

    # A row that sees no key has sums of 0, which are divided by 1 instead of 0.
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    o_rows = out + sample * step_ob + head * step_oh + rows.to(tl.int64)[:, None] * step_o
    tl.store(o_rows + dims[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=exists[:, None])
    tl.store(lse + lse_rows, tl.where(empty, float("-inf"), (peak + tl.log2(total)) * LN_2), mask=exists)


# -- The following functions run on the host.


def takes(call: KernelCall) -> bool:
    """Whether this kernel supports ``call`` of the portable kernel."""
    query, key, value, ranges = call.query, call.key, call.value, call.key_ranges
    if call.mask is not None or call.scale < 0 or not (ranges is None or ranges.shape[1] == 1) or key.shape[2] == 0:
        return False
    if query.dtype not in DTYPES or query.shape[-1] not in HOPPER or value.shape[-1] != query.shape[-1]:
        return False
    return all(_is_aligned(x) for x in (query, key, value))


def _is_aligned(x: Tensor) -> bool:
    *steps, last = x.stride()
    multiple = _ALIGNED // x.element_size()
    return last == 1 and steps[2] > 0 and all(step % multiple == 0 for step in steps) and x.data_ptr() % _ALIGNED == 0


def launch(config: Config, call: KernelCall, *, out: Tensor, lse: Tensor) -> None:
    """Launch this kernel for a call that :func:`takes` accepts, like :func:`para_core.kernels.attention.launch`."""
    if lse.numel() == 0:
        return
    query, key, value, _, key_ranges, out_so_far, lse_so_far, is_causal, shift, scale = call.prepared()
    batch, heads, num_queries, head_dim = query.shape
    run = partial(
        attention_hopper_kernel[(triton.cdiv(num_queries, config.block_m) * heads * batch,)], query, key, value,
        key_ranges, out_so_far, lse_so_far, out, lse, *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
        0 if key_ranges is None or key_ranges.shape[0] == 1 else key_ranges.stride(0),
        *((0, 0, 0) if out_so_far is None else out_so_far.stride()[:3]), *out.stride()[:3], num_queries, key.shape[2],
        shift, scale * LOG2_E.value,
        HEADS=heads, GROUP=heads // key.shape[1], D=head_dim, CAUSAL=is_causal, HAS_RANGE=key_ranges is not None,
        ALL_SEEN=not is_causal and key_ranges is None and key.shape[2] % config.block_n == 0,
        CONTINUES=out_so_far is not None, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        SPECIALIZED=config.specialized, num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip

    def run_with_allocator() -> None:
        # The descriptors of the copy engine need memory.
        triton.set_allocator(lambda size, alignment, stream: query.new_empty(size, dtype=torch.int8))
        run()

    with torch.cuda.device_of(query):
        # Run in a copy of the context, so that the Triton allocator that the user may have set stays as it is.
        copy_context().run(run_with_allocator)
