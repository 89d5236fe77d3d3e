"""Requests of a server, waiting or running: how many there may be, batches, retries, cancellation and metrics."""

from __future__ import annotations

import asyncio
import contextvars
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from para_core.fleet.failures import ReplicaDied, RequestCancelled, RequestError, RequestFailed
from para_core.fleet.outputs import Output, Result
from para_core.fleet.reading import Limits
from para_core.fleet.request import Request, batch_key

_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
# Interval in seconds at which a waiting request checks that its client is still connected.
_POLL_SECONDS = 0.2


class Metrics:
    """Prometheus metrics of one server. Their names begin with ``para_core_``."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        names = {"namespace": "para_core", "registry": self.registry}
        self.accepted = Gauge("requests_accepted", "Requests that wait or run.", **names)
        self.waiting = Gauge("requests_waiting", "Requests that wait for a replica.", **names)
        self.requests = Counter("requests", "Ended requests by outcome.", ["outcome"], **names)
        self.steps = Counter("steps", "Denoising steps; its rate is steps per second.", **names)
        buckets = (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
        self.seconds = Histogram("request_seconds", "Seconds from accepting to answering.", buckets=buckets, **names)
        self.deaths = Counter("replica_deaths", "Requests whose replica died.", **names)


@dataclass(eq=False)
class QueuedRequest:
    """A request that waits or runs.

    Attributes:
        progress: Called with the number of finished steps, and with each partial image.
        answer: Future of the result. Its exception is one of :mod:`para_core.fleet.failures`.
    """

    id_: str
    request: Request
    progress: Callable[[int | Output], None]
    answer: asyncio.Future[Result]


class Replicas(Protocol):
    """Interface of replicas that each run one batch at a time. :class:`para_core.fleet.serving.Front` implements it."""

    async def run(self, batch: Sequence[QueuedRequest]) -> None:
        """Run requests as one batch on a free replica, and set their answers. Return when the replica is free again."""

    def cancel(self, id_: str) -> None:
        """Cancel a running request after its current step."""

    async def ready(self) -> int:
        """Return the number of replicas that can answer."""


class RequestQueue:
    """Queue of requests for replicas: first come, first served.

    Requests that differ only in prompt and seed may be generated as one batch.

    Args:
        slots (`int`): Number of replicas.
        max_batch (`int`): Largest number of requests that are generated as one batch.
        fits (`Callable`, *optional*): Returns whether requests fit into memory as one batch. Defaults to True.
    """

    def __init__(
        self,
        replicas: Replicas,
        slots: int,
        max_batch: int = 1,
        fits: Callable[[Sequence[Request]], bool] = lambda requests: True,
    ) -> None:
        self._max_batch, self._fits = max_batch, fits
        self._replicas, self._free = replicas, slots
        self._waiting: list[QueuedRequest] = []
        self._running: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        # Replicas are called in a copy of this context, and not in that of an HTTP request: when a client disconnects,
        # Ray Serve cancels every Ray task started in the context of its request, even ranks in the middle of a step.
        self._context = contextvars.copy_context()

    async def generate(self, id_: str, request: Request, progress: Callable[[int | Output], None]) -> Result:
        """Run a request as soon as a replica is free, and return its result.

        ``progress`` is called with the number of finished steps, and with each partial image. Raise RequestFailed if
        the pipeline raised on all ranks, RequestCancelled if :meth:`cancel` was called, and ReplicaDied if the replica
        died.
        """
        entry = QueuedRequest(id_, request, progress, asyncio.get_running_loop().create_future())
        self._waiting.append(entry)
        self._dispatch()
        return await asyncio.shield(entry.answer)

    def cancel(self, id_: str) -> None:
        """Cancel a request: at once if it waits, after its current step if it runs."""
        for entry in self._waiting:
            if entry.id_ == id_:
                self._waiting.remove(entry)
                entry.answer.set_exception(RequestCancelled("cancelled before its first step."))
                return
        if id_ in self._running:
            self._context.copy().run(self._replicas.cancel, id_)

    async def ready(self) -> int:
        """Return the number of replicas that can answer."""
        return await self._replicas.ready()

    def _dispatch(self) -> None:
        while self._free and self._waiting:
            self._free -= 1
            batch = self._next_batch()
            self._running.update(entry.id_ for entry in batch)
            # The batch runs in a separate task, so that it ends properly even if no client waits any more: a replica
            # that died is still restarted.
            task = asyncio.get_running_loop().create_task(self._run(batch), context=self._context.copy())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _next_batch(self) -> list[QueuedRequest]:
        """Remove from the queue and return the first request, and later requests that can be in the same batch."""
        first = self._waiting.pop(0)
        batch, key = [first], batch_key(first.request)
        if self._max_batch > 1 and key is not None:
            for entry in list(self._waiting):
                together = [*(other.request for other in batch), entry.request]
                if len(batch) < self._max_batch and batch_key(entry.request) == key and self._fits(together):
                    self._waiting.remove(entry)
                    batch.append(entry)
        return batch

    async def _run(self, batch: Sequence[QueuedRequest]) -> None:
        try:
            await self._replicas.run(batch)
        finally:
            for entry in batch:
                if not entry.answer.done():
                    entry.answer.set_exception(ReplicaDied("the replica ended without an answer."))
            self._running.difference_update(entry.id_ for entry in batch)
            self._free += 1
            self._dispatch()


@dataclass(eq=False)
class Job:
    """A request that waits or runs.

    Attributes:
        task: Future of the result.
        events: Queue of the numbers of finished steps, and of partial images.
        steps_done: Number of finished steps.
    """

    id_: str
    request: Request
    task: asyncio.Future[Result] = field(init=False)
    events: asyncio.Queue[int | Output] = field(default_factory=asyncio.Queue)
    steps_done: int = 0


class Jobs:
    """All requests of a server that wait or run in ``queue``, and its metrics."""

    def __init__(self, queue: RequestQueue, limits: Limits, replicas: int) -> None:
        self._queue, self._limits, self._replicas = queue, limits, replicas
        self._jobs: dict[str, Job] = {}
        self.metrics = Metrics()

    def __len__(self) -> int:
        return len(self._jobs)

    def require_room(self) -> None:
        """Raise RequestError (429) if as many requests wait or run as the limits allow."""
        room = self._replicas + self._limits.waiting
        if len(self._jobs) >= room:
            self.metrics.requests.labels("refused").inc()
            sample = self.metrics.registry.get_sample_value
            ended = sample("para_core_request_seconds_count")
            mean = sample("para_core_request_seconds_sum") / ended if ended else 1.0
            seconds = max(1, round(mean * self._limits.waiting / self._replicas))
            message = f"{len(self._jobs)} requests run or wait; at most {room} may. Retry in {seconds} s."
            raise RequestError(429, "busy", message, {"Retry-After": str(seconds)})

    def start(self, request: Request, id_: str | None = None) -> Job:
        """Send ``request`` to the queue, by default under a random name.

        Raise RequestError if too many requests wait already, or the name ``id_`` is in use or invalid.
        """
        self.require_room()
        id_ = id_ or uuid.uuid4().hex
        if not _ID.fullmatch(id_) or id_ in self._jobs:
            raise RequestError(
                409, "invalid_id", f"X-Request-Id {id_[:64]!r} is in use, or not 1 to 64 of A-Z a-z 0-9 _ -."
            )
        job = self._jobs[id_] = Job(id_, request)
        job.task = asyncio.ensure_future(self._run(job))
        return job

    def cancel(self, id_: str) -> None:
        """Cancel a request. Raise RequestError (404) if no such request waits or runs."""
        if id_ not in self._jobs:
            raise RequestError(404, "not_found", f"no request {id_[:64]!r} is waiting or running.")
        self._queue.cancel(id_)

    async def wait(
        self, job: Job, disconnected: Callable[[], Awaitable[bool]] | None = None, seconds: float = float("inf")
    ) -> Result:
        """Wait for a job at most ``seconds``, and return its result. The caller then calls :meth:`end`.

        Raise RequestError if the job failed or was cancelled, its time ran out, or its client has ``disconnected``.
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
            if isinstance(error, RequestCancelled):
                outcome = "cancelled"
                raise RequestError(409, "cancelled", str(error))
            if isinstance(error, RequestFailed):
                raise RequestError(400, "refused_by_the_pipeline", str(error))
            if error is not None:
                raise RequestError(500, "replica_died", f"{error} The replica is being restarted.")
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
            self._queue.cancel(job.id_)
            job.task.add_done_callback(lambda _: self._forget(job))

    def _forget(self, job: Job) -> None:
        self._jobs.pop(job.id_, None)
        if not job.task.cancelled():
            # Read the exception, or asyncio would log that it was never retrieved.
            job.task.exception()

    async def _run(self, job: Job) -> Result:
        def progress(event: int | Output) -> None:
            if event == job.steps_done:
                return
            if isinstance(event, int):
                self.metrics.steps.inc(max(0, event - job.steps_done))
                job.steps_done = event
            job.events.put_nowait(event)

        for tries_left in range(self._limits.retries, -1, -1):
            try:
                return await self._queue.generate(job.id_, job.request, progress)
            except ReplicaDied:
                self.metrics.deaths.inc()
                job.steps_done = 0
                if tries_left == 0:
                    raise
        raise RuntimeError("the number of retries is negative.")
