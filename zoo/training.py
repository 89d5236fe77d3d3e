"""The training of both small pipelines: losses, the loop with checkpoints that resume exactly, the command line."""

from __future__ import annotations

import argparse
import copy
import json
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from tqdm import tqdm

from zoo.flux.scenes import to_tensor

SAVE_EVERY = 300.0  # seconds
MUON_INSIDE = (".blocks.", ".transformer_blocks.", ".single_transformer_blocks.")
# They are part of each seed, so that stages draw different scenes.
VAE_STAGE, FLOW_STAGE, STATISTICS, TEXT_STAGE, DECODER_STAGE = range(5)
KL_WEIGHT = 1e-4  # It applies per latent element, against a reconstruction loss per pixel element.
COLOURED = 0.3  # This is max − min over RGB in −1 … 1.
NO_CAPTION = 0.06  # This share of the captions is empty, for guidance with a negative prompt.
CAPITAL = 0.25  # This share of the captions starts with a capital.


def step_seed(seed: int, stage: int, step: int) -> np.random.SeedSequence:
    """Return the source of all randomness of one step. A resumed run draws the same as an uninterrupted one."""
    return np.random.SeedSequence([seed, stage, step])


def torch_generator(seed: np.random.SeedSequence) -> torch.Generator:
    """Return a CPU generator. Numbers are drawn on the CPU and moved, so that a GPU trains on the same data."""
    return torch.Generator().manual_seed(int(seed.generate_state(1, np.uint64)[0] >> 1))


# -- Losses.


class PlainAttention(TorchFunctionMode):
    """A mode that computes unmasked attention as two matrix products, which is 2.5 times as fast on a CPU at 300
    tokens.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention or kwargs.get("attn_mask") is not None or kwargs.get("is_causal"):
            return func(*args, **kwargs)
        query, key, value = args or (kwargs[name] for name in ("query", "key", "value"))
        return torch.softmax((query * query.shape[-1] ** -0.5) @ key.transpose(-1, -2), -1) @ value


def vary(captions: list[str], rng: np.random.Generator) -> list[str]:
    """Return the captions, some of them capitalized, some empty."""
    captions = [text.capitalize() if rng.random() < CAPITAL else text for text in captions]
    return ["" if rng.random() < NO_CAPTION else text for text in captions]


@dataclass(frozen=True)
class VaeLoss:
    """The absolute and squared error of the reconstruction, plus a small weight that draws the latents towards a unit
    normal.
    """

    seed: int
    batch: int
    draw: Callable[[np.random.SeedSequence, int], torch.Tensor]  # It maps seed and batch to pixels in −1 … 1.
    thing_weight: float = 1.0  # It weighs the error of pixels with a colour. Backgrounds are grey.

    def __call__(self, model: nn.Module, step: int) -> torch.Tensor:
        seed = step_seed(self.seed, VAE_STAGE, step)
        pixels = self.draw(seed, self.batch).to(next(model.parameters()).device)
        posterior = model.encode(pixels).latent_dist
        noise = torch.randn(posterior.mean.shape, generator=torch_generator(seed)).to(pixels.device)
        error = model.decode(posterior.mean + posterior.std * noise).sample - pixels
        kl = 0.5 * (posterior.mean.square() + posterior.var - 1 - posterior.logvar).mean()
        coloured = pixels.amax(1, keepdim=True) - pixels.amin(1, keepdim=True) > COLOURED
        weights = 1 + (self.thing_weight - 1) * coloured.float()
        return ((error.abs() + error.square()) * (weights / weights.mean())).mean() + KL_WEIGHT * kl


@dataclass(frozen=True)
class Pool:
    """Scenes that are drawn and encoded once, and then used with new captions and noise in each step."""

    scenes: list[Any]
    data: torch.Tensor  # The shape is [N, …], and the denoiser gets these unit normal latents.
    weights: torch.Tensor  # The shape is [N, …], broadcast with data. The weights are those of the loss.


@dataclass(frozen=True)
class FlowLoss:
    """Flow matching on latents: the squared error of the predicted velocity, noise − data.

    Noise levels are logit-normal and then shifted towards noise, which is the distribution of SD3 and FLUX.
    """

    pool: Pool
    # It maps scenes to the conditions of the model.
    condition: Callable[[list[Any], np.random.Generator], tuple[torch.Tensor, ...]]
    seed: int
    batch: int
    shift: float
    autocast: bool = True  # The model computes in bfloat16.
    # This is a further loss of the same call: a function of model and scenes that returns a scalar.
    also: Callable[[Any, list[Any]], torch.Tensor] | None = None

    def __call__(self, model: nn.Module, step: int) -> torch.Tensor:
        seed = step_seed(self.seed, FLOW_STAGE, step)
        generator, rng = torch_generator(seed), np.random.default_rng(seed)
        device = next(model.parameters()).device
        chosen = rng.integers(len(self.pool.scenes), size=self.batch)
        scenes = [self.pool.scenes[i] for i in chosen]
        condition = [x.to(device) for x in self.condition(scenes, rng)]
        data, weights = self.pool.data[chosen].to(device), self.pool.weights[chosen].to(device)
        noise = torch.randn(data.shape, generator=generator).to(device)
        s = torch.randn(self.batch, generator=generator).sigmoid()
        sigma = (self.shift * s / (1 + (self.shift - 1) * s)).to(device)
        noisy = torch.lerp(data, noise, sigma.view(-1, *[1] * (data.ndim - 1)))
        with torch.autocast(device.type, torch.bfloat16, enabled=self.autocast), PlainAttention():
            velocity = model(noisy, sigma, *condition)
        loss = ((velocity.float() - (noise - data)).square() * weights).mean()
        return loss if self.also is None else loss + self.also(model, scenes)


def draw_scenes(
    random_scene: Callable[..., Any], draw: Callable[..., np.ndarray], seed: np.random.SeedSequence, batch: int
) -> tuple[torch.Tensor, list[Any]]:
    """Return the images or videos of random scenes in −1 … 1, and the scenes."""
    rngs = [np.random.default_rng(child) for child in seed.spawn(batch)]
    scenes = [random_scene(rng) for rng in rngs]
    return to_tensor([draw(scene, rng) for scene, rng in zip(scenes, rngs, strict=True)]), scenes


def build_pool(
    draw: Callable[..., Any], encode: Callable[..., Any], weigh: Callable[..., Any], seed: int, count: int, batch: int
) -> Pool:
    """Draw and encode ``count`` training scenes in parts of ``batch``. ``weigh`` returns the weights of a scene."""
    scenes, data = [], []
    for start in range(0, count, batch):
        pixels, part = draw(step_seed(seed, FLOW_STAGE, start), min(batch, count - start))
        scenes += part
        data.append(encode(pixels).cpu())
    return Pool(scenes, torch.cat(data), torch.stack([weigh(scene) for scene in scenes]))


# -- The loop.


@dataclass(frozen=True)
class Schedule:
    """The number of steps and the learning rates of one stage."""

    steps: int
    learning_rate: float
    warmup: int = 100  # steps
    # The learning rate of the matrices that Muon updates is multiplied by it. With 0, AdamW updates them too.
    boost: float = 1.0
    decay: float = 0.35  # The rate falls over this part of the steps.
    average: float = 0.995  # This is the decay of the averaged weights.

    def rate(self, step: int) -> float:
        """Return the learning rate of a step: a linear warmup, a plateau, and a linear decay to zero over the last
        part.

        Before the decay begins, the rate does not depend on ``steps``. Until then a run may be resumed with another
        end, and is the same as a run that had this end from its start.
        """
        down = (self.steps - step) / (self.decay * self.steps)
        return self.learning_rate * min(1.0, (step + 1) / self.warmup, down)


@dataclass
class State:
    """The content of a checkpoint. ``seconds`` is the time spent training so far."""

    model: nn.Module
    averaged: nn.Module
    optimizers: list[torch.optim.Optimizer]
    step: int = 0
    seconds: float = 0.0

    def _parts(self) -> list[Any]:
        return [self.model, self.averaged, *self.optimizers]

    def save(self, path: Path) -> None:
        """Write the checkpoint. An interrupted write leaves the previous one whole."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        torch.save(([part.state_dict() for part in self._parts()], self.step, self.seconds), partial)
        partial.replace(path)

    def load(self, path: Path) -> None:
        """Continue from a checkpoint of the same model."""
        device = next(self.model.parameters()).device
        states, self.step, self.seconds = torch.load(path, map_location=device, weights_only=True)
        for part, state in zip(self._parts(), states, strict=True):
            part.load_state_dict(state)


def build_optimizers(model: nn.Module, *, muon: bool = True) -> list[torch.optim.Optimizer]:
    """Return AdamW, and Muon for the matrices inside blocks unless ``muon`` is false."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            inside = muon and parameter.ndim == 2 and any(mark in f".{name}" for mark in MUON_INSIDE)
            (matrices if inside else others).append(parameter)
    optimizers = [torch.optim.AdamW(others, betas=(0.9, 0.99), weight_decay=0.01, fused=True)]
    if matrices:
        # The scale makes an update as large as AdamW's, so that one learning rate serves both.
        optimizers.append(torch.optim.Muon(matrices, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"))
    return optimizers


def fit(
    model: nn.Module,
    loss_of_step: Callable[[nn.Module, int], torch.Tensor],
    schedule: Schedule,
    *,
    checkpoint: Path,
    stop_after: int | None = None,
    export: Callable[[State], None] = lambda state: None,
) -> State:
    """Train ``model`` to the end of the schedule, or to step ``stop_after``. Resume if ``checkpoint`` exists.

    Args:
        loss_of_step: a function from model and step to a scalar loss. It must draw all its randomness from `step_seed`.
        export: a function that is called with the state whenever a checkpoint is written.
    """
    optimizers = build_optimizers(model, muon=schedule.boost > 0)
    state = State(model, copy.deepcopy(model).requires_grad_(False), optimizers)
    if checkpoint.exists():
        state.load(checkpoint)
    end = schedule.steps if stop_after is None else min(stop_after, schedule.steps)
    start, saved = time.monotonic() - state.seconds, state.seconds
    with tqdm(total=end, initial=state.step, desc=checkpoint.stem, mininterval=5.0) as bar:
        while state.step < end:
            loss = loss_of_step(model, state.step)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                boost = schedule.boost if isinstance(optimizer, torch.optim.Muon) else 1.0
                for group in optimizer.param_groups:
                    group["lr"] = schedule.rate(state.step) * boost
                optimizer.step()
                optimizer.zero_grad()
            state.step += 1
            # At the beginning the averaged weights follow more quickly.
            decay = min(schedule.average, (1 + state.step) / (10 + state.step))
            with torch.no_grad():
                torch._foreach_lerp_(list(state.averaged.parameters()), list(model.parameters()), 1 - decay)
            bar.set_postfix(loss=f"{loss.item():.4f}", refresh=False)
            bar.update()
            state.seconds = time.monotonic() - start
            if state.seconds - saved > SAVE_EVERY:
                state.save(checkpoint)
                export(state)
                saved = state.seconds
    state.save(checkpoint)
    export(state)
    return state


# -- The command line.


def parse(doc: str | None, home: Path, arguments: list[str] | None = None, **recipe: float) -> argparse.Namespace:
    """Return the command line of a training program: the options of all programs, and one for each number of its
    ``recipe``.

    ``home`` is the folder of the checkpoints and of the pipeline. Sets the number of threads too.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    folders = {"checkpoints": home / "checkpoints", "output": home / "pipeline"}
    options = {"device": "cuda" if torch.cuda.is_available() else "cpu", "threads": 1, "seed": 0, **recipe, **folders}
    for name, value in options.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=type(value), default=value, help=" "
        )  # An option without help shows no default.
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    # Under autocast, RMSNorm gets a bfloat16 input and a float32 weight. It warns once and computes anyway.
    warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
    return args


def train_vae(
    args: argparse.Namespace, model: nn.Module, stages: dict[str, tuple[int, VaeLoss]], *, average: float
) -> tuple[Any, float]:
    """Train an autoencoder in stages of steps and loss. Return the averaged one, and the seconds of training.

    The published weights are bfloat16, so the result is rounded to that, and the transformer learns the latents of the
    rounded weights.
    """
    seconds = 0.0
    for name, (steps, loss) in stages.items():
        schedule = Schedule(steps, args.vae_learning_rate, average=average)
        state = fit(model.requires_grad_(True), loss, schedule, checkpoint=args.checkpoints / f"{name}.pt")
        model, seconds = state.averaged, seconds + state.seconds
    return model.to(torch.bfloat16).to(torch.float32), seconds


def train_flow(
    args: argparse.Namespace,
    model: nn.Module,
    loss: FlowLoss,
    vae: nn.Module,
    vae_seconds: float,
    build_pipeline: Callable[[Any, Any], diffusers.DiffusionPipeline],
) -> None:
    """Train the denoiser. Regularly write the averaged weights as a bfloat16 pipeline, with a record of their
    training.
    """

    def write(state: State) -> None:
        parts = copy.deepcopy(state.averaged).eval(), copy.deepcopy(vae)
        build_pipeline(*(part.to("cpu", torch.bfloat16) for part in parts)).save_pretrained(args.output)
        options = {name: value for name, value in vars(args).items() if not isinstance(value, Path)}
        children = dict(state.model.named_children())
        record = {
            "options": options,
            "parameters": {name: sum(x.numel() for x in part.parameters()) for name, part in children.items()},
            "step": state.step,
            "seconds": {"vae": round(vae_seconds), "flow": round(state.seconds)},
            "versions": {"torch": torch.__version__, "diffusers": diffusers.__version__},
        }
        (args.output / "training.json").write_text(json.dumps(record, indent=2) + "\n")

    schedule = Schedule(args.steps, args.learning_rate, boost=args.boost, decay=0.5)
    fit(model, loss, schedule, checkpoint=args.checkpoints / "flow.pt", export=write)
