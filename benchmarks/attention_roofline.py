"""The attention kernel's roofline on paper:  python -m benchmarks.attention_roofline

Compiles the table's rows, counts matrix products, bytes and exponentials of the inner loop in the PTX, and divides by what the devices'
datasheets promise. Beside it PyTorch's flash kernel with the tiles of its sources. Nothing of it is a measurement: it says which unit
is to be busy, not that it is. Writes benchmarks/results/attention_roofline.json, docs/attention_roofline.png and docs/attention_kernel.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.attention.compile_kernel import SHARED_LIMIT, Compiled
from benchmarks.attention_compiled import (
    SHARED_OF_SM,
    Counts,
    compile_attention,
    compile_hopper,
    loop_counts,
    loop_counts_of_roles,
)
from benchmarks.environment import write_results
from benchmarks.page_parts import fill
from para_core.kernels.attention_configs import HOPPER, TABLE, Case, Config

PAGE = Path(__file__).parents[1] / "docs" / "attention_kernel.md"


@dataclass(frozen=True)
class Device:
    """What a document of its maker promises of dense bfloat16 with sums in float32.

    Args:
        gigahertz: where the document names none, as of H200 and B200, that at which the matrix units of all multiprocessors (4,096 and 8,192
            operations of one in a clock, as in arXiv:2407.08608 and FlashAttention-4) make its TFLOP/s.
        exponentials: of a multiprocessor per clock (CUDA C++ Programming Guide, "Arithmetic Instructions").
        source: the document.
    """

    name: str
    arch: int
    tflops: float
    terabytes: float
    multiprocessors: int
    gigahertz: float
    source: str
    exponentials: int = 16


# Of 9.0 alone, and of the head dims that it takes.
HOPPER_TIER = "triton, Hopper tier"
FLASH = "PyTorch's flash, by its tile"
AMPERE = "NVIDIA Ampere GA102 GPU Architecture, V2.0, appendix A"
ADA = "NVIDIA Ada GPU Architecture, V2.01, appendix A"
DEVICES = (
    Device("A100", 80, 312.0, 2.04, 108, 1.41, "NVIDIA A100 Tensor Core GPU, datasheet; SXM, 80 GB"),
    Device("H200", 90, 989.0, 4.8, 132, 1.83, "NVIDIA H200 Tensor Core GPU, datasheet; SXM"),
    Device("RTX 3090", 86, 71.0, 0.936, 82, 1.695, AMPERE),
    Device("RTX 4090", 89, 165.2, 1.008, 128, 2.52, ADA),
    Device("B200", 100, 2250.0, 8.0, 148, 1.86, "NVIDIA DGX B200, datasheet; an eighth of it"),
)
# Those of the first table of the page; the others are in the second.
MEANT = ("A100", "H200")


def tile_of_flash(arch: int, head_dim: int) -> tuple[int, int]:
    """Queries × keys of a program of FlashAttention-2's forward, which PyTorch's flash is; no causal mask, no dropout.

    ``csrc/flash_attn/src/flash_fwd_launch_template.h``, ``run_mha_fwd_hdim64`` to ``run_mha_fwd_hdim256``.
    """
    if head_dim == 256:
        # 128 queries where a program's 128 KiB have room and two programs of 64 queries, 96 KiB each, have none.
        large = SHARED_LIMIT[arch] >= 2 * 256 * (128 + 2 * 64) and SHARED_OF_SM[arch] < 4 * 256 * (64 + 2 * 64)
        return (128, 64) if large else (64, 64)
    return {64: (128, 128), 96: (128, 64), 128: (128, 32) if arch in (86, 89) else (128, 64)}[head_dim]


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
        "exponentials / matrix": round(special / matrix, 3),
        "memory, no cache / matrix": round(without_cache / (device.terabytes * 1e12) / matrix, 3),
    }


def rows(tokens: int = 16384, head_dims: Sequence[int] = (64, 96, 128, 256)) -> list[dict[str, Any]]:
    """Of each device and head dim the table's row for long sequences, the Hopper tier's candidates, and PyTorch's flash."""
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
            m, n = tile = tile_of_flash(device.arch, head_dim)
            counts = Counts(4 * m * n * head_dim, 4 * n * head_dim, m * n)
            row = {"kernel": FLASH, "device": device.name, "D": head_dim, "tile": tile}
            # kernel_traits.h, kSmemSize: queries, and one tile of keys and values.
            row["shared"] = 2 * head_dim * (m + 2 * n)
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

    figure, (roofs, shares) = plt.subplots(1, 2, figsize=(11, 5.6), width_ratios=(1, 1.1))
    ours = [row for row in found if row["kernel"] == "triton"]
    for number, device in enumerate(DEVICES):
        x = [16.0, device.tflops / device.terabytes, 16384.0]
        roofs.plot(x, [min(device.tflops, device.terabytes * one) for one in x], color=f"C{number}", label=device.name)
        for name, mark in (("flops per byte, no cache", "o"), ("flops per byte, each loaded once", "s")):
            # Tiles of as many queries need as many bytes, whatever the head dim.
            for intensity in sorted({row[name] for row in ours if row["device"] == device.name}):
                y = min(device.tflops, device.terabytes * intensity)
                roofs.plot(intensity, y, mark, color=f"C{number}", fillstyle="none")
    roofs.set(xscale="log", yscale="log", xlabel="flops per byte of memory", ylabel="TFLOP/s, at most")
    title = "triton   o: if no load hits L2   □: if each byte is loaded once"
    roofs.legend(fontsize=7, title=title, title_fontsize=7, loc="lower right")

    flash = {(row["device"], row["D"]): row for row in found if row["kernel"] == FLASH}
    for offset, name, color in ((-0.2, "exponentials / matrix", "C0"), (0.2, "memory, no cache / matrix", "C1")):
        places = [place + offset for place in range(len(ours))]
        shares.barh(places, [row[name] for row in ours], 0.38, color=color, label=name)
        beside = [flash[row["device"], row["D"]][name] for row in ours]
        shares.plot(beside, places, "|", color="black", markersize=6, label=FLASH if offset > 0 else None)
    shares.axvline(1.0, color="grey", linewidth=0.8)
    shares.set_yticks(range(len(ours)), [f"{row['device']}, D = {row['D']}" for row in ours], fontsize=7)
    shares.invert_yaxis()
    shares.set(xlabel="time that it needs, as a share of the matrix units'")
    shares.legend(fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
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
SHARES = ["flops per byte, no cache", "exponentials / matrix", "memory, no cache / matrix"]


def page(text: str, found: Sequence[dict[str, Any]]) -> str:
    """docs/attention_kernel.md with its tables written anew."""
    meant = [row for row in found if row["device"] in MEANT]
    others = [row for row in found if row["device"] not in MEANT]
    columns = [*COMPILED, *SHARES]
    parts = {
        "datasheets": datasheets(),
        "roofline": table(meant, columns),
        "roofline of others": table(others, columns),
    }
    return fill(text, {name: part.split("\n") for name, part in parts.items()})


def datasheets() -> str:
    rows = [
        {
            "device": device.name,
            "compute capability": device.arch / 10,
            "TFLOP/s": device.tflops,
            "TB/s": device.terabytes,
            "ridge, flops per byte": round(device.tflops / device.terabytes, 1),
            "multiprocessors": device.multiprocessors,
            "GHz": device.gigahertz,
            "document": device.source,
        }
        for device in DEVICES
    ]
    return table(rows, list(rows[0]))


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    found = rows()
    write_results("attention_roofline", {"rows": found}, "triton")
    plot(found, Path("docs/attention_roofline.png"))
    print(table(found, [*COMPILED, *SHARES]))
    PAGE.write_text(page(PAGE.read_text(), found))


if __name__ == "__main__":
    main()
