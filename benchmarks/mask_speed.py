"""What masks and replicated segments cost on two ranks, against the same on one and against none.

    python -m benchmarks.mask_speed

One attention call of 4,096 tokens, 8 heads × 64, one thread per rank: SDPA on rank 0 alone, then both ranks as a ring and with
Ulysses, in turns. Prints a table of medians and writes benchmarks/results/mask_speed.json.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from benchmarks.environment import write_results
from benchmarks.launch import launch
from para_core import Segment, SequenceLayout, UnifiedAttnMode

RANKS = 2
TOKENS, TEXT, HEADS, HEAD_DIM = 4096, 512, 8, 64


@dataclass(frozen=True)
class Input:
    """A mask for all tokens, SDPA's options, and whether the first tokens are replicated."""

    mask: Tensor | None = None
    is_causal: bool = False
    text: bool = False
    balanced: bool = False

    def layout(self) -> SequenceLayout:
        """Who holds which tokens."""
        image = TOKENS - TEXT if self.text else TOKENS
        text = (Segment("text", TEXT, replicated=True),) if self.text else ()
        return SequenceLayout((*text, Segment("image", image, balanced=self.balanced)), RANKS)


def inputs() -> dict[str, Input]:
    """The table's rows."""
    padding = torch.ones(1, 1, 1, TOKENS, dtype=torch.bool)
    padding[..., -TEXT:] = False
    return {
        "no mask": Input(),
        "key padding [1, 1, 1, S]": Input(padding),
        "bool mask [S, S]": Input(torch.rand(TOKENS, TOKENS, generator=torch.Generator().manual_seed(0)) < 0.9),
        "is_causal": Input(is_causal=True),
        "is_causal, balanced cut": Input(is_causal=True, balanced=True),
        "512 tokens replicated": Input(text=True),
    }


def seconds(call: Callable[[], Any]) -> float:
    """Of one call that all ranks start together; the slowest rank counts."""
    dist.barrier()
    start = time.perf_counter()
    call()
    spent = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(spent, op=dist.ReduceOp.MAX)
    return spent.item()


def measure(rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of each input, each way, in each round."""
    generator = torch.Generator().manual_seed(1)
    whole = [torch.randn(1, HEADS, TOKENS, HEAD_DIM, generator=generator) for _ in range(3)]
    shapes = {"ring": (RANKS, 1), "ulysses": (1, RANKS)}
    meshes = {
        name: init_device_mesh("cpu", shape, mesh_dim_names=("ring", "ulysses")) for name, shape in shapes.items()
    }
    cases = inputs()
    found: dict[str, dict[str, list[float]]] = {name: {way: [] for way in ("1 rank", *meshes)} for name in cases}
    for turn in range(rounds + 1):
        for name, case in cases.items():
            times = {"1 rank": seconds(lambda case=case: _alone(whole, case))}
            for way, mesh in meshes.items():
                layout = case.layout()
                with UnifiedAttnMode(mesh, layout=layout, assume_equal=True) as cp:
                    parts = [cp.shard(x, dim=2, sequence=layout) for x in whole]
                    times[way] = seconds(lambda case=case, parts=parts: _attend(parts, case))
            if turn:  # the first one warms up
                for way, spent in times.items():
                    found[name][way].append(spent)
    return found


def _alone(whole: list[Tensor], case: Input) -> None:
    if dist.get_rank() == 0:
        _attend(whole, case)


def _attend(qkv: list[Tensor], case: Input) -> Tensor:
    return F.scaled_dot_product_attention(*qkv, case.mask, is_causal=case.is_causal)


def table(found: dict[str, dict[str, list[float]]]) -> list[dict[str, Any]]:
    """Medians: milliseconds, speed-up over one rank, and time relative to no mask."""
    rows = []
    for name, ways in found.items():
        row: dict[str, Any] = {"input": name}
        for way, spent in ways.items():
            plain = found["no mask"][way]
            row[way] = {
                "ms": round(1e3 * statistics.median(spent), 1),
                "against no mask": _ratio(spent, plain),
                **({} if way == "1 rank" else {"speed-up": _ratio(ways["1 rank"], spent)}),
            }
        rows.append(row)
    return rows


def _ratio(above: list[float], below: list[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(above, below, strict=True)), 2)


def main() -> None:
    """Start the ranks, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rank-process", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.rank_process:
        launch("benchmarks.mask_speed", RANKS, "--rank-process", "--rounds", str(args.rounds))
        return
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with torch.no_grad():
        rows = table(measure(args.rounds))
    if dist.get_rank() == 0:
        for row in rows:
            print(row)
        print(write_results("mask_speed", {"ranks": RANKS, "tokens": TOKENS, "rounds": args.rounds, "rows": rows}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
