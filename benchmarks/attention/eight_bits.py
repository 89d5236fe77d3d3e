"""What `comm_dtype=torch.int8` and `torch.float8_e4m3fn` save, and how far off attention then is.

    python -m benchmarks.attention.eight_bits

One attention call of 1,024 tokens, 8 heads × 64, in bfloat16 on two ranks: bytes that rank 0 sends, and the error against
float32 on one device. Inputs are normal; "peaked": queries are four times as large, so that few keys have all weight;
"outlier channel": one of the keys' is 20 times as large. Prints the table of docs/own_model.md and writes
benchmarks/results/eight_bits.json.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from benchmarks.environment import write_results
from benchmarks.launch import launch
from benchmarks.page_parts import fill
from benchmarks.traffic import TrafficCounter
from para_core import UnifiedAttnMode

PAGE = Path(__file__).parents[2] / "docs" / "own_model.md"
RANKS = 2
SHAPE = (1, 8, 1024, 64)
MESHES = {"ring": (2, 1), "Ulysses": (1, 2)}
OUTLIER = 20.0  # times a channel of the keys
SENT = {"bfloat16": None, "int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn}


def attend(qkv: list[Tensor], mesh: tuple[int, int], comm_dtype: torch.dtype | None) -> tuple[Tensor, int]:
    """The whole result, and the bytes that this rank sent to another."""
    device_mesh = init_device_mesh("cpu", mesh, mesh_dim_names=("ring", "ulysses"))
    with torch.no_grad(), UnifiedAttnMode(device_mesh, comm_dtype=comm_dtype, assume_equal=True) as cp:
        parts = [cp.shard(x, dim=2) for x in qkv]
        with TrafficCounter() as traffic:
            out = F.scaled_dot_product_attention(*parts)
        return cp.gather(out, dim=2), traffic.bytes


def measure() -> list[dict[str, Any]]:
    """A row per kind of input and mesh."""
    rows = []
    generator = torch.Generator().manual_seed(0)
    outliers = torch.ones(SHAPE[3])
    outliers[3] = OUTLIER
    for name, of_query, of_key in (("normal", 1.0, 1.0), ("peaked", 4.0, 1.0), ("outlier channel", 1.0, outliers)):
        query, key, value = (torch.randn(SHAPE, generator=generator) for _ in range(3))
        qkv = [x.to(torch.bfloat16) for x in (query * of_query, key * of_key, value)]
        exact = F.scaled_dot_product_attention(*[x.float() for x in qkv])
        for mesh_name, mesh in MESHES.items():
            row: dict[str, Any] = {"input": name, "mesh": mesh_name}
            for label, comm_dtype in SENT.items():
                out, sent = attend(qkv, mesh, comm_dtype)
                row[label] = {"bytes": sent, "error": ((out.float() - exact).norm() / exact.norm()).item()}
            rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Errors, as Markdown."""
    lines = [
        "| input | mesh | " + " | ".join(f"error, {name}" for name in SENT) + " |",
        "| --- | --- |" + " --- |" * len(SENT),
    ]
    for row in rows:
        errors = " | ".join(f"{100 * row[name]['error']:.1f} %" for name in SENT)
        lines.append(f"| {row['input']} | {row['mesh']} | {errors} |")
    return lines


def main() -> None:
    """Run on this rank; rank 0 reports."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rows = measure()
    if dist.get_rank() == 0:
        write_results("eight_bits", {"shape": SHAPE, "rows": rows})
        PAGE.write_text(fill(PAGE.read_text(), {"eight_bits": table(rows)}))
        print("\n".join(table(rows)))
        print("bytes:", {name: rows[0][name]["bytes"] for name in SENT})
    dist.destroy_process_group()


if __name__ == "__main__":
    if dist.is_torchelastic_launched():
        main()
    else:
        launch("benchmarks.attention.eight_bits", RANKS)
