"""Queue of requests for the replicas of a server: first come, first served.

Requests that differ only in prompt and seed may be generated as one batch.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from para_core.fleet.failures import ReplicaDied, RequestCancelled
from para_core.fleet.outputs import Output
from para_core.fleet.request import Request, batch_key
from para_core.fleet.work import Result


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
    """Interface of replicas that each run one batch at a time."""

    async def run(self, batch: Sequence[QueuedRequest]) -> None:
        """Run requests as one batch on a free replica, and set their answers.

        Returns when the replica can take the next batch.
        """

    def cancel(self, id_: str) -> None:
        """Cancel a running request after its current step."""

    async def ready(self) -> int:
        """Return the number of replicas that can answer."""


class RequestQueue:
    """Implementation of :class:`para_core.fleet.jobs.Backend`: a queue in front of replicas.

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
        """Run a request as soon as a replica is free, and return its result."""
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
