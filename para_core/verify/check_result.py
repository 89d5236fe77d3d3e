"""The result of ``check_parallel``, and its report.

:mod:`para_core.verify.check` makes it, and users print it. Tests: tests/verify/test_check_result.py
(reports) and test_check_parallel.py (of models).
"""

from __future__ import annotations

from dataclasses import dataclass

from para_core.comparison.difference import Difference
from para_core.comparison.runs import AttentionDim

# Maximum number of characters of an error in a line of the report. The first difference contains the whole
# error.
_WIDTH = 100
_NOTHING_SHARDED = "nothing sharded"


@dataclass(frozen=True)
class CheckedCase:
    """The result of one run on virtual ranks, compared with the unmodified model: an ``error`` or a ``failure``.

    Args:
        method (`"ring"` or `"ulysses"`): The way in which the ranks shared attention.
        ranks (`int`): Number of ranks.
        tokens (`int`, *optional*): Length of the sharded sequence; None if nothing was sharded.
        error (`float`, *optional*): The largest ``‖out − ref‖ / ‖ref‖`` of all output tensors; None if there
            is a ``failure``.
        failure (`str`, *optional*): The error that ended the run, or the reason why its output cannot be
            compared.

    Raises:
        ValueError: Neither or both of ``error`` and ``failure`` are given.
    """

    method: AttentionDim
    ranks: int
    tokens: int | None
    error: float | None = None
    failure: str | None = None

    def __post_init__(self) -> None:
        if (self.error is None) == (self.failure is None):
            raise ValueError(f"error is {self.error} and failure {self.failure!r}; expected one of both.")

    def __str__(self) -> str:
        tokens = self.tokens_in_words.rjust(len(_NOTHING_SHARDED))
        return f"{self.method:<7} {self.ranks:>3} ranks  {tokens}  {self._result()}"

    @property
    def tokens_in_words(self) -> str:
        """The length of the sharded sequence, for the report."""
        if self.tokens is None:
            return _NOTHING_SHARDED
        return f"{self.tokens} tokens"

    def _result(self) -> str:
        if self.failure is None:
            return f"{self.error:.1e}"
        line, _, _ = self.failure.partition("\n")
        if len(line) > _WIDTH:
            return f"{line[:_WIDTH]} …"
        return line


@dataclass(frozen=True)
class ParallelCheck:
    """The result of :func:`check_parallel`. ``str()`` gives a report, and ``bool()`` gives :attr:`exact`.

    Args:
        model (`str`): Name of the model's class.
        cases (`tuple` of :class:`CheckedCase`): One case for each method, number of ranks and length: at
            least one.
        tolerance (`float`): The largest error that counts as exact.
        first_difference (:class:`Difference`, *optional*): The first module whose output differs in the first
            case that is not exact; None if all cases are exact.
        notes (`tuple` of `str`, *optional*): Checks that were skipped, with the reason.

    Raises:
        ValueError: There is no case, or a first difference although all cases are exact.
    """

    model: str
    cases: tuple[CheckedCase, ...]
    tolerance: float
    first_difference: Difference | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.cases:
            raise ValueError(
                "cases is empty; expected at least one CheckedCase. Without one nothing is exact."
            )
        if self.first_difference is not None and self.exact:
            raise ValueError("There is a first_difference, but all cases are exact; expected None.")

    @property
    def exact(self) -> bool:
        """Whether every case ran and has an error within the tolerance."""
        return all(self.is_exact(case) for case in self.cases)

    @property
    def error(self) -> float:
        """The largest error of all cases; infinite if a case failed."""
        errors = [case.error for case in self.cases if case.error is not None]
        if not errors or len(errors) < len(self.cases):
            return float("inf")
        return max(errors)

    def is_exact(self, case: CheckedCase) -> bool:
        """Whether ``case`` ran and has an error within the tolerance."""
        return case.failure is None and case.error is not None and case.error <= self.tolerance

    def __bool__(self) -> bool:
        return self.exact

    def __str__(self) -> str:
        verdict = "NOT exact"
        if self.exact:
            verdict = "exact"
        lines = [f"{self.model} on virtual ranks: {verdict} (tolerance {self.tolerance:.0e})"]
        for case in self.cases:
            mark = "  <-"
            if self.is_exact(case):
                mark = ""
            lines.append(f"  {case}{mark}")
        lines += [f"  note: {note}" for note in self.notes]
        if self.first_difference is not None:
            case = next(case for case in self.cases if not self.is_exact(case))
            lines.append(f"First difference ({case.method}, {case.ranks} ranks, {case.tokens_in_words}):")
            lines += [f"  {line}" for line in str(self.first_difference).splitlines()]
        return "\n".join(lines)
