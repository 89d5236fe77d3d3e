"""Replicas, on this host or on Ray, and lines on several of them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from para_core.fleet.choice_of_ray import uses_ray
from para_core.fleet.failures import ReplicaDied, RequestCancelled, RequestFailed
from para_core.fleet.local_replica import LocalReplica
from para_core.fleet.memory import Memory
from para_core.fleet.outputs import Output, Result
from para_core.fleet.prompt_file import Line, Problem
from para_core.fleet.rank import ReplicaOptions
from para_core.fleet.recipe import Recipe
from para_core.fleet.request import Request


class Replica(Protocol):
    """A group of ranks that runs one pipeline, one request at a time."""

    @property
    def running(self) -> bool:
        """Whether the pipeline is loaded, or being loaded, and the replica was not stopped since then."""

    async def start(self) -> None:
        """Load the pipeline on all ranks. If the replica runs already, it is stopped first.

        Raise RuntimeError if a rank cannot start, or loading fails.
        """

    async def stop(self) -> None:
        """End all ranks at once, even in the middle of a step. A rank in this process ends after its step."""

    async def alive(self) -> bool:
        """Whether the replica has loaded and none of its ranks has ended."""

    async def memory(self) -> Memory | None:
        """Return the predicted memory of a rank, or None if it cannot be predicted."""

    async def generate(self, request: Request) -> Result:
        """Run one request after all requests that were sent earlier, and return its result.

        Raise RequestFailed if the pipeline raised on all ranks, and ReplicaDied if a rank died. The replica is then
        stopped.
        """

    async def generate_batch(
        self, batch: Sequence[tuple[str, Request]], progress: Callable[[int | Output], None] = lambda event: None
    ) -> list[Result | RequestFailed | RequestCancelled]:
        """Run named requests with the same ``batch_key`` as one call of the pipeline, and return the outcome of each.

        ``progress`` is called with the numbers of finished steps and partial images. If the call fails, each request is
        run alone, because only one of them may be the reason. Raise ReplicaDied if the replica is not running, or a
        rank died. The replica is then stopped.
        """

    def cancel(self, id_: str) -> None:
        """Cancel a running request after its current step. A batch ends early only if all of it is cancelled."""


def make_replicas(recipe: Recipe, options: ReplicaOptions, count: int) -> Sequence[Replica]:
    """Return ``count`` replicas, which are not started. On Ray, they start inside :func:`connected`."""
    names = [f"replica {number}" for number in range(count)]
    if uses_ray(spread=options.spread):
        from para_core.fleet import group

        return [group.Replica(recipe, options, name) for name in names]
    own_process, ranks = count * options.ranks == 1, options.ranks
    # Replicas share the CPU cores, as ranks do.
    env = {"OMP_NUM_THREADS": "1"} if count > 1 and "OMP_NUM_THREADS" not in os.environ else {}
    has_gpus = torch.cuda.device_count() > 0  # without initializing CUDA
    return [
        LocalReplica(
            recipe,
            options,
            name,
            devices=range(number * ranks, (number + 1) * ranks) if has_gpus else None,
            env=env,
            own_process=own_process,
        )
        for number, name in enumerate(names)
    ]


def connect(options: ReplicaOptions, count: int, *, debug: bool = False) -> bool:
    """Prepare what ``count`` replicas run on. Return whether this call connected to Ray.

    Raise ValueError if there are too few GPUs, or on Ray, the cluster is too small.
    """
    if uses_ray(spread=options.spread):
        from para_core.fleet import group

        connected = group.connect(options.ranks * count, debug=debug)
        group.require_cluster(options, count)
        return connected
    gpus, needed = torch.cuda.device_count(), options.ranks * count
    if gpus and needed > gpus:
        raise ValueError(
            f"{count} replicas of {options.ranks} ranks need {needed} GPUs, and this host has {gpus}: use fewer "
            "(--replicas, --ranks), or the hosts of a Ray cluster: set RAY_ADDRESS."
        )
    return False


@contextmanager
def connected(options: ReplicaOptions, count: int, *, debug: bool) -> Iterator[None]:
    """Inside this context, ``count`` replicas can run. See :func:`connect`."""
    is_own = connect(options, count, debug=debug)
    try:
        yield
    finally:
        if is_own:
            import ray

            ray.shutdown()


def generate_lines(
    lines: Sequence[Line],
    recipe: Recipe,
    options: ReplicaOptions,
    replicas: int,
    *,
    write: Callable[[Line, Result], None],
    debug: bool = False,
) -> list[Problem]:
    """Generate ``lines`` on ``replicas`` replicas, and return a :class:`Problem` for each line without a result.

    ``write`` is called in this process with each line and its result. A replica that dies is restarted, and tries its
    current line once more.
    """
    waiting, problems = iter(lines), list[Problem]()

    async def generate_waiting(replica: Replica) -> None:
        await replica.start()
        try:
            for line in waiting:
                try:
                    try:
                        result = await replica.generate(line.request)
                    except ReplicaDied:
                        await replica.start()
                        result = await replica.generate(line.request)
                    write(line, result)
                except (RequestFailed, ReplicaDied) as error:
                    problems.append(Problem(line.number, str(error)))
                    if not replica.running:
                        await replica.start()
        finally:
            await replica.stop()

    async def generate_all() -> None:
        all_replicas = make_replicas(recipe, options, min(replicas, len(lines)))
        await asyncio.gather(*[generate_waiting(replica) for replica in all_replicas])

    with connected(options, replicas, debug=debug):
        asyncio.run(generate_all())
    return sorted(problems, key=lambda problem: problem.number)
