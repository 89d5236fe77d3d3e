"""First Block Cache on every pipeline and mesh: when off it changes nothing, and when on it follows the rule."""

import warnings
from functools import cache

import pytest
import torch

from para_core.adapters import apply_cache_on_pipe, cache_report, parallelize_pipe, remove_cache_from_pipe
from tests.adapters.test_pipelines import build, generate, long_but
from tests.cache.scripted import verdicts
from tests.tiny import cpu_mesh, relative_error
from zoo.tiny.pipelines import PIPELINES
from zoo.tiny.pipelines.shelf import SHELF_PIPELINES

# The second and third of four steps are skipped.
ALWAYS = {"residual_diff_threshold": 1e9, "max_consecutive_hits": 2}
# It keeps the keys of the prompt from the first step on, and with these all blocks run.
NEVER_ASKED = "qwen-image 2.1"
# The blocks of AnyFlow FAR store keys for later calls.
CACHED = [name for name in PIPELINES if name not in (NEVER_ASKED, "anyflow far")]
# The default run chooses from the first way to call each model.
FIRST_WAYS = [name for name in CACHED if "," not in name]


def latents(pipe, name):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*cache ")
        return generate(pipe, name, num_inference_steps=4)


@pytest.mark.parametrize("name", [pytest.param(NEVER_ASKED, id="QwenImage21Transformer2DModel")])
def test_cache_never_asked_warns_with_reason(name):
    pipe = apply_cache_on_pipe(build(name), **ALWAYS)
    with pytest.warns(UserWarning, match=r"kv_cache, .* use_kv_cache=False"):
        generate(pipe, name)
    assert cache_report(pipe).rows == []


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", long_but([*FIRST_WAYS, "qwen-image 2.1, no cached keys"], CACHED))
def test_threshold_0_is_bit_exact_and_removal_restores(name):
    pipe = build(name)
    cls, classes = type(pipe), [type(module) for module in pipe.transformer.modules()]
    alone = latents(pipe, name)

    apply_cache_on_pipe(pipe, residual_diff_threshold=0.0)
    assert torch.equal(latents(pipe, name), alone)
    assert cache_report(pipe).hits == 0
    rows = len(cache_report(pipe).rows)

    apply_cache_on_pipe(pipe, **ALWAYS)
    skipped = latents(pipe, name)
    report = cache_report(pipe)
    assert len(report.rows) == rows
    assert report.hits > 0
    assert relative_error(skipped, alone) > 1e-6

    remove_cache_from_pipe(pipe)
    assert torch.equal(latents(pipe, name), alone)
    assert type(pipe) is cls
    assert [type(module) for module in pipe.transformer.modules()] == classes


def generate_cached(name, shape=None, cache_first=True):
    pipe = build(name)
    for step in ("cache", "parallel") if cache_first else ("parallel", "cache"):
        if step == "cache":
            apply_cache_on_pipe(pipe, **ALWAYS)
        elif shape is not None:
            parallelize_pipe(pipe, mesh=cpu_mesh(*shape[1:], batch=shape[0]))
    return latents(pipe, name), verdicts(cache_report(pipe))


cached_alone = cache(generate_cached)


@pytest.mark.sample(3)
@pytest.mark.parametrize(("shape", "cache_first"), [((1, 1, 2), False), ((1, 2, 1), True)])
@pytest.mark.parametrize("name", long_but(FIRST_WAYS, [n for n in CACHED if n in (*FIRST_WAYS, *SHELF_PIPELINES)]))
def test_parallel_cache_skips_same_steps(rank_pool, name, shape, cache_first):
    expected, alone = cached_alone(name)
    for output, decisions in rank_pool.run(generate_cached, 2, name, shape, cache_first):
        assert relative_error(output, expected) < 1e-4
        assert decisions == alone
