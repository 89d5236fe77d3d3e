"""Train the tiny FLUX:  python -m benchmarks.tiny_flux.train

The autoencoder first (its decoder a little longer), then the transformer and both text encoders together. Stop it at any time; the same command goes on
where the last checkpoint was written. The pipeline folder always holds the best so far.
"""

from __future__ import annotations

import argparse
import copy
import json
import warnings
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import AutoencoderKL
from torch import nn

from benchmarks.tiny_flux.loop import Schedule, State, fit
from benchmarks.tiny_flux.models import Denoiser, Tokenizers, build_pipeline, build_tokenizers, build_vae
from benchmarks.tiny_flux.stages import DecoderLoss, FlowLoss, VaeLoss, measure_latents

HERE = Path(__file__).parent


def train_vae(args: argparse.Namespace) -> tuple[AutoencoderKL, float]:
    """The averaged autoencoder, with the statistics of its latents in its config; and the seconds it took.

    Once both halves are trained together, the encoder is done; the decoder goes on alone, which changes no latent.
    """
    torch.manual_seed(args.seed)
    model = build_vae().to(args.device, memory_format=torch.channels_last)
    schedule = Schedule(args.vae_steps, args.vae_learning_rate, average=0.99)
    checkpoint = args.checkpoints / "vae.pt"
    both = fit(model, VaeLoss(args.seed, args.vae_batch), schedule, checkpoint=checkpoint, name="vae")
    # The published weights are bfloat16; the transformer learns the latents that those give.
    model = both.averaged.to(torch.bfloat16).to(torch.float32)
    measure_latents(model, args.seed)
    model.decoder.requires_grad_(True)
    schedule = Schedule(args.decoder_steps, args.decoder_learning_rate, decay=0.6, average=0.99)
    checkpoint = args.checkpoints / "decoder.pt"
    alone = fit(model, DecoderLoss(args.seed, args.vae_batch), schedule, checkpoint=checkpoint, name="decoder")
    return alone.averaged.eval(), both.seconds + alone.seconds


def record(args: argparse.Namespace, state: State, vae_seconds: float) -> dict[str, Any]:
    """How the weights came about; ``seconds`` are wall-clock, others' load on the machine included."""
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
    """The number of weights."""
    return sum(parameter.numel() for parameter in module.parameters())


def export(state: State, vae: AutoencoderKL, tokenizers: Tokenizers, folder: Path) -> None:
    """Write the averaged weights as a bfloat16 pipeline folder."""
    parts = copy.deepcopy(state.averaged).eval(), copy.deepcopy(vae)
    denoiser, vae = (part.to("cpu", torch.bfloat16) for part in parts)
    pipe = build_pipeline(denoiser, vae.to(memory_format=torch.contiguous_format), tokenizers)
    pipe.save_pretrained(folder)


def train_flow(args: argparse.Namespace, vae: AutoencoderKL, vae_seconds: float) -> None:
    """Train the transformer and the text encoders, exporting as they get better."""

    def write(state: State) -> None:
        export(state, vae, tokenizers, args.output)
        (args.output / "training.json").write_text(json.dumps(record(args, state, vae_seconds), indent=2) + "\n")

    tokenizers = build_tokenizers()
    torch.manual_seed(args.seed + 1)
    model = Denoiser(tokenizers).to(args.device)
    fit(
        model,
        FlowLoss(vae, tokenizers, args.seed, args.batch, args.autocast),
        Schedule(args.steps, args.learning_rate, boost=args.boost, decay=0.6),
        checkpoint=args.checkpoints / "flow.pt",
        name="flow",
        stop_after=args.stop_after,
        export=write,
    )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; the defaults are the recipe of the published weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vae-steps", type=int, default=2000)
    parser.add_argument("--vae-batch", type=int, default=4)
    parser.add_argument("--vae-learning-rate", type=float, default=2e-3)
    parser.add_argument("--decoder-steps", type=int, default=800, help="of the decoder alone, after that")
    parser.add_argument("--decoder-learning-rate", type=float, default=5e-4)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--boost", type=float, default=4.0, help="of the learning rate inside the blocks")
    parser.add_argument("--no-autocast", dest="autocast", action="store_false", help="float32 instead of bfloat16")
    parser.add_argument("--vae-only", action="store_true", help="end after the autoencoder")
    parser.add_argument("--stop-after", type=int, help="end at this step of the schedule; the same command continues")
    parser.add_argument("--checkpoints", type=Path, default=HERE / "checkpoints")
    parser.add_argument("--output", type=Path, default=HERE / "pipeline")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Run both stages."""
    args = parse(arguments)
    torch.set_num_threads(args.threads)
    # Under autocast RMSNorm sees bfloat16 input and float32 weight; it says so once and computes all the same.
    warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
    vae, seconds = train_vae(args)
    if not args.vae_only:
        train_flow(args, vae, seconds)


if __name__ == "__main__":
    main()
