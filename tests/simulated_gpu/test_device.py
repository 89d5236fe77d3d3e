"""The simulated device itself: planted faults are reported, and permitted things are not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.rank_pool import RankPoolError
from tests.simulated_gpu.record import record

BF16 = torch.bfloat16
aten = torch.ops.aten
efficient = aten._scaled_dot_product_efficient_attention
sdpa = F.scaled_dot_product_attention


def gpu(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to("cuda", dtype)


def host(*shape: int) -> Tensor:
    return torch.randn(*shape)


def qkv(heads: int = 2) -> list[Tensor]:
    return [gpu(1, 2, 16, 64, dtype=BF16).repeat_interleave(heads // 2, 1), *[gpu(1, 2, 16, 64, dtype=BF16)] * 2]


# -- One operator, and races of streams. Each row is a call and words of its fault, or none if a GPU takes it.


def on_side_stream(use: Callable[[Tensor], Any], *, waits: bool) -> None:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x = torch.ones(4).pin_memory().to("cuda", non_blocking=True)
    if waits:
        torch.cuda.current_stream().wait_stream(side)
    use(x)


def written_while_read(*, waits: bool) -> None:
    side, x = torch.cuda.Stream(), torch.ones(4, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x + 1
    if waits:
        torch.cuda.current_stream().wait_stream(side)
    x.zero_()
    torch.cuda.current_stream().wait_stream(side)
    del y


def changed_source(*, waits: bool) -> None:
    source = torch.ones(4).pin_memory()
    source.to("cuda", non_blocking=True)
    if waits:
        torch.cuda.current_stream().synchronize()
    source.zero_()


RACES = {
    "a read of what another stream writes": (partial(on_side_stream, lambda x: x + 1), "another stream"),
    "a write of what another stream writes": (partial(on_side_stream, lambda x: x.zero_()), "another stream"),
    "a write of what another stream reads": (written_while_read, "another stream"),
    "a pinned source changes": (changed_source, "had ended"),
}
RULES: dict[str, tuple[Callable[[], Any], str]] = {
    "cuda + cpu": (lambda: gpu(4) + host(4), "cpu"),
    "cpu indexed by cuda": (lambda: host(4)[torch.zeros(2, dtype=torch.long, device="cuda")], "index"),
    "NumPy": (lambda: gpu(4).numpy(), "can't convert cuda"),
    "int matrix product": (lambda: gpu(2, 2).long() @ gpu(2, 2).long(), "no kernel for torch.int64"),
    "another GPU": (lambda: torch.empty(2, device="cuda:3"), "cuda:3"),
    "attention mask on the cpu": (lambda: sdpa(*qkv(), host(16, 16) > 0), "cpu"),
    "float32 mask for bfloat16": (lambda: sdpa(*qkv(), gpu(16, 16)), "a mask of torch.float"),
    "unaligned rows": (lambda: efficient(*[gpu(1, 2, 16, 68, dtype=BF16)[..., 1:65]] * 3, None, False), "efficient"),
    "a scalar of the cpu": (lambda: gpu(4) * torch.tensor(2.0), ""),
    "an index on the cpu": (lambda: gpu(4)[torch.tensor([0])], ""),
    "autocast": (lambda: torch.autocast("cuda", BF16)(F.linear)(gpu(2, 4), gpu(3, 4)), ""),
    "grouped heads": (lambda: sdpa(*qkv(heads=4), enable_gqa=True), ""),
    **{name: (partial(race, waits=False), words) for name, (race, words) in RACES.items()},
    **{f"{name}, after it": (partial(race, waits=True), "") for name, (race, _) in RACES.items()},
}


def faults_of_rules() -> dict[str, str]:
    """Return the faults and the error of each call, which the job then does not fail for."""
    found = {}
    for name, (call, _) in RULES.items():
        raised = ""
        try:
            call()
            torch.cuda.synchronize()
        except Exception as error:
            raised = f"{type(error).__name__}: {error}"
        found[name] = " ".join([*record.faults, raised]).strip()
        record.faults.clear()
    return found


def test_device_refuses_what_a_gpu_refuses_and_nothing_else(gpu_ranks):
    for name, faults in gpu_ranks.run(faults_of_rules, 1)[0].items():
        words = RULES[name][1]
        assert words in faults if words else not faults, (name, faults)


def changed_in_flight(x: Tensor, out: Tensor, rank: int) -> None:
    work = dist.all_to_all_single(out, x, async_op=True)
    x.zero_()
    work.wait()


def crossed_groups(x: Tensor, out: Tensor, rank: int) -> None:
    # gloo matches by tag, NCCL by order: here the groups differ.
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    for work in [dist.all_reduce(x.clone(), group=group, async_op=True) for group in groups[:: 1 - 2 * rank]]:
        work.wait()
        torch.cuda.synchronize()


# By words of the fault.
BROKEN: dict[str, Callable[[Tensor, Tensor, int], Any]] = {
    "never waited": lambda x, out, rank: dist.all_to_all_single(out, x, async_op=True),
    "int16": lambda x, out, rank: dist.all_reduce(x.to(torch.int16)),
    "strides": lambda x, out, rank: dist.broadcast(torch.ones(4, 4, device="cuda")[:, :2], 0),
    "on cpu": lambda x, out, rank: dist.all_to_all_single(torch.empty(4), x),
    "both ranks": lambda x, out, rank: [y.wait() for y in (dist.irecv(out, 1 - rank), dist.isend(x, 1 - rank))],
    "in flight": changed_in_flight,
    "hang": crossed_groups,
}


def exchange_wrongly(words: str) -> None:
    BROKEN[words](torch.arange(4.0, device="cuda"), torch.empty(4, device="cuda"), dist.get_rank())


@pytest.mark.parametrize("words", BROKEN)
def test_rule_of_nccl_is_reported(gpu_ranks, words):
    with pytest.raises(RankPoolError, match=words):
        gpu_ranks.run(exchange_wrongly, 2, words)
