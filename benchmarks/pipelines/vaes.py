"""Every autoencoder of diffusers that runs on several ranks: its error, what it sends, and its memory.

    python -m benchmarks.pipelines.vaes

Random weights, as small as each class can be; the ranks share this machine's cores. Writes benchmarks/results/vae_table.json and the
tables of docs/vae.md. With --only NAME … those autoencoders are measured anew, and the rest of the file stays.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.environment import write_results
from benchmarks.launch import launch
from benchmarks.page_parts import fill
from benchmarks.peak_memory import PeakMemory
from benchmarks.traffic import TrafficCounter
from para_core.adapters import parallelize_vae, unparallelize_vae
from para_core.adapters.models.vaes import REFUSED_VAES, VAES, rows_per_latent
from zoo.tiny.vaes import BY_TILES, NO_TILES_ENCODED, NOT_TILED, TINY_VAES, TinyVae, random_image

PAGE = Path(__file__).parents[2] / "docs/vae.md"
RESULTS = Path(__file__).parents[1] / "results/vae_table.json"
RANKS = (2, 3, 4)
# Where memory is measured an image is so high, in rows of pixels, and half as wide: rows of neighbours weigh little.
HEIGHT = 256
# Published ones attend to all pixels of an eighth of the image; these tiny ones to those of a half, which would weigh most.
_FOUR_LEVELS = {"down_block_types": ("DownEncoderBlock2D",) * 4, "block_out_channels": (8, 8, 16, 16)}
_MORE_CHANNELS = {"block_out_channels": (16, 32, 64, 64), "decoder_block_out_channels": (64, 128, 256)}
MORE_LEVELS: Mapping[str, Mapping[str, Any]] = {
    "KL": {**_FOUR_LEVELS, "up_block_types": ("UpDecoderBlock2D",) * 4},
    "Flux2": {**_FOUR_LEVELS, "up_block_types": ("UpDecoderBlock2D",) * 4},
    "TemporalDecoder": {**_FOUR_LEVELS, "block_out_channels": (32,) * 4},
    "HunyuanImage": {"block_out_channels": (32, 32, 64, 64), "spatial_compression_ratio": 8},
    # Of so few channels as the tiny ones have, the image itself, which one rank gets, would weigh most.
    "LTXVideo": {"block_out_channels": (64, 64, 128, 128), "decoder_block_out_channels": (64, 64, 128, 128)},
    "LTXVideo 0.9.5": _MORE_CHANNELS,
    "LTX2Video": _MORE_CHANNELS,
}


def relative_error(out: Tensor, expected: Tensor) -> float:
    return float((out.double() - expected.double()).norm() / expected.double().norm())


@torch.no_grad()
def of_this_rank(name: str, tiny: TinyVae) -> list[dict[str, Any]]:
    """One row for each method and way: the largest error and the most bytes of any rank."""
    rows = []
    for method in ("exact", "tiled"):
        adapter = VAES[tiny.cls]
        if method == "tiled" and (name in NOT_TILED or not (adapter.tiled and adapter.shares_tiles)):
            continue
        if method == "exact" and name in BY_TILES:
            continue
        vae: Any = tiny.make_tiled() if method == "tiled" else tiny.make()
        for way, shape in (("decode", tiny.latents), ("encode", tiny.pixels)):
            if method == "tiled" and way == "encode" and name in NO_TILES_ENCODED:
                continue
            run = getattr(tiny, way)
            errors = []
            traffic = TrafficCounter()
            for wide in (False, True) if len(shape) > 3 else (False,):
                x = random_image(shape, wide=wide)
                expected = run(vae, x)
                parallelize_vae(vae, method=method)
                with traffic if not wide else TrafficCounter():
                    errors.append(relative_error(run(vae, x), expected))
                unparallelize_vae(vae)
            rows.append(
                {
                    "name": name,
                    "class": tiny.cls,
                    "method": method,
                    "way": way,
                    "error": _largest(max(errors)),
                    "bytes": int(_largest(traffic.bytes)),
                    "collectives": traffic.collectives,
                }
            )
    return rows


@torch.no_grad()
def in_16_bits(name: str, tiny: TinyVae) -> list[dict[str, Any]]:
    """How far bfloat16 is from float32, on one device and on the ranks."""
    found = []
    for way, shape in (("decode", tiny.latents), ("encode", tiny.pixels)):
        if name in BY_TILES:  # bit-equal
            continue
        x, run = random_image(shape), getattr(tiny, way)
        exact = run(tiny.make(), x)
        vae = tiny.make().bfloat16()
        try:
            alone = relative_error(run(vae, x.bfloat16()), exact)
        except NotImplementedError:  # CPUs pool no volumes of bfloat16
            continue
        parallelize_vae(vae)
        parallel = relative_error(run(vae, x.bfloat16()), exact)
        found.append({"name": name, "way": way, "alone": alone, "parallel": _largest(parallel)})
    return found


@torch.no_grad()
def memory(name: str, tiny: TinyVae) -> list[dict[str, Any]]:
    """The most bytes of activations, of any rank beside one device; the result stays with the first rank."""
    tiny = replace(tiny, options={**tiny.options, **MORE_LEVELS.get(name, {})})
    found = []
    for way, shape in large(tiny).items():
        x, run = random_image(shape), getattr(tiny, way)
        peaks = []
        for parallel in (False, True) if dist.get_rank() == 0 else (True,):
            vae: Any = tiny.make()
            if parallel:
                parallelize_vae(vae, method="tiled" if name in BY_TILES else "exact", gather="first")
            with PeakMemory() as of_run:
                run(vae, x)
            peaks.append(of_run.peak)
        row = {"name": name, "way": way, "shape": list(shape), "one device": peaks[0]}
        found.append({**row, "a rank": int(_largest(peaks[-1]))})
    return found


def large(tiny: TinyVae) -> dict[str, tuple[int, ...]]:
    """Shapes of latents and pixels of which an edge row is a small part."""
    if len(tiny.latents) == 3:  # a waveform
        return {
            way: (*shape[:-1], 64 * shape[-1]) for way, shape in (("decode", tiny.latents), ("encode", tiny.pixels))
        }
    ratio = rows_per_latent(tiny.make())
    size = HEIGHT // ratio, HEIGHT // 2 // ratio
    return {
        "decode": (*tiny.latents[:-2], *size),
        "encode": (*tiny.pixels[:-2], size[0] * ratio, size[1] * ratio),
    }


def _largest(value: float) -> float:
    found = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def run_ranks(path: Path, only: list[str]) -> None:
    dist.init_process_group("gloo")
    measures = {"rows": of_this_rank, "16 bits": in_16_bits, "memory": memory}
    found: dict[str, list[Any]] = {part: [] for part in measures}
    for name in only or TINY_VAES:
        if dist.get_rank() == 0:
            print(f"{dist.get_world_size()} ranks: {name}", flush=True)
        for part, measure in measures.items():
            found[part] += measure(name, TINY_VAES[name])
    if dist.get_rank() == 0:
        path.write_text(json.dumps(found))
    dist.destroy_process_group()


def tables(results: dict[str, Any]) -> dict[str, list[str]]:
    """The parts of the page."""
    rows: dict[tuple[str, str, str, str], dict[str, dict[str, Any]]] = {}
    for ranks, found in results.items():
        for row in found["rows"]:
            rows.setdefault((row["name"], row["class"], row["method"], row["way"]), {})[ranks] = row
    errors = " | ".join([f"error, {ranks} ranks" for ranks in results])
    lines = [
        f"| autoencoder | class | method | way | {errors} | collectives | kB a rank sends, {max(results)} ranks |",
        "| --- " * (6 + len(results)) + "|",
    ]
    for (name, cls, method, way), of_ranks in rows.items():
        cells = [_error(of_ranks[ranks]["error"], method) for ranks in results]
        last = of_ranks[max(results)]
        sent = f"{last['bytes'] / 1e3:.0f}"
        lines.append(f"| {name} | {cls} | {method} | {way} | {' | '.join(cells)} | {last['collectives']} | {sent} |")
    lines += ["", f"Not run in parallel, of diffusers {diffusers.__version__}:", ""]
    lines += [f"- `{name}`: {reason}." for name, reason in REFUSED_VAES.items()]
    bits = beside(results, "16 bits", "bfloat16 on one device", lambda row: f"{row['alone']:.1e}", _parallel_bits)
    peaks = beside(results, "memory", "on one device", lambda row: f"{row['one device'] / 1e6:.1f} MB", _share)
    return {"vaes": lines, "vae 16 bits": bits, "vae memory": peaks}


def beside(
    results: dict[str, Any], part: str, alone: str, of_one: Callable[[Any], str], of_ranks: Callable[[Any], str]
) -> list[str]:
    """A table of ``part``: what is of one device, and beside it of each number of ranks."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for ranks, found in results.items():
        for row in found[part]:
            rows.setdefault((row["name"], row["way"]), {})[ranks] = row
    head = " | ".join([f"{ranks} ranks" for ranks in results])
    lines = [f"| autoencoder | way | {alone} | {head} |", "| --- " * (3 + len(results)) + "|"]
    for (name, way), of_row in rows.items():
        cells = " | ".join([of_ranks(of_row[ranks]) for ranks in results])
        lines.append(f"| {name} | {way} | {of_one(of_row[min(results)])} | {cells} |")
    return lines


def _parallel_bits(row: dict[str, Any]) -> str:
    return f"{row['parallel']:.1e}"


def _share(row: dict[str, Any]) -> str:
    return f"{row['a rank'] / row['one device']:.2f}"


def merged(before: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """``before`` with what was ``found`` in place of what it has of the same autoencoders."""
    names = list(TINY_VAES)
    together = {}
    for part, rows in found.items():
        new = {row["name"] for row in found["rows"]}
        kept = [row for row in before[part] if row["name"] not in new]
        together[part] = sorted(kept + rows, key=lambda row: names.index(row["name"]))
    return together


def _error(error: float, method: str) -> str:
    return "bit-equal" if error == 0 and method == "tiled" else f"{error:.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="what a rank process writes to; left out: start the ranks")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--only", nargs="+", default=[], choices=list(TINY_VAES))
    options = parser.parse_args()
    if options.out is not None:
        run_ranks(options.out, options.only)
        return
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for ranks in options.ranks:
            path = Path(folder) / f"{ranks}.json"
            launch(
                "benchmarks.pipelines.vaes",
                ranks,
                "--out",
                str(path),
                *(["--only", *options.only] if options.only else []),
            )
            results[str(ranks)] = json.loads(path.read_text())
    if options.only:
        before = json.loads(RESULTS.read_text())["ranks"]
        results = {
            ranks: merged(before[ranks], results[ranks]) if ranks in results else before[ranks] for ranks in before
        }
    print(write_results("vae_table", {"ranks": results}, "diffusers"))
    PAGE.write_text(fill(PAGE.read_text(), tables(results)))


if __name__ == "__main__":
    main()
