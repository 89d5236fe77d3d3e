"""Warnings about fields of a request that its pipeline accepts, and does not use with the other fields as
they are.

`cli/generation.py` prints them, and `http/server.py` logs them and adds them to its responses. Fields that
are refused are refused in `request.py` and `request_schema.py`. Tests: tests/fleet/test_fields.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from para_core.fleet.pipeline_info import PipelineInfo
from para_core.fleet.request import Request

# Beginnings of the class names of pipelines that add their guidance to the conditional prediction: they
# compute the negative prompt if guidance_scale is above 0, and all other pipelines if it is above 1. As all
# tables here it was read from the sources of diffusers 0.42.1, where each pipeline has the rule written out.
_ADDED_GUIDANCE = ("ZImage", "Krea2")
# Pipelines that compute guidance by another rule.
_OTHER_RULES = ("DreamLitePipeline", "Cosmos3OmniPipeline")
# This pipeline has the parameter true_cfg_scale, and decides by guidance_scale.
_BY_GUIDANCE_SCALE = ("ChromaInpaintPipeline",)


def warnings_of(request: Request, model: PipelineInfo) -> tuple[str, ...]:
    """Return a sentence for each field of ``request`` that changes nothing in the pipeline of ``model``.

    These are a negative prompt without the guidance that uses it, and ``true_cfg_scale`` without a negative
    prompt.
    """
    texts = {name: value for name, value in request.fields.items() if name.startswith("negative_prompt")}
    negative = ", ".join(name for name, value in texts.items() if _has_text(value))
    if "true_cfg_scale" in model.fields and model.pipeline not in _BY_GUIDANCE_SCALE:
        return _warn_of_true_guidance(request, model, negative)
    scale = _read_scale(request.fields, model, "guidance_scale")
    # Kandinsky's combined pipelines pass the text to their prior.
    others = ("audio_guidance_scale", "prior_guidance_scale")
    other_scale = max(_read_scale(request.fields, model, name) or 0.0 for name in others)
    least = 1.0
    if model.pipeline.startswith(_ADDED_GUIDANCE):
        least = 0.0
    if not negative or scale is None or model.modular or model.pipeline in _OTHER_RULES:
        return ()
    if max(scale, other_scale) > least:
        return ()
    return (_describe_need(negative, model, "guidance_scale", least, scale),)


def _warn_of_true_guidance(request: Request, model: PipelineInfo, negative: str) -> tuple[str, ...]:
    """Return the warnings for a pipeline with ``true_cfg_scale``. ``negative`` has the names of the negative
    prompts that have text, joined; it is empty if none has.
    """
    scale = _read_scale(request.fields, model, "true_cfg_scale")
    if scale is None:
        return ()
    if negative and scale <= 1:
        return (_describe_need(negative, model, "true_cfg_scale", 1.0, scale),)
    # An empty negative prompt is one, too: these pipelines ask only whether there is any.
    is_set = request.fields.get("true_cfg_scale") is not None
    if is_set and scale > 1 and request.fields.get("negative_prompt") is None:
        text = f"true_cfg_scale {scale:g} has no effect: {model.pipeline} uses it together with negative_prompt, "
        return (text + "which is not set (an empty text counts).",)
    return ()


def _describe_need(names: str, model: PipelineInfo, parameter: str, least: float, scale: float) -> str:
    """Return the warning that the fields ``names`` need ``parameter``, now ``scale``, above ``least``."""
    return f"{names} has no effect: {model.pipeline} uses it if {parameter} is above {least:g}, and it is {scale:g}."


def _has_text(value: Any) -> bool:
    texts = value
    if not isinstance(texts, list):
        texts = [texts]
    return any(isinstance(text, str) and text.strip() for text in texts)


def _read_scale(fields: Mapping[str, Any], model: PipelineInfo, name: str) -> float | None:
    """Return the number that the request or else the pipeline has for this scale, None if there is no number."""
    value = fields.get(name)
    if value is None:
        value = model.fields.get(name)
    if value is inspect.Parameter.empty or isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value)
