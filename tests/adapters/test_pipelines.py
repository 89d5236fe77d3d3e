"""Pipelines of all families generate the same on several ranks as alone. Each has its own tests: `-k mochi`."""

import inspect
import re
import warnings
from functools import cache

import diffusers
import numpy as np
import pytest
import torch
from diffusers import FluxMultiControlNetModel
from torch import Tensor

from para_core.adapters import parallelize_pipe, unparallelize_pipe
from para_core.adapters.registry import adapter_for
from tests.rank_pool import heartbeat
from tests.tiny import (
    FLUX_CHANNELS,
    cpu_mesh,
    each_rank_alone,
    flux_controlnet,
    flux_pipe,
    flux_transformer,
    relative_error,
)
from zoo.flux.models import CLIP_WIDTH, T5_WIDTH
from zoo.tiny import pipelines
from zoo.tiny.base import TEXT_WIDTH, noise, valid
from zoo.tiny.pipelines.components import TinyPipeline
from zoo.tiny.pipelines.options import instead_of_text, random_image
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


IMAGE, CONTROL = {"image": random_image(72, 56)}, {"control_image": random_image(72, 56, seed=2)}
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
        ("controlnet", lambda: FluxMultiControlNetModel([flux_controlnet(seed=5), flux_controlnet(seed=6)])),
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
        warnings.filterwarnings("ignore", message=r".*guidance.*: .*'batch'|.* \d+ sample.*'batch'")
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


# There are one or two pipelines of each family.
SOME = ["hunyuan", "mochi", "cogvideox", "cogvideox, rotary", "wan 2.2", "framepack", "hunyuan 1.5", "ltx, image"]
SOME += ["wan animate", "skyreels v2, forcing", "qwen-image, layers", "flux"]
# The perturbed pipeline returns latents, for which it waited, in an output with nsfw_content_detected=None.
GUIDED = ["cogvideox", "hunyuandit, perturbed", "mochi", "wan", "wan 2.2", "hunyuan 1.5", "qwen-image", "ltx", "ltx2"]
# These are further ways to call a pipeline of the shelf. The default run has its first way.
OTHER_WAYS = [name for name in SHELF_PIPELINES if "," in name and name.split(",")[0] in SHELF_PIPELINES]
# On one device, another order of sums (SDPA's math backend) already changes this pipeline's latents by 1.02e-5.
BOUNDS = {"kandinsky 5, one image": 3e-5}


def meshes_of(shapes):
    """Return the meshes by shape, which is batch × ring × ulysses."""
    return {shape: cpu_mesh(*shape[1:], batch=shape[0]) for shape in shapes}


def draw_on(name, shapes):
    """Return the latents by mesh shape, of Ulysses ranks that do not communicate, and of the restored pipeline."""
    pipe, outs = build(name), {}
    for shape, mesh in meshes_of(shapes).items():
        outs[shape] = generate(parallelize_pipe(pipe, mesh=mesh), name)
        heartbeat()
        if shape == (1, 1, 2):
            with each_rank_alone():
                outs["unaware"] = generate(pipe, name)
    return {**outs, "undone": generate(unparallelize_pipe(pipe), name)}


def check(rank_pool, name, shapes):
    for rank, outs in enumerate(rank_pool.run(draw_on, torch.Size(shapes[0]).numel(), name, shapes)):
        errors = {shape: relative_error(out, generated_alone(name)) for shape, out in outs.items()}
        # The pipeline must depend on the tokens of other ranks.
        assert errors.pop("unaware", 1.0) > 1e-3
        assert max(errors.values()) < BOUNDS.get(name, 1e-5), (rank, errors)


def long_but(names, of):
    """Return the params ``of``, with all but ``names`` marked long."""
    return [pytest.param(name, marks=() if name in names else pytest.mark.long) for name in of]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", long_but([name for name in PIPELINES if name not in OTHER_WAYS], PIPELINES))
def test_every_pipeline_is_exact(rank_pool, name):
    check(rank_pool, name, [(1, 1, 2)])


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", long_but([*SOME, *GUIDED], PIPELINES))
def test_every_pipeline_is_exact_on_a_ring(rank_pool, name):
    check(rank_pool, name, [(1, 2, 1), (2, 1, 1)])


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "shapes"), [*[(name, [(1, 1, 3), (1, 3, 1)]) for name in SOME], *[(name, [(2, 1, 2)]) for name in GUIDED]]
)
def test_pipelines_are_exact_on_more_ranks(rank_pool, name, shapes):
    check(rank_pool, name, shapes)


# These other pipelines run on a transformer with a plan. All but one are refused. LTX2DFRTemporalRefinePipeline goes on
# with the latents of LTX2DFRPipeline, by a model that doubles frames.
NOT_TRIED = {
    *("Flux2KleinKVPipeline", "LTX2DFRTemporalRefinePipeline"),
    *("StableDiffusion3PAGImg2ImgPipeline", "StableDiffusion3PAGPipeline"),
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
    assert on_them - NOT_TRIED == tried - on_the_shelf


TWO = {"prompt": ["a red circle", "a large blue square on black, and a small green triangle"]}


def end_guidance(pipe, step, timestep, tensors):
    pipe._guidance_scale = 1.0
    return {}


def stop(pipe, step, timestep, tensors):
    pipe._interrupt = step == 1
    return tensors


# These calls are of other kinds. Each pipeline has what is special about a call, and its options.
CALLS = {
    "flux": {
        "one token of each kind": {"height": 8, "width": 8, "max_sequence_length": 1},
        "three image tokens, two prompts": {"height": 8, "width": 24, **TWO},
        "true guidance, negative embeddings of another length": {
            "negative_prompt_embeds": noise(1, 6, T5_WIDTH),
            "negative_pooled_prompt_embeds": noise(1, CLIP_WIDTH),
            "true_cfg_scale": 2.0,
        },
        "latents, sigmas and embeddings given": {
            "latents": noise(1, 63, FLUX_CHANNELS),
            "sigmas": [1.0, 0.4, 0.3],
            "prompt": None,
            "prompt_embeds": noise(1, 9, T5_WIDTH),
            "pooled_prompt_embeds": noise(1, CLIP_WIDTH),
        },
    },
    "hunyuan": {
        "two videos of each of two prompts": {**TWO, "num_videos_per_prompt": 2},
        "one token": {"height": 16, "width": 16, "num_frames": 1},
        "embeddings given": {
            "prompt": None,
            "prompt_embeds": noise(2, 13, TEXT_WIDTH),
            "prompt_attention_mask": valid((13, 5), total=13),
            "pooled_prompt_embeds": noise(2, CLIP_WIDTH),
        },
    },
    "wan": {
        "two videos of each of two prompts": {**TWO, "num_videos_per_prompt": 2},
        "one token": {"height": 16, "width": 16, "num_frames": 1},
        "guidance ends": {"callback_on_step_end": end_guidance},
        "embeddings given": instead_of_text(7, TEXT_WIDTH),
        "brighter": {"callback_on_step_end": lambda _, step, time, found: {"latents": found["latents"] * 1.5 + step}},
        "interrupted": {"callback_on_step_end": stop},
        "an array in a tuple": {"output_type": "np", "return_dict": False},
    },
    "qwen-image": {
        "embeddings given, the negative ones fewer": {
            "prompt": None,
            "negative_prompt": None,
            "prompt_embeds": noise(2, 13, TEXT_WIDTH),
            "prompt_embeds_mask": valid((13, 4), total=13, dtype=torch.long),
            "negative_prompt_embeds": -noise(2, 11, TEXT_WIDTH),
            "negative_prompt_embeds_mask": valid((2, 7), total=11, dtype=torch.long),
        }
    },
}


def draw_calls(name):
    """Return the outputs by mesh shape and call."""
    pipe, outs = build(name), {}
    for shape, mesh in meshes_of([(1, 1, 2), (1, 2, 1), (2, 1, 1)]).items():
        parallelize_pipe(pipe, mesh=mesh)
        for what, options in CALLS[name].items():
            heartbeat()
            outs[shape, what] = generate(pipe, name, **options)
    return outs


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CALLS)
def test_every_kind_of_call_is_exact(rank_pool, name):
    pipe = build(name)
    expected = {what: generate(pipe, name, **options) for what, options in CALLS[name].items()}
    for what, out in expected.items():
        assert relative_error(out, generated_alone(name)) > 1e-3, what
    for outs in rank_pool.run(draw_calls, 2, name):
        errors = {key: relative_error(out, expected[key[1]]) for key, out in outs.items()}
        assert max(errors.values()) < 1e-5, errors
