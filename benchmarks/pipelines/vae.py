"""A decode on two ranks beside diffusers' tiling and DistVAE, all in turns in one run: error, seams, seconds, bytes.

    pip install --no-deps --target FOLDER distvae
    python -m benchmarks.pipelines.vae --distvae FOLDER

The autoencoder of the small FLUX that was trained here decodes 16 of its images as one of 512 × 512. Seconds are medians of rounds, the
slowest rank's. Writes benchmarks/results/vae_beside.json, docs/vae_seams.png and the table of docs/vae.md.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from diffusers import AutoencoderKL
from PIL import Image, ImageDraw
from torch import Tensor

from benchmarks.environment import write_results
from benchmarks.launch import measured_on_ranks, write_part
from benchmarks.page_parts import fill
from benchmarks.traffic import TrafficCounter
from para_core.adapters import parallelize_vae
from zoo.flux.draw import draw
from zoo.flux.grammar import crowded_scene

ROOT = Path(__file__).parents[2]
PAGE, FIGURE = ROOT / "docs/vae.md", ROOT / "docs/vae_seams.png"
AMPLIFIED = 4
ALONE = "one device"
SHOWN = 256  # pixels of the image that are shown, from its middle


class AllTraffic(TrafficCounter):
    """What others than para_core start, too: point to point, lists that are gathered, all-reduces (by the ring's formula)."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        ranks = dist.get_world_size()
        sent: float | None = None
        if func is torch.ops.c10d.send.default:
            sent = args[0][0].nbytes
        elif func is torch.ops.c10d.allgather_.default:
            sent = args[1][0].nbytes * (ranks - 1)
        elif func is torch.ops.c10d.allreduce_.default:
            sent = 2 * args[0][0].nbytes * (ranks - 1) / ranks
        if sent is not None:
            self.collectives += 1
            self.bytes += round(sent)
        return super().__torch_dispatch__(func, types, args, kwargs)


def image() -> Tensor:
    """4 × 4 images of the grammar, ``[1, 3, 512, 512]`` in -1 to 1."""
    rng = np.random.default_rng(0)
    rows = [np.concatenate([draw(crowded_scene(rng), rng) for _ in range(4)], axis=1) for _ in range(4)]
    pixels = torch.from_numpy(np.concatenate(rows)).permute(2, 0, 1)
    return pixels[None] / 127.5 - 1


def ways(vae: Any, distvae: Path | None) -> tuple[dict[str, Callable[[Tensor], Any]], str | None]:
    """How to decode, by name; and why DistVAE is not among them."""
    tiled = copy.deepcopy(vae)
    tiled.enable_tiling()
    found = {
        ALONE: vae.decode,
        "diffusers' tiling, one device": tiled.decode,
        "para_core, tiled": parallelize_vae(copy.deepcopy(vae), method="tiled").decode,
        "para_core, exact": parallelize_vae(copy.deepcopy(vae)).decode,
    }
    try:
        if distvae is not None:
            sys.path.append(str(distvae))
        from distvae.vae import parallelize_decoder

        theirs = copy.deepcopy(vae)
        parallelize_decoder(theirs, dist.group.WORLD)
        theirs.decode(torch.zeros(1, vae.config.latent_channels, 16, 16))
    except Exception as error:  # whatever it is, it is what its user would be told
        return found, f"{type(error).__name__}: {error}"
    return {**found, "DistVAE": theirs.decode}, None


@torch.no_grad()
def measure(rounds: int, distvae: Path | None) -> dict[str, Any]:
    vae: Any = AutoencoderKL.from_pretrained(ROOT / "zoo/flux/pipeline/vae").eval()
    z = vae.encode(image()).latent_dist.mode()
    decoders, missing = ways(vae, distvae)
    seconds: dict[str, list[float]] = {name: [] for name in decoders}
    images, sent = {}, {}
    for number in range(rounds + 1):  # the first one warms up, and is counted
        for name, decode in decoders.items():
            one_device = "one device" in name
            dist.barrier()
            start = time.perf_counter()
            if number == 0:
                with AllTraffic() as traffic:
                    images[name] = decode(z).sample
                sent[name] = traffic.bytes, traffic.collectives
            elif not one_device or dist.get_rank() == 0:
                decode(z)
            took = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            seconds[name].append(float(took))
    expected = images[ALONE].double()
    rows = {
        name: {
            "error": float((x - expected).norm() / expected.norm()),
            "largest difference, of 255": float((x - expected).abs().max() * 127.5),
            "seconds": statistics.median(seconds[name][1:]),
            "all rounds": seconds[name][1:],
            "bytes a rank sends": sent[name][0],
            "collectives": sent[name][1],
        }
        for name, x in images.items()
    }
    if dist.get_rank() == 0:
        show(images)
    return {"missing": missing, "rows": rows}


def show(images: Mapping[str, Tensor]) -> None:
    """The middle of the image, and beside it the differences from one device, amplified."""
    panels = []
    for name, x in images.items():
        if name == "para_core, tiled":  # bit by bit that of diffusers
            continue
        values = x[0] / 2 + 0.5 if name == ALONE else AMPLIFIED * (x - images[ALONE])[0].abs() / 2
        array = (values.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
        start = (array.shape[0] - SHOWN) // 2
        panel = Image.new("RGB", (SHOWN, SHOWN + 16), "white")
        panel.paste(Image.fromarray(array[start : start + SHOWN, start : start + SHOWN]), (0, 16))
        title = name if name == ALONE else f"{name}: difference x {AMPLIFIED}"
        ImageDraw.Draw(panel).text((2, 2), title, fill="black")
        panels.append(np.asarray(panel))
        panels.append(np.full((SHOWN + 16, 6, 3), 255, dtype=np.uint8))
    Image.fromarray(np.concatenate(panels[:-1], axis=1)).save(FIGURE)


def table(found: dict[str, Any]) -> list[str]:
    heads = ["", "error", "largest difference, of 255", "seconds", "of one device's", "kB a rank sends", "collectives"]
    alone = found["rows"][ALONE]["seconds"]
    lines = ["| " + " | ".join(cells) + " |" for cells in (heads, ["---"] * len(heads))]
    for name, row in found["rows"].items():
        cells = [
            name,
            f"{row['error']:.1e}",
            f"{row['largest difference, of 255']:.2g}",
            f"{row['seconds']:.2f}",
            f"{row['seconds'] / alone:.2f}",
            f"{row['bytes a rank sends'] / 1e3:,.0f}",
            str(row["collectives"]),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines + ([] if found["missing"] is None else ["", f"DistVAE did not run here: {found['missing']}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--distvae", type=Path, help="folder into which DistVAE was installed")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--part", type=Path, help="(of the ranks themselves) where their figures go")
    options = parser.parse_args()
    if options.part is not None:
        torch.set_num_threads(1)
        write_part(options.part, partial(measure, options.rounds, options.distvae))
        return
    peer = [] if options.distvae is None else ["--distvae", str(options.distvae)]
    found = measured_on_ranks("benchmarks.pipelines.vae", 2, "--rounds", str(options.rounds), *peer)
    lines = table(found)
    PAGE.write_text(fill(PAGE.read_text(), {"vae beside": lines}))
    print("\n".join(lines))
    print(write_results("vae_beside", found, "diffusers"))


if __name__ == "__main__":
    main()
