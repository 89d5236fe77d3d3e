"""The tables of docs/refusals.md are those of the code, and of the combinations that were tried."""

from benchmarks import pages
from benchmarks.harness import read_results
from para_core.adapters.refusal import refusal


def test_every_check_has_a_row_with_its_phases_and_error():
    rows = pages.refused_rows()
    checks = [check for phase in pages.PHASES.values() for check in pages.checks_of(phase)]
    assert len(rows) == len(set(checks)) > 30
    assert sum(len(phases.split(", ")) for _, phases, _, _ in rows) == len(checks)
    for title, _, error, advice in rows:
        assert error in ("`TypeError`", "`ValueError`", "`RuntimeError`")
        assert advice, f"the error about {title} has no sentence that says what to do"
        assert "{" not in advice


def check_with_a_field(name):
    if name:
        raise refusal(ValueError, f"{name} is odd. That is the reason.", f"Use another than {name}.")
    raise refusal(ValueError, "it is empty.", "Fill it.")


def check_with_sentences(name):
    raise TypeError(f"{name} is odd: Dynamo says so. Use another. Or none.")


def check_without_advice(name):
    raise TypeError(f"{name} is odd: that is the reason.")


def test_advice_is_read_from_field_or_later_sentences():
    assert pages.errors_of(check_with_a_field) == ("ValueError", "Use another than pipe.transformer. Fill it.")
    assert pages.errors_of(check_with_sentences) == ("TypeError", "Use another. Or none.")
    assert pages.errors_of(check_without_advice) == ("TypeError", "")


def test_combinations_were_refused_each_time_they_were_tried():
    tried = read_results("together")["excluded"]
    assert len(tried) > 15
    assert all(row["refused"] == row["tried"] > 0 for row in tried)
