"""Plans name the fields of dataclasses, in arguments and outputs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from para_core import Attention, Gather, Plan, Split
from para_core.distributed.mesh import sequence_mesh
from para_core.plans.apply import apply_plan, remove_plan
from tests.adapters.propose.models import attend
from tests.tiny import cpu_mesh, fill, relative_error


@dataclass(frozen=True)
class Context:
    text: Tensor
    time: Tensor


@dataclass(frozen=True)
class FrozenStream:
    x: Tensor
    context: Context
    enabled: bool = True


@dataclass
class Stream:
    x: Tensor
    context: Context
    enabled: bool = True


class NamedStream(NamedTuple):
    x: Tensor
    context: Context
    enabled: bool = True


def with_x(stream: Any, x: Tensor) -> Any:
    if isinstance(stream, NamedStream):
        return stream._replace(x=x)
    if isinstance(stream, FrozenStream):
        return replace(stream, x=x)
    stream.x = x
    return stream


class Block(nn.Module):
    """Attention to the tokens, and to text in a dataclass inside the dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.q, self.kv = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 32)

    def forward(self, stream: Any, scale: Tensor) -> Any:
        x = stream.x * (1 + stream.context.time[..., None]) + scale
        x = stream.x + attend(*self.qkv(x).chunk(3, dim=2))
        x = x + attend(self.q(x), *self.kv(stream.context.text).chunk(2, dim=2))
        return with_x(stream, x)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, stream: Any, scale: Tensor) -> Any:
        for block in self.blocks:
            stream = block(stream, scale)
        return stream


TEXT = {"blocks.*": (Attention(("video",)), Attention(("video",), ("text",)))}
TIME = Split(dim=1, like="video")
AT_INPUTS = Plan(
    inputs={"stream.x": Split(dim=1, segment="video"), "stream.context.time": TIME, "scale": TIME},
    outputs={"": Gather(dim=1, segment="video", field="x")},
    joint_order=("video",),
    attention=TEXT,
)
AT_BLOCKS = Plan(
    inputs={},
    inner={
        "blocks.0": {"stream.x": Split(dim=1, segment="video"), "stream.context.time": TIME},
        "blocks.*": {"scale": TIME},
    },
    # Fields of a dataclass and of a named tuple count as entries.
    outputs={"blocks.-1": (Gather(dim=1, segment="video"),)},
    joint_order=("video",),
    attention=TEXT,
)
AT_OUTPUTS = replace(AT_BLOCKS, inner={**AT_BLOCKS.inner, "blocks.1": {"0.x": Gather(1, "video")}}, outputs={"": ()})


def arguments(kind: Any, tokens: int = 7) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(tokens)
    x, text, time, scale = (
        torch.randn(*shape, generator=generator) for shape in ((2, tokens, 16), (2, 4, 16), (2, tokens), (1, tokens, 1))
    )
    return {"stream": kind(x, Context(text, time)), "scale": scale}


def run(kind: Any, plan: Plan, shape: tuple[int, int], compiled: bool) -> tuple[Any, float]:
    model = fill(Pair(), seed=1)
    apply_plan(model, plan, sequence_mesh(cpu_mesh(*shape)))
    given = arguments(kind)
    called = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    with torch.no_grad():
        out = called(**given)
        called(**arguments(kind, tokens=9))
    remove_plan(model)
    assert type(out) is kind
    assert out.enabled
    return out.x, relative_error(given["stream"].x, arguments(kind)["stream"].x)


@pytest.mark.parametrize("kind", [FrozenStream, Stream, NamedStream])
@pytest.mark.parametrize("plan", [AT_INPUTS, AT_BLOCKS, AT_OUTPUTS], ids=["inputs", "blocks", "outputs"])
@pytest.mark.parametrize("shape", [(1, 2), (2, 1)])
def test_fields_are_sharded_and_gathered(rank_pool, kind, plan, shape):
    with torch.no_grad():
        expected = fill(Pair(), seed=1)(**arguments(kind)).x
    for out, changed in rank_pool.run(run, 2, kind, plan, shape, compiled=False):
        assert relative_error(out, expected) < 1e-5
        # The caller's object must keep all tokens.
        assert changed == 0


def test_fields_are_sharded_in_a_graph(rank_pool):
    with torch.no_grad():
        expected = fill(Pair(), seed=1)(**arguments(FrozenStream)).x
    for out, _ in rank_pool.run(run, 2, FrozenStream, AT_BLOCKS, (1, 2), compiled=True):
        assert relative_error(out, expected) < 1e-5
