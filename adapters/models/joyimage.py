"""Adapters of JoyImage-Edit and JoyImage-Edit Plus (image editing). Written for diffusers 0.42."""

from para_core.adapters.adapter import Adapter
from para_core.adapters.models.constructors import TEXT_LAST, chained
from para_core.plans.plan import Entries, Gather, Plan, ShardRule, Split

BLOCKS = chained("double_blocks", streams=TEXT_LAST)


def _plan(positions: ShardRule) -> Plan:
    return Plan(
        inputs={},
        inner={
            "double_blocks.0": {"hidden_states": Split(dim=1, segment="image")},
            "double_blocks.*": {"image_rotary_emb": positions},
        },
        outputs={"proj_out": Gather(dim=1, segment="image")},
        joint_order=("image", "text"),
    )


JOYIMAGE = Adapter(
    transformer="JoyImageEditTransformer3DModel",
    pipelines="JoyImage-Edit",
    # image_rotary_emb is a tuple (image positions, text positions); text is replicated.
    plan=_plan(Entries((Split(dim=0, like="image"), None))),
    blocks=BLOCKS,
)

JOYIMAGE_PLUS = Adapter(
    transformer="JoyImageEditPlusTransformer3DModel",
    pipelines="JoyImage-Edit Plus",
    plan=_plan(Split(dim=1, like="image")),
    blocks=BLOCKS,
)
