"""Training resumes exactly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from zoo.flux.models import build_vae
from zoo.flux.train import draw_crowded_batch
from zoo.training import Schedule, State, VaeLoss, fit

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
