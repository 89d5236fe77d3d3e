"""Wan's decode of 81 frames of 1280 × 720 on 1 to 16 devices, on paper: from counted operations, bytes and collectives.

    python -m benchmarks.vae_scaling

What one decode calls is counted on the meta device; what a rank sends follows from the sizes (tests/spatial/test_traffic.py counts that it is
so). Seconds of one device are those that TensorRT-LLM publishes for one GB200; link and latency are assumed. What the host takes for as
many calls is measured here, with small tensors on a fake group, in seconds of its CPU. Writes benchmarks/results/vae_scaling.json and the
table of docs/vae.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan
from torch import Tensor
from torch.overrides import TorchFunctionMode

from benchmarks.environment import write_results
from benchmarks.launches import fake_group
from benchmarks.page_parts import fill
from para_core.adapters import parallelize_vae

PAGE = Path(__file__).parents[1] / "docs/vae.md"
LATENTS = (1, 16, 21, 90, 160)
# Seconds by number of GB200, with its own sharding of rows.
PUBLISHED = {1: 2.72, 2: 1.72, 4: 1.04, 8: 0.83, 16: 0.85}
# Assumed: bytes per second from one device to all others together; seconds until an exchange of little has arrived.
LINK, LATENCY = 900e9, 25e-6
BYTES = 2  # bfloat16


@dataclass
class Count:
    """Of one decode: operations, what a rank between two others sends for windows, keys and values of all, collectives."""

    operations: float = 0.0
    windows: float = 0.0
    keys: float = 0.0
    collectives: int = 0
    functions: int = 0
    image: int = 0


class Counting(TorchFunctionMode):
    """Inside, convolutions and attention are counted; columns are what is sharded, for the image is wider than high."""

    def __init__(self) -> None:
        super().__init__()
        self.count = Count()

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name, count = getattr(func, "__name__", ""), self.count
        count.functions += 1
        if name in ("conv2d", "conv3d"):
            x, weight = args[:2]
            count.operations += 2.0 * out.numel() * weight[0].numel()
            if weight.shape[-1] > 1:
                count.collectives += 1
                count.windows += 2 * (weight.shape[-1] // 2) * x.numel() / x.shape[-1] * BYTES
        elif name == "scaled_dot_product_attention":
            query, key, value = args[:3]
            count.operations += 4.0 * query.numel() * key.shape[-2]
            count.collectives += 1
            count.keys += (key.numel() + value.numel()) * BYTES
        return out


@torch.no_grad()
def count() -> Count:
    with torch.device("meta"):
        vae: Any = AutoencoderKLWan().eval()
        z = torch.empty(LATENTS)
    with Counting() as counting:
        image: Tensor = vae.decode(z).sample
    counting.count.image = image.numel() * BYTES
    return counting.count


@torch.no_grad()
def host_seconds(ranks: int) -> float:
    """What this machine's CPU needs for the calls of one rank of ``ranks``: the least of three decodes of few channels and rows."""
    with fake_group(ranks):
        vae: Any = AutoencoderKLWan(base_dim=2, z_dim=16).eval()
        if ranks > 1:
            parallelize_vae(vae)
        z = torch.randn(*LATENTS[:3], 2, 2 * max(ranks, 2))
        taken = []
        for _ in range(3):
            start = time.process_time()
            vae.decode(z)
            taken.append(time.process_time() - start)
    return min(taken)


def on_paper(counted: Count, ranks: int, host: float) -> dict[str, Any]:
    """Seconds of the device with the most columns, and of its host; what is longer decides."""
    columns = LATENTS[-1]
    share = -(-columns // ranks) / columns
    sent = 0.0
    if ranks > 1:
        sent = counted.windows * (2 if ranks > 2 else 1) / 2 + counted.keys * (ranks - 1) / ranks
        sent += counted.image / ranks
    collectives = counted.collectives + 1 if ranks > 1 else 0
    device = PUBLISHED[1] * share + sent / LINK + collectives * LATENCY
    return {
        "ranks": ranks,
        "share": share,
        "operations": counted.operations * share,
        "bytes": round(sent),
        "collectives": collectives,
        "device seconds": device,
        "host seconds": host,
        "published": PUBLISHED[ranks],
    }


def table(rows: list[dict[str, Any]]) -> list[str]:
    heads = [
        "devices",
        "share",
        "TFLOP a rank",
        "MB a rank sends",
        "collectives",
        "device, s",
        "host, s",
        "TensorRT-LLM, s",
    ]
    lines = ["| " + " | ".join(cells) + " |" for cells in (heads, ["---"] * len(heads))]
    for row in rows:
        cells = [
            str(row["ranks"]),
            f"{row['share']:.3f}",
            f"{row['operations'] / 1e12:.1f}",
            f"{row['bytes'] / 1e6:,.0f}",
            f"{row['collectives']:,}",
            f"{row['device seconds']:.2f}",
            f"{row['host seconds']:.2f}",
            f"{row['published']:.2f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    torch.set_num_threads(1)
    counted = count()
    rows = [on_paper(counted, ranks, host_seconds(ranks)) for ranks in PUBLISHED]
    lines = table(rows)
    PAGE.write_text(fill(PAGE.read_text(), {"vae scaling": lines}))
    print("\n".join(lines))
    found = {"latents": LATENTS, "count": vars(counted), "link": LINK, "latency": LATENCY, "rows": rows}
    print(write_results("vae_scaling", found, "diffusers"))


if __name__ == "__main__":
    main()
