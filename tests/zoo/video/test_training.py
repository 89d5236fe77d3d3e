"""Training resumes exactly, and trains the cases that WanPipeline will need."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import WanPipeline

from zoo.flux.models import SHIFT
from zoo.training import FlowLoss, Pool, Schedule, State, build_optimizers, fit, step_seed
from zoo.video.scenes import FRAMES, SIDE
from zoo.video.train import (
    LATENT_CHANNELS,
    WanCaptions,
    WanDenoiser,
    build_pipeline,
    build_pool,
    build_tokenizer,
    build_vae,
    draw_batch,
    draw_crowded_images,
    encode,
    measure_latents,
)

pytestmark = pytest.mark.slow
SCHEDULE = Schedule(steps=2, learning_rate=1e-3, warmup=1)


def train_flow(checkpoint: Path, stop_after: int | None = None) -> State:
    torch.manual_seed(0)
    scenes = draw_batch(step_seed(0, 1, 0), 3)[1]
    pool = Pool(scenes, torch.randn(3, LATENT_CHANNELS, 5, 8, 8), torch.ones(3, 1, 1, 1, 1))
    tokenizer = build_tokenizer()
    loss = FlowLoss(pool, WanCaptions(tokenizer), seed=0, batch=2, shift=SHIFT, autocast=True)
    model = WanDenoiser(tokenizer)
    return fit(model, loss, SCHEDULE, checkpoint=checkpoint, stop_after=stop_after)


@torch.no_grad()
def test_untrained_latents_and_frames_depend_on_the_images():
    images = draw_crowded_images(step_seed(0, 0, 0), 8)
    for seed in range(3):
        torch.manual_seed(seed)
        vae = build_vae()
        posterior = vae.encode(images).latent_dist
        # PyTorch's own initialisation gives 0.05 of the noise, and a tenth or two of the frames' deviation.
        assert posterior.mean.std(0).mean() > posterior.std.mean()
        frames = vae.decode(posterior.mean).sample
        assert frames.std(0).mean() > 0.5 * frames.std()


@pytest.mark.long
def test_one_step_and_one_resumed_equal_two_straight(tmp_path):
    straight = train_flow(tmp_path / "straight.pt")
    assert train_flow(tmp_path / "parts.pt", stop_after=1).step == 1
    resumed = train_flow(tmp_path / "parts.pt")
    assert straight.step == resumed.step == 2
    theirs = straight.averaged.state_dict()
    for name, value in resumed.averaged.state_dict().items():
        assert torch.equal(value, theirs[name]), name


def test_muon_updates_the_matrices_of_the_blocks():
    _, muon = build_optimizers(WanDenoiser(build_tokenizer()))
    sizes = [parameter.numel() for group in muon.param_groups for parameter in group["params"]]
    assert isinstance(muon, torch.optim.Muon)
    assert sum(sizes) > 2e6


@pytest.mark.long
def test_latents_are_unit_normal_and_rescaled():
    vae, tokenizer = build_vae(), build_tokenizer()
    measure_latents(vae, 0, batches=2, batch=4)
    pool = build_pool(vae, 0, 8)
    assert pool.data.shape == (8, LATENT_CHANNELS, 5, 8, 8)
    assert abs(pool.data.mean().item()) < 0.3
    assert pool.data.std().item() == pytest.approx(1.0, rel=0.3)
    videos = draw_batch(step_seed(0, 1, 0), 8)[0][:1]
    pipe = build_pipeline(WanDenoiser(tokenizer), vae, tokenizer)
    pipe.set_progress_bar_config(disable=True)
    # One Euler step from noise level 1 by (latents − data) gives the data.
    data = encode(vae, videos)
    noise = torch.randn(data.shape)
    pipe.transformer.forward = lambda hidden_states, **options: (hidden_states - data,)
    frames = pipe(
        "a", height=SIDE, width=SIDE, num_frames=FRAMES, num_inference_steps=1, guidance_scale=1.0, latents=noise,
        output_type="pt",
    ).frames  # fmt: skip
    with torch.no_grad():
        expected = vae.decode(vae.encode(videos).latent_dist.mean).sample
    expected = (expected / 2 + 0.5).clamp(0, 1).permute(0, 2, 1, 3, 4)
    assert torch.allclose(frames, expected, atol=1e-4)


@torch.no_grad()
def test_training_inputs_equal_those_of_the_pipeline():
    tokenizer = build_tokenizer()
    model = WanDenoiser(tokenizer).eval()
    pipe = build_pipeline(model, build_vae(), tokenizer)
    captions = ["a red circle moving up left on a white background", ""]
    tokens = tokenizer(captions, padding="max_length", max_length=16, return_tensors="pt")
    expected = pipe.encode_prompt(captions, do_classifier_free_guidance=False, max_sequence_length=16)[0]
    assert torch.allclose(model.encode_text(tokens.input_ids, tokens.attention_mask), expected, atol=1e-6)
    assert (expected[0, 11:] == 0).all()


def test_exported_folder_loads_offline_in_diffusers(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tokenizer = build_tokenizer()
    vae, model = build_vae(), WanDenoiser(tokenizer)
    build_pipeline(model.to(torch.bfloat16), vae.to(torch.bfloat16), tokenizer).save_pretrained(tmp_path)
    pipe = WanPipeline.from_pretrained(tmp_path, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    calls = []
    pipe.transformer.register_forward_hook(lambda module, args, output: calls.append(output[0].shape))
    frames = pipe(
        "a red circle", negative_prompt="", height=SIDE, width=SIDE, num_frames=FRAMES, num_inference_steps=1,
        guidance_scale=2.0,
    ).frames  # fmt: skip
    assert frames.shape == (1, FRAMES, SIDE, SIDE, 3)
    assert calls == [(1, LATENT_CHANNELS, 5, 8, 8)] * 2  # Guidance is sequential.
    assert sum(parameter.numel() for parameter in model.parameters()) < 3.2e6
