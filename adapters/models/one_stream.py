"""Adapters of models with text and image tokens in one sequence: Z-Image, Bria FIBO 2, Krea 2, ERNIE-Image and others.

The others are Ideogram 4, OmniGen, Lumina-Image 2.0 and MiniMax-H3 (video). Written for diffusers 0.42.
"""

from para_core.adapters.adapter import Adapter
from para_core.adapters.models.constructors import chained, linears
from para_core.cache.blocks import BlockGroup, CachedBlocks
from para_core.plans.plan import Attention, Gather, Plan, Split
from para_core.weights.tensor_plan import TensorPlan

TOKENS, WITH_TOKENS = Split(dim=1, segment="tokens"), Split(dim=1, like="tokens")
GATHERED = Gather(dim=1, segment="tokens")
# Gather right after the blocks, because the models then select image tokens by their positions in the full sequence.
AFTER_LAYERS = {"layers.-1": GATHERED}

_Z_BLOCKS = ("noise_refiner.*", "context_refiner.*", "layers.*")
Z_IMAGE_TENSOR = TensorPlan(
    linears=linears(
        *_Z_BLOCKS,
        columns=["attention.to_q", "attention.to_k", "attention.to_v", "feed_forward.w1", "feed_forward.w3"],
        rows=["attention.to_out.0", "feed_forward.w2"],
    ),
    heads=tuple(f"{block}.attention" for block in _Z_BLOCKS),
)

Z_IMAGE = Adapter(
    transformer="ZImageTransformer2DModel",
    pipelines="Z-Image",
    plan=Plan(
        # ControlNet residuals: the model adds one of these tensors to the output of each block.
        inputs={"controlnet_block_samples": WITH_TOKENS},
        inner={
            "layers.0": {"x": TOKENS},
            # noise_mask marks the noisy tokens. The model makes this mask only if the call has input images.
            "layers.*": {"freqs_cis": WITH_TOKENS, "noise_mask": WITH_TOKENS},
            "all_final_layer.*": {"noise_mask": WITH_TOKENS},
        },
        outputs={"all_final_layer.*": GATHERED},
        joint_order=("tokens",),
        batched={"x": None, "t": 0, "cap_feats": None, "siglip_feats": None, "image_noise_mask": None},
        common=("joint_attention_kwargs",),
        # The residuals are padded to the longest sample of the full batch, so they do not fit a part of the batch.
        unshared=("controlnet_block_samples",),
    ),
    blocks=chained(
        "layers", streams=("x",), measured="x", between=("controlnet_block_samples",), conditions=("cap_feats",)
    ),
    tensor=Z_IMAGE_TENSOR,
)

BRIA_FIBO2 = Adapter(
    transformer="BriaFibo2Transformer2DModel",
    pipelines="Bria FIBO 2",
    plan=Plan(
        inputs={},
        inner={
            "layers.0": {"x": TOKENS},
            # The model makes attn_mask only if the prompts of the batch have different lengths.
            "layers.*": {"freqs_cis": WITH_TOKENS, "noise_mask": WITH_TOKENS, "attn_mask": WITH_TOKENS},
        },
        outputs=AFTER_LAYERS,
        joint_order=("tokens",),
        attention={
            "layers.*.attention": (Attention(("tokens",), mask="keys"),),
            "layers.*.cross_attention": (Attention(("tokens",), ("text",)),),
        },
    ),
    # Some blocks also get text. chained=True would require the same arguments for all blocks.
    blocks=CachedBlocks(
        (BlockGroup(("layers",), ("x",), measured="x"),), conditions=("encoder_hidden_states", "encoder_attention_mask")
    ),
)

KREA2 = Adapter(
    transformer="Krea2Transformer2DModel",
    pipelines="Krea 2",
    plan=Plan(
        inputs={},
        inner={
            "transformer_blocks.0": {"hidden_states": TOKENS},
            "transformer_blocks.*": {"image_rotary_emb": Split(dim=0, like="tokens")},
        },
        outputs={"transformer_blocks.-1": GATHERED},
        joint_order=("tokens",),
    ),
    blocks=chained("transformer_blocks"),
)

ERNIE_IMAGE = Adapter(
    transformer="ErnieImageTransformer2DModel",
    pipelines="ERNIE-Image",
    plan=Plan(
        inputs={},
        # The tensors are [S, B, C]. The modulation temb has one entry per token.
        inner={
            "layers.0": {"x": Split(dim=0, segment="tokens")},
            "layers.*": {"rotary_pos_emb": WITH_TOKENS, "temb": Split(dim=0, like="tokens")},
        },
        outputs={"layers.-1": Gather(dim=0, segment="tokens")},
        joint_order=("tokens",),
        batched=dict.fromkeys(("hidden_states", "timestep", "text_bth", "text_lens"), 0),
    ),
    blocks=chained("layers", streams=("x",), measured="x", samples=1, conditions=("text_bth",)),
)

IDEOGRAM4 = Adapter(
    transformer="Ideogram4Transformer2DModel",
    pipelines="Ideogram 4",
    plan=Plan(
        inputs={},
        inner={
            "layers.0": {"hidden_states": TOKENS},
            # adaln_input has one modulation per sample (size 1 along dim 1, so it stays replicated) or one per token.
            "layers.*": {"image_rotary_emb": WITH_TOKENS, "adaln_input": WITH_TOKENS},
        },
        outputs=AFTER_LAYERS,
        joint_order=("tokens",),
    ),
    blocks=chained("layers"),
)

OMNIGEN = Adapter(
    transformer="OmniGenTransformer2DModel",
    pipelines="OmniGen",
    plan=Plan(
        inputs={},
        inner={
            "layers.0": {"hidden_states": TOKENS},
            "layers.*": {"image_rotary_emb": Split(dim=0, like="tokens")},
        },
        outputs=AFTER_LAYERS,
        joint_order=("tokens",),
    ),
    blocks=chained("layers", conditions=("input_ids", "attention_mask")),
)

LUMINA2 = Adapter(
    transformer="Lumina2Transformer2DModel",
    pipelines="Lumina-Image 2.0",
    plan=Plan(
        inputs={},
        inner={
            # After separate refiner blocks each sample is one sequence: valid text tokens, image tokens, padding.
            "layers.0": {"hidden_states": TOKENS},
            "layers.*": {"image_rotary_emb": WITH_TOKENS},
        },
        outputs=AFTER_LAYERS,
        joint_order=("tokens",),
    ),
    blocks=chained("layers"),
)

# This model is sharded by the plan that diffusers publishes.
MINIMAX_H3 = Adapter(
    transformer="MiniMaxH3Transformer3DModel",
    pipelines="MiniMax-H3",
    # The blocks take video, sound and text tokens as one tensor, so the cache compares and stores only that tensor.
    blocks=chained("transformer_blocks"),
)
