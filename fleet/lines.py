"""Lines of a prompt file, which one group of ranks generates one after another.

`cli/generation.py` makes a :class:`LineRun` for ``para_core generate`` with one replica. Several replicas
generate lines in `replicas.py`, without the phases of `encode_first.py`. Tests: tests/cli/test_generate.py,
where one test, marked long, ends a rank, and tests/fleet/test_encode_first.py with ranks that end at once.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from para_core.fleet.encode_first import encode_batches
from para_core.fleet.engine import Ranks
from para_core.fleet.failures import EncodingFailed, describe_exception
from para_core.fleet.outputs import Result
from para_core.fleet.prompt_file import Line, Problem
from para_core.launcher.errors import RankDied


class LineDisplay(Protocol):
    """Display of lines and their steps."""

    def begin(self, number: int, steps: int | None) -> None:
        """Show that line ``number`` begins, which has this number of steps."""

    def step(self, done: int) -> None:
        """Show the number of finished steps."""

    def end(self) -> None:
        """Show that the line has ended. It may not have begun, if its prompt could not be encoded."""


class _LineLostError(RankDied):
    """Raised when ranks have ended with a line, which has failed. New ranks generate the others."""


@dataclass
class LineRun:
    """Generation of ``lines`` on ``ranks``, which hold a :class:`para_core.fleet.rank.Rank` each.

    ``write`` is called in this process with each line and its result. Under torchrun the first rank alone has
    results, and every rank must call :meth:`run` with the same lines. ``debug`` prints the traceback of what
    fails a line. The instance is itself the :class:`~para_core.fleet.encode_first.Encoder` of all ranks.
    """

    ranks: Ranks
    lines: Sequence[Line]
    write: Callable[[Line, Result], None]
    shown: LineDisplay
    debug: bool = False
    # By their numbers, lines that have ended: the reasons of those that failed, and the others. A line is in
    # one of the two at most, and run begins again with the lines that are in neither.
    _problems: dict[int, str] = field(default_factory=dict, init=False)
    _done: set[int] = field(default_factory=set, init=False)

    def run(self) -> list[Problem]:
        """Generate all lines, and return a problem for each line that failed.

        A line fails if all ranks raise for it, or its result cannot be encoded. If ranks end, the current
        line fails, and new ranks generate the others. Raise RankDied if ranks end without a line or cannot
        start again, what ``write`` raises, and what ranks raise between the phases, as when a denoiser does
        not fit.
        """
        # Each pass ends with fewer lines: encode_batches yields every line, or calls _fail for it.
        while waiting := [line for line in self.lines if line.number not in {*self._done, *self._problems}]:
            try:
                self.ranks.start()
                for batch in encode_batches(waiting, self, self._fail):
                    for line in batch:
                        self._generate(line)
            except _LineLostError:
                continue
        return [Problem(number, reason) for number, reason in sorted(self._problems.items())]

    def _generate(self, line: Line) -> None:
        """Generate ``line``, write its result, and note that it is done or why it failed. Raise RankDied if
        ranks end, and what ``write`` raises.
        """
        self.shown.begin(line.number, line.request.fields.get("num_inference_steps"))
        result: Result | EncodingFailed | None = None
        try:
            with self._running(line):
                result = self.ranks.call("generate", line.request, listener=self.shown.step)
            if isinstance(result, EncodingFailed):
                raise result
        except RankDied:
            raise
        except Exception as error:
            self._fail(line, error)
        else:
            if result is not None:
                self.write(line, result)
            self._done.add(line.number)
            self.shown.end()

    @contextmanager
    def _running(self, line: Line) -> Iterator[None]:
        """Let ``line`` fail if ranks end inside the ``with`` block, and raise _LineLostError if others can start."""
        try:
            yield
        except RankDied as error:
            if not self.ranks.restarts:
                raise
            self._fail(line, error)
            raise _LineLostError(str(error), error.rank) from error

    def _fail(self, line: Line, error: Exception) -> None:
        """Note ``error`` as the problem of ``line``, and show that it has ended."""
        if self.debug:
            traceback.print_exception(error)
        self._problems[line.number] = describe_exception(error)
        self.shown.end()

    # The phases of an Encoder, on all ranks.

    def encodes_first(self) -> bool:
        return bool(self.ranks.call("encodes_first"))

    def begin_encoding(self) -> None:
        self.ranks.call("begin_encoding")

    def encode(self, line: Line) -> bool:
        with self._running(line):
            return bool(self.ranks.call("encode", line))

    def end_encoding(self, keep_encoders: bool) -> None:
        self.ranks.call("end_encoding", keep_encoders)
