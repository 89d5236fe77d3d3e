"""Train the tiny FLUX:  python -m benchmarks.tiny_flux.train

The autoencoder first (its decoder a little longer), then the transformer and both text encoders together. Stop it at any
time; the same command goes on where the last checkpoint was written. The pipeline folder always holds the best so far.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch
from diffusers import AutoencoderKL, FluxPipeline

from benchmarks.tiny_flux.models import SHIFT, Denoiser, build_pipeline, build_tokenizers, build_vae
from benchmarks.tiny_flux.stages import Captions, DecoderLoss, build_pool, draw_crowded_batch, encode, measure_latents
from benchmarks.tiny_training.loop import Schedule, fit
from benchmarks.tiny_training.losses import FlowLoss, VaeLoss
from benchmarks.tiny_training.program import build_parser, prepare, train_flow

HERE = Path(__file__).parent
ONE_THING, MORE_THINGS = (1.0, 0.0, 0.0), (0.4, 0.45, 0.15)  # of the scenes have one, two, three things


def train_vae(args: argparse.Namespace) -> tuple[AutoencoderKL, float]:
    """The averaged autoencoder, with the statistics of its latents in its config; and the seconds it took."""
    torch.manual_seed(args.seed)
    model = build_vae().to(args.device, memory_format=torch.channels_last)
    schedule = Schedule(args.vae_steps, args.vae_learning_rate, average=0.99)
    loss = VaeLoss(args.seed, args.vae_batch, draw_crowded_batch)
    both = fit(model, loss, schedule, checkpoint=args.checkpoints / "vae.pt", name="vae")
    # The published weights are bfloat16; the transformer learns the latents that those give.
    model = both.averaged.to(torch.bfloat16).to(torch.float32)
    measure_latents(model, args.seed)
    return model, both.seconds


def train_decoder(args: argparse.Namespace, model: AutoencoderKL) -> tuple[AutoencoderKL, float]:
    """The autoencoder after its decoder went on alone, which changes no latent; and the seconds it took."""
    model.requires_grad_(False).decoder.requires_grad_(True)
    schedule = Schedule(args.decoder_steps, args.decoder_learning_rate, decay=0.6, average=0.99)
    checkpoint = args.checkpoints / "decoder.pt"
    alone = fit(model, DecoderLoss(args.seed, args.vae_batch), schedule, checkpoint=checkpoint, name="decoder")
    return alone.averaged.eval(), alone.seconds


def flow(args: argparse.Namespace, vae: AutoencoderKL, vae_seconds: float) -> None:
    """Train the transformer and the text encoders."""
    tokenizers = build_tokenizers()

    def pipeline(denoiser: Denoiser, vae: AutoencoderKL) -> FluxPipeline:
        return build_pipeline(denoiser, vae.to(memory_format=torch.contiguous_format), tokenizers)

    torch.manual_seed(args.seed + 1)
    model = Denoiser(tokenizers).to(args.device)
    pools = {
        0: build_pool(partial(encode, vae), args.seed, args.scenes, ONE_THING, args.cell_weight),
        args.more_things_from: build_pool(partial(encode, vae), args.seed, args.scenes, MORE_THINGS, args.cell_weight),
    }
    loss = FlowLoss(pools, Captions(tokenizers), args.seed, args.batch, SHIFT, args.autocast)
    schedule = Schedule(args.steps, args.learning_rate, boost=args.boost, decay=0.5)
    train_flow(args, model, loss, schedule, vae, vae_seconds, pipeline)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; the defaults are the recipe of the published weights."""
    parser = build_parser(__doc__, HERE)
    parser.add_argument(
        "--vae", type=Path, help="folder of an autoencoder: instead of training one, its decoder goes on"
    )
    parser.add_argument("--vae-steps", type=int, default=2000)
    parser.add_argument("--vae-batch", type=int, default=4)
    parser.add_argument("--vae-learning-rate", type=float, default=2e-3)
    parser.add_argument("--decoder-steps", type=int, default=1500, help="of the decoder alone, after that; 0: none")
    parser.add_argument("--decoder-learning-rate", type=float, default=1e-3)
    parser.add_argument("--scenes", type=int, default=8192, help="drawn once, shown again and again")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--more-things-from", type=int, default=2500, help="step; before it, scenes have one thing")
    parser.add_argument("--cell-weight", type=float, default=12.0, help="of the loss in cells that hold a thing")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--boost", type=float, default=4.0, help="of the learning rate inside the blocks")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Run both stages."""
    args = parse(arguments)
    prepare(args)
    if args.vae is None:
        vae, seconds = train_vae(args)
    else:
        vae, seconds = AutoencoderKL.from_pretrained(args.vae).to(args.device, memory_format=torch.channels_last), 0.0
    if args.decoder_steps:
        vae, more = train_decoder(args, vae)
        seconds += more
    if not args.vae_only:
        flow(args, vae, seconds)


if __name__ == "__main__":
    main()
