"""``same_bits=True``: rows of an autoencoder on several ranks have the bytes of one process."""

import pytest
import torch
import torch.nn.functional as F

from para_core.adapters import parallelize_pipe, parallelize_vae, unparallelize_vae
from para_core.adapters.vae.families import require_parallel_vae
from para_core.same_bits.image_rows import SameBitsRows
from para_core.same_bits.placed_rows import PlacedRows
from para_core.same_bits.products import have_equal_bytes
from para_core.spatial.row_group import one_group
from tests.spatial.test_diffusion_decoder import make_decoder
from tests.spatial.test_functions import attend_by_products
from tests.tiny import cpu_mesh, flux_call, flux_pipe
from zoo.tiny.vaes import TINY_VAES, random_image


@torch.no_grad()
def equal_ways(name, dtype):
    """Return whether each call has the bytes of one process: the first, and one whose functions are known."""
    tiny = TINY_VAES[name]
    vae = tiny.make().to(dtype)
    equal = []
    for way, shape in (("decode", tiny.latents), ("encode", tiny.pixels)):
        images = [random_image(shape, seed=seed).to(dtype) for seed in (1, 2)]
        expected = [getattr(tiny, way)(vae, image) for image in images]
        parallelize_vae(vae, same_bits=True)
        outs = [getattr(tiny, way)(vae, image) for image in images]
        unparallelize_vae(vae)
        equal += map(have_equal_bytes, outs, expected)
    return equal


@pytest.mark.parametrize(
    ("name", "dtype", "ranks"), [("Wan 2.1", torch.float32, 2), ("KL", torch.float32, 3), ("KL", torch.bfloat16, 2)]
)
def test_vae_has_the_bytes_of_one_process(rank_pool, ranks, name, dtype):
    assert rank_pool.run(equal_ways, ranks, name, dtype) == [[True] * 4] * ranks


def functions_of_rows():
    """Return which functions have the bytes of one process, for 13 rows on the ranks. Others, and graphs, raise."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 12, 13, 5, generator=generator)
    weight = torch.randn(12, 12, 3, 3, generator=generator)
    ranks = one_group(cpu_mesh(1, torch.distributed.get_world_size()))
    last = x.contiguous(memory_format=torch.channels_last)
    functions = {
        # Five groups do not divide by the ranks, and one group leaves ranks without any.
        "groups": (lambda y: F.group_norm(F.group_norm(y, 1, *weight[:2, :, 0, 0])[:, :10], 5), x),
        "groups, channels last": (lambda y: F.group_norm(y, 4), last),
        "frames of rows": (lambda y: F.group_norm(y.flatten(2), 2), x.unflatten(1, (4, 3))),
        "convolution and pool": (lambda y: F.avg_pool2d(F.conv2d(y, weight, padding=1), 2), x),
        "stride": (lambda y: F.conv_transpose2d(F.conv2d(F.pad(y, (0, 1, 0, 1)), weight, stride=2), weight), x),
        "bilinear": (lambda y: F.interpolate(y, scale_factor=2, mode="bilinear"), x),
        "mean of rows": (lambda y: y.mean(dim=(2, 3), keepdim=True), x),
        "mean of channels": (lambda y: torch.rsqrt(y.square().mean(dim=1, keepdim=True) + 1e-6) * y, x),
        "powers": (lambda y: F.logsigmoid(y.abs() ** 1.7), x),
        "sums with alpha": (lambda y: torch.rsub(y.add(y[:, :1], alpha=0.3), y[:, 1:2], alpha=0.3), x.bfloat16()),
        "half of the channels, in place": (lambda y: F.silu(y.clone().chunk(2, dim=1)[1], inplace=True), x),
        "attention": (lambda y: F.scaled_dot_product_attention(y, y, y), x.permute(0, 3, 2, 1)),
        "attention by products": (attend_by_products, x),
        "product over rows": (lambda y: y @ (y.transpose(-1, -2) @ y), x.permute(0, 3, 2, 1)),
    }
    equal = {}
    for name, (function, image) in functions.items():
        mode = SameBitsRows(ranks, PlacedRows())
        part = mode.shard(image)
        with mode:
            out = function(part)
        equal[name] = have_equal_bytes(mode.gather(out), function(image))
    with pytest.raises(RuntimeError, match=r"^square .*complex numbers"), SameBitsRows(ranks, PlacedRows()):
        torch.complex(part, part).square()
    vae = parallelize_vae(TINY_VAES["Tiny"].make(), same_bits=True)
    with pytest.raises(Exception, match="same_bits=True runs an eager VAE"):
        torch.compile(vae.decode, backend="eager")(random_image(TINY_VAES["Tiny"].latents))
    return equal


@pytest.mark.parametrize("ranks", [2, 3])
def test_each_function_has_the_bytes_of_one_process(rank_pool, ranks):
    for equal in rank_pool.run(functions_of_rows, ranks):
        assert equal == dict.fromkeys(equal, True)


def pipe_with_vae():
    """Return whether the image of a pipeline has the bytes of one process, with and without the option."""
    equal = []
    for same_bits in (True, False):
        pipe = flux_pipe()
        expected = pipe(**flux_call(output_type="pt")).images
        parallelize_pipe(pipe, mesh=cpu_mesh(1, 2), same_bits=same_bits, vae=True)
        equal.append(have_equal_bytes(pipe(**flux_call(output_type="pt")).images, expected))
    return equal


def test_pipeline_with_its_vae_has_the_bytes_of_one_process(rank_pool):
    # Without the option the bytes are others, or the test would show nothing.
    assert rank_pool.run(pipe_with_vae, 2) == [[True, False]] * 2


def test_decoder_with_rows_of_its_own_is_refused():
    with pytest.raises(ValueError, match="same_bits=True: LTX2VideoDiffusionDecoderModel"):
        require_parallel_vae(make_decoder(), same_bits=True)
