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

from benchmarks.attention_compiled import Counts, compile_attention, loop_counts
from benchmarks.environment import write_results
from para_core.kernels.attention_configs import TABLE, Case


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
    """Of each device and head dim the table's row for long sequences, and PyTorch's flash for head dim 128."""
    found = []
    for device in DEVICES:
        for head_dim in head_dims:
            config = TABLE[Case(device.arch, head_dim, False, "long")]
            compiled = compile_attention(config, arch=device.arch, head_dim=head_dim)
            counts = loop_counts(compiled, config.num_warps)
            tile = (config.block_m, config.block_n)
            row = {"device": device.name, "D": head_dim, "tile": tile, "registers": compiled.registers}
            row |= {"spilled bytes": compiled.spills, "shared": compiled.shared, **asdict(counts)}
            found.append({"kernel": "triton", **row, **on_paper(device, counts, tile, tokens, head_dim)})
            if head_dim == 128:
                m, n = device.tile_of_flash
                counts = Counts(4 * m * n * head_dim, 4 * n * head_dim, m * n)
                row = {"device": device.name, "D": head_dim, "tile": (m, n), **asdict(counts)}
                found.append(
                    {
                        "kernel": "PyTorch's flash, by its tile",
                        **row,
                        **on_paper(device, counts, (m, n), tokens, head_dim),
                    }
                )
    return found


def plot(found: Sequence[dict[str, Any]], path: Path) -> None:
    """TFLOP/s over flops per byte: the roof of each device, and where the kernels stand if no load hits L2."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.6))
    for number, device in enumerate(DEVICES):
        intensity = [2.0**power for power in range(4, 15)]
        roof = [min(device.tflops, device.terabytes * one) for one in intensity]
        axes.plot(intensity, roof, color=f"C{number}", label=f"{device.name}, datasheet")
        for row in found:
            if row["device"] == device.name:
                x = row["flops per byte, no cache"]
                axes.plot(
                    x,
                    min(device.tflops, device.terabytes * x),
                    "o" if row["kernel"] == "triton" else "x",
                    color=f"C{number}",
                )
                if row["kernel"] == "triton":
                    axes.annotate(f"{row['D']}", (x, min(device.tflops, device.terabytes * x) * 1.05), fontsize=7)
    axes.set(xscale="log", yscale="log", xlabel="flops per byte, if no load hits L2", ylabel="TFLOP/s, at most")
    axes.legend(fontsize=7, title="o: this kernel by head dim   x: PyTorch's flash", title_fontsize=7)
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
