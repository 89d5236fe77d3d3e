"""Which transformers run in parallel, and by which plan."""

from __future__ import annotations

from typing import Any

from torch import nn

from para_core.adapters.adapter import Adapter, Text
from para_core.adapters.auraflow import AURAFLOW
from para_core.adapters.cogvideox import COGVIDEOX
from para_core.adapters.flux import FLUX, FLUX2
from para_core.adapters.helios import HELIOS
from para_core.adapters.hidream import HIDREAM
from para_core.adapters.hunyuan_video import FRAMEPACK, HUNYUAN_VIDEO, HUNYUAN_VIDEO_15
from para_core.adapters.ltx import LTX, LTX2
from para_core.adapters.lumina2 import LUMINA2
from para_core.adapters.mochi import MOCHI
from para_core.adapters.pixart import PIXART
from para_core.adapters.qwen_image import QWEN_IMAGE
from para_core.adapters.sd3 import SD3
from para_core.adapters.wan import SKYREELS_V2, WAN_ANIMATE, WAN_VACE
from para_core.instance import original_class
from para_core.plan import Plan, published_plan

ADAPTERS: tuple[Adapter, ...] = (
    FLUX,
    FLUX2,
    HUNYUAN_VIDEO,
    FRAMEPACK,
    HUNYUAN_VIDEO_15,
    MOCHI,
    COGVIDEOX,
    WAN_VACE,
    WAN_ANIMATE,
    SKYREELS_V2,
    QWEN_IMAGE,
    LTX,
    LTX2,
    HELIOS,
    SD3,
    AURAFLOW,
    PIXART,
    LUMINA2,
    HIDREAM,
)


def plan_for(module: nn.Module, text: Text | None = None, adapter: Adapter | None = None) -> Plan | None:
    """Our plan for ``module``, or the one that its class publishes (``_cp_plan``); None if there is neither.

    Args:
        text: None: the faster way.
        adapter: goes before both where it is for this class.

    Raises:
        ValueError: ``text`` is unknown, or this model's text cannot be cut.
    """
    if text not in (None, "shard", "replicate"):
        raise ValueError(f"text is {text!r}; expected 'shard', 'replicate', or None for the faster of both.")
    names = {cls.__name__ for cls in type(module).__mro__}
    for known in (*([] if adapter is None else [adapter]), *ADAPTERS):
        if known.transformer in names:
            return _with_text(known.plan, "text", text or known.text, asked=text, module=module)
    published: Any = getattr(module, "_cp_plan", None)
    if published is None:
        return None
    return _with_text(published_plan(published), "encoder_hidden_states", text or "shard", asked=text, module=module)


def _with_text(plan: Plan, segment: str, text: Text, *, asked: Text | None, module: nn.Module) -> Plan:
    if text == "replicate":
        return plan.with_whole(segment)
    if asked == "shard" and not plan.cuts(segment):
        raise ValueError(
            f"text='shard' was given, but {original_class(module).__name__} needs all text tokens on every rank: it makes "
            "masks or positions for the whole sequence, or only its keys are text. Leave text= out."
        )
    return plan


def supported() -> str:
    """What is supported, for messages."""
    return "; ".join(adapter.pipelines for adapter in ADAPTERS) + "; every model that publishes a _cp_plan"
