"""Adapters of CogVideoX 1.0 and 1.5 (text-, image- and video-to-video) and ConsisID. Written for diffusers 0.42."""

from dataclasses import replace

from para_core.adapters.adapter import Adapter
from para_core.adapters.models.shared.constructors import TEXT_LAST, chained, linears, samples_in_dim_0
from para_core.plans.plan import Gather, Plan, Replicate, Split
from para_core.weights.patch_plan import Frames
from para_core.weights.tensor_plan import TensorPlan

WITH_SAMPLES = ("timestep_cond", "attention_kwargs")

COGVIDEOX_PLAN = Plan(
    inputs={
        "encoder_hidden_states": Replicate(dim=1, segment="text"),
        # The pipeline passes a tuple (cos, sin) of tensors [S, D] for the video tokens.
        "image_rotary_emb": Split(dim=0, like="video"),
    },
    # The video is split after the position embedding, which the model adds to text and video tokens together.
    inner={"patch_embed": {0: Split(dim=1, segment="video", after="text")}},
    outputs={"proj_out": Gather(dim=1, segment="video")},
    joint_order=("text", "video"),
    batched=samples_in_dim_0(*WITH_SAMPLES, "ofs"),
    common=("image_rotary_emb",),
)

COGVIDEOX_TENSOR = TensorPlan(
    linears=linears(
        "transformer_blocks.*",
        columns=["attn1.to_q", "attn1.to_k", "attn1.to_v", "ff.net.0.proj"],
        rows=["attn1.to_out.0", "ff.net.2"],
    ),
    heads=("transformer_blocks.*.attn1",),
)

COGVIDEOX = Adapter(
    transformer="CogVideoXTransformer3DModel",
    pipelines="CogVideoX",
    plan=COGVIDEOX_PLAN,
    blocks=chained("transformer_blocks", streams=TEXT_LAST),
    tensor=COGVIDEOX_TENSOR,
    frames=Frames(dim=1, together="patch_size_t"),
    threshold=0.025,
    threshold_source="ParaAttention at 1324733, later dropped there",
)

CONSISID = Adapter(
    transformer="ConsisIDTransformer3DModel",
    pipelines="ConsisID",
    # Between blocks the video tokens also attend to face tokens, and every rank holds all face tokens.
    plan=replace(COGVIDEOX_PLAN, batched=samples_in_dim_0(*WITH_SAMPLES, "id_cond", "id_vit_hidden")),
    blocks=chained("transformer_blocks", streams=TEXT_LAST, between=("id_cond",)),
    tensor=COGVIDEOX_TENSOR,
)
