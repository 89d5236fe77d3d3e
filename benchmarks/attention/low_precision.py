"""How far attention with q·k in 8 bits (`backend="triton-int8"`) is off:  python -m benchmarks.attention.low_precision

Its reference in plain PyTorch on the CPU, which rounds as the kernel does, beside exact attention in bfloat16, both against float64: one head
of 1,024 tokens each of 8, head dims 64 and 128. Queries, keys and values are normal; an outlier channel is 20 further off in the keys of all
tokens; an outlier token is 20 times as large as the others; with "peaked", queries are four times as large. Says nothing of speed.
Writes benchmarks/results/int8_attention.json and the table of docs/attention_kernel.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.environment import write_results
from benchmarks.page_parts import fill
from para_core.kernels import attention_int8_reference, attention_reference

PAGE = Path(__file__).parents[2] / "docs" / "attention_kernel.md"
HEADS, TOKENS = 8, 1024
DATA = ("normal", "outlier channel", "outlier token", "peaked")
FAR = 20.0
PEAKED = 4.0  # times larger queries
COLUMNS = ("data", "D", "attention", "cosine", "relative L1", "RMSE", "lse, at most")


def inputs(data: str, head_dim: int) -> list[Tensor]:
    """query, key and value in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, HEADS, TOKENS, head_dim, generator=generator) for _ in range(3))
    if data == "outlier channel":
        key[..., 3] += FAR
    elif data == "outlier token":
        key[:, :, 17] *= FAR
    elif data == "peaked":
        query *= PEAKED
    return [x.bfloat16() for x in (query, key, value)]


def errors(found: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor]) -> dict[str, float]:
    """The measures of arXiv:2410.02367, and the largest error of lse."""
    out, truth = found[0].double(), exact[0]
    return {
        "cosine": round(torch.cosine_similarity(out.flatten(), truth.flatten(), dim=0).item(), 6),
        "relative L1": round(((out - truth).abs().sum() / truth.abs().sum()).item(), 5),
        "RMSE": round((out - truth).square().mean().sqrt().item(), 6),
        "lse, at most": round((found[1].double() - exact[1]).abs().max().item(), 5),
    }


def rows(head_dims: Sequence[int] = (64, 128)) -> list[dict[str, Any]]:
    """Each kind of data: exact attention in bfloat16, 8 bits, and 8 bits without smoothing of keys."""
    found = []
    for head_dim in head_dims:
        for data in DATA:
            query, key, value = inputs(data, head_dim)
            exact = attention_reference.attention(query.double(), key.double(), value.double())
            results = {
                "exact, bfloat16": attention_reference.attention(query, key, value),
                "8 bits": attention_int8_reference.attention(query, key, value),
                "8 bits, not smoothed": attention_int8_reference.attention(query, key, value, smooth=False),
            }
            for name, result in results.items():
                found.append({"data": data, "D": head_dim, "attention": name, **errors(result, exact)})
    return found


def table(found: Sequence[dict[str, Any]]) -> list[str]:
    """As Markdown."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)]
    return [*lines, *["| " + " | ".join(str(row[name]) for name in COLUMNS) + " |" for row in found]]


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    found = rows()
    print("\n".join(table(found)))
    print(write_results("int8_attention", {"tokens": TOKENS, "heads": HEADS, "rows": found}))
    PAGE.write_text(fill(PAGE.read_text(), {"int8": table(found)}))


if __name__ == "__main__":
    main()
