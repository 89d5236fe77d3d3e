"""The plan of FLUX.1, which its relatives share."""

from para_core.plans.plan import Attention, Gather, Plan, Split

IMAGE, TEXT = Split(dim=1, segment="image"), Split(dim=1, segment="text")
JOINT = Attention(("text", "image"))

INPUTS = {
    "hidden_states": IMAGE,
    "encoder_hidden_states": TEXT,
    # Position ids are [S, 3], or [B, S, 3] from older pipelines: dim -2 is right for both.
    "img_ids": Split(dim=-2, like="image"),
    "txt_ids": Split(dim=-2, like="text"),
}
FLUX_PLAN = Plan(
    inputs={
        **INPUTS,
        # ControlNet residuals: lists of [B, S, C], which the model adds to the image tokens between blocks.
        "controlnet_block_samples": Split(dim=1, like="image"),
        "controlnet_single_block_samples": Split(dim=1, like="image"),
    },
    # Gather the output of the model itself and not the output of proj_out, because loading a LoRA may replace
    # proj_out.
    outputs={"": Gather(dim=1, segment="image")},
    joint_order=("text", "image"),
    # After the joint attention, image tokens also attend to the image tokens of each IP-Adapter, which are
    # replicated.
    attention={"transformer_blocks.*.attn": (JOINT, Attention(("image",), ("ip_adapter",)))},
)
