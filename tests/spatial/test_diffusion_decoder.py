"""LTX-2.5's diffusion decoder on ranks, compared with the unmodified one on one device."""

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, LTX2VideoDiffusionDecodePipeline, LTX2VideoDiffusionDecoderModel

from benchmarks.harness import fake_group
from para_core.adapters import apply_cache_on_pipe, parallelize_pipe, parallelize_vae, unparallelize_vae
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
    return fill(LTX2VideoDiffusionDecoderModel(**SMALL | changes), 1)


def latents(name):
    return torch.randn(LATENTS[name], generator=torch.Generator().manual_seed(0))


def generators(name):
    drawn = [torch.Generator().manual_seed(seed) for seed in range(LATENTS[name][0])]
    return drawn if len(drawn) > 1 else drawn[0]


@torch.no_grad()
def decode(decoder, name, **options):
    return decoder.decode(latents(name), generator=generators(name), return_dict=False, **options)[0]


@torch.no_grad()
def videos_of(names, parallel):
    """Return videos by name: of one step, of two with default noise, with tiles, and with the decoder restored."""
    decoder = parallelize_vae(make_decoder()) if parallel else make_decoder()
    videos = {name: decode(decoder, name) for name in names}
    torch.manual_seed(7)
    videos["default noise"] = decoder.decode(latents(names[0]), num_inference_steps=2).sample
    decoder.enable_tiling(12, 64, 64, 8, 64, 64)
    videos["tiled"] = decode(decoder, "odd")
    decoder.disable_tiling()
    videos["undone"] = decode(unparallelize_vae(decoder) if parallel else decoder, names[0])
    return videos


@pytest.mark.long
@pytest.mark.parametrize(("world_size", "names"), [(2, ("odd", "wide")), (4, ("few", "odd"))])
def test_decoder_equals_one_device(rank_pool, world_size, names):
    expected = videos_of(names, parallel=False)
    for videos in rank_pool.run(videos_of, world_size, names, parallel=True):
        errors = {name: relative_error(video, expected[name]) for name, video in videos.items()}
        assert max(errors.values()) < 1e-5, errors
        assert torch.equal(videos["undone"], expected["undone"])


def make_pipe():
    return LTX2VideoDiffusionDecodePipeline(make_decoder(), FlowMatchEulerDiscreteScheduler())


def run_pipe(parallel):
    """Return frames, of which two ranks along batch share the columns."""
    pipe, columns = make_pipe(), []
    if parallel:
        parallelize_pipe(pipe, mesh=cpu_mesh(1, 1, batch=2))
        conv = pipe.diffusion_decoder.decoder.conv_in
        conv.register_forward_hook(lambda _, args, out: columns.append(out.shape[3]))
    frames = pipe(latents("wide"), generator=generators("wide"), output_type="pt").frames
    return frames, columns[:1]


@pytest.mark.long
def test_pipeline_equals_one_process(rank_pool):
    (first, first_columns), (second, second_columns) = rank_pool.run(run_pipe, 2, True)
    assert (first_columns, second_columns) == ([4], [3])
    assert max(relative_error(frames, run_pipe(False)[0]) for frames in (first, second)) < 1e-5


def decode_too_small():
    # Stage 1 has a kernel of 3 rows, so this video is too small, also on one device.
    parallelize_vae(make_decoder()).decode(torch.zeros(1, 4, 1, 2, 2))


def test_what_the_decoder_cannot_do_raises(rank_pool):
    for error in rank_pool.run_expecting_errors(decode_too_small, 2):
        assert isinstance(error, ValueError) and "kernel" in str(error)
    with pytest.raises(TypeError, match="LTX2VideoDiffusionDecodePipeline"):
        apply_cache_on_pipe(make_pipe(), residual_diff_threshold=0.1)
    with fake_group(2), pytest.raises(ValueError, match="weights='tensor'"):
        parallelize_pipe(make_pipe(), weights="tensor")
