"""The process group of a rank, which is made before the pipeline is loaded, even if ``load`` asks for it again.

Only ``rank.py`` calls this. Groups of meshes are made later, in :mod:`para_core.distributed.groups`. Tests:
tests/launcher/test_calls.py, tests/launcher/test_failures.py.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]


def join_process_group(
    rank: int, ranks: int, host: str, exchange_port: Callable[[int | None], int], timeout: timedelta
) -> dist.ProcessGroup | None:
    """Select this rank's GPU, make the default process group, and return a gloo group for the launcher's
    exchanges. Collective.

    Return None if there is one rank, which has nothing to exchange. ``exchange_port`` gets the port of the
    first rank's store on ``host``, or None on other ranks, and returns the port. Raise ValueError if there
    are fewer GPUs than ranks.
    """
    if torch.cuda.is_available():
        local_rank, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if int(os.environ["LOCAL_WORLD_SIZE"]) > gpus:
            raise ValueError(
                f"{os.environ['LOCAL_WORLD_SIZE']} ranks on a host with {gpus} GPUs: expected at most one rank per GPU."
            )
        # Select it before anything initializes CUDA, so that ``.to("cuda")`` means this rank's GPU.
        torch.cuda.set_device(local_rank)
    if rank == 0:
        store = TCPStore(host, 0, ranks, is_master=True, timeout=timeout, wait_for_workers=False)
        exchange_port(store.port)
    else:
        store = TCPStore(host, exchange_port(None), ranks, is_master=False, timeout=timeout)
    dist.init_process_group(store=store, rank=rank, world_size=ranks, timeout=timeout)
    if ranks == 1:
        return None
    # A group of its own, so that the launcher's exchanges do not mix with collectives of the pipeline.
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)
    return group


@contextmanager
def accept_repeated_init(timeout: timedelta) -> Iterator[None]:
    """Inside this context, let ``dist.init_process_group()`` pass if it asks for the group that there is.

    Scripts that torchrun starts begin with this call. The function of torch is replaced for the whole
    process, so only a process that this package started enters this context.
    """
    original = dist.init_process_group

    def init_process_group(
        backend: str | None = None, init_method: str | None = None, *args: Any, **kwargs: Any
    ) -> None:
        if not dist.is_initialized():
            original(backend, init_method, *args, **kwargs)
            return
        bound = inspect.signature(original).bind(backend, init_method, *args, **kwargs)
        _check_same(bound.arguments, timeout)

    dist.init_process_group = init_process_group
    try:
        yield
    finally:
        dist.init_process_group = original


def _check_same(arguments: dict[str, Any], timeout: timedelta) -> None:
    """Raise ValueError if arguments of ``init_process_group`` ask for another group than the default one."""
    device = arguments.get("device_id")
    if isinstance(device, int):
        device = torch.device("cuda", device)
    same = {
        "backend": _is_backend_of_group(arguments.get("backend")),
        "init_method": arguments.get("init_method") in (None, "env://"),
        "timeout": arguments.get("timeout") in (None, timeout),
        "world_size": arguments.get("world_size", -1) in (None, -1, dist.get_world_size()),
        "rank": arguments.get("rank", -1) in (None, -1, dist.get_rank()),
        "store": arguments.get("store") is None,
        "group_name": not arguments.get("group_name"),
        "pg_options": arguments.get("pg_options") is None,
        "device_id": device is None
        or (device.type == "cuda" and device.index == torch.cuda.current_device()),
    }
    different = [f"{name}={arguments[name]!r}" for name, equal in same.items() if not equal]
    if different:
        raise ValueError(
            f"init_process_group({', '.join(different)}) inside load: launch has made the process group, with backend "
            f"{dist.get_backend_config()}, {dist.get_world_size()} ranks and a timeout of {timeout}. Leave the call "
            "out, or pass ranks= and timeout= to launch."
        )


def _is_backend_of_group(backend: str | None) -> bool:
    """Whether ``backend``, such as "nccl" or "cpu:gloo,cuda:nccl", names backends that the default group has.

    A name without a device means the backend of the GPU, if there is one.
    """
    if backend is None:
        return True
    backends_of_group = set(dist.get_backend_config().split(","))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parts = [part if ":" in part else f"{device}:{part}" for part in backend.lower().split(",")]
    return backends_of_group.issuperset(parts)
