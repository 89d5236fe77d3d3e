"""Make replicas, on this host or on Ray, and generate the lines of a prompt file on several of them.

A *line* is one request of ``para_core generate``, with the name of its files. The command calls
:func:`generate_lines` with ``--replicas 2`` and more; a single group of ranks runs in cli/generation.py. The
server takes only :func:`make_replicas` and :func:`cluster_connection`, and has a queue of its own
(fleet/http/pool.py). Tests: tests/fleet/test_queue.py, tests/fleet/test_replicas.py.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from para_core.fleet.choice_of_ray import uses_ray
from para_core.fleet.failures import RequestFailed
from para_core.fleet.local_replica import LocalReplica
from para_core.fleet.outputs import Result
from para_core.fleet.prompt_file import Line, Problem
from para_core.fleet.rank import ReplicaOptions
from para_core.fleet.recipe import Recipe
from para_core.fleet.replica import Replica
from para_core.launcher.errors import RankDied


def make_replicas(recipe: Recipe, options: ReplicaOptions, count: int) -> Sequence[Replica]:
    """Return ``count`` replicas, which are not started. On Ray, they start inside :func:`cluster_connection`.

    On this host, a single replica of one rank runs in a thread of this process, which holds the weights
    then. The ranks of others are processes.
    """
    names = [f"replica {number}" for number in range(count)]
    if uses_ray(spread=options.spread):
        from para_core.fleet import group

        return [group.RayReplica(recipe, options, name) for name in names]
    own_process = count * options.ranks == 1
    env: dict[str, str] = {}
    if count > 1 and "OMP_NUM_THREADS" not in os.environ:
        # Replicas share the CPU cores, as ranks do.
        env["OMP_NUM_THREADS"] = "1"
    has_gpus = torch.cuda.device_count() > 0  # without initializing CUDA
    replicas: list[Replica] = []
    for number, name in enumerate(names):
        devices: Sequence[int] | None = None
        if has_gpus:
            devices = range(number * options.ranks, (number + 1) * options.ranks)
        replicas.append(
            LocalReplica(recipe, options, name, devices=devices, env=env, own_process=own_process)
        )
    return replicas


@contextmanager
def cluster_connection(options: ReplicaOptions, count: int, *, debug: bool) -> Iterator[None]:
    """Inside this context, ``count`` replicas can run: on Ray, this process is connected to a cluster.

    Raises:
        ValueError: There are too few GPUs, or on Ray, the cluster is too small.
    """
    if not uses_ray(spread=options.spread):
        _require_gpus(options.ranks, count)
        yield
        return
    import ray

    from para_core.fleet import ray_cluster

    has_connected = ray_cluster.connect(options.ranks * count, debug=debug)
    try:
        ray_cluster.require_cluster(options, count)
        yield
    finally:
        if has_connected:
            ray.shutdown()


def _require_gpus(ranks: int, count: int) -> None:
    """Raise ValueError if this host has GPUs, but fewer than ``count`` replicas of ``ranks`` ranks need."""
    gpus = torch.cuda.device_count()
    needed = ranks * count
    if gpus and needed > gpus:
        raise ValueError(
            f"{count} replicas of {ranks} ranks need {needed} GPUs, and this host has {gpus}: use fewer "
            "(--replicas, --ranks), or the hosts of a Ray cluster: set RAY_ADDRESS."
        )


def generate_lines(
    lines: Sequence[Line],
    recipe: Recipe,
    options: ReplicaOptions,
    replicas: int,
    *,
    write: Callable[[Line, Result], None],
    debug: bool = False,
) -> list[Problem]:
    """Generate ``lines`` on ``replicas`` replicas, and return a :class:`Problem` for each line without a
    result.

    ``write`` is called in this process with each line and its result. A replica that dies is restarted, and
    tries its current line once more. No more replicas are started than there are lines.

    Raises what :func:`cluster_connection` and ``write`` raise, and:

    Raises:
        RuntimeError: A replica cannot start.
    """
    # One iterator for all replicas: each takes the next line as soon as it is free.
    waiting = iter(lines)
    problems: list[Problem] = []

    async def generate_waiting(replica: Replica) -> None:
        await replica.start()
        try:
            for line in waiting:
                try:
                    result = await _generate_with_retry(replica, line)
                except (RequestFailed, RankDied) as error:
                    problems.append(Problem(line.number, str(error)))
                else:
                    write(line, result)
        finally:
            await replica.stop()

    count = min(replicas, len(lines))

    async def generate_all() -> None:
        all_replicas = make_replicas(recipe, options, count)
        await asyncio.gather(*[generate_waiting(replica) for replica in all_replicas])

    with cluster_connection(options, count, debug=debug):
        asyncio.run(generate_all())
    return sorted(problems, key=lambda problem: problem.number)


async def _generate_with_retry(replica: Replica, line: Line) -> Result:
    """Return the result of ``line``. Start ``replica`` if it does not run, and try once more if a rank dies.

    Raises:
        RequestFailed: The pipeline raised on all ranks. The replica goes on running.
        RankDied: Ranks died twice. The replica is then stopped, and starts again for the next line only.
        RuntimeError: The replica cannot start.
    """
    if not replica.running:
        await replica.start()
    try:
        return await replica.generate(line.request)
    except RankDied:
        await replica.start()
        return await replica.generate(line.request)
