"""Adapters of models like FLUX.1: Chroma, Ovis-Image, LongCat-Image, Bria 3.2 and FIBO. Written for diffusers 0.42.

The pipelines of Bria 3.2 and FIBO guide by one call of twice the samples, so only their plans say which
arguments hold samples (``batched``, ``common``). The others make one call for each branch.

tests/adapters/test_transformers.py runs every adapter of this folder on a tiny model.
"""

from dataclasses import replace

from para_core.adapters.adapter import Adapter
from para_core.adapters.models.shared.constructors import (
    JOINT_PROJECTIONS,
    TEXT_FIRST,
    chained,
    linears,
    samples_in_dim_0,
)
from para_core.adapters.models.shared.flux import FLUX_PLAN
from para_core.cache.blocks import BlockGroup, CachedBlocks
from para_core.plans.plan import Split
from para_core.weights.tensor_plan import COLUMNS, Linear, TensorPlan


def _joint_tensor_plan(gated: bool = False) -> TensorPlan:
    """Return a tensor plan like the one that diffusers publishes for FLUX.1.

    If ``gated``, the first layer of each feed-forward returns hidden units and a gate (as in SwiGLU).
    """
    double, single = "transformer_blocks.*", "single_transformer_blocks.*"
    heads = [f"attn.{name}" for name in JOINT_PROJECTIONS]
    hidden = COLUMNS
    counts: dict[str, str] = {}
    if gated:
        # The hidden units and the gate are two parts of equal width, and each is sharded by itself.
        hidden = Linear("colwise", (1, 1))
        # The model splits the output of proj_mlp at this number.
        counts = {single: "mlp_hidden_dim"}
    return TensorPlan(
        linears={
            **linears(
                double,
                columns=heads,
                rows=["attn.to_out.0", "attn.to_add_out", "ff.net.2", "ff_context.net.2"],
            ),
            **dict.fromkeys((f"{double}.{name}.net.0.proj" for name in ("ff", "ff_context")), hidden),
            **linears(single, columns=heads),
            f"{single}.proj_mlp": hidden,
            # proj_out reads attention output, as wide as its own output, then hidden units. Each part is
            # sharded separately.
            f"{single}.proj_out": Linear("rowwise", parts_from="out_features"),
        },
        heads=(f"{double}.attn", f"{single}.attn"),
        counts=counts,
    )


CHROMA = Adapter(
    transformer="ChromaTransformer2DModel",
    pipelines="Chroma",
    # Every rank makes the full attention mask, of all pairs of tokens, so the plan does not split it.
    plan=FLUX_PLAN,
    # Each block gets a different modulation. chained=True would require the same arguments for all blocks.
    blocks=CachedBlocks(
        (BlockGroup(("transformer_blocks",), TEXT_FIRST), BlockGroup(("single_transformer_blocks",))),
        # The model adds these residuals to a block's output in place, over tensors that the cache has stored.
        uncached=("controlnet_single_block_samples",),
    ),
    tensor=_joint_tensor_plan(),
)

BOTH_LISTS = chained("transformer_blocks", "single_transformer_blocks", streams=TEXT_FIRST)

OVIS = Adapter(
    transformer="OvisImageTransformer2DModel",
    pipelines="Ovis-Image",
    plan=FLUX_PLAN,
    blocks=BOTH_LISTS,
    tensor=_joint_tensor_plan(gated=True),
)
LONGCAT_IMAGE = Adapter(
    transformer="LongCatImageTransformer2DModel",
    pipelines="LongCat-Image",
    plan=FLUX_PLAN,
    blocks=BOTH_LISTS,
    tensor=_joint_tensor_plan(),
)

BRIA = Adapter(
    transformer="BriaTransformer2DModel",
    pipelines="Bria",
    plan=replace(
        FLUX_PLAN,
        batched=samples_in_dim_0(
            "pooled_projections",
            "guidance",
            "attention_kwargs",
            "controlnet_block_samples",
            "controlnet_single_block_samples",
        ),
        common=("img_ids", "txt_ids"),
        # diffusers adds these residuals to hidden_states[:, number of text tokens:], although hidden_states
        # holds only image tokens here, so the call fails on one device too.
        refused={"controlnet_single_block_samples": "the model itself fails with them"},
    ),
    blocks=chained(
        "transformer_blocks",
        "single_transformer_blocks",
        streams=TEXT_FIRST,
        between=("controlnet_block_samples",),
    ),
    tensor=_joint_tensor_plan(),
)

BRIA_FIBO = Adapter(
    transformer="BriaFiboTransformer2DModel",
    pipelines="Bria FIBO",
    plan=replace(
        FLUX_PLAN,
        # One tensor [B, S, C] per block, which replaces half of the channels of the text tokens.
        inputs={**FLUX_PLAN.inputs, "text_encoder_layers": Split(dim=1, like="text")},
        batched=samples_in_dim_0(
            "pooled_projections", "guidance", "text_encoder_layers", "joint_attention_kwargs"
        ),
        common=("img_ids", "txt_ids"),
    ),
    # Not chained: between two blocks, the model replaces half of the channels of the text tokens.
    blocks=CachedBlocks(
        (BlockGroup(("transformer_blocks",), TEXT_FIRST), BlockGroup(("single_transformer_blocks",)))
    ),
    tensor=_joint_tensor_plan(),
)
