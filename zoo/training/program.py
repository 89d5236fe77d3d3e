"""The command line of the training programs, and what they write."""

from __future__ import annotations

import argparse
import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import nn

from zoo.training.loop import Schedule, State, fit
from zoo.training.losses import FlowLoss


def build_parser(description: str | None, home: Path) -> argparse.ArgumentParser:
    """Return a parser of the options of all training programs. ``home`` holds the checkpoints and the
    pipeline folder.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-autocast", dest="autocast", action="store_false", help="float32 instead of bfloat16")
    parser.add_argument("--vae-only", action="store_true", help="end after the autoencoder")
    parser.add_argument("--stop-after", type=int, help="end at this step of the schedule; the same command continues")
    parser.add_argument("--checkpoints", type=Path, default=home / "checkpoints")
    parser.add_argument("--output", type=Path, default=home / "pipeline")
    return parser


def prepare(args: argparse.Namespace) -> None:
    """Set the number of threads, and silence warnings that do not matter here."""
    torch.set_num_threads(args.threads)
    # Under autocast RMSNorm sees bfloat16 input and float32 weight; it says so once and computes all the same.
    warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")


def record(args: argparse.Namespace, state: State, vae_seconds: float) -> dict[str, Any]:
    """Return how the weights were trained. ``seconds`` are wall-clock time, which other processes lengthen."""
    options = {
        name: value for name, value in vars(args).items() if not isinstance(value, Path) and name != "stop_after"
    }
    return {
        "options": options,
        "parameters": {name: count_parameters(part) for name, part in state.model.named_children()},
        "step": state.step,
        "seconds": {"vae": round(vae_seconds), "flow": round(state.seconds)},
        "versions": {"torch": torch.__version__, "diffusers": diffusers.__version__},
    }


def count_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def train_flow(
    args: argparse.Namespace,
    model: nn.Module,
    loss: FlowLoss,
    schedule: Schedule,
    vae: nn.Module,
    vae_seconds: float,
    build_pipeline: Callable[[nn.Module, nn.Module], diffusers.DiffusionPipeline],
) -> None:
    """Train the denoiser; now and then write the averaged weights as a bfloat16 pipeline folder."""

    def write(state: State) -> None:
        parts = copy.deepcopy(state.averaged).eval(), copy.deepcopy(vae)
        denoiser, decoder = (part.to("cpu", torch.bfloat16) for part in parts)
        build_pipeline(denoiser, decoder).save_pretrained(args.output)
        (args.output / "training.json").write_text(json.dumps(record(args, state, vae_seconds), indent=2) + "\n")

    checkpoint = args.checkpoints / "flow.pt"
    fit(model, loss, schedule, checkpoint=checkpoint, name="flow", stop_after=args.stop_after, export=write)
