"""Sessions: changes of one pipeline or transformer that are applied and undone together.

``parallelize.py`` and ``transformer.py`` call :func:`replace_session`. The parts themselves are in
``parts.py``, ``transformer.py`` and ``resolve.py``. The methods of a part are called in one of these orders:
``clear``, ``apply``, ``complete``; later the undo function, or ``suspend`` and ``finish`` if another session
replaces this one. Tests: tests/adapters/parallel/test_undo.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from para_core.distributed.agree import together
from para_core.distributed.mesh import GuidedMesh
from para_core.instance.modules import instances_in
from para_core.instance.record import restore_on_failure

Undo = Callable[[], object]


def do_nothing() -> None:
    """Do nothing: the undo function of a change that needs none."""


class Part(ABC):
    """One change of a session, such as wrapping ``__call__`` or sharding the weights.

    :meth:`apply` makes the whole change and returns its undo function, or raises. If it raises,
    :func:`replace_session` empties the slots (:mod:`para_core.instance.record`) that it may have left filled.
    """

    # Name of the part in error messages.
    name: str

    @abstractmethod
    def apply(self) -> Undo:
        """Make the change and return the function that undoes it."""

    def complete(self) -> None:  # noqa: B027 - most parts have nothing to complete
        """Change weights, after every rank has applied all parts: the step of the change that nothing undoes.

        All ranks call it. If it can fail on one rank, it must raise on all of them (by ``one_way`` of
        ``adapters/weights/one_way.py``), because :meth:`ParallelSession.complete` exchanges nothing itself.
        """

    def clear(self) -> None:  # noqa: B027 - most parts have nothing to clear
        """Remove a change of this kind that was made outside of the session, such as a plan that was applied
        by hand.

        It changes only slots, which :func:`replace_session` restores if the new session fails.
        """

    def suspend(self, undo: Undo) -> Undo:
        """Call ``undo``, which :meth:`apply` returned, because a new session replaces this one.

        Returns a function that makes the change again, except for slots, if the new session fails.
        """
        undo()
        return do_nothing

    def finish(self, undo: Undo) -> None:  # noqa: B027 - most parts leave nothing in place
        """Undo the rest of the change, which :meth:`suspend` left in place, after the new session has started."""


@dataclass(frozen=True)
class Change(Part):
    """A part that consists of a function and of the function that undoes it."""

    name: str
    change: Callable[[], object]
    undo: Undo

    def apply(self) -> Undo:
        self.change()
        return self.undo


@dataclass(eq=False)
class ParallelSession:
    """The parts that are applied together to one pipeline or transformer, in order, on the ranks of ``mesh``."""

    mesh: GuidedMesh
    parts: list[Part]
    # The parts that are in effect, each with its undo function. A suspended session keeps them, because it
    # may be resumed; a finished or stopped one has none.
    _applied: list[tuple[Part, Undo]] = field(default_factory=list, init=False)

    def start(self) -> None:
        """Apply all parts in order. Collective.

        If a part fails on a rank, every rank raises. The caller then calls :meth:`stop`.
        """
        for part in self.parts:
            with together(self.mesh, f"{part.name} failed"):
                self._applied.append((part, part.apply()))

    def complete(self) -> None:
        """Call :meth:`Part.complete` of all parts in order, after :meth:`start`. Collective.

        If one fails on a rank, every rank raises, and everything but weights is undone.
        """
        try:
            for part in self.parts:
                part.complete()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Undo all applied parts, the last one first.

        If some undo functions raise, the others still run; a second call retries the ones that raised.
        """
        with ExitStack() as undos:
            for part, undo in list(self._applied):
                undos.callback(self._undo, part, undo)

    def _undo(self, part: Part, undo: Undo) -> None:
        undo()
        # Parts and their undo functions are compared by identity or value, and no two of a session are equal.
        self._applied.remove((part, undo))

    def suspend(self, resume: ExitStack) -> None:
        """Call :meth:`Part.suspend` of all applied parts, the last one first, before another session starts.

        The functions that restore the parts are pushed onto ``resume``.
        """
        for part, undo in reversed(self._applied):
            resume.callback(part.suspend(undo))

    def finish(self) -> None:
        """Call :meth:`Part.finish` of all parts, after another session has replaced this one."""
        applied, self._applied = self._applied, []
        with ExitStack() as undos:
            for part, undo in applied:
                undos.callback(part.finish, undo)


def replace_session(instance: Any, previous: ParallelSession | None, session: ParallelSession) -> None:
    """Undo ``previous`` and start ``session`` on ``instance``. Every rank of ``session.mesh`` must call this.

    If this fails on one rank, every rank raises, and ``previous`` is in effect again: its parts are resumed
    in their order, and the slots of ``instance`` and of all modules inside it get back what was in them. So a
    part may change only slots of these. If only :meth:`Part.finish` of an earlier part fails, every rank
    raises, after all of ``session`` is in effect. If only the last step fails, in which weights change, the
    instance cannot be used any more (:mod:`para_core.adapters.weights.one_way`).
    """
    with restore_on_failure(instances_in(instance)), ExitStack() as rollback:
        with together(session.mesh, "the earlier settings could not be undone"):
            if previous is not None:
                previous.suspend(rollback)
            for part in session.parts:
                part.clear()
        rollback.callback(session.stop)
        session.start()
        rollback.pop_all()
    try:
        with together(session.mesh, "the rest of the earlier settings could not be undone"):
            if previous is not None:
                previous.finish()
    finally:
        # Every rank comes here, because together() raises on all of them or on none.
        session.complete()
