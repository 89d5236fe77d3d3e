"""The options that the examples share."""

from __future__ import annotations

import argparse


def parse_options(description: str | None, **defaults: object) -> argparse.Namespace:
    """Parse the command line; ``defaults`` are the example's own (model, prompt, steps, height, width, output)."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", help="a checkpoint's name on the hub, or a folder")
    parser.add_argument("--prompt")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--height", type=int, help="pixels")
    parser.add_argument("--width", type=int, help="pixels")
    parser.add_argument("--max-sequence-length", type=int, help="text tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ring", type=int, help="ranks of the ring; the others do Ulysses, unless given too")
    parser.add_argument("--ulysses", type=int, help="ranks of Ulysses; the others form the ring, unless given too")
    parser.add_argument("--compile", action="store_true", help="torch.compile(fullgraph=True), warmed up before timing")
    parser.add_argument("--output", help="where the picture goes")
    parser.set_defaults(**defaults)
    return parser.parse_args()
