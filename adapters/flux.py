"""FLUX.1: text-to-image, img2img, inpaint, fill, control, kontext, ControlNet. Read against diffusers 0.42."""

from para_core.adapters.adapter import Adapter
from para_core.plan import Gather, Plan, Split

IMAGE, TEXT = Split(dim=1, segment="image"), Split(dim=1, segment="text")
_IP_ADAPTER = "an IP-Adapter attends to image tokens that every rank holds, which plans cannot say yet"

FLUX = Adapter(
    transformer="FluxTransformer2DModel",
    pipelines="FLUX.1: every pipeline on FluxTransformer2DModel",
    plan=Plan(
        inputs={
            "hidden_states": IMAGE,
            "encoder_hidden_states": TEXT,
            # [S, 3], or [B, S, 3] from older pipelines: counting from the end fits both.
            "img_ids": Split(dim=-2, segment="image"),
            "txt_ids": Split(dim=-2, segment="text"),
            # Lists of [B, S, C], added to the image tokens between blocks.
            "controlnet_block_samples": IMAGE,
            "controlnet_single_block_samples": IMAGE,
        },
        # Of the model, not of its last module proj_out: a LoRA may put another module in that one's place.
        outputs={"": Gather(dim=1, segment="image")},
        joint_order=("text", "image"),
    ),
    refused={"ip_adapter_image_embeds": _IP_ADAPTER, "ip_hidden_states": _IP_ADAPTER},
)
