"""Adapters: data that says what each model family shards, gathers and caches. One file per family."""

from __future__ import annotations

from para_core.adapters.adapter import Adapter
from para_core.adapters.models import (
    allegro,
    audio,
    auraflow,
    cogvideox,
    cogview,
    cosmos,
    dit,
    easyanimate,
    flux,
    flux_relatives,
    helios,
    hidream,
    hunyuan_image,
    hunyuan_video,
    joyimage,
    kandinsky,
    latte,
    ltx,
    lumina2,
    minimax,
    mochi,
    motif,
    nucleus,
    one_stream,
    pixart,
    prx,
    qwen_image,
    sana,
    sd3,
    wan,
)

# The families in the order in which messages and pages list their pipelines.
_FAMILIES = (
    *(flux, hunyuan_video, mochi, cogvideox, wan, qwen_image, ltx, helios, sd3, auraflow, pixart, lumina2, hidream),
    *(minimax, flux_relatives, one_stream, cogview, kandinsky, hunyuan_image, cosmos, easyanimate, prx, dit, audio),
    *(joyimage, allegro, nucleus, sana, motif, latte),
)

# Every Adapter that is a global variable of one of these modules.
ADAPTERS: tuple[Adapter, ...] = tuple(
    value for family in _FAMILIES for value in vars(family).values() if isinstance(value, Adapter)
)
