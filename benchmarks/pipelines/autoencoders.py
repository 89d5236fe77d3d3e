"""Autoencoders on several ranks: error, bfloat16, and memory.

A check of `benchmarks.pipelines.exactness`. Weights are random, and each model is as small as its class can be.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import PeakMemory, largest_over_ranks, markdown_table, read_results, relative_error
from para_core.adapters import parallelize_vae, unparallelize_vae
from para_core.adapters.vae.families import REFUSED_VAES, VAES, rows_per_latent
from zoo.tiny.vaes import BY_TILES, NO_TILES_ENCODED, NOT_TILED, TINY_VAES, TinyVae, random_image

# Memory is measured for an image with this many rows of pixels and half as many columns. Halo rows are then a small
# part.
HEIGHT = 256
# Published VAEs attend at an eighth of the resolution. The tiny ones attend at a half, where attention would need the
# most memory.
_FOUR_LEVELS = {"down_block_types": ("DownEncoderBlock2D",) * 4, "block_out_channels": (8, 8, 16, 16)}
_MORE_CHANNELS = {"block_out_channels": (16, 32, 64, 64), "decoder_block_out_channels": (64, 128, 256)}
MORE_LEVELS: Mapping[str, Mapping[str, Any]] = {
    "KL": {**_FOUR_LEVELS, "up_block_types": ("UpDecoderBlock2D",) * 4},
    "Flux2": {**_FOUR_LEVELS, "up_block_types": ("UpDecoderBlock2D",) * 4},
    "TemporalDecoder": {**_FOUR_LEVELS, "block_out_channels": (32,) * 4},
    "HunyuanImage": {"block_out_channels": (32, 32, 64, 64), "spatial_compression_ratio": 8},
    # With the few channels of the tiny VAEs, the image itself, which one rank gets, would need the most memory.
    "LTXVideo": {"block_out_channels": (64, 64, 128, 128), "decoder_block_out_channels": (64, 64, 128, 128)},
    "LTXVideo 0.9.5": _MORE_CHANNELS,
    "LTX2Video": _MORE_CHANNELS,
}


@torch.no_grad()
def of_this_rank(name: str, tiny: TinyVae) -> list[dict[str, Any]]:
    """Return one row for each method and way, with the largest error of any rank."""
    rows = []
    for method in ("exact", "tiled"):
        adapter = VAES[tiny.cls]
        if method == "tiled" and (name in NOT_TILED or not (adapter.tiled and adapter.distributes_tiles)):
            continue
        if method == "exact" and name in BY_TILES:
            continue
        vae: Any = tiny.make_tiled() if method == "tiled" else tiny.make()
        for way, shape in (("decode", tiny.latents), ("encode", tiny.pixels)):
            if method == "tiled" and way == "encode" and name in NO_TILES_ENCODED:
                continue
            run = getattr(tiny, way)
            errors = []
            for wide in (False, True) if len(shape) > 3 else (False,):
                x = random_image(shape, wide=wide)
                expected = run(vae, x)
                parallelize_vae(vae, method=method)
                errors.append(relative_error(run(vae, x), expected))
                unparallelize_vae(vae)
            row = {"name": name, "class": tiny.cls, "method": method, "way": way}
            rows.append({**row, "error": largest_over_ranks(max(errors))})
    return rows


@torch.no_grad()
def in_16_bits(name: str, tiny: TinyVae) -> list[dict[str, Any]]:
    """Return the errors of bfloat16 relative to float32, on one device and on the ranks."""
    rows = []
    for way, shape in (("decode", tiny.latents), ("encode", tiny.pixels)):
        if name in BY_TILES:  # The results have equal bits.
            continue
        x, run = random_image(shape), getattr(tiny, way)
        exact = run(tiny.make(), x)
        vae = tiny.make().bfloat16()
        try:
            alone = relative_error(run(vae, x.bfloat16()), exact)
        except NotImplementedError:  # CPUs pool no volumes of bfloat16.
            continue
        parallelize_vae(vae)
        parallel = relative_error(run(vae, x.bfloat16()), exact)
        rows.append({"name": name, "way": way, "alone": alone, "parallel": largest_over_ranks(parallel)})
    return rows


@torch.no_grad()
def memory(name: str, tiny: TinyVae) -> list[dict[str, Any]]:
    """Return the largest bytes of activations of any rank, next to those of one device. The result stays with the first
    rank.
    """
    options = MORE_LEVELS.get(name, {})
    rows = []
    for way, shape in large(tiny, options).items():
        x, run = random_image(shape), getattr(tiny, way)
        peaks = []
        for parallel in (False, True) if dist.get_rank() == 0 else (True,):
            vae: Any = tiny.make(**options)
            if parallel:
                parallelize_vae(vae, method="tiled" if name in BY_TILES else "exact", gather="first")
            with PeakMemory() as of_run:
                run(vae, x)
            peaks.append(of_run.peak)
        row = {"name": name, "way": way, "shape": list(shape), "one device": peaks[0]}
        rows.append({**row, "a rank": int(largest_over_ranks(peaks[-1]))})
    return rows


def large(tiny: TinyVae, options: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return shapes of latents and pixels of which an edge row is a small part."""
    if len(tiny.latents) == 3:  # The latents are those of a waveform.
        return {
            way: (*shape[:-1], 64 * shape[-1]) for way, shape in (("decode", tiny.latents), ("encode", tiny.pixels))
        }
    ratio = rows_per_latent(tiny.make(**options))
    size = HEIGHT // ratio, HEIGHT // 2 // ratio
    return {"decode": (*tiny.latents[:-2], *size), "encode": (*tiny.pixels[:-2], size[0] * ratio, size[1] * ratio)}


def measure(names: list[str]) -> dict[str, dict[str, list[Any]]]:
    """Return the rows of autoencoders on as many ranks as there are."""
    measures = {"rows": of_this_rank, "16 bits": in_16_bits, "memory": memory}
    return {name: {part: of(name, TINY_VAES[name]) for part, of in measures.items()} for name in names}


WAYS = ("decode", "encode")


def parts() -> dict[str, list[str]]:
    """Return the parts of docs/vae.md. The JSON has the cell of each way and number of ranks."""
    by_ranks = read_results("vae_table")["by ranks"]
    last = max(by_ranks)
    errors: dict[tuple[str, str], dict[str, float]] = {}
    for (name, cls, method, way), of_ranks in _rows(by_ranks, "rows", "name", "class", "method", "way"):
        errors.setdefault((name, cls), {})[f"{method}, {way}"] = max(row["error"] for row in of_ranks)
    peaks = {
        (name, way): of_ranks[-1]["a rank"] / of_ranks[-1]["one device"]
        for (name, way), of_ranks in _rows(by_ranks, "memory", "name", "way")
    }
    rows, classes = [], [cls for _, cls in errors]
    for (name, cls), of_methods in errors.items():
        exact = [f"{of_methods[f'exact, {way}']:.0e}" for way in WAYS if f"exact, {way}" in of_methods]
        tiled = [way for way in WAYS if f"tiled, {way}" in of_methods]
        if any(of_methods[f"tiled, {way}"] for way in tiled):
            raise ValueError(f"{name} by tiles is not bit-equal: {of_methods}.")
        shares = (f"{peaks[name, way]:.2f}" for way in WAYS)
        rows.append([cls if classes.count(cls) == 1 else f"{cls} ({name})", *map(", ".join, (exact, tiled, shares))])
    ratios = [
        row["parallel"] / row["alone"] for _, of_ranks in _rows(by_ranks, "16 bits", "name", "way") for row in of_ranks
    ]
    bits = (
        f"In bfloat16 the errors on 2, 3 and 4 ranks are {min(ratios):.2f} to {max(ratios):.2f} times those of one "
        "device in bfloat16, both against float32."
    )
    ways = ", ".join(WAYS)
    heads = ["class", f"`exact`: {ways}", "`tiled`, bit-equal", f"memory, {last} ranks: {ways}"]
    return {
        "vaes": markdown_table(heads, rows),
        "vae 16 bits": [bits],
        "vaes refused": [f"- `{name}`: {reason}." for name, reason in REFUSED_VAES.items()],
    }


def _rows(by_ranks: dict[str, Any], part: str, *keys: str) -> list[tuple[list[str], list[dict[str, Any]]]]:
    """Return the rows of ``part`` with the same ``keys``, in the order of the numbers of ranks."""
    rows: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for names in by_ranks.values():
        for row in (row for name in names.values() for row in name[part]):
            rows.setdefault(tuple(row[key] for key in keys), []).append(row)
    return [([*key], of_ranks) for key, of_ranks in rows.items()]
