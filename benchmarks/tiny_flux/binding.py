"""Who knows which colour belongs to which thing, and since when:  python -m benchmarks.tiny_flux.binding

Each row trains the transformer briefly from the same first weights and the same T5 encoder, which has read captions. Then two
questions, on held-out scenes of two things, answered by linear layers that are fitted afterwards. T5: at a thing's colour word,
which cell is it in? The image's tokens, from pure noise: which colour and shape will be here? Writes
benchmarks/results/tiny_flux_binding.json, a row at a time.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL
from transformers import T5EncoderModel

from benchmarks.tiny_flux import grammar
from benchmarks.tiny_flux.alignment import AlignedDenoiser, alignment_loss, things_by_token
from benchmarks.tiny_flux.draw import SIDE
from benchmarks.tiny_flux.grammar import Scene
from benchmarks.tiny_flux.models import SHIFT, Tokenizers, build_tokenizers
from benchmarks.tiny_flux.stages import TOKEN, Captions, build_pool, encode, tokenize
from benchmarks.tiny_flux.text import Reader, TextLoss, naming_tokens
from benchmarks.tiny_flux.train import THINGS
from benchmarks.tiny_training.held_out import environment
from benchmarks.tiny_training.loop import Schedule, fit
from benchmarks.tiny_training.losses import FlowLoss, PlainAttention
from benchmarks.tiny_training.program import prepare

HERE = Path(__file__).parent
RESULT = HERE.parent / "results" / "tiny_flux_binding.json"
WORD = 6  # first word of the seeds here
SCENES = 4096
HELD_OUT = 100
TEXT_LENGTH = 64
STEPS = 800  # of a row
PROBE_STEPS = 100
# Whether T5 learns on, and the weight of the alignment loss.
ROWS = {
    "T5 learns on": (True, 0.0),
    "T5 stays": (False, 0.0),
    "T5 learns on, tokens are asked": (True, 0.3),
    "T5 stays, tokens are asked": (False, 0.3),
}


def read_captions(tokenizers: Tokenizers, seed: int, steps: int) -> T5EncoderModel:
    """The T5 encoder as `train` makes it."""
    torch.manual_seed(seed + 2)
    model = Reader(AlignedDenoiser(tokenizers).text_encoder_2)
    loss = TextLoss(tokenizers.t5, seed, 64)
    with tempfile.TemporaryDirectory() as folder:
        schedule = Schedule(steps, 1e-3, decay=0.5, average=0.99)
        return fit(model, loss, schedule, checkpoint=Path(folder) / "x.pt", name="text").averaged.encoder


def scenes_of_two(seed: int, count: int, *, held_out: bool) -> list[Scene]:
    """Scenes of two things, all of them held out or none."""
    rng = np.random.default_rng([WORD, seed])
    if held_out:
        return [grammar.held_out_scene(rng, 2) for _ in range(count)]
    return [grammar.training_scene(rng, (0.0, 1.0, 0.0)) for _ in range(count)]


def cells_known_to_t5(encoder: T5EncoderModel, tokenizers: Tokenizers, steps: int = PROBE_STEPS) -> float:
    """The share of things of which a linear layer on their colour's or shape's word reads the cell; by chance 1 / 9."""
    reader = Reader(encoder).requires_grad_(False)
    reader.heads.requires_grad_(True)
    loss, optimizer = TextLoss(tokenizers.t5, WORD, 64), torch.optim.Adam(reader.heads.parameters(), 1e-2)
    for step in range(steps):
        loss(reader, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    scenes = scenes_of_two(0, HELD_OUT, held_out=True)
    texts = [grammar.caption(scene) for scene in scenes]
    ids = tokenizers.t5(texts, padding="max_length", max_length=TEXT_LENGTH, return_tensors="pt").input_ids
    places = naming_tokens(tokenizers.t5, ids)
    with torch.no_grad():
        cells = reader.heads["cell"](reader(ids)).argmax(-1)
    right = [
        cells[row, column] == list(grammar.CELLS).index(scenes[row].things[thing].cell) for row, thing, column in places
    ]
    return torch.stack(right).float().mean().item()


def answers(model: AlignedDenoiser, tokenizers: Tokenizers, scenes: list[Scene], seed: int) -> dict[str, torch.Tensor]:
    """What the model's heads answer, by attribute ``[B, S, classes]``, where the image is noise and the caption is full."""
    captions = [grammar.caption(scene) for scene in scenes]
    ids = tokenize(tokenizers, captions, captions, TEXT_LENGTH)
    side, generator = SIDE // TOKEN, torch.Generator().manual_seed(seed)
    noise = torch.randn(len(scenes), side * side, model.transformer.config.in_channels, generator=generator)
    with torch.autocast("cpu", torch.bfloat16), PlainAttention():
        model(noise, torch.ones(len(scenes)), *ids)
    return model.answers


def things_known_to_tokens(model: AlignedDenoiser, tokenizers: Tokenizers) -> dict[str, float]:
    """For colour and shape, in what share of the tokens of a thing a linear layer reads that thing's, from pure noise."""
    model.requires_grad_(False)
    for head in model.heads.values():
        head.reset_parameters()
        head.requires_grad_(True)
    optimizer = torch.optim.Adam(model.heads.parameters(), 1e-2)
    for step in range(PROBE_STEPS):
        scenes = scenes_of_two(1 + step, 16, held_out=False)
        answers(model, tokenizers, scenes, step)
        alignment_loss(model, scenes).backward()
        optimizer.step()
        optimizer.zero_grad()
    scenes = scenes_of_two(0, HELD_OUT, held_out=True)
    truths = [things_by_token(scene) for scene in scenes]
    found = {}
    with torch.no_grad():
        for name, answer in answers(model, tokenizers, scenes, PROBE_STEPS).items():
            truth = torch.stack([classes[name] for classes in truths])
            found[name] = (answer.argmax(-1) == truth)[truth > 0].float().mean().item()
    return found


def measure(model: AlignedDenoiser, tokenizers: Tokenizers) -> dict[str, Any]:
    """Both questions."""
    t5 = cells_known_to_t5(model.text_encoder_2, tokenizers)
    return {"cells known to T5": t5, "known to image tokens": things_known_to_tokens(model, tokenizers)}


def train_row(
    name: str, vae: AutoencoderKL, encoder: T5EncoderModel, tokenizers: Tokenizers, seed: int
) -> AlignedDenoiser:
    """The averaged weights after `STEPS` steps of a row of `ROWS`."""
    learns_on, weight = ROWS[name]
    torch.manual_seed(seed + 1)
    model = AlignedDenoiser(tokenizers)
    model.text_encoder_2.load_state_dict(encoder.state_dict())
    model.text_encoder_2.requires_grad_(learns_on)
    if not weight:
        model.heads.requires_grad_(False)

    def also(model: AlignedDenoiser, scenes: list[Scene]) -> torch.Tensor:
        return weight * alignment_loss(model, scenes)

    pool = build_pool(partial(encode, vae), seed, SCENES, THINGS, 12.0)
    loss = FlowLoss(pool, Captions(tokenizers), seed, 8, SHIFT, autocast=True, also=also if weight else None)
    with tempfile.TemporaryDirectory() as folder:
        # Stopped before the rate falls, as in the long run.
        schedule = Schedule(4 * STEPS, 1e-3, boost=4.0, decay=0.5)
        return fit(model, loss, schedule, checkpoint=Path(folder) / "x.pt", name=name, stop_after=STEPS).averaged


def main(arguments: list[str] | None = None) -> None:
    """Run the rows that are named; those that are not keep their figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--text-steps", type=int, default=1000)
    parser.add_argument("--result", type=Path, default=RESULT)
    args = parser.parse_args(arguments)
    prepare(args)
    vae = AutoencoderKL.from_pretrained(HERE / "pipeline" / "vae").to(memory_format=torch.channels_last)
    tokenizers = build_tokenizers()
    encoder = read_captions(tokenizers, args.seed, args.text_steps)
    result = json.loads(args.result.read_text()) if args.result.exists() else {"rows": {}}
    result |= {"environment": environment("cpu"), "steps": STEPS, "held out scenes": HELD_OUT}
    result["cells known to T5 at first"] = cells_known_to_t5(encoder, tokenizers)
    for name in args.rows:
        result["rows"][name] = measure(train_row(name, vae, encoder, tokenizers, args.seed), tokenizers)
        args.result.write_text(json.dumps(result, indent=1) + "\n")
        print(name, json.dumps(result["rows"][name]))


if __name__ == "__main__":
    main()
