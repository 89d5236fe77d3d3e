"""Pipelines of all families generate the same on several ranks as alone. Each has its own tests: `-k mochi`."""

import inspect
import re
import warnings
from functools import cache

import diffusers
import numpy as np
import pytest
import torch
import torch.distributed as dist
from diffusers import CogVideoXDPMScheduler, FluxMultiControlNetModel
from diffusers.pipelines.ltx.pipeline_ltx_condition import LTXVideoCondition
from torch import Tensor

from para_core.adapters import parallelize_pipe, unparallelize_pipe
from para_core.adapters.registry import adapter_for
from tests.rank_pool import heartbeat
from tests.tiny import (
    CLIP_WIDTH,
    FLUX_CHANNELS,
    T5_WIDTH,
    cpu_mesh,
    each_rank_alone,
    flux_controlnet,
    flux_pipe,
    flux_transformer,
    relative_error,
    relative_errors,
)
from zoo.tiny import pipelines
from zoo.tiny.base import TEXT_WIDTH
from zoo.tiny.pipelines.components import TinyPipeline
from zoo.tiny.pipelines.options import instead_of_text, random_image, random_video
from zoo.tiny.pipelines.shelf import SHELF_PIPELINES
from zoo.tiny.transformers.registry import SHELF


def flux(cls="FluxPipeline", *parts, **options):
    """Return a tiny pipeline of FLUX.1 with 63 image and 13 text tokens."""
    size = {"height": 72, "width": 56, "max_sequence_length": 13}
    parts = dict(parts)
    if "ControlNet" in cls:
        parts = {"controlnet": flux_controlnet, **parts}
    options = {**size, "num_inference_steps": 2, **options}
    return TinyPipeline(lambda cls, **parts: flux_pipe(getattr(diffusers, cls), **parts), cls, parts=parts, **options)


def two_controlnets():
    return FluxMultiControlNetModel([flux_controlnet(seed=5), flux_controlnet(seed=6)])


IMAGE, CONTROL = {"image": random_image(72, 56)}, {"control_image": random_image(72, 56, seed=2)}
# With one step less, strength would leave a single step.
FROM_IMAGE = {**IMAGE, "strength": 0.9}
MASK = {"mask_image": random_image(72, 56, seed=3).convert("L").point(lambda x: 255 * (x > 127))}
# The 72 × 56 pixels of context add 126 image tokens. Without these options the pipeline takes a size of a megapixel.
CONTEXT = {**IMAGE, "max_area": 72 * 56, "_auto_resize": False}
FLUX = {
    "flux": flux(),
    "flux, distilled guidance": flux(
        "FluxPipeline", ("transformer", lambda: flux_transformer(guidance_embeds=True)), guidance_scale=4.0
    ),
    "flux, image": flux("FluxImg2ImgPipeline", **FROM_IMAGE),
    "flux, inpainting": flux("FluxInpaintPipeline", **FROM_IMAGE, **MASK),
    "flux, controlnet": flux("FluxControlNetPipeline", **CONTROL),
    "flux, controlnet, image": flux("FluxControlNetImg2ImgPipeline", **FROM_IMAGE, **CONTROL),
    "flux, controlnet, inpainting": flux("FluxControlNetInpaintPipeline", **FROM_IMAGE, **MASK, **CONTROL),
    "flux, two controlnets": flux(
        "FluxControlNetPipeline",
        ("controlnet", two_controlnets),
        control_image=[CONTROL["control_image"], IMAGE["image"]],
        controlnet_conditioning_scale=[0.7, 0.4],
    ),
    "flux, control": flux("FluxControlPipeline", **CONTROL),
    "flux, control, image": flux("FluxControlImg2ImgPipeline", **FROM_IMAGE, **CONTROL),
    "flux, control, inpainting": flux("FluxControlInpaintPipeline", **FROM_IMAGE, **MASK, **CONTROL),
    "flux, fill": flux("FluxFillPipeline", **IMAGE, **MASK),
    "flux, kontext": flux("FluxKontextPipeline", **CONTEXT),
    "flux, kontext, inpainting": flux("FluxKontextInpaintPipeline", **CONTEXT, **MASK, strength=0.9),
}
PIPELINES = {**FLUX, **pipelines.PIPELINES}


def generate(pipe, name, **options):
    """Return the first output as a tensor, also if it is PIL images."""
    with warnings.catch_warnings(), torch.random.fork_rng():
        if "generator" not in options:
            # ControlNets of Qwen-Image and Stable Diffusion 3 encode their images with noise of the default generator.
            torch.manual_seed(7)
        # Mochi asks for an autocast that the CPU does not have.
        warnings.filterwarnings("ignore", message="In CPU autocast")
        # Ranks along the batch dim may have nothing to share, which other tests cover.
        warnings.filterwarnings("ignore", message=r".*guidance: .*'batch'|.* \d+ sample.*'batch'")
        out = pipe(**PIPELINES[name].call(**options))
    assert (type(out) is tuple) == (options.get("return_dict") is False)
    out = out[0]
    if isinstance(out, list) and isinstance(out[0], Tensor):
        # FramePack returns the latents of each section.
        return torch.cat(out, dim=2)
    if isinstance(out, Tensor):
        return out
    return torch.as_tensor(np.asarray(out).astype(np.float64))


def build(name, mesh=None):
    heartbeat()
    pipe = PIPELINES[name].build()
    return pipe if mesh is None else parallelize_pipe(pipe, mesh=mesh)


@cache
def generated_alone(name):
    return generate(build(name), name)


# The default run has one or two pipelines of each family.
SOME = ["hunyuan", "mochi", "cogvideox", "cogvideox, rotary", "wan 2.2", "framepack", "hunyuan 1.5", "ltx, image"]
SOME += ["wan animate", "skyreels v2, forcing", "qwen-image, layers", "flux"]
# The perturbed pipeline returns latents, for which it waited, in an output with nsfw_content_detected=None.
GUIDED = [
    "cogvideox",
    "hunyuandit, perturbed",
    "mochi",
    "wan",
    "wan 2.2",
    "hunyuan 1.5",
    "qwen-image",
    "ltx",
    "ltx2",
    "flux2 klein",
]


def meshes_of(shapes):
    """Return the meshes by shape, which is batch × ring × ulysses."""
    return {shape: cpu_mesh(*shape[1:], batch=shape[0]) for shape in shapes}


def draw_on(name, shapes):
    """Return the latents by mesh shape."""
    pipe = build(name)
    return {shape: generate(parallelize_pipe(pipe, mesh=mesh), name) for shape, mesh in meshes_of(shapes).items()}


# On one device, another order of sums (SDPA's math backend) already changes this pipeline's latents by 1.02e-5.
BOUNDS = {"kandinsky 5, one image": 3e-5}


def check(rank_pool, name, shapes):
    for rank, outs in enumerate(rank_pool.run(draw_on, torch.Size(shapes[0]).numel(), name, shapes)):
        errors = {shape: relative_error(out, generated_alone(name)) for shape, out in outs.items()}
        assert max(errors.values()) < BOUNDS.get(name, 1e-5), (rank, errors)


def long_but(names, of):
    """Return the params ``of``, with all but ``names`` marked long."""
    return [pytest.param(name, marks=() if name in names else pytest.mark.long) for name in of]


# These are further ways to call a pipeline of the shelf. The default run has its first way.
OTHER_WAYS = [name for name in SHELF_PIPELINES if "," in name and name.split(",")[0] in SHELF_PIPELINES]


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", long_but([name for name in PIPELINES if name not in OTHER_WAYS], PIPELINES))
def test_every_pipeline_is_exact(rank_pool, name):
    check(rank_pool, name, [(1, 1, 2)])


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", long_but(SOME, PIPELINES))
def test_every_pipeline_is_exact_on_a_ring(rank_pool, name):
    check(rank_pool, name, [(1, 2, 1)])


def on_other_meshes():
    """Yield each pipeline with guidance over ranks, and some on three and four ranks."""
    for name in PIPELINES:
        yield name, [(2, 1, 1)], name in GUIDED
    for name in SOME:
        yield name, [(1, 1, 3), (1, 3, 1)], name in ("hunyuan", "cogvideox, rotary", "hunyuan 1.5", "flux")
    for name in GUIDED:
        yield name, [(2, 1, 2)], name in ("cogvideox", "wan", "qwen-image")


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("name", "shapes"),
    [pytest.param(*case, marks=() if is_short else pytest.mark.long) for *case, is_short in on_other_meshes()],
)
def test_every_pipeline_is_exact_on_other_meshes(rank_pool, name, shapes):
    check(rank_pool, name, shapes)


def draw_unaware_and_undone(name, shape):
    """Generate without communication between the ranks, and again after the pipeline was restored."""
    pipe = build(name, meshes_of([shape])[shape])
    with each_rank_alone():
        unaware = generate(pipe, name)
    heartbeat()
    return unaware, generate(unparallelize_pipe(pipe), name)


def pipelines_undone():
    """Return the pipelines and meshes to test. The default run has some for each kind of mesh."""
    for shape, names in (((1, 1, 2), SOME), ((1, 2, 1), ["hunyuan"]), ((2, 1, 1), ["cogvideox", "wan"])):
        for name in PIPELINES:
            yield pytest.param(name, shape, marks=() if name in names else pytest.mark.long)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("name", "shape"), [*pipelines_undone()])
def test_pipeline_needs_other_ranks_until_it_is_undone(rank_pool, name, shape):
    for unaware, undone in rank_pool.run(draw_unaware_and_undone, 2, name, shape):
        # This pipeline must depend on the tokens of other ranks.
        assert shape != (1, 1, 2) or relative_error(unaware, generated_alone(name)) > 1e-3
        assert relative_error(undone, generated_alone(name)) < 1e-5


# These other pipelines run on a transformer with a plan. The values say why they are not tried.
NOT_TRIED = {
    "Flux2KleinKVPipeline": "keeps the keys of reference images, which is refused "
    "(tests/adapters/compatibility/test_checks.py)",
    "LTX2DFRTemporalRefinePipeline": "goes on with the latents and keyframes of LTX2DFRPipeline, by a model that "
    "doubles frames",
    "StableDiffusion3PAGImg2ImgPipeline": "refused (tests/adapters/compatibility/test_checks.py)",
    "StableDiffusion3PAGPipeline": "refused (tests/adapters/compatibility/test_checks.py)",
}


@pytest.mark.long
@pytest.mark.slow
def test_every_supported_pipeline_is_tried_or_named():
    on_them, on_the_shelf = set(), set()
    shelf = {model.cls for model in SHELF.values()}
    for name in dir(diffusers):
        cls = getattr(diffusers, name)
        if name.endswith("Pipeline") and isinstance(cls, type):
            transformer = inspect.signature(cls.__init__).parameters.get("transformer")
            models = re.findall(r"\w+(?:Model|Transformer)\b", str(transformer and transformer.annotation))
            unmade = {m: getattr(diffusers, m).__new__(getattr(diffusers, m)) for m in models}
            planned = [m for m, module in unmade.items() if adapter_for(module) or getattr(module, "_cp_plan", None)]
            if planned:
                (on_the_shelf if shelf.issuperset(planned) else on_them).add(name)
    tried = {type(build(name)).__name__ for name in PIPELINES}
    # For models of the shelf it suffices to test the transformer (test_transformers.py), as docs/pipelines.md says.
    assert on_them - NOT_TRIED.keys() == tried - on_the_shelf


# There is one pipeline for each kind of VAE, and one that joins sections.
DECODED = ["hunyuan", "mochi", "cogvideox", "wan", "framepack", "hunyuan 1.5", "qwen-image", "ltx", "ltx2", "flux2"]


def draw_pixels(name):
    return generate(build(name, cpu_mesh(1, 2)), name, output_type="pt")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in ("wan", "mochi", "ltx2") else pytest.mark.long) for name in DECODED],
)
def test_every_decoded_video_is_exact(rank_pool, name):
    expected = generate(build(name), name, output_type="pt")
    for out in rank_pool.run(draw_pixels, 2, name):
        assert relative_error(out, expected) < 1e-5


def noise(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[-1]))


def mask(*lengths, total=13):
    return torch.tensor([[index < length for index in range(total)] for length in lengths])


# The second condition adds its own tokens.
CONDITIONS = [
    LTXVideoCondition(image=random_image(96, 160, seed=2)),
    LTXVideoCondition(video=random_video(9, 96, 160), frame_index=8, strength=0.8),
]
OTHER_CONDITION = LTXVideoCondition(
    video=[*random_video(8, 96, 160), random_image(96, 160)], frame_index=8, strength=0.8
)
TWO = {"prompt": ["a red circle", "a large blue square on black, and a small green triangle"]}
THREE = {"prompt": [*TWO["prompt"], "red"]}
NEGATIVE = {"negative_prompt": "a blue square"}


def end_guidance(pipe, step, timestep, tensors):
    pipe._guidance_scale = 1.0
    return tensors


def begin_guidance(pipe, step, timestep, tensors):
    pipe._guidance_scale = 5.0
    return tensors


def of_two(embeds, mask_name, positive, negative=None, **others):
    """Return embeddings of two prompts with their masks, which count the tokens of each prompt."""
    masks = {mask_name: mask(*positive)}
    if negative is not None:
        others["negative_prompt_embeds"] = -embeds
        masks[f"negative_{mask_name}"] = mask(*negative)
    return {"prompt": None, "prompt_embeds": embeds, **masks, **others}


EIGHT = {"height": 8, "width": 8}
# Layers are skipped from the second step on.
SKIP = {"skip_layer_guidance_start": 0.0, "skip_layer_guidance_stop": 1.0}
# These calls are of other kinds. Each pipeline has what is special about a call, and its options.
CALLS = {
    "flux": {
        "1 text token": {"max_sequence_length": 1},
        "64 image tokens": {"height": 64, "width": 64, "max_sequence_length": 16},
        "one image token": EIGHT,
        "one token of each kind": {**EIGHT, "max_sequence_length": 1},
        "three image tokens": {"height": 8, "width": 24},
        "two prompts": TWO,
        "two images per prompt": {"num_images_per_prompt": 2},
        "true guidance": {**NEGATIVE, "true_cfg_scale": 2.0},
        "true guidance, negative embeddings of another length": {
            "negative_prompt_embeds": noise(1, 6, T5_WIDTH),
            "negative_pooled_prompt_embeds": noise(1, CLIP_WIDTH),
            "true_cfg_scale": 2.0,
        },
        "embeddings given": {
            "prompt": None,
            "prompt_embeds": noise(1, 9, T5_WIDTH),
            "pooled_prompt_embeds": noise(1, CLIP_WIDTH),
        },
        "latents given": {"latents": noise(1, 63, FLUX_CHANNELS)},
        "sigmas given": {"sigmas": [1.0, 0.4, 0.3]},
        "a tensor of pixels": {"output_type": "pt"},
    },
    "flux, controlnet": {"true guidance": {**NEGATIVE, "true_cfg_scale": 2.0}},
    "stable diffusion 3": {
        "the first layer skipped": {"skip_guidance_layers": [0], **SKIP},
        "two layers skipped": {"skip_guidance_layers": [0, 2], **SKIP},
    },
    "hunyuan": {
        "two prompts": TWO,
        "two videos of a prompt": {"num_videos_per_prompt": 2},
        "two videos of each of two prompts": {**TWO, "num_videos_per_prompt": 2},
        "another size": {"height": 64, "width": 48, "num_frames": 17},
        "one token": {"height": 16, "width": 16, "num_frames": 1},
        "true guidance": {**NEGATIVE, "true_cfg_scale": 3.0},
        "other distilled guidance": {"guidance_scale": 1.5},
        "latents given": {"latents": noise(1, 4, 3, 6, 10)},
        "embeddings given": of_two(
            noise(2, 13, TEXT_WIDTH), "prompt_attention_mask", (13, 5), pooled_prompt_embeds=noise(2, CLIP_WIDTH)
        ),
    },
    "mochi": {
        "two prompts": TWO,
        "three prompts": THREE,
        "two videos of a prompt": {"num_videos_per_prompt": 2},
        "another size": {"height": 64, "width": 48, "num_frames": 7},
        "one token": {"height": 16, "width": 16, "num_frames": 1},
        "four frames, twelve tokens": {"num_frames": 19, "height": 16, "width": 48},
        "no guidance": {"guidance_scale": 1.0},
        "guidance away from a prompt": NEGATIVE,
        "latents given": {"latents": noise(1, 12, 3, 6, 10)},
        "embeddings given": of_two(noise(2, 13, T5_WIDTH), "prompt_attention_mask", (1, 13), (6, 2)),
    },
    "cogvideox": {
        "two prompts": TWO,
        "three prompts": THREE,
        "another size": {"height": 64, "width": 48, "num_frames": 5},
        "no guidance": {"guidance_scale": 1.0},
        "guidance that grows": {"use_dynamic_cfg": True},
        "latents given": {"latents": noise(1, 3, 4, 6, 10)},
        "embeddings given": instead_of_text(13, T5_WIDTH),
    },
    "cogvideox, rotary": {"another size": {"height": 48, "width": 96, "num_frames": 13}},
    "cogvideox 1.5": {
        "another size": {"height": 32, "width": 80, "num_frames": 21},
        "one frame": {"num_frames": 1, "height": 32},
    },
    "wan": {
        "two prompts": TWO,
        "three prompts": THREE,
        "two videos of a prompt": {"num_videos_per_prompt": 2},
        "another size": {"height": 64, "width": 48, "num_frames": 13},
        "one token": {"height": 16, "width": 16, "num_frames": 1},
        "one frame, four tokens": {"num_frames": 1, "height": 32, "width": 32},
        "no guidance": {"guidance_scale": 1.0},
        "guidance ends": {"callback_on_step_end": end_guidance},
        "embeddings given": instead_of_text(7, TEXT_WIDTH),
    },
    "wan 2.2": {
        "guidance in the second half only": {"guidance_scale": 1.0, "guidance_scale_2": 4.0},
        "latents given": {"latents": noise(1, 16, 3, 6, 10)},
    },
    "wan vace": {
        "a mask": {"mask": random_video(9, 48, 80)},
        "an image to refer to": {"reference_images": [random_image(48, 80, seed=9)]},
    },
    "hunyuan 1.5": {
        "two prompts": TWO,
        "three prompts": THREE,
        "another size": {"height": 64, "width": 48, "num_frames": 5},
    },
    "framepack": {
        "three sections": {"num_frames": 25},
        "the other order of frames": {"sampling_type": "vanilla", "num_frames": 17},
        "a last image": {"last_image": random_image(48, 80, seed=3)},
    },
    "qwen-image": {
        "two prompts": {**TWO, "negative_prompt": ["", "a small red triangle on white"]},
        "another size": {"height": 64, "width": 96},
        "no guidance": {"true_cfg_scale": 1.0},
        "embeddings given, the negative ones fewer": {
            "prompt": None,
            "negative_prompt": None,
            "prompt_embeds": noise(2, 13, TEXT_WIDTH),
            "prompt_embeds_mask": mask(13, 4).long(),
            "negative_prompt_embeds": -noise(2, 11, TEXT_WIDTH),
            "negative_prompt_embeds_mask": mask(2, 7, total=11).long(),
        },
    },
    "qwen-image, editing": {"two images of a prompt": {"num_images_per_prompt": 2}},
    "ltx": {
        "two prompts": TWO,
        "two videos of each of two prompts": {**TWO, "num_videos_per_prompt": 2},
        "another size": {"height": 64, "width": 96, "num_frames": 9},
        "one frame": {"num_frames": 1},
        "rescaled guidance": {**NEGATIVE, "guidance_rescale": 0.7},
        "embeddings given": of_two(noise(2, 13, T5_WIDTH), "prompt_attention_mask", (13, 4), (2, 7)),
    },
    "ltx, condition": {"two conditions": {"image": None, "conditions": CONDITIONS}},
    "ltx2": {
        "two prompts": TWO,
        "no guidance": {"guidance_scale": 1.0, "stg_scale": 0.0, "modality_scale": 1.0},
    },
    "flux2 klein": {"two prompts": TWO},
    "pixart": {"three prompts": THREE},
    # The model separates its branches itself, so no rank may have samples of its own.
    "pixart, perturbed": {"two prompts": TWO},
    "skyreels v2, forcing": {"guidance ends": {"callback_on_step_end": end_guidance}},
    "skyreels v2": {"guidance begins": {"callback_on_step_end": begin_guidance, "guidance_scale": 1.0}},
    "chronoedit": {
        "reasons in frames that it drops": {"enable_temporal_reasoning": True, "num_temporal_reasoning_steps": 2}
    },
    "hunyuan, image by token replacement": {"one column": {"height": 48, "width": 16, "image": random_image(48, 16)}},
}


def draw_calls(name, shapes):
    """Return the outputs by mesh shape and call."""
    pipe, outs = build(name), {}
    for shape, mesh in meshes_of(shapes).items():
        parallelize_pipe(pipe, mesh=mesh)
        for what, options in CALLS[name].items():
            heartbeat()
            outs[shape, what] = generate(pipe, name, **options)
    return outs


@cache
def calls_alone(name):
    pipe = build(name)
    return {what: generate(pipe, name, **options) for what, options in CALLS[name].items()}


def check_calls(rank_pool, name, shapes):
    for outs in rank_pool.run(draw_calls, torch.Size(shapes[0]).numel(), name, shapes):
        errors = {key: relative_error(out, calls_alone(name)[key[1]]) for key, out in outs.items()}
        assert max(errors.values()) < 1e-5, errors


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", long_but(["flux", "wan", "qwen-image", "hunyuan"], CALLS))
def test_every_kind_of_call_is_exact(rank_pool, name):
    check_calls(rank_pool, name, [(1, 1, 2)])


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", long_but(["cogvideox", "wan", "qwen-image"], CALLS))
def test_every_call_is_exact_with_guidance_over_ranks(rank_pool, name):
    check_calls(rank_pool, name, [(2, 1, 1)])


@pytest.mark.long
@pytest.mark.parametrize("shape", [(1, 2, 1), (1, 3, 1)])
@pytest.mark.parametrize("name", CALLS)
def test_every_kind_of_call_is_exact_on_a_ring(rank_pool, name, shape):
    check_calls(rank_pool, name, [shape])


@pytest.mark.parametrize("name", long_but(["flux", "wan", "qwen-image", "hunyuan"], CALLS))
def test_each_kind_of_call_generates_something_else(name):
    for what, out in calls_alone(name).items():
        assert out.isfinite().all()
        assert relative_error(out, generated_alone(name)) > 1e-3, what


def brighten(pipe, step, timestep, tensors):
    return {"latents": tensors["latents"] * 1.5 + step}


def stop(pipe, step, timestep, tensors):
    pipe._interrupt = step == 1
    return tensors


def draw_otherwise(name, mesh_shape=None):
    """Return the outputs of ways to call a pipeline that an adapter must not change."""
    pipe = build(name, mesh_shape and cpu_mesh(*mesh_shape))
    outs = {
        "brighter": generate(pipe, name, callback_on_step_end=brighten),
        "interrupted": generate(pipe, name, callback_on_step_end=stop),
        "a tuple": generate(pipe, name, return_dict=False, num_inference_steps=2),
        "8 bits": generate(pipe, name, output_type="pil"),
        "an array": generate(pipe, name, output_type="np"),
    }
    torch.manual_seed(3)
    return {**outs, "no generator": generate(pipe, name, generator=None)}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["hunyuan", "mochi", "cogvideox", "wan 2.2"])
def test_callbacks_interruptions_and_output_types_are_exact(rank_pool, name):
    with torch.random.fork_rng():
        expected = draw_otherwise(name)
    for what, out in expected.items():
        if out.shape == generated_alone(name).shape:
            assert relative_error(out, generated_alone(name)) > 1e-3, what
    for outs in rank_pool.run(draw_otherwise, 2, name, (1, 2)):
        errors = relative_errors(outs, expected)
        del errors["8 bits"]
        assert (outs["8 bits"] - expected["8 bits"]).abs().max() <= 1
        assert max(errors.values()) < 1e-5, errors


def draw_with_noise_at_each_step(mesh_shape=None):
    """Generate with a scheduler that draws from the default generator at every step. The generator's state differs
    between ranks.
    """
    pipe = build("cogvideox", mesh_shape and cpu_mesh(*mesh_shape))
    pipe.scheduler = CogVideoXDPMScheduler.from_config(pipe.scheduler.config)
    torch.manual_seed(3 + (dist.get_rank() if mesh_shape else 0))
    return generate(pipe, "cogvideox", generator=None)


def test_step_noise_equals_that_of_first_rank(rank_pool):
    with torch.random.fork_rng():
        expected = draw_with_noise_at_each_step()
    assert relative_error(expected, generated_alone("cogvideox")) > 1e-3
    for out in rank_pool.run(draw_with_noise_at_each_step, 2, (2, 1)):
        assert relative_error(out, expected) < 1e-5


# Each row has the pipeline, the difference of rank 1 from rank 0, and the arguments of both.
DIFFERENCES = [
    ("hunyuan", {"num_frames": 13}),
    ("hunyuan", {"guidance_scale": 5.0}),
    ("hunyuan", {"true_cfg_scale": 2.0}),
    ("hunyuan", {"prompt_template": {"template": "{}", "crop_start": 0}}),
    ("mochi", {"width": 64}),
    ("cogvideox", {"guidance_scale": 1.0}),
    ("cogvideox, image", {"image": random_image(48, 80, seed=5)}),
    ("cogvideox, video", {"video": [*random_video(8, 48, 80), random_image(48, 80, seed=5)]}),
    ("cogvideox, video", {"strength": 0.5}),
    ("wan 2.2", {"guidance_scale_2": 1.0}),
    ("wan vace", {"video": random_video(5, 48, 80)}),
    ("wan vace", {"conditioning_scale": 0.5}),
    ("framepack", {"latent_window_size": 4}),
    ("framepack", {"sampling_type": "vanilla"}),
    ("qwen-image, controlnet", {"control_image": random_image(48, 80, seed=5)}),
    ("ltx", {"frame_rate": 30}),
    ("ltx2", {"stg_scale": 0.0}),
    ("ltx, condition", {"conditions": CONDITIONS}, {"image": None, "conditions": [*CONDITIONS[:1], OTHER_CONDITION]}),
]


def call_differently():
    messages = []
    for name, options, *both in DIFFERENCES:
        pipe = build(name, cpu_mesh(1, 2))
        with pytest.raises(ValueError, match=r"ranks .*: rank 0 .*rank 1 ") as error:
            generate(pipe, name, **{**dict(*both), **(options if dist.get_rank() == 1 else {})})
        messages.append(str(error.value))
    return messages


def test_differing_calls_raise_on_every_rank(rank_pool):
    for messages in rank_pool.run(call_differently, 2):
        for (name, options, *_), message in zip(DIFFERENCES, messages, strict=True):
            (argument,) = options
            assert f" {argument}: rank 0 " in message, (name, message)
