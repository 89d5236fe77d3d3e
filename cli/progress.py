"""Progress of a command on stderr: phases before the first step, then prompts and steps.

In a terminal, progress bars that vanish at the end; elsewhere, one line for each phase and each prompt.

``generate``, ``bench`` and ``serve`` use it. What is reported is sent by :mod:`para_core.progress`; ranks in
other processes send it through :mod:`para_core.launcher`. Tests: tests/cli/test_progress.py,
tests/cli/test_generate.py.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from para_core.cli.torchrun import is_first_of_torchrun
from para_core.progress import pass_records_to


def announce_imports() -> None:
    """Print on the first rank that torch and diffusers are being imported, which takes seconds."""
    if is_first_of_torchrun():
        Console(stderr=True, highlight=False).print("importing torch and diffusers")


class _Phases(logging.Handler):
    """Handler of the records of :mod:`para_core.progress`: a spinner with a bar, or a line for each record."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self._console = console
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),  # A path may have brackets.
            BarColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None, visible=False)

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if not self._console.is_terminal:
            self._console.print(text, markup=False)
            return
        done, total = getattr(record, "done", None), getattr(record, "total", None)
        self._bar.update(self._task, description=text, total=total, completed=done or 0, visible=True)
        self._bar.start()

    def close(self) -> None:
        self._bar.stop()
        super().close()


@contextmanager
def showing_phases(*, shown: bool = True) -> Iterator[None]:
    """Show reported phases on stderr until the end of this context. ``shown`` is False on all ranks but one."""
    if not shown:
        yield
        return
    handler = _Phases(Console(stderr=True, soft_wrap=True, highlight=False))
    try:
        with pass_records_to(handler):
            yield
    finally:
        handler.close()


class _LineHandler(logging.Handler):
    """Handler that prints each record as a line, above the bars of ``console`` if there are any."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.print(record.getMessage(), markup=False)


@contextmanager
def showing_log(console: Console) -> Iterator[None]:
    """Print reported phases, and what :mod:`para_core.fleet` logs, on ``console`` until this context ends."""
    lines = _LineHandler(console)
    with pass_records_to(lines, logging.getLogger("para_core.fleet")), pass_records_to(lines):
        yield


class Bars(Progress):
    """Progress of prompts, and of the steps of the current prompt: two bars in a terminal, elsewhere lines.

    ``steps`` says whether to show the second bar, and ``unit`` is the label of the first. Nothing is shown
    unless ``shown``.
    """

    def __init__(
        self, prompts: int, *, shown: bool = True, steps: bool = True, unit: str = "prompts"
    ) -> None:
        console = Console(stderr=True, soft_wrap=True, highlight=False)
        super().__init__(
            TextColumn("{task.description:<12}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not (shown and console.is_terminal),
        )
        self._total = prompts
        self._unit = unit
        self._done = 0
        self._prints_lines = shown and not console.is_terminal
        self._prompts = self.add_task(unit, total=prompts)
        self._steps = self.add_task("steps", total=None, visible=steps)

    def begin(self, number: int, steps: int | None) -> None:
        """Show that prompt ``number`` begins: reset the second bar to 0 of ``steps`` (None if unknown)."""
        self.reset(self._steps, total=steps, description=f"steps of {number}")
        if self._prints_lines:
            text = "generating"
            if self._total > 1:
                text += f" line {number} ({self._done + 1} of {self._total})"
            if steps is not None:
                text += f", {steps} steps"
            self.console.print(text, markup=False)

    def step(self, done: int) -> None:
        """Show the number of finished steps of the current prompt."""
        self.update(self._steps, completed=done)

    def end(self) -> None:
        """Show that one more prompt has ended."""
        self.advance(self._prompts)
        self._done += 1
        if self._prints_lines and not self.tasks[self._steps].visible:
            self.console.print(f"{self._done} of {self._total} {self._unit}", markup=False)
