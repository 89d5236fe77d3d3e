"""Masks that are known to have a rank's rows: those that were sharded, and those whose rows are equal. Others raise."""

import io

import pytest
import torch
import torch.nn.functional as F

from para_core import UnifiedAttnMode
from para_core.layout.sequence import even_layout
from tests.attention.one_device import make_qkv, relative_error
from tests.tiny import cpu_mesh

CAUSAL = torch.ones(8, 8, dtype=torch.bool).tril()
KEYS = torch.arange(8) < 5
LOW = torch.zeros(8).masked_fill(~KEYS, -1e4)


def write(x, index, value):
    x[index] = value
    return x


def assign(x, value):
    x.data = value
    return x


# What is computed row by row from a mask or a sharded part of it.
FOLLOWED = {
    "a batch": lambda mask: mask.view(1, *mask.shape)[None].expand(2, 4, -1, -1),
    "written to": lambda mask: mask.logical_or_(KEYS[None]),
    "the opposite of a copy": lambda mask: ~mask.clone(),
    "a cast": lambda mask: mask.to(mask.new_zeros(mask.shape, dtype=torch.float32)),
    "a product": lambda mask: mask & KEYS[None],
    "heads": lambda mask: mask[None].repeat_interleave(4, dim=0)[None, :, :, :],
    "low numbers of zeros": lambda mask: torch.zeros(mask.shape)[None].masked_fill(~mask, -1e4)[0].to(torch.float32),
    "low numbers of full": lambda mask: torch.full(mask.shape, 0.0).masked_fill_(~mask, -1e4),
    "a static buffer": lambda mask: mask.new_empty(mask.shape).copy_(mask),
    "columns hidden": lambda mask: write(write(mask, (..., slice(6, 8)), False), (..., KEYS.logical_not()), False),
    "a column shown": lambda mask: write(mask, (..., 0), True),
    "the data": lambda mask: mask.data,
    "where": lambda mask: torch.where(mask, torch.zeros(()), torch.tensor(-torch.inf)),
}
# Rows of a rank with 4 of 8 tokens that no one knows to be its own.
UNKNOWN = {
    "new values": lambda part: torch.tensor(part.tolist()),
    "rows counted from the first of the part": lambda part: part.tril(),
    "written to": lambda part: part.tril_(),
    "with such a mask": lambda part: part & torch.ones(4, 8, dtype=torch.bool).tril(),
    "in the order of an index": lambda part: part[[3, 2, 1, 0]],
    "repeated by numbers": lambda part: part.repeat_interleave(torch.tensor([2, 0, 1, 1]), dim=-2),
    "copied with other columns": lambda part: part[:, :4].expand(2, 4, 4).reshape(1, 4, 8),
    "written through a view": lambda part: (part[None].tril_(), part)[1],
    "assigned": lambda part: assign(part[None], torch.ones(1, 4, 8, dtype=torch.bool).tril())[0],
    "shifted": lambda part: part.expand(2, 4, 8).contiguous().flatten(0, 1)[2:6],
    "overwritten": lambda part: part.copy_(torch.ones(4, 8).tril()),
    "with another row": lambda part: write(part, 1, part[0].clone()),
    "written at an index of both": lambda part: write(part, (..., torch.ones_like(part).tril()), True),
    "with a number per row": lambda part: write(part, (..., 0), KEYS[:4]),
    "written to zeros": lambda part: torch.zeros_like(part).tril_().logical_or_(part),
    "all hidden": lambda _: torch.zeros(4, 8, dtype=torch.bool),  # As a causal mask whose first tokens are padding.
}


def attend(inference):
    """Return the result of each mask that is followed or has equal rows. Check that others raise."""
    outs = {}
    with torch.inference_mode(inference), UnifiedAttnMode(cpu_mesh(1, 2)) as cp:
        qkv = [cp.shard(x, dim=2) for x in make_qkv(8, 4)]

        def run(mask):
            with cp.using(cp.sequence(8)):
                return cp.gather(F.scaled_dot_product_attention(*qkv, mask), dim=2)

        for name, change in FOLLOWED.items():
            outs[name] = run(change(cp.shard(CAUSAL.clone(), dim=-2)))
        keys = KEYS.repeat(4, 1)
        outs["keys"], outs["low numbers"] = run(keys), run(LOW.repeat(4, 1))
        keys[2] = False  # It was read before.
        hidden = torch.zeros(4, 8, dtype=torch.bool)
        longer = [cp.shard(x, dim=2) for x in make_qkv(16, 4)[1:]]
        with cp.using(even_layout(8, 2), key_layout=even_layout(16, 2)):
            # It was read before, as a mask of this rank's 8 of 16 keys, which may hide all.
            F.scaled_dot_product_attention(qkv[0], *longer, hidden)
        file = io.BytesIO()
        torch.save(cp.shard(CAUSAL, dim=-2), file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        balanced = cp.shard(CAUSAL.clone(), dim=-2, sequence=even_layout(8, 2, balanced=True))
        changed = [change(cp.shard(CAUSAL.clone(), dim=-2)) for change in UNKNOWN.values()]
        for mask in [keys, hidden, balanced, *changed]:
            message = r"4, 4 of 8.*on rank [01] .*cp\.shard\(mask, dim=-2\).*all rows.*propose_plan"
            with pytest.raises(ValueError, match=message):
                run(mask)
    return outs, saved


@pytest.mark.parametrize("inference", [False, True])
def test_rows_are_those_of_a_rank_or_raise(rank_pool, inference):
    masks = {name: change(CAUSAL.clone()) for name, change in FOLLOWED.items()}
    masks |= {"keys": KEYS.expand(8, 8), "low numbers": LOW.expand(8, 8)}
    for rank, (outs, saved) in enumerate(rank_pool.run(attend, 2, inference)):
        assert torch.equal(saved, CAUSAL.chunk(2)[rank])
        for name, mask in masks.items():
            expected = F.scaled_dot_product_attention(*make_qkv(8, 4), mask)
            assert relative_error(outs[name], expected) < 1e-5, (name, rank)
