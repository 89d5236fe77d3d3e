"""Shared code of the evaluations of the tiny models: the command line, and the files that are written."""

from __future__ import annotations

import argparse
import datetime
import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from PIL import Image

ROOT = Path(__file__).parents[2]


def parser(doc: str | None, name: str) -> argparse.ArgumentParser:
    """Return the command line of the model ``name``; the defaults are what is published."""
    options = argparse.ArgumentParser(description=doc, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    options.add_argument("--device", default="cpu")
    options.add_argument("--threads", type=int, default=2, help="CPU threads")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--steps", type=int, default=20, help="Euler steps")
    options.add_argument("--batch", type=int, default=20)
    options.add_argument("--pipeline", type=Path, default=ROOT / "zoo" / name.removeprefix("tiny_") / "pipeline")
    options.add_argument("--result", type=Path, default=ROOT / "benchmarks" / "results" / f"{name}.json")
    options.add_argument("--image", type=Path, default=ROOT / "docs/images" / f"{name}.png")
    return options


def run(
    args: argparse.Namespace,
    pipeline: type,
    evaluate: Callable[[Any, argparse.Namespace], tuple[dict[str, Any], Image.Image]],
    text_length: int,
) -> None:
    """Load, measure, print, write."""
    torch.set_num_threads(args.threads)
    loaded: Any = pipeline
    pipe = loaded.from_pretrained(args.pipeline, dtype=torch.float32, local_files_only=True).to(args.device)
    pipe.set_progress_bar_config(disable=True)
    figures, image = evaluate(pipe, args)
    settings = {
        "seed": args.seed,
        "steps": args.steps,
        "max_sequence_length": text_length,
        "weights": "bfloat16 as float32",
    }
    result = {
        "environment": environment(args.device),
        "settings": settings,
        "training": json.loads((args.pipeline / "training.json").read_text()),
        "held_out": figures,
    }
    for path in (args.result, args.image):
        path.parent.mkdir(parents=True, exist_ok=True)
    args.result.write_text(json.dumps(result, indent=2) + "\n")
    image.save(args.image)
    print(json.dumps(figures, indent=2))


def environment(device: str) -> dict[str, str]:
    """Return the device, the date and the versions."""
    name = torch.cuda.get_device_name() if device.startswith("cuda") else f"CPU, {torch.get_num_threads()} threads"
    return {
        "device": name,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "transformers": transformers.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
