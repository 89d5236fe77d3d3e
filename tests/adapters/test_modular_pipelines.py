"""Modular pipelines of diffusers on two ranks equal the unmodified ones, with and without a cache."""

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
from tests.tiny import cpu_mesh, relative_error
from zoo.tiny.pipelines.modular import MODULAR

# These pipelines have sound, three modalities in one sequence, cached keys, a UNet, and two transformers.
SAMPLE = ("Echo", "MiniMaxH3", "QwenImage21", "StableDiffusionXL", "Wan22Vace")
NAMES = [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.long) for name in MODULAR]


def meshes_of(name):
    """Return the sizes of ring, Ulysses and batch of each mesh for this pipeline."""
    return [(1, 2, 1), (2, 1, 1), *([(1, 1, 2)] if MODULAR[name].guided else [])]


def run_parallel(name, ring, ulysses, batch):
    tiny = MODULAR[name]
    pipe = parallelize_pipe(tiny.build(), mesh=cpu_mesh(ring, ulysses, batch=batch))
    out, work = counted(pipe, tiny.generate)
    adapters = [adapter_for(module) for module in transformers_of(pipe).values()]
    if adapters and all(adapter.blocks is not None for adapter in adapters):
        apply_cache_on_pipe(pipe, residual_diff_threshold=0.0)
        cached, computed = tiny.generate(pipe), cache_report(pipe).computed
    else:
        with pytest.raises(TypeError, match="cannot be cached"):
            apply_cache_on_pipe(pipe)
        cached, computed = out, 1
    return out, work, cached, computed, tiny.generate(unparallelize_pipe(remove_cache_from_pipe(pipe)))


@pytest.mark.sample(1)
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
