"""Progress bars for the prompts of a command, and for the denoising steps of the current prompt."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class NoBars:
    """Stand-in for :class:`Bars` that shows nothing."""

    def __enter__(self) -> NoBars:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def begin(self, number: int, steps: int | None) -> None:
        pass

    def step(self, done: int) -> None:
        pass

    def end(self) -> None:
        pass


class Bars:
    """Two progress bars on stderr: finished prompts, and finished steps of the current prompt. Only in a terminal.

    Args:
        prompts (`int`): Total number of prompts.
        steps (`bool`, defaults to `True`): Whether to show the bar of the steps.
        unit (`str`, defaults to `"prompts"`): Label of the first bar.
    """

    def __init__(self, prompts: int, *, steps: bool = True, unit: str = "prompts") -> None:
        self._progress = Progress(
            TextColumn("{task.description:<12}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._prompts = self._progress.add_task(unit, total=prompts)
        self._steps = self._progress.add_task("steps", total=None, visible=steps)

    def __enter__(self) -> Bars:
        if self._progress.console.is_terminal:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Stopping a display that was never started would print an empty line.
        if self._progress.console.is_terminal:
            self._progress.stop()

    def begin(self, number: int, steps: int | None) -> None:
        """Show that prompt ``number`` begins: reset the second bar to 0 of ``steps`` (None if unknown)."""
        self._progress.reset(self._steps, total=steps, description=f"steps of {number}")

    def step(self, done: int) -> None:
        self._progress.update(self._steps, completed=done)

    def end(self) -> None:
        self._progress.advance(self._prompts)
