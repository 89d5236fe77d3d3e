"""Training resumes exactly, its loss is that of FLUX, and its tokenizers know the grammar."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from diffusers import FluxPipeline
from torch import nn

from zoo.flux import PIPELINE, tune
from zoo.flux.models import LATENT_CHANNELS, SHIFT, build_tokenizers, build_vae
from zoo.flux.train import (
    FluxCaptions,
    build_pool,
    draw_batch,
    draw_crowded_batch,
    encode,
    measure_latents,
)
from zoo.training import FlowLoss, Schedule, State, VaeLoss, build_optimizers, fit, step_seed

pytestmark = pytest.mark.slow
SCHEDULE = Schedule(steps=4, learning_rate=1e-3, warmup=2)


def train_vae(checkpoint: Path, stop_after: int | None = None) -> State:
    torch.manual_seed(0)
    return fit(build_vae(), VaeLoss(0, 1, draw_crowded_batch), SCHEDULE, checkpoint=checkpoint, stop_after=stop_after)


def test_two_steps_and_two_resumed_equal_four_straight(tmp_path):
    straight = train_vae(tmp_path / "straight.pt")
    assert train_vae(tmp_path / "parts.pt", stop_after=2).step == 2
    resumed = train_vae(tmp_path / "parts.pt")
    assert straight.step == resumed.step == 4
    for module in ("model", "averaged"):
        ours, theirs = (getattr(state, module).state_dict() for state in (resumed, straight))
        for name, value in theirs.items():
            assert torch.equal(ours[name], value), (module, name)


def test_an_interrupted_write_leaves_the_previous_checkpoint(tmp_path, monkeypatch):
    model = nn.Linear(2, 2)
    state = State(model, nn.Linear(2, 2), build_optimizers(model), step=7)
    state.save(tmp_path / "x.pt")

    def fail(content, path):
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", fail)
    state.step = 8
    with pytest.raises(OSError, match="disk full"):
        state.save(tmp_path / "x.pt")
    monkeypatch.undo()
    state.load(tmp_path / "x.pt")
    assert state.step == 7


class ExactVelocity(nn.Module):
    """A model that has the data, so it predicts the flow-matching target exactly: noise = (noisy − (1 − sigma) data) /
    sigma.
    """

    def __init__(self, data: torch.Tensor) -> None:
        super().__init__()
        self.data = nn.Parameter(data)
        self.sigmas: list[torch.Tensor] = []

    def forward(self, tokens, sigma, clip_ids, t5_ids):
        self.sigmas.append(sigma)
        assert t5_ids.shape[1] in (32, 64, 128)
        assert clip_ids.shape[1] == 77
        assert tokens.shape[1:] == (64, 4 * LATENT_CHANNELS)
        sigma = sigma[:, None, None]
        noise = (tokens - (1 - sigma) * self.data) / sigma
        return noise - self.data


def test_the_flow_loss_of_the_exact_velocity_is_zero():
    torch.manual_seed(0)
    vae, tokenizers = build_vae(), build_tokenizers()
    measure_latents(vae, 0, batches=1, batch=2)
    pool = build_pool(partial(encode, vae), 0, 1, (1.0, 0.0, 0.0), 3.0)
    with torch.no_grad():
        latents = vae.encode(draw_batch(step_seed(0, 1, 0), 1, (1.0, 0.0, 0.0))[0]).latent_dist.mean
    latents = (latents - vae.config.shift_factor) * vae.config.scaling_factor
    # This is FLUX's packing, written out: 2 × 2 latent pixels are one token, channel first.
    data = latents.reshape(1, LATENT_CHANNELS, 8, 2, 8, 2).permute(0, 2, 4, 1, 3, 5).reshape(1, 64, -1)
    model = ExactVelocity(data)
    loss = FlowLoss(pool, FluxCaptions(tokenizers), seed=0, batch=2, shift=SHIFT, autocast=False)(model, 0)
    # The rounding error of the data grows as 1 / sigma.
    assert loss.item() < 1e-6 / float(torch.cat(model.sigmas).min()) ** 2


def clip_vocabulary():
    return build_tokenizers().clip.get_vocab()


def test_tokenizers_are_the_same_in_every_process(rank_pool):
    """Check tokenizers of two processes: the merges were once trained, and token ids differed after a resumption."""
    assert rank_pool.run(clip_vocabulary, 1) == [clip_vocabulary()]


def test_tuning_keeps_the_record_and_refuses_a_tuned_pipeline(tmp_path):
    trained, tuned = tmp_path / "trained", tmp_path / "tuned"
    shutil.copytree(PIPELINE, trained)
    record = json.loads((PIPELINE / "training.json").read_text())
    del record["tuning"]
    (trained / "training.json").write_text(json.dumps(record))
    numbers = ["--scenes", "4", "--steps", "2", "--batch", "2"]
    folders = ["--checkpoints", str(tmp_path / "checkpoints"), "--output", str(tuned)]
    tune.main([*numbers, *folders, "--input", str(trained)])
    written = json.loads((tuned / "training.json").read_text())
    assert written.pop("tuning")["options"]["steps"] == 2
    assert written == record
    # The tuned parts have moved, and the text encoder that stays has its reach limited.
    pipes = [FluxPipeline.from_pretrained(folder, dtype=torch.float32) for folder in (trained, tuned)]
    before, after = (pipe.transformer.proj_out.weight for pipe in pipes)
    assert not torch.equal(before, after)
    with pytest.raises(ValueError, match="already tuned"):
        tune.main([*numbers, *folders, "--input", str(tuned)])
