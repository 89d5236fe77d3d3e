"""A decode on two ranks next to diffusers' tiling and DistVAE, all in turns in one run: error, seams, seconds, bytes.

    pip install --no-deps --target FOLDER distvae
    python -m benchmarks.pipelines.vae --distvae FOLDER

The autoencoder of the small trained FLUX decodes 16 of its images as one of 512 × 512. Seconds are medians of rounds,
and those of the slowest rank. Writes benchmarks/results/vae_beside.json (docs/vae.md) and docs/images/vae_seams.png.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from diffusers import AutoencoderKL
from PIL import Image, ImageDraw
from torch import Tensor

from benchmarks.harness import (
    ROOT,
    TrafficCounter,
    largest_over_ranks,
    markdown_table,
    measure_on_ranks,
    parser_of,
    read_results,
    relative_error,
    write_results,
)
from para_core.adapters import parallelize_vae
from zoo.flux import PIPELINE
from zoo.flux.scenes import crowded_scene, draw

FIGURE = ROOT / "docs/images/vae_seams.png"
AMPLIFIED, ROUNDS = 4, 5
ALONE = "one device"
SHOWN = 256  # This many pixels from the middle of the image are shown.


class AllTraffic(TrafficCounter):
    """A traffic counter that also counts point-to-point sends, gathered lists, and all-reduces (of a ring)."""

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
    """Return 4 × 4 images of the grammar as one, ``[1, 3, 512, 512]`` in -1 to 1."""
    rng = np.random.default_rng(0)
    rows = [np.concatenate([draw(crowded_scene(rng), rng) for _ in range(4)], axis=1) for _ in range(4)]
    pixels = torch.from_numpy(np.concatenate(rows)).permute(2, 0, 1)
    return pixels[None] / 127.5 - 1


def ways(vae: Any, distvae: str | None) -> tuple[dict[str, Callable[[Tensor], Any]], str | None]:
    """Return the ways to decode by name, and the reason if DistVAE is not one of them."""
    tiled = copy.deepcopy(vae)
    tiled.enable_tiling()
    decoders = {
        ALONE: vae.decode,
        "diffusers' tiling, one device": tiled.decode,
        "para_core, tiled": parallelize_vae(copy.deepcopy(vae), method="tiled").decode,
        "para_core, exact": parallelize_vae(copy.deepcopy(vae)).decode,
    }
    try:
        if distvae is not None:
            sys.path.append(distvae)
        from distvae.vae import parallelize_decoder

        theirs = copy.deepcopy(vae)
        parallelize_decoder(theirs, dist.group.WORLD)
        theirs.decode(torch.zeros(1, vae.config.latent_channels, 16, 16))
    except Exception as error:  # A user of DistVAE would see any such error.
        return decoders, f"{type(error).__name__}: {error}"
    return {**decoders, "DistVAE": theirs.decode}, None


@torch.no_grad()
def measure(rounds: int, distvae: str | None) -> dict[str, Any]:
    vae: Any = AutoencoderKL.from_pretrained(PIPELINE / "vae").eval()
    z = vae.encode(image()).latent_dist.mode()
    decoders, missing = ways(vae, distvae)
    seconds: dict[str, list[float]] = {name: [] for name in decoders}
    images, sent = {}, {}
    for number in range(rounds + 1):  # The first round warms up, and its bytes are counted.
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
            seconds[name].append(largest_over_ranks(time.perf_counter() - start))
    expected = images[ALONE].double()
    rows = {
        name: {
            "error": relative_error(x, expected),
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
    """Save the middle of the image, and the amplified differences from one device."""
    panels = []
    for name, x in images.items():
        if name == "para_core, tiled":  # Its bits are those of diffusers' tiling.
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


def parts() -> dict[str, list[str]]:
    """Return the table of docs/vae.md."""
    results = read_results("vae_beside")
    alone, rows = results["rows"][ALONE]["seconds"], []
    for name, row in results["rows"].items():
        cells = [
            name,
            f"{row['error']:.1e}",
            f"{row['largest difference, of 255']:.2g}",
            f"{row['seconds']:.2f}",
            f"{row['seconds'] / alone:.2f}",
            f"{row['bytes a rank sends'] / 1e3:,.0f}",
            row["collectives"],
        ]
        rows.append(cells)
    heads = ["", "error", "largest difference, of 255", "seconds", "of one device's", "kB a rank sends", "collectives"]
    missing = [] if results["missing"] is None else ["", f"DistVAE did not run here: {results['missing']}"]
    return {"vae beside": [*markdown_table(heads, rows), *missing]}


def main() -> None:
    """Measure on two ranks and write."""
    parser = parser_of(__doc__)
    parser.add_argument("--distvae", help="folder into which DistVAE was installed")
    options = parser.parse_args()
    print(write_results("vae_beside", measure_on_ranks(measure, 2, ROUNDS, options.distvae), "diffusers"))


if __name__ == "__main__":
    main()
