"""What `comm_dtype=torch.float8_e4m3fn` saves, and how far off attention then is.

    python -m benchmarks.eight_bits

One attention call of 1,024 tokens, 8 heads × 64, in bfloat16 on two ranks: bytes that rank 0 sends, and the error against
float32 on one device. Inputs are normal; with "peaked", queries are four times as large, so that few keys have all weight.
Prints a table and writes benchmarks/results/eight_bits.json.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from benchmarks.environment import write_results
from benchmarks.launch import launch
from benchmarks.traffic import TrafficCounter
from para_core import UnifiedAttnMode

RANKS = 2
SHAPE = (1, 8, 1024, 64)
MESHES = {"ring": (2, 1), "Ulysses": (1, 2)}
PEAKED = 4.0  # times larger queries


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
    for name, factor in {"normal": 1.0, "peaked": PEAKED}.items():
        query, key, value = (torch.randn(SHAPE, generator=generator) for _ in range(3))
        qkv = [x.to(torch.bfloat16) for x in (query * factor, key, value)]
        exact = F.scaled_dot_product_attention(*[x.float() for x in qkv])
        for mesh_name, mesh in MESHES.items():
            row: dict[str, Any] = {"input": name, "mesh": mesh_name}
            for label, comm_dtype in {"bfloat16": None, "float8_e4m3fn": torch.float8_e4m3fn}.items():
                out, sent = attend(qkv, mesh, comm_dtype)
                row[label] = {"bytes": sent, "error": ((out.float() - exact).norm() / exact.norm()).item()}
            rows.append(row)
    return rows


def main() -> None:
    """Run on this rank; rank 0 reports."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rows = measure()
    if dist.get_rank() == 0:
        print("input   mesh     bytes          of bfloat16   error     of bfloat16 on the way")
        for row in rows:
            eight, sixteen = row["float8_e4m3fn"], row["bfloat16"]
            print(
                f"{row['input']:7} {row['mesh']:8} {eight['bytes']:9,}      {eight['bytes'] / sixteen['bytes']:.3f}"
                f"         {eight['error']:.2e}  {sixteen['error']:.2e}"
            )
        write_results("eight_bits", {"shape": SHAPE, "rows": rows})
    dist.destroy_process_group()


if __name__ == "__main__":
    if dist.is_torchelastic_launched():
        main()
    else:
        launch("benchmarks.eight_bits", RANKS)
