"""A replica, on this host or on Ray: its start and end, and the order of its requests.

`local_replica.py` and `group.py` have what differs; `replicas.py` and `http/pool.py` own replicas and start
them again. Requests that wait for a replica stand in `http/jobs.py`. Tests: tests/fleet/test_replicas.py, and
tests/fleet/test_ray.py with a start that fails or is stopped.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from para_core.fleet.failures import RequestFailed, describe_exception
from para_core.fleet.memory import Memory
from para_core.fleet.outputs import Output, Result
from para_core.fleet.request import Request
from para_core.launcher.errors import Cancelled, RankDied

logger = logging.getLogger(__name__)


class Replica(ABC):
    """A group of ranks that runs one pipeline, one request at a time. ``name`` is its name in the log.

    Attributes:
        running: Whether :meth:`start` has ended and the replica was not stopped since then. If it is False
            after a batch, ranks have died, and the owner starts the replica again.
    """

    def __init__(self, name: str) -> None:
        self.running = False
        self._name = name
        self._started = False  # whether start has ever ended
        self._stops = 0  # number of calls of stop, by which start sees that it was stopped meanwhile
        self._turn = asyncio.Lock()  # held while a batch runs, so that two calls of _run_batch never overlap
        # Ids of the requests of that batch, and of those that were cancelled. They are kept while a failed
        # batch is repeated, because a request that still waits for its own call can be cancelled, too.
        self._batch_ids: set[str] = set()
        self._cancelled_ids: set[str] = set()

    async def start(self) -> None:
        """Load the pipeline on all ranks. If the replica runs already, it is stopped first.

        Raises:
            RuntimeError: A rank cannot start, loading fails, or the replica was stopped meanwhile. It is then
                stopped, as after a cancellation, unless another call has started it again.
        """
        await self.stop()
        stops, begun = self._stops, time.monotonic()
        ready = "ready"
        if self._started:
            logger.info("%s: restarting", self._name)
            ready = "ready again"
        try:
            await self._load()
        except Exception as error:
            self._require_no_stop(stops, error)
            await self.stop()
            logger.error("%s: cannot start: %s", self._name, describe_exception(error))
            raise RuntimeError(describe_exception(error)) from error
        except asyncio.CancelledError:
            if self._stops == stops:
                await self.stop()
            raise
        self._require_no_stop(stops)
        self._started = self.running = True
        seconds = time.monotonic() - begun
        ids = ", ".join(map(str, self.process_ids))
        logger.info("%s: %s after %.1f s, process ids of its ranks: %s", self._name, ready, seconds, ids)

    def _require_no_stop(self, stops: int, error: Exception | None = None) -> None:
        """Raise RuntimeError from ``error`` if :meth:`stop` was called after call number ``stops``."""
        if self._stops != stops:
            raise RuntimeError("the replica was stopped while it started.") from error

    async def stop(self) -> None:
        """End all ranks at once, even in the middle of a step. A rank in this process ends after its step."""
        # A batch tells by running whether its ranks were stopped or died, so set it before they end.
        self.running = False
        self._stops += 1
        self._end()

    @abstractmethod
    async def _load(self) -> None:
        """Start the ranks, and load the pipeline on them. Raise what prevents it.

        :meth:`_end` may be called meanwhile.
        """

    @abstractmethod
    def _end(self) -> None:
        """End all ranks, also while they start. Does nothing if none run."""

    @property
    @abstractmethod
    def process_ids(self) -> list[int]:
        """Process id of each rank, while the replica runs."""

    def _require_running(self) -> None:
        """Raise RankDied if the replica is not running."""
        if not self.running:
            raise RankDied("the replica is not running.")

    @abstractmethod
    async def alive(self) -> bool:
        """Whether the replica has loaded and none of its ranks has ended. Looks at the ranks themselves,
        unlike :attr:`running`, and logs one that has ended.
        """

    @abstractmethod
    async def memory(self) -> Memory | None:
        """Return the predicted memory of a rank, or None if it cannot be predicted. Raise RankDied if the
        replica is not running.
        """

    async def generate(self, request: Request) -> Result:
        """Run one request after all requests that were sent earlier, and return its result.

        Raise RequestFailed if the pipeline raised on all ranks, and RankDied if a rank died. The replica is
        then stopped.
        """
        (outcome,) = await self.generate_batch([(uuid.uuid4().hex, request)])
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def generate_batch(
        self,
        batch: Sequence[tuple[str, Request]],
        progress: Callable[[int | Output], None] = lambda event: None,
    ) -> list[Result | RequestFailed | Cancelled]:
        """Run named requests with the same ``batch_key`` as one call of the pipeline, and return the outcome
        of each.

        ``progress`` is called with the numbers of finished steps and partial images. If the call fails on all
        ranks, each request is run alone, because only one of them may be the reason; the numbers then begin
        again for each.

        Raises:
            RankDied: The replica is not running, was stopped meanwhile, or a rank died. The replica is then
                stopped.
        """
        async with self._turn:
            self._batch_ids = {id_ for id_, _ in batch}
            try:
                outcomes = await self._run_batch(batch, progress)
                # EncodingFailed is of one request: running the others again would change nothing.
                if len(batch) > 1 and all(type(outcome) is RequestFailed for outcome in outcomes):
                    outcomes = [await self._run_alone(entry, progress) for entry in batch]
            finally:
                self._batch_ids = set()
                self._cancelled_ids = set()
        return outcomes

    async def _run_alone(
        self, entry: tuple[str, Request], progress: Callable[[int | Output], None]
    ) -> Result | RequestFailed | Cancelled:
        """Run one request of a failed batch alone, unless it was cancelled, and return its outcome."""
        id_, _ = entry
        if id_ in self._cancelled_ids:
            return Cancelled("cancelled before it ran again.")
        return (await self._run_batch([entry], progress))[0]

    @abstractmethod
    async def _run_batch(
        self, batch: Sequence[tuple[str, Request]], progress: Callable[[int | Output], None]
    ) -> list[Result | RequestFailed | Cancelled]:
        """Run the batch as one call of the pipeline on all ranks, and return the outcomes in the order of the
        batch.

        :meth:`generate_batch` says what is raised. Two calls never overlap.
        """

    def cancel(self, id_: str) -> None:
        """Cancel a running request after its current step. A batch ends early only if all of it is cancelled.

        If the batch fails, the request is not run again. Does nothing if the batch has ended.
        """
        if id_ in self._batch_ids:
            self._cancelled_ids.add(id_)
            self._cancel_running(id_)

    @abstractmethod
    def _cancel_running(self, id_: str) -> None:
        """Let the ranks cancel a request after its current step. Does nothing if it is not running."""
