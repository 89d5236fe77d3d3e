"""Requests that wait for a free replica: first come, first served. A cancelled one leaves at once."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from para_core.fleet.failures import ReplicaDied, RequestCancelled
from para_core.fleet.outputs import Output
from para_core.fleet.request import Request
from para_core.fleet.work import Result


@dataclass(eq=False)
class QueuedRequest:
    """A request that waits or runs, with the future of its result."""

    id_: str
    request: Request
    progress: Callable[[int | Output], None]
    answer: asyncio.Future[Result]


class Replicas(Protocol):
    """Replicas that each answer one request at a time."""

    async def run(self, entry: QueuedRequest) -> None:
        """Run a request on a free replica, and set its answer. Returns when the replica can take the next request."""

    def cancel(self, id_: str) -> None:
        """End this running request after its current step."""

    async def ready(self) -> int:
        """Return the number of replicas that can answer."""


class RequestQueue:
    """The backend of a server whose replicas answer one request at a time.

    Args:
        slots (`int`): Number of replicas.
    """

    def __init__(self, replicas: Replicas, slots: int) -> None:
        self._replicas, self._free = replicas, slots
        self._waiting: list[QueuedRequest] = []
        self._running: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        # When a client disconnects, Serve cancels every Ray task that was started in the request's context, including
        # running ranks. Replicas are called in a copy of this context instead, and are cancelled between two steps.
        self._context = contextvars.copy_context()

    async def generate(self, id_: str, request: Request, progress: Callable[[int | Output], None]) -> Result:
        """Return the result of a request. Waits while all replicas are busy."""
        entry = QueuedRequest(id_, request, progress, asyncio.get_running_loop().create_future())
        self._waiting.append(entry)
        self._dispatch()
        return await asyncio.shield(entry.answer)

    def cancel(self, id_: str) -> None:
        """End this request: at once if it waits, after its current step if it runs."""
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
            entry = self._waiting.pop(0)
            self._running.add(entry.id_)
            # A task of its own runs to its end even if nobody waits: a replica that died is restarted in it.
            task = asyncio.get_running_loop().create_task(self._run(entry), context=self._context.copy())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run(self, entry: QueuedRequest) -> None:
        try:
            await self._replicas.run(entry)
        finally:
            if not entry.answer.done():
                entry.answer.set_exception(ReplicaDied("the replica ended without an answer."))
            self._running.discard(entry.id_)
            self._free += 1
            self._dispatch()
