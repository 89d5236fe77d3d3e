"""What a rank sends per step for models of real size, by the formula that the tiny pipelines confirm:

    python -m benchmarks.real_sizes

Needs benchmarks/results/pipelines.json (python -m benchmarks.pipelines): where the formula gives other bytes than were counted
there, it ends in an error. Writes docs/traffic.md and benchmarks/results/real_sizes.json.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.environment import RESULTS, write_results

PAGE = Path(__file__).parents[1] / "docs/traffic.md"


@dataclass(frozen=True)
class Model:
    """What decides how much one step sends.

    Args:
        calls: attention calls of a step that see cut tokens.
        cut: tokens of each segment that is cut.
        whole: tokens that every rank holds, in the same attention calls.
        channels: of a token of the output, which is gathered.
        samples: in one call; ``branches``: calls of a step.
        shares_samples: branches are in one batch.
    """

    calls: int
    heads: int
    head_dim: int
    cut: tuple[int, ...]
    whole: int
    channels: int
    samples: int = 1
    branches: int = 1
    shares_samples: bool = False
    element_size: int = 2


def part(total: int, rank: int, ranks: int) -> int:
    """What ``rank`` has of ``total``, cut as ``torch.tensor_split`` cuts."""
    return total // ranks + (rank < total % ranks)


def sent(model: Model, ring: int, ulysses: int, rank: int = 0) -> int:
    """Bytes that ``rank`` sends to others in a step, for all branches, S_r being the tokens of rank r and h its heads.

    Per attention call: Ulysses 3 · S_r · (H - h) · D in, (S_block - S_r) · h · D out, and for whole tokens (U - 1) · S_whole ·
    h · D, for each rank computed its own heads of them; the ring 2 · h · D · S_block for each block that is passed on. At the end
    the output is gathered: S_r · C to each other rank of the Ulysses group, then S_block · C to those of the ring.
    """
    ranks = ring * ulysses
    own = [sum(part(total, r, ranks) for total in model.cut) for r in range(ranks)]
    blocks = [sum(own[i * ulysses : (i + 1) * ulysses]) for i in range(ring)]
    index, place = divmod(rank, ulysses)
    heads = part(model.heads, place, ulysses)
    elements = 0
    if ulysses > 1:
        elements += 3 * own[rank] * (model.heads - heads) + (blocks[index] - own[rank]) * heads
        elements += (ulysses - 1) * model.whole * heads
    elements += sum(2 * heads * blocks[(index - step) % ring] for step in range(ring - 1))
    gathered = own[rank] * (ulysses - 1) + blocks[index] * (ring - 1)
    total = model.calls * elements * model.head_dim + gathered * model.channels
    return model.samples * model.branches * total * model.element_size


# As benchmarks.tiny_pipelines builds and calls them; 45 video tokens, or 15 image tokens.
TINY = {
    "hunyuan": Model(4, 3, 12, (45,), 13, 16, element_size=4),
    "cogvideox": Model(2, 3, 16, (45,), 13, 16, samples=2, element_size=4),
    "wan": Model(2, 3, 12, (45,), 0, 64, branches=2, element_size=4),
}
# Tokens: latent frames × height / 16 × width / 16.
REAL = {
    "FLUX.1-dev, 1024 × 1024": Model(57, 24, 128, (4096, 512), 0, 64),
    "HunyuanVideo, 1280 × 720 × 129": Model(60, 24, 128, (33 * 45 * 80,), 256, 64),
    "CogVideoX-5B, 720 × 480 × 49": Model(42, 48, 64, (13 * 30 * 45,), 226, 64, samples=2, shares_samples=True),
    "Mochi 1, 848 × 480 × 84": Model(48, 24, 128, (14 * 30 * 53,), 256, 48, samples=2, shares_samples=True),
    "Wan 2.1 14B, 1280 × 720 × 81": Model(40, 40, 128, (21 * 45 * 80,), 0, 64, branches=2),
}
MESHES = {"2 Ulysses": (1, 2), "2 ring": (2, 1), "3 Ulysses": (1, 3), "2 × 2": (2, 2)}


def check() -> None:
    """Raise ``RuntimeError`` where the formula is not what was counted."""
    counted = json.loads((RESULTS / "pipelines.json").read_text())["pipelines"]
    for name, model in TINY.items():
        for label, mesh in MESHES.items():
            expected, found = sent(model, *mesh), counted[name][label]["bytes per step"]
            if expected != found:
                raise RuntimeError(f"{name} on {label}: {found} bytes were counted; the formula gives {expected}.")


def on_half(model: Model) -> Model | None:
    """What one half of the ranks computes where they share the branches of guidance; None if there are none."""
    if model.shares_samples:
        return replace(model, samples=model.samples // 2)
    return replace(model, branches=model.branches // 2) if model.branches > 1 else None


def rows() -> list[dict[str, Any]]:
    """Gigabytes that rank 0 sends per step: by model, and by number of ranks."""
    table = []
    for name, model in REAL.items():
        half = on_half(model)
        for ranks in (2, 4, 8, 16):
            row: dict[str, Any] = {"model": name, "ranks": ranks}
            row["Ulysses"] = sent(model, 1, ranks) / 1e9
            row["ring"] = sent(model, ranks, 1) / 1e9
            row["ring 2 × Ulysses"] = sent(model, 2, ranks // 2) / 1e9
            # The exchange of the branches' results, one picture of latents, is a ten-thousandth of this.
            row["batch 2 × Ulysses"] = None if half is None else sent(half, 1, ranks // 2) / 1e9
            table.append(row)
    return table


def main() -> None:
    """Check, compute, write."""
    check()
    table = rows()
    headings = ["Ulysses", "ring", "ring 2 × Ulysses", "batch 2 × Ulysses"]
    lines = [
        "# What a step sends",
        "",
        (
            "Written by `python -m benchmarks.real_sizes`: gigabytes in bfloat16 that rank 0 sends to other ranks per step, all branches of "
            "guidance together, by the formula in that program. On the tiny pipelines it gives, byte for byte, what was counted there "
            "([exactness.md](exactness.md))."
        ),
        "",
        "| model | ranks | " + " | ".join(headings) + " |",
        "| --- |" + " --- |" * (len(headings) + 1),
    ]
    for row in table:
        cells = ["" if row[heading] is None else f"{row[heading]:.2f}" for heading in headings]
        lines.append(f"| {row['model']} | {row['ranks']} | " + " | ".join(cells) + " |")
    PAGE.write_text("\n".join(lines) + "\n")
    write_results("real_sizes", {"gigabytes per step": table})
    print("\n".join(lines[6:]))


if __name__ == "__main__":
    main()
