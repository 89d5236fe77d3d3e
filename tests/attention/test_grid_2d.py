"""Attention2D, in which the ranks of a ring are rows and columns: its results compared with one device, its traffic and
launches with its docstring.
"""

import doctest
from importlib import import_module

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.pipelines.traffic import CountedAttention, Tokens, bytes_of_attention
from para_core import Segment, SequenceLayout, UnifiedAttnMode
from para_core.adapters.planner.mesh import MeshShape
from para_core.attention.attention_options import AttnOptions
from para_core.attention.grid_shape import choose_grid
from tests.attention import test_exactness, test_gradients
from tests.attention.cases import BALANCED, IMAGE_FIRST, TEXT_FIRST, Case, Mask
from tests.attention.generated_calls import draw, worst_error
from tests.attention.one_device import make_qkv, relative_error
from tests.attention.test_launches import require_at_most
from tests.attention.test_options import by_hand
from tests.attention.test_traffic import Traffic
from tests.launches import count_attention
from tests.rank_pool import heartbeat

TWO_DIMS = {"rotate_method": "2d"}
CAUSAL, GQA = {"is_causal": True}, {"enable_gqa": True}
# The grids are 2 × 2 and 3 × 2, a single column alone and inside Ulysses, and 2 × 2 around Ulysses.
MESHES = [
    (4, 1),
    (2, 2),
    pytest.param(6, 1, marks=pytest.mark.long),
    pytest.param(3, 2, marks=pytest.mark.long),
    pytest.param(5, 1, marks=pytest.mark.long),
    pytest.param(4, 2, marks=pytest.mark.long),
]
on_meshes = pytest.mark.parametrize(("ring", "ulysses"), MESHES)

CASES = [
    Case(13, 3),
    Case(3, 1),  # One rank has no tokens.
    Case(1, 2, options=CAUSAL),
    Case(0, 3),
    Case(13, 3, B=0),
    Case(13, 6, D_v=5, options={"scale": 0.4, **CAUSAL}),
    Case(13, 6, H_kv=2, options=GQA),
    Case(13, 6, H_kv=3, options=GQA | CAUSAL),
    Case(13, 3, S_k=5, mask=Mask("k")),
    Case(5, 3, S_k=18, D_v=20, options=CAUSAL),
    Case(H=4, segments=TEXT_FIRST, mask=Mask("bk", torch.float32)),
    Case(H=3, segments=IMAGE_FIRST, options=CAUSAL),
    Case(H=3, segments=BALANCED, mask=Mask("bhqk", torch.float32, "local"), options=CAUSAL),
    Case(H=3, segments=IMAGE_FIRST, key_segments=(("image", 9, False),), mask=Mask("qk", torch.bool, "global")),
    Case(H=3, segments=(("text", 5, True),), key_segments=(("image", 9, False),), mask=Mask("hqk", torch.float32)),
    Case(13, 4, mask=Mask("bqk", torch.bool, "local")),
    Case(13, 4, mask=Mask("bhqk", torch.float32, "global", "local")),
    Case(13, 3, mask=Mask("qk", torch.float32, share=1.0)),
    Case(70, 6, D=24),
]


@pytest.mark.sample(1)
@on_meshes
def test_attention_in_two_dims_equals_one_device(rank_pool, ring, ulysses):
    sixteen_bits = [
        Case(13, 3, D_v=5, dtype=dtype, mask=mask)
        for dtype in (torch.bfloat16, torch.float16, torch.float64)
        for mask in (None, Mask("k"))
    ]
    sixteen_bits.append(
        Case(5, 1, B=1, D_v=5, dtype=torch.bfloat16)
    )  # There is one row, and an odd number of bytes before its lse.
    test_exactness.check_all(rank_pool, CASES + sixteen_bits, ring, ulysses, mode_options=TWO_DIMS)


@pytest.mark.sample(1)
@on_meshes
def test_gradients_in_two_dims_equal_those_of_one_device(rank_pool, ring, ulysses):
    # Without any query torch's gradients have other shapes.
    cases = [case for case in CASES if case.B and case.qkv()[0].numel()]
    test_gradients.check_all(rank_pool, cases, ring, ulysses, mode_options=TWO_DIMS)


@pytest.mark.long
@pytest.mark.parametrize("ring", [4, 6])
def test_in_one_compiled_graph_with_and_without_gradients(rank_pool, ring):
    cases = [CASES[0], CASES[7], CASES[10]]
    test_exactness.check_all(rank_pool, cases, ring, 1, "aot_eager", TWO_DIMS)
    test_gradients.check_all(rank_pool, cases, ring, 1, "aot_eager", TWO_DIMS)


# -- Traffic.


B, H, D, E = 2, 5, 8, 4


def count(ring, segments, heads=H, kv_heads=H, backward=False):
    mesh = init_device_mesh("cpu", (ring, 1), mesh_dim_names=("ring", "ulysses"))
    layout = SequenceLayout(tuple(Segment(*segment) for segment in segments), ring)
    q, k, v = make_qkv(layout.size(mesh.get_rank()), heads, D, B=B, H_kv=kv_heads)
    options = {"enable_gqa": True} if kv_heads < heads else {}
    with UnifiedAttnMode(mesh, layout=layout, assume_equal=True, rotate_method="2d"):
        with torch.set_grad_enabled(backward), Traffic() as forward:
            out = F.scaled_dot_product_attention(*(x.requires_grad_(backward) for x in (q, k, v)), **options)
        with Traffic() as back:
            if backward:
                out.sum().backward()
    return forward.sent, back.sent, forward.others + back.others


def sizes(total, ranks):
    return [len(part) for part in torch.arange(total).tensor_split(ranks)]


@pytest.mark.parametrize(("ring", "columns"), [(4, 2), pytest.param(6, 2, marks=pytest.mark.long)])
@pytest.mark.parametrize("num_text", [0, 3])
def test_attention_2d_sends_documented_bytes(rank_pool, ring, columns, num_text):
    rows, image = ring // columns, sizes(13, ring)
    segments = [("text", num_text, True), ("image", 13, False)] if num_text else [("image", 13, False)]
    queries = [size + num_text for size in image]
    for rank, (forward, _, others) in enumerate(rank_pool.run(count, ring, ring, segments)):
        row = [other for other in range(ring) if other // columns == rank // columns and other != rank]
        assert len(row) == columns - 1
        assert forward == [
            B * E * H * D * queries[rank] * (columns - 1),
            B * E * H * 2 * D * image[rank] * (rows - 1),
            B * H * (D * E + 4) * sum(queries[other] for other in row),
        ], f"rank {rank}"
        assert others == []
        tokens = (Tokens(13, sharded=True), Tokens(num_text, sharded=False))
        predicted = CountedAttention(B, H, H, D, D, E, tokens, tokens)
        assert sum(forward) == bytes_of_attention(predicted, MeshShape(ring=ring, ring_method="2d"), rank).total
    for rank, (_, backward, others) in enumerate(rank_pool.run(count, ring, ring, segments, backward=True)):
        row = [other for other in range(ring) if other // columns == rank // columns and other != rank]
        column = [other for other in range(ring) if other % columns == rank % columns and other != rank]
        assert backward == [
            B * H * (E * 3 * D + 4) * queries[rank] * (columns - 1),
            B * E * H * 2 * D * image[rank] * (rows - 1),
            4 * B * H * D * sum(queries[other] for other in row),
            4 * B * H * 2 * D * sum(image[other] for other in column),
        ], f"rank {rank}"
        assert others == []


@pytest.mark.parametrize(("ring", "heads", "kv_heads"), [(3, 5, 5), (4, 8, 2)])
def test_prime_number_of_ranks_gathers_keys(rank_pool, ring, heads, kv_heads):
    results = rank_pool.run(count, ring, ring, [("image", 13, False)], heads, kv_heads)
    for (forward, _, others), size in zip(results, sizes(13, ring), strict=True):
        assert forward == [B * E * kv_heads * 2 * D * size * (ring - 1)]
        assert others == []


def test_grid_is_the_one_with_fewest_bytes():
    assert doctest.testmod(import_module("para_core.attention.attention_plan")).failed == 0
    assert [choose_grid(ranks, 4, 4) for ranks in (1, 2, 9, 12, 64, 512)] == [
        (1, 1),
        (2, 1),
        (3, 3),
        (4, 3),
        (8, 8),
        (32, 16),
    ]
    assert choose_grid(64, 8, 1) == (32, 2)  # This grid sends 8 · 1 + 1 · 31 vectors, and (64, 1) would send 63.


# -- Launches and options.


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("ranks", "columns"), [(4, 2), (6, 2), (9, 3), (64, 8), (3, 1)])
def test_launches_grow_with_the_columns_alone(ranks, columns, device):
    counter = count_attention(ranks, 1, tokens=576, device=device, rotate_method="2d")
    of_one_column, of_more = (6, 14) if device == "cpu" else (7, 17)  # 16-bit tensors need casts.
    require_at_most(of_one_column if columns == 1 else of_more + columns - 2, counter)


def learn_with_attn_func(ring, dtype):
    mesh = init_device_mesh("cpu", (ring, 1), mesh_dim_names=("ring", "ulysses"))
    qkv = [x.to(dtype).tensor_split(ring, dim=2)[mesh.get_rank()].requires_grad_() for x in make_qkv(3, 4)]
    with UnifiedAttnMode(mesh, attn_func=by_hand, rotate_method="2d") as cp, cp.using(cp.sequence(3)):
        F.scaled_dot_product_attention(*qkv, is_causal=True).square().sum().backward()
    return [x.grad for x in qkv]


@pytest.mark.parametrize(
    ("ring", "dtype"), [(4, torch.float32), (4, torch.bfloat16), pytest.param(6, torch.float32, marks=pytest.mark.long)]
)
def test_own_attention_is_learned_on_empty_ranks(rank_pool, ring, dtype):
    qkv = [x.to(dtype).float().requires_grad_() for x in make_qkv(3, 4)]
    F.scaled_dot_product_attention(*qkv, is_causal=True).square().sum().backward()
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    grads = zip(*rank_pool.run(learn_with_attn_func, ring, ring, dtype), strict=True)
    for x, parts in zip(qkv, grads, strict=True):
        assert relative_error(torch.cat(parts, dim=2).float(), x.grad) < bound


def test_two_dims_refuse_rounded_tensors():
    with pytest.raises(ValueError, match=r"rotate_method='2d'.* comm_dtype.* torch\.float8_e4m3fn"):
        AttnOptions.of(rotate_method="2d", comm_dtype=torch.float8_e4m3fn)


# -- Generated calls.


def worst_errors(ring, ulysses, first, last):
    mesh = init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
    errors = {}
    for number in range(first, last):
        heartbeat()
        errors[number] = worst_error(draw(number), mesh, "2d")
    return errors


@pytest.mark.parametrize(
    ("ring", "ulysses", "first", "last"),
    [
        (4, 1, 0, 30),
        pytest.param(4, 1, 30, 900, marks=pytest.mark.long),
        pytest.param(2, 2, 900, 1000, marks=pytest.mark.long),
        pytest.param(6, 1, 1000, 1900, marks=pytest.mark.long),
        pytest.param(3, 2, 1900, 1950, marks=pytest.mark.long),
        pytest.param(2, 3, 1950, 2000, marks=pytest.mark.long),
    ],
)
def test_generated_calls_equal_one_device(rank_pool, ring, ulysses, first, last):
    for errors in rank_pool.run(worst_errors, ring * ulysses, ring, ulysses, first, last):
        assert {number: error for number, error in errors.items() if error > 1} == {}


def attend_in_one_graph(ring, ulysses, segments, lengths):
    """Return the errors of causal attention over balanced segments that are sharded, computed and gathered in one
    graph.
    """
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
    mode = UnifiedAttnMode(mesh, rotate_method="2d")

    @torch.compile(backend="aot_eager", fullgraph=True)
    def attend(query, key, value, layout):
        with mode:
            parts = [mode.shard(x, dim=2, sequence=layout) for x in (query, key, value)]
            with mode.using(layout):
                out = F.scaled_dot_product_attention(*parts, is_causal=True)
            return mode.gather(out, dim=2, sequence=layout)

    errors = []
    for length in lengths:  # The second length is symbolic.
        runs = [Segment(name, length + i, **kind) for i, (name, kind) in enumerate(segments)]
        layout = SequenceLayout(tuple(runs), ring * ulysses)
        generator = torch.Generator().manual_seed(0)
        qkv = [torch.randn(1, 4, layout.total, 8, generator=generator) for _ in range(3)]
        expected = F.scaled_dot_product_attention(*qkv, is_causal=True)
        with torch.no_grad():
            errors.append(relative_error(attend(*qkv, layout), expected))
    return errors


TEXT, REPLICATED = ("text", {}), ("text", {"replicated": True})
FRONT, BACK = ("front", {"balanced": True}), ("back", {"balanced": True})


@pytest.mark.long  # Four ranks compile. The default run has graphs of shorter cases.
@pytest.mark.parametrize("mesh", [(4, 1), (2, 2)])
@pytest.mark.parametrize("segments", [[FRONT], [FRONT, BACK], [REPLICATED, FRONT], [FRONT, TEXT], [TEXT, FRONT, BACK]])
def test_causal_attention_over_balanced_segments_is_one_graph(rank_pool, mesh, segments):
    for errors in rank_pool.run(attend_in_one_graph, 4, *mesh, segments, [16, 20, 23]):
        assert max(errors) < 1e-5
