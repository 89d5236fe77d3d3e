"""First Block Cache on every pipeline and mesh: when off it changes nothing, and when on it follows the rule."""

import warnings
from functools import cache

import pytest
import torch

from para_core.adapters import apply_cache_on_pipe, cache_report, parallelize_pipe, remove_cache_from_pipe
from tests.adapters.test_pipelines import build, generate, long_but
from tests.tiny import cpu_mesh, relative_error
from zoo.tiny.pipelines import PIPELINES
from zoo.tiny.pipelines.shelf import SHELF_PIPELINES

# The second and third of four steps are skipped.
ALWAYS = {"residual_diff_threshold": 1e9, "max_consecutive_hits": 2}
# There is one pipeline for each transformer.
FAMILIES = (
    "hunyuan mochi cogvideox wan chronoedit framepack qwen-image ltx ltx2 flux2 hidream auraflow pixart lumina2 helios"
)
ON_TWO_RANKS = FAMILIES.split()
ON_TWO_RANKS += [
    "wan 2.2",
    "wan vace",
    "wan animate",
    "skyreels v2",
    "hunyuan 1.5",
    "stable diffusion 3",
    "qwen-image, controlnet",
    "z-image",
    "chroma",
    "kandinsky 5",
    # Its tokens are [S, B, C], so their first dim has no samples.
    "ernie-image",
]
# The blocks store keys for later calls.
UNCACHED = ("anyflow far",)
# It keeps the keys of the prompt from the first step on, and with these all blocks run.
NEVER_ASKED = ("qwen-image 2.1",)
# These models call the branches of guidance one after the other, and the second half of the ranks computes the second
# branch.
GUIDED = ("wan", "qwen-image", "hunyuan 1.5", "lumina2", "helios")


def latents(pipe, name):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*cache ")
        return generate(pipe, name, num_inference_steps=4)


@cache
def cached_alone(name):
    pipe = apply_cache_on_pipe(build(name), **ALWAYS)
    return latents(pipe, name), [row.verdict for row in cache_report(pipe).rows]


@pytest.mark.parametrize("name", NEVER_ASKED)
def test_cache_never_asked_warns_with_reason(name):
    pipe = apply_cache_on_pipe(build(name), **ALWAYS)
    with pytest.warns(UserWarning, match=r"kv_cache, .* use_kv_cache=False"):
        generate(pipe, name)
    assert cache_report(pipe).rows == []


@pytest.mark.parametrize("name", UNCACHED)
def test_cache_on_blocks_that_store_keys_is_refused(name):
    with pytest.raises(TypeError, match=r"store keys"):
        apply_cache_on_pipe(build(name))


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    long_but(
        [*ON_TWO_RANKS, "qwen-image 2.1, no cached keys"],
        dict.fromkeys(n for n in PIPELINES if n not in (*NEVER_ASKED, *UNCACHED)),
    ),
)
def test_threshold_0_is_bit_exact_and_removal_restores(name):
    pipe = build(name)
    cls, transformer_cls = type(pipe), type(pipe.transformer)
    block_classes = [type(module) for module in pipe.transformer.modules()]
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
    assert skipped.isfinite().all()
    assert relative_error(skipped, alone) > 1e-6

    remove_cache_from_pipe(pipe)
    assert torch.equal(latents(pipe, name), alone)
    assert type(pipe) is cls
    assert type(pipe.transformer) is transformer_cls
    assert [type(module) for module in pipe.transformer.modules()] == block_classes


def generate_cached(name, shape, cache_first):
    pipe = build(name)
    if cache_first:
        apply_cache_on_pipe(pipe, **ALWAYS)
    ring, ulysses, batch = shape
    parallelize_pipe(pipe, mesh=cpu_mesh(ring, ulysses, batch=batch))
    if not cache_first:
        apply_cache_on_pipe(pipe, **ALWAYS)
    return latents(pipe, name), [row.verdict for row in cache_report(pipe).rows]


def check_parallel(rank_pool, name, shape, cache_first):
    expected, verdicts_alone = cached_alone(name)
    for output, verdicts in rank_pool.run(generate_cached, 2, name, shape, cache_first):
        assert relative_error(output, expected) < 1e-4
        assert verdicts == verdicts_alone


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "name", long_but(ON_TWO_RANKS, dict.fromkeys(n for n in [*ON_TWO_RANKS, *SHELF_PIPELINES] if n not in UNCACHED))
)
def test_parallel_cache_skips_same_steps(rank_pool, name):
    check_parallel(rank_pool, name, (1, 2, 1), cache_first=False)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", long_but(["hunyuan", "wan", "ltx2", "flux2"], ON_TWO_RANKS))
def test_cache_before_parallel_on_ring_skips_same_steps(rank_pool, name):
    check_parallel(rank_pool, name, (2, 1, 1), cache_first=True)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", GUIDED)
def test_with_guidance_in_parallel_each_half_caches_its_branch(rank_pool, name):
    expected, verdicts_alone = cached_alone(name)
    for output, verdicts in rank_pool.run(generate_cached, 2, name, (1, 1, 2), cache_first=True):
        assert relative_error(output, expected) < 1e-4
        # All ranks compute the first call if its output cannot be predicted.
        extra = 0 if name in ("wan", "qwen-image") else 1
        assert len(verdicts_alone) // 2 <= len(verdicts) <= len(verdicts_alone) // 2 + extra


def pause_guidance(pipe, step, timestep, tensors):
    """Turn guidance off from the third to the fifth of eight steps."""
    pipe._guidance_scale = 1.0 if step in (1, 2, 3) else 5.0
    return tensors


def generate_cached_with_pause(shape=None):
    pipe = apply_cache_on_pipe(build("wan"), residual_diff_threshold=1e9, max_consecutive_hits=1)
    if shape is not None:
        parallelize_pipe(pipe, mesh=cpu_mesh(*shape[1:], batch=shape[0]))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*cache ")
        return generate(pipe, "wan", num_inference_steps=8, callback_on_step_end=pause_guidance)


def test_paused_guidance_over_ranks_skips_same_steps(rank_pool):
    expected = generate_cached_with_pause()
    for output in rank_pool.run(generate_cached_with_pause, 2, (2, 1, 1)):
        assert relative_error(output, expected) < 1e-4
