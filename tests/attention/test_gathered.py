"""A ring that gathers all keys before one attention: its bits are those of one process."""

from dataclasses import replace

import pytest
import torch

from tests.attention.cases import CAUSAL, GQA, Case, Mask, attend

F32 = torch.float32
GATHERED = {"rotate_method": "gathered"}
TEXT, JOINT = ("text", 13, True), (("text", 29, False), ("image", 83, False))
# A rank has at least 12 queries, and not a few more than a multiple of 32: the last queries of a call have other bits.
CALLS = {
    "even": Case(96, 4, D=16),
    "uneven, of another width": Case(103, 6, D=16, D_v=24),
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
    "float mask": Case(H=4, D=16, segments=JOINT, mask=Mask("bhqk", F32)),
    "uneven causal": Case(103, 4, D=16, options=CAUSAL),
    "balanced causal": Case(H=4, D=16, segments=(("video", 96, False, True),), options=CAUSAL),
    "causal with a mask": Case(96, 4, D=16, mask=Mask("bk"), options=CAUSAL),
    "causal with a float mask": Case(96, 4, D=16, mask=Mask("qk", F32), options=CAUSAL),
    "causal with grouped heads": Case(96, 8, D=16, H_kv=4, options=GQA | CAUSAL),
    "model's memory layout": Case(103, 4, D=16, memory="transposed"),
}


def differing(rank_pool, cases, ring, ulysses, options, compile_with=None):
    """Return the names of the cases that have other bits than one process on some rank."""
    names = set()
    for outs in rank_pool.run(attend, ring * ulysses, [*cases.values()], ring, ulysses, False, compile_with, options):
        results = zip(cases.items(), outs, strict=True)
        names |= {name for (name, case), (out, _) in results if not torch.equal(out, case.on_one_device())}
    return names


@pytest.mark.parametrize(("ring", "ulysses", "dtype"), [(2, 1, F32), (2, 2, torch.bfloat16)])
def test_calls_have_the_bits_of_one_process(rank_pool, ring, ulysses, dtype):
    cases = {name: replace(case, dtype=dtype) for name, case in CALLS.items() if dtype == F32 or "float" not in name}
    assert differing(rank_pool, cases, ring, ulysses, GATHERED) == set()


def test_a_graph_has_the_bits_of_one_process_and_a_ring_of_blocks_has_others(rank_pool):
    cases = {name: CALLS[name] for name in ("text and image", "balanced causal")}
    assert differing(rank_pool, cases, 2, 1, GATHERED, "aot_eager") == set()
    # Otherwise the tests above would show nothing.
    assert differing(rank_pool, {"even": CALLS["even"]}, 2, 1, {"rotate_method": "allgather"}) == {"even"}
