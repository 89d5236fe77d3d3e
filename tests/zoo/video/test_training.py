"""Training resumes exactly, and trains the cases that WanPipeline will need."""

from __future__ import annotations

import pytest
import torch
from diffusers import WanPipeline

from zoo.video.scenes import FRAMES, SIDE
from zoo.video.train import (
    LATENT_CHANNELS,
    WanDenoiser,
    build_pipeline,
    build_tokenizer,
    build_vae,
)

pytestmark = pytest.mark.slow


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
