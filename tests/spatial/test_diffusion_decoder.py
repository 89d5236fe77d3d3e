"""LTX-2.5's diffusion decoder on ranks, compared with the unmodified one on one device."""

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, LTX2VideoDiffusionDecodePipeline, LTX2VideoDiffusionDecoderModel

from para_core.adapters import (
    apply_cache_on_pipe,
    parallelize_pipe,
    parallelize_vae,
    unparallelize_pipe,
    unparallelize_vae,
)
from para_core.adapters.vae.diffusion_decoder import find_windows
from tests.attention.one_device import relative_error
from tests.tiny import cpu_mesh
from zoo.tiny.base import fill

SMALL = {
    "latent_channels": 4,
    "patch_size": 2,
    "decoder_head_dim": 8,
    "decoder_stage_channels": (16, 8, 8, 8, 8),
    "decoder_stage_depths": (1, 1, 1, 1, 2),
    "decoder_stage_kernels": ((3, 3, 3), (1, 3, 3), (1, 1, 3), (1, 3, 1)),
    "decoder_upsample_strides": ((1, 2, 2), (2, 1, 1), (2, 1, 1), (2, 1, 1)),
    "decoder_upsample_channel_reductions": (2, 1, 1, 1),
    "decoder_stage5_kernel": (1, 5, 3),
    "decoder_t_emb_dim": 16,
    "spatial_compression_ratio": 4,
}
# Shapes [B, C, T, H, W] with odd sizes, wider than high, and with fewer rows than four ranks.
LATENTS = {"odd": (1, 4, 2, 5, 3), "wide": (2, 4, 1, 3, 7), "few": (1, 4, 1, 3, 3)}


def make_decoder(**changes):
    decoder = LTX2VideoDiffusionDecoderModel(**SMALL | changes)
    return fill(decoder, 1)


def latents(name):
    return torch.randn(LATENTS[name], generator=torch.Generator().manual_seed(0))


def generators(name):
    drawn = [torch.Generator().manual_seed(seed) for seed in range(LATENTS[name][0])]
    return drawn if len(drawn) > 1 else drawn[0]


def decode(decoder, name, **options):
    with torch.no_grad():
        return decoder.decode(latents(name), generator=generators(name), return_dict=False, **options)[0]


def decode_parallel(names):
    """Return videos by name: of one and two steps, with default noise, with tiles, and with the decoder restored."""
    decoder, videos = parallelize_vae(make_decoder()), {}
    for name in names:
        videos[name] = decode(decoder, name), decode(decoder, name, num_inference_steps=2)
    torch.manual_seed(7)
    videos["default"] = decoder.decode(latents(names[0])).sample
    decoder.enable_tiling(12, 64, 64, 8, 64, 64)
    videos["tiled"] = decode(decoder, "odd")
    decoder.disable_tiling()
    videos["undone"] = decode(unparallelize_vae(decoder), names[0])
    return videos


@pytest.mark.long
@pytest.mark.parametrize(
    ("world_size", "names"), [(2, ("odd", "wide")), pytest.param(4, ("few", "odd"), marks=pytest.mark.long)]
)
def test_decoder_equals_one_device(rank_pool, world_size, names):
    plain = make_decoder()
    expected = {name: (decode(plain, name), decode(plain, name, num_inference_steps=2)) for name in names}
    torch.manual_seed(7)
    with torch.no_grad():
        default = plain.decode(latents(names[0])).sample
    plain.enable_tiling(12, 64, 64, 8, 64, 64)
    tiled = decode(plain, "odd")
    assert relative_error(tiled, expected["odd"][0]) > 1e-3
    for videos in rank_pool.run(decode_parallel, world_size, names):
        for name in names:
            assert max(map(relative_error, videos[name], expected[name])) < 1e-5, name
        assert relative_error(videos["default"], default) < 1e-5
        assert relative_error(videos["tiled"], tiled) < 1e-5
        assert torch.equal(videos["undone"], expected[names[0]][0])


def make_pipe():
    return LTX2VideoDiffusionDecodePipeline(make_decoder(), FlowMatchEulerDiscreteScheduler())


def run_pipe(pipe):
    return pipe(latents("wide"), generator=generators("wide"), output_type="pt").frames


def run_parallel_pipe(batch, ulysses):
    pipe = make_pipe()
    cls = type(pipe)
    parallelize_pipe(pipe, mesh=cpu_mesh(1, ulysses, batch=batch))
    columns = []
    hook = pipe.diffusion_decoder.decoder.conv_in.register_forward_hook(lambda _, args, out: columns.append(out.shape))
    frames = run_pipe(pipe)
    hook.remove()
    first = torch.distributed.get_rank() == 0
    with pytest.raises(ValueError, match="generator"):
        pipe(latents("odd"), generator=torch.Generator().manual_seed(3 + first), output_type="pt")
    with pytest.raises(ValueError, match="weights='tensor'"):
        parallelize_pipe(pipe, weights="tensor")
    parallelize_pipe(pipe)  # This is on the default mesh.
    default = run_pipe(pipe)
    undone = run_pipe(unparallelize_pipe(pipe))
    assert type(pipe) is cls and type(pipe.diffusion_decoder) is LTX2VideoDiffusionDecoderModel
    return frames, default, undone, columns[0][3]


@pytest.mark.long
def test_pipeline_equals_one_process(rank_pool):
    expected = run_pipe(make_pipe())
    results = rank_pool.run(run_parallel_pipe, 2, batch=2, ulysses=1)
    assert [columns for *_, columns in results] == [4, 3]
    for frames, default, undone, _ in results:
        assert max(relative_error(frames, expected), relative_error(default, expected)) < 1e-5
        assert torch.equal(undone, expected)


def test_cache_is_refused():
    with pytest.raises(TypeError, match="LTX2VideoDiffusionDecodePipeline"):
        apply_cache_on_pipe(make_pipe(), residual_diff_threshold=0.1)


def test_windows_cover_those_of_natten():
    for layout in ((3, 3, 2), (1, 1, 6), (9,)):
        total, kernel = sum(layout), 5
        first = [min(max(row - 2, 0), total - kernel) for row in range(total)]
        start = 0
        for (low, length), rows in zip(find_windows(layout, kernel), layout, strict=True):
            own = first[start : start + rows]
            assert (low, low + length) == (min(own), max(own) + kernel)
            start += rows


def test_too_small_video_raises_as_on_one_device(rank_pool):
    small = torch.zeros(1, 4, 1, 2, 2)  # Stage 1 has a kernel of 3 rows, so this is too small.
    with pytest.raises(ValueError, match="kernel"):
        make_decoder().decode(small)
    for error in rank_pool.run_expecting_errors(decode_too_small, 2, small):
        assert isinstance(error, ValueError) and "kernel" in str(error)


def decode_too_small(small):
    parallelize_vae(make_decoder()).decode(small)
