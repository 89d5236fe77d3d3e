"""A plan keeps the tokens of each frame on one rank."""

import pytest
import torch

from para_core.distributed.mesh import sequence_mesh
from para_core.plans.apply import apply_plan
from tests.adapters.propose.test_structures import FRAMES, OfFrames, frames_of
from tests.tiny import cpu_mesh, fill, relative_error


def run(shape, frames, compiled, plan=FRAMES):
    model = fill(OfFrames(), seed=1)
    apply_plan(model, plan, sequence_mesh(cpu_mesh(*shape)))
    called = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    with torch.no_grad():
        return [called(**frames_of(number)) for number in frames]


@pytest.mark.parametrize(("shape", "compiled"), [((1, 2), False), ((2, 1), False), ((1, 2), True)])
def test_frames_are_sharded_whole(rank_pool, shape, compiled):
    # A single frame is fewer than one for each rank.
    frames = (3, 4) if compiled else (5, 1, 4)
    model = fill(OfFrames(), seed=1)
    with torch.no_grad():
        expected = [model(**frames_of(number)) for number in frames]
    for outs in rank_pool.run(run, 2, shape, frames, compiled):
        assert max(relative_error(out, whole) for out, whole in zip(outs, expected, strict=True)) < 1e-5


def test_frames_are_replicated(rank_pool):
    model = fill(OfFrames(), seed=1)
    with torch.no_grad():
        expected = model(**frames_of(5))
    for (out,) in rank_pool.run(run, 2, (1, 2), (5,), compiled=False, plan=FRAMES.with_replicated("video")):
        assert relative_error(out, expected) < 1e-5
