"""FLUX with a cache, ControlNet residuals between blocks, a LoRA, and blocks compiled one by one, in any order."""

import pytest
import torch
from diffusers import FluxControlNetPipeline, FluxImg2ImgPipeline, FluxPipeline
from peft import LoraConfig

from para_core.adapters import apply_cache_on_pipe, cache_report, parallelize_pipe, remove_cache_from_pipe
from tests.adapters.test_pipelines import build
from tests.cache.scripted import verdicts
from tests.tiny import cpu_mesh, flux_call, flux_controlnet, flux_pipe, relative_error

ALWAYS = {"residual_diff_threshold": 1e9, "max_consecutive_hits": 1}


def control(pipe, **options):
    image = torch.linspace(0, 1, 3 * 32 * 32).reshape(1, 3, 32, 32)
    call = flux_call(num_inference_steps=4, output_type="latent", control_image=image, height=32, width=32)
    return pipe(**{**call, **options}).images


def controlled(mesh=None):
    pipe = flux_pipe(FluxControlNetPipeline, controlnet=flux_controlnet())
    return pipe if mesh is None else parallelize_pipe(pipe, mesh=cpu_mesh(*mesh))


@pytest.fixture(scope="module")
def with_controlnet():
    pipe = controlled()
    alone = control(pipe)
    apply_cache_on_pipe(pipe, residual_diff_threshold=0.0)
    assert torch.equal(control(pipe), alone)
    apply_cache_on_pipe(pipe, **ALWAYS)
    generated = control(pipe)
    assert verdicts(cache_report(pipe)) == ["warmup", "hit", "limit", "hit"]
    assert relative_error(generated, alone) > 1e-4
    # The stored residuals contain the ControlNet's.
    assert relative_error(control(pipe, controlnet_conditioning_scale=0.0), generated) > 1e-4
    return generated


@pytest.mark.long  # tests/cache/test_graph.py also adds residuals between blocks.
def test_controlnet_in_a_graph(with_controlnet):
    torch._dynamo.reset()
    pipe = apply_cache_on_pipe(controlled(), **ALWAYS)
    pipe.transformer = torch.compile(pipe.transformer, fullgraph=True, backend="aot_eager")
    assert relative_error(control(pipe), with_controlnet) < 1e-5


def control_on_ranks():
    return control(apply_cache_on_pipe(controlled((1, 2)), **ALWAYS))


@pytest.mark.long
def test_controlnet_in_parallel(rank_pool, with_controlnet):
    for generated in rank_pool.run(control_on_ranks, 2):
        assert relative_error(generated, with_controlnet) < 1e-4


BEFORE = {"rule": "modulated_input", "residual_diff_threshold": 1e9, "max_consecutive_hits": 1}


def generate_before_block_0(compiled=False, mesh=None):
    torch._dynamo.reset()
    pipe = flux_pipe(FluxPipeline, shared_parts=False)
    if mesh is not None:
        parallelize_pipe(pipe, mesh=cpu_mesh(*mesh))
    apply_cache_on_pipe(pipe, **BEFORE)
    if compiled:
        pipe.transformer = torch.compile(pipe.transformer, fullgraph=True, backend="aot_eager")
    latents = pipe(**flux_call(num_inference_steps=5, output_type="latent")).images
    return latents, verdicts(cache_report(pipe)), cache_report(pipe).differences()


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.long)])
def test_modulated_input_covers_whole_sequence_on_ranks(rank_pool, compiled):
    """Check the modulated input on ranks, which for FLUX is the first tensor that block 0 computes."""
    modulated = []
    pipe = flux_pipe(FluxPipeline, shared_parts=False)
    pipe.transformer.transformer_blocks[0].norm1.register_forward_hook(
        lambda block, args, out: modulated.append(out[0])
    )
    pipe(**flux_call(num_inference_steps=5, output_type="latent"))
    expected, decided, differences = generate_before_block_0()
    assert decided == ["warmup", "hit", "limit", "hit", "limit"]
    # Until the input of block 0 in the second step, the cached generation equals the plain one.
    wanted = (modulated[1] - modulated[0]).abs().mean() / modulated[0].abs().mean()
    assert differences[0] == pytest.approx(wanted.item(), rel=1e-5)
    if compiled:
        out, again, measured = generate_before_block_0(compiled=True)
        assert again == decided
        assert measured == pytest.approx(differences, rel=1e-4)
        assert relative_error(out, expected) < 1e-5
    ranks = rank_pool.run(generate_before_block_0, 2, compiled=compiled, mesh=(1, 2))
    for out, again, measured in ranks:
        assert again == decided
        assert measured == ranks[0][2] == pytest.approx(differences, rel=1e-4)
        assert relative_error(out, expected) < 1e-4


def generate(pipe):
    return pipe(**flux_call(num_inference_steps=4, output_type="latent")).images


@pytest.mark.parametrize("first", ["cache", "lora"])
def test_lora_is_added_and_removed(first):
    def add_lora(pipe):
        torch.manual_seed(0)
        pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q", "proj_out"], init_lora_weights=False))

    plain = flux_pipe(FluxPipeline, shared_parts=False)
    without = generate(plain)
    add_lora(plain)
    expected = generate(plain)
    assert relative_error(expected, without) > 1e-3

    pipe = flux_pipe(FluxPipeline, shared_parts=False)
    for step in ("cache", "lora") if first == "cache" else ("lora", "cache"):
        if step == "lora":
            add_lora(pipe)
        else:
            apply_cache_on_pipe(pipe, residual_diff_threshold=0.0)
    assert torch.equal(generate(pipe), expected)
    apply_cache_on_pipe(pipe, **ALWAYS)
    generate(pipe)
    assert cache_report(pipe).hits == 2
    pipe.transformer.delete_adapters("default")
    remove_cache_from_pipe(pipe)
    assert torch.equal(generate(pipe), without)


@pytest.mark.long
def test_compiled_blocks_are_skipped():
    torch._dynamo.reset()
    pipe = flux_pipe(FluxPipeline, shared_parts=False)
    expected = generate(apply_cache_on_pipe(pipe, **ALWAYS))
    pipe.transformer.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    assert relative_error(generate(pipe), expected) < 1e-5
    assert verdicts(cache_report(pipe)) == ["warmup", "hit", "limit", "hit"]
    remove_cache_from_pipe(pipe)
    assert relative_error(generate(apply_cache_on_pipe(pipe, **ALWAYS)), expected) < 1e-5


@pytest.mark.filterwarnings("ignore:.*cache ")
def test_schedule_may_begin_after_first_step():
    pipe = flux_pipe(FluxImg2ImgPipeline)
    apply_cache_on_pipe(pipe, residual_diff_threshold=1e9, end=0.75, always_compute_last=True)
    call = flux_call(num_inference_steps=8, output_type="latent", height=32, width=32, strength=0.5)
    pipe(**call, image=torch.linspace(0, 1, 3 * 32 * 32).reshape(1, 3, 32, 32))
    rows = cache_report(pipe).rows
    # With this strength four of the eight steps run.
    assert [row.step for row in rows] == [0, 1, 2, 3]
    assert verdicts(cache_report(pipe)) == ["warmup", "hit", "hit", "schedule"]


TWO_PROMPTS = {"prompt": ["a red circle", "a green square"], "true_cfg_scale": 2.0, "num_inference_steps": 4}


@pytest.mark.parametrize("rule", ["first_block", "modulated_input"])
def test_one_negative_prompt_for_two_prompts_equals_two(rule):
    one, two = flux_call(**TWO_PROMPTS, negative_prompt="blue"), flux_call(**TWO_PROMPTS, negative_prompt=["blue"] * 2)
    exact = flux_pipe()(**one).images
    pipe = apply_cache_on_pipe(flux_pipe(), residual_diff_threshold=0.0, rule=rule)
    one["generator"].manual_seed(7)
    assert torch.equal(pipe(**one).images, exact)
    apply_cache_on_pipe(pipe, **ALWAYS, rule=rule)
    cached = []
    for call in (one, two):
        call["generator"].manual_seed(7)
        cached.append(pipe(**call).images)
        assert cache_report(pipe).hits == 4
    assert relative_error(*cached) < 1e-5


def test_one_negative_prompt_for_two_prompts_in_a_graph():
    call = flux_call(**TWO_PROMPTS, negative_prompt="blue")
    expected = apply_cache_on_pipe(flux_pipe(), **ALWAYS)(**call).images
    pipe = apply_cache_on_pipe(flux_pipe(), **ALWAYS)
    pipe.transformer = torch.compile(pipe.transformer, fullgraph=True, backend="eager")
    call["generator"].manual_seed(7)
    assert relative_error(pipe(**call).images, expected) < 1e-5


def test_one_negative_prompt_of_qwen_image_for_two_prompts():
    def run(pipe):
        generator = torch.Generator().manual_seed(7)
        call = {**TWO_PROMPTS, "negative_prompt": "blue", "height": 64, "width": 96, "output_type": "latent"}
        return pipe(**call, generator=generator).images

    exact = run(build("qwen-image"))
    pipe = apply_cache_on_pipe(build("qwen-image"), residual_diff_threshold=0.0)
    assert torch.equal(run(pipe), exact)
