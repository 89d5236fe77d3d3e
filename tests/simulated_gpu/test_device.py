"""The simulated device itself: planted faults are reported, and permitted things are not."""

from __future__ import annotations

import contextlib
import copy
import io
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.rank_pool import RankPoolError
from tests.tiny import relative_error

BF16 = torch.bfloat16


def gpu(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to("cuda", dtype)


def host(*shape: int) -> Tensor:
    return torch.randn(*shape)


def qkv(tokens: int = 16, dim: int = 64, dtype: torch.dtype = BF16) -> list[Tensor]:
    return [gpu(1, 2, tokens, dim, dtype=dtype) for _ in range(3)]


# -- One operator.

REFUSED: dict[str, Callable[[], Any]] = {
    "cuda + cpu": lambda: gpu(4) + host(4),
    "cat of both": lambda: torch.cat([gpu(4), host(4)]),
    "a linear layer on the cpu": lambda: F.linear(gpu(2, 4), host(3, 4)),
    "a condition on the cpu": lambda: torch.where(host(4) > 0, gpu(4), gpu(4)),
    "a mask on the cpu": lambda: gpu(4).masked_fill(host(4) > 0, 0.0),
    "cpu indexed by cuda": lambda: host(4)[torch.zeros(2, dtype=torch.long, device="cuda")],
    "NumPy": lambda: gpu(4).numpy(),
    "int matrix product": lambda: gpu(2, 2).long() @ gpu(2, 2).long(),
    "another GPU": lambda: torch.empty(2, device="cuda:3"),
    "attention mask on the cpu": lambda: F.scaled_dot_product_attention(*qkv(), host(16, 16) > 0),
    "float32 mask for bfloat16": lambda: F.scaled_dot_product_attention(*qkv(), gpu(16, 16)),
    "float64 mask": lambda: F.scaled_dot_product_attention(*qkv(), gpu(16, 16, dtype=torch.float64)),
    "flash of float32": lambda: torch.ops.aten._scaled_dot_product_flash_attention(*qkv(dtype=torch.float32)),
    "efficient with unaligned rows": lambda: torch.ops.aten._scaled_dot_product_efficient_attention(
        *[gpu(1, 2, 16, 68, dtype=BF16)[..., 1:65]] * 3, None, False
    ),
    "efficient with a mask of one head": lambda: torch.ops.aten._scaled_dot_product_efficient_attention(
        *qkv(), gpu(1, 1, 16, 16, dtype=BF16), False
    ),
    "out of efficient's backward in [B, H, S, D]": lambda: efficient_backward(lambda out: out.contiguous()),
}

PERMITTED: dict[str, Callable[[], Any]] = {
    "a scalar of the cpu": lambda: gpu(4) * torch.tensor(2.0),
    "an index on the cpu": lambda: gpu(4)[torch.tensor([0])],
    "a view of a view": lambda: gpu(4, 4).t()[1:] + 1,
    "int64 sums": lambda: gpu(4).long().sum(),
    "autocast": lambda: torch.autocast("cuda", BF16)(F.linear)(gpu(2, 4), gpu(3, 4)),
    "half the rows": lambda: F.scaled_dot_product_attention(*[x[:, :, ::2] for x in qkv()]),
    "grouped heads": lambda: F.scaled_dot_product_attention(
        gpu(1, 4, 16, 64, dtype=BF16), *[gpu(1, 2, 16, 64, dtype=BF16)] * 2, enable_gqa=True
    ),
    "out of efficient's backward in [B, S, H, D]": lambda: efficient_backward(lambda out: out),
}


def efficient_backward(lay_out: Callable[[Tensor], Tensor]) -> Any:
    q, k, v = qkv()
    out, lse, seed, offset = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True)
    return torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        torch.ones_like(out), q, k, v, None, lay_out(out), lse, seed, offset, 0.0, [True, True, True, False]
    )


def faults_of(call: Callable[[], Any]) -> str:
    """Return the faults and the error of ``call``, which the job then does not fail for."""
    from tests.simulated_gpu.record import record

    raised = ""
    try:
        call()
        torch.cuda.synchronize()
    except Exception as error:
        raised = f"{type(error).__name__}: {error}"
    faults = " ".join([*record.faults, raised])
    record.faults.clear()
    return faults.strip()


def run_operators() -> tuple[dict[str, str], dict[str, str]]:
    return tuple({name: faults_of(call) for name, call in table.items()} for table in (REFUSED, PERMITTED))


def test_operators_are_refused_or_permitted(gpu_ranks):
    refused, permitted = gpu_ranks.run(run_operators, 1)[0]
    assert [name for name, faults in refused.items() if not faults] == []
    assert permitted == dict.fromkeys(PERMITTED, "")


# -- Waits, copies and launches of one line.

COUNTED: dict[str, tuple[Callable[[Tensor], Any], dict[str, int]]] = {
    "item": (lambda x: x.item(), {"waits": 1}),
    "bool": (bool, {"waits": 1}),
    "tolist": (lambda x: x.tolist(), {"waits": 1, "copies to the host": 1}),
    "to the host": (lambda x: x.cpu(), {"waits": 1, "copies to the host": 1}),
    "to the host, not waiting": (lambda x: x.to("cpu", non_blocking=True), {"copies to the host": 1}),
    "to the device": (lambda x: torch.ones(4).to("cuda"), {"waits": 1, "copies to the device": 1}),
    "pinned to the device": (
        lambda x: torch.ones(4).pin_memory().to("cuda", non_blocking=True),
        {"copies to the device": 1},
    ),
    "a list": (lambda x: torch.tensor([1.0], device="cuda"), {"waits": 1, "copies to the device": 1}),
    "nonzero": (lambda x: x.nonzero(), {"waits": 1, "launches": 1}),
    "indexed by a mask": (lambda x: x[x.bool()], {"waits": 1, "launches": 3}),
    "filled by a mask": (lambda x: x.masked_fill_(x.bool(), 0.0), {"launches": 2}),
    "repeated": (lambda x: x.repeat_interleave(2, 0), {"launches": 1}),
    "a view": (lambda x: x.view(-1)[None].expand(3, -1), {}),
    "allocated": (lambda x: torch.empty(3, device="cuda"), {}),
    "sum": (lambda x: x + x, {"launches": 1}),
    "synchronize": (lambda x: torch.cuda.synchronize(), {"waits": 1}),
}


def count_lines() -> dict[str, dict[str, int]]:
    from tests.simulated_gpu.record import measured

    counted = {}
    for name, (call, _) in COUNTED.items():
        x = torch.ones(1, device="cuda")
        with measured() as counts:
            call(x)
        counted[name] = dict(counts.counts)
    return counted


def test_waits_copies_and_launches_are_counted(gpu_ranks):
    kinds = ("waits", "copies to the host", "copies to the device", "launches")
    for name, counts in gpu_ranks.run(count_lines, 1)[0].items():
        # Filling memory of torch.empty with NaN, as tests do, is no launch of the program.
        assert {kind: counts[kind] for kind in kinds if counts.get(kind)} == COUNTED[name][1], name


# -- Results are those of the CPU, and tensors are plain ones.


def compute() -> dict[str, Any]:
    torch.manual_seed(0)
    x, weight = gpu(3, 4).requires_grad_(), torch.nn.Linear(4, 5).to("cuda")
    y = F.gelu(weight(x)).sum()
    y.backward()
    buffer = io.BytesIO()
    torch.save(x.detach(), buffer)
    buffer.seek(0)
    shared = torch.zeros(4, device="cuda")
    shared.view(2, 2)[1].fill_(3.0)
    resized = torch.ones(4, device="cuda")
    resized.untyped_storage().resize_(0)
    return {
        "type": type(x) is Tensor and type(weight.weight) is torch.nn.Parameter and x.is_cuda,
        "y": y.detach(),
        "grad": x.grad,
        "loaded": torch.equal(torch.load(buffer, map_location="cpu"), x.detach().cpu()),
        "shared": shared,
        "one storage": shared.view(2, 2).untyped_storage()._cdata == shared.untyped_storage()._cdata,
        "out": torch.add(x.detach(), x.detach(), out=torch.empty(0, device="cuda")).shape,
        "drawn": torch.randn(3, device="cuda", generator=torch.Generator("cuda").manual_seed(5)),
        "copied": copy.deepcopy(shared[:2]),
        "freed": resized.untyped_storage().nbytes(),
    }


def test_results_are_those_of_the_cpu(gpu_ranks):
    results = gpu_ranks.run(compute, 1)[0]
    torch.manual_seed(0)
    x, weight = torch.randn(3, 4).requires_grad_(), torch.nn.Linear(4, 5)
    y = F.gelu(weight(x)).sum()
    y.backward()
    assert results["type"] and results["loaded"] and results["one storage"]
    assert torch.equal(results["y"], y) and torch.equal(results["grad"], x.grad)
    assert results["copied"].tolist() == [0, 0]
    assert results["shared"].tolist() == [0, 0, 3, 3] and results["out"] == (3, 4) and results["freed"] == 0
    assert torch.equal(results["drawn"], torch.randn(3, generator=torch.Generator().manual_seed(5)))


def attend(kernel: str, dtype: torch.dtype, mask: bool) -> tuple[list[Tensor], dict[str, int]]:
    from tests.simulated_gpu.record import record

    torch.manual_seed(0)
    parts = [x.requires_grad_() for x in qkv(37, dtype=dtype)]
    bias = gpu(1, 2, 37, 37, dtype=dtype) if mask else None
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if kernel == "cudnn" else contextlib.nullcontext():
        out = F.scaled_dot_product_attention(*parts, bias)
    out.backward(torch.ones_like(out))
    return [out.detach(), *(x.grad for x in parts)], dict(record.counts)


@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
def test_attention_takes_a_kernel_and_is_exact(gpu_ranks, kernel):
    dtype, mask = {"flash": (BF16, False), "efficient": (torch.float32, True), "cudnn": (BF16, True)}[kernel]
    results, counts = gpu_ranks.run(attend, 1, kernel, dtype, mask)[0]
    torch.manual_seed(0)
    parts = [torch.randn(1, 2, 37, 64).to(dtype).double().requires_grad_() for _ in range(3)]
    out = F.scaled_dot_product_attention(*parts, torch.randn(1, 2, 37, 37).double() if mask else None)
    out.backward(torch.ones_like(out))
    for x, expected in zip(results, [out.detach(), *(x.grad for x in parts)], strict=True):
        assert relative_error(x.double(), expected) < (1e-2 if dtype == BF16 else 1e-5)
    assert counts[f"kernel: {kernel}"] == counts[f"kernel: {kernel}_backward"] == 1


# -- Late results.


def late() -> dict[str, Any]:
    x = torch.ones(4, device="cuda")
    on_host = x.to("cpu", non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    second = (2 * x).to("cpu", non_blocking=True)
    early = bool(on_host.isnan().all())
    event.synchronize()
    return {"early": early, "first": on_host, "second": bool(second.isnan().all())}


def test_non_blocking_copy_is_nan_until_its_event(gpu_ranks):
    results = gpu_ranks.run(late, 1)[0]
    assert results["early"] and results["first"].tolist() == [1, 1, 1, 1]
    assert results["second"]  # It was started after the event.


def on_side_stream(waits: bool, then: str) -> Tensor:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x = torch.ones(4).pin_memory().to("cuda", non_blocking=True)
    if waits:
        torch.cuda.current_stream().wait_stream(side)
    return x.fill_(2.0) if then == "write" else x + 1


def written_while_read(waits: bool) -> Tensor:
    side, x = torch.cuda.Stream(), torch.ones(4, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x + 1
    if waits:
        torch.cuda.current_stream().wait_stream(side)
    x.zero_()
    torch.cuda.current_stream().wait_stream(side)
    return y


def pinned_source(waits: bool) -> Tensor:
    source = torch.ones(4).pin_memory()
    x = source.to("cuda", non_blocking=True)
    if waits:
        torch.cuda.current_stream().synchronize()
    source.zero_()
    torch.cuda.synchronize()
    return x


RACES = {
    "reads": lambda waits: on_side_stream(waits, "read"),
    "writes": lambda waits: on_side_stream(waits, "write"),
    "writes what another stream reads": written_while_read,
    "changes a pinned source": pinned_source,
}


def run_races() -> dict[tuple[str, bool], str]:
    return {
        (name, waits): faults_of(lambda call=call, waits=waits: call(waits))
        for name, call in RACES.items()
        for waits in (True, False)
    }


def test_race_is_reported_unless_the_stream_waits(gpu_ranks):
    for (name, waits), faults in gpu_ranks.run(run_races, 1)[0].items():
        expected = r"^$" if waits else r"another stream|had ended"
        assert re.search(expected, faults), (name, waits, faults)


# -- Collectives.


def exchange(name: str) -> Any:
    rank, x = dist.get_rank(), torch.arange(4.0, device="cuda") + 10 * dist.get_rank()
    out = torch.empty(4, device="cuda")
    if name == "read before the wait":
        work = dist.all_to_all_single(out, x, async_op=True)
        early = out.clone()
        work.wait()
        return bool(early.isnan().all()) and not bool(out.isnan().any())
    if name == "never waited for":
        dist.all_to_all_single(out, x, async_op=True)
        return None
    if name == "input changed in flight":
        work = dist.all_to_all_single(out, x, async_op=True)
        x.zero_()
        return work.wait()
    if name == "int16":
        return dist.all_reduce(x.to(torch.int16))
    if name == "not contiguous":
        return dist.broadcast(torch.ones(4, 4, device="cuda")[:, :2], 0)
    if name == "on the cpu":
        return dist.all_to_all_single(torch.empty(4), x)
    if name == "another order":
        # gloo matches by tag, NCCL by order: here the groups differ.
        first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
        works = [dist.all_reduce(x.clone(), group=group, async_op=True) for group in (first, second)[:: 1 - 2 * rank]]
        for work in works:
            work.wait()
            torch.cuda.synchronize()
        return None
    if name == "receive before the send":
        parts = [dist.irecv(out, 1 - rank), dist.isend(x, 1 - rank)]
        for part in parts:
            part.wait()
        return None
    raise ValueError(name)


BROKEN = {
    "never waited for": "never waited",
    "input changed in flight": "in flight",
    "int16": "int16",
    "not contiguous": "strides",
    "on the cpu": "on cpu",
    "another order": "hang",
    "receive before the send": "both ranks",
}


@pytest.mark.parametrize("name", BROKEN)
def test_rule_of_nccl_is_reported(gpu_ranks, name):
    with pytest.raises(RankPoolError, match=BROKEN[name]):
        gpu_ranks.run(exchange, 2, name)


def test_output_is_nan_until_it_is_waited_for(gpu_ranks):
    assert gpu_ranks.run(exchange, 2, "read before the wait") == [True, True]


def exchange_well() -> list[Any]:
    functional = torch.ops._c10d_functional  # Their functions in Python have other names in each release of torch.
    rank, x = dist.get_rank(), torch.arange(4.0, device="cuda") + 10 * dist.get_rank()
    group = dist.group.WORLD.group_name
    gathered = [torch.empty(2, device="cuda"), torch.empty(3, device="cuda")]
    dist.all_gather(gathered, torch.full((2 + rank,), float(rank), device="cuda"))  # NCCL takes unequal parts.
    total, scattered, whole, moved = [
        functional.wait_tensor(y)
        for y in (
            functional.all_reduce(x, "sum", group),
            functional.reduce_scatter_tensor(x, "sum", 2, group),
            functional.all_gather_into_tensor(x[:2], 2, group),
            functional.all_to_all_single(x, [2, 2], [2, 2], group),
        )
    ]
    first, then = (dist.isend, dist.irecv) if rank == 0 else (dist.irecv, dist.isend)
    received = torch.empty(4, device="cuda")
    for start, y in ((first, x if rank == 0 else received), (then, received if rank == 0 else x)):
        start(y, 1 - rank).wait()
    return [y + 0 for y in (*gathered, total, scattered, whole, moved, received)]


def test_collectives_are_exact(gpu_ranks):
    xs = [torch.arange(4.0), torch.arange(4.0) + 10]
    for rank, results in enumerate(gpu_ranks.run(exchange_well, 2)):
        total = xs[0] + xs[1]
        expected = [
            torch.zeros(2),
            torch.ones(3),
            total,
            total.chunk(2)[rank],
            torch.cat([x[:2] for x in xs]),
            torch.cat([x.chunk(2)[rank] for x in xs]),
            xs[1 - rank],
        ]
        assert all(torch.equal(x, y) for x, y in zip(results, expected, strict=True)), f"rank {rank}: {results}"


def half_waited() -> bool:
    from torch.distributed import _functional_collectives as functional

    x = torch.ones(4, device="cuda")
    out = torch.ops._c10d_functional.all_reduce(x, "sum", dist.group.WORLD.group_name)
    early = bool(torch.isnan(out).all())
    functional.wait_tensor(out)
    return early and out.tolist() == [2, 2, 2, 2]


def test_functional_collective_is_nan_until_it_is_waited_for(gpu_ranks):
    assert gpu_ranks.run(half_waited, 2) == [True, True]


def fail_in_flight() -> None:
    group = dist.new_group()
    work = dist.all_reduce(torch.ones(2, device="cuda"), group=group, async_op=True)
    torch.ones(4).pin_memory().to("cuda", non_blocking=True)
    raise ValueError(f"with {work} in flight")


def names_of_backends() -> list[str]:
    from para_core.torch_internals import backend_of

    group = dist.new_group(backend="gloo")
    return [backend_of(x, torch.device("cuda")).name() for x in (dist.group.WORLD, group)]


def test_failed_job_leaves_nothing_to_the_next(gpu_ranks):
    with pytest.raises(RankPoolError, match="in flight"):
        gpu_ranks.run(fail_in_flight, 2)
    # The group of gloo gets the name that the failed job's group of NCCL had.
    assert gpu_ranks.run(names_of_backends, 2) == [["nccl", "gloo"]] * 2
