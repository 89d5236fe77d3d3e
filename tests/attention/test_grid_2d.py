"""The traffic of Attention2D, whose ring ranks are rows and columns, equals its docstring and the planner's."""

import pytest
import torch
import torch.nn.functional as F

from benchmarks.pipelines.traffic import CountedAttention, Tokens, bytes_of_attention
from para_core import Segment, SequenceLayout, UnifiedAttnMode
from para_core.adapters.planner.mesh import MeshShape
from tests.attention.one_device import make_qkv
from tests.attention.test_traffic import Traffic, sizes
from tests.tiny import cpu_mesh

B, H, D, E = 2, 5, 8, 4


def count(ring, num_text):
    mesh = cpu_mesh(ring, 1)
    layout = SequenceLayout((Segment("text", num_text, replicated=True), Segment("image", 13)), ring)
    qkv = [x.requires_grad_() for x in make_qkv(layout.size(mesh.get_rank()), H, D, B=B)]
    counted = []
    with UnifiedAttnMode(mesh, layout=layout, assume_equal=True, rotate_method="2d"):
        for grad in (False, True):
            with torch.set_grad_enabled(grad), Traffic() as traffic:
                out = F.scaled_dot_product_attention(*qkv)
            counted.append(traffic)
    with Traffic() as backward:
        out.sum().backward()
    assert counted[0].others == counted[1].others == backward.others == []
    return counted[0].sent, backward.sent


@pytest.mark.parametrize("num_text", [0, 3])
def test_attention_2d_sends_documented_bytes(rank_pool, num_text):
    ring, columns, rows = 4, 2, 2
    image = sizes(13, ring)
    queries = [size + num_text for size in image]
    tokens = (Tokens(13, sharded=True), Tokens(num_text, sharded=False))
    predicted = CountedAttention(B, H, H, D, D, E, tokens, tokens)
    for rank, (forward, backward) in enumerate(rank_pool.run(count, ring, ring, num_text)):
        row = [other for other in range(ring) if other // columns == rank // columns and other != rank]
        column = [other for other in range(ring) if other % columns == rank % columns and other != rank]
        keys = B * E * H * 2 * D * image[rank] * (rows - 1)
        assert forward == [
            B * E * H * D * queries[rank] * (columns - 1),
            keys,
            B * H * (D * E + 4) * sum(queries[other] for other in row),
        ], f"rank {rank}"
        assert sum(forward) == bytes_of_attention(predicted, MeshShape(ring=ring, ring_method="2d"), rank).total
        assert backward == [
            B * H * (E * 3 * D + 4) * queries[rank] * (columns - 1),
            keys,
            4 * B * H * D * sum(queries[other] for other in row),
            4 * B * H * 2 * D * sum(image[other] for other in column),
        ], f"rank {rank}"
