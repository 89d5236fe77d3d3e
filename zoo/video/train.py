"""Train the tiny video pipeline:  python -m zoo.video.train

The autoencoder first, then the transformer and the text encoder together. Stop it at any time; the same command goes on
where the last checkpoint was written. The pipeline folder always holds the best so far.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan, WanPipeline

from zoo.training.loop import Schedule, fit
from zoo.training.losses import FlowLoss, VaeLoss
from zoo.training.program import build_parser, prepare, train_flow
from zoo.video.models import SHIFT, Denoiser, build_pipeline, build_tokenizer, build_vae
from zoo.video.stages import Captions, build_pool, draw_crowded_images, draw_mixed_batch, measure_latents

HERE = Path(__file__).parent


def train_vae(args: argparse.Namespace) -> tuple[AutoencoderKLWan, float]:
    """Return the averaged autoencoder, with the statistics of its latents in its config, and the seconds of training.

    Images first, as Wan's was trained (arXiv:2503.20314, section 4.1): a step on eight of them takes half as long as
    one on two videos.
    """
    torch.manual_seed(args.seed)
    model = build_vae().to(args.device)
    schedule = Schedule(args.vae_image_steps, args.vae_learning_rate, average=0.99)
    loss = VaeLoss(args.seed, 4 * args.vae_batch, draw_crowded_images)
    images = fit(model, loss, schedule, checkpoint=args.checkpoints / "vae_images.pt", name="vae, images")
    schedule = Schedule(args.vae_steps, args.vae_learning_rate, average=0.99)
    loss = VaeLoss(args.seed, args.vae_batch, draw_mixed_batch)
    trained = fit(
        images.averaged.requires_grad_(True), loss, schedule, checkpoint=args.checkpoints / "vae.pt", name="vae"
    )
    # The published weights are bfloat16; the transformer learns the latents that those give.
    vae = trained.averaged.to(torch.bfloat16).to(torch.float32).eval()
    measure_latents(vae, args.seed)
    return vae, images.seconds + trained.seconds


def flow(args: argparse.Namespace, vae: AutoencoderKLWan, vae_seconds: float) -> None:
    """Train the transformer and the text encoder."""
    tokenizer = build_tokenizer()

    def pipeline(denoiser: Denoiser, vae: AutoencoderKLWan) -> WanPipeline:
        return build_pipeline(denoiser, vae, tokenizer)

    torch.manual_seed(args.seed + 1)
    model = Denoiser(tokenizer).to(args.device)
    pool = build_pool(vae, args.seed, args.scenes)
    loss = FlowLoss(pool, Captions(tokenizer), args.seed, args.batch, SHIFT, args.autocast)
    schedule = Schedule(args.steps, args.learning_rate, boost=args.boost, decay=0.5)
    train_flow(args, model, loss, schedule, vae, vae_seconds, pipeline)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the command line; the defaults are the recipe of the published weights."""
    parser = build_parser(__doc__, HERE)
    parser.add_argument("--vae-image-steps", type=int, default=3000, help="of the autoencoder on images")
    parser.add_argument("--vae-steps", type=int, default=2500, help="of the autoencoder on videos, after that")
    parser.add_argument("--vae-batch", type=int, default=2)
    parser.add_argument("--vae-learning-rate", type=float, default=2e-3)
    parser.add_argument("--scenes", type=int, default=4096, help="drawn once, shown again and again")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--boost", type=float, default=4.0, help="of the learning rate inside the blocks")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Run both stages."""
    args = parse(arguments)
    prepare(args)
    vae, seconds = train_vae(args)
    if not args.vae_only:
        flow(args, vae, seconds)


if __name__ == "__main__":
    main()
