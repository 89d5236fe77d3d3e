"""The changes that run one object on several ranks: applied together, undone together, and put back if others fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from para_core.distributed.consistency import raising_on_all
from para_core.distributed.mesh import GuidedMesh
from para_core.instance_patching import instances_in, restored_on_failure

Undo = Callable[[], None]


def nothing() -> None:
    """Undo nothing."""


class Part:
    """One change of an object of the user's.

    :meth:`apply` either does all of it and returns its undo, or raises; wrappers (:mod:`para_core.instance_patching`) that it leaves behind
    when it raises are removed by the session.
    """

    # Of what an error message says that it failed.
    name = "a part"
    shards_weights = False

    def apply(self) -> Undo:
        raise NotImplementedError

    def complete(self) -> None:
        """Do what only all ranks can undo together. Every rank has applied all parts before any rank calls it."""

    def clear(self) -> Undo:
        """Remove what other calls applied to the same object, and return a function that puts it back, wrappers excepted."""
        return nothing

    def suspend(self, undo: Undo, mesh: GuidedMesh) -> Undo:
        """Undo it for a session on ``mesh`` that replaces this one, and return a function that puts it back, wrappers excepted."""
        undo()
        return nothing

    def finish(self, undo: Undo) -> None:
        """Undo what :meth:`suspend` left, once the next session runs."""


class ParallelSession:
    """What is applied to one pipeline, or to one transformer.

    Args:
        mesh: Its ranks.
        parts: In the order in which they are applied.
    """

    def __init__(self, mesh: GuidedMesh, parts: Sequence[Part]) -> None:
        self.mesh, self.parts = mesh, list(parts)
        self._applied: list[tuple[Part, Undo]] = []

    @property
    def shards_weights(self) -> bool:
        """Whether it sharded weights, which it gathers when it is undone."""
        return any(part.shards_weights for part, _ in self._applied)

    def start(self) -> None:
        """Apply all parts. If one fails on a rank, all ranks raise, and :meth:`stop` undoes those that were applied."""
        for part in self.parts:
            with raising_on_all(self.mesh, f"{part.name} failed"):
                self._applied.append((part, part.apply()))
        with raising_on_all(self.mesh, "the last step failed"):
            for part in self.parts:
                part.complete()

    def stop(self) -> None:
        """Undo all parts, the last one first, even if one fails."""
        applied, self._applied = self._applied, []
        with ExitStack() as undos:
            for _, undo in applied:
                undos.callback(undo)

    def suspend(self, resume: ExitStack, mesh: GuidedMesh) -> None:
        """Undo all parts for a session on ``mesh``; ``resume`` gets what puts them back."""
        for part, undo in reversed(self._applied):
            resume.callback(part.suspend(undo, mesh))

    def finish(self) -> None:
        """Undo what a suspended session has left."""
        applied, self._applied = self._applied, []
        with ExitStack() as undos:
            for part, undo in applied:
                undos.callback(part.finish, undo)


def replace_session(instance: Any, previous: ParallelSession | None, session: ParallelSession) -> None:
    """Start ``session`` in place of ``previous``. If a rank fails, every rank raises, and ``instance`` is what it was before.

    Every rank of the mesh calls it.
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
    """If the block raises, run the callbacks of the stack, and give ``instance`` and the modules inside it their present wrappers back."""
    with restored_on_failure(instances_in(instance)), ExitStack() as rollback:
        yield rollback
        rollback.pop_all()
