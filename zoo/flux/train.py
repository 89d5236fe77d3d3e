"""Train the tiny FLUX:  python -m zoo.flux.train

The autoencoder first (its decoder a little longer), then the T5 encoder on captions alone, then the transformer and the
CLIP encoder together; T5 stays what it was, as in FLUX. Stop it at any time; the same command goes on where the last
checkpoint was written. The pipeline folder always holds the best so far.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, FluxPipeline
from torch import nn
from transformers import T5EncoderModel, T5TokenizerFast

from zoo import training
from zoo.flux import models
from zoo.flux import scenes as grammar
from zoo.flux.models import T5_WIDTH, FluxDenoiser, Tokenizers
from zoo.flux.scenes import CELL_CENTRES, SIDE, ImageScene, draw, to_tensor
from zoo.training import FlowLoss, Pool, Schedule, VaeLoss, fit, step_seed, torch_generator, vary

# The published weights were trained with these numbers; each is an option of the command.
RECIPE = {
    "vae_steps": 2500,
    "vae_grey_steps": 1500,  # after that, half of the images on grey
    "vae_batch": 4,
    "vae_learning_rate": 2e-3,
    "decoder_steps": 1500,  # of the decoder alone, after that
    "decoder_learning_rate": 1e-3,
    "text_steps": 1000,  # of the T5 encoder on captions alone
    "text_batch": 64,
    "text_learning_rate": 1e-3,
    "scenes": 16384,  # drawn once, shown again and again
    "steps": 15000,
    "alignment_weight": 0.3,  # of the loss that asks tokens for their thing
    "cell_weight": 12.0,  # of the loss in cells that hold a thing
    "batch": 8,
    "learning_rate": 1e-3,
    "boost": 4.0,  # of the learning rate inside the blocks
}
VAE_THING_WEIGHT = 4.0  # of the autoencoder's error where a thing is
DECODER_NOISE = 0.4  # standard deviations of the latents, at most: about how far off the denoiser may be at a thing
DECODER_CELL_WEIGHT = 8.0  # of the decoder's error in cells that hold a thing
# How many of the scenes have one, two, three things: those of the denoiser, those that the latents are measured on,
# those that the decoder sees, and those of the captions that T5 reads.
THINGS = (0.2, 0.65, 0.15)
MEASURED_THINGS = (0.7, 0.2, 0.1)
DECODER_THINGS = (0.6, 0.25, 0.15)
TEXT_THINGS = (0.2, 0.5, 0.3)
# CLIP sees an empty caption in half of the images: its pooled embedding reaches every layer by the shortest way, but
# cannot say which thing is where; so that T5's words are learned too, they have to carry everything half of the time.
NO_POOLED_CAPTION = 0.5
# Padding is not masked in FLUX, so each length is something to learn: mostly the recommended one and half of it.
TEXT_LENGTHS = {32: 0.45, 64: 0.5, 128: 0.05}
T5_LENGTHS = (32, 32, 32, 64)  # tokens of the captions that T5 reads alone, by turns
TOKEN = 16  # pixels, the side of the square that one token stands for
CELL_REACH = 22  # pixels from the centre of a cell: its thing is inside, whatever its jitter
_VALUES = {"colour": grammar.COLOURS, "shape": grammar.SHAPES, "size": grammar.SIZES, "cell": grammar.CELLS}
ATTRIBUTES = {name: list(values) for name, values in _VALUES.items()}
NAMING = ("colour", "shape")  # each caption has exactly one word of each for a thing, and in the order of the things


# -- images and captions drawn from seeds


def draw_crowded_batch(seed: np.random.SeedSequence, batch: int) -> torch.Tensor:
    """Return images full of things, ``[batch, 3, 128, 128]`` in −1 … 1.

    Training scenes are nine tenths background; an autoencoder trained on those alone had drawn all things grey after
    1,400 steps.
    """
    rngs = [np.random.default_rng(child) for child in seed.spawn(batch)]
    return to_tensor([draw(grammar.crowded_scene(rng), rng) for rng in rngs])


def draw_batch(
    seed: np.random.SeedSequence, batch: int, weights: Sequence[float] = MEASURED_THINGS
) -> tuple[torch.Tensor, list[ImageScene]]:
    """Return images of training scenes, ``[batch, 3, 128, 128]`` in −1 … 1, and the scenes.

    ``weights`` are the probabilities of one, two, three things.
    """
    return training.draw_scenes(lambda rng: grammar.training_scene(rng, weights), draw, seed, batch)


def draw_thinned_batch(seed: np.random.SeedSequence, batch: int, grey: float) -> torch.Tensor:
    """Return images with one thing up to a thing in every cell, ``[batch, 3, 128, 128]`` in −1 … 1.

    A lone thing on grey is the hardest: all else is zero there, so normalized over the whole image a thing is many
    times as large as on white. An autoencoder that had seen full images alone told red from blue there, and no more,
    and did not learn it later from scenes: with all numbers of things in between it does. ``grey`` is the part of the
    images that is grey besides those that are by chance.
    """
    images = []
    for child in seed.spawn(batch):
        rng = np.random.default_rng(child)
        scene = grammar.crowded_scene(rng)
        count = int(rng.integers(1, len(scene.things) + 1))
        kept = tuple(scene.things[i] for i in rng.permutation(len(scene.things))[:count])
        background = "grey" if rng.random() < grey else scene.background
        images.append(draw(replace(scene, things=kept, background=background), rng))
    return to_tensor(images)


@dataclass(frozen=True)
class FluxCaptions:
    """The conditions of the denoiser: ids of captions for both encoders, padded to one length as FluxPipeline pads."""

    tokenizers: Tokenizers

    def __call__(self, scenes: list[ImageScene], rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Return CLIP ids ``[B, 77]`` and T5 ids ``[B, S_text]``."""
        clip, t5 = self.tokenizers.clip, self.tokenizers.t5
        captions = vary([grammar.caption(scene, rng) for scene in scenes], rng)
        longest = max(len(ids) for ids in t5(captions).input_ids)
        length = max(longest, int(rng.choice(list(TEXT_LENGTHS), p=list(TEXT_LENGTHS.values()))))
        length = min(padded for padded in TEXT_LENGTHS if padded >= length)
        pooled = ["" if rng.random() < NO_POOLED_CAPTION else text for text in captions]
        options = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
        clip_ids = clip(pooled, max_length=clip.model_max_length, **options).input_ids
        return clip_ids, t5(captions, max_length=length, **options).input_ids


# -- latents and the weights of tokens


@torch.no_grad()
def measure_latents(vae: AutoencoderKL, seed: int, *, batches: int = 16, batch: int = 16) -> None:
    """Write the mean and 1 / standard deviation of the latents of training images into the VAE's config."""
    images = [draw_batch(step_seed(seed, training.STATISTICS, i), batch)[0] for i in range(batches)]
    latents = torch.cat([vae.encode(part.to(vae.device)).latent_dist.mean for part in images])
    vae.register_to_config(shift_factor=latents.mean().item(), scaling_factor=1 / latents.std().item())


@torch.no_grad()
def encode(vae: AutoencoderKL, images: torch.Tensor) -> torch.Tensor:
    """Encode ``[B, 3, height, width]`` in −1 … 1 to packed latents, unit normal, ``[B, S, 4 C]``."""
    latents = vae.encode(images.to(vae.device)).latent_dist.mean
    latents = (latents - vae.config.shift_factor) * vae.config.scaling_factor
    packed: torch.Tensor = FluxPipeline._pack_latents(latents, *latents.shape)
    return packed


def tokens_of_cell(cell: str, reach: int) -> torch.Tensor:
    """Return a mask ``[rows, columns]`` of the tokens with a middle less than ``reach`` pixels from the cell's."""
    tokens = torch.arange(TOKEN // 2, SIDE, TOKEN)
    near = [(tokens - centre).abs() < reach for centre in CELL_CENTRES]
    row, column = divmod(list(grammar.CELLS).index(cell), 3)
    return near[row][:, None] & near[column]


def cell_weights(scene: ImageScene, weight: float) -> torch.Tensor:
    """Return ``[S, 1]``: ``weight`` for the tokens that a thing may touch, 1 for others, then scaled to a mean of 1.

    A weight that follows the caption alone leaves the best answer what it is; where the caption leaves the cell out, it
    pulls a little towards things.
    """
    weights = torch.ones(SIDE // TOKEN, SIDE // TOKEN)
    for thing in scene.things:
        weights[tokens_of_cell(thing.cell, CELL_REACH + TOKEN // 2)] = weight
    return (weights / weights.mean()).reshape(-1, 1)


def build_pool(
    encode: Callable[[torch.Tensor], torch.Tensor], seed: int, count: int, things: Sequence[float], weight: float
) -> Pool:
    """Draw and encode ``count`` training scenes. ``weight`` is the weight of cells that hold a thing."""
    weigh = partial(cell_weights, weight=weight)
    return training.build_pool(partial(draw_batch, weights=things), encode, weigh, seed, count, 64)


@dataclass(frozen=True)
class DecoderLoss:
    """Error of the images decoded from fixed latents with some noise: mostly of training scenes, and there of things.

    A small thing on plain grey is what the encoder knows least: normalized over the whole image, its latents are two to
    three times as large as on white.
    """

    seed: int
    batch: int

    def __call__(self, model: nn.Module, step: int) -> torch.Tensor:
        seed = step_seed(self.seed, training.DECODER_STAGE, step)
        generator = torch_generator(seed)
        crowded, tokens = self.batch // 4, SIDE // TOKEN
        images, scenes = draw_batch(seed, self.batch - crowded, DECODER_THINGS)
        weights = [cell_weights(scene, DECODER_CELL_WEIGHT).reshape(1, tokens, tokens) for scene in scenes]
        weights += [torch.ones(1, tokens, tokens)] * crowded
        if crowded:
            images = torch.cat([images, draw_crowded_batch(seed, crowded)])
        images = images.to(model.device)
        with torch.no_grad():
            latents = model.encode(images).latent_dist.mean
        levels = DECODER_NOISE * torch.rand(self.batch, 1, 1, 1, generator=generator)
        noise = (levels * torch.randn(latents.shape, generator=generator)).to(model.device)
        error = model.decode(latents + noise / model.config.scaling_factor).sample - images
        by_pixel = F.interpolate(torch.stack(weights), scale_factor=TOKEN).to(model.device)
        return ((error.abs() + error.square()) * by_pixel).mean()


# -- the T5 encoder on captions alone: it learns which words are about the same thing. FLUX takes its text encoders as
# they come, trained on language long before. Left to the denoiser's loss, 5,000 steps did not teach which attribute
# belongs to which of two things.


class Reader(nn.Module):
    """The encoder, and one linear layer for each attribute; the layers are dropped afterwards."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.heads = nn.ModuleDict({name: nn.Linear(T5_WIDTH, len(values)) for name, values in ATTRIBUTES.items()})

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return embeddings ``[B, S, C]`` of T5 ids ``[B, S]``."""
        embeddings: torch.Tensor = self.encoder(ids)[0]
        return embeddings


def naming_tokens(tokenizer: T5TokenizerFast, ids: torch.Tensor) -> list[tuple[int, int, int]]:
    """Return (caption, thing, position) of each colour word and each shape word in captions of ids ``[B, S]``."""
    tokens = []
    for name in NAMING:
        words = [f"▁{form}" for word in ATTRIBUTES[name] for form in (word, word.capitalize())]
        word_ids = torch.tensor(tokenizer.convert_tokens_to_ids(words), device=ids.device)
        for caption, hits in enumerate(torch.isin(ids, word_ids)):
            positions = hits.nonzero().flatten().tolist()  # none in an empty caption
            tokens += [(caption, thing, position) for thing, position in enumerate(positions)]
    return tokens


@dataclass(frozen=True)
class TextLoss:
    """The summed cross-entropy of each thing's attributes, told from the embeddings of its colour and shape words."""

    tokenizer: T5TokenizerFast
    seed: int
    batch: int

    def __call__(self, model: nn.Module, step: int) -> torch.Tensor:
        rng = np.random.default_rng(step_seed(self.seed, training.TEXT_STAGE, step))
        device = next(model.parameters()).device
        scenes = [grammar.training_scene(rng, TEXT_THINGS) for _ in range(self.batch)]
        captions = vary([grammar.caption(scene, rng) for scene in scenes], rng)
        length = T5_LENGTHS[step % len(T5_LENGTHS)]
        ids = self.tokenizer(captions, padding="max_length", max_length=length, return_tensors="pt").input_ids
        places = naming_tokens(self.tokenizer, ids)
        rows, _, columns = zip(*places, strict=True)
        told = model(ids.to(device))[list(rows), list(columns)]
        things = [scenes[row].things[thing] for row, thing, _ in places]
        truths = {name: [v.index(getattr(thing, name)) for thing in things] for name, v in ATTRIBUTES.items()}
        losses = [F.cross_entropy(model.heads[k](told), torch.tensor(v, device=device)) for k, v in truths.items()]
        return torch.stack(losses).sum()


# -- a second loss, so that image tokens learn early which thing of the caption is theirs. Linear layers on an inner
# block's image tokens are asked for the colour and the shape that stand where the token is, in the manner of REPA
# (arXiv:2410.06940), which asks for the features of another network. With it, after 200 steps, tokens of noise know
# their thing in 97 % of held-out scenes of two things; without it in 14 % after 800.


class AlignedDenoiser(FluxDenoiser):
    """The denoiser with linear layers on the image tokens of the first single block, dropped afterwards."""

    def __init__(self, tokenizers: Tokenizers) -> None:
        super().__init__(tokenizers)
        # Class 0: no thing is there.
        self.heads = nn.ModuleDict(
            {name: nn.Linear(models.HEADS * models.HEAD_DIM, 1 + len(ATTRIBUTES[name])) for name in NAMING}
        )
        self.answers: dict[str, torch.Tensor] = {}  # of the last call, by attribute, ``[B, S, classes]``
        self.transformer.single_transformer_blocks[0].register_forward_hook(self._ask)

    def _ask(self, block: nn.Module, arguments: object, outputs: tuple[torch.Tensor, torch.Tensor]) -> None:
        image = F.layer_norm(outputs[1].float(), outputs[1].shape[-1:])
        self.answers = {name: head(image) for name, head in self.heads.items()}


def things_by_token(scene: ImageScene) -> dict[str, torch.Tensor]:
    """Return by attribute the class of each token, ``[S]``: 0 without a thing, else 1 + its index in `ATTRIBUTES`."""
    side = SIDE // TOKEN
    classes = {name: torch.zeros(side, side, dtype=torch.long) for name in NAMING}
    for thing in scene.things:
        here = tokens_of_cell(thing.cell, CELL_REACH)  # a token that two cells share is nobody's
        for name in NAMING:
            classes[name][here] = 1 + ATTRIBUTES[name].index(getattr(thing, name))
    return {name: grid.flatten() for name, grid in classes.items()}


def alignment_loss(model: AlignedDenoiser, scenes: list[ImageScene]) -> torch.Tensor:
    """Return the cross-entropy of the last call's answers. Tokens with and without a thing weigh the same."""
    truths = [things_by_token(scene) for scene in scenes]
    total = torch.zeros((), device=next(model.parameters()).device)
    for name, answer in model.answers.items():
        truth = torch.stack([classes[name] for classes in truths]).to(answer.device)
        error = F.cross_entropy(answer.transpose(1, 2), truth, reduction="none")
        total = total + error[truth > 0].mean() + error[truth == 0].mean()
    return total


# -- the stages


def train_vae(args: argparse.Namespace) -> tuple[AutoencoderKL, float]:
    """Return the averaged autoencoder, with the statistics of its latents in its config, and the seconds spent."""
    torch.manual_seed(args.seed)
    model = models.build_vae().to(args.device, memory_format=torch.channels_last)
    rarely, often = (partial(draw_thinned_batch, grey=grey) for grey in (0.1, 0.5))
    loss = partial(VaeLoss, args.seed + 7, args.vae_batch, thing_weight=VAE_THING_WEIGHT)
    stages = {"vae": (args.vae_steps, loss(rarely)), "vae_grey": (args.vae_grey_steps, loss(often))}
    model, seconds = training.train_vae(args, model, stages, average=0.98)
    measure_latents(model, args.seed)
    # Then the decoder alone, which changes no latent.
    model.requires_grad_(False).decoder.requires_grad_(True)
    schedule = Schedule(args.decoder_steps, args.decoder_learning_rate, decay=0.6, average=0.99)
    loss = DecoderLoss(args.seed, args.vae_batch)
    alone = fit(model, loss, schedule, checkpoint=args.checkpoints / "decoder.pt")
    return alone.averaged.eval(), seconds + alone.seconds


def train_text(args: argparse.Namespace, tokenizers: Tokenizers) -> T5EncoderModel:
    """Return the averaged T5 encoder after training on captions alone."""
    torch.manual_seed(args.seed + 2)
    model = Reader(FluxDenoiser(tokenizers).text_encoder_2).to(args.device)
    schedule = Schedule(args.text_steps, args.text_learning_rate, decay=0.5, average=0.99)
    loss = TextLoss(tokenizers.t5, args.seed, args.text_batch)
    return fit(model, loss, schedule, checkpoint=args.checkpoints / "text.pt").averaged.encoder


def main(arguments: list[str] | None = None) -> None:
    """Run all stages.

    T5 is left alone in the last one: the flow's loss took all that it knew about which words belong to which thing, the
    cell down to chance.
    """
    args = training.parse(__doc__, Path(__file__).parent, arguments, **RECIPE)
    vae, seconds = train_vae(args)
    tokenizers = models.build_tokenizers()
    torch.manual_seed(args.seed + 1)
    model = AlignedDenoiser(tokenizers).to(args.device)
    model.text_encoder_2.load_state_dict(train_text(args, tokenizers).state_dict())
    model.text_encoder_2.requires_grad_(False)
    pool = build_pool(partial(encode, vae), args.seed, args.scenes, THINGS, args.cell_weight)

    def also(model: AlignedDenoiser, scenes: list[ImageScene]) -> torch.Tensor:
        return args.alignment_weight * alignment_loss(model, scenes)

    def pipeline(denoiser: FluxDenoiser, vae: AutoencoderKL) -> FluxPipeline:
        return models.build_pipeline(denoiser, vae.to(memory_format=torch.contiguous_format), tokenizers)

    loss = FlowLoss(pool, FluxCaptions(tokenizers), args.seed, args.batch, models.SHIFT, also=also)
    training.train_flow(args, model, loss, vae, seconds, pipeline)


if __name__ == "__main__":
    main()
