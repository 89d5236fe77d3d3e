"""Plans are proposed for models whose blocks are given something else than tensors [B, S, C]."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from para_core import check_parallel
from para_core.adapters import propose_plan
from para_core.plans.plan import SplitMask
from zoo.tiny.base import fill


def heads_of(x: Tensor, parts: int) -> tuple[Tensor, ...]:
    """Return ``parts`` tensors ``[B, 3, S, 8]`` of three heads, from ``[B, S, parts * 24]``."""
    return x.unflatten(-1, (parts, 3, 8)).permute(2, 0, 3, 1, 4).unbind()


class FlexBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(24, 72), nn.Linear(24, 24)

    def forward(self, x: Tensor, mask: BlockMask) -> Tensor:
        q, k, v = heads_of(self.qkv(x), 3)
        return x + self.out(flex_attention(q, k, v, block_mask=mask).transpose(1, 2).flatten(2))


def causal_mask(text: int, video: int) -> BlockMask:
    """Return the mask of ``text`` tokens, which are seen by all, and frames of five tokens, which see earlier ones."""
    frame = torch.cat([torch.full((text,), -1), torch.arange(video) // 5])
    total = text + video
    return create_block_mask(lambda b, h, q, k: frame[q] >= frame[k], None, None, total, total, device="cpu")


class CausalVideo(nn.Module):
    """Blocks of flex attention over text and video, with a mask that the model makes or is given."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.final = nn.Linear(6, 24), nn.Linear(24, 6)
        self.blocks = nn.ModuleList([FlexBlock(), FlexBlock()])

    def forward(self, video: Tensor, text: Tensor | None = None, mask: BlockMask | None = None) -> Tensor:
        x, length = self.inp(video), 0 if text is None else text.shape[1]
        mask = mask or causal_mask(length, video.shape[1])
        x = x if text is None else torch.cat([text, x], dim=1)
        for block in self.blocks:
            x = block(x, mask)
        return self.final(x[:, length:])


def causal_inputs(tokens: int, text: int, given: bool) -> dict[str, Tensor | BlockMask]:
    generator = torch.Generator().manual_seed(tokens)
    inputs: dict[str, Tensor | BlockMask] = {"video": torch.randn(1, tokens, 6, generator=generator)}
    if text:
        inputs["text"] = torch.randn(1, text, 24, generator=generator)
    return {**inputs, "mask": causal_mask(text, tokens)} if given else inputs


# Dynamo compiles flex_attention once for each virtual rank.
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("text", "given"), [(0, False), (0, True), (7, True)])
@pytest.mark.parametrize("compiled", ["no", "blocks"])
def test_plan_of_flex_attention_in_eager_code(text, given, compiled):
    model = fill(CausalVideo(), seed=1)
    if compiled == "blocks":
        for block in model.blocks:
            block.compile(backend="eager")
    proposal = propose_plan(model, (causal_inputs(25, text, given), causal_inputs(35, text, given)))
    assert proposal.plan is not None, proposal
    assert any(isinstance(rule, SplitMask) for rule in proposal.plan.shard_rules)
    check = check_parallel(fill(CausalVideo(), seed=1), plan=proposal.plan, ranks=2, **causal_inputs(30, text, given))
    assert check.error < 1e-5, check
