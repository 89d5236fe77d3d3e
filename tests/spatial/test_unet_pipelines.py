"""Pipelines with UNets (Stable Diffusion 1.5, XL, Stable Video Diffusion): rows and guidance over ranks."""

import re
import warnings
from pathlib import Path

import diffusers
import pytest
import torch
import torch.distributed as dist

from para_core import PipeFusion, init_context_parallel_mesh
from para_core.adapters import parallelize_pipe, parallelize_unet, shard_weights, unparallelize_pipe, unparallelize_unet
from para_core.adapters.denoisers import other_denoisers_of
from para_core.adapters.models import ADAPTERS
from para_core.adapters.models.unets import REFUSED_UNETS, UNETS
from para_core.adapters.registry import component_of
from tests.adapters.test_pipelines import meshes_of
from tests.tiny import cpu_mesh, relative_error
from zoo.tiny.pipelines.options import random_image
from zoo.tiny.pipelines.unet import UNET_PIPELINES

# Meshes are batch × ring × ulysses. They distribute rows, rows by either dim, branches of guidance, or both.
ROWS, BATCH, BOTH, THREE = (1, 1, 2), (2, 1, 1), (2, 2, 1), (1, 1, 3)
# Of 2 × 10 latents, two ranks of three hold columns. Of 5 × 3, one rank computes all. 9 × 15 are odd and uneven.
SIZES = [{"height": 16, "width": 80}, {"height": 40, "width": 24}, {"height": 72, "width": 120}]


def generate(pipe, name, **options):
    with warnings.catch_warnings(), torch.random.fork_rng():
        torch.manual_seed(7)
        # Ranks along the batch dim may have nothing to share.
        warnings.filterwarnings("ignore", message=r".* \d+ sample.*'batch'")
        out = pipe(**UNET_PIPELINES[name].call(**options))[0]
    return torch.cat(list(out)) if isinstance(out, list) else out


def of_sizes(sizes):
    """Return the options of images of other sizes and of their control images, or those of the default size."""
    return [{**size, "image": random_image(**size)} for size in sizes] or [{}]


def generate_on(name, shapes, sizes):
    """Return the images of each size on each mesh, and after the pipeline was restored."""
    images, pipe = {}, UNET_PIPELINES[name].build()
    before = {path: (type(module), {*vars(module)}) for path, module in other_denoisers_of(pipe).items()}
    for shape, mesh in meshes_of(shapes).items():
        parallelize_pipe(pipe, mesh=mesh)
        images[shape] = [generate(pipe, name, **options) for options in of_sizes(sizes)]
    unparallelize_pipe(pipe)
    for path, (cls, attributes) in before.items():
        assert (type(component_of(pipe, path)), {*vars(component_of(pipe, path))}) == (cls, attributes)
    if dist.get_rank() == 0:
        images["given back"] = [generate(pipe, name, **options) for options in of_sizes(sizes)]
    return images


@pytest.mark.parametrize(
    ("name", "shapes", "sizes"),
    [
        ("sd, control", [THREE], SIZES),
        ("xl, control", [BOTH], []),
        ("svd", [ROWS, BATCH], []),
        *[pytest.param(name, [ROWS, BATCH], [], marks=pytest.mark.long) for name in UNET_PIPELINES],
    ],
)
def test_every_unet_pipeline_is_exact(rank_pool, name, shapes, sizes):
    expected = [generate(UNET_PIPELINES[name].build(), name, **options) for options in of_sizes(sizes)]
    for outs in rank_pool.run(generate_on, torch.Size(shapes[0]).numel(), name, shapes, sizes):
        errors = {how: list(map(relative_error, images, expected)) for how, images in outs.items()}
        assert max(map(max, errors.values())) < 1e-5, errors


@torch.no_grad()
def call_by_hand():
    """Call a UNet in a loop of one's own, also with another sample on each rank."""
    unet = UNET_PIPELINES["sd"].build().unet
    sample = torch.randn(2, 4, 11, 17, generator=torch.Generator().manual_seed(0))
    text = torch.randn(2, 5, unet.config.cross_attention_dim, generator=torch.Generator().manual_seed(1))
    alone, cls = unet(sample, 3, text).sample, type(unet)
    assert parallelize_unet(unet, mesh=cpu_mesh(2, 1)) is unet
    for out in (unet(sample, 3, text).sample, unet(sample, 3, text, return_dict=False)[0]):
        assert 0 < relative_error(out, alone) < 1e-5
    with pytest.raises(ValueError, match=r"UNet2DConditionModel .*sample: rank 0 .*rank 1 "):
        unet(sample + dist.get_rank(), 3, text)
    with torch.enable_grad(), pytest.raises(ValueError, match=r"requires_grad: .*encoder_hidden_states"):
        unet(sample, 3, text.clone().requires_grad_(dist.get_rank() == 1))
    with torch.enable_grad(), pytest.raises(RuntimeError, match="encoder_hidden_states requires a gradient"):
        unet(sample, 3, text.clone().requires_grad_())
    unet.conv_in.requires_grad_()
    with torch.enable_grad(), pytest.raises(RuntimeError, match=r"conv_in\.weight requires a gradient"):
        unet(sample, 3, text)
    control = parallelize_unet(UNET_PIPELINES["sd, control"].build().controlnet, mesh=cpu_mesh(2, 1))
    with pytest.raises(TypeError, match="controlnet_cond"):
        control(sample, 3, text)
    assert type(unparallelize_unet(unet)) is cls


def refuse_tensor_ranks():
    mesh, pipe = init_context_parallel_mesh("cpu", max_tensor_dim_size=2), UNET_PIPELINES["sd"].build()
    for call, message in (
        (lambda: parallelize_pipe(pipe, mesh=mesh), "2 ranks along 'tensor'"),
        (lambda: parallelize_pipe(pipe, mesh=mesh, weights="tensor"), "2 ranks along 'tensor'"),
        (lambda: parallelize_unet(pipe.unet, mesh=mesh), "tensor"),
        (lambda: shard_weights(UNET_PIPELINES["svd"].build(), mesh, method="tensor"), "tensor"),
        (lambda: parallelize_pipe(pipe, weights="fsdp", text_encoders="fsdp"), "text_encoders='fsdp'"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert (type(pipe), type(pipe.unet)) == (diffusers.StableDiffusionPipeline, diffusers.UNet2DConditionModel)


def refuse_other_unets():
    other = UNET_PIPELINES["sd"].build().unet
    for change, message in (
        (lambda pipe: pipe.controlnet.double() if dist.get_rank() else None, r"dtype of pipe\.controlnet"),
        (lambda pipe: setattr(pipe, "unet", other), r"pipe\.unet .*another .*parallelized"),
        (lambda pipe: unparallelize_unet(pipe.unet), r"pipe\.unet .*unparallelized"),
    ):
        pipe = parallelize_pipe(UNET_PIPELINES["sd, control"].build(), mesh=cpu_mesh(1, 2))
        change(pipe)
        with pytest.raises((RuntimeError, ValueError), match=message):
            generate(pipe, "sd, control")


def refuse_unet_of_one_rank():
    pipe, mesh = UNET_PIPELINES["sd"].build(), cpu_mesh(2, 2)
    if dist.get_rank() == 1:
        pipe.unet.hf_device_map = {"a": 0, "b": 1}
    for call in (lambda: parallelize_pipe(pipe, mesh=mesh), lambda: parallelize_unet(pipe.unet, mesh=mesh)):
        with pytest.raises(ValueError, match=r"mesh rank 1: .* device_map"):
            call()


CHECKS = [(call_by_hand, 2), (refuse_tensor_ranks, 2), (refuse_other_unets, 2), (refuse_unet_of_one_rank, 4)]


@pytest.mark.parametrize(("check", "ranks"), CHECKS)
def test_unets_run_in_own_loops_and_are_refused(rank_pool, check, ranks):
    rank_pool.run(check, ranks)


def test_options_that_do_not_fit_a_unet_are_refused():
    pipe = UNET_PIPELINES["sd"].build()
    options = {"pipefusion": PipeFusion(), "text": "shard", "weights": "tensor", "rotate_method": "allgather"}
    for name, value in {**options, "adapter": ADAPTERS[0]}.items():
        with pytest.raises(ValueError, match=rf"{name}=.*StableDiffusionPipeline "):
            parallelize_pipe(pipe, **{name: value})
        assert type(pipe) is diffusers.StableDiffusionPipeline
    with pytest.raises(ValueError, match="backend='math': StableVideoDiffusionPipeline "):
        parallelize_pipe(UNET_PIPELINES["svd"].build(), backend="math")
    for name in ("assume_equal", "batched"):
        with pytest.raises(TypeError, match=f"{name} is 'no'"):
            parallelize_unet(pipe.unet, **{name: "no"})


def test_every_unet_class_runs_or_has_a_reason():
    names = set(re.findall(r'"(\w*U[nN]et\w*)"', Path(diffusers.__file__).read_text()))
    names = {name for name in names if name.endswith(("Model", "UNet"))}
    assert len(names) > 10
    assert names <= set(UNETS) | set(REFUSED_UNETS), names - set(UNETS) - set(REFUSED_UNETS)
    with pytest.raises(TypeError, match=r"Linear .*Stable Diffusion XL"):
        parallelize_unet(torch.nn.Linear(1, 1))
