"""Residuals of a ControlNet: nested lists of tensors, with None for blocks that have none."""

import torch
from torch import nn
from torch.nn import functional as F

from para_core import Gather, Plan, Split
from para_core.comparison.virtual_ranks import run_on_virtual_ranks

PLAN = Plan(
    inputs={"x": Split(dim=1, segment="image"), "control": Split(dim=1, like="image")},
    outputs={"": Gather(dim=1, segment="image")},
    joint_order=("image",),
)


class Blocks(nn.Module):
    def forward(self, x, control):
        for residual in control["input"]:
            tokens = x[:, None]
            x = x + F.scaled_dot_product_attention(tokens, tokens, tokens)[:, 0]
            x = x if residual is None else x + residual
        return x


def test_none_among_residuals_stays_none():
    torch.manual_seed(0)
    residuals = [torch.randn(1, 7, 8), None, torch.randn(1, 7, 8)]
    inputs = {"x": torch.randn(1, 7, 8), "control": {"input": residuals, "middle": [None], "output": []}}
    expected = Blocks()(**inputs)
    without = Blocks()(inputs["x"], {"input": [None] * 3})
    assert float((expected - without).abs().max()) > 0.1
    for out in run_on_virtual_ranks(Blocks(), PLAN, inputs, ulysses=2):
        torch.testing.assert_close(out, expected)
