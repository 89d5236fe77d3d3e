"""The tables of docs/refusals.md are those of the code, and of the combinations that were tried."""

from benchmarks import pages
from benchmarks.harness import read_results
from para_core.adapters.compatibility.phases import PHASES


def test_every_check_has_a_row_with_its_phases_and_error():
    rows = pages.refused_rows()
    checks = [check for phase in PHASES.values() for check in pages.checks_of(phase)]
    assert len(rows) == len(set(checks)) > 30
    assert sum(len(phases.split(", ")) for _, phases, _, _ in rows) == len(checks)
    for _, _, error, message in rows:
        assert error in ("`TypeError`", "`ValueError`", "`RuntimeError`")
        assert message and "{" not in message


def test_combinations_were_refused_each_time_they_were_tried():
    tried = read_results("together")["excluded"]
    assert len(tried) > 15
    assert all(row["refused"] == row["tried"] > 0 for row in tried)
