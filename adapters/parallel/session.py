"""Sessions: changes of one object that are applied together, undone together, and restored if a later session fails."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from para_core.distributed.consistency import raising_on_all
from para_core.distributed.mesh import GuidedMesh
from para_core.instance_patching import instances_in, restored_on_failure

Undo = Callable[[], None]


def nothing() -> None:
    """Do nothing; the undo of a change that leaves nothing behind."""


class Part(ABC):
    """One change of a user's object.

    :meth:`apply` either makes the whole change and returns its undo, or raises. :func:`replace_session` removes the
    wrappers (:mod:`para_core.instance_patching`) that a failed :meth:`apply` leaves behind.
    """

    name = "a part"  # for error messages
    shards_weights = False

    @abstractmethod
    def apply(self) -> Undo:
        """Make the change, and return its undo."""

    def complete(self) -> None:  # noqa: B027 - most parts have nothing to complete
        """Make the changes that only all ranks together can undo, once every rank has applied all parts."""

    def clear(self) -> Undo:
        """Remove what other calls applied to the same object.

        Returns a function that restores it, except for wrappers.
        """
        return nothing

    def suspend(self, undo: Undo, mesh: GuidedMesh) -> Undo:
        """Undo the change for a session on ``mesh`` that replaces this one.

        Returns:
            A function that makes the change again, except for wrappers, if the other session fails.
        """
        undo()
        return nothing

    def finish(self, undo: Undo) -> None:  # noqa: B027 - most parts leave nothing in place
        """Undo what :meth:`suspend` left in place, once the next session has started."""


class ParallelSession:
    """Parts that are applied to one pipeline or transformer.

    Args:
        mesh: Ranks of the session.
        parts: Parts in the order in which they are applied.
    """

    def __init__(self, mesh: GuidedMesh, parts: Sequence[Part]) -> None:
        self.mesh, self.parts = mesh, list(parts)
        self._applied: list[tuple[Part, Undo]] = []

    @property
    def shards_weights(self) -> bool:
        """Whether the session sharded weights, and so gathers them when it is undone."""
        return any(part.shards_weights for part, _ in self._applied)

    def start(self) -> None:
        """Apply all parts. If one fails on a rank, every rank raises; :meth:`stop` then undoes the applied parts."""
        for part in self.parts:
            with raising_on_all(self.mesh, f"{part.name} failed"):
                self._applied.append((part, part.apply()))
        with raising_on_all(self.mesh, "the last step failed"):
            for part in self.parts:
                part.complete()

    def stop(self) -> None:
        """Undo all applied parts, the last one first, even if the undo of one raises. Call it again to retry these."""
        with ExitStack() as undos:
            for part, undo in list(self._applied):
                undos.callback(self._undo, part, undo)

    def _undo(self, part: Part, undo: Undo) -> None:
        undo()
        self._applied.remove((part, undo))

    def suspend(self, resume: ExitStack, mesh: GuidedMesh) -> None:
        """Suspend all parts for a session on ``mesh``, and push the callbacks that restore them onto ``resume``."""
        for part, undo in reversed(self._applied):
            resume.callback(part.suspend(undo, mesh))

    def finish(self) -> None:
        """Undo what :meth:`suspend` left in place."""
        applied, self._applied = self._applied, []
        with ExitStack() as undos:
            for part, undo in applied:
                undos.callback(part.finish, undo)


def replace_session(instance: Any, previous: ParallelSession | None, session: ParallelSession) -> None:
    """Start ``session`` in place of ``previous``. Every rank of the mesh calls it.

    If a rank fails, every rank raises, and ``instance`` is as it was before, with ``previous`` in effect.
    """
    with changes_undone_on_failure(instance) as rollback:
        with raising_on_all(session.mesh, "the earlier settings could not be undone"):
            if previous is not None:
                previous.suspend(rollback, session.mesh)
            for part in session.parts:
                rollback.callback(part.clear())
        rollback.callback(session.stop)
        session.start()
    if previous is not None:
        previous.finish()


@contextmanager
def changes_undone_on_failure(instance: Any) -> Iterator[ExitStack]:
    """Yield a stack of callbacks that run if the block raises.

    The wrappers of ``instance`` and its modules are then restored as well.
    """
    with restored_on_failure(instances_in(instance)), ExitStack() as rollback:
        yield rollback
        rollback.pop_all()
