"""Every block of docs/migration.md, and a peer's if that is installed, gives the image of one pipeline on two ranks."""

import importlib.util
import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from diffusers import FirstBlockCacheConfig

from tests.lift_out import ROOT
from tests.tiny import load_pipe, relative_error

PAGE = (ROOT / "docs/migration.md").read_text()
BLOCK = re.compile(r"^<!-- (there: (\w+), |here: )(exact|cached) -->\n\n```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCKS = [(peer or "para_core", kind, source) for _, peer, kind, source in BLOCK.findall(PAGE)]
# The cache needs enough steps to skip some.
STEPS = {"exact": 4, "cached": 28}


def draw(kind, prepare):
    pipe = load_pipe(ROOT / "zoo/flux/pipeline")
    prepare(pipe)
    size = {"height": 64, "width": 64, "max_sequence_length": 16, "num_inference_steps": STEPS[kind]}
    generator = torch.Generator().manual_seed(0)
    return pipe("a large red circle in the centre", generator=generator, output_type="latent", **size).images


def draw_after(source, kind):
    # diffusers reads the number of accelerators, which is 0 on a CPU.
    with mock.patch.object(torch.accelerator, "device_count", dist.get_world_size):
        return draw(kind, lambda pipe: exec(compile(source, "docs/migration.md", "exec"), {"pipe": pipe}))


@pytest.fixture(scope="module")
def expected():
    """Return the outputs of plain diffusers on one device, without a cache and with its First Block Cache."""
    config = FirstBlockCacheConfig(threshold=0.12)
    cached = draw("cached", lambda pipe: pipe.transformer.enable_cache(config))
    assert relative_error(cached, draw("cached", lambda pipe: None)) > 1e-4  # The cache skipped some steps.
    return {"exact": draw("exact", lambda pipe: None), "cached": cached}


@pytest.mark.sample(1)
@pytest.mark.filterwarnings("default")  # These are a peer's own warnings.
@pytest.mark.parametrize(("peer", "kind", "source"), BLOCKS, ids=[f"{i}-{block[0]}" for i, block in enumerate(BLOCKS)])
def test_block_generates_the_same_as_one_device(rank_pool, expected, peer, kind, source):
    if peer == "para_attn":
        pytest.skip("ParaAttention 0.3.38 does not run with diffusers 0.42: what it raises stands on the page")
    if peer != "para_core" and importlib.util.find_spec(peer) is None:
        pytest.skip(f"{peer} is not installed")
    for out in rank_pool.run(draw_after, 2, source, kind, timeout=120):
        assert relative_error(out, expected[kind]) < 1e-5


def test_every_python_block_says_whose_it_is():
    assert len(BLOCKS) == PAGE.count("```python") > 8
