"""The tables of docs/refusals.md are those of the code, and of the combinations that were tried."""

from benchmarks import pages
from para_core.adapters.compatibility import REFUSALS, When


def test_every_row_has_moment_and_error():
    rows = pages.refused_rows()
    assert len(rows) == len(REFUSALS)
    for refusal, (_, when, error, message) in zip(REFUSALS, rows, strict=True):
        assert len(when.split(", ")) == len(refusal.when)
        assert error == f"`{refusal.error.__name__}`"
        assert "{" not in message
        assert message
    assert set(pages._WHEN) == set(When)


def test_combinations_were_refused_each_time_they_were_tried():
    tried = pages.tried()
    assert len(tried) > 15
    assert all(row["refused"] == row["tried"] > 0 for row in tried)
