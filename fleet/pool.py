"""Replicas that one process holds itself, to mount a :class:`~para_core.fleet.server.Server` in an application."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from para_core.fleet import group
from para_core.fleet.failures import ReplicaDied
from para_core.fleet.jobs import Job
from para_core.fleet.outputs import Output, Result
from para_core.fleet.rank import ReplicaOptions
from para_core.fleet.recipe import Recipe
from para_core.fleet.request import Request


class Pool:
    """Replicas on Ray that one event loop uses, each for one batch at a time. A replica that died starts again.

    It is the first argument of :class:`~para_core.fleet.server.Server`, and can generate without one. The methods are
    called in the same event loop.

    Attributes:
        count: The number of replicas.
    """

    def __init__(self, recipe: Recipe, options: ReplicaOptions, replicas: int = 1) -> None:
        if replicas < 1:
            raise ValueError(f"replicas is {replicas}; expected at least 1.")
        self._options, self.count = options, replicas
        self._replicas = [group.Replica(recipe, options, f"replica {number}") for number in range(replicas)]
        self._free: asyncio.Queue[group.Replica] = asyncio.Queue()
        self._running: dict[str, group.Replica] = {}

    async def start(self) -> None:
        """Connect to Ray, and load the pipeline on all replicas. For the exceptions see :meth:`group.Replica.start`."""
        group.connect(self._options.ranks * self.count, debug=False)
        group.require_cluster(self._options, self.count)
        await asyncio.gather(*[replica.start() for replica in self._replicas])
        for replica in self._replicas:
            self._free.put_nowait(replica)

    async def stop(self) -> None:
        """End all replicas."""
        await asyncio.gather(*[replica.stop() for replica in self._replicas])

    async def generate(self, request: Request) -> Result:
        """Generate on the next free replica. Raise RequestFailed if the pipeline raised, ReplicaDied if a rank died."""
        replica = await self._free.get()
        try:
            return await replica.generate(request)
        finally:
            await self._give_back(replica)

    async def run(self, batch: Sequence[Job]) -> None:
        """Run jobs as one batch on a free replica, and finish them. Return or raise when the replica is free again."""
        replica = await self._free.get()
        self._running.update(dict.fromkeys([job.id_ for job in batch], replica))

        def progress(event: int | Output) -> None:
            for job in batch:
                job.progress(event)

        try:
            outcomes = await replica.generate_batch([(job.id_, job.request) for job in batch], progress)
            for job, outcome in zip(batch, outcomes, strict=True):
                job.finish(outcome)
        except ReplicaDied as error:
            for job in batch:
                job.finish(error)
        finally:
            for job in batch:
                self._running.pop(job.id_, None)
            await self._give_back(replica)

    async def _give_back(self, replica: group.Replica) -> None:
        """Let the next batch use the replica, after it has started again if it died."""
        try:
            if not replica.actors:
                await replica.start()
        finally:
            self._free.put_nowait(replica)

    def cancel(self, job: Job) -> None:
        """Cancel a running job after its current step."""
        replica = self._running.get(job.id_)
        if replica is not None and replica.actors:
            group.cancel(replica.actors[0], job.id_)

    async def ready(self) -> int:
        """Return the number of replicas that can answer."""
        return sum(await asyncio.gather(*[replica.alive() for replica in self._replicas]))
