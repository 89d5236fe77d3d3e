"""Adapters of Sana (text-to-image, Sprint, ControlNet) and SanaVideo. Written for diffusers 0.42.

Their self-attention is linear, and their feed-forward layers convolve over tokens. So whole rows (SanaVideo:
frames) of the latents are split, and each rank also gets the rows (frames) next to its own. A new version of
diffusers must be compared in ``SanaLinearAttnProcessor2_0``, ``SanaLinearAttnProcessor3_0`` (the order of their
sums), ``GLUMBConv`` and ``GLUMBTempConv`` (their convolutions). Tests: tests/adapters/test_transformers.py
(``-k sana``).
"""

from dataclasses import replace

from torch import nn

from para_core.adapters.adapter import Adapter
from para_core.adapters.models.shared.constructors import chained, samples_in_dim_0
from para_core.plans.plan import Attention, Gather, Halo, LinearAttention, Plan, Split

BATCHED = samples_in_dim_0(
    "guidance", "encoder_attention_mask", "attention_mask", "attention_kwargs", "controlnet_block_samples"
)
BLOCKS = chained("transformer_blocks", between=("controlnet_block_samples",))
# Tensors of tokens have all tokens of a row (frame) in dim 1. How many these are depends on the image, so they are
# inferred from the size of the tensor, here and wherever ``per`` is None.
TOKENS_OF_ROWS, TOKENS_OF_FRAMES = Split(1, like="rows", per=None), Split(1, like="frames", per=None)


def _with_patch_size(plan: Plan, module: nn.Module) -> Plan:
    """Return ``plan`` with ``per``, the number of latent rows (or frames) per token, set to the model's patch size.

    So an entry of the segment is a row (frame) of tokens.
    """
    size: int | list[int] = module.config.patch_size  # type: ignore[assignment,union-attr]
    split: Split = plan.inputs["hidden_states"]  # type: ignore[assignment]
    return replace(
        plan,
        inputs={
            **plan.inputs,
            "hidden_states": replace(split, per=size if isinstance(size, int) else size[0]),
        },
    )


SANA = Adapter(
    transformer="SanaTransformer2DModel",
    pipelines="Sana",
    plan=Plan(
        # Split by whole rows of tokens, because the feed-forward layers convolve over neighbouring tokens.
        inputs={
            "hidden_states": Split(dim=2, segment="rows"),
            "controlnet_block_samples": TOKENS_OF_ROWS,
        },
        # With an interpolation_scale, patch_embed adds the positions of the full image, so gather its input and
        # split its output. Models without one gather too: latents have few channels, and one plan is for all.
        inner={"patch_embed": {"latent": Gather(2, "rows", per=None), 0: TOKENS_OF_ROWS}},
        # Half of its kernel of 3 rows.
        halos={"transformer_blocks.*.ff.conv_depth": Halo(dim=2, segment="rows", size=1)},
        outputs={"": Gather(dim=2, segment="rows", per=None)},
        joint_order=("rows",),
        attention={
            # The first matmul makes the state, and a row of ones in the values makes the normalizer a part of
            # it.
            "transformer_blocks.*.attn1": LinearAttention("rows", sums=(("matmul", 0),)),
            "transformer_blocks.*.attn2": (Attention(("rows",), ("text",)),),
        },
        batched=BATCHED,
    ),
    complete=_with_patch_size,
    blocks=BLOCKS,
)

SANA_VIDEO = Adapter(
    transformer="SanaVideoTransformer3DModel",
    pipelines="SanaVideo",
    plan=Plan(
        inputs={
            "hidden_states": Split(dim=2, segment="frames"),
            # The time step is [B], or [B, 1, F, H, W] if the user gives an image. Only the latter is split. It has one
            # entry for each token, whatever the patch size: the model flattens it, and adds it to the tokens.
            "timestep": Split(dim=2, like="frames", ndim=5),
            "controlnet_block_samples": TOKENS_OF_FRAMES,
        },
        inner={
            "rope": {
                "hidden_states": Gather(2, "frames", per=None),
                0: TOKENS_OF_FRAMES,
                1: TOKENS_OF_FRAMES,
            }
        },
        # Half of its kernel of 3 frames. conv_depth stays within a frame.
        halos={"transformer_blocks.*.ff.conv_temp": Halo(dim=2, segment="frames", size=1)},
        outputs={"": Gather(dim=2, segment="frames", per=None)},
        joint_order=("frames",),
        attention={
            # This linear attention sums two tensors over tokens: the normalizer in its first call of ``sum``,
            # and the state in its second call of ``matmul``.
            "transformer_blocks.*.attn1": LinearAttention("frames", sums=(("sum", 0), ("matmul", 1))),
            "transformer_blocks.*.attn2": (Attention(("frames",), ("text",)),),
        },
        batched=BATCHED,
    ),
    complete=_with_patch_size,
    blocks=BLOCKS,
)
