"""FLUX with a cache: the modulated input, a LoRA, fewer negative prompts than prompts, and caches of diffusers."""

from functools import partial

import pytest
import torch
from diffusers import FirstBlockCacheConfig, FluxPipeline, hooks

from para_core import apply_cache
from para_core.adapters import (
    apply_cache_on_pipe,
    apply_cache_on_transformer,
    cache_report,
    parallelize_pipe,
    remove_cache_from_pipe,
)
from para_core.adapters.models.flux import FLUX
from para_core.cache.attachment import DIFFUSERS_CACHES
from tests.cache.scripted import verdicts
from tests.tiny import cpu_mesh, flux_call, flux_pipe, flux_transformer, relative_error
from tests.weights.pipes import add_lora

ALWAYS = {"residual_diff_threshold": 1e9, "max_consecutive_hits": 1}


def generate(pipe, steps=4, **options):
    return pipe(**flux_call(num_inference_steps=steps, output_type="latent", **options)).images


def generate_before_block_0(mesh=None):
    pipe = flux_pipe(FluxPipeline, shared_parts=False)
    if mesh is not None:
        parallelize_pipe(pipe, mesh=cpu_mesh(*mesh))
    apply_cache_on_pipe(pipe, rule="modulated_input", **ALWAYS)
    return generate(pipe), verdicts(cache_report(pipe)), cache_report(pipe).differences()


def test_modulated_input_covers_whole_sequence_on_ranks(rank_pool):
    # For FLUX this is the first tensor that block 0 computes.
    modulated, pipe = [], flux_pipe(FluxPipeline, shared_parts=False)
    norm = pipe.transformer.transformer_blocks[0].norm1
    norm.register_forward_hook(lambda block, args, out: modulated.append(out[0]))
    generate(pipe)
    expected, decided, differences = generate_before_block_0()
    assert decided == ["warmup", "hit", "limit", "hit"]
    # Until the input of block 0 in the second step, the cached generation equals the plain one.
    wanted = (modulated[1] - modulated[0]).abs().mean() / modulated[0].abs().mean()
    assert differences[0] == pytest.approx(wanted.item(), rel=1e-5)
    ranks = rank_pool.run(generate_before_block_0, 2, mesh=(1, 2))
    for out, again, measured in ranks:
        assert again == decided
        assert measured == ranks[0][2] == pytest.approx(differences, rel=1e-4)
        assert relative_error(out, expected) < 1e-4


@pytest.mark.parametrize("first", ["cache", "lora"])
def test_lora_is_added_and_removed(first):
    plain = flux_pipe(FluxPipeline, shared_parts=False)
    without = generate(plain)
    add_lora(plain)
    expected = generate(plain)
    assert relative_error(expected, without) > 1e-3

    pipe = flux_pipe(FluxPipeline, shared_parts=False)
    steps = [add_lora, partial(apply_cache_on_pipe, residual_diff_threshold=0.0)]
    for step in steps if first == "lora" else reversed(steps):
        step(pipe)
    assert torch.equal(generate(pipe), expected)
    apply_cache_on_pipe(pipe, **ALWAYS)
    generate(pipe)
    assert cache_report(pipe).hits == 2
    pipe.transformer.delete_adapters("default")
    remove_cache_from_pipe(pipe)
    assert torch.equal(generate(pipe), without)


@pytest.mark.parametrize("rule", ["first_block", "modulated_input"])
def test_one_negative_prompt_for_two_prompts_equals_two(rule):
    call = {"prompt": ["a red circle", "a green square"], "true_cfg_scale": 2.0}
    pipe, exact = flux_pipe(), generate(flux_pipe(), negative_prompt="blue", **call)
    apply_cache_on_pipe(pipe, residual_diff_threshold=0.0, rule=rule)
    assert torch.equal(generate(pipe, negative_prompt="blue", **call), exact)
    expected = generate(apply_cache_on_pipe(pipe, **ALWAYS, rule=rule), negative_prompt=["blue"] * 2, **call)
    assert cache_report(pipe).hits == 4
    assert relative_error(generate(pipe, negative_prompt="blue", **call), expected) < 1e-5
    assert cache_report(pipe).hits == 4


THEIRS = FirstBlockCacheConfig(threshold=0.1)
MESSAGE = r"FluxTransformer2DModel .*\(F(irst)?B\w*C\w+\).*disable_cache\(\).*apply_cache_on_pipe"


@pytest.mark.filterwarnings("ignore:.*cache ")
def test_theirs_and_ours_together_are_refused():
    pipe = flux_pipe()
    pipe.transformer.enable_cache(THEIRS)
    expected = pipe(**flux_call()).images
    for refuse, subject in ((apply_cache_on_pipe, pipe), (apply_cache_on_transformer, pipe.transformer)):
        with pytest.raises(ValueError, match=MESSAGE):
            refuse(subject)
    with pytest.raises(ValueError, match=MESSAGE):
        apply_cache(pipe.transformer, FLUX.blocks, residual_diff_threshold=0.1)
    assert torch.equal(pipe(**flux_call()).images, expected)
    pipe.transformer.disable_cache()
    apply_cache_on_pipe(pipe)(**flux_call())
    pipe.transformer.enable_cache(THEIRS)
    with pytest.raises(ValueError, match=MESSAGE):
        pipe(**flux_call())
    assert torch.equal(remove_cache_from_pipe(pipe)(**flux_call()).images, expected)
    # A hook of theirs without a config is seen too.
    transformer = flux_transformer()
    hooks.apply_first_block_cache(transformer, THEIRS)
    with pytest.raises(ValueError, match=MESSAGE):
        apply_cache_on_transformer(transformer)
    # All configs of theirs are those of caches that are known, or of guidance.
    modules = {getattr(hooks, name).__module__.rpartition(".")[2] for name in dir(hooks) if name.endswith("Config")}
    assert modules - {*DIFFUSERS_CACHES} == {"layer_skip", "smoothed_energy_guidance_utils"}
