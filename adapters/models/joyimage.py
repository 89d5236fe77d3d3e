"""Adapters of JoyImage-Edit. Written for diffusers 0.42."""

from para_core.adapters.adapter import Adapter
from para_core.adapters.models.shared.constructors import TEXT_LAST, chained
from para_core.adapters.models.shared.tokens import ALL_IMAGE, IMAGE, IMAGE_THEN_TEXT, POSITIONS
from para_core.plans.plan import Entries, Plan, ShardRule, Split

JOYIMAGE_BLOCKS = chained("double_blocks", streams=TEXT_LAST)


def _joyimage_plan(positions: ShardRule) -> Plan:
    return Plan(
        inputs={},
        inner={
            "double_blocks.0": {"hidden_states": IMAGE},
            "double_blocks.*": {"image_rotary_emb": positions},
        },
        outputs={"proj_out": ALL_IMAGE},
        joint_order=IMAGE_THEN_TEXT,
    )


JOYIMAGE = Adapter(
    transformer="JoyImageEditTransformer3DModel",
    pipelines="JoyImage-Edit",
    # image_rotary_emb is a tuple (image positions, text positions); text is replicated.
    plan=_joyimage_plan(Entries((POSITIONS, None))),
    blocks=JOYIMAGE_BLOCKS,
)

JOYIMAGE_PLUS = Adapter(
    transformer="JoyImageEditPlusTransformer3DModel",
    pipelines="JoyImage-Edit Plus",
    plan=_joyimage_plan(Split(dim=1, like="image")),
    blocks=JOYIMAGE_BLOCKS,
)
