"""Progress bars for the prompts of a command, and for the denoising steps of the current prompt."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Bars(Progress):
    """Two progress bars on stderr: finished prompts, and finished steps of the current prompt. Only in a terminal.

    ``steps`` says whether to show the second bar, and ``unit`` is the label of the first.
    """

    def __init__(self, prompts: int, *, shown: bool = True, steps: bool = True, unit: str = "prompts") -> None:
        console = Console(stderr=True)
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
        self._prompts = self.add_task(unit, total=prompts)
        self._steps = self.add_task("steps", total=None, visible=steps)

    def begin(self, number: int, steps: int | None) -> None:
        """Show that prompt ``number`` begins: reset the second bar to 0 of ``steps`` (None if unknown)."""
        self.reset(self._steps, total=steps, description=f"steps of {number}")

    def step(self, done: int) -> None:
        self.update(self._steps, completed=done)

    def end(self) -> None:
        self.advance(self._prompts)
