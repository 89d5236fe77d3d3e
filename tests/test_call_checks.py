"""Checks of calls are found by the option that turns them on."""

import pytest

from para_core import call_checks


def test_a_check_is_new_for_each_model():
    assert call_checks.make_check("verify") != call_checks.make_check("verify")


def test_an_option_without_a_check_raises(monkeypatch):
    monkeypatch.setattr(call_checks, "CHECKS", {})
    with pytest.raises(ValueError, match="verify=True"):
        call_checks.make_check("verify")
