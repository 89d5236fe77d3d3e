"""Recorded plans of the classes of comfy/ldm, as data. `benchmarks.comfyui.classes` compares them with ComfyUI."""

from comfyui_para_core.plans import find_plan


def test_a_subclass_has_no_plan_of_its_base_class():
    base = type("WanModel", (), {"__module__": "comfy.ldm.wan.model", "__qualname__": "WanModel"})
    derived = type("Other", (base,), {"__module__": "comfy.ldm.wan.model", "__qualname__": "Other"})
    assert find_plan(base).models.startswith("Wan")
    assert find_plan(derived) is None
