"""Blocks that take and return dataclasses: the cache stores residuals of the fields that they change."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from para_core import BlockGroup, CachedBlocks, apply_cache, model_cache_report
from para_core.cache.apply import require_cache
from tests.cache.scripted import verdicts
from tests.tiny import fill, relative_error


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

    def compute(self, stream, text):
        x = torch.tanh(self.layer(stream.x + text.mean(1, keepdim=True)) + stream.time[..., None])
        return replace(stream, x=stream.x + x)


class OfOne(Block):
    def forward(self, video, sound=None):
        return self.compute(video, video.text)


class OfTwo(Block):
    def forward(self, video, sound):
        video = self.compute(video, video.text)
        return video, None if sound is None else self.compute(sound, video.x)


class Model(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(5))

    def forward(self, video, sound=None):
        for block in self.blocks:
            if isinstance(block, OfOne):
                video = block(video)
            else:
                video, sound = block(video, sound)
        return video.x if sound is None else torch.cat([video.x, sound.x], dim=1)


def steps(model, sound=False):
    """Return the outputs of six steps of two branches. The last one is far from the others."""
    outputs, generator = [], torch.Generator().manual_seed(0)
    texts, x, y = (torch.randn(n, 1, s, 8, generator=generator) for n, s in ((2, 3), (1, 7), (1, 5)))
    for step in range(6):
        for text in texts:
            far, times = 0.01 * step + 3 * (step == 5), torch.full((1, 7), 1 - step / 99)
            args = [Stream(times[:, :5], text, y[0] - far)] if sound else []
            with torch.no_grad():
                outputs.append(model(Stream(times, text, x[0] + far, mask=times > 0), *args))
    return outputs


def cached(block, threshold, streams, condition="video.text", **settings):
    group = BlockGroup(("blocks",), streams, streams[0], **settings)
    blocks = CachedBlocks((group,), conditions=(condition,))
    return apply_cache(fill(Model(block), seed=1), blocks, residual_diff_threshold=threshold)


@pytest.mark.parametrize(
    ("block", "streams", "sound"),
    [(OfOne, ("video",), False), (OfTwo, ("video.x", "sound.x"), True), (OfTwo, ("video", "sound"), False)],
)
def test_blocks_of_dataclasses_are_cached(block, streams, sound):
    torch._dynamo.reset()
    exact = steps(fill(Model(block), seed=1), sound)
    for out, wanted in zip(steps(cached(block, 0.0, streams), sound), exact, strict=True):
        assert torch.equal(out, wanted)
    model = cached(block, 0.1, streams)
    outputs = steps(model, sound)
    assert require_cache(model).device_of({"video": Stream(*torch.empty(3, 1, device="meta"))}).type == "meta"
    assert verdicts(model_cache_report(model)) == ["warmup"] * 2 + ["hit"] * 8 + ["miss"] * 2
    for index, (out, wanted) in enumerate(zip(outputs, exact, strict=True)):
        assert 1e-5 < relative_error(out, wanted) < 0.1 if 2 <= index < 10 else torch.equal(out, wanted)
    model = cached(block, 0.1, streams, chained=True)
    model.compile(backend="eager", fullgraph=True)
    for out, wanted in zip(steps(model, sound), outputs, strict=True):
        assert relative_error(out, wanted) < 1e-6


AS_TUPLE = type("AsTuple", (OfOne,), {"forward": lambda self, video, sound=None: (video.x, video.text)})
FLIPPED = type("Flipped", (OfOne,), {"forward": lambda self, video: replace(video, x=video.x + 1, mask=~video.mask)})
UNCHANGED = type("Unchanged", (OfOne,), {"forward": lambda self, video, sound=None: video})


@pytest.mark.parametrize(
    ("block", "streams", "condition", "error", "message"),
    [
        (OfOne, ("video.y",), "video.text", TypeError, "Stream .*'y'"),
        (OfOne, ("video.name",), "video.text", TypeError, "video.name is a str"),
        (OfOne, ("video",), "video.y", TypeError, r"'video\.y'; a Stream has no 'y'"),
        (UNCHANGED, ("video",), "video.text", ValueError, r"one of video\.time, .*video\.x.* Name a stream"),
        (FLIPPED, ("video",), "video.text", ValueError, r"another tensor of torch\.bool .*'video\.x'"),
        (AS_TUPLE, ("video.x", "video.text"), "video.text", ValueError, r"AsTuple .*returned shapes .*streams="),
    ],
)
def test_streams_that_do_not_fit_the_block_raise(block, streams, condition, error, message):
    with pytest.raises(error, match=message):
        steps(cached(block, 0.1, streams, condition))
