"""Train the tiny FLUX:  python -m zoo.flux.train

The autoencoder first (its decoder a little longer), then the T5 encoder on captions alone, then the transformer and the
CLIP encoder together; T5 stays what it was, as in FLUX. Stop it at any time; the same command goes on where the last
checkpoint was written. The pipeline folder always holds the best so far.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch
from diffusers import AutoencoderKL, FluxPipeline
from transformers import T5EncoderModel

from zoo.flux.alignment import AlignedDenoiser, alignment_loss
from zoo.flux.grammar import Scene
from zoo.flux.models import SHIFT, Denoiser, Tokenizers, build_pipeline, build_tokenizers, build_vae
from zoo.flux.stages import Captions, DecoderLoss, build_pool, draw_thinned_batch, encode, measure_latents
from zoo.flux.text import Reader, TextLoss
from zoo.training.loop import Schedule, fit
from zoo.training.losses import FlowLoss, VaeLoss
from zoo.training.program import build_parser, prepare, train_flow

HERE = Path(__file__).parent
VAE_THING_WEIGHT = 4.0  # of the autoencoder's error where a thing is
THINGS = (0.2, 0.65, 0.15)  # of the scenes have one, two, three things


def train_vae(args: argparse.Namespace) -> tuple[AutoencoderKL, float]:
    """Return the averaged autoencoder, with the statistics of its latents in its config, and the seconds of
    training.
    """
    torch.manual_seed(args.seed)
    model = build_vae().to(args.device, memory_format=torch.channels_last)
    seconds = 0.0
    for name, steps, grey in (("vae", args.vae_steps, 0.1), ("vae_grey", args.vae_grey_steps, 0.5)):
        draw = partial(draw_thinned_batch, grey=grey)
        loss = VaeLoss(args.seed + 7, args.vae_batch, draw, VAE_THING_WEIGHT)
        schedule = Schedule(steps, args.vae_learning_rate, average=0.98)
        state = fit(model.requires_grad_(True), loss, schedule, checkpoint=args.checkpoints / f"{name}.pt", name=name)
        model, seconds = state.averaged, seconds + state.seconds
    # The published weights are bfloat16; the transformer learns the latents that those give.
    model = model.to(torch.bfloat16).to(torch.float32)
    measure_latents(model, args.seed)
    return model, seconds


def train_decoder(args: argparse.Namespace, model: AutoencoderKL) -> tuple[AutoencoderKL, float]:
    """Train the decoder alone, which changes no latent. Return the autoencoder and the seconds."""
    model.requires_grad_(False).decoder.requires_grad_(True)
    schedule = Schedule(args.decoder_steps, args.decoder_learning_rate, decay=0.6, average=0.99)
    checkpoint = args.checkpoints / "decoder.pt"
    alone = fit(model, DecoderLoss(args.seed, args.vae_batch), schedule, checkpoint=checkpoint, name="decoder")
    return alone.averaged.eval(), alone.seconds


def train_text(args: argparse.Namespace, tokenizers: Tokenizers) -> T5EncoderModel:
    """Return the averaged T5 encoder after training on captions alone."""
    torch.manual_seed(args.seed + 2)
    model = Reader(Denoiser(tokenizers).text_encoder_2).to(args.device)
    schedule = Schedule(args.text_steps, args.text_learning_rate, decay=0.5, average=0.99)
    loss = TextLoss(tokenizers.t5, args.seed, args.text_batch)
    return fit(model, loss, schedule, checkpoint=args.checkpoints / "text.pt", name="text").averaged.encoder


def flow(args: argparse.Namespace, vae: AutoencoderKL, vae_seconds: float) -> None:
    """Train the transformer and the CLIP encoder.

    T5 is left alone: the flow's loss took all that it knew about which words belong to which thing, the cell down to
    chance.
    """
    tokenizers = build_tokenizers()

    def pipeline(denoiser: Denoiser, vae: AutoencoderKL) -> FluxPipeline:
        return build_pipeline(denoiser, vae.to(memory_format=torch.contiguous_format), tokenizers)

    torch.manual_seed(args.seed + 1)
    model = AlignedDenoiser(tokenizers).to(args.device)
    model.text_encoder_2.load_state_dict(train_text(args, tokenizers).state_dict())
    model.text_encoder_2.requires_grad_(False)
    pool = build_pool(partial(encode, vae), args.seed, args.scenes, THINGS, args.cell_weight)

    def also(model: AlignedDenoiser, scenes: list[Scene]) -> torch.Tensor:
        return args.alignment_weight * alignment_loss(model, scenes)

    loss = FlowLoss(pool, Captions(tokenizers), args.seed, args.batch, SHIFT, args.autocast, also)
    schedule = Schedule(args.steps, args.learning_rate, boost=args.boost, decay=0.5)
    train_flow(args, model, loss, schedule, vae, vae_seconds, pipeline)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the command line; the defaults are the recipe of the published weights."""
    parser = build_parser(__doc__, HERE)
    parser.add_argument(
        "--vae", type=Path, help="folder of an autoencoder: instead of training one, its decoder goes on"
    )
    parser.add_argument("--vae-steps", type=int, default=2500)
    parser.add_argument("--vae-grey-steps", type=int, default=1500, help="after that, half of them on grey")
    parser.add_argument("--vae-batch", type=int, default=4)
    parser.add_argument("--vae-learning-rate", type=float, default=2e-3)
    parser.add_argument("--decoder-steps", type=int, default=1500, help="of the decoder alone, after that; 0: none")
    parser.add_argument("--decoder-learning-rate", type=float, default=1e-3)
    parser.add_argument("--text-steps", type=int, default=1000, help="of the T5 encoder on captions alone")
    parser.add_argument("--text-batch", type=int, default=64)
    parser.add_argument("--text-learning-rate", type=float, default=1e-3)
    parser.add_argument("--scenes", type=int, default=16384, help="drawn once, shown again and again")
    parser.add_argument("--steps", type=int, default=15000)
    parser.add_argument(
        "--alignment-weight", type=float, default=0.3, help="of the loss that asks tokens for their thing"
    )
    parser.add_argument("--cell-weight", type=float, default=12.0, help="of the loss in cells that hold a thing")
    parser.add_argument("--batch", type=int, default=8)
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
