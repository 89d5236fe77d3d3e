"""Adapters: data that says what each model family shards, gathers and caches."""

from __future__ import annotations

from para_core.adapters.adapter import Adapter
from para_core.adapters.models import (
    audio,
    cogvideox,
    cosmos,
    cross_attention,
    flux,
    flux_relatives,
    hunyuan_video,
    joint_attention,
    kandinsky,
    ltx,
    mochi,
    one_stream,
    qwen_image,
    sana,
    wan,
)

# The families in the order in which messages and pages list their pipelines.
_FAMILIES = (
    *(flux, hunyuan_video, mochi, cogvideox, wan, qwen_image, ltx, joint_attention, cross_attention),
    *(flux_relatives, one_stream, kandinsky, cosmos, audio, sana),
)

# Every Adapter that is a global variable of one of these modules.
ADAPTERS: tuple[Adapter, ...] = tuple(
    value for family in _FAMILIES for value in vars(family).values() if isinstance(value, Adapter)
)
