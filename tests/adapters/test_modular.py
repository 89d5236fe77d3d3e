"""Modular pipelines of diffusers generate the same on several ranks as alone."""

import pytest
import torch
from diffusers.modular_pipelines import FluxAutoBlocks, QwenImageAutoBlocks

from para_core.adapters import apply_cache_on_pipe, cache_report, parallelize_pipe, unparallelize_pipe
from tests.tiny import cpu_mesh, each_rank_alone, flux_pipe, relative_error
from zoo.tiny.pipelines import PIPELINES

# Each case has blocks, a pipeline with the components that they expect, and the mesh as batch × ring × ulysses.
CASES = {
    "flux": (FluxAutoBlocks, flux_pipe, (1, 1, 2)),
    # Its guider calls the transformer once for each branch.
    "qwen-image": (QwenImageAutoBlocks, PIPELINES["qwen-image"].build, (2, 1, 1)),
}


def build(name):
    blocks, make, _ = CASES[name]
    expected, pipe = [component.name for component in blocks().expected_components], blocks().init_pipeline()
    parts = make().components
    pipe.update_components(**{part: parts[part] for part in expected if parts.get(part) is not None})
    pipe.set_progress_bar_config(disable=True)
    return pipe


def generate(pipe, prompt="a red circle"):
    call = {"prompt": prompt, "height": 48, "width": 80, "num_inference_steps": 4}
    return pipe(**call, generator=torch.Generator().manual_seed(7), output="latents")


def generate_parallel(name):
    batch, ring, ulysses = CASES[name][2]
    pipe = parallelize_pipe(build(name), mesh=cpu_mesh(ring, ulysses, batch=batch))
    outs = [generate(pipe)]
    with each_rank_alone():
        unaware = generate(pipe)
    apply_cache_on_pipe(pipe, residual_diff_threshold=1e9, max_consecutive_hits=2)
    outs.append(generate(pipe))
    hits = cache_report(pipe).hits
    return outs, hits, unaware, generate(unparallelize_pipe(pipe))


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CASES)
def test_a_modular_pipeline_is_exact_in_parallel_and_cached(rank_pool, name):
    pipe = build(name)
    expected = [generate(pipe)]
    apply_cache_on_pipe(pipe, residual_diff_threshold=1e9, max_consecutive_hits=2)
    expected.append(generate(pipe))
    assert cache_report(pipe).hits > 0
    assert relative_error(expected[1], expected[0]) > 1e-6
    batch = CASES[name][2][0]
    for outs, hits, unaware, alone in rank_pool.run(generate_parallel, 2, name):
        assert max(map(relative_error, outs, expected)) < 1e-5
        # Ranks along the batch dim compute one branch each. The other ranks decide by what they exchange.
        assert hits * batch == cache_report(pipe).hits
        assert batch == 2 or relative_error(unaware, expected[0]) > 1e-3
        assert torch.equal(alone, expected[1])


def generate_other_prompts():
    pipe = parallelize_pipe(build("flux"), mesh=cpu_mesh(1, 2))
    with pytest.raises(ValueError, match="prompt"):
        generate(pipe, ["a red circle", "a blue square"][torch.distributed.get_rank()])


def test_modular_pipeline_with_differing_sizes_raises(rank_pool):
    rank_pool.run(generate_other_prompts, 2)
