"""Ranks of one pipeline as this process drives them: processes on this host, or this process itself.

``para_core generate`` and ``bench`` open them by :func:`open_ranks`, and `local_replica.py` makes them for a
replica of the server. The processes themselves stand in :mod:`para_core.launcher`, ranks on Ray in
`group.py`. Tests: tests/cli/test_generate.py, tests/fleet/test_replicas.py, tests/fleet/test_rank.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch.distributed as dist

from para_core.fleet.failures import describe_exception
from para_core.fleet.libraries import quiet
from para_core.launcher.display import Display
from para_core.launcher.errors import RankDied
from para_core.launcher.handle import LaunchOptions, LaunchState, Ticket
from para_core.launcher.link import CallerLink
from para_core.launcher.processes import LocalProcess, start_local_ranks
from para_core.launcher.wire import Body
from para_core.progress import report

# A rank of torchrun that raised waits this long for all others to say that they raised too.
_AGREEMENT = timedelta(seconds=20)
# Seconds of silence that are never over: collectives of ranks have a timeout of their own.
_FOREVER = 365 * 24 * 3600.0

Listener = Callable[[Any], None]


class Ranks(Protocol):
    """Ranks that each hold an object such as :class:`para_core.fleet.rank.Rank`, whose methods run on all of
    them.

    Attributes:
        restarts: Whether :meth:`start` starts ranks again that have ended.
    """

    restarts: bool

    def start(self) -> None:
        """Load the object on all ranks, unless they hold it. A collective call of torchrun's ranks.

        Raise RankDied if a rank ends, and what loading raises: :class:`LaunchedRanks` raises RankDied with
        its message, because they have ended their processes.
        """

    def call(
        self, method: str, *args: Any, listener: Listener | None = None, ticket: Ticket | None = None
    ) -> Any:
        """Call a method of the object on all ranks, and return its result: the first rank's from
        :class:`LaunchedRanks`, this rank's from :class:`OwnRank`.

        All ranks wait for each other if the method is a collective call, as ``generate`` of ``Rank`` is.

        With a ``listener`` the method gets a :class:`~para_core.launcher.link.CallerLink` as ``link``: the
        listener is called with what that rank pushes, and ``ticket.cancel()`` cancels the call. Raise what
        all ranks raised, and RankDied if a rank ended or ranks raised differently.
        """

    def close(self) -> None:
        """End the ranks."""


class LaunchedRanks:
    """Processes on this host, see :class:`Ranks`. ``load`` makes the object on each of them.

    Collectives of the ranks give up after ``timeout`` seconds. ``devices`` are the GPUs of the ranks, by
    default the first ones, and ``env`` are their further environment variables. ``display`` makes the display
    of what they report while they load; by default it is reported by :mod:`para_core.progress` in this
    process. ``debug`` leaves the libraries' messages on. ``load`` is pickled for the ranks.
    """

    restarts = True

    def __init__(
        self,
        load: Callable[[], Any],
        ranks: int,
        *,
        timeout: float,
        devices: Sequence[int] | None = None,
        display: Callable[[], Display] | None = None,
        env: Mapping[str, str] | None = None,
        debug: bool = False,
    ) -> None:
        self._debug = debug
        options = LaunchOptions(
            load,
            ranks,
            partial(start_local_ranks, ranks, devices, env or {}),
            timeout,
            _FOREVER,
            display or _ReportingDisplay,
            finishes_step=False,
        )
        self._state = LaunchState(options, None, Body.of(load))

    @property
    def process_ids(self) -> list[int]:
        """Process id of each rank."""
        if self._state.group is None:
            return []
        return [member.pid for member in self._state.group.members if isinstance(member, LocalProcess)]

    def death(self) -> RankDied | None:
        """Return the error of a rank whose process has ended; None if none has, none was started yet, or
        :meth:`close` ended them.
        """
        group = self._state.group
        if group is None or group.ended:
            return None
        for rank, member in enumerate(group.members):
            if member.wait(0.0):
                return RankDied(f"rank {rank} {member.describe_end()}", rank)
        return None

    def reopen(self) -> None:
        """Let :meth:`start` start ranks again after :meth:`close`. Until then it raises RuntimeError."""
        self._state.closed = False

    def start(self) -> None:
        if self._state.group is not None and not self._state.group.ended:
            return
        # The first call of a State starts its ranks, and new ones if they have ended.
        self.call(_load_quietly, self._debug)

    def call(
        self, method: Any, *args: Any, listener: Listener | None = None, ticket: Ticket | None = None
    ) -> Any:
        """Call ``method`` as :meth:`Ranks.call`, or a function that gets the object first. Starts the ranks
        if none run.
        """
        try:
            return self._state.call(ticket or Ticket(), method, args, {}, listener=listener)
        except RankDied:
            raise
        except Exception as error:
            group = self._state.group
            if group is None or not group.ended:
                raise
            raise RankDied(describe_exception(error)) from error

    def close(self) -> None:
        # Another thread may be starting ranks: it then ends them, because the state is closed.
        self._state.closed = True
        # No rank has anything to save, so ranks are not asked to end, but killed.
        if self._state.group is not None:
            self._state.group.end(idle=False)


def _load_quietly(loaded: Any, debug: bool) -> None:
    """Quiet the libraries on a rank, which holds the object ``loaded``.

    While ranks load, the launcher changes the levels of the same loggers, and restores them afterwards, so it
    is not enough that ``load`` calls :func:`quiet`.
    """
    quiet(debug)


class _ReportingDisplay(Display):
    """Display that reports lines by :mod:`para_core.progress`, and shows no bars."""

    def __init__(self) -> None:
        super().__init__(False)

    def line(self, text: str, done: int | None = None, total: int | None = None) -> None:
        report(text, done, total)

    def notice(self, text: str) -> None:
        report(text)


class OwnRank:
    """This process, see :class:`Ranks`: the only rank, or one of torchrun's, which all make the same calls.

    If ranks of torchrun raise differently, each of them should end, and torchrun ends them all.
    """

    restarts = False

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load = load
        self._loaded: Any = None
        self._calls = 0  # number of calls, by which ranks of torchrun agree that they raised in the same one
        # A group of its own, because a collective of the default group may be blocked by the rank that
        # raised.
        self._agreement: Any = None

    def start(self) -> None:
        if self._loaded is not None:
            return
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._agreement = dist.new_group(backend="gloo", timeout=_AGREEMENT)
        self._loaded = self._load()

    def call(
        self, method: str, *args: Any, listener: Listener | None = None, ticket: Ticket | None = None
    ) -> Any:
        self._calls += 1
        ticket = ticket or Ticket()
        keywords: dict[str, CallerLink] = {}
        if listener is not None:
            keywords["link"] = CallerLink(listener, lambda: ticket.cancelled)
        try:
            return getattr(self._loaded, method)(*args, **keywords)
        except Exception as error:
            if not self._all_raised():
                raise RankDied(describe_exception(error)) from error
            raise

    def _all_raised(self) -> bool:
        """Whether all ranks raised in this call, so that none waits for another.

        A collective call of the ranks that raised. If another rank has not, it times out after
        ``_AGREEMENT``.
        """
        if self._agreement is None:
            return True
        calls: list[Any] = [None] * dist.get_world_size()
        try:
            dist.all_gather_object(calls, self._calls, group=self._agreement)
        except RuntimeError:
            return False
        return set(calls) == {self._calls}

    def close(self) -> None:
        self._loaded = None


def open_ranks(
    load: Callable[[], Any], ranks: int, *, timeout: float, debug: bool = False
) -> LaunchedRanks | OwnRank:
    """Return ``ranks`` processes on this host, or this process if there is one rank, or torchrun started it.

    Nothing is started before :meth:`Ranks.start`.
    """
    if starts_processes(ranks):
        return LaunchedRanks(load, ranks, timeout=timeout, debug=debug)
    return OwnRank(load)


def starts_processes(ranks: int) -> bool:
    """Whether :func:`open_ranks` returns processes: if there are several ranks, and torchrun started none."""
    return ranks > 1 and not ("RANK" in os.environ and "WORLD_SIZE" in os.environ)
