"""Jobs on ranks with a simulated GPU each: ``gpu_ranks.run(fn, world_size, ...)`` like ``rank_pool.run``."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

from tests.rank_pool import RankPool
from tests.simulated_gpu import streams
from tests.simulated_gpu.groups import use_nccl
from tests.simulated_gpu.native import on_cpu
from tests.simulated_gpu.order import problems
from tests.simulated_gpu.record import DeviceFault, record


@dataclass
class SimulatedRanks:
    """Rank processes in which ``cuda`` is simulated."""

    pool: RankPool

    def run(
        self, fn: Callable[..., Any], world_size: int, /, *args: Any, nccl_alone: bool = False, **kwargs: Any
    ) -> list[Any]:
        """Run ``fn`` on every rank, with ``torch.device("cuda", rank)``, and return the results on the CPU.

        Raises ``RankPoolError`` if ``fn`` raised or used the device wrongly, or its collectives would hang on NCCL.
        """
        name = fn.__module__, fn.__qualname__
        # Triton's interpreter takes minutes for the kernels of an autoencoder on a slow machine.
        return self.pool.run(_run, world_size, name, nccl_alone, args, kwargs, timeout=240.0)


def _run(name: tuple[str, str], nccl_alone: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from tests.simulated_gpu.install import install, use_device

    install()
    use_device(dist.get_rank())
    use_nccl(dist.group.WORLD, alone=nccl_alone)
    record.start_again()
    streams.start_again()
    fn: Any = importlib.import_module(name[0])
    for part in name[1].split("."):
        fn = getattr(fn, part)
    result = tree_map(_host_value, fn(*args, **kwargs))
    faults = [f"{text} ({count} times)" for text, count in record.faults.items()] + _order_problems()
    if faults:
        raise DeviceFault("\n".join(faults))
    return result


def _order_problems() -> list[str]:
    """Return what is wrong with the collectives since the job began: the same list on every rank."""
    own = list(record.log)
    logs: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(logs, own, group=dist.new_group(backend="gloo"))
    found = problems(logs)
    return found or [f"{text} (if a host waits at a launch)" for text in problems(logs, busy_hosts=True)]


def _host_value(x: Any) -> Any:
    """Return ``x`` without its device, uncounted."""
    return on_cpu(x.detach()).clone() if isinstance(x, Tensor) and x.is_cuda else x


def on_gpu(x: Any, dtype: torch.dtype | None = None) -> Any:
    """Return ``x`` with its tensors on this rank's GPU. ``dtype`` is for those with floating point."""

    def move(x: Any) -> Any:
        if isinstance(x, Tensor):
            return x.to("cuda", dtype if x.is_floating_point() else x.dtype)
        if type(x).__module__.startswith("diffusers.models"):  # A cache of keys, for example.
            moved = copy.copy(x)
            vars(moved).update({name: on_gpu(value, dtype) for name, value in vars(x).items()})
            return moved
        return x

    return tree_map(move, x)
