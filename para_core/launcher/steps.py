"""The steps of a pipeline's call, which its progress bar shows: each is reported to the caller, and then the
call can be cancelled.

All but a few pipelines of diffusers have a ``progress_bar``, also those without a callback. Modular pipelines
have it on their blocks.

``rank.py`` hooks the bars once a pipeline is loaded; the caller draws them (``display.py``). Tests:
tests/launcher/test_cancel.py, tests/launcher/test_calls.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import deepcopy
from typing import Any

from tqdm import tqdm

from para_core.launcher.connection import CallerConnection

# Attributes of the combined pipelines of diffusers, such as that of Kandinsky, which call these pipelines.
_INNER_PIPELINES = ("prior_pipe", "decoder_pipe")


def pipelines_of(pipe: Any) -> list[Any]:
    """Return ``pipe``, and the pipelines that it combines."""
    inner = [getattr(pipe, name, None) for name in _INNER_PIPELINES]
    return [pipe, *(x for x in inner if x is not None)]


def hook_progress_bars(pipe: Any, connection: CallerConnection) -> None:
    """Replace ``progress_bar`` of the rank's pipeline, of the pipelines that it combines, and of the blocks
    of a modular pipeline.
    """
    for owner in [*pipelines_of(pipe), *_nested_blocks(getattr(pipe, "_blocks", None))]:
        if callable(getattr(owner, "progress_bar", None)):
            owner.progress_bar = _BarMaker(connection, owner)


def _nested_blocks(block: Any) -> list[Any]:
    """Return ``block``, a block of a modular pipeline, and all blocks inside it; none if it is None."""
    if block is None:
        return []
    children = getattr(block, "sub_blocks", None)
    return [block, *(x for child in dict(children or {}).values() for x in _nested_blocks(child))]


class _BarMaker:
    """A replacement for the ``progress_bar`` method of the pipeline or block ``owner``."""

    def __init__(self, connection: CallerConnection, owner: Any) -> None:
        self._connection, self._owner = connection, owner

    def __deepcopy__(self, memo: dict[int, Any]) -> _BarMaker:
        """Return the replacement for a copy of the owner. The connection, whose locks cannot be copied, is the same."""
        return _BarMaker(self._connection, deepcopy(self._owner, memo))

    def __call__(
        self, iterable: Iterable[Any] | None = None, total: int | None = None, **options: Any
    ) -> Bar:
        options = {**(getattr(self._owner, "_progress_bar_config", None) or {}), **options}
        return Bar(self._connection, iterable, total, options)


class Bar(tqdm):  # type: ignore[misc]
    """A progress bar that the caller draws.

    Each update is a step, after which the call may end as cancelled. It is a collective call, so all ranks
    must show the same bars.
    """

    # Whether the caller shows it.
    _is_open = False

    def __init__(
        self, connection: CallerConnection, iterable: Any, total: int | None, options: dict[str, Any]
    ) -> None:
        # A disabled bar of tqdm draws nothing and counts nothing, but has all of tqdm's methods.
        super().__init__(iterable, total=total, initial=options.get("initial", 0), disable=True)
        # Other values, such as a file, belong to the rank, and the caller may be unable to load them. None has
        # a meaning: disable=None is for bars on terminals only.
        shown = {
            name: value
            for name, value in options.items()
            if isinstance(value, bool | int | float | str | None)
        }
        self._connection, self._number = connection, connection.open_bar(self.total, shown)
        self._is_open = True

    def __iter__(self) -> Iterator[Any]:
        try:
            for item in self.iterable:
                yield item
                self.update()
        finally:
            self.close()

    def update(self, n: float | None = 1) -> bool | None:
        self.n += n or 0
        self._connection.end_step(self._number, int(self.n), self.total)
        return None

    def close(self) -> None:
        # Once: tqdm closes a bar again when it is garbage. Garbage may be collected while this thread sends
        # another message, whose lock it would wait for without end.
        if self._is_open:
            self._is_open = False
            self._connection.report("bar closed", self._number)
        super().close()
