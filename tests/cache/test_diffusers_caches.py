"""Caches of diffusers are refused on several ranks, and together with this one."""

import pytest
import torch
from diffusers import FirstBlockCacheConfig, PyramidAttentionBroadcastConfig
from diffusers.hooks import apply_first_block_cache

from para_core import apply_cache
from para_core.adapters import (
    apply_cache_on_pipe,
    apply_cache_on_transformer,
    parallelize_pipe,
    parallelize_transformer,
    remove_cache_from_pipe,
)
from para_core.adapters.models.flux import FLUX
from tests.tiny import cpu_mesh, flux_call, flux_inputs, flux_pipe, flux_transformer, relative_error

pytestmark = pytest.mark.filterwarnings("ignore:.*cache ")
THEIRS = FirstBlockCacheConfig(threshold=0.1)


def test_our_cache_over_theirs_is_refused():
    pipe = flux_pipe()
    pipe.transformer.enable_cache(THEIRS)
    expected = pipe(**flux_call()).images
    message = r"FluxTransformer2DModel .*\(FirstBlockCacheConfig\).*disable_cache\(\).*apply_cache_on_pipe"
    with pytest.raises(ValueError, match=message):
        apply_cache_on_pipe(pipe)
    with pytest.raises(ValueError, match=message):
        apply_cache_on_transformer(pipe.transformer)
    with pytest.raises(ValueError, match=message):
        apply_cache(pipe.transformer, FLUX.blocks, residual_diff_threshold=0.1)
    assert torch.equal(pipe(**flux_call()).images, expected)
    pipe.transformer.disable_cache()
    apply_cache_on_pipe(pipe)
    pipe(**flux_call())


def test_their_cache_over_ours_is_refused():
    pipe = apply_cache_on_pipe(flux_pipe())
    pipe.transformer.enable_cache(THEIRS)
    with pytest.raises(ValueError, match=r"FluxTransformer2DModel .*disable_cache\(\)"):
        pipe(**flux_call())
    remove_cache_from_pipe(pipe)
    pipe(**flux_call())


def test_a_hook_of_theirs_without_a_config_is_seen():
    transformer = flux_transformer()
    apply_first_block_cache(transformer, THEIRS)
    with pytest.raises(ValueError, match=r"FluxTransformer2DModel .*diffusers"):
        apply_cache_on_transformer(transformer)


def errors_on_ranks(shape):
    ring, ulysses, batch = shape
    mesh, messages = cpu_mesh(ring, ulysses, batch=batch), []
    broadcast = PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2, current_timestep_callback=lambda: 500
    )
    for theirs in (THEIRS, broadcast):
        pipe = parallelize_pipe(flux_pipe(), mesh=mesh)
        pipe.transformer.enable_cache(theirs)
        with pytest.raises(RuntimeError, match="cache of diffusers") as caught:
            pipe(**flux_call())
        messages.append(str(caught.value))
        pipe.transformer.disable_cache()
        generated = pipe(**flux_call()).images
    if batch > 1:
        return messages, generated
    transformer = parallelize_transformer(flux_transformer(), mesh=mesh)
    transformer.enable_cache(THEIRS)
    with pytest.raises(RuntimeError, match="cache of diffusers") as caught:
        transformer(**flux_inputs(10, 3))
    return [*messages, str(caught.value)], generated


@pytest.mark.parametrize("shape", [(1, 2, 1), (1, 1, 2)])
@pytest.mark.filterwarnings("ignore:.*guidance ")
def test_their_cache_on_ranks_is_refused_everywhere(rank_pool, shape):
    expected = flux_pipe()(**flux_call()).images
    for messages, generated in rank_pool.run(errors_on_ranks, 2, shape=shape):
        for message in messages:
            assert "apply_cache_on_pipe(pipe, ...)" in message
        assert relative_error(generated, expected) < 1e-5
