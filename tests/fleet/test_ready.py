"""The log of a server whose replicas do not all report."""

import logging

import pytest

pytest.importorskip("ray", reason="the extra ray is not installed: make test-fleet")

from para_core.fleet import serving


@pytest.mark.parametrize("ready", [2, 3])
def test_missing_replicas_are_a_warning_with_both_numbers(monkeypatch, caplog, ready):
    monkeypatch.setattr(serving, "_READY_SECONDS", 0.3)
    assert serving._wait_until_ready(lambda: ready, 3) == (ready == 3)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [message.startswith(f"{ready} of 3 replicas") for message in warnings] == [True] * (ready < 3)


def test_replicas_that_report_later_are_waited_for(monkeypatch, caplog):
    numbers = iter([0, 1, 2])
    monkeypatch.setattr(serving, "_REPORT_SECONDS", 0.01)
    assert serving._wait_until_ready(lambda: next(numbers), 2)
    assert next(numbers, None) is None
    assert not caplog.records
