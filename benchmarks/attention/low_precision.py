"""Errors of attention in low precision:  python -m benchmarks.attention.low_precision

- int8_attention.json (docs/kernels.md): ``backend="triton-int8"`` by its reference in plain PyTorch on the CPU, and
  exact attention in bfloat16, both against float64: 8 heads of 1,024 tokens, head dims 64 and 128.
- eight_bits.json (docs/own_model.md): ``comm_dtype=torch.int8`` and ``torch.float8_e4m3fn``: one call of 1,024 tokens,
  8 heads of 64, in bfloat16 on two ranks: bytes that rank 0 sends, and the error against float32 on one device.

Inputs are normal. "Outlier channel": one channel of the keys is larger by 20 (for ``comm_dtype``: 20 times as large) in
all tokens. "Outlier token": one key is 20 times as large. "Peaked": queries are four times as large, so that few keys
have all the weight. Measures no speed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from benchmarks.harness import (
    TrafficCounter,
    markdown_table,
    measure_on_ranks,
    parser_of,
    read_results,
    relative_error,
    write_results,
)
from para_core import UnifiedAttnMode
from para_core.kernels import attention_int8_reference, attention_reference

HEADS, TOKENS = 8, 1024
DATA = ("normal", "outlier channel", "outlier token", "peaked")
OUTLIER = 20.0
PEAKED = 4.0
SHAPE = (1, HEADS, TOKENS, 64)
MESHES = {"ring": (2, 1), "Ulysses": (1, 2)}
SENT = {"bfloat16": None, "int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn}


# -- Attention with q·k in 8 bits.


def inputs(data: str, head_dim: int) -> list[Tensor]:
    """Return query, key and value in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, HEADS, TOKENS, head_dim, generator=generator) for _ in range(3))
    if data == "outlier channel":
        key[..., 3] += OUTLIER
    elif data == "outlier token":
        key[:, :, 17] *= OUTLIER
    elif data == "peaked":
        query *= PEAKED
    return [x.bfloat16() for x in (query, key, value)]


def errors(output: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Return the measures of arXiv:2410.02367, and the largest error of lse."""
    out, truth = output[0].double(), exact[0]
    return {
        "cosine": round(torch.cosine_similarity(out.flatten(), truth.flatten(), dim=0).item(), 6),
        "relative L1": round(((out - truth).abs().sum() / truth.abs().sum()).item(), 5),
        "RMSE": round((out - truth).square().mean().sqrt().item(), 6),
        "lse, at most": round((output[1].double() - exact[1]).abs().max().item(), 5),
    }


def rows() -> list[dict[str, Any]]:
    """Return a row per kind of data: exact attention in bfloat16, 8 bits, and 8 bits without smoothing of keys."""
    rows_of_errors = []
    for head_dim in (64, 128):
        for data in DATA:
            query, key, value = inputs(data, head_dim)
            exact = attention_reference.attention(query.double(), key.double(), value.double())
            results = {
                "exact, bfloat16": attention_reference.attention(query, key, value),
                "8 bits": attention_int8_reference.attention(query, key, value),
                "8 bits, not smoothed": attention_int8_reference.attention(query, key, value, smooth=False),
            }
            for name, result in results.items():
                rows_of_errors.append({"data": data, "D": head_dim, "attention": name, **errors(result, exact)})
    return rows_of_errors


# -- 8 bits between ranks.


def attend(qkv: list[Tensor], mesh: tuple[int, int], comm_dtype: torch.dtype | None) -> tuple[Tensor, int]:
    """Return the whole result, and the bytes that this rank sent to another."""
    device_mesh = init_device_mesh("cpu", mesh, mesh_dim_names=("ring", "ulysses"))
    with torch.no_grad(), UnifiedAttnMode(device_mesh, comm_dtype=comm_dtype, assume_equal=True) as cp:
        parts = [cp.shard(x, dim=2) for x in qkv]
        with TrafficCounter() as traffic:
            out = F.scaled_dot_product_attention(*parts)
        return cp.gather(out, dim=2), traffic.bytes


def measure_sent() -> list[dict[str, Any]]:
    """Return a row per kind of input and mesh."""
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
                row[label] = {"bytes": sent, "error": relative_error(out, exact)}
            rows.append(row)
    return rows


# -- Tables.

# The page shows this head dim and this measure of the JSON.
SHOWN_DIM, SHOWN_ERROR = 128, "relative L1"


def parts() -> dict[str, list[str]]:
    """Return the tables of docs/kernels.md (``int8``) and docs/own_model.md (``eight_bits``)."""
    heads = ["input", "mesh", *(f"error, {name}" for name in SENT)]
    sent = [
        [row["input"], row["mesh"], *(f"{100 * row[name]['error']:.1f} %" for name in SENT)]
        for row in read_results("eight_bits")["rows"]
    ]
    attention = [row for row in read_results("int8_attention")["rows"] if row["D"] == SHOWN_DIM]
    ways = list(dict.fromkeys(row["attention"] for row in attention))
    errors = [
        [
            data,
            *(row[SHOWN_ERROR] for way in ways for row in attention if (row["data"], row["attention"]) == (data, way)),
        ]
        for data in DATA
    ]
    return {
        "int8": markdown_table([f"data ({SHOWN_ERROR})", *ways], errors),
        "eight_bits": markdown_table(heads, sent),
    }


def main() -> None:
    """Measure both and write them."""
    parser_of(__doc__).parse_args()
    print(write_results("int8_attention", {"tokens": TOKENS, "heads": HEADS, "rows": rows()}))
    print(write_results("eight_bits", {"shape": SHAPE, "rows": measure_on_ranks(measure_sent, 2)}))


if __name__ == "__main__":
    main()
