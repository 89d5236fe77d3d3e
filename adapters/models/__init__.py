"""Adapters: what each model family shards, gathers and caches, as data, one file per family."""

from __future__ import annotations

from para_core.adapters.models.allegro import ALLEGRO
from para_core.adapters.models.audio import ACE_STEP, LONGCAT_AUDIO, MINIMAX_MUSIC, STABLE_AUDIO, STABLE_AUDIO3
from para_core.adapters.models.auraflow import AURAFLOW
from para_core.adapters.models.cogvideox import COGVIDEOX, CONSISID
from para_core.adapters.models.cogview import COGVIEW3_PLUS, COGVIEW4, GLM_IMAGE
from para_core.adapters.models.cosmos import COSMOS, COSMOS3
from para_core.adapters.models.dit import DIT
from para_core.adapters.models.easyanimate import EASYANIMATE
from para_core.adapters.models.flux import FLUX, FLUX2, FLUX3
from para_core.adapters.models.flux_relatives import BRIA, BRIA_FIBO, CHROMA, LONGCAT_IMAGE, OVIS
from para_core.adapters.models.helios import HELIOS
from para_core.adapters.models.hidream import HIDREAM
from para_core.adapters.models.hunyuan_image import HUNYUAN_DIT, HUNYUAN_IMAGE
from para_core.adapters.models.hunyuan_video import FRAMEPACK, HUNYUAN_VIDEO, HUNYUAN_VIDEO_15
from para_core.adapters.models.joyimage import JOYIMAGE, JOYIMAGE_PLUS
from para_core.adapters.models.kandinsky import KANDINSKY5, KANDINSKY6, KANDINSKY6_SR
from para_core.adapters.models.latte import LATTE
from para_core.adapters.models.ltx import LTX, LTX2
from para_core.adapters.models.lumina2 import LUMINA2
from para_core.adapters.models.minimax import MINIMAX_H3
from para_core.adapters.models.mochi import MOCHI
from para_core.adapters.models.motif import MOTIF
from para_core.adapters.models.nucleus import NUCLEUS
from para_core.adapters.models.one_stream import BRIA_FIBO2, ERNIE_IMAGE, IDEOGRAM4, KREA2, OMNIGEN, Z_IMAGE
from para_core.adapters.models.pixart import PIXART
from para_core.adapters.models.prx import PRX
from para_core.adapters.models.qwen_image import QWEN_IMAGE, QWEN_IMAGE_21
from para_core.adapters.models.sana import SANA, SANA_VIDEO
from para_core.adapters.models.sd3 import SD3
from para_core.adapters.models.wan import (
    ANYFLOW,
    ANYFLOW_FAR,
    CHRONO_EDIT,
    SKYREELS_V2,
    WAN,
    WAN_ANIMATE,
    WAN_ANIMATE_2,
    WAN_VACE,
)
from para_core.adapters.spec import Adapter

ADAPTERS: tuple[Adapter, ...] = (
    FLUX,
    FLUX2,
    HUNYUAN_VIDEO,
    FRAMEPACK,
    HUNYUAN_VIDEO_15,
    MOCHI,
    COGVIDEOX,
    WAN,
    WAN_VACE,
    WAN_ANIMATE,
    SKYREELS_V2,
    CHRONO_EDIT,
    QWEN_IMAGE,
    LTX,
    LTX2,
    HELIOS,
    SD3,
    AURAFLOW,
    PIXART,
    LUMINA2,
    HIDREAM,
    MINIMAX_H3,
    CHROMA,
    OVIS,
    LONGCAT_IMAGE,
    BRIA,
    BRIA_FIBO,
    BRIA_FIBO2,
    COGVIEW3_PLUS,
    COGVIEW4,
    GLM_IMAGE,
    Z_IMAGE,
    KREA2,
    ERNIE_IMAGE,
    IDEOGRAM4,
    OMNIGEN,
    KANDINSKY5,
    HUNYUAN_IMAGE,
    HUNYUAN_DIT,
    COSMOS,
    COSMOS3,
    FLUX3,
    EASYANIMATE,
    CONSISID,
    PRX,
    DIT,
    ANYFLOW,
    ACE_STEP,
    STABLE_AUDIO,
    STABLE_AUDIO3,
    LONGCAT_AUDIO,
    MINIMAX_MUSIC,
    JOYIMAGE,
    JOYIMAGE_PLUS,
    ALLEGRO,
    NUCLEUS,
    KANDINSKY6,
    KANDINSKY6_SR,
    ANYFLOW_FAR,
    WAN_ANIMATE_2,
    SANA,
    SANA_VIDEO,
    MOTIF,
    LATTE,
    QWEN_IMAGE_21,
)
