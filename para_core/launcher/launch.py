"""``launch``: a pipeline on several ranks, driven by one Python process.

It validates the arguments; the handle (``handle.py``) starts the ranks. Tests: tests/launcher/test_calls.py,
tests/launcher/test_life.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from para_core.launcher.display import Display
from para_core.launcher.handle import Launched, LaunchOptions
from para_core.launcher.processes import IN_RANK, RankGroup, start_local_ranks

# Longest timeout in seconds. Operating systems and torch take no infinite one.
_LONGEST = 365 * 24 * 3600.0


def launch(
    load: Callable[[], Any],
    ranks: int | None = None,
    *,
    devices: Sequence[int | str] | None = None,
    hosts: int | None = None,
    timeout: float = 1800.0,
    env: Mapping[str, str] | None = None,
    progress: bool | Callable[[int, int | None], None] = True,
) -> Launched:
    """Start ranks, load a pipeline on each of them, and return a handle that is called like the pipeline.

    This process is no rank and needs no launcher: it may be a script, a notebook, or a web server. Each rank
    is a process of its own, with the process group made and its GPU selected before ``load`` runs. All ranks
    end with the handle (``close``, ``with``, garbage collection) and with this process, however it ends.

    Args:
        load: Function that returns the pipeline, or any other callable or object with methods. It is sent to
            the ranks by value if ``__main__`` or a module of yours defines it, which needs cloudpickle (``pip
            install 'para_core[launch]'``).
        ranks: Number of ranks. Defaults to the number of ``devices``, else of the GPUs that this process
            sees, else 1.
        devices: The GPUs of the ranks, as numbers or as names for CUDA_VISIBLE_DEVICES. Defaults to the first
            ones.
        hosts: Number of hosts of a running Ray cluster (``ray start``) on which to start as many ranks each.
            By default all ranks are on this host, without Ray. Each host needs the same Python packages.
        timeout: Seconds without progress (no step, no answer) after which the ranks are ended, and the call
            raises; also the timeout of their collectives.
        env: Further environment variables of the ranks.
        progress: Whether to show progress on standard error, or a function of the numbers of finished and of
            all steps.

    Raises:
        TypeError, ValueError: If an argument is invalid.
        RuntimeError: If this process is itself a rank, of ``launch`` or of torchrun, or if there is no Ray
            cluster for ``hosts``.
        RankDied: If a rank ends while it loads.
        Exception: What ``load`` raises on a rank.

    Example::

        def load():
            pipe = FluxPipeline.from_pretrained("black-forest-labs/FLUX.1-dev", dtype=torch.bfloat16)
            return parallelize_pipe(pipe.to("cuda"))

        with launch(load, ranks=4) as pipe:
            image = pipe("a cat", num_inference_steps=28).images[0]
    """
    _check_no_rank()
    if not callable(load):
        raise TypeError(f"load is {load!r}; expected a function that returns the pipeline.")
    _check_devices(devices)
    count = _count_ranks(ranks, devices, hosts)
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout={timeout!r}; expected a number of seconds, float('inf') for none.")
    if not timeout > 0:
        raise ValueError(f"timeout={timeout}; expected a positive number of seconds.")
    timeout = min(timeout, _LONGEST)
    if not isinstance(progress, bool) and not callable(progress):
        raise TypeError(
            f"progress={progress!r}; expected True, False, or a function of the numbers of finished and of all steps."
        )
    environment = dict(env or {})
    for name, value in environment.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"env has {name!r}: {value!r}; expected strings.")
        if name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            raise ValueError(f"env has {name}, which launch sets for each rank.")
    # Ranks that start again read the same relative paths.
    folder = Path.cwd()

    def start() -> RankGroup:
        if hosts is None:
            return start_local_ranks(count, devices, environment, folder)
        from para_core.launcher.hosts import start_ranks_on_hosts

        return start_ranks_on_hosts(count, hosts, timeout, environment)

    return Launched(
        LaunchOptions(
            load, count, start, timeout=timeout, silence=timeout, display=partial(Display, progress)
        )
    )


def _check_no_rank() -> None:
    """Raise RuntimeError if this process is a rank, which would start ranks of its own."""
    if IN_RANK in os.environ:
        raise RuntimeError(
            "launch was called on a rank: ranks import the module that contains the call. Put the call into a function "
            "or below `if __name__ == '__main__':`, or load into a module of its own."
        )
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        raise RuntimeError(
            f"this process is rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} that torchrun or another "
            "launcher started. launch starts ranks by itself: run the program with python."
        )


def _check_devices(devices: Any) -> None:
    """Raise TypeError or ValueError if ``devices`` is neither None nor a list of numbers and names.

    Whether they are different GPUs is checked by ``start_local_ranks``, which knows their names.
    """
    if devices is None:
        return
    if isinstance(devices, str) or not isinstance(devices, Sequence):
        raise TypeError(f"devices={devices!r}; expected a list, such as [0, 1].")
    for device in devices:
        if isinstance(device, bool) or not isinstance(device, (int, str)):
            raise TypeError(f"devices has {device!r}; expected numbers, or names for CUDA_VISIBLE_DEVICES.")
        # An entry of CUDA_VISIBLE_DEVICES that is no GPU hides it and all after it: the ranks would use the
        # CPU.
        if str(device).strip() == "" or str(device).strip().startswith("-"):
            raise ValueError(
                f"devices has {device!r}; expected numbers of at least 0, or names for CUDA_VISIBLE_DEVICES."
            )


def _count_ranks(ranks: int | None, devices: Sequence[int | str] | None, hosts: int | None) -> int:
    """Return the number of ranks.
    Raise TypeError or ValueError if it is invalid, or differs from that of devices.
    """
    if hosts is not None:
        if isinstance(hosts, bool) or not isinstance(hosts, int) or hosts < 1:
            raise ValueError(f"hosts={hosts!r}; expected a number of hosts of at least 1.")
        if devices is not None:
            raise ValueError("hosts= with devices=: on several hosts Ray chooses the GPUs. Pass one of them.")
        if ranks is None:
            raise ValueError(f"hosts={hosts} without ranks: pass the number of ranks on all hosts together.")
    if ranks is None and devices is not None:
        ranks = len(devices)
    if ranks is None:
        import torch

        # This asks the driver without initializing CUDA.
        ranks = max(1, torch.cuda.device_count())
    if isinstance(ranks, bool) or not isinstance(ranks, int):
        raise TypeError(f"ranks={ranks!r}; expected an integer.")
    if ranks < 1:
        raise ValueError(f"ranks={ranks}; expected at least 1.")
    if devices is not None and len(devices) != ranks:
        raise ValueError(f"ranks={ranks} and {len(devices)} devices: expected one device for each rank.")
    if hosts is not None and ranks % hosts:
        raise ValueError(f"ranks={ranks} and hosts={hosts}; expected as many ranks on each host.")
    return ranks
