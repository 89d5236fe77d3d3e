"""A plan shards the BlockMask that a user's own model receives."""

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from para_core import Gather, Plan, Split, SplitMask
from para_core.distributed.mesh import sequence_mesh
from para_core.plans.apply import apply_plan, remove_plan
from tests.tiny import cpu_mesh, relative_error


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, block_mask):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return x + self.out(flex_attention(q, k, v, block_mask=block_mask).transpose(1, 2).flatten(2))


class CausalVideo(nn.Module):
    """A mask by which each frame sees itself and the frames before it, and all tokens see the text, which comes
    first.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(48, 3) for _ in range(2)])

    def forward(self, text, video, block_mask):
        x = torch.cat([text, video], dim=1)
        for block in self.blocks:
            x = block(x, block_mask)
        return x[:, text.shape[1] :]


TEXT, FRAME, FRAMES = 4, 3, 3
PLAN = Plan(
    inputs={
        "text": Split(dim=1, segment="text"),
        "video": Split(dim=1, segment="video"),
        "block_mask": SplitMask(("text", "video")),
    },
    outputs={"": Gather(dim=1, segment="video")},
    joint_order=("text", "video"),
)


def inputs():
    total = TEXT + FRAME * FRAMES
    frame = torch.cat([torch.full((TEXT,), -1), torch.arange(FRAME * FRAMES) // FRAME])
    mask = create_block_mask(
        lambda b, h, q, k: frame[q] >= frame[k], None, None, total, total, device="cpu", BLOCK_SIZE=4
    )
    generator = torch.Generator().manual_seed(1)
    text, video = (torch.randn(2, number, 48, generator=generator) for number in (TEXT, FRAME * FRAMES))
    return text, video, mask


def run_planned(ring, ulysses):
    model, arguments = CausalVideo(), inputs()
    mesh = sequence_mesh(cpu_mesh(ring, ulysses)["ring", "ulysses"])
    outs = []
    with torch.no_grad():
        for plan in (PLAN, PLAN.with_replicated("text")):
            apply_plan(model, plan, mesh)
            outs += [model(*arguments) for _ in range(2)]
        unsharded = Plan(
            {name: cut for name, cut in PLAN.inputs.items() if name != "block_mask"}, PLAN.outputs, PLAN.joint_order
        )
        apply_plan(model, unsharded, mesh)
        with pytest.raises(ValueError, match="SplitMask"):
            model(*arguments)
        remove_plan(model)
        outs.append(model(*arguments))
    return outs


@pytest.mark.parametrize(("ring", "ulysses"), [(1, 2), pytest.param(2, 1, marks=pytest.mark.long)])
def test_causal_video_model_with_flex_mask_equals_one_device(rank_pool, ring, ulysses):
    with torch.no_grad():
        expected = CausalVideo()(*inputs())
    for rank, outs in enumerate(rank_pool.run(run_planned, 2, ring, ulysses)):
        errors = [relative_error(out, expected) for out in outs]
        assert max(errors) < 1e-5, f"rank {rank}: {errors}"
