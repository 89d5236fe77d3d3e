"""Which transformers run in parallel, and by which plan."""

from __future__ import annotations

from typing import Any

from torch import nn

from para_core.adapters.adapter import Adapter, Text
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
from para_core.adapters.models.kandinsky import KANDINSKY5, KANDINSKY6
from para_core.adapters.models.ltx import LTX, LTX2
from para_core.adapters.models.lumina2 import LUMINA2
from para_core.adapters.models.minimax import MINIMAX_H3
from para_core.adapters.models.mochi import MOCHI
from para_core.adapters.models.nucleus import NUCLEUS
from para_core.adapters.models.one_stream import BRIA_FIBO2, ERNIE_IMAGE, IDEOGRAM4, KREA2, OMNIGEN, Z_IMAGE
from para_core.adapters.models.pixart import PIXART
from para_core.adapters.models.prx import PRX
from para_core.adapters.models.qwen_image import QWEN_IMAGE
from para_core.adapters.models.refused import REFUSED
from para_core.adapters.models.sd3 import SD3
from para_core.adapters.models.wan import ANYFLOW, CHRONO_EDIT, SKYREELS_V2, WAN, WAN_ANIMATE, WAN_VACE
from para_core.instance import original_class, uncompiled
from para_core.plans.plan import Plan
from para_core.plans.published import published_plan

# Components that denoise; Wan 2.2 has one for each half of the steps, Ideogram 4 one for each branch of guidance.
TRANSFORMERS = ("transformer", "transformer_2", "unconditional_transformer")

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
)


def plan_for(module: nn.Module, text: Text | None = None, adapter: Adapter | None = None) -> Plan | None:
    """Our plan for ``module``, or the one that its class publishes (``_cp_plan``); None if there is neither.

    Args:
        text: None: the faster way.
        adapter: goes before both where it is for this class.

    Raises:
        ValueError: ``text`` is unknown, or this model's text cannot be sharded.
    """
    if text not in (None, "shard", "replicate"):
        raise ValueError(f"text is {text!r}; expected 'shard', 'replicate', or None for the faster of both.")
    known = adapter_for(module, adapter)
    if known is not None and known.plan is not None:
        return _with_text(known.plan, "text", text or known.text, asked=text, module=module)
    published: Any = getattr(module, "_cp_plan", None)
    if published is None:
        return None
    return _with_text(published_plan(published), "encoder_hidden_states", text or "shard", asked=text, module=module)


def adapter_for(module: nn.Module, adapter: Adapter | None = None) -> Adapter | None:
    """What is known of ``module``; None if nothing.

    Args:
        adapter: goes before what is known here where it is for this class.
    """
    names = [cls.__name__ for cls in type(module).__mro__]
    candidates = [*([] if adapter is None else [adapter]), *ADAPTERS]
    return next((known for name in names for known in candidates if known.transformer == name), None)


def why_refused(module: nn.Module) -> str | None:
    """Why a class of diffusers has no plan; None where nothing is known against one."""
    return next((REFUSED[cls.__name__] for cls in type(module).__mro__ if cls.__name__ in REFUSED), None)


def _with_text(plan: Plan, segment: str, text: Text, *, asked: Text | None, module: nn.Module) -> Plan:
    if text == "replicate":
        return plan.with_replicated(segment)
    if asked == "shard" and not plan.cuts(segment):
        raise ValueError(
            f"text='shard' was given, but {original_class(module).__name__} needs all text tokens on every rank: it makes "
            "masks or positions for the whole sequence, or only its keys are text. Leave text= out."
        )
    return plan


def transformers_of(pipe: Any) -> dict[str, nn.Module]:
    """What denoises in a pipeline, by the name of the component, as it was before ``torch.compile``."""
    found = {name: uncompiled(getattr(pipe, name, None)) for name in TRANSFORMERS}
    return {name: module for name, module in found.items() if isinstance(module, nn.Module)}


def supported() -> str:
    """What runs in parallel, for messages."""
    return (
        "; ".join(adapter.pipelines for adapter in ADAPTERS if adapter.plan is not None)
        + "; every model that publishes a _cp_plan"
    )


def cached() -> str:
    """What First Block Cache works on, for messages."""
    return "; ".join(adapter.pipelines for adapter in ADAPTERS if adapter.blocks is not None)
