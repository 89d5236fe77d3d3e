"""Recorded plans of the classes of comfy/ldm, as data. `benchmarks.comfyui.classes` compares them with ComfyUI."""

import pytest

from benchmarks.harness import read_results
from comfyui_para_core.plans import PLANS, find_plan

ROWS = read_results("comfyui")["models"]


@pytest.mark.parametrize("cls", PLANS)
def test_a_plan_was_compared_or_has_a_reason(cls):
    plan = PLANS[cls]
    verdicts = {row["verdict"] for row in ROWS if row["class"] == cls and not row["condition"]}
    if plan.refused:
        assert plan.adapter is None
        assert verdicts == {"refused"}
        return
    assert verdicts == {"exact"}
    assert plan.adapter.transformer == cls.rpartition(".")[2]
    assert plan.arguments


def test_no_comparison_is_wrong_and_each_condition_is_exact_or_refused():
    assert {row["verdict"] for row in ROWS} == {"exact", "refused", "not recorded"}
    assert {row["verdict"] for row in ROWS if row["condition"]} == {"exact", "refused"}


def test_a_subclass_has_no_plan_of_its_base_class():
    base = type("WanModel", (), {"__module__": "comfy.ldm.wan.model", "__qualname__": "WanModel"})
    derived = type("Other", (base,), {"__module__": "comfy.ldm.wan.model", "__qualname__": "Other"})
    assert find_plan(base).models.startswith("Wan")
    assert find_plan(derived) is None
