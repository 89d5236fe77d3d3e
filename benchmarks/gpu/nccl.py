"""NCCL as far as one device goes: a group of one rank, and the error of two ranks on one device. On a CPU it is
gloo.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.gpu.exact import Results, compare, exact, make_inputs
from benchmarks.gpu.flux import TINY, flux_inputs, flux_transformer
from benchmarks.gpu.job import OK, WRONG, SectionJob
from benchmarks.gpu.processes import backend_of, group_of_one, run_ranks
from para_core import UnifiedAttnMode, init_context_parallel_mesh

NEEDS = {"one rank": 40.0, "two ranks on one device": 30.0}  # seconds


def run(job: SectionJob) -> None:
    backend = backend_of(job.device)
    with group_of_one(job.device):
        steps: dict[str, Callable[[torch.device], dict[str, Any] | None]] = {
            "collectives of torch.distributed": _collectives,
            "functional collectives, and their backward": _functional_collectives,
            "a CPU group beside it": _cpu_group,
            "mode: attention, shard, gather, backward": _mode,
            "mode, compiled (aot_eager)": _compiled_mode,
            "parallelize_transformer": _transformer,
        }
        for name, step in steps.items():
            job.measure(step, job.device, backend=backend, step=name)
    if backend == "nccl":
        _two_ranks_on_one_device(job)


def _collectives(device: torch.device) -> None:
    x = torch.arange(4.0, device=device)
    expected = x.clone()
    dist.all_reduce(x)
    dist.broadcast(x, src=0)
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x)
    gathered = [torch.empty_like(x)]
    dist.all_gather(gathered, received)
    dist.barrier()
    if not torch.equal(gathered[0], expected):
        raise ValueError(f"one rank's collectives gave {gathered[0].tolist()}; expected {expected.tolist()}")


def _functional_collectives(device: torch.device) -> None:
    name = dist.group.WORLD.group_name
    x = torch.arange(4.0, device=device, requires_grad=True)
    ops = torch.ops._c10d_functional
    y = ops.wait_tensor(torch.ops._c10d_functional_autograd.all_to_all_single(x, [4], [4], name))
    (grad,) = torch.autograd.grad(y.square().sum(), x)
    with torch.no_grad():
        total = ops.wait_tensor(ops.all_reduce(x, "sum", name))
    if not (torch.equal(grad, 2 * x.detach()) and torch.equal(total, x.detach())):
        raise ValueError(f"all-to-all's gradient is {grad.tolist()}, the sum {total.tolist()}, of {x.tolist()}")


def _cpu_group(device: torch.device) -> None:
    group = dist.new_group(backend="gloo")
    x = torch.ones(3)
    dist.all_reduce(x, group=group)
    dist.destroy_process_group(group)


def _mode(device: torch.device) -> dict[str, Any]:
    inputs = make_inputs((1, 4, 64, 64), torch.bfloat16, device)
    qkv = [x.clone().requires_grad_() for x in inputs.qkv]
    with UnifiedAttnMode(init_context_parallel_mesh(device.type)) as cp:
        out = cp.gather(F.scaled_dot_product_attention(*[cp.shard(x, dim=2) for x in qkv]), dim=2)
    out.backward(inputs.grad_out)
    return compare(Results(out.detach(), *[x.grad for x in qkv]), inputs, exact(inputs))


def _compiled_mode(device: torch.device) -> dict[str, Any]:
    mesh = init_context_parallel_mesh(device.type)
    inputs = make_inputs((1, 4, 64, 64), torch.bfloat16, device)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        with UnifiedAttnMode(mesh):
            return F.scaled_dot_product_attention(query, key, value)

    with torch.no_grad():
        out = attend(*inputs.qkv)
    return compare(Results(out), inputs, exact(inputs))


def _transformer(device: torch.device) -> dict[str, Any]:
    """Run a small FLUX. The section ``flux`` has the large one."""
    from para_core.adapters import parallelize_transformer

    transformer, kwargs = flux_transformer(device, TINY), flux_inputs(device, TINY)
    with torch.no_grad():
        before = transformer(**kwargs, return_dict=False)[0]
        parallelize_transformer(transformer, mesh=init_context_parallel_mesh(device.type))
        after = transformer(**kwargs, return_dict=False)[0]
    return {
        "verdict": OK if torch.equal(before, after) else WRONG,
        "largest difference": (before - after).abs().max().item(),
    }


def _two_ranks_on_one_device(job: SectionJob) -> None:
    """Record how NCCL refuses two ranks on one device."""
    name = "two ranks on one device"
    if not job.has_time(name, NEEDS[name]):
        return
    _, errors = run_ranks(_mode_on_two_ranks, 2, device=job.device, backend="nccl", seconds=NEEDS[name] - 2)
    job.add(backend="nccl", step=name, raised={str(rank): text[-1500:] for rank, text in errors.items()})


def _mode_on_two_ranks(device: torch.device) -> Iterator[dict[str, Any]]:
    inputs = make_inputs((1, 4, 64, 64), torch.bfloat16, device)
    with UnifiedAttnMode(init_context_parallel_mesh(device.type)) as cp:
        qkv = [cp.shard(x, dim=2) for x in inputs.qkv]
        yield {"sum": cp.gather(F.scaled_dot_product_attention(*qkv), dim=2).float().sum().item()}
