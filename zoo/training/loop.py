"""The training loop of all stages: the schedule, weight averaging, checkpoints that resume exactly."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

BETAS = (0.9, 0.99)
WEIGHT_DECAY = 0.01
MUON_INSIDE = (".blocks.", ".transformer_blocks.", ".single_transformer_blocks.")


@dataclass(frozen=True)
class Schedule:
    """The number of steps and the learning rates of one stage."""

    steps: int
    learning_rate: float
    warmup: int = 100  # steps
    boost: float = 1.0  # of the learning rate of the matrices that Muon updates; 0: AdamW updates them too
    decay: float = 0.35  # the part of the steps over which the rate falls
    average: float = 0.995  # decay of the averaged weights
    checkpoint_every: float = 120.0  # seconds
    export_every: float = 600.0  # seconds

    def rate(self, step: int) -> float:
        """Return the learning rate of a step: a linear warmup, a plateau, and over the last part a linear decay to
        zero.

        Before the decay begins the rate does not depend on ``steps``: until then a run may be resumed with another end
        and is still the run that had this end from its start.
        """
        up = (step + 1) / self.warmup
        down = (self.steps - step) / (self.decay * self.steps)
        return self.learning_rate * min(1.0, up, down)

    def rate_of(self, optimizer: torch.optim.Optimizer, step: int) -> float:
        """Return the learning rate of one of the optimizers."""
        return self.rate(step) * (self.boost if isinstance(optimizer, torch.optim.Muon) else 1.0)


def step_seed(seed: int, stage: int, step: int) -> np.random.SeedSequence:
    """Return the source of all randomness of one step. A resumed run draws what an uninterrupted one would
    have drawn.
    """
    return np.random.SeedSequence([seed, stage, step])


def torch_generator(seed: np.random.SeedSequence) -> torch.Generator:
    """Return a CPU generator. Numbers are drawn on the CPU and moved, so that a GPU trains on the same data."""
    return torch.Generator().manual_seed(int(seed.generate_state(1, np.uint64)[0] >> 1))


@dataclass
class State:
    """The content of a checkpoint. ``seconds`` is the time spent training so far."""

    model: nn.Module
    averaged: nn.Module
    optimizers: list[torch.optim.Optimizer]
    step: int = 0
    seconds: float = 0.0

    def save(self, path: Path) -> None:
        """Write the checkpoint; an interrupted write leaves the previous one whole."""
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "model": self.model.state_dict(),
            "averaged": self.averaged.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "seconds": self.seconds,
        }
        partial = path.with_suffix(".partial")
        torch.save(content, partial)
        partial.replace(path)

    def load(self, path: Path) -> None:
        """Continue from a checkpoint of the same model."""
        device = next(self.model.parameters()).device
        content = torch.load(path, map_location=device, weights_only=True)
        self.model.load_state_dict(content["model"])
        self.averaged.load_state_dict(content["averaged"])
        for optimizer, saved in zip(self.optimizers, content["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.seconds = content["step"], content["seconds"]

    @torch.no_grad()
    def average(self, decay: float) -> None:
        """Move the averaged weights; early on they follow more quickly."""
        decay = min(decay, (1 + self.step) / (10 + self.step))
        ours, theirs = list(self.averaged.parameters()), list(self.model.parameters())
        torch._foreach_lerp_(ours, theirs, 1 - decay)


def build_optimizers(model: nn.Module, *, muon: bool = True) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices inside blocks, unless ``muon`` is false, and AdamW for all other parameters."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        inside = muon and parameter.ndim == 2 and any(mark in f".{name}" for mark in MUON_INSIDE)
        (matrices if inside else others).append(parameter)
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(others, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)
    ]
    if matrices:
        # Scaled so that an update is as large as AdamW's: one learning rate serves both.
        optimizers.append(torch.optim.Muon(matrices, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"))
    return optimizers


def fit(
    model: nn.Module,
    loss_of_step: Callable[[nn.Module, int], torch.Tensor],
    schedule: Schedule,
    *,
    checkpoint: Path,
    name: str,
    stop_after: int | None = None,
    export: Callable[[State], None] | None = None,
) -> State:
    """Train ``model`` up to the end of the schedule, or up to step ``stop_after``; resume if ``checkpoint`` exists.

    Args:
        loss_of_step: model and step to a scalar loss; must draw all its randomness from `step_seed`.
        export: called with the state about every ``schedule.export_every`` seconds and at the end.
    """
    optimizers = build_optimizers(model, muon=schedule.boost > 0)
    state = State(model, copy.deepcopy(model).requires_grad_(False), optimizers)
    if checkpoint.exists():
        state.load(checkpoint)
    end = schedule.steps if stop_after is None else min(stop_after, schedule.steps)
    spent, start = state.seconds, time.monotonic()
    saved = exported = start
    smooth: float | None = None
    with tqdm(total=end, initial=state.step, desc=name, mininterval=5.0) as bar:
        while state.step < end:
            loss = loss_of_step(model, state.step)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = schedule.rate_of(optimizer, state.step)
                optimizer.step()
                optimizer.zero_grad()
            state.step += 1
            state.average(schedule.average)
            smooth = loss.item() if smooth is None else 0.98 * smooth + 0.02 * loss.item()
            bar.set_postfix(loss=f"{smooth:.4f}", refresh=False)
            bar.update()
            now = time.monotonic()
            state.seconds = spent + now - start
            if now - saved > schedule.checkpoint_every:
                state.save(checkpoint)
                saved = now
            if export is not None and now - exported > schedule.export_every:
                export(state)
                exported = now
    state.save(checkpoint)
    if export is not None:
        export(state)
    return state
