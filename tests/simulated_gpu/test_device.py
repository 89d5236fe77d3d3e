"""The simulated device itself: planted faults are reported, and permitted things are not."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.rank_pool import RankPoolError
from tests.simulated_gpu.record import measured, record

BF16 = torch.bfloat16
aten = torch.ops.aten
efficient = aten._scaled_dot_product_efficient_attention
sdpa = F.scaled_dot_product_attention


def gpu(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to("cuda", dtype)


def host(*shape: int) -> Tensor:
    return torch.randn(*shape)


def qkv(dtype: torch.dtype = BF16, heads: int = 2) -> list[Tensor]:
    return [gpu(1, 2, 16, 64, dtype=dtype).repeat_interleave(heads // 2, 1), *[gpu(1, 2, 16, 64, dtype=dtype)] * 2]


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
    "cat of both": (lambda: torch.cat([gpu(4), host(4)]), "cpu"),
    "a mask on the cpu": (lambda: gpu(4).masked_fill(host(4) > 0, 0.0), "cpu"),
    "cpu indexed by cuda": (lambda: host(4)[torch.zeros(2, dtype=torch.long, device="cuda")], "index"),
    "NumPy": (lambda: gpu(4).numpy(), "can't convert cuda"),
    "int matrix product": (lambda: gpu(2, 2).long() @ gpu(2, 2).long(), "no kernel for torch.int64"),
    "another GPU": (lambda: torch.empty(2, device="cuda:3"), "cuda:3"),
    "attention mask on the cpu": (lambda: sdpa(*qkv(), host(16, 16) > 0), "cpu"),
    "float32 mask for bfloat16": (lambda: sdpa(*qkv(), gpu(16, 16)), "a mask of torch.float"),
    "unaligned rows": (lambda: efficient(*[gpu(1, 2, 16, 68, dtype=BF16)[..., 1:65]] * 3, None, False), "efficient"),
    "flash of float32": (lambda: aten._scaled_dot_product_flash_attention(*qkv(torch.float32)), "flash"),
    "a scalar of the cpu": (lambda: gpu(4) * torch.tensor(2.0), ""),
    "an index on the cpu": (lambda: gpu(4)[torch.tensor([0])], ""),
    "a view of a view": (lambda: gpu(4, 4).t()[1:] + 1, ""),
    "autocast": (lambda: torch.autocast("cuda", BF16)(F.linear)(gpu(2, 4), gpu(3, 4)), ""),
    "half the rows": (lambda: sdpa(*[x[:, :, ::2] for x in qkv()]), ""),
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


# -- Waits, copies, launches and kernels of one line.


def of_cudnn() -> None:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = sdpa(*[x.requires_grad_() for x in QKV])
    out.backward(torch.ones_like(out))


WAIT, THERE, BACK, LAUNCH = "waits", "copies to the device", "copies to the host", "launches"
QKV: list[Tensor] = []
COUNTED: dict[str, tuple[Callable[[Tensor], Any], dict[str, int]]] = {
    "item": (lambda x: x.item(), {WAIT: 1}),
    "to the host": (lambda x: x.cpu(), {WAIT: 1, BACK: 1}),
    "to the host, not waiting": (lambda x: x.to("cpu", non_blocking=True), {BACK: 1}),
    "to the device": (lambda x: torch.ones(4).to("cuda"), {WAIT: 1, THERE: 1}),
    "pinned to the device": (lambda x: torch.ones(4).pin_memory().to("cuda", non_blocking=True), {THERE: 1}),
    "a list": (lambda x: torch.tensor([1.0], device="cuda"), {WAIT: 1, THERE: 1}),
    "nonzero": (lambda x: x.nonzero(), {WAIT: 1, LAUNCH: 1}),
    "indexed by a mask": (lambda x: x[x.bool()], {WAIT: 1, LAUNCH: 3}),
    "filled by a mask": (lambda x: x.masked_fill_(x.bool(), 0.0), {LAUNCH: 2}),
    "repeated": (lambda x: x.repeat_interleave(2, 0), {LAUNCH: 1}),
    "a view": (lambda x: x.view(-1)[None].expand(3, -1), {}),
    "allocated": (lambda x: torch.empty(3, device="cuda"), {}),
    "synchronize": (lambda x: torch.cuda.synchronize(), {WAIT: 1}),
    "flash": (lambda x: sdpa(*QKV), {LAUNCH: 1, "kernel: flash": 1}),
    "efficient": (lambda x: sdpa(*QKV, x.bfloat16().expand(1, 2, 16, 16)), {LAUNCH: 4, "kernel: efficient": 1}),
    "cuDNN": (lambda x: of_cudnn(), {LAUNCH: 4, "kernel: cudnn": 1, "kernel: cudnn_backward": 1}),
}


def count_lines() -> dict[str, dict[str, int]]:
    counted = {}
    QKV[:] = qkv()
    for name, (call, _) in COUNTED.items():
        x = torch.ones(1, device="cuda")
        with measured() as counts:
            call(x)
        counted[name] = dict(counts.counts)
    return counted


def test_waits_copies_and_launches_are_counted(gpu_ranks):
    assert gpu_ranks.run(count_lines, 1)[0] == {name: counts for name, (_, counts) in COUNTED.items()}


# -- Results are those of the CPU, tensors are plain ones, and copies arrive late.


def compute() -> dict[str, Any]:
    torch.manual_seed(0)
    x, layer = gpu(3, 4).requires_grad_(), torch.nn.Linear(4, 5).to("cuda")
    y = F.gelu(layer(x)).sum()
    y.backward()
    buffer = io.BytesIO()
    torch.save(x.detach(), buffer)
    buffer.seek(0)
    shared, resized = torch.zeros(4, device="cuda"), torch.ones(4, device="cuda")
    shared.view(2, 2)[1].fill_(3.0)
    resized.untyped_storage().resize_(0)
    late = shared.to("cpu", non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    later = (2 * shared).to("cpu", non_blocking=True)
    early = late.isnan().all()
    event.synchronize()
    arrived = late.tolist() == [0, 0, 3, 3] and bool(later.isnan().all())
    return {
        "plain": type(x) is Tensor and type(layer.weight) is torch.nn.Parameter and x.is_cuda,
        "loaded": torch.equal(torch.load(buffer, map_location="cpu"), x.detach().cpu()),
        "one storage": shared.view(2, 2).untyped_storage()._cdata == shared.untyped_storage()._cdata,
        "freed": resized.untyped_storage().nbytes() == 0,
        "late": bool(early) and arrived,
        "copied": copy.deepcopy(shared[2:]).tolist() == [3, 3],
        "out": torch.add(x.detach(), x.detach(), out=torch.empty(0, device="cuda")).shape == (3, 4),
        "y": y.detach(),
        "grad": x.grad,
        "drawn": torch.randn(3, device="cuda", generator=torch.Generator("cuda").manual_seed(5)),
    }


def test_results_are_those_of_the_cpu(gpu_ranks):
    results = gpu_ranks.run(compute, 1)[0]
    torch.manual_seed(0)
    x, layer = torch.randn(3, 4).requires_grad_(), torch.nn.Linear(4, 5)
    y = F.gelu(layer(x)).sum()
    y.backward()
    drawn = torch.randn(3, generator=torch.Generator().manual_seed(5))
    for name, expected in {"y": y, "grad": x.grad, "drawn": drawn}.items():
        assert torch.equal(results.pop(name), expected), name
    assert results == dict.fromkeys(results, True)


# -- Collectives.


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


def failing_in_flight(x: Tensor, out: Tensor, rank: int) -> None:
    # Nothing of it may be left for the next test, whose group of gloo gets the name of this one's group of NCCL.
    work = dist.all_reduce(x, group=dist.new_group(), async_op=True)
    torch.ones(4).pin_memory().to("cuda", non_blocking=True)
    raise ValueError(f"with {work} on its way")


# By words of the fault.
BROKEN: dict[str, Callable[[Tensor, Tensor, int], Any]] = {
    "never waited": lambda x, out, rank: dist.all_to_all_single(out, x, async_op=True),
    "int16": lambda x, out, rank: dist.all_reduce(x.to(torch.int16)),
    "strides": lambda x, out, rank: dist.broadcast(torch.ones(4, 4, device="cuda")[:, :2], 0),
    "on cpu": lambda x, out, rank: dist.all_to_all_single(torch.empty(4), x),
    "both ranks": lambda x, out, rank: [y.wait() for y in (dist.irecv(out, 1 - rank), dist.isend(x, 1 - rank))],
    "in flight": changed_in_flight,
    "hang": crossed_groups,
    "on its way": failing_in_flight,
}


def exchange_wrongly(words: str) -> None:
    BROKEN[words](torch.arange(4.0, device="cuda"), torch.empty(4, device="cuda"), dist.get_rank())


@pytest.mark.parametrize("words", BROKEN)
def test_rule_of_nccl_is_reported(gpu_ranks, words):
    with pytest.raises(RankPoolError, match=words):
        gpu_ranks.run(exchange_wrongly, 2, words)


def exchange_well() -> tuple[list[str], list[bool], list[Tensor]]:
    from para_core.torch_internals import backend_of

    functional = torch.ops._c10d_functional  # Their functions in Python have other names in each release of torch.
    rank, x = dist.get_rank(), torch.arange(4.0, device="cuda") + 10 * dist.get_rank()
    world, of_gloo = dist.group.WORLD, dist.new_group(backend="gloo")
    gathered = [torch.empty(2, device="cuda"), torch.empty(3, device="cuda")]
    dist.all_gather(gathered, torch.full((2 + rank,), float(rank), device="cuda"))  # NCCL takes unequal parts.
    early, results = [], []
    for start in (
        lambda: functional.all_reduce(x, "sum", world.group_name),
        lambda: functional.reduce_scatter_tensor(x, "sum", 2, world.group_name),
        lambda: functional.all_gather_into_tensor(x[:2], 2, world.group_name),
        lambda: functional.all_to_all_single(x, [2, 2], [2, 2], world.group_name),
    ):
        started = start()
        early.append(bool(started.isnan().all()))
        results.append(functional.wait_tensor(started))
    received = torch.empty(4, device="cuda")
    for send in (rank == 0, rank == 1):
        (dist.isend if send else dist.irecv)(x if send else received, 1 - rank).wait()
    backends = [backend_of(each, torch.device("cuda")).name() for each in (world, of_gloo)]
    return backends, early, [y + 0 for y in (*gathered, *results, received)]


def test_collectives_are_exact_and_nan_until_they_are_waited_for(gpu_ranks):
    xs = [torch.arange(4.0), torch.arange(4.0) + 10]
    total, parts = xs[0] + xs[1], [x.chunk(2) for x in xs]
    for rank, (backends, early, results) in enumerate(gpu_ranks.run(exchange_well, 2)):
        firsts, own = (torch.cat([of_rank[index] for of_rank in parts]) for index in (0, rank))
        expected = [torch.zeros(2), torch.ones(3), total, total.chunk(2)[rank], firsts, own, xs[1 - rank]]
        assert all(torch.equal(x, y) for x, y in zip(results, expected, strict=True)), f"rank {rank}: {results}"
        assert early == [True] * 4 and backends == ["nccl", "gloo"]
