"""Two 3 × 3 convolutions in a row on two ranks: a halo of one row for each, or one of two rows for both.

    python -m benchmarks.vae_wide_halo

Rounds in turns; the least of each, for other programs may take the machine's cores. Writes benchmarks/results/vae_wide_halo.json and a part of docs/vae.md.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.environment import write_results
from benchmarks.launch import measured_on_ranks, write_part
from benchmarks.page_parts import fill
from para_core.spatial.fetch import fetch
from para_core.spatial.mode import SpatialShardMode
from para_core.spatial.rows import held
from para_core.spatial.tag import rows_of, tagged

PAGE = Path(__file__).parents[1] / "docs/vae.md"
# Channels, rows and columns of the whole image.
SIZES = ((64, 16, 16), (64, 64, 64), (32, 256, 256))


def with_halo(rows: SpatialShardMode, convolutions: nn.Module, x: Tensor, halo: int) -> Tensor:
    """What ``convolutions`` make of this rank's rows ``x`` and ``halo`` more at either end, whose result is left out."""
    tag = rows_of(x)
    if tag is None:
        raise TypeError("x is not sharded.")
    spans = held(tag.layout)
    wide = [(max(0, start - halo), min(tag.total, stop + halo)) for start, stop in spans]
    with torch._C.DisableTorchFunction():
        found: Tensor = convolutions(fetch(x, tag, wide, rows.ranks))
    (start, stop), first = spans[rows.ranks.index], wide[rows.ranks.index][0]
    return tagged(found.narrow(tag.dim, start - first, stop - start), tag)


@torch.no_grad()
def measure(rounds: int) -> list[dict[str, Any]]:
    rows = SpatialShardMode(dist.group.WORLD)
    results = []
    for channels, height, width in SIZES:
        torch.manual_seed(0)
        layers = [nn.Conv2d(channels, channels, 3, padding=1), nn.SiLU(), nn.Conv2d(channels, channels, 3, padding=1)]
        convolutions, image = nn.Sequential(*layers), torch.randn(1, channels, height, width)
        seconds: dict[str, list[float]] = {"one row each": [], "without overlap": [], "two rows once": []}
        errors = []
        for _ in range(rounds + 1):  # the first one warms up
            x = rows.shard(image)
            for name, times in seconds.items():
                dist.barrier()
                start = time.perf_counter()
                if name == "one row each":
                    with rows:
                        found = convolutions(x)
                elif name == "without overlap":
                    found = x
                    for layer in layers:
                        found = with_halo(rows, layer, found, int(isinstance(layer, nn.Conv2d)))
                else:
                    found = with_halo(rows, convolutions, x, 2)
                times.append(time.perf_counter() - start)
                whole = rows.gather(found)
                expected = convolutions(image)
                errors.append(float((whole - expected).norm() / expected.norm()))
        least = {name: min(times[1:]) for name, times in seconds.items()}
        results.append({"channels": channels, "image": [height, width], "error": max(errors), **least})
    return results


def table(found: list[dict[str, Any]]) -> list[str]:
    """Markdown."""
    ways = ("one row each", "without overlap", "two rows once")
    lines = [f"| channels | image | {' | '.join(f'{way}, ms' for way in ways)} |", "| --- " * 5 + "|"]
    for row in found:
        size = " × ".join(map(str, row["image"]))
        lines.append(f"| {row['channels']} | {size} | {' | '.join(f'{1e3 * row[way]:.2f}' for way in ways)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--part", type=Path, help="(of the ranks themselves) where their figures go")
    options = parser.parse_args()
    if options.part is not None:
        torch.set_num_threads(1)
        write_part(options.part, partial(measure, options.rounds))
        return
    found = measured_on_ranks("benchmarks.vae_wide_halo", 2, "--rounds", str(options.rounds))
    lines = table(found)
    print("\n".join(lines))
    print(write_results("vae_wide_halo", {"sizes": found}))
    PAGE.write_text(fill(PAGE.read_text(), {"vae wide halo": lines}))


if __name__ == "__main__":
    main()
