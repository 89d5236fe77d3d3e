"""Attention over every mesh and transport, for a table of calls and any call, equals SDPA on one device."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import para_core
from para_core import Segment, SequenceLayout, UnifiedAttnMode, unified_attention
from para_core.attention import swap
from para_core.option_values import RING_STYLES, ROTATE_METHODS
from tests.attention.cases import (
    BALANCED,
    CAUSAL,
    GQA,
    IMAGE_FIRST,
    MESHES,
    TEXT_FIRST,
    Case,
    Mask,
    attend,
    check_all,
    cpu_mesh,
    own_attention,
)
from tests.attention.one_device import make_qkv, relative_error

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
TEXT, IMAGE = (("text", 5, True),), (("image", 11, False),)
MANY = (("text", 3, True), ("image", 9, False), ("more text", 2, True), ("video", 6, False, True))
NEAR = torch.ones(12, 12, dtype=torch.bool).tril(3)

CALLS = [
    # Uneven sizes, fewer tokens or heads than ranks, even sizes. A negative scale with is_causal gives NaN in torch.
    Case(13, 3),
    Case(13, 3, options={"scale": 1.7, **CAUSAL}),
    Case(3, 1, options={"scale": -0.3}),
    Case(1, 2, D=5, options=CAUSAL),
    Case(70, 6, D=24),
    # Other lengths of keys, other widths of values, grouped heads.
    Case(13, 3, S_k=5, D_v=20),
    Case(5, 3, S_k=18, D_v=3, options=CAUSAL),
    Case(9, 4, S_k=1, mask=Mask("k")),
    Case(13, 6, H_kv=2, options=GQA),
    Case(13, 4, H_kv=1, D_v=5, options=GQA | CAUSAL),
    Case(H=6, H_kv=3, segments=TEXT_FIRST, options=GQA | CAUSAL),
    # Replicated and balanced segments, and keys with a layout of their own.
    Case(H=4, segments=TEXT_FIRST),
    Case(H=3, segments=IMAGE_FIRST, options=CAUSAL),
    Case(H=1, segments=(("image", 2, False), ("text", 3, True))),  # There are fewer image tokens than ranks.
    Case(H=3, segments=(("text", 4, True), ("image", 0, False)), options=CAUSAL),
    Case(H=3, segments=MANY, options=CAUSAL),
    Case(H=3, segments=BALANCED, options=CAUSAL),
    Case(H=4, segments=(*BALANCED, *BALANCED), key_segments=(("plain", 9, False),), options=CAUSAL),
    Case(H=3, segments=IMAGE, key_segments=TEXT),
    Case(H=3, segments=TEXT, key_segments=IMAGE, mask=Mask("hqk", F32)),
    Case(H=3, segments=IMAGE_FIRST, key_segments=TEXT_FIRST, mask=Mask("qk"), options=CAUSAL),
    # Masks of all or of a rank's rows or columns.
    Case(13, 4, mask=Mask("bk")),
    Case(13, 4, S_k=7, mask=Mask("bqk", rows="local")),
    Case(13, 3, mask=Mask("bhqk", F32, columns="local"), options=CAUSAL),
    Case(H=4, segments=TEXT_FIRST, mask=Mask("bk", F32)),
    Case(H=3, segments=IMAGE_FIRST, mask=Mask("bhqk", columns="local")),
    Case(H=3, segments=BALANCED, mask=Mask("bhqk", F32, "local"), options=CAUSAL),
    Case(13, 3, mask=Mask("h", F32)),
    # Rows that see no key, and rows in which a large number hides all keys, or all but some.
    Case(13, 3, mask=Mask("qk", share=1.0)),
    Case(H=3, segments=TEXT_FIRST, mask=Mask("bhqk", F32, share=1.0)),
    *[Case(13, 4, mask=Mask(dims, F32, low=(torch.finfo(F32).min,))) for dims in ("bk", "q")],
    Case(13, 4, mask=Mask("bqk", F32, share=0.9, low=(-1e9, -2e9))),  # Of two levels only the higher one counts.
    Case(13, 4, mask=Mask("bk", F32, share=0.95, low=(-1e9,)), options=CAUSAL),  # It begins with nine hidden keys.
    *[Case(70, 4, dtype=F64, mask=Mask("bqk", of_mask, low=(-1e9, -1e4, -20.0))) for of_mask in (F64, F32, BF16)],
    Case(13, 4, dtype=F64, mask=Mask("bqk", F32, share=0.9, low=(-1e4,)), options=CAUSAL),
    Case(13, 4, dtype=BF16, mask=Mask("bqk", BF16, low=(torch.finfo(BF16).min,))),
    # Tensors as they may lie in memory.
    *[Case(13, 3, memory=memory, options=CAUSAL) for memory in ("transposed", "strided", "expanded", "3-D", "5-D")],
    # Without a sample, a token, a head.
    Case(13, 3, B=0, mask=Mask("bhqk"), options=CAUSAL),
    Case(0, 3, mask=Mask("k")),
    Case(0, 3, S_k=5),
    Case(13, 0),
    # Other dtypes.
    *[Case(13, 3, dtype=dtype, options=CAUSAL) for dtype in (BF16, F16, F64)],
    *[Case(H=4, segments=IMAGE_FIRST, D_v=5, dtype=dtype, mask=Mask("bqk", dtype)) for dtype in (BF16, F16, F64)],
    Case(5, 1, B=1, D_v=5, dtype=BF16, mask=Mask("bqk", F32)),
    Case(13, 3, autocast=True),
    # Minimal forms of failures that a search found. Here the math backend gets a mask and is_causal together.
    Case(13, 1, D=1, D_v=2, mask=Mask("k"), options=CAUSAL),
    # The columns of a mask were wrong after Ulysses had moved replicated tokens after the others.
    Case(H=3, segments=TEXT_FIRST, mask=Mask("bhqk", F32, "local")),
    # Rows see the keys of one rank only, so their lse on other ranks is -inf.
    Case(3, 1, mask=Mask("qk", share=0.9)),
    # The mask has one token and one column, so its heads form a line that is not dense.
    Case(H=4, segments=(("part", 1, False, True),), mask=Mask("q", rows="local"), options=CAUSAL),
]


def is_readable_alone(case, ranks):
    """Return whether ranks infer the mask extents alone: no local dim has size 1 or is whole on one rank only."""
    if case.mask is None:
        return True
    return not any(
        (extent == "local" and 1 in layout.sizes()) or len({size == layout.total for size in layout.sizes()}) == 2
        for extent, layout in zip((case.mask.rows, case.mask.columns), case.layouts(ranks), strict=True)
    )


def is_fit(case, ranks, options, learns):
    if "attn_func" in options and (case.dtype in (BF16, F16) or case.autocast):
        return False  # In 16 bits the formula is less exact than SDPA.
    if options.get("backend") == "flash" and case.D_v not in (None, case.D):
        return False
    if learns and (case.dtype != F32 or case.autocast or 0 in case.qkv()[0].shape):
        return False
    if learns and case.mask is not None and case.mask.dtype not in (torch.bool, F32):
        return False
    if case.dtype == F16 and case.mask is not None and case.mask.low != Mask.low:
        return False  # In float16 the numbers that hide a key are -inf.
    return not options.get("assume_equal") or is_readable_alone(case, ranks)


def _ways():
    """Return rows (ring, ulysses, options of the mode): each transport once, and in the long run on every mesh."""
    own = {"attn_func": own_attention}
    rows = [(2, 1, {"assume_equal": True}), (1, 3, {}), (2, 2, {}), (2, 2, own)]
    rows += [(3, 1, {"rotate_method": name}) for name in RING_STYLES]
    grids = [name for name, style in RING_STYLES.items() if style.grid]
    rows += [(4, 1, {"rotate_method": name, **more}) for name in grids for more in ({}, own)]
    others = [(*mesh, {"rotate_method": name, **more}) for mesh in MESHES for name in RING_STYLES for more in ({}, own)]
    return [*rows, *[pytest.param(*row, marks=pytest.mark.long) for row in others]]


ways = pytest.mark.parametrize(("ring", "ulysses", "options"), _ways())


def calls_of(ring, ulysses, options, learns):
    """Return the calls that a way takes: every other one, or every third with gradients. The ways begin differently."""
    fit = [case for case in CALLS if is_fit(case, ring * ulysses, options, learns)]
    assert len(fit) > 30
    start = ring + 2 * ulysses + len(options) + ROTATE_METHODS.index(options.get("rotate_method", ROTATE_METHODS[0]))
    step = 3 if learns else 2
    return fit[start % step :: step]


@ways
def test_calls_equal_one_device(rank_pool, ring, ulysses, options):
    check_all(rank_pool, calls_of(ring, ulysses, options, learns=False), ring, ulysses, **options)


def segments():
    kind = st.sampled_from([(False, False), (True, False), (False, True)])
    segment = st.tuples(st.just("part"), st.integers(0, 9), kind).map(lambda parts: (*parts[:2], *parts[2]))
    return st.lists(segment, min_size=1, max_size=3).map(tuple)


def masks():
    return st.builds(
        Mask,
        dims=st.sampled_from(["qk", "k", "q", "bk", "bqk", "bhqk", "hqk", "hk", "h", ""]),
        dtype=st.sampled_from([torch.bool, F32]),
        rows=st.sampled_from(["global", "local"]),
        columns=st.sampled_from(["global", "local"]),
        share=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
        low=st.sampled_from([Mask.low, (-1e9, *Mask.low)]),
    ).filter(lambda mask: "global" in (mask.rows, mask.columns))


@st.composite
def drawn_cases(draw):
    H_kv = draw(st.integers(1, 4))
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    options = {"is_causal": draw(st.booleans()), "scale": draw(st.sampled_from([None, 0.5]))}
    return Case(
        B=draw(st.integers(0, 2)),
        H=H_kv * groups,
        H_kv=H_kv,
        D=draw(st.integers(1, 9)),
        D_v=draw(st.none() | st.integers(1, 9)),
        dtype=draw(st.sampled_from([F32, F32, F64, BF16, F16])),
        segments=draw(segments()),
        # There is at least one key, because SDPA's own result without keys depends on the backend.
        key_segments=draw(st.none() | segments().filter(lambda parts: sum(part[1] for part in parts) > 0)),
        mask=draw(st.none() | masks()),
        options=options | ({"enable_gqa": True} if groups > 1 else {}),
        memory=draw(st.sampled_from(["contiguous", "transposed", "strided"])),
    )


drawn_options = st.fixed_dictionaries(
    {"rotate_method": st.sampled_from(ROTATE_METHODS), "assume_equal": st.booleans()},
    optional={"attn_func": st.just(own_attention), "backend": st.sampled_from(["math", "flash"])},
)


# The pool outlives an example, because no state of a job is left when the next one starts.
@settings(suppress_health_check=[*HealthCheck])
@given(
    mesh=st.sampled_from(MESHES),
    options=drawn_options,
    learns=st.booleans(),
    cases=st.lists(drawn_cases(), min_size=1, max_size=8),
)
def test_any_call_on_any_mesh_equals_one_device(rank_pool, mesh, options, learns, cases):
    cases = [case for case in cases if is_fit(case, mesh[0] * mesh[1], options, learns)]
    assume(cases)
    check_all(rank_pool, cases, *mesh, learns=learns, **options)


COMPILED = [
    Case(13, 6, H_kv=2, options=GQA),
    Case(H=3, segments=BALANCED, key_segments=TEXT_FIRST, mask=Mask("bhqk", F32), options=CAUSAL),
    Case(13, 3, mask=Mask("bhqk", rows="local")),
    Case(1, 2),  # One rank has no tokens.
]


@pytest.mark.parametrize(
    ("ring", "ulysses", "learns", "options"),
    [(1, 3, False, {}), (1, 2, False, {"attn_func": own_attention}), (2, 1, True, {})],
)
def test_a_call_in_one_graph_equals_one_device(rank_pool, ring, ulysses, learns, options):
    cases = [case for case in COMPILED if "attn_func" not in options or not case.options.get("is_causal")]
    check_all(rank_pool, cases, ring, ulysses, learns=learns, compile_with="aot_eager", **options)


def attend_around_a_ring(*qkv):
    with torch.no_grad(), UnifiedAttnMode(cpu_mesh(torch.distributed.get_world_size(), 1)) as cp:
        return cp.gather(F.scaled_dot_product_attention(*[cp.shard(x, dim=2) for x in qkv]), dim=2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_mean_in_16_bits_is_exact_beyond_its_sums(rank_pool, dtype):
    # Queries of zero weigh all keys equally, and all keys of a rank have one value: 1 plus a number of last bits. The
    # mean of these bits over all four ranks is a whole number of bits. Over two or three ranks it is not.
    bits = torch.randint(0, 64, (4, 256), generator=torch.Generator().manual_seed(0))
    bits[-1] -= bits.sum(0) % 4
    values, expected = (1 + x * torch.finfo(dtype).eps for x in (bits, bits.sum(0) // 4))
    q, k = (x.to(dtype) for x in (torch.zeros(1, 1, 32, 256), torch.randn(1, 1, 32, 256)))
    v = values.repeat_interleave(8, dim=0)[None, None].to(dtype)
    for out in rank_pool.run(attend_around_a_ring, 4, q, k, v):
        assert torch.equal(out, expected.to(dtype).expand_as(v))


def attend_by_kernels(*args):
    """Attend with the exchange for heads that a GPU has, by the reference of its kernel."""
    with mock.patch.object(swap, "takes_kernels", lambda _: not torch.is_grad_enabled()):
        return attend(*args)


@pytest.mark.parametrize("learns", [False, True], ids=["forward", "gradient"])
def test_the_exchange_by_kernels_equals_one_device(rank_pool, learns):
    cases = [case for case in CALLS if case.mask is None and is_fit(case, 2, {}, learns)]
    check_all(rank_pool, cases, 1, 2, learns=learns, run=attend_by_kernels)


def attend_in_functions(ring, ulysses):
    """Return the results of functions and modes, whose arguments are those of SDPA, and with layouts and own rows."""
    mesh = cpu_mesh(ring, ulysses)
    layout = SequenceLayout((Segment("text", 4, replicated=True), Segment("image", 8)), mesh.size())
    parts = [x.chunk(mesh.size(), dim=-2)[mesh.get_rank()] for x in make_qkv(12, 4)]
    names = ["unified", *(["ring"] if ulysses == 1 else []), *(["ulysses"] if ring == 1 else [])]
    outs = []
    for name in names:
        outs.append(getattr(para_core, f"{name}_attention")(*parts, None, 0.0, True, 0.5, True, mesh=mesh))
        with getattr(para_core, f"{name.capitalize()}AttnMode")(mesh):
            outs.append(F.scaled_dot_product_attention(*parts, None, 0.0, True, scale=0.5))
    rank, ranks = mesh.get_rank(), mesh.size()
    own = lambda x: torch.cat([x[..., :4, :], x[..., 4:, :].chunk(ranks, dim=-2)[rank]], dim=-2)  # noqa: E731
    q, k, v = make_qkv(12, 4)
    options = {"attn_mask": own(NEAR), "mesh": mesh, "layout": layout}
    keys = [(own(k), own(v), None), (k, v, SequenceLayout((Segment("image", 12, replicated=True),), ranks))]
    return outs, [unified_attention(own(q), k, v, key_layout=key_layout, **options) for k, v, key_layout in keys]


@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (1, 2), (2, 2)])
def test_functional_forms_take_sdpas_own_signature(rank_pool, ring, ulysses):
    ranks = ring * ulysses
    masked = F.scaled_dot_product_attention(*make_qkv(12, 4), NEAR)
    causal = F.scaled_dot_product_attention(*make_qkv(12, 4), is_causal=True, scale=0.5)
    for rank, (outs, with_layouts) in enumerate(rank_pool.run(attend_in_functions, ranks, ring, ulysses)):
        assert max(relative_error(out, causal.chunk(ranks, dim=2)[rank]) for out in outs) < 1e-5
        expected = torch.cat([masked[:, :, :4], masked[:, :, 4:].chunk(ranks, dim=2)[rank]], dim=2)
        assert max(relative_error(out, expected) for out in with_layouts) < 1e-5
