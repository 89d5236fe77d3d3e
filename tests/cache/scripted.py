"""A model and a pipeline whose first-block residual, and contribution of the other blocks, are given step by step."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from para_core.adapters import Adapter, apply_cache_on_pipe
from para_core.cache.blocks import BlockGroup, CachedBlocks

WIDTH, TOKENS, NUM_BLOCKS = 8, 6, 5


class Block(nn.Module):
    """A block that adds a number: the first block adds the first argument, and each other one a part of the second."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.first = first
        self.calls = 0

    def forward(self, hidden_states, encoder_hidden_states, added):
        if not torch.compiler.is_compiling():
            self.calls += 1
        change = added[0] if self.first else added[1] / (NUM_BLOCKS - 1)
        return encoder_hidden_states + 1.0, hidden_states + change


class Scripted(nn.Module):
    """A model that adds ``between`` to the hidden states after each block, like residuals of a ControlNet."""

    def __init__(self) -> None:
        super().__init__()
        self.early = nn.ModuleList([Block(True), Block(False), Block(False)])
        self.late = nn.ModuleList([Block(False), Block(False)])
        self.scale = nn.Parameter(torch.ones(()))

    @contextmanager
    def cache_context(self, name):
        yield

    def forward(self, hidden_states, encoder_hidden_states, added, between=None):
        hidden_states = hidden_states * self.scale
        for block in [*self.early, *self.late]:
            encoder_hidden_states, hidden_states = block(hidden_states, encoder_hidden_states, added)
            if between is not None:
                hidden_states = hidden_states + between
        return hidden_states + encoder_hidden_states.mean()

    def counts(self) -> list[int]:
        """Return and reset the number of calls of each block."""
        blocks = [*self.early, *self.late]
        calls = [block.calls for block in blocks]
        for block in blocks:
            block.calls = 0
        return calls


STREAMS = ("encoder_hidden_states", "hidden_states")
BLOCKS = CachedBlocks((BlockGroup(("early", "late"), STREAMS, chained=True, between=("between",)),))
_LATE = BlockGroup(("late",), STREAMS, chained=True, between=("between",))
IN_TWO_STAGES = CachedBlocks((BlockGroup(("early",), STREAMS), _LATE))
ADAPTER = Adapter(transformer="Scripted", pipelines="scripted", blocks=BLOCKS)


def inputs_of(size=(1, TOKENS, WIDTH), dtype=torch.float32):
    """Return hidden states whose sums with small multiples of 1/16 are exact."""
    return ((torch.arange(size[0] * size[1] * size[2]) % 33 - 16) / 16).reshape(size).to(dtype)


@dataclass
class Pipe:
    """A pipeline that calls the model once per step and branch. ``first`` and ``rest`` are what the first block and the
    others add at each step of each branch: a number, or one for each sample.
    """

    transformer: nn.Module = field(default_factory=Scripted)
    scheduler: object = field(default_factory=lambda: FlowMatchEulerDiscreteScheduler(shift=3.0))
    device = torch.device("cpu")

    def __call__(self, first, rest=None, *, size=(1, TOKENS, WIDTH), callback=None):
        """Return the model's outputs of each step and each branch. ``callback`` is called before each step."""
        branches = first if isinstance(first, dict) else {"cond": first}
        rest = rest or {}
        text = {name: torch.full((size[0], 3, size[2]), float(i)) for i, name in enumerate(branches)}
        steps = len(next(iter(branches.values())))
        self.scheduler.set_timesteps(sigmas=[1 - i / steps for i in range(steps)])
        outputs = []
        latents = x = inputs_of(size)
        with torch.no_grad():
            for step, t in enumerate(self.scheduler.timesteps):
                if callback is not None:
                    callback(self, step, t, {})
                for name, values in branches.items():
                    now = torch.tensor(values[step])
                    second = torch.tensor(rest[name][step]) if name in rest else 10 * now
                    added = torch.stack([now, second]).reshape(2, -1, 1, 1)
                    call = {"encoder_hidden_states": text[name], "added": added}
                    with self.transformer.cache_context(name):
                        outputs.append(self.transformer(hidden_states=x, **call))
                latents = self.scheduler.step(torch.zeros_like(latents), t, latents, return_dict=False)[0]
        return outputs


def cached(pipe=None, **options):
    """Return ``pipe`` with a cache of the threshold 0.1."""
    options = {"residual_diff_threshold": 0.1, "adapter": ADAPTER, **options}
    return apply_cache_on_pipe(Pipe() if pipe is None else pipe, **options)


def call_model(model, *values, between=None):
    """Return the outputs of calls in which the first block adds these values, and the others ten times as much."""
    with torch.no_grad():
        added = [torch.tensor([x, 10 * x]) for x in values]
        return [model(torch.ones(1, TOKENS, WIDTH), torch.zeros(1, 3, WIDTH), x, between) for x in added]


def verdicts(report, branch=None):
    return [row.verdict.name.lower() for row in report.rows if branch in (None, row.branch)]


class Waits(TorchFunctionMode):
    """A counter of the times that the host reads a tensor. Forecast weights are float64, and never on a device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        reads = (torch.equal, Tensor.item, Tensor.tolist, Tensor.cpu, Tensor.__bool__, Tensor.__float__, Tensor.__int__)
        self.count += func in reads and args[0].dtype != torch.float64
        return func(*args, **(kwargs or {}))
