"""Adapter of Z-Image, which has text and image tokens in one sequence. Written for diffusers 0.42."""

from para_core.adapters.adapter import Adapter
from para_core.adapters.models.shared.constructors import chained, linears
from para_core.adapters.models.shared.tokens import ALL_TOKENS, TOKENS, WITH_TOKENS
from para_core.plans.plan import Plan
from para_core.weights.tensor_plan import TensorPlan

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
        outputs={"all_final_layer.*": ALL_TOKENS},
        joint_order=("tokens",),
        batched={"x": None, "t": 0, "cap_feats": None, "siglip_feats": None, "image_noise_mask": None},
        common=("joint_attention_kwargs",),
        # The residuals are padded to the longest sample of all, so they do not fit a part of the batch.
        unshared=("controlnet_block_samples",),
    ),
    blocks=chained(
        "layers",
        streams=("x",),
        measured="x",
        between=("controlnet_block_samples",),
        conditions=("cap_feats",),
    ),
    tensor=Z_IMAGE_TENSOR,
)
