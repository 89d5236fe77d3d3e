"""A replica on this host: a thread of this process if it has one rank and is the only one, else processes.

`replicas.py` makes it. `replica.py` states the interface and the order of requests, `engine.py` calls the
ranks, and `group.py` has the replica on Ray. Tests: tests/fleet/test_replicas.py.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from para_core.fleet.engine import LaunchedRanks, OwnRank
from para_core.fleet.failures import EncodingFailed, RequestFailed, describe_exception
from para_core.fleet.memory import Memory
from para_core.fleet.outputs import Output, Result
from para_core.fleet.rank import ReplicaOptions, load_rank
from para_core.fleet.recipe import Recipe
from para_core.fleet.replica import Replica
from para_core.fleet.request import Request
from para_core.launcher.display import Display
from para_core.launcher.errors import Cancelled, RankDied, set_outcome
from para_core.launcher.handle import Ticket
from para_core.progress import pass_records_to

logger = logging.getLogger(__name__)


@dataclass
class _Batch:
    """Requests that run, by their ids."""

    ids: set[str]
    ticket: Ticket = field(default_factory=Ticket)  # cancels the call, so only if all requests are cancelled
    steps: int = 0  # number of finished steps


class LocalReplica(Replica):
    """A :class:`~para_core.fleet.replica.Replica` on this host.

    Its ranks use the GPUs ``devices``, by default the first ones, and ``env`` are their further environment
    variables. With ``own_process`` its one rank is a thread of this process: no second process takes memory,
    but what ends the rank ends this process.

    Ranks are driven from one thread (:class:`_WorkThread`), because their calls block. Everything else runs
    in the event loop.
    """

    def __init__(
        self,
        recipe: Recipe,
        options: ReplicaOptions,
        name: str = "replica",
        *,
        devices: Sequence[int] | None = None,
        env: Mapping[str, str] | None = None,
        own_process: bool = False,
    ) -> None:
        super().__init__(name)
        load = partial(load_rank, recipe, options)
        self._ranks: LaunchedRanks | OwnRank
        if own_process:
            self._ranks = OwnRank(load)
        else:
            display = partial(_LoggedDisplay, name)
            self._ranks = LaunchedRanks(
                load, options.ranks, timeout=recipe.timeout, devices=devices, display=display, env=env
            )
        self._thread = _WorkThread(name)
        self._batch: _Batch | None = None  # None while no batch runs

    async def _load(self) -> None:
        if isinstance(self._ranks, LaunchedRanks):
            # Not in the work thread, where it could come after a stop that closes the ranks again.
            self._ranks.reopen()
        # After a stop the thread still loads. Ranks that are processes have ended, which ends that, too; a
        # rank of this process loads to the end, and a later start, which waits for that, finds it loaded.
        await self._thread.run(self._start_ranks)

    def _start_ranks(self) -> None:
        if isinstance(self._ranks, LaunchedRanks):
            self._ranks.start()
            return
        with pass_records_to(_NamedLog(self._name)):
            self._ranks.start()

    @property
    def process_ids(self) -> list[int]:
        if isinstance(self._ranks, LaunchedRanks):
            return self._ranks.process_ids
        return [os.getpid()]

    def _end(self) -> None:
        if self._batch is not None:
            self._batch.ticket.cancel()
        self._ranks.close()

    async def memory(self) -> Memory | None:
        memory: Memory | None = await self._call("memory")
        return memory

    async def _call(self, method: str, *args: Any, **options: Any) -> Any:
        """Call ``method`` of the :class:`~para_core.fleet.rank.Rank` on all ranks, and return its result.

        ``options`` are those of :meth:`~para_core.fleet.engine.Ranks.call`. Raise RankDied if the replica
        does not run.
        """
        self._require_running()
        return await self._thread.run(partial(self._ranks.call, method, *args, **options))

    async def _run_batch(
        self, batch: Sequence[tuple[str, Request]], progress: Callable[[int | Output], None]
    ) -> list[Result | RequestFailed | Cancelled]:
        self._require_running()
        loop = asyncio.get_running_loop()
        running = _Batch({id_ for id_, _ in batch})

        def note(event: int | Output) -> None:
            if isinstance(event, int):
                running.steps = event
            progress(event)

        self._batch = running
        requests = [request for _, request in batch]
        try:
            results: list[Result | EncodingFailed] = await self._call(
                "generate_batch",
                requests,
                listener=lambda event: loop.call_soon_threadsafe(note, event),
                ticket=running.ticket,
            )
        except asyncio.CancelledError:
            running.ticket.cancel()
            raise
        except Exception as error:
            if not self.running:
                # A rank in this process raised Cancelled, or had no pipeline any more.
                raise RankDied("the replica was stopped.") from error
            if isinstance(error, RankDied):
                self._log_death(error)
                await self.stop()
                raise
            if isinstance(error, Cancelled):
                # The ticket is cancelled only if all requests of the batch are.
                return [error for _ in batch]
            return [RequestFailed(describe_exception(error)) for _ in batch]
        finally:
            self._batch = None
        outcomes: list[Result | RequestFailed | Cancelled] = []
        for (id_, _), result in zip(batch, results, strict=True):
            if id_ in self._cancelled_ids:
                outcomes.append(Cancelled(f"cancelled after step {running.steps}."))
            else:
                outcomes.append(result)
        return outcomes

    def _cancel_running(self, id_: str) -> None:
        if self._batch is not None and self._batch.ids <= self._cancelled_ids:
            self._batch.ticket.cancel()

    async def alive(self) -> bool:
        if not self.running:
            return False
        if not isinstance(self._ranks, LaunchedRanks):
            return True
        death = self._ranks.death()
        if death is None:
            return True
        if self._batch is None:  # else the end of the batch tells it
            self._log_death(death)
            await self.stop()
        return False

    def _log_death(self, error: BaseException) -> None:
        which = ""
        if isinstance(error, RankDied) and error.rank is not None:
            which = f" Its process id was {self.process_ids[error.rank]}."
        logger.error("%s: %s%s", self._name, describe_exception(error), which)


class _NamedLog(logging.Handler):
    """Handler of the records of :mod:`para_core.progress`, which logs them with the name of a replica."""

    def __init__(self, name: str) -> None:
        super().__init__(logging.INFO)
        self._replica = name

    def emit(self, record: logging.LogRecord) -> None:
        logger.info("%s: %s", self._replica, record.getMessage())


class _LoggedDisplay(Display):
    """Display that logs lines with the name of a replica, and shows no bars."""

    def __init__(self, name: str) -> None:
        super().__init__(False)
        self._replica = name

    def line(self, text: str, done: int | None = None, total: int | None = None) -> None:
        logger.info("%s: %s", self._replica, text)

    def notice(self, text: str) -> None:
        logger.warning("%s: %s", self._replica, text)


class _WorkThread:
    """Daemon thread that calls one function after another. The process can end while it waits or works."""

    def __init__(self, name: str) -> None:
        self._jobs = queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]]]()
        threading.Thread(target=self._work, name=f"para_core {name}", daemon=True).start()

    async def run(self, function: Callable[[], Any]) -> Any:
        """Call ``function`` in the thread after the earlier ones, and return its result."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._jobs.put((function, future))
        return await future

    def _work(self) -> None:
        while True:
            function, future = self._jobs.get()
            result: Any = None
            error: BaseException | None = None
            try:
                result = function()
            except BaseException as raised:
                error = raised
            with suppress(RuntimeError):  # The loop has been closed.
                future.get_loop().call_soon_threadsafe(set_outcome, future, result, error)
