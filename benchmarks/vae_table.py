"""Every autoencoder of diffusers that runs on several ranks: its error, what it sends, and its memory.

    python -m benchmarks.vae_table

Random weights, as small as each class can be; the ranks share this machine's cores. Writes benchmarks/results/vae_table.json and the
tables of docs/vae.md. With --only NAME … those autoencoders are measured anew, and the rest of the file stays.
"""

from __future__ import annotations

import argparse
import json
import tempfile
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
from benchmarks.tiny_vaes import NO_TILES_ENCODED, NOT_TILED, TINY_VAES, TinyVae, random_image
from benchmarks.traffic import TrafficCounter
from para_core.adapters import parallelize_vae, unparallelize_vae
from para_core.adapters.models.vaes import REFUSED_VAES, VAES

PAGE = Path(__file__).parents[1] / "docs/vae.md"
RESULTS = Path(__file__).parent / "results/vae_table.json"
RANKS = (2, 3, 4)
# Large enough that rows of neighbours weigh little: name, latents, what is changed of the tiny one.
MEMORY = (
    ("KL", (1, 4, 64, 32), {"block_out_channels": (32, 64)}),
    ("Wan 2.1", (1, 4, 2, 48, 24), {"base_dim": 32}),
)


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
        if method == "exact" and adapter.only_tiled:
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
def in_16_bits(name: str) -> dict[str, Any]:
    """How far bfloat16 is from float32, on one device and on the ranks."""
    tiny = TINY_VAES[name]
    x = random_image(tiny.latents)
    exact = tiny.decode(tiny.make(), x)
    vae = tiny.make().bfloat16()
    alone = relative_error(tiny.decode(vae, x.bfloat16()), exact)
    parallelize_vae(vae)
    return {"name": name, "alone": alone, "parallel": relative_error(tiny.decode(vae, x.bfloat16()), exact)}


@torch.no_grad()
def memory(name: str, latents: tuple[int, ...], options: dict[str, Any]) -> dict[str, Any]:
    """The most bytes of activations, of any rank beside one device; the image stays with the first rank."""
    tiny = TINY_VAES[name]
    tiny = TinyVae(tiny.cls, {**tiny.options, **options}, latents, tiny.pixels)
    peaks = []
    for parallel in (False, True):
        vae = tiny.make()
        if parallel:
            parallelize_vae(vae, gather="first")
        with PeakMemory() as found:
            tiny.decode(vae, random_image(latents))
        peaks.append(found.peak)
    return {"name": name, "latents": list(latents), "one device": peaks[0], "a rank": int(_largest(peaks[1]))}


def _largest(value: float) -> float:
    found = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def run_ranks(path: Path, only: list[str]) -> None:
    dist.init_process_group("gloo")
    found: dict[str, list[Any]] = {
        "rows": [row for name in only or TINY_VAES for row in of_this_rank(name, TINY_VAES[name])],
        "16 bits": [] if only else [in_16_bits(name) for name in ("KL", "Wan 2.1", "HunyuanVideo")],
        "memory": [] if only else [memory(*one) for one in MEMORY],
    }
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
    bits = ["| autoencoder | ranks | bfloat16 on one device | on the ranks |", "| --- | --- | --- | --- |"]
    peaks = ["| autoencoder | latents | ranks | one device | a rank | share |", "| --- | --- | --- | --- | --- | --- |"]
    for ranks, found in results.items():
        bits += [f"| {x['name']} | {ranks} | {x['alone']:.1e} | {x['parallel']:.1e} |" for x in found["16 bits"]]
        peaks += [
            f"| {x['name']} | {' × '.join(map(str, x['latents']))} | {ranks} | {x['one device'] / 1e6:.1f} MB | "
            f"{x['a rank'] / 1e6:.1f} MB | {x['a rank'] / x['one device']:.2f} |"
            for x in found["memory"]
        ]
    return {"vaes": lines, "vae 16 bits": bits, "vae memory": peaks}


def merged(before: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """``before`` with the rows of ``found`` in place of those of the same autoencoders."""
    names = list(TINY_VAES)
    new = {row["name"] for row in found["rows"]}
    rows = [row for row in before["rows"] if row["name"] not in new] + found["rows"]
    return {**before, "rows": sorted(rows, key=lambda row: names.index(row["name"]))}


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
                "benchmarks.vae_table", ranks, "--out", str(path), *(["--only", *options.only] if options.only else [])
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
