"""The attention kernel's roofline on paper:  python -m benchmarks.attention_roofline

Compiles the table's rows, counts matrix products, bytes and exponentials of the inner loop in the PTX, and divides by what the devices'
datasheets promise. Beside it PyTorch's flash kernel with the tiles of its sources. Nothing of it is a measurement: it says which unit
is to be busy, not that it is. Writes benchmarks/results/attention_roofline.json and docs/attention_roofline.png.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.attention_compiled import (
    Counts,
    compile_attention,
    compile_hopper,
    loop_counts,
    loop_counts_of_roles,
)
from benchmarks.compiled import Compiled
from benchmarks.environment import write_results
from para_core.kernels.attention_configs import HOPPER, TABLE, Case, Config


@dataclass(frozen=True)
class Device:
    """Datasheet figures: NVIDIA A100 (SXM, 80 GB) and H200 (SXM), dense bfloat16.

    Args:
        exponentials: of a multiprocessor per clock (CUDA C++ Programming Guide, "Arithmetic Instructions").
        tile_of_flash: queries × keys of FlashAttention-2's forward for head dim 128 without a causal mask, 8.0 and 9.0 alike
            (flash_fwd_launch_template.h, run_mha_fwd_hdim128).
    """

    name: str
    arch: int
    tflops: float
    terabytes: float
    multiprocessors: int
    gigahertz: float
    exponentials: int = 16
    tile_of_flash: tuple[int, int] = (128, 64)


# Of 9.0 alone, and of the head dims that it takes.
HOPPER_TIER = "triton, Hopper tier"
DEVICES = (Device("A100", 80, 312.0, 2.04, 108, 1.41), Device("H200", 90, 989.0, 4.8, 132, 1.83))


def on_paper(device: Device, counts: Counts, tile: tuple[int, int], tokens: int, head_dim: int) -> dict[str, float]:
    """Shares of the matrix units' time that the other units need, at full speed, for a long sequence of one head.

    The matrix units are the limit where all are below 1 and overlap.
    """
    block_m, block_n = tile
    programs, tiles = tokens / block_m, tokens / block_n
    matrix = programs * tiles * counts.flops / (device.tflops * 1e12)
    exponentials = programs * tiles * counts.exponentials
    special = exponentials / (device.multiprocessors * device.exponentials * device.gigahertz * 1e9)
    # Query and out beside keys and values: if no load hits L2, and if each byte is loaded from memory once.
    once = 4 * tokens * head_dim * 2
    without_cache = programs * tiles * counts.bytes + once / 2
    return {
        "flops per byte, no cache": round(programs * tiles * counts.flops / without_cache, 1),
        "flops per byte, each loaded once": round(programs * tiles * counts.flops / once, 1),
        "ridge, flops per byte": round(device.tflops / device.terabytes, 1),
        "exponentials / matrix": round(special / matrix, 3),
        "memory, no cache / matrix": round(without_cache / (device.terabytes * 1e12) / matrix, 3),
    }


def rows(tokens: int = 16384, head_dims: Sequence[int] = (64, 96, 128, 256)) -> list[dict[str, Any]]:
    """Of each device and head dim the table's row for long sequences, the Hopper tier's candidates, and PyTorch's flash for head dim 128."""
    found = []
    for device in DEVICES:
        for head_dim in head_dims:
            config = TABLE[Case(device.arch, head_dim, False, "long")]
            compiled = compile_attention(config, arch=device.arch, head_dim=head_dim)
            counts = loop_counts(compiled, config.num_warps)
            found.append(_row("triton", device, head_dim, config, compiled, counts, tokens))
            for config in HOPPER.get(head_dim, ()) if device.arch == 90 else ():
                name = HOPPER_TIER + ", warps with roles" * config.specialized
                compiled = compile_hopper(config, head_dim=head_dim)
                counts = (
                    loop_counts_of_roles(compiled) if config.specialized else loop_counts(compiled, config.num_warps)
                )
                found.append(_row(name, device, head_dim, config, compiled, counts, tokens))
            if head_dim == 128:
                m, n = tile = device.tile_of_flash
                counts = Counts(4 * m * n * head_dim, 4 * n * head_dim, m * n)
                row = {"kernel": "PyTorch's flash, by its tile", "device": device.name, "D": head_dim, "tile": tile}
                found.append({**row, **asdict(counts), **on_paper(device, counts, tile, tokens, head_dim)})
    return found


def _row(
    name: str, device: Device, head_dim: int, config: Config, compiled: Compiled, counts: Counts, tokens: int
) -> dict[str, Any]:
    tile = (config.block_m, config.block_n)
    row = {"kernel": name, "device": device.name, "D": head_dim, "tile": tile, "registers": compiled.registers}
    row |= {"spilled bytes": compiled.spills, "shared": compiled.shared, **asdict(counts)}
    return {**row, **on_paper(device, counts, tile, tokens, head_dim)}


def plot(found: Sequence[dict[str, Any]], path: Path) -> None:
    """The roof of each device and where kernels stand under it; beside it what each kernel asks of the units other than the matrix ones."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (roofs, shares) = plt.subplots(1, 2, figsize=(11, 4.2), width_ratios=(1, 1.1))
    for number, device in enumerate(DEVICES):
        x = [16.0, device.tflops / device.terabytes, 16384.0]
        roofs.plot(x, [min(device.tflops, device.terabytes * one) for one in x], color=f"C{number}", label=device.name)
        for name, mark in (("flops per byte, no cache", "o"), ("flops per byte, each loaded once", "s")):
            # Tiles of as many queries need as many bytes, whichever kernel has them.
            for intensity in sorted({row[name] for row in found if row["device"] == device.name}):
                y = min(device.tflops, device.terabytes * intensity)
                roofs.plot(intensity, y, mark, color=f"C{number}", fillstyle="none")
    roofs.set(xscale="log", yscale="log", xlabel="flops per byte of memory", ylabel="TFLOP/s, at most")
    title = "o: if no load hits L2   □: if each byte is loaded once"
    roofs.legend(fontsize=7, title=title, title_fontsize=7, loc="lower right")

    names = [f"{row['device']} D={row['D']} {row['kernel']}" for row in found]
    for offset, name in ((-0.2, "exponentials / matrix"), (0.2, "memory, no cache / matrix")):
        shares.barh([place + offset for place in range(len(found))], [row[name] for row in found], 0.38, label=name)
    shares.axvline(1.0, color="black", linewidth=0.8)
    shares.set_yticks(range(len(found)), names, fontsize=6.5)
    shares.invert_yaxis()
    shares.set(xlabel="time that it needs, as a share of the matrix units'")
    shares.legend(fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def table(found: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
    """As Markdown."""
    lines = ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
    for row in found:
        cells = [" × ".join(map(str, x)) if isinstance(x, tuple | list) else str(x) for x in map(row.get, names)]
        lines.append("| " + " | ".join(cells).replace("None", "–") + " |")
    return "\n".join(lines)


COMPILED = ["device", "kernel", "D", "tile", "registers", "spilled bytes", "shared"]


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    found = rows()
    write_results("attention_roofline", {"rows": found}, "triton")
    plot(found, Path("docs/attention_roofline.png"))
    print(table(found, [*COMPILED, *list(found[0])[-5:]]))


if __name__ == "__main__":
    main()
