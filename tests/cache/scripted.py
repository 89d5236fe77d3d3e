"""A model and a pipeline in which the first-block residual, and the contribution of the other blocks, are given step by
step.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import nn

from para_core.adapters import Adapter
from para_core.cache.blocks import BlockGroup, CachedBlocks

WIDTH, TOKENS = 8, 6


class Block(nn.Module):
    """A block that adds a number: the first block adds the first argument, and the others together add the second."""

    def __init__(self, first: bool, share: float) -> None:
        super().__init__()
        self.first, self.share = first, share
        self.calls = 0

    def forward(self, hidden_states, encoder_hidden_states, added):
        if not torch.compiler.is_compiling():
            self.calls += 1
        change = added[0] if self.first else added[1] * self.share
        return encoder_hidden_states + 1.0, hidden_states + change


class Scripted(nn.Module):
    """A model that adds ``between`` to the hidden states after each block, like residuals of a ControlNet."""

    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        self.early = nn.ModuleList(
            [Block(True, 0.0), *[Block(False, 1 / (num_blocks - 1)) for _ in range(num_blocks - 3)]]
        )
        self.late = nn.ModuleList([Block(False, 1 / (num_blocks - 1)) for _ in range(2)])
        self.scale = nn.Parameter(torch.ones(()))
        self.context = None

    @contextmanager
    def cache_context(self, name):
        self.context = name
        yield
        self.context = None

    def forward(self, hidden_states, encoder_hidden_states, added, between=None):
        hidden_states = hidden_states * self.scale
        for block in [*self.early, *self.late]:
            encoder_hidden_states, hidden_states = block(hidden_states, encoder_hidden_states, added)
            if between is not None:
                hidden_states = hidden_states + between
        return hidden_states

    def counts(self) -> list[int]:
        """Return and reset the number of calls of each block."""
        blocks = [*self.early, *self.late]
        calls = [block.calls for block in blocks]
        for block in blocks:
            block.calls = 0
        return calls


STREAMS = ("encoder_hidden_states", "hidden_states")
BLOCKS = CachedBlocks((BlockGroup(("early", "late"), STREAMS, chained=True, between=("between",)),))
IN_TWO_STAGES = CachedBlocks(
    (BlockGroup(("early",), STREAMS), BlockGroup(("late",), STREAMS, chained=True, between=("between",)))
)
ADAPTER = Adapter(transformer="Scripted", pipelines="scripted", blocks=BLOCKS)


@dataclass
class Pipe:
    """A pipeline that calls the model once per step and branch.

    Args:
        first, rest: the contribution of the first block, and that of the others together, at each step of each branch.
            It is a number, or one for each sample.
    """

    transformer: nn.Module = field(default_factory=Scripted)
    scheduler: object = field(default_factory=lambda: FlowMatchEulerDiscreteScheduler(shift=3.0))
    named: bool = True
    device = torch.device("cpu")

    def __call__(self, first, rest=None, *, size=(1, TOKENS, WIDTH), fail_at=None, dtype=torch.float32):
        """Return the model's outputs of each step and each branch."""
        branches = first if isinstance(first, dict) else {"cond": first}
        rest = rest or {}
        text = {name: torch.full((size[0], 3, size[2]), float(i), dtype=dtype) for i, name in enumerate(branches)}
        steps = len(next(iter(branches.values())))
        self.scheduler.set_timesteps(sigmas=[1 - i / steps for i in range(steps)])
        outputs = []
        x = torch.linspace(-1, 1, size[0] * size[1] * size[2]).reshape(size).to(dtype)
        latents = x
        with torch.no_grad():
            for step, t in enumerate(self.scheduler.timesteps):
                if step == fail_at:
                    raise ArithmeticError("as asked")
                for name, values in branches.items():
                    now = torch.tensor(values[step], dtype=dtype)
                    second = torch.tensor(rest[name][step], dtype=dtype) if name in rest else 10 * now
                    added = torch.stack([now, second]).reshape(2, -1, 1, 1)
                    if self.named:
                        with self.transformer.cache_context(name):
                            out = self.transformer(hidden_states=x, encoder_hidden_states=text[name], added=added)
                    else:
                        out = self.transformer(hidden_states=x, encoder_hidden_states=text[name], added=added)
                    outputs.append(out)
                latents = self.scheduler.step(torch.zeros_like(latents), t, latents, return_dict=False)[0]
        return outputs


def verdicts(report, branch=None):
    return [row.verdict.name.lower() for row in report.rows if branch in (None, row.branch)]
