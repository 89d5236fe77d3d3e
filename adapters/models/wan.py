"""Adapters of Wan, Wan VACE and ChronoEdit. Written for diffusers 0.42."""

from para_core.adapters.adapter import Adapter
from para_core.adapters.models.shared.constructors import chained
from para_core.adapters.models.shared.tokens import VIDEO, VIDEO_TO_TEXT
from para_core.adapters.models.shared.wan import WITH_VIDEO, wan_plan, wan_tensor_plan
from para_core.cache.blocks import BlockGroup, CachedBlocks
from para_core.plans.plan import Split
from para_core.weights.patch_plan import Frames

BLOCKS, TENSOR = chained("blocks"), wan_tensor_plan("blocks")
FRAMES = Frames(dim=2, together="patch_size")

WAN = Adapter(
    transformer="WanTransformer3DModel", pipelines="Wan", blocks=BLOCKS, tensor=TENSOR, frames=FRAMES
)
CHRONO_EDIT = Adapter(
    transformer="ChronoEditTransformer3DModel",
    pipelines="ChronoEdit",
    blocks=BLOCKS,
    tensor=TENSOR,
    frames=FRAMES,
)

WAN_VACE = Adapter(
    transformer="WanVACETransformer3DModel",
    pipelines="Wan VACE",
    plan=wan_plan(
        inner={
            "rope": {0: WITH_VIDEO, 1: WITH_VIDEO},
            # Every VACE block gets the video tokens that enter the first block, so split them for each.
            "vace_blocks.*": {"hidden_states": VIDEO},
            "vace_blocks.0": {"control_hidden_states": Split(dim=1, like="video")},
        },
        gathered="proj_out",
        attention={"**.attn2": VIDEO_TO_TEXT},
    ),
    # The VACE blocks run before these blocks and are not cached, so they run at every step.
    blocks=CachedBlocks((BlockGroup(("blocks",)),)),
    tensor=wan_tensor_plan("blocks", "vace_blocks"),
)
