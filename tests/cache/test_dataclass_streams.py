"""Blocks that take and return dataclasses: the cache stores residuals of the fields that they change."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from para_core import BlockGroup, CachedBlocks, apply_cache, model_cache_report
from tests.cache.scripted import verdicts
from tests.tiny import relative_error


@dataclass(frozen=True)
class Stream:
    time: torch.Tensor
    text: torch.Tensor
    x: torch.Tensor
    name: str = "video"
    mask: torch.Tensor | None = None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def compute(self, x, text, time):
        return x + torch.tanh(self.layer(x + text.mean(1, keepdim=True)) + time[..., None])


class OfTensors(Block):
    def forward(self, x, text, time):
        return self.compute(x, text, time)


class OfOne(Block):
    def forward(self, video):
        return replace(video, x=self.compute(video.x, video.text, video.time))


class OfTwo(Block):
    def forward(self, video, sound, scale=1.0):
        video = replace(video, x=self.compute(video.x, video.text, video.time))
        return video, None if sound is None else replace(sound, x=self.compute(sound.x, video.x, sound.time))


class Model(nn.Module):
    def __init__(self, block):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(block() for _ in range(5))

    def forward(self, video, sound=None):
        for block in self.blocks:
            if isinstance(block, OfTensors):
                video = replace(video, x=block(video.x, video.text, video.time))
            elif isinstance(block, OfOne):
                video = block(video)
            else:
                video, sound = block(video, sound)
        return video.x if sound is None else torch.cat([video.x, sound.x], dim=1)


def noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def steps(model, sound=False, num_texts=1):
    """Return the outputs of six steps. The last one is far from the others."""
    outputs = []
    for step in range(6):
        for seed in range(num_texts):
            far = 0.01 * step + 3 * (step == 5)
            times, text = torch.full((1, 7), 1 - step / 99), noise(1, 3, 8, seed=10 + seed)
            video = Stream(times, text, noise(1, 7, 8) + far)
            args = [Stream(times[:, :5], text, noise(1, 5, 8, seed=3) - far)] if sound else []
            outputs.append(model(video, *args))
    return outputs


def cached(block, threshold, compiled=False, **settings):
    blocks = CachedBlocks((BlockGroup(("blocks",), **settings),), conditions=("video.text",))
    model = apply_cache(Model(block).requires_grad_(False), blocks, residual_diff_threshold=threshold)
    if compiled:
        torch._dynamo.reset()
        model.compile(backend="eager", fullgraph=True)
    return model


ONE = [
    {"streams": ("video",), "measured": "video"},
    {"streams": ("video.x",), "measured": "video.x"},
    {"streams": ("video.x",), "measured": "video.x", "chained": True},
]


@pytest.mark.parametrize("num_texts", [1, 2])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("settings", ONE)
def test_blocks_of_a_dataclass_equal_blocks_of_tensors(settings, compiled, num_texts):
    expected = cached(OfTensors, 0.1, streams=("x",), measured="x")
    model = cached(OfOne, 0.1, compiled, **settings)
    wanted = steps(expected, num_texts=num_texts)
    for out, reference in zip(steps(model, num_texts=num_texts), wanted, strict=True):
        assert relative_error(out, reference) < 1e-6
    assert verdicts(model_cache_report(model)) == verdicts(model_cache_report(expected))
    assert verdicts(model_cache_report(model)) == [
        *["warmup"] * num_texts,
        *["hit"] * 4 * num_texts,
        *["miss"] * num_texts,
    ]


@pytest.mark.parametrize("fields", ["", ".x"])
@pytest.mark.parametrize("sound", [False, True])
def test_blocks_of_two_dataclasses_are_cached(sound, fields):
    streams = (f"video{fields}", f"sound{fields}")
    exact = steps(Model(OfTwo).requires_grad_(False), sound)
    for out, wanted in zip(steps(cached(OfTwo, 0.0, streams=streams, measured=streams[0]), sound), exact, strict=True):
        assert torch.equal(out, wanted)
    model = cached(OfTwo, 0.1, streams=streams, measured=streams[0])
    outputs = steps(model, sound)
    assert verdicts(model_cache_report(model)) == ["warmup", "hit", "hit", "hit", "hit", "miss"]
    assert torch.equal(outputs[0], exact[0]) and torch.equal(outputs[-1], exact[-1])
    assert 1e-5 < relative_error(outputs[1], exact[1]) < 0.1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"streams": ("video.y",), "measured": "video.y"}, "Stream .*'y'"),
        ({"streams": ("video.name",), "measured": "video.name"}, "video.name is a str"),
    ],
)
def test_unknown_field_raises(settings, message):
    with pytest.raises(TypeError, match=message):
        steps(cached(OfOne, 0.1, **settings))
