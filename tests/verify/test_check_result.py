"""The report of check_parallel, from results that are made by hand."""

import pytest

from para_core.comparison.difference import Difference
from para_core.verify.check_result import CheckedCase, ParallelCheck

EXACT, LARGE, FAILED = (
    CheckedCase("ring", 2, 100, error=1e-6),
    CheckedCase("ulysses", 2, 99, error=0.5),
    CheckedCase("ring", 12, None, failure="rank 0: " + "a" * 200 + "\nsecond line"),
)
DIFFERENCE = Difference("blocks.0", "Block", "it mixes tokens")


@pytest.mark.parametrize(
    ("cases", "error", "words"),
    [((EXACT,), 1e-6, ""), ((EXACT, LARGE), 0.5, "ulysses, 2 ranks, 99"), ((FAILED, LARGE), float("inf"), "nothing")],
)
def test_report(cases, error, words):
    check = ParallelCheck("Model", cases, 1e-4, None if cases == (EXACT,) else DIFFERENCE, ("a note",))
    assert (bool(check), check.exact, check.error) == (cases == (EXACT,), cases == (EXACT,), error)
    _, *lines, note = str(check).partition("\nFirst")[0].splitlines()
    assert [line.endswith("  <-") for line in lines] == [case is not EXACT for case in cases]
    assert note.endswith("a note") and all(len(line) < 160 for line in lines)
    assert ("First difference" in str(check)) == (not check)
    assert words in str(check).partition("First")[2] and "None" not in str(check)


def test_columns_of_the_report_are_aligned():
    sizes = [(2, 9), (12, 100), (128, 1234567), (2, None)]
    lines = [str(CheckedCase("ring", ranks, tokens, error=0.5)) for ranks, tokens in sizes]
    assert len({line.index("5.0e-01") for line in lines}) == 1


def test_results_that_contradict_themselves_are_refused():
    for results in ({}, {"error": 0.0, "failure": "it failed"}):
        with pytest.raises(ValueError, match="error is"):
            CheckedCase("ring", 2, 99, **results)
    for cases in ((), (EXACT,)):
        with pytest.raises(ValueError, match="cases"):
            ParallelCheck("Model", cases, 1e-4, DIFFERENCE)
