"""Modular pipelines of diffusers on two ranks equal the unmodified ones, with and without a cache, and can be
undone.
"""

import diffusers.modular_pipelines
import pytest
import torch

from benchmarks.pipelines.modular_pipelines import LARGEST_SHARE, counted
from para_core.adapters import (
    apply_cache_on_pipe,
    cache_report,
    parallelize_pipe,
    remove_cache_from_pipe,
    unparallelize_pipe,
)
from para_core.adapters.registry import adapter_for, transformers_of
from tests import modular_folders
from tests.tiny import cpu_mesh, relative_error
from zoo.tiny.pipelines.modular import MODULAR

# These pipelines have sound, three modalities in one sequence, cached keys, a UNet, and two transformers.
SAMPLE = ("Echo", "MiniMaxH3", "QwenImage21", "StableDiffusionXL", "Wan22Vace")
NAMES = [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.long) for name in MODULAR]


def meshes_of(name):
    """Return the sizes of ring, Ulysses and batch of each mesh for this pipeline."""
    return [(1, 2, 1), (2, 1, 1), *([(1, 1, 2)] if MODULAR[name].guided else [])]


def caches(pipe):
    """Whether an adapter describes the blocks of every transformer."""
    adapters = [adapter_for(module) for module in transformers_of(pipe).values()]
    return bool(adapters) and all(adapter.blocks is not None for adapter in adapters)


def run_parallel(name, ring, ulysses, batch):
    tiny = MODULAR[name]
    pipe = parallelize_pipe(tiny.build(), mesh=cpu_mesh(ring, ulysses, batch=batch))
    out, work = counted(pipe, tiny.generate)
    if caches(pipe):
        apply_cache_on_pipe(pipe, residual_diff_threshold=0.0)
        cached, computed = tiny.generate(pipe), cache_report(pipe).computed
    else:
        with pytest.raises(TypeError, match="cannot be cached"):
            apply_cache_on_pipe(pipe)
        cached, computed = out, 1
    return out, work, cached, computed, tiny.generate(unparallelize_pipe(remove_cache_from_pipe(pipe)))


@pytest.mark.sample(3)
@pytest.mark.filterwarnings("ignore::para_core.user_warnings.CacheWarning")
# diffusers passes this flag in Wan Animate 2.
@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning")
@pytest.mark.parametrize("name", NAMES)
def test_modular_pipeline_on_two_ranks_equals_the_unmodified_one(rank_pool, name):
    expected, total = counted(MODULAR[name].build(), MODULAR[name].generate)
    transformers = transformers_of(MODULAR[name].build())
    for mesh in meshes_of(name):
        for out, work, cached, computed, alone in rank_pool.run(run_parallel, 2, name, *mesh):
            assert relative_error(out, expected) < 1e-5, mesh
            # A rank that computed everything would do as much as one process. Layers of a UNet see global shapes.
            assert work < LARGEST_SHARE * total or not transformers, mesh
            # With the cached keys of Qwen-Image 2.1 all blocks run, and the cache makes no decision.
            assert torch.equal(cached, out) and (computed > 0 or name.startswith("QwenImage21")), mesh
            assert torch.equal(alone, expected), mesh


def test_every_modular_pipeline_has_a_tiny_one():
    ending = "ModularPipeline"
    names = {name for name in dir(diffusers.modular_pipelines) if name.endswith(ending) and name != ending}
    assert {tiny.cls for tiny in MODULAR.values()} == names


# -- A whole pipeline, with a prompt and a guider that calls the transformer once for each branch.


def build():
    blocks, make = modular_folders.MODULAR["qwen-image"]
    expected, parts = [component.name for component in blocks().expected_components], make().components
    pipe = blocks().init_pipeline()
    pipe.update_components(**{part: parts[part] for part in expected if parts.get(part) is not None})
    pipe.set_progress_bar_config(disable=True)
    return pipe


def generate(pipe, prompt="a red circle"):
    call = {"prompt": prompt, "height": 48, "width": 80, "num_inference_steps": 4}
    return pipe(**call, generator=torch.Generator().manual_seed(7), output="latents")


def generate_parallel():
    pipe = parallelize_pipe(build(), mesh=cpu_mesh(1, 1, batch=2))
    outs = [generate(pipe)]
    with pytest.raises(ValueError, match="prompt"):
        generate(pipe, ["a red circle", "a blue square"][torch.distributed.get_rank()])
    apply_cache_on_pipe(pipe, residual_diff_threshold=1e9, max_consecutive_hits=2)
    outs.append(generate(pipe))
    hits = cache_report(pipe).hits
    return outs, hits, generate(unparallelize_pipe(pipe))


def test_a_whole_modular_pipeline_is_exact_in_parallel_and_cached(rank_pool):
    pipe = build()
    expected = [generate(pipe)]
    apply_cache_on_pipe(pipe, residual_diff_threshold=1e9, max_consecutive_hits=2)
    expected.append(generate(pipe))
    assert cache_report(pipe).hits > 0
    assert relative_error(expected[1], expected[0]) > 1e-6
    for outs, hits, alone in rank_pool.run(generate_parallel, 2):
        assert max(map(relative_error, outs, expected)) < 1e-5
        # Each rank computes one branch.
        assert hits * 2 == cache_report(pipe).hits
        assert torch.equal(alone, expected[1])
