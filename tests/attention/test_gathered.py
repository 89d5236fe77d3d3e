"""A ring that gathers all keys before one attention: its bits are those of one process, and its gradients are exact."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from para_core import UnifiedAttnMode
from para_core.attention.attention_options import AttnOptions
from para_core.modes.block_sparse import BlockSparseAttnMode
from tests.attention import test_exactness, test_gradients
from tests.attention.cases import BALANCED, CAUSAL, GQA, IMAGE_FIRST, TEXT_FIRST, Case, Mask, attend
from tests.attention.generated_calls import draw, worst_error
from tests.attention.one_device import make_qkv
from tests.attention.test_options import by_hand
from tests.attention.test_traffic import Traffic
from tests.rank_pool import heartbeat

GATHERED = {"rotate_method": "gathered"}
MESHES = [
    (2, 1),
    (3, 1),
    (2, 2),
    pytest.param(4, 1, marks=pytest.mark.long),
    pytest.param(2, 3, marks=pytest.mark.long),
]
on_meshes = pytest.mark.parametrize(("ring", "ulysses"), MESHES)

TEXT, JOINT = ("text", 13, True), (("text", 29, False), ("image", 83, False))
LONG_BALANCED = (("video", 96, False, True),)
# A rank has at least 12 queries, and not a few more than a multiple of 32: the last queries of a call have other bits.
CALLS = {
    "even": Case(96, 4, D=16),
    "uneven": Case(103, 6, D=16),
    "values of another width": Case(103, 6, D=16, D_v=24),
    "grouped heads": Case(103, 12, D=16, H_kv=4, options=GQA),
    "uneven groups of heads": Case(103, 9, D=16, H_kv=3, options=GQA),
    "cross": Case(96, 4, D=16, S_k=61),
    "text and image": Case(H=4, D=16, segments=JOINT),
    "replicated text": Case(H=4, D=16, segments=(TEXT, ("image", 83, False))),
    "image and replicated text": Case(H=4, D=16, segments=(("image", 83, False), TEXT)),
    "replicated keys": Case(H=4, D=16, segments=JOINT, key_segments=(TEXT,)),
    "key padding": Case(103, 4, D=16, mask=Mask("bk")),
    "bool mask": Case(96, 4, D=16, mask=Mask("qk")),
    "local bool mask": Case(H=4, D=16, segments=JOINT, mask=Mask("bhqk", rows="local")),
    "float mask": Case(H=4, D=16, segments=JOINT, mask=Mask("bhqk", torch.float32)),
    "causal": Case(96, 4, D=16, options=CAUSAL),
    "uneven causal": Case(103, 4, D=16, options=CAUSAL),
    "balanced causal": Case(H=4, D=16, segments=LONG_BALANCED, options=CAUSAL),
    "causal with a mask": Case(96, 4, D=16, mask=Mask("bk"), options=CAUSAL),
    "causal with a float mask": Case(96, 4, D=16, mask=Mask("qk", torch.float32), options=CAUSAL),
    "causal with grouped heads": Case(96, 8, D=16, H_kv=4, options=GQA | CAUSAL),
    "scaled": Case(96, 4, D=16, options={"scale": 0.3}),
    "model's memory layout": Case(103, 4, D=16, memory="transposed"),
}


def in_dtype(case, dtype):
    mask = case.mask
    if mask is not None and mask.dtype != torch.bool:
        mask = replace(mask, dtype=dtype)
    return replace(case, dtype=dtype, mask=mask)


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_meshes
def test_calls_have_the_bytes_of_one_process(rank_pool, ring, ulysses, dtype):
    cases = [in_dtype(case, dtype) for case in CALLS.values()]
    for outs in rank_pool.run(attend, ring * ulysses, cases, ring, ulysses, None, GATHERED):
        differing = [
            name
            for name, case, out in zip(CALLS, cases, outs, strict=True)
            if not torch.equal(out, case.on_one_device())
        ]
        assert differing == []


def test_a_ring_of_blocks_has_other_bits(rank_pool):
    # Otherwise the test above would show nothing.
    case = CALLS["even"]
    outs = rank_pool.run(attend, 2, [case], 2, 1, None, {"rotate_method": "allgather"})
    assert not torch.equal(outs[0][0], case.on_one_device())


@pytest.mark.parametrize("ring", [2, pytest.param(3, marks=pytest.mark.long)])
def test_one_compiled_graph_has_the_bytes_of_one_process(rank_pool, ring):
    cases = [CALLS["uneven"], CALLS["text and image"], CALLS["balanced causal"]]
    for outs in rank_pool.run(attend, ring, cases, ring, 1, "aot_eager", GATHERED):
        assert [torch.equal(out, case.on_one_device()) for case, out in zip(cases, outs, strict=True)] == [True] * 3


# -- Any size, gradients, attention of the user's own.

SMALL = [
    Case(13, 3),
    Case(3, 1),  # With four ranks one has no tokens.
    Case(1, 2, options=CAUSAL),
    Case(0, 3),
    Case(13, 6, H_kv=2, D_v=5, options=GQA | CAUSAL),
    Case(5, 3, S_k=18, D_v=20, options=CAUSAL),
    Case(H=4, segments=TEXT_FIRST, mask=Mask("bk", torch.float32)),
    Case(H=3, segments=IMAGE_FIRST, options=CAUSAL),
    Case(H=3, segments=BALANCED, mask=Mask("bhqk", torch.float32, "local"), options=CAUSAL),
    Case(H=3, segments=IMAGE_FIRST, key_segments=(("image", 9, False),), mask=Mask("qk")),
    Case(13, 4, mask=Mask("bhqk", torch.float32, "global", "local")),
    Case(13, 3, mask=Mask("qk", torch.float32, share=1.0)),
]


@pytest.mark.sample(1)
@on_meshes
def test_any_call_is_exact(rank_pool, ring, ulysses):
    test_exactness.check_all(rank_pool, SMALL, ring, ulysses, mode_options=GATHERED)
    own = [case for case in SMALL if case.mask is None]
    test_exactness.check_all(rank_pool, own, ring, ulysses, mode_options={**GATHERED, "attn_func": by_hand})


@pytest.mark.sample(1)
@on_meshes
def test_gradients_equal_those_of_one_device(rank_pool, ring, ulysses):
    cases = [case for case in SMALL if case.qkv()[0].numel()]
    test_gradients.check_all(rank_pool, cases, ring, ulysses, mode_options=GATHERED)


@pytest.mark.long
def test_gradients_of_one_compiled_graph_equal_those_of_one_device(rank_pool):
    test_gradients.check_all(rank_pool, [SMALL[0], SMALL[4], SMALL[6]], 2, 1, "aot_eager", GATHERED)


def worst_errors(ring, ulysses, first, last):
    mesh = init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
    errors = {}
    for number in range(first, last):
        heartbeat()
        errors[number] = worst_error(draw(number), mesh, "gathered")
    return errors


@pytest.mark.parametrize(
    ("ring", "ulysses", "first", "last"),
    [
        (3, 1, 0, 30),
        pytest.param(2, 2, 30, 200, marks=pytest.mark.long),
        pytest.param(4, 1, 200, 600, marks=pytest.mark.long),
    ],
)
def test_generated_calls_equal_one_device(rank_pool, ring, ulysses, first, last):
    for errors in rank_pool.run(worst_errors, ring * ulysses, ring, ulysses, first, last):
        assert {number: error for number, error in errors.items() if error > 1} == {}


# -- Block masks.


def with_block_mask(ring, ulysses, blocks, is_causal):
    mesh = init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
    mode = BlockSparseAttnMode(mesh, block_mask=blocks, block_size=16, **GATHERED)
    parts = [x.chunk(mesh.size(), dim=2)[mesh.get_rank()] for x in make_qkv(96, 4, 16)]
    with torch.no_grad(), mode as cp, cp.using(cp.sequence(96)):
        return cp.gather(F.scaled_dot_product_attention(*parts, is_causal=is_causal), dim=2)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("ring", [2, 3])
def test_block_masks_have_the_bytes_of_one_process(rank_pool, ring, is_causal):
    blocks = torch.rand(6, 6, generator=torch.Generator().manual_seed(0)) < 0.6
    blocks |= torch.eye(6, dtype=torch.bool)
    (expected,) = rank_pool.run(with_block_mask, 1, 1, 1, blocks, is_causal)
    for out in rank_pool.run(with_block_mask, ring, ring, 1, blocks, is_causal):
        assert torch.equal(out, expected)


# -- Traffic and options.


def count_gathered(backward):
    mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("ring", "ulysses"))
    tensors = [x.tensor_split(4, dim=2)[mesh.get_rank()].requires_grad_(backward) for x in make_qkv(13, 5, 8, B=2)]
    mode = UnifiedAttnMode(mesh, assume_equal=True, **GATHERED)
    with torch.set_grad_enabled(backward), mode as cp, cp.using(cp.sequence(13)), Traffic() as traffic:
        F.scaled_dot_product_attention(*tensors)
    return traffic.sent, traffic.gathered, traffic.others


@pytest.mark.parametrize("backward", [False, True])
def test_one_collective_gathers_keys_and_values(rank_pool, backward):
    for sent, gathered, others in rank_pool.run(count_gathered, 4, backward):
        assert (sent, gathered, others) == ([], [3 * 2 * 5 * 4 * 2 * 8 * 4], [])


def test_rounded_tensors_are_refused():
    with pytest.raises(ValueError, match=r"rotate_method='gathered'.* comm_dtype.* torch\.int8"):
        AttnOptions.of(rotate_method="gathered", comm_dtype=torch.int8)
