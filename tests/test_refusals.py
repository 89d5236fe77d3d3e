"""The tables of docs/refusals.md have all checks of the library, and combinations that were refused."""

from benchmarks import refusals
from benchmarks.harness import read_results


def test_every_check_has_a_row_with_its_phases_and_error():
    rows = refusals.refused_rows()
    checks = [check for phase in refusals.PHASES.values() for check in refusals.checks_of(phase)]
    assert len(rows) == len(set(checks)) > 20
    assert sum(len(phases.split(", ")) for _, phases, _, _ in rows) == len(checks)
    for title, _, error, advice in rows:
        assert error in ("`TypeError`", "`ValueError`", "`RuntimeError`")
        assert advice and "{" not in advice, f"the error about {title} has no sentence that says what to do"


def test_combinations_were_refused_each_time_they_were_tried():
    tried = read_results("together")["excluded"]
    assert len(tried) > 15
    assert all(row["refused"] == row["tried"] > 0 for row in tried)
