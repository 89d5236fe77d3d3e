"""Wan VACE; the other Wan models publish a plan. Read against diffusers 0.42."""

from para_core.adapters.adapter import Adapter
from para_core.plan import Attention, Gather, Plan, Split

VIDEO, POSITIONS = Split(dim=1, segment="video"), Split(dim=1, like="video")

WAN_VACE = Adapter(
    transformer="WanVACETransformer3DModel",
    pipelines="Wan VACE",
    plan=Plan(
        inputs={},
        inner={
            "rope": {0: POSITIONS, 1: POSITIONS},
            # The blocks of the condition all see the tokens as they are before the first block.
            "vace_blocks.*": {"hidden_states": VIDEO},
            "vace_blocks.0": {"control_hidden_states": Split(dim=1, like="video")},
            "blocks.0": {"hidden_states": VIDEO},
        },
        outputs={"proj_out": Gather(dim=1, segment="video")},
        joint_order=("video",),
        # Text and the tokens of an image are whole.
        attention={"**.attn2": (Attention(("video",), ("text",)),)},
    ),
)
