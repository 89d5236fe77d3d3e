"""The process group of a rank, which is made before the pipeline is loaded, even if ``load`` asks for it again.

Only ``rank.py`` calls this. Groups of meshes are made later, in :mod:`para_core.distributed.groups`. Tests:
tests/launcher/test_calls.py, where a ``load`` asks for the group again, and tests/launcher/test_cancel.py for
the group of the launcher's exchanges. No test has a GPU; the examples below stand for one.
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

    Return None if there is one rank, which has nothing to exchange. Raise ValueError if this host has fewer
    GPUs than ranks.

    Args:
        rank, ranks: The number of this rank, and of all ranks on all hosts. On a host with GPUs the
            environment also has ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE``, the same for this host alone, which
            ``processes.rank_environment`` sets.
        host: The address of the first rank's host, for its store.
        exchange_port: Called once by every rank: by the first with the port of its store, which goes to all
            ranks, by the others with None. Blocks until the port is known, and returns it.
        timeout: The timeout of the store and of both groups.
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
    backends = _backends_of(torch.accelerator.current_accelerator(check_available=True))
    dist.init_process_group(backends, store=store, rank=rank, world_size=ranks, timeout=timeout)
    if ranks == 1:
        return None
    # A group of its own, so that the launcher's exchanges do not mix with collectives of the pipeline.
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)
    return group


def _backends_of(accelerator: torch.device | None) -> str:
    """Return the backends of the default group on a host with this accelerator. torch's own choice is that of
    the accelerator alone, and a ``load`` may also ask for collectives of CPU tensors.

    >>> [_backends_of(device) for device in (None, torch.device("cuda"), torch.device("mps"))]
    ['cpu:gloo', 'cpu:gloo,cuda:nccl', 'cpu:gloo']
    """
    # torch names gloo for Apple's GPU, whose tensors gloo does not send.
    if accelerator is None or accelerator.type == "mps":
        return "cpu:gloo"
    return f"cpu:gloo,{accelerator.type}:{dist.get_default_backend_for_device(accelerator)}"


@contextmanager
def accept_repeated_init(timeout: timedelta) -> Iterator[None]:
    """Inside this context, let ``dist.init_process_group()`` pass if it asks for the group that there is.

    Scripts that torchrun starts begin with this call. The function of torch is replaced for the whole
    process, so only a process that this package started enters this context.

    ``load`` and its modules get the replacement also by ``from torch.distributed import init_process_group``,
    because they are unpickled and imported inside this context. A module that was imported before, and holds
    the function by that statement, gets torch's error at a second group.
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

    # Pickles look it up in the second one, which defines it.
    modules: tuple[Any, ...] = (dist, dist.distributed_c10d)
    for module in modules:
        module.init_process_group = init_process_group
    try:
        yield
    finally:
        for module in modules:
            module.init_process_group = original


def _check_same(arguments: dict[str, Any], timeout: timedelta) -> None:
    """Raise ValueError if arguments of ``init_process_group`` ask for another group than the default one,
    whose timeout is ``timeout``, or for another device than this rank's current one.

    An argument that is not compared here, such as one of a newer torch, also raises if it is passed.
    """
    gpu = None
    if torch.cuda.is_available():
        gpu = torch.cuda.current_device()
    same = {
        "backend": _has_backends(dist.get_backend_config(), arguments.get("backend"), gpu),
        "init_method": arguments.get("init_method") in (None, "env://"),
        "timeout": arguments.get("timeout") in (None, timeout),
        "world_size": arguments.get("world_size", -1) in (None, -1, dist.get_world_size()),
        "rank": arguments.get("rank", -1) in (None, -1, dist.get_rank()),
        "store": arguments.get("store") is None,
        "group_name": not arguments.get("group_name"),
        "pg_options": arguments.get("pg_options") is None,
        "device_id": _is_current(arguments.get("device_id"), gpu),
    }
    different = [f"{name}={value!r}" for name, value in arguments.items() if not same.get(name, False)]
    if different:
        raise ValueError(
            f"init_process_group({', '.join(different)}) inside load: launch has made the process group, with backend "
            f"{dist.get_backend_config()}, {dist.get_world_size()} ranks and a timeout of {timeout}. Leave the call "
            "out, or pass ranks= and timeout= to launch."
        )


def _has_backends(config: str, backend: str | None, gpu: int | None) -> bool:
    """Whether a group with the backends ``config`` has those that ``backend`` names, such as "nccl".

    A name without a device means the backend of the GPU, unless ``gpu``, the index of this rank's, is None.

    >>> [_has_backends("cpu:gloo,cuda:nccl", name, 0) for name in ("nccl", "cuda:nccl,cpu:gloo", "gloo")]
    [True, True, False]
    >>> [_has_backends("cpu:gloo", name, None) for name in ("gloo", "nccl")]
    [True, False]
    """
    if backend is None:
        return True
    device = "cpu"
    if gpu is not None:
        device = "cuda"
    parts = [part if ":" in part else f"{device}:{part}" for part in backend.lower().split(",")]
    return set(config.split(",")).issuperset(parts)


def _is_current(device: torch.device | int | None, gpu: int | None) -> bool:
    """Whether ``device``, the argument ``device_id``, is None or the GPU with the index ``gpu``; the CPU if
    ``gpu`` is None.

    >>> [_is_current(device, 1) for device in (None, 1, torch.device("cuda:1"), 0, torch.device("cpu"))]
    [True, True, True, False, False]
    >>> [_is_current(device, None) for device in (None, torch.device("cpu"), 0, torch.device("cuda"))]
    [True, True, False, False]
    """
    if device is None:
        return True
    if isinstance(device, int):
        device = torch.device("cuda", device)
    if gpu is None:
        return device.type == "cpu"
    return device == torch.device("cuda", gpu)
