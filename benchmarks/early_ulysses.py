"""Ulysses that starts early: q, k and v leave as each is computed, or together:  python -m benchmarks.early_ulysses

A block of FLUX's kind on two gloo ranks, one graph each: one all-to-all for all three, as para_core sends them; three that each wait; three that
begin as soon as their tensor is there, and are waited for before attention. Collectives keep program order by the same data dependency as
para_core's. Seconds that a rank waits for exchanges, and of a call, in turns. Then, on paper, what there is to hide between H100.
Prints tables, writes benchmarks/results/early_ulysses.json and its part of docs/how_it_works.md.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.environment import write_results
from benchmarks.launch import measured_on_ranks, write_part
from benchmarks.page_parts import fill
from para_core.adapters.planner.plan import workload
from para_core.collectives import define_collective, done
from para_core.planner.cost import Machine, Runtime, Shape, call_seconds, product_seconds, sending_slows
from para_core.planner.hardware import DEVICES, LINKS, Topology
from para_core.planner.traffic import AttentionCall, Product, bytes_of_attention

RANKS = 2
PAGE = Path(__file__).parents[1] / "docs/how_it_works.md"
# Tokens of all ranks, and the width of one.
SIZES = [(1024, 256), (2048, 512)]
HEAD_DIM = 64

# -- what travels: [ranks, B, H / ranks, S_local, D], the first dim by receiver


class _Waited:
    """Seconds that this rank waited for exchanges, and what is under way, in the order in which it began."""

    seconds = 0.0
    under_way: ClassVar[deque[tuple[Tensor, Any]]] = deque()


@contextmanager
def _waiting() -> Iterator[None]:
    start = time.perf_counter()
    yield
    _Waited.seconds += time.perf_counter() - start


def _exchange(x: Tensor, after: Tensor | None = None) -> tuple[Tensor, Tensor]:
    received = torch.empty_like(x)
    with _waiting():
        dist.all_to_all_single(received, x)
    return received, done(x)


def _begin(x: Tensor, after: Tensor | None = None) -> tuple[Tensor, Tensor]:
    # A copy of its own: of what an operator was given a graph may use the memory again as soon as the operator returns.
    sent = x.unflatten(1, (RANKS, -1)).movedim(1, 0).clone(memory_format=torch.contiguous_format)
    received = torch.empty_like(sent)
    with _waiting():
        _Waited.under_way.append((received, dist.all_to_all_single(received, sent, async_op=True)))
    return done(x), done(x)


def _finish(begun: Tensor, shape: list[int], after: Tensor | None = None) -> tuple[Tensor, Tensor]:
    received, work = _Waited.under_way.popleft()
    with _waiting():
        work.wait()
    return received, done(begun)


define_collective(
    "benchmark_exchange(Tensor x, Tensor? after=None) -> (Tensor, Tensor)",
    _exchange,
    lambda x, *_: (torch.empty_like(x), done(x)),
)
define_collective(
    "benchmark_begin(Tensor x, Tensor? after=None) -> (Tensor, Tensor)", _begin, lambda x, *_: (done(x), done(x))
)
define_collective(
    "benchmark_finish(Tensor begun, int[] shape, Tensor? after=None) -> (Tensor, Tensor)",
    _finish,
    lambda begun, shape, *_: (begun.new_empty(shape), done(begun)),
)
exchange = torch.ops.para_core.benchmark_exchange
begin = torch.ops.para_core.benchmark_begin
finish = torch.ops.para_core.benchmark_finish


def _packed(x: Tensor) -> Tensor:
    """``[B, H, S_local, D]`` by the rank that computes the heads."""
    return x.unflatten(1, (RANKS, -1)).movedim(1, 0).contiguous()


def _whole(received: Tensor) -> Tensor:
    """Of this rank's heads all tokens, ``[B, H / ranks, S, D]``."""
    return received.permute(1, 2, 0, 3, 4).flatten(2, 3)


Sent = Callable[[], Tensor]


def together(query: Sent, key: Sent, value: Sent) -> list[Tensor]:
    packed = torch.cat([_packed(x()) for x in (query, key, value)], dim=2)
    return [_whole(x) for x in exchange(packed)[0].chunk(3, dim=2)]


def one_by_one(query: Sent, key: Sent, value: Sent) -> list[Tensor]:
    return [_whole(exchange(_packed(x()))[0]) for x in (query, key, value)]


def early(query: Sent, key: Sent, value: Sent) -> list[Tensor]:
    # A value has neither norm nor positions, so it leaves first.
    begun = {}
    for name, make in (("value", value), ("query", query), ("key", key)):
        x = make()
        begun[name] = begin(x)[0]
        shape = [RANKS, x.shape[0], x.shape[1] // RANKS, *x.shape[2:]]
    arrived = {name: _whole(finish(token, shape)[0]) for name, token in begun.items()}
    return [arrived[name] for name in ("query", "key", "value")]


WAYS = {"together": together, "one by one": one_by_one, "early": early}

# -- a block


class Block(nn.Module):
    """Attention with norms of queries and keys and with rotary positions, then an MLP four times as wide."""

    def __init__(self, width: int, send: Callable[[Sent, Sent, Sent], list[Tensor]]) -> None:
        super().__init__()
        self.send = send
        self.norm_in, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(width, width) for _ in range(4))
        self.norm_q, self.norm_k = nn.RMSNorm(HEAD_DIM), nn.RMSNorm(HEAD_DIM)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``x``: ``[B, S_local, width]``."""
        normed = self.norm_in(x)

        def heads(layer: nn.Module) -> Tensor:
            return layer(normed).unflatten(2, (-1, HEAD_DIM)).transpose(1, 2)

        def rotated(layer: nn.Module, norm: nn.Module) -> Tensor:
            y = norm(heads(layer))
            first, second = y.chunk(2, dim=-1)
            return y * cos + torch.cat([-second, first], dim=-1) * sin

        query, key, value = self.send(
            lambda: rotated(self.to_q, self.norm_q), lambda: rotated(self.to_k, self.norm_k), lambda: heads(self.to_v)
        )
        out = F.scaled_dot_product_attention(query, key, value)
        back = exchange(out.unflatten(2, (RANKS, -1)).movedim(2, 0).contiguous())[0]
        x = x + self.to_out(back.movedim(0, 1).flatten(1, 2).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_mlp(x))


def measure(tokens: int, width: int, rounds: int) -> dict[str, Any]:
    """Median milliseconds of a call, and of waiting, by way; and how often waiting is shorter than together, in the same round."""
    rank, local = dist.get_rank(), tokens // RANKS
    torch.manual_seed(0)
    x, angles = torch.randn(1, tokens, width), torch.randn(tokens, HEAD_DIM)
    own = [y[rank * local : (rank + 1) * local] for y in (angles.cos(), angles.sin())]
    blocks: dict[str, Any] = {}
    for name, send in WAYS.items():
        torch.manual_seed(1)
        blocks[name] = torch.compile(Block(width, send).eval(), fullgraph=True, dynamic=False)
    part = x[:, rank * local : (rank + 1) * local].contiguous()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
    outs = {}
    with torch.no_grad():
        for number in range(rounds + 3):
            for name in WAYS if number % 2 else reversed(WAYS):
                dist.barrier()
                _Waited.seconds, start = 0.0, time.perf_counter()
                outs[name] = blocks[name](part, *own)
                took = time.perf_counter() - start
                if number >= 3:  # the first ones compile, and find memory
                    found[name].append((1e3 * took, 1e3 * _Waited.seconds))
    worst = max(float((out - outs["together"]).norm() / outs["together"].norm()) for out in outs.values())
    if worst > 1e-5:
        raise RuntimeError(f"the ways differ by {worst:.1e}.")
    beside = found["together"]
    rows = {}
    for name, times in found.items():
        ratios = [[a[i] / b[i] for a, b in zip(times, beside, strict=True)] for i in (0, 1)]
        rows[name] = {
            "ms": statistics.median(total for total, _ in times),
            "ms waited": statistics.median(waited for _, waited in times),
            "ratio": statistics.median(ratios[0]),
            "ratio waited": statistics.median(ratios[1]),
        }
    return {"tokens": tokens, "width": width, "order": _order(blocks["early"], part, own), "ways": rows}


def _order(block: Any, part: Tensor, own: list[Tensor]) -> list[str]:
    """What runs in the graph of the early way: products, and exchanges that begin and end."""
    with torch.no_grad(), torch.profiler.profile() as profiler:
        block(part, *own)
    names = {"aten::addmm": "product", "aten::mm": "product", "para_core::benchmark_begin": "begin"}
    names |= {"para_core::benchmark_finish": "finish", "para_core::benchmark_exchange": "exchange"}
    names |= {"mkl::_mkl_linear": "product", "mkldnn::_linear_pointwise": "product"}
    events = sorted(profiler.events(), key=lambda event: event.time_range.start)
    return [names[event.name] for event in events if event.name in names]


# -- on paper


def on_paper() -> list[dict[str, Any]]:
    """FLUX.1-dev, compiled, per step: milliseconds of the all-to-alls before attention, and what of it the next product could hide."""
    own = workload("FLUX.1-dev").calls[1].parts[0]
    calls = [x for x in own.events if isinstance(x, AttentionCall)]
    rows = []
    for name in ("nvlink4", "pcie5"):
        for ranks in (2, 4, 8):
            link, shape = LINKS[name], Shape(ulysses=ranks)
            machine = Machine(DEVICES["H100"], Topology(link, link, 8), runtime=Runtime(compiled=True))
            waited = hidden = latency = slower = 0.0
            for call in calls:
                sent = bytes_of_attention(call, 1, ranks, 0).to_heads
                width = call.heads * call.head_dim
                product, _ = product_seconds(Product(1, call.queries, width, width, 2), shape, machine)
                waited += link.seconds(sent, all_to_all=True)
                # The first two of three, each behind the product that makes the next one.
                behind = 2 * min(sent / 3 / (link.all_to_all or link.bandwidth), product)
                hidden, latency, slower = (
                    hidden + behind,
                    latency + 2 * link.latency,
                    slower + sending_slows(behind, machine),
                )
            step = call_seconds(own, shape, machine).total
            gained = hidden - latency - slower
            rows.append(
                {
                    "link": name,
                    "ranks": ranks,
                    "step, ms": 1e3 * step,
                    "waited, ms": 1e3 * waited,
                    "hidden, ms": 1e3 * hidden,
                    "two more latencies, ms": 1e3 * latency,
                    "slower products, ms": 1e3 * slower,
                    "gained": gained / step,
                }
            )
    return rows


def tables(measured: list[dict[str, Any]], paper: list[dict[str, Any]]) -> list[str]:
    lines = ["| tokens, width | | ms of a call | of which waited | beside together | waited, beside together |"]
    lines += ["| --- | --- | ---: | ---: | ---: | ---: |"]
    for found in measured:
        for name, row in found["ways"].items():
            lines.append(
                f"| {found['tokens']:,}, {found['width']} | {name} | {row['ms']:.1f} | {row['ms waited']:.1f} | {row['ratio']:.2f} | "
                f"{row['ratio waited']:.2f} |"
            )
    lines += [
        "",
        "| H100, FLUX.1-dev, compiled | ms per step | before attention | could be hidden | two more latencies | slower products | gained |",
    ]
    lines += ["| --- | ---: | ---: | ---: | ---: | ---: | ---: |"]
    for row in paper:
        figures = [
            row[x] for x in ("step, ms", "waited, ms", "hidden, ms", "two more latencies, ms", "slower products, ms")
        ]
        cells = " | ".join(f"{x:.2f}" for x in figures)
        lines.append(f"| {row['ranks']} ranks, {row['link']} | {cells} | {row['gained']:+.1%} |")
    return lines


def main(arguments: list[str] | None = None) -> None:
    """Start the ranks, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--no-record", action="store_true", help="write no file")
    parser.add_argument("--part", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.part:
        torch.set_num_threads(1)
        # In other processes Inductor may find other vector instructions than in this one, on a machine that is busy.
        torch._inductor.config.compile_threads = 1
        write_part(args.part, lambda: [measure(*sizes, args.rounds) for sizes in SIZES])
        return
    measured, paper = measured_on_ranks("benchmarks.early_ulysses", RANKS, "--rounds", str(args.rounds)), on_paper()
    lines = tables(measured, paper)
    print("\n".join([*lines, "", f"The early way's graph: {', '.join(measured[0]['order'])}."]))
    if not args.no_record:
        PAGE.write_text(fill(PAGE.read_text(), {"early": lines}))
        print(write_results("early_ulysses", {"2 gloo ranks": measured, "on paper": paper}))


if __name__ == "__main__":
    main()
