"""Checks of calls are found by the option that turns them on."""

import pytest

from para_core import call_checks


def test_a_check_is_new_for_each_model():
    assert call_checks.make_check("verify") != call_checks.make_check("verify")


def test_an_option_without_a_check_raises(monkeypatch):
    monkeypatch.setattr(call_checks, "CHECKS", {})
    with pytest.raises(ValueError, match="verify=True"):
        call_checks.make_check("verify")
    call_checks.check_options({"verify": True}, ["backend"], 4)
    assert not call_checks.can_check("verify", [], 1)


@pytest.mark.parametrize(
    ("approximations", "stages", "obstacle"),
    [([], 1, None), (["cache", "quantize"], 1, None), (["cache", "comm_dtype"], 1, "comm_dtype"), ([], 2, "pipe")],
)
def test_options_that_leave_nothing_to_compare_are_refused(approximations, stages, obstacle):
    call_checks.check_options({"verify": False}, ["backend"], 4)
    assert call_checks.can_check("verify", approximations, stages) == (obstacle is None)
    if obstacle is not None:
        with pytest.raises(ValueError, match=obstacle):
            call_checks.check_options({"verify": True}, approximations, stages)
