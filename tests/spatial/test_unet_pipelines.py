"""Pipelines with UNets (Stable Diffusion 1.5, XL, Stable Video Diffusion): rows and guidance over ranks."""

import re
import warnings
from functools import cache
from pathlib import Path

import diffusers
import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig

from para_core import PipeFusion, init_context_parallel_mesh
from para_core.adapters import (
    apply_cache_on_pipe,
    parallelize_pipe,
    parallelize_unet,
    shard_weights,
    unparallelize_pipe,
    unparallelize_unet,
)
from para_core.adapters.denoisers import other_denoisers_of
from para_core.adapters.models import ADAPTERS
from para_core.adapters.models.unets import REFUSED_UNETS, UNETS
from para_core.adapters.registry import component_of
from tests.adapters.test_pipelines import meshes_of
from tests.tiny import cpu_mesh, relative_error
from zoo.tiny.base import fill
from zoo.tiny.pipelines.options import random_image
from zoo.tiny.pipelines.unet import UNET_PIPELINES

# Meshes are batch × ring × ulysses. They distribute rows, rows by either dim, branches of guidance, or both.
ROWS, BATCH = (1, 1, 2), (2, 1, 1)
SOME = ["sd", "sd, controls", "sd, image prompt in places", "xl, control", "svd"]


def generate(pipe, name, **options):
    with warnings.catch_warnings(), torch.random.fork_rng():
        torch.manual_seed(7)
        # Ranks along the batch dim may have nothing to share.
        warnings.filterwarnings("ignore", message=r".* \d+ sample.*'batch'")
        out = pipe(**UNET_PIPELINES[name].call(**options))[0]
    return torch.cat(list(out)) if isinstance(out, list) else out


@cache
def generated_alone(name, **size):
    return generate(UNET_PIPELINES[name].build(), name, **of_size(**size))


def of_size(**size):
    """Return the options of an image of another size and of its control image."""
    return {**size, "image": random_image(**size)} if size else {}


def generate_on(name, shapes, **size):
    """Generate on each mesh, and again after the pipeline was restored."""
    images, pipe, options = {}, UNET_PIPELINES[name].build(), of_size(**size)
    before = {path: (type(module), dict(vars(module))) for path, module in other_denoisers_of(pipe).items()}
    for shape, mesh in meshes_of(shapes).items():
        images[shape] = generate(parallelize_pipe(pipe, mesh=mesh), name, **options)
    unparallelize_pipe(pipe)
    for path, (cls, attributes) in before.items():
        module = component_of(pipe, path)
        assert type(module) is cls and vars(module).keys() == attributes.keys()
    if dist.get_rank() == 0:
        images["given back"] = generate(pipe, name, **options)
    return images


def check(rank_pool, name, shapes, **size):
    expected = generated_alone(name, **size)
    for outs in rank_pool.run(generate_on, torch.Size(shapes[0]).numel(), name, shapes, **size):
        errors = {how: relative_error(out, expected) for how, out in outs.items()}
        assert max(errors.values()) < 1e-5, errors


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SOME else pytest.mark.long) for name in UNET_PIPELINES]
)
def test_every_unet_pipeline_is_exact(rank_pool, name):
    check(rank_pool, name, [ROWS, BATCH])


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["sd", "xl, control"])
def test_guidance_and_rows_share_four_ranks(rank_pool, name):
    check(rank_pool, name, [(2, 2, 1)])


# Of 2 × 10 latents, two ranks of three hold columns. Of 5 × 3, one rank computes all.
@pytest.mark.sample(1)
@pytest.mark.parametrize("size", [{"height": 16, "width": 80}, {"height": 40, "width": 24}])
def test_few_rows_leave_ranks_idle_with_the_image(rank_pool, size):
    check(rank_pool, "sd, control", [(1, 1, 3)], **size)


def generate_in_other_ways():
    """Generate with a LoRA, with the VAE on rows, with sliced attention, and offloaded. Compare each with one rank."""
    pipe, errors = UNET_PIPELINES["sd"].build(), {}

    def compare(what, **options):
        alone = generate(pipe, "sd", **options)
        parallelize_pipe(pipe, mesh=cpu_mesh(1, 2), vae=what == "its VAE, too")
        errors[what] = relative_error(generate(pipe, "sd", **options), alone)
        unparallelize_pipe(pipe)
        return alone

    plain = compare("its VAE, too", output_type="pt")
    targets = ["to_q", "to_out.0", "conv1", "conv_shortcut"]
    pipe.unet.add_adapter(LoraConfig(r=3, target_modules=targets, init_lora_weights="gaussian"))
    fill(pipe.unet, 3)
    assert relative_error(compare("LoRA", output_type="pt"), plain) > 0.01
    pipe.enable_attention_slicing(1)
    compare("sliced attention")
    pipe.unet.set_default_attn_processor()
    pipe.enable_model_cpu_offload(device="cpu")
    compare("offloaded")
    return errors


@pytest.mark.long
def test_lora_offload_and_the_vae_on_rows_change_nothing(rank_pool):
    for errors in rank_pool.run(generate_in_other_ways, 2):
        assert max(errors.values()) < 1e-5, errors


@torch.no_grad()
def call_by_hand(sample_of_rank=False):
    unet = UNET_PIPELINES["sd"].build().unet
    seed = dist.get_rank() if sample_of_rank else 0
    sample = torch.randn(2, 4, 11, 17, generator=torch.Generator().manual_seed(seed))
    text = torch.randn(2, 5, unet.config.cross_attention_dim, generator=torch.Generator().manual_seed(1))
    alone = unet(sample, 3, text).sample
    cls = type(unet)
    assert parallelize_unet(unet, mesh=cpu_mesh(2, 1)) is unet
    errors = [
        relative_error(unet(sample, 3, text).sample, alone),
        relative_error(unet(sample, 3, text, return_dict=False)[0], alone),
    ]
    assert type(unparallelize_unet(unet)) is cls
    return errors


@pytest.mark.long
def test_unet_in_own_loop_is_exact(rank_pool):
    for errors in rank_pool.run(call_by_hand, 2):
        assert 0 < max(errors) < 1e-5


def test_differing_inputs_raise_on_each_rank(rank_pool):
    for error in rank_pool.run_expecting_errors(call_by_hand, 2, sample_of_rank=True):
        assert re.search(r"UNet2DConditionModel .*sample: rank 0 .*rank 1 ", str(error))


def change_and_generate(change):
    pipe = UNET_PIPELINES["sd"].build()
    parallelize_pipe(pipe, mesh=cpu_mesh(1, 2))
    change(pipe)
    generate(pipe, "sd")


def compile_it(pipe):
    pipe.unet = torch.compile(pipe.unet, backend="eager")


def compile_a_block(pipe):
    pipe.unet.mid_block.compile(backend="eager")


def replace_it(pipe):
    pipe.unet = UNET_PIPELINES["sd"].build().unet


def give_it_back(pipe):
    unparallelize_unet(pipe.unet)


def filter_frequencies(pipe):
    pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (compile_it, "pipe.unet .*compiled"),
        (compile_a_block, "pipe.unet .*compiled"),
        (replace_it, "pipe.unet .*another .*parallelized"),
        (give_it_back, "pipe.unet .*unparallelized"),
        (filter_frequencies, r"pipe.unet .*pipe\.disable_freeu\(\)"),
    ],
)
def test_inexact_changes_raise_on_every_rank(rank_pool, change, message):
    for error in rank_pool.run_expecting_errors(change_and_generate, 2, change):
        assert isinstance(error, RuntimeError) and re.search(message, str(error))


def test_unknown_unets_and_cached_unets_raise():
    pipe = UNET_PIPELINES["sd"].build()
    with pytest.raises(TypeError, match=r"^StableDiffusionPipeline .*First Block Cache"):
        apply_cache_on_pipe(pipe)
    with pytest.raises(TypeError, match=r"Linear .*Stable Diffusion XL"):
        parallelize_unet(torch.nn.Linear(1, 1))


def test_every_unet_class_runs_or_has_a_reason():
    names = set(re.findall(r'"(\w*U[nN]et\w*)"', Path(diffusers.__file__).read_text()))
    names = {name for name in names if name.endswith(("Model", "UNet"))}
    assert len(names) > 10
    assert names <= set(UNETS) | set(REFUSED_UNETS), names - set(UNETS) - set(REFUSED_UNETS)


@pytest.mark.parametrize(
    "options",
    [
        {"pipefusion": PipeFusion()},
        {"text": "shard"},
        {"text": "replicate"},
        {"weights": "tensor"},
        {"rotate_method": "2d"},
        {"backend": "math", "text": "shard"},
        {"adapter": ADAPTERS[0]},
    ],
    ids=lambda options: ", ".join(f"{name}={value!r}"[:30] for name, value in options.items()),
)
def test_an_option_of_transformers_is_refused_for_a_unet(options):
    pipe = UNET_PIPELINES["sd"].build()
    with pytest.raises(ValueError, match=rf"{next(iter(options))}=.*StableDiffusionPipeline "):
        parallelize_pipe(pipe, **options)
    assert type(pipe) is diffusers.StableDiffusionPipeline


def give_ranks_to_tensor():
    mesh = init_context_parallel_mesh("cpu", max_tensor_dim_size=2)
    pipe = UNET_PIPELINES["sd"].build()
    errors = []
    for call in (
        lambda: parallelize_pipe(pipe, mesh=mesh),
        lambda: parallelize_pipe(pipe, mesh=mesh, weights="tensor"),
        lambda: parallelize_unet(pipe.unet, mesh=mesh),
        lambda: shard_weights(UNET_PIPELINES["svd"].build(), mesh, method="tensor"),
    ):
        with pytest.raises(ValueError, match="tensor") as error:
            call()
        errors.append(str(error.value))
    assert type(pipe) is diffusers.StableDiffusionPipeline
    assert type(pipe.unet) is diffusers.UNet2DConditionModel
    return errors


def test_unet_refuses_tensor_ranks(rank_pool):
    first, *others = rank_pool.run(give_ranks_to_tensor, 2)
    assert all(errors == first for errors in others)
    assert "2 ranks along 'tensor'" in first[0]
    assert not any("weights='tensor'" in error and "StableDiffusionPipeline" not in error for error in first)
