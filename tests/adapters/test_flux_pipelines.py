"""Every diffusers pipeline on FluxTransformer2DModel generates the same on several ranks as alone."""

import diffusers
import numpy as np
import pytest
import torch
from diffusers import FluxControlNetPipeline, FluxMultiControlNetModel
from PIL import Image

from para_core.adapters import parallelize_pipe
from tests.tiny import (
    FLUX_CHANNELS,
    cpu_mesh,
    each_rank_alone,
    flux_call,
    flux_controlnet,
    flux_pipe,
    flux_transformer,
    relative_error,
    relative_errors,
)

_random = np.random.default_rng(0)
IMAGE = Image.fromarray(_random.integers(0, 256, (72, 56, 3), dtype=np.uint8))
CONTROL = Image.fromarray(_random.integers(0, 256, (72, 56, 3), dtype=np.uint8))
MASK = Image.fromarray((_random.random((72, 56)) > 0.5).astype(np.uint8) * 255)

# Each pipeline has the further arguments of its call. With one step less, strength would leave a single step.
PIPELINES = {
    "FluxPipeline": {},
    "FluxImg2ImgPipeline": {"image": IMAGE, "strength": 0.9},
    "FluxInpaintPipeline": {"image": IMAGE, "mask_image": MASK, "strength": 0.9},
    "FluxControlNetPipeline": {"control_image": CONTROL},
    "FluxControlNetImg2ImgPipeline": {"image": IMAGE, "control_image": CONTROL, "strength": 0.9},
    "FluxControlNetInpaintPipeline": {
        "image": IMAGE,
        "mask_image": MASK,
        "control_image": CONTROL,
        "strength": 0.9,
    },
    "FluxControlPipeline": {"control_image": CONTROL},
    "FluxControlImg2ImgPipeline": {"image": IMAGE, "control_image": CONTROL, "strength": 0.9},
    "FluxControlInpaintPipeline": {"image": IMAGE, "mask_image": MASK, "control_image": CONTROL, "strength": 0.9},
    "FluxFillPipeline": {"image": IMAGE, "mask_image": MASK},
    # The 72 × 56 pixels of context add 126 image tokens. Without these options the pipeline takes a size of a
    # megapixel.
    "FluxKontextPipeline": {"image": IMAGE, "max_area": 72 * 56, "_auto_resize": False},
    "FluxKontextInpaintPipeline": {
        "image": IMAGE,
        "mask_image": MASK,
        "max_area": 72 * 56,
        "_auto_resize": False,
        "strength": 0.9,
    },
}

# These calls of a FluxPipeline have odd and even numbers of text and image tokens, batches, guidance, and several ways
# to pass the prompt.
CALLS = {
    "13 text tokens": {},
    "1 text token": {"max_sequence_length": 1},
    "64 image tokens": {"height": 64, "width": 64, "max_sequence_length": 16},
    "one image token": {"height": 8, "width": 8},
    "one token of each kind": {"height": 8, "width": 8, "max_sequence_length": 1},
    "three image tokens": {"height": 8, "width": 24},
    "two prompts": {"prompt": ["a red circle", "a large blue square on black, and a small green triangle"]},
    "two images per prompt": {"num_images_per_prompt": 2},
    "a generator for each image": {"num_images_per_prompt": 2, "generator": "two"},
    "true guidance": {"negative_prompt": "a blue square", "true_cfg_scale": 2.0},
    "true guidance, negative embeddings of another length": {
        "negative_prompt_embeds": torch.randn(1, 6, 128, generator=torch.Generator().manual_seed(1)),
        "negative_pooled_prompt_embeds": torch.randn(1, 64, generator=torch.Generator().manual_seed(2)),
        "true_cfg_scale": 2.0,
    },
    "embeddings instead of a prompt": {
        "prompt": None,
        "prompt_embeds": torch.randn(1, 9, 128, generator=torch.Generator().manual_seed(3)),
        "pooled_prompt_embeds": torch.randn(1, 64, generator=torch.Generator().manual_seed(4)),
    },
    "latents given": {"latents": torch.randn(1, 63, FLUX_CHANNELS, generator=torch.Generator().manual_seed(5))},
    "sigmas given": {"sigmas": [1.0, 0.4, 0.3]},
    "a tensor of pixels": {"output_type": "pt"},
}


def generate(pipe, **options):
    if options.get("generator") == "two":
        options["generator"] = [torch.Generator().manual_seed(seed) for seed in (8, 9)]
    return pipe(**flux_call(**options)).images


def build(name):
    cls = getattr(diffusers, name)
    return flux_pipe(cls, controlnet=flux_controlnet()) if "ControlNet" in name else flux_pipe(cls)


def draw_with(name):
    """Return the outputs with Ulysses and with a ring."""
    pipe = build(name)
    outs = []
    for ring, ulysses in ((1, 2), (2, 1)):
        assert parallelize_pipe(pipe, mesh=cpu_mesh(ring, ulysses)) is pipe
        outs.append(generate(pipe, **PIPELINES[name]))
    return outs


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", PIPELINES)
def test_two_ranks_generate_the_same_as_one(rank_pool, name):
    expected = generate(build(name), **PIPELINES[name])
    for outs in rank_pool.run(draw_with, 2, name):
        errors = [relative_error(out, expected) for out in outs]
        assert max(errors) < 1e-5, errors


def test_every_pipeline_of_diffusers_on_this_transformer_is_tried():
    # The prior makes embeddings for the other pipelines, and has no transformer.
    names = {name for name in dir(diffusers) if name.startswith("Flux") and name.endswith("Pipeline")}
    names = {name for name in names if getattr(diffusers, name).__module__.startswith("diffusers.pipelines.flux.")}
    assert names - {"FluxPriorReduxPipeline"} == set(PIPELINES)


def draw_calls(ring, ulysses, names):
    pipe = parallelize_pipe(flux_pipe(), mesh=cpu_mesh(ring, ulysses))
    return {name: generate(pipe, **CALLS[name]) for name in names}


@pytest.mark.sample(1)
@pytest.mark.parametrize(("ring", "ulysses"), [(1, 2), (2, 1), (2, 2)])
def test_every_kind_of_call_is_exact(rank_pool, ring, ulysses):
    pipe = flux_pipe()
    expected = {name: generate(pipe, **options) for name, options in CALLS.items()}
    for outs in rank_pool.run(draw_calls, ring * ulysses, ring, ulysses, list(CALLS)):
        errors = relative_errors(outs, expected)
        assert max(errors.values()) < 1e-5, errors


def multi_controlnet_pipe():
    controlnet = FluxMultiControlNetModel([flux_controlnet(seed=5), flux_controlnet(seed=6)])
    return flux_pipe(FluxControlNetPipeline, controlnet=controlnet)


def draw_others(ring, ulysses, parallel=True):
    """Return the images of pipes that take further arguments, by name."""
    mesh = cpu_mesh(ring, ulysses) if parallel else None
    pipes = {
        "two ControlNets": (
            multi_controlnet_pipe,
            {"control_image": [CONTROL, IMAGE], "controlnet_conditioning_scale": [0.7, 0.4]},
        ),
        "ControlNet and true guidance": (
            lambda: build("FluxControlNetPipeline"),
            {"control_image": CONTROL, "negative_prompt": "a blue square", "true_cfg_scale": 2.0},
        ),
        "kontext": (lambda: build("FluxKontextPipeline"), PIPELINES["FluxKontextPipeline"]),
        "distilled guidance": (
            lambda: flux_pipe(transformer=flux_transformer(guidance_embeds=True)),
            {"guidance_scale": 4.0},
        ),
    }
    outs = {}
    for name, (make, options) in pipes.items():
        pipe = make()
        if mesh is not None:
            parallelize_pipe(pipe, mesh=mesh)
        outs[name] = generate(pipe, **options)
    return outs


@pytest.mark.long
def test_controlnets_kontext_and_guidance_are_exact_on_four_ranks(rank_pool):
    expected = draw_others(1, 1, parallel=False)
    for outs in rank_pool.run(draw_others, 4, 2, 2):
        errors = relative_errors(outs, expected)
        assert max(errors.values()) < 1e-5, errors


def draw_without_rerouting():
    """Return the outputs with attention over this rank's own tokens only, as a negative control."""
    pipe = parallelize_pipe(flux_pipe(), mesh=cpu_mesh(1, 2))

    with each_rank_alone():
        return generate(pipe)


def test_images_depend_on_tokens_of_other_ranks(rank_pool):
    # The other tests could not fail if attention hardly affected the tiny transformer.
    expected = generate(flux_pipe())
    for out in rank_pool.run(draw_without_rerouting, 2):
        assert relative_error(out, expected) > 0.01


def pipe_with_ip_adapters():
    """Return a pipeline with two IP adapters, for images of 20 features."""
    pipe = flux_pipe()
    generator = torch.Generator().manual_seed(11)

    def noise(*shape):
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    width, text_width = pipe.transformer.inner_dim, pipe.transformer.config.joint_attention_dim
    for_images = [("proj.weight", (4 * text_width, 20)), ("proj.bias", (4 * text_width,))]
    for_images += [("norm.weight", (text_width,)), ("norm.bias", (text_width,))]
    for_blocks = [("to_k_ip.weight", (width, text_width)), ("to_k_ip.bias", (width,))]
    for_blocks += [("to_v_ip.weight", (width, text_width)), ("to_v_ip.bias", (width,))]
    states = [
        {
            "image_proj": {name: noise(*shape) for name, shape in for_images},
            "ip_adapter": {f"{block}.{name}": noise(*shape) for block in range(2) for name, shape in for_blocks},
        }
        for _ in range(2)
    ]
    pipe.transformer._load_ip_adapter_weights(states)
    return pipe


IP_ADAPTER = {
    "ip_adapter_image_embeds": [torch.linspace(-1, 1, 20)[None, None], torch.linspace(1, 2, 20)[None, None]],
    "negative_ip_adapter_image_embeds": [torch.zeros(1, 1, 20), torch.zeros(1, 1, 20)],
}


def draw_with_ip_adapters():
    pipe = pipe_with_ip_adapters()
    outs = []
    for ring, ulysses in ((1, 2), (2, 1)):
        parallelize_pipe(pipe, mesh=cpu_mesh(ring, ulysses))
        outs.append(generate(pipe, **IP_ADAPTER))
    return outs


def test_ip_adapters_are_exact(rank_pool):
    expected = generate(pipe_with_ip_adapters(), **IP_ADAPTER)
    assert relative_error(expected, generate(flux_pipe())) > 0.01
    for outs in rank_pool.run(draw_with_ip_adapters, 2):
        errors = [relative_error(out, expected) for out in outs]
        assert max(errors) < 1e-5, errors
