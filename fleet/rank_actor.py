"""A rank as a Ray actor: its process group, its log, its answers, and progress that the caller asks for.

`group.py` makes one for each rank and calls it. Nothing here imports Ray, so that tests run it as a plain
object. Ranks of this host are driven by `engine.py` instead. Tests: tests/fleet/test_rank.py,
tests/fleet/test_ray.py, and tests/fleet/test_replicas.py with a cluster.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from para_core.fleet.failures import EncodingFailed, RequestFailed, describe_exception
from para_core.fleet.last_words import LastWords
from para_core.fleet.log_relay import LogEntry, LogRelay
from para_core.fleet.memory import Memory
from para_core.fleet.outputs import Output, Result
from para_core.fleet.rank import Rank, ReplicaOptions
from para_core.fleet.recipe import Recipe
from para_core.fleet.request import Request
from para_core.launcher.errors import Cancelled
from para_core.launcher.link import CallerLink
from para_core.launcher.processes import is_set_by_launcher
from para_core.progress import pass_records_to

# Ray concurrency group of the actor's methods that are called while a request runs, such as cancel.
CONTROL = "control"


@dataclass(frozen=True)
class Answer:
    """Outcome of a request on one rank."""

    outcome: Result | RequestFailed | Cancelled | None  # None if another rank has the result
    steps: int = 0  # number of finished steps
    previews: tuple[Output, ...] = ()  # all partial images, also those that RankActor.progress returned


class RankActor:
    """Actor with the :class:`~para_core.fleet.rank.Rank` number ``rank`` of ``options.ranks``."""

    def __init__(self, recipe: Recipe, rank: int, options: ReplicaOptions) -> None:
        self._recipe = recipe
        self._number = rank
        self._options = options
        self._rank: Rank | None = None  # before join
        self._store: Any = None  # of open_store, on the first rank only; None on others
        self._last_words: LastWords | None = None
        self._log = LogRelay()
        # The threads of the group CONTROL add to _cancelled (cancel) and read the other two (progress); the
        # thread of generate_batch reads and removes the entries of _cancelled, and writes the other two.
        self._steps_done: dict[str, int] = {}  # of running requests, by id
        # Numbers of batches and ids of requests. A cancel that arrives after its batch stays here, without effect.
        self._cancelled: set[tuple[int, str]] = set()
        # Of running requests, by id: progress may ask for a request whose call has not begun, and must not
        # get the images of the one before it.
        self._previews: dict[str, list[Output]] = {}

    def open_store(self, host: str) -> int:
        """Open the TCP store of the replica on the first rank, and return its port on ``host``."""
        timeout = timedelta(seconds=self._recipe.timeout)
        self._store = TCPStore(
            host, 0, self._options.ranks, is_master=True, timeout=timeout, wait_for_workers=False
        )
        return int(self._store.port)

    def join(self, host: str, port: int) -> None:
        """Connect to the other ranks at the address of :meth:`open_store`, and load the pipeline. A
        collective call, after which :class:`Rank` may be used.
        """
        # Ray's workers inherit the variables of a launcher that has started Ray. A Ray actor sees one GPU,
        # with index 0, and with the launcher's LOCAL_RANK init_device_mesh would select another.
        for name in list(os.environ):
            if is_set_by_launcher(name):
                del os.environ[name]
        timeout = timedelta(seconds=self._recipe.timeout)
        if self._options.ranks > 1:
            store = self._store or TCPStore(host, port, self._options.ranks, is_master=False, timeout=timeout)
            dist.init_process_group(
                store=store, rank=self._number, world_size=self._options.ranks, timeout=timeout
            )
        with pass_records_to(self._log):
            self._rank = Rank(self._recipe, self._options)

    def loading_log(self, position: int) -> tuple[int, list[LogEntry]]:
        """Return the next position, and what :meth:`join` has logged after ``position``."""
        return self._log.read(position)

    def memory(self) -> Memory | None:
        """Return the predicted memory of a rank, or None if it cannot be predicted."""
        return self._require_joined().memory()

    def _require_joined(self) -> Rank:
        if self._rank is None:
            raise RuntimeError("the rank has not joined the others.")
        return self._rank

    def generate_batch(self, batch: Sequence[tuple[str, Request]], number: int) -> list[Answer]:
        """Run named requests with the same ``batch_key`` as one call of the pipeline, and return their
        answers. A collective call. ``number`` differs between the batches of a replica.

        The call ends early only if all requests are cancelled. What the pipeline raises becomes the outcome
        of every request, because Ray could not send an exception whose class the caller lacks.
        """
        if torch.cuda.is_available():
            # The device is set per thread, and Ray may call this method in any thread.
            torch.cuda.set_device(0)
        ids = [id_ for id_, _ in batch]
        requests = [request for _, request in batch]
        named = [(number, id_) for id_ in ids]

        def note(event: int | Output) -> None:
            for id_ in ids:
                if isinstance(event, Output):
                    self._previews.setdefault(id_, []).append(event)
                else:
                    self._steps_done[id_] = event

        try:
            link = CallerLink(note, lambda: self._cancelled.issuperset(named))
            results: Sequence[Result | EncodingFailed | None] | None = self._require_joined().generate_batch(
                requests, link
            )
            if not results:  # Another rank has them.
                results = [None] * len(ids)
            return [self._answer(name, result, len(ids)) for name, result in zip(named, results, strict=True)]
        except Cancelled as error:
            return [Answer(error, self._steps_done.get(id_, 0)) for id_ in ids]
        except Exception as error:
            return [
                Answer(RequestFailed(describe_exception(error)), self._steps_done.get(id_, 0)) for id_ in ids
            ]
        finally:
            for id_ in ids:
                self._steps_done.pop(id_, None)
                self._previews.pop(id_, None)
            self._cancelled.difference_update(named)

    def _answer(self, name: tuple[int, str], result: Result | EncodingFailed | None, batch: int) -> Answer:
        """Return the answer for one request of a finished call for ``batch`` requests. ``name`` is the number
        of its batch and its id.
        """
        id_ = name[1]
        steps = self._steps_done.get(id_, 0)
        if name in self._cancelled and batch > 1:
            return Answer(Cancelled(f"cancelled after step {steps}."), steps)
        return Answer(result, steps, tuple(self._previews.get(id_, ())))

    def progress(self, id_: str, sent: int) -> tuple[int, list[Output]]:
        """Return the number of finished steps of a running request, and its partial images after the first
        ``sent``: 0 and none if it does not run.
        """
        return self._steps_done.get(id_, 0), self._previews.get(id_, [])[sent:]

    def cancel(self, id_: str, number: int) -> None:
        """Cancel the request ``id_`` of the batch ``number`` after its current step. Called on the first
        rank, whose answer decides for all.

        The call may arrive before that of :meth:`generate_batch`, which waits while the rank still runs an
        abandoned batch, so an unknown id is kept. It may also arrive after the batch has ended; the number
        keeps it from cancelling a request that is sent again.
        """
        self._cancelled.add((number, id_))

    def ping(self) -> None:
        """Do nothing. The caller uses the fact that this rank answers."""

    def watch_signals(self) -> tuple[int, str]:
        """Leave a note if a signal ends this process. Return its id, and the folder of the note."""
        self._last_words = LastWords()
        return os.getpid(), self._last_words.folder

    def remove_notes(self) -> None:
        """Remove the folder of the note, because the process that called :meth:`watch_signals` cannot open
        it.
        """
        if self._last_words is not None:
            self._last_words.remove_folder()
