"""Replicas that one process owns: it starts them, gives them batches, and starts them again when they die.

`host_server.py` makes the pool and starts it, and `jobs.py` gives it batches, no more at once than it has
replicas. A replica itself stands in `../local_replica.py` and `../group.py`. Tests:
tests/fleet/test_queue.py.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress

from para_core.fleet.http.jobs import Job
from para_core.fleet.memory import Memory
from para_core.fleet.outputs import Output, Result
from para_core.fleet.rank import ReplicaOptions
from para_core.fleet.recipe import Recipe
from para_core.fleet.replica import Replica
from para_core.fleet.replicas import cluster_connection, make_replicas
from para_core.fleet.request import Request
from para_core.launcher.errors import Cancelled, RankDied

# Seconds between two checks that the ranks of all replicas live, and before the next attempt to start one.
_WATCH_SECONDS = 1.0
logger = logging.getLogger(__name__)


class Pool:
    """Replicas that one event loop uses, each for one batch at a time. A replica that died starts again.

    They are on this host or on a Ray cluster, see :func:`~para_core.fleet.replicas.cluster_connection`, to
    which this process is connected between :meth:`start` and :meth:`stop`. ``debug`` shows Ray's log
    messages.

    It is the first argument of :class:`~para_core.fleet.http.server.Server`, and can generate without one.
    The methods are called in the same event loop. A replica is in the queue of free ones, or one task owns
    it: that of a batch or of a restart. One that cannot start again is not free, and the next attempt
    follows, so that batches wait for it, or for another replica, instead of failing.

    Attributes:
        count: The number of replicas.
    """

    def __init__(
        self, recipe: Recipe, options: ReplicaOptions, replicas: int = 1, *, debug: bool = False
    ) -> None:
        if replicas < 1:
            raise ValueError(f"replicas is {replicas}; expected at least 1.")
        self._options, self.count, self._debug = options, replicas, debug
        self._connection = ExitStack()
        self._connecting: asyncio.Future[None] | None = None
        self._replicas = make_replicas(recipe, options, replicas)
        # After stop it holds a None, which each caller that waits passes on to the next.
        self._free: asyncio.Queue[Replica | None] = asyncio.Queue()
        self._running: dict[str, Replica] = {}  # replicas of the jobs that run, by the id of the job
        self._open = False  # between start and stop
        self._watching: asyncio.Task[None] | None = None
        self._restarts: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Load the pipeline on all replicas, and generate the requests of ``options.warmup`` on each.

        For the exceptions see :func:`~para_core.fleet.replicas.cluster_connection`, :meth:`Replica.start` and
        :meth:`Replica.generate`.
        """
        # Ray takes seconds to start, in which the event loop must answer HTTP and see signals. A thread
        # cannot be cancelled, so stop waits for it.
        self._connecting = asyncio.ensure_future(asyncio.to_thread(self._connect))
        await asyncio.shield(self._connecting)
        _restore_sigterm()
        await asyncio.gather(*[self._start(replica) for replica in self._replicas])
        self._take_free()  # the None of an earlier stop
        self._open = True
        for replica in self._replicas:
            self._free.put_nowait(replica)
        self._watching = asyncio.ensure_future(self._watch())

    def _connect(self) -> None:
        self._connection.enter_context(cluster_connection(self._options, self.count, debug=self._debug))

    async def _start(self, replica: Replica) -> None:
        await replica.start()
        for request in self._options.warmup:
            start = time.monotonic()
            await replica.generate(request)
            logger.info("warmed up for %s after %.1f s", request.size, time.monotonic() - start)

    async def memory(self) -> Memory | None:
        """Return the predicted memory of a rank, or None if it cannot be predicted."""
        return await self._replicas[0].memory()

    async def stop(self) -> None:
        """End all replicas. Calls that wait for a replica, or wait later, raise RankDied."""
        self._open = False
        tasks = list(self._restarts)
        if self._watching is not None:
            tasks.append(self._watching)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._take_free()
        self._free.put_nowait(None)
        if self._connecting is not None:
            with suppress(Exception):  # start has raised it.
                await self._connecting
        await asyncio.gather(*[replica.stop() for replica in self._replicas])
        self._connection.close()

    async def generate(self, request: Request) -> Result:
        """Generate on the next free replica. Raise RequestFailed if the pipeline raised, RankDied if a rank
        died or the pool was stopped.
        """
        replica = await self._wait_for_replica()
        try:
            return await replica.generate(request)
        finally:
            await self._give_back(replica)

    async def run(self, batch: Sequence[Job]) -> None:
        """Run jobs as one batch on a free replica, and finish them. Return or raise when the replica is free
        again, or after the first failed attempt to start it again.

        Raises:
            RankDied: The pool was stopped. The jobs are then not finished.
        """
        replica = await self._wait_for_replica()
        # The others were cancelled while they waited for the replica.
        jobs = [job for job in batch if not job.answer.done()]
        self._running.update(dict.fromkeys([job.id_ for job in jobs], replica))

        def progress(event: int | Output) -> None:
            for job in jobs:
                job.progress(event)

        try:
            if jobs:
                outcomes = await replica.generate_batch([(job.id_, job.request) for job in jobs], progress)
                for job, outcome in zip(jobs, outcomes, strict=True):
                    job.finish(outcome)
        except RankDied as error:
            for job in jobs:
                job.finish(error)
        finally:
            for job in jobs:
                self._running.pop(job.id_, None)
            await self._give_back(replica)

    async def _wait_for_replica(self) -> Replica:
        replica = await self._free.get()
        if replica is None:
            self._free.put_nowait(None)
            raise RankDied("the pool of replicas was stopped.")
        return replica

    async def _give_back(self, replica: Replica) -> None:
        """Let the next batch use the replica, after it has started again if it died."""
        try:
            # After stop, a batch whose replica was stopped must not start it again.
            if not replica.running and self._open:
                await replica.start()
        except RuntimeError as error:
            logger.warning("a replica cannot start again: %s The next attempt follows.", error)
        finally:
            if self._open and replica.running:
                self._free.put_nowait(replica)
            elif self._open:
                self._begin_restart(replica, delay=_WATCH_SECONDS)

    async def _watch(self) -> None:
        """Start replicas again whose ranks died while no batch ran, for ever."""
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            try:
                lives = await asyncio.gather(*[replica.alive() for replica in self._replicas])
            except Exception:
                # The watch must go on: without it a replica that dies later would never start again.
                logger.exception("cannot check whether the replicas live; the next attempt follows.")
                continue
            dead = [replica for replica, alive in zip(self._replicas, lives, strict=True) if not alive]
            # A replica that is not free runs a batch, after which it starts again, or is starting already.
            # The queue is empty only between two lines without an await, so no batch can take a dead replica
            # meanwhile.
            for replica in self._take_free():
                if replica in dead:
                    self._begin_restart(replica)
                else:
                    self._free.put_nowait(replica)

    def _begin_restart(self, replica: Replica, delay: float = 0.0) -> None:
        """Own a replica that is not free in a task that starts it again, after ``delay`` seconds, and frees it."""
        restart = asyncio.ensure_future(self._restart(replica, delay))
        self._restarts.add(restart)
        restart.add_done_callback(self._restarts.discard)

    async def _restart(self, replica: Replica, delay: float) -> None:
        await asyncio.sleep(delay)
        try:
            # It may have ended a restart since it was checked.
            if not await replica.alive():
                await replica.stop()
        finally:
            await self._give_back(replica)

    def _take_free(self) -> list[Replica]:
        """Return the free replicas, which the caller then owns."""
        taken = [self._free.get_nowait() for _ in range(self._free.qsize())]
        return [replica for replica in taken if replica is not None]

    def cancel(self, job: Job) -> None:
        """Cancel a job: at once if it still waits for a replica, after its current step if it runs."""
        replica = self._running.get(job.id_)
        if replica is None:
            job.finish(Cancelled("cancelled before its first step."))
        else:
            replica.cancel(job.id_)

    async def ready(self) -> int:
        """Return the number of replicas that can answer."""
        return sum(await asyncio.gather(*[replica.alive() for replica in self._replicas]))


def _restore_sigterm() -> None:
    """Install Python's handler of SIGTERM again: Ray has replaced it below Python by one that writes a stack
    trace.
    """
    handler = signal.getsignal(signal.SIGTERM)
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)
