"""Which part of the recipe decides how fast words are learned:  python -m benchmarks.tiny_flux.ablate

Each row trains briefly from the same first weights with one thing changed, then `probe.use_of_words` asks what it learned.
Writes benchmarks/results/tiny_flux_ablations.json, a row at a time.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL

from benchmarks.tiny_flux import grammar
from benchmarks.tiny_flux.grammar import Scene
from benchmarks.tiny_flux.models import Denoiser, Tokenizers, build_tokenizers
from benchmarks.tiny_flux.probe import SIGMAS, TEXT_LENGTH, use_of_words
from benchmarks.tiny_flux.stages import build_pool, encode, tokenize
from benchmarks.tiny_training.held_out import environment
from benchmarks.tiny_training.loop import Schedule, fit
from benchmarks.tiny_training.losses import FlowLoss, vary
from benchmarks.tiny_training.program import prepare

HERE = Path(__file__).parent
RESULT = HERE.parent / "results" / "tiny_flux_ablations.json"
SCENES = 4096
STEPS = 500  # of the schedule, with a batch of 16


@dataclass(frozen=True)
class Row:
    """One recipe."""

    things: tuple[float, float, float] = (1.0, 0.0, 0.0)  # of the scenes have one, two, three things
    full_captions: bool = True  # no caption leaves words out
    no_pooled_caption: float = 0.0  # of the captions are hidden from CLIP
    shift: float = 3.0
    boost: float = 4.0  # of Muon's learning rate; 0: AdamW alone
    batch: int = 16
    cell_weight: float = 1.0  # of the loss in cells that hold a thing


START = Row()
WEIGHTED = replace(START, cell_weight=4.0)
ROWS = {
    "before": Row(things=(0.7, 0.2, 0.1), full_captions=False, no_pooled_caption=0.5, shift=5.0),
    "start": START,
    "cell weight 4": WEIGHTED,
    "cell weight 12": replace(START, cell_weight=12.0),
    "cell weight 4, AdamW": replace(WEIGHTED, boost=0.0),
    "cell weight 4, batch 8": replace(WEIGHTED, batch=8),
    "cell weight 4, half of the captions hidden from CLIP": replace(WEIGHTED, no_pooled_caption=0.5),
}


@dataclass(frozen=True)
class Captions:
    """Full captions or varied ones, all of one length, some of them hidden from CLIP."""

    tokenizers: Tokenizers
    row: Row

    def __call__(self, scenes: list[Scene], rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """CLIP ids ``[B, 77]`` and T5 ids ``[B, 48]``."""
        captions = vary([grammar.caption(scene, None if self.row.full_captions else rng) for scene in scenes], rng)
        pooled = ["" if rng.random() < self.row.no_pooled_caption else text for text in captions]
        return tokenize(self.tokenizers, captions, pooled, TEXT_LENGTH)


def measure(row: Row, vae: AutoencoderKL, *, seed: int, stop: int) -> dict[str, Any]:
    """Train a row on ``16 * stop`` images and ask what it learned."""
    tokenizers, encoder = build_tokenizers(), partial(encode, vae)
    pool = build_pool(encoder, seed, SCENES, row.things, row.cell_weight)
    torch.manual_seed(seed + 1)
    model = Denoiser(tokenizers)
    loss = FlowLoss(pool, Captions(tokenizers, row), seed, row.batch, row.shift, autocast=True)
    schedule = Schedule(16 * STEPS // row.batch, 1e-3, boost=row.boost, decay=0.6)
    end = 16 * stop // row.batch
    with tempfile.TemporaryDirectory() as folder:
        state = fit(model, loss, schedule, checkpoint=Path(folder) / "x.pt", name="ablation", stop_after=end)
    found = use_of_words(state.averaged, encoder, tokenizers)
    return {"options": asdict(row), "images": 16 * stop, "seconds": round(state.seconds), **found}


def main(arguments: list[str] | None = None) -> None:
    """Run the rows that are named; those that are not keep their figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stop", type=int, default=250, help=f"step of {STEPS} at which a row is asked")
    parser.add_argument("--result", type=Path, default=RESULT)
    args = parser.parse_args(arguments)
    prepare(args)
    vae = AutoencoderKL.from_pretrained(HERE / "pipeline" / "vae").to(memory_format=torch.channels_last)
    known = json.loads(args.result.read_text())["rows"] if args.result.exists() else {}
    for name in args.rows:
        known[f"{name}, {16 * args.stop} images"] = measure(ROWS[name], vae, seed=args.seed, stop=args.stop)
        result = {"environment": environment("cpu"), "sigmas": SIGMAS, "rows": known}
        args.result.write_text(json.dumps(result, indent=1) + "\n")
        print(name, json.dumps(known))


if __name__ == "__main__":
    main()
