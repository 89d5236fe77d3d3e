"""Kernel of attention forward, which can continue a partial result.

:mod:`para_core.kernels.attention_launch` launches it, after :meth:`KernelCall.prepare` has brought the
arguments into the form that the kernel reads; :mod:`para_core.kernels.attention_reference` is the reference.
Tests: tests/kernels/test_attention.py for the numbers, in Triton's interpreter (marked ``slow``: not in
``make check``), and tests/kernels/test_compiled.py for registers and spills on each GPU. ``make gpu-check``
times it on a GPU: run it before and after a change.

One program computes BLOCK_M queries of one head. It visits the keys in tiles of BLOCK_N with an online
softmax (FlashAttention-2, arXiv:2307.08691). The softmax has base 2: scores are multiplied by log2(e), so
that a weight takes one ``ex2`` instruction.

- Tiles in which every query sees every key come first and need no comparisons of positions. Tiles at a causal
  diagonal, at the end of the keys or at the end of a range come last. Tiles that no query sees are not
  visited.
- ``so_far`` initializes the online softmax: its out is the accumulator, its lse the maximum, and the weights
  sum to 1. So a ring step is one launch that reads and writes the float32 partial result once.
- The sizes of Triton's blocks are powers of 2. Any other head dim is split into two blocks (96 = 64 + 32),
  which costs a quarter less than one block of 128.
- A bool mask is read as bytes, or as bits with 32 keys per word. A mask that is equal for all queries is read
  once per tile.
- With EIGHT_BITS (:mod:`para_core.kernels.attention_int8`), which is not exact, keys are int8, queries are
  rounded here, and the mean that was subtracted from the keys is added back to lse.
"""

from __future__ import annotations

import triton
import triton.language as tl

from para_core.kernels.eight_bits import to_int8

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Numbers of a float mask are raised to at least this one: finfo.min times log2(e) would be -inf, so a row
# that has only such numbers would see no key.
_LOWEST = tl.constexpr(-2.0e38)


@triton.jit
def _tiles(
    acc, acc_rest, total, peak, q, q_rest, k_head, k_scales, v_head, mask_head, step_k, step_v, step_mask_rows,
    step_mask_keys, rows, num_queries, first, last, shift, row_scale,
    D: tl.constexpr, D_REST: tl.constexpr, D_END: tl.constexpr, V: tl.constexpr, V_REST: tl.constexpr,
    V_END: tl.constexpr, MASK: tl.constexpr, MASK_HAS_ROWS: tl.constexpr, CAUSAL: tl.constexpr,
    IN_RANGES: tl.constexpr, NEGATIVE: tl.constexpr, EIGHT_BITS: tl.constexpr, COMPARED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add keys ``first`` … ``last - 1`` to the online softmax, and return its state ``(acc, acc_rest, total,
    peak)``.

    Of each query, ``acc`` and ``acc_rest`` are the weighted sums of values (the dims of the two blocks),
    ``total`` is the sum of weights, and ``peak`` the largest score so far, to which weights are relative,
    times log2(e); -inf before a query has seen a key. The arguments are those of :func:`attention_kernel`,
    offset to the head.

    row_scale: The scale of the scores, not negative: a number; with EIGHT_BITS ``[BLOCK_M]``, which includes
        the scale of each rounded query.
    COMPARED: whether a tile may contain keys that some queries must not see, so that positions must be
        compared.
    """
    columns = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, D)
    value_dims = tl.arange(0, V)
    for start in range(first, last, BLOCK_N):
        keys = start + columns
        inside = keys < last
        k_tile = k_head + tl.cast(start, tl.int64) * step_k + columns[:, None] * step_k
        v_tile = v_head + tl.cast(start, tl.int64) * step_v + columns[:, None] * step_v
        k = _load_block(k_tile + dims[None, :], inside[:, None], dims[None, :] < D_END, COMPARED, D_END < D)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if D_REST > 0:
            more = D + tl.arange(0, D_REST)
            k = _load_block(
                k_tile + more[None, :], inside[:, None], more[None, :] < D_END, COMPARED, D_END < D + D_REST
            )
            # Pass out_dtype, because Triton 3.6 otherwise assumes a float32 result, also for integers.
            scores = tl.dot(q_rest, tl.trans(k), scores, input_precision="ieee", out_dtype=scores.dtype)
        scale = row_scale
        if EIGHT_BITS:
            scores = (
                scores.to(tl.float32) * _load_block(k_scales + keys, inside, inside, COMPARED, False)[None, :]
            )
            scale = row_scale[:, None]
        if NEGATIVE:
            scores = -scores

        if MASK == "none" and not COMPARED:
            # Every query sees every key, so no score is -inf, and the scale, which is not negative
            # (NEGATIVE), can be applied to the maximum and in the exponent.
            new_peak = tl.maximum(peak, tl.max(scores, 1) * row_scale)
            weights = tl.exp2(scores * scale - new_peak[:, None])
            shrink = tl.exp2(peak - new_peak)
        else:
            scores = scores * scale
            if MASK != "none":
                if MASK == "bits":
                    mask_tile = _bits(
                        mask_head, step_mask_rows, step_mask_keys, rows, num_queries, start, last,
                        MASK_HAS_ROWS, IN_RANGES, BLOCK_N,
                    )  # fmt: skip
                else:
                    at = (
                        mask_head
                        + tl.cast(start, tl.int64) * step_mask_keys
                        + (columns * step_mask_keys)[None, :]
                    )
                    if MASK_HAS_ROWS:
                        at += rows.to(tl.int64)[:, None] * step_mask_rows
                        exists = inside[None, :] & (rows < num_queries)[:, None]
                    else:
                        exists = inside[None, :]
                    mask_tile = tl.load(at, mask=exists, other=0)
                if MASK != "float":
                    scores = tl.where(mask_tile != 0, scores, float("-inf"))
                else:
                    mask_tile = mask_tile.to(tl.float32)
                    # By default, tl.maximum returns the other number for NaN, and NaN would hide a key.
                    bias = tl.maximum(mask_tile, _LOWEST, propagate_nan=tl.PropagateNan.ALL) * LOG2_E
                    scores += tl.where(mask_tile == float("-inf"), float("-inf"), bias)
            if COMPARED:
                visible = inside[None, :]
                if CAUSAL:
                    visible = visible & (keys[None, :] <= rows[:, None] + shift)
                scores = tl.where(visible, scores, float("-inf"))
            # These maxima skip NaN. The weight of such a score is NaN nevertheless, and so is the row's sum.
            new_peak = tl.maximum(peak, tl.max(scores, 1))
            # If a row has seen no key yet, -inf minus -inf would be NaN, so use 0 as its origin.
            origin = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            weights = tl.exp2(scores - origin[:, None])
            shrink = tl.exp2(peak - origin)

        total = total * shrink + tl.sum(weights, 1)
        v = _load_block(
            v_tile + value_dims[None, :], inside[:, None], value_dims[None, :] < V_END, COMPARED, V_END < V
        )
        weights = weights.to(v.dtype)
        acc = tl.dot(weights, v, acc * shrink[:, None], input_precision="ieee")
        if V_REST > 0:
            more_v = V + tl.arange(0, V_REST)
            v = _load_block(
                v_tile + more_v[None, :],
                inside[:, None],
                more_v[None, :] < V_END,
                COMPARED,
                V_END < V + V_REST,
            )
            acc_rest = tl.dot(weights, v, acc_rest * shrink[:, None], input_precision="ieee")
        peak = new_peak
    return acc, acc_rest, total, peak


@triton.jit
def _round_queries(x, x_rest, mean, score_scale, D: tl.constexpr, D_REST: tl.constexpr, D_END: tl.constexpr):
    """Round queries to int8.

    Returns the two blocks of rounded queries, the scale of each query's scores ``[BLOCK_M]``, and the number
    that each query's scores lack because ``mean`` was subtracted from the keys.
    """
    dims = tl.arange(0, D)
    x = x.to(tl.float32)
    largest = tl.max(tl.abs(x), 1)
    lost = tl.sum(x * tl.load(mean + dims, mask=dims < D_END, other=0.0)[None, :], 1)
    if D_REST > 0:
        more = D + tl.arange(0, D_REST)
        x_rest = x_rest.to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(x_rest), 1))
        lost += tl.sum(x_rest * tl.load(mean + more, mask=more < D_END, other=0.0)[None, :], 1)
    # An integer cannot be NaN. If a row is not finite, ``lost`` is infinite or NaN, so 0 · lost is NaN, and
    # adding it makes the row's scale NaN.
    step = tl.maximum(largest, 1e-30) / 127 + 0.0 * lost
    x = to_int8(x / step[:, None])
    if D_REST > 0:
        x_rest = to_int8(x_rest / step[:, None])
    return x, x_rest, step * score_scale, lost * score_scale


@triton.jit
def _bits(
    words, step_rows, step_words, rows, num_queries, start, last,
    HAS_ROWS: tl.constexpr, ANY_START: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return a tile of a mask of bits, keys ``start`` to ``start + BLOCK_N - 1``, as 0 or 1: ``[rows or 1,
    BLOCK_N]``.

    Groups of 32 keys that begin at ``last`` or later load nothing, and give 0. BLOCK_N must be a multiple of 32.

    HAS_ROWS: whether the mask has a row for each query; otherwise its only row is that of all queries.
    ANY_START: whether ``start`` may be other than a multiple of 32. Each word of 32 keys is then loaded
    twice,
        otherwise once.
    """
    groups = tl.arange(0, BLOCK_N // 32)
    at = words + (start // 32 + groups).to(tl.int64)[None, :] * step_words
    exists = (start + 32 * groups < last)[None, :]
    if HAS_ROWS:
        at += rows.to(tl.int64)[:, None] * step_rows
        exists = exists & (rows < num_queries)[:, None]
    word = tl.load(at, mask=exists, other=0)
    if ANY_START:
        # If start is not a multiple of 32, the last keys of a group are in the next word.
        exists = exists & ((start // 32 + groups + 1) * 32 < last)[None, :]
        next_word = tl.load(at + step_words, mask=exists, other=0)
        both = (next_word.to(tl.int64) << 32) | (word.to(tl.int64) & 0xFFFFFFFF)
        word = (both >> (start % 32)).to(tl.int32)
    bits = (word[:, :, None] >> tl.arange(0, 32)[None, None, :]) & 1
    return tl.reshape(bits, [bits.shape[0], BLOCK_N])


@triton.jit
def _load_block(at, row_exists, dim_exists, SOME_ROWS: tl.constexpr, SOME_DIMS: tl.constexpr):
    """Load a block, with 0 outside the tensor. SOME_ROWS, SOME_DIMS: whether rows or dims may be outside."""
    if SOME_ROWS and SOME_DIMS:
        block = tl.load(at, mask=row_exists & dim_exists, other=0.0)
    elif SOME_ROWS:
        block = tl.load(at, mask=row_exists, other=0.0)
    elif SOME_DIMS:
        block = tl.load(at, mask=dim_exists, other=0.0)
    else:
        block = tl.load(at)
    return block


# These differ between ranks and between the steps of a ring. Triton would otherwise compile the kernel again
# if one of them is 1 or a multiple of 16, on one rank alone, while the others wait for it.
@triton.jit(do_not_specialize=["num_queries", "num_keys", "num_ranges", "shift"])
def attention_kernel(
    query, key, value, mask, ranges, out_so_far, lse_so_far, key_scales, key_mean, out, lse, step_qb, step_qh, step_q,
    step_kb, step_kh, step_k, step_vb, step_vh, step_v, step_mb, step_mh, step_mask_rows, step_mask_keys, step_rb,
    step_sb, step_sh, step_s, step_ob, step_oh, step_o, num_queries, num_keys, num_ranges, shift, score_scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_REST: tl.constexpr, D_END: tl.constexpr,
    V: tl.constexpr, V_REST: tl.constexpr, V_END: tl.constexpr, MASK: tl.constexpr, MASK_HAS_ROWS: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_RANGES: tl.constexpr, MANY_RANGES: tl.constexpr, CONTINUES: tl.constexpr,
    NEGATIVE: tl.constexpr, EIGHT_BITS: tl.constexpr, UNIT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_M queries of one head per program.

    ``step_*`` are strides in elements; those of query, key, value, out_so_far and out are in units of UNIT
    elements. Last dims of these five have stride 1. The D_END dims of query and key are read in two blocks of
    D and D_REST dims, the V_END dims of value in blocks of V and V_REST. With CAUSAL, query i sees keys up to
    i + shift. score_scale includes log2(e) and is not negative; with NEGATIVE the scale is ``-score_scale``.

    The launch ensures, and the kernel does not check:

    - ``ranges`` ``[B or 1, R, 2]`` is int32, its last two dims contiguous. The ranges of a sample are
      ascending and disjoint (:func:`~para_core.kernels.attention_reference.attention` demands it of the
      user): a key in two ranges would count twice, where the reference takes the union.
    - ``lse`` and ``lse_so_far`` are float32 ``[B, H, S_q]``, contiguous, so the same offset is used for both.
    - ``out_so_far`` is finite also in rows whose ``lse_so_far`` is -inf, where it is multiplied by 0.
    - MASK is ``"none"``; ``"bool"``, bytes; ``"float"``, numbers of up to 32 bits; or ``"bits"``, int32 words
      of 32 keys, for which BLOCK_N is a multiple of 32. With MASK_HAS_ROWS, ``mask`` has a row for each
      query.
    - With EIGHT_BITS, key_scales is ``[B, H_kv, S_k]`` and key_mean ``[B, H_kv, D_END]``, float32, contiguous.
    - BLOCK_N keys of a head, and its values, lie within 2³¹ elements: offsets inside a tile are int32, those
      of tiles int64. For the columns of a mask, nothing checks it.
    """
    num_tiles = tl.cdiv(num_queries, BLOCK_M)
    tile = tl.program_id(0) % num_tiles
    if CAUSAL:
        # Programs with the most keys start first, so that short programs fill the gaps at the end.
        tile = num_tiles - 1 - tile
    head = tl.program_id(0) // num_tiles
    sample = (head // HEADS).to(tl.int64)
    head = (head % HEADS).to(tl.int64)

    start_m = tile * BLOCK_M
    rows = start_m + tl.arange(0, BLOCK_M)
    row_exists = (rows < num_queries)[:, None]

    value_dims = tl.arange(0, V)
    # tl.arange refuses an empty range, so without a second block this is any range, which nothing reads.
    more_v = V + tl.arange(0, V_REST if V_REST > 0 else V)
    lse_rows = (sample * HEADS + head) * num_queries + rows
    # Load the partial result before the queries, so that both can pass through the same shared memory, one
    # after the other. Loaded after the queries, the partial result would need shared memory of its own.
    if CONTINUES:
        peak = tl.load(lse_so_far + lse_rows, mask=rows < num_queries, other=float("-inf")) * LOG2_E
        total = tl.where(peak == float("-inf"), 0.0, 1.0)
        s_rows = out_so_far + (sample * step_sb + head * step_sh + rows.to(tl.int64)[:, None] * step_s) * UNIT
        acc = _load_block(
            s_rows + value_dims[None, :], row_exists, value_dims[None, :] < V_END, True, V_END < V
        )
        acc = acc * total[:, None]
        acc_rest = acc
        if V_REST > 0:
            acc_rest = _load_block(
                s_rows + more_v[None, :], row_exists, more_v[None, :] < V_END, True, V_END < V + V_REST
            )
            acc_rest = acc_rest * total[:, None]
    else:
        peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, V], tl.float32)
        acc_rest = acc
        if V_REST > 0:
            acc_rest = tl.zeros([BLOCK_M, V_REST], tl.float32)

    dims = tl.arange(0, D)
    q_rows = query + (sample * step_qb + head * step_qh + rows.to(tl.int64)[:, None] * step_q) * UNIT
    q = _load_block(q_rows + dims[None, :], row_exists, dims[None, :] < D_END, True, D_END < D)
    q_rest = q
    if D_REST > 0:
        more = D + tl.arange(0, D_REST)
        q_rest = _load_block(
            q_rows + more[None, :], row_exists, more[None, :] < D_END, True, D_END < D + D_REST
        )
    key_head = head // GROUP
    k_head = key + (sample * step_kb + key_head * step_kh) * UNIT
    k_scales = key_scales
    row_scale = score_scale
    lost = 0.0
    if EIGHT_BITS:
        of_head = sample * (HEADS // GROUP) + key_head
        k_scales = key_scales + of_head * num_keys
        q, q_rest, row_scale, lost = _round_queries(
            q, q_rest, key_mean + of_head * D_END, score_scale, D, D_REST, D_END
        )
    if NEGATIVE:
        lost = -lost
    v_head = value + (sample * step_vb + key_head * step_vh) * UNIT
    mask_head = mask
    if MASK != "none":
        mask_head = mask + sample * step_mb + head * step_mh

    if CONTINUES:
        peak -= lost

    # If there are no ranges, a single range holds all keys. For a single range the number of iterations is
    # the constant 1, so no loop is left at run time, because a loop around those over tiles takes registers.
    for index in range(num_ranges if MANY_RANGES else 1):
        first = 0
        last = num_keys
        if HAS_RANGES:
            first = tl.maximum(tl.load(ranges + sample * step_rb + 2 * index), 0)
            last = tl.minimum(tl.load(ranges + sample * step_rb + 2 * index + 1), num_keys)
        seen_by_all = last
        if CAUSAL:
            seen_by_all = tl.minimum(last, start_m + shift + 1)
            last = tl.minimum(last, start_m + BLOCK_M + shift)
        plain = first + tl.maximum(seen_by_all - first, 0) // BLOCK_N * BLOCK_N
        for COMPARED in tl.static_range(2):
            acc, acc_rest, total, peak = _tiles(
                acc, acc_rest, total, peak, q, q_rest, k_head, k_scales, v_head, mask_head, step_k * UNIT,
                step_v * UNIT, step_mask_rows, step_mask_keys, rows, num_queries, plain if COMPARED else first,
                last if COMPARED else plain, shift, row_scale, D, D_REST, D_END, V, V_REST, V_END, MASK,
                MASK_HAS_ROWS, CAUSAL, HAS_RANGES, NEGATIVE, EIGHT_BITS, COMPARED, BLOCK_N,
            )  # fmt: skip

    # A row that sees no key has sums of 0, which are divided by 1 instead of 0.
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    o_rows = out + (sample * step_ob + head * step_oh + rows.to(tl.int64)[:, None] * step_o) * UNIT
    acc = acc / total[:, None]
    tl.store(
        o_rows + value_dims[None, :],
        acc.to(out.dtype.element_ty),
        mask=row_exists & (value_dims[None, :] < V_END),
    )
    if V_REST > 0:
        acc_rest = acc_rest / total[:, None]
        tl.store(
            o_rows + more_v[None, :],
            acc_rest.to(out.dtype.element_ty),
            mask=row_exists & (more_v[None, :] < V_END),
        )
    lse_out = tl.where(empty, float("-inf"), (peak + tl.log2(total) + lost) * LN_2)
    tl.store(lse + lse_rows, lse_out, mask=rows < num_queries)
