"""Adapter of SkyReels V2. Written for diffusers 0.42."""

from para_core.adapters.adapter import Adapter
from para_core.adapters.models.shared.constructors import chained
from para_core.adapters.models.shared.tokens import VIDEO_TO_TEXT
from para_core.adapters.models.shared.wan import WITH_VIDEO, wan_plan, wan_tensor_plan
from para_core.plans.plan import Split

SKYREELS_V2 = Adapter(
    transformer="SkyReelsV2Transformer3DModel",
    pipelines="SkyReels V2",
    plan=wan_plan(
        inner={
            "rope": {0: WITH_VIDEO, 1: WITH_VIDEO},
            # temb has one entry per token if frames have different time steps. The causal mask is replicated.
            "blocks.*": {"temb": Split(dim=2, like="video", ndim=4)},
        },
        attention={"**.attn2": VIDEO_TO_TEXT},
    ),
    blocks=chained("blocks"),
    tensor=wan_tensor_plan("blocks"),
    steps_with_copies=True,
)
