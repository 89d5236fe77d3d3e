"""Requests of a server, waiting or running: how many there may be, batches, retries, cancellation and
metrics.

`server.py` and `videos.py` start a :class:`Job`, wait for it and end it, in this order; `pool.py` runs
batches of them and finishes them. Tests: tests/fleet/test_queue.py, tests/fleet/test_server.py.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from para_core.fleet.http.bodies import ServerOptions
from para_core.fleet.http.errors import RequestError, response_to
from para_core.fleet.outputs import Output, Result
from para_core.fleet.request import Request, batch_key
from para_core.launcher.errors import Cancelled, RankDied

logger = logging.getLogger(__name__)
# Interval in seconds at which a waiting request checks that its client is still connected.
_POLL_SECONDS = 0.2


class Metrics:
    """Prometheus metrics of one server. Their names begin with ``para_core_``."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        names = {"namespace": "para_core", "registry": self.registry}
        self.accepted = Gauge("requests_accepted", "Requests that wait or run.", **names)
        self.waiting = Gauge("requests_waiting", "Requests that are in no batch yet.", **names)
        self.requests = Counter("requests", "Ended requests by outcome.", ["outcome"], **names)
        self.steps = Counter("steps", "Denoising steps; its rate is steps per second.", **names)
        buckets = (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
        self.seconds = Histogram(
            "request_seconds", "Seconds from accepting to answering.", buckets=buckets, **names
        )
        self.deaths = Counter("replica_deaths", "Requests whose replica died.", **names)


@dataclass(eq=False)
class Job:
    """A request that waits or runs."""

    id_: str
    request: Request
    metrics: Metrics
    task: asyncio.Future[Result] = field(init=False)  # of the result, after retries
    # Of the current try: a new future for each. Its exception is one of para_core.fleet.failures.
    answer: asyncio.Future[Result] = field(init=False)
    # What progress was called with. None is the end, which answer_events adds.
    events: asyncio.Queue[int | Output | None] = field(default_factory=asyncio.Queue)
    steps_done: int = 0
    cancelled: bool = False  # whether Jobs.cancel was called; the job may end with a result nevertheless

    def progress(self, event: int | Output) -> None:
        """Note an event of the request: the number of finished steps, or a partial image."""
        if event == self.steps_done:
            return
        if isinstance(event, int):
            self.metrics.steps.inc(max(0, event - self.steps_done))
            self.steps_done = event
        self.events.put_nowait(event)

    def finish(self, outcome: Result | Exception) -> None:
        """Set the answer of the current try. Raise InvalidStateError if it has one already."""
        if isinstance(outcome, Exception):
            self.answer.set_exception(outcome)
        else:
            self.answer.set_result(outcome)


class Replicas(Protocol):
    """Interface of replicas that each run one batch at a time, such as a ``Pool``."""

    @property
    def count(self) -> int:
        """Number of replicas, also of those that cannot answer now. It never changes, and is at least 1."""

    async def run(self, batch: Sequence[Job]) -> None:
        """Run jobs as one batch on a free replica, and finish them. Return or raise when the replica is free
        again: :class:`Jobs` counts the free ones by that.
        """

    def cancel(self, job: Job) -> None:
        """Cancel a job that was given to ``run``: at once if it waits for a replica, after its current step if it
        runs. The task of its batch may not have begun: then ``run`` gets a job that has its answer already.
        """

    async def ready(self) -> int:
        """Return the number of replicas that can answer."""


class Jobs:
    """All requests of a server that wait or run, first come, first served, and its metrics. A request that is
    retried waits again behind the others: what killed its replica may be the request itself.

    Requests with the same :func:`~para_core.fleet.request.batch_key` may be generated as one batch, if
    ``fits`` returns that they fit into memory together. All methods are called in one event loop, so nothing
    is locked.
    """

    def __init__(
        self,
        replicas: Replicas,
        options: ServerOptions,
        fits: Callable[[Sequence[Request]], bool] = lambda _: True,
    ) -> None:
        self._replicas, self._options, self._fits = replicas, options, fits
        self._free = replicas.count
        self._jobs: dict[str, Job] = {}  # those that wait or run, by id
        self._waiting: list[Job] = []  # those of them that are in no batch yet
        self._tasks: set[asyncio.Task[None]] = set()
        self._start: float | None = time.monotonic()  # of the server; None after the first request
        self.metrics = Metrics()

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def waiting(self) -> int:
        """Number of requests that are in no batch yet."""
        return len(self._waiting)

    def require_room(self) -> None:
        """Raise RequestError (429) if as many requests wait or run as the limits allow."""
        room = self._replicas.count + self._options.waiting
        if len(self._jobs) >= room:
            self.metrics.requests.labels("refused").inc()
            sample = self.metrics.registry.get_sample_value
            ended = sample("para_core_request_seconds_count")
            mean = 1.0
            if ended:
                mean = sample("para_core_request_seconds_sum") / ended
            seconds = max(1, round(mean * self._options.waiting / self._replicas.count))
            message = f"{len(self._jobs)} requests run or wait; at most {room} may. Retry in {seconds} s."
            raise RequestError(429, "busy", message, {"Retry-After": str(seconds)})

    def start(self, request: Request, id_: str) -> Job:
        """Send ``request`` to the queue under the name ``id_``.

        Raise RequestError if too many requests wait already, or the name is in use.
        """
        self.require_room()
        if id_ in self._jobs:
            raise RequestError(
                409, "invalid_id", f"X-Request-Id {id_!r} is in use by a request that waits or runs."
            )
        if self._start is not None:
            logger.info(
                "request %s is the first, %.1f s after the start", id_, time.monotonic() - self._start
            )
            self._start = None
        logger.debug("request %s: accepted, seed %d, %d before it", id_, request.seed, len(self._jobs))
        job = self._jobs[id_] = Job(id_, request, self.metrics)
        self._enqueue(job)
        job.task = asyncio.ensure_future(self._run(job))
        return job

    def cancel(self, id_: str) -> None:
        """Cancel a request: at once if it waits, after its current step if it runs.

        Raise RequestError (404) if no such request waits or runs.
        """
        if id_ not in self._jobs:
            raise RequestError(404, "not_found", f"no request {id_[:64]!r} is waiting or running.")
        job = self._jobs[id_]
        job.cancelled = True
        if job in self._waiting:
            self._waiting.remove(job)
            job.finish(Cancelled("cancelled before its first step."))
        elif not job.answer.done():
            self._replicas.cancel(job)

    async def wait(
        self,
        job: Job,
        disconnected: Callable[[], Awaitable[bool]] | None = None,
        seconds: float = float("inf"),
    ) -> Result:
        """Wait for a job at most ``seconds``, and return its result. The caller then calls :meth:`end`.

        Raise RequestError if the job failed or was cancelled, its time ran out, or its client has
        ``disconnected``.
        """
        start = time.monotonic()
        outcome = "failed"
        try:
            while not (await asyncio.wait({job.task}, timeout=_POLL_SECONDS))[0]:
                if time.monotonic() - start > seconds:
                    outcome = "timed_out"
                    raise RequestError(504, "timed_out", f"not done after {seconds:g} s; cancelled.")
                if disconnected is not None and await disconnected():
                    outcome = "cancelled"
                    raise RequestError(499, "client_left", "the client disconnected; cancelled.")
            error = job.task.exception()
            if isinstance(error, Cancelled):
                outcome = "cancelled"
            if error is not None:
                raise response_to(error)
            outcome = "done"
            return job.task.result()
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        finally:
            self.metrics.requests.labels(outcome).inc()
            self.metrics.seconds.observe(time.monotonic() - start)

    def end(self, job: Job) -> None:
        """Cancel the request if it still runs, and forget the job once no replica works on it."""
        if job.task.done():
            self._forget(job)
        else:
            self.cancel(job.id_)
            job.task.add_done_callback(lambda _: self._forget(job))

    def _forget(self, job: Job) -> None:
        self._jobs.pop(job.id_, None)
        if not job.task.cancelled():
            # Read the exception, or asyncio would log that it was never retrieved.
            job.task.exception()

    async def _run(self, job: Job) -> Result:
        """Return the result of a job that is in the queue. Enqueue it again if its replica died and it may
        retry, which a cancelled one may not.
        """
        retries = self._options.retries
        while True:
            try:
                return await job.answer
            except RankDied:
                self.metrics.deaths.inc()
                if job.cancelled:
                    raise Cancelled("cancelled before its replica died.") from None
                job.steps_done = 0
                retries -= 1
                if retries < 0:
                    raise
                logger.warning("request %s: its replica died; it waits again", job.id_)
                self._enqueue(job)

    def _enqueue(self, job: Job) -> None:
        job.answer = asyncio.get_running_loop().create_future()
        self._waiting.append(job)
        self._dispatch()

    def _dispatch(self) -> None:
        """Give batches to the free replicas. Called whenever a job is enqueued or a replica becomes free."""
        while self._free and self._waiting:
            self._free -= 1
            # The batch runs in a separate task, so that it ends properly even if no client waits any more: a
            # replica that died is still restarted.
            task = asyncio.ensure_future(self._run_batch(self._next_batch()))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _next_batch(self) -> list[Job]:
        """Remove from the queue and return the first request, and later requests that can be in the same
        batch.
        """
        first = self._waiting.pop(0)
        batch, key = [first], batch_key(first.request)
        if self._options.max_batch > 1 and key is not None:
            for job in list(self._waiting):
                together = [*(other.request for other in batch), job.request]
                if (
                    len(batch) < self._options.max_batch
                    and batch_key(job.request) == key
                    and self._fits(together)
                ):
                    self._waiting.remove(job)
                    batch.append(job)
        return batch

    async def _run_batch(self, batch: Sequence[Job]) -> None:
        # A job may be retried on another replica before this one is free again, so its answer may be
        # replaced.
        answers = [job.answer for job in batch]
        died = RankDied("the replica ended without an answer.")
        try:
            await self._replicas.run(batch)
        except RankDied as error:
            died = error
        finally:
            for answer in answers:
                if not answer.done():
                    answer.set_exception(died)
            self._free += 1
            self._dispatch()
