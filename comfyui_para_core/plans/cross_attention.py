"""Plans of models whose blocks attend to the image, and then to the text. Compared with ComfyUI 0.33.0.

``COMFYUI=path python -m benchmarks.comfyui.classes --only NAME`` compares them, and ``make test`` runs none
of them; see `plans/__init__.py`, which finds them here.
"""

from __future__ import annotations

from para_core.adapters import Adapter
from para_core.cache.blocks import BlockGroup, CachedBlocks
from para_core.plans.plan import Attention, Gather, Plan, Split

from .recorded import RecordedPlan

IMAGE = Split(dim=1, segment="image")
TO_TEXT = (Attention(("image",), ("text",)),)

KANDINSKY5 = RecordedPlan(
    cls="kandinsky5.model.Kandinsky5",
    models="Kandinsky 5",
    arguments=("x", "timestep", "context", "y", "time_dim_replace", "attention_mask"),
    adapter=Adapter(
        transformer="Kandinsky5",
        pipelines="Kandinsky 5 in ComfyUI",
        plan=Plan(
            inputs={},
            inner={
                "visual_transformer_blocks.0": {"visual_embed": IMAGE},
                "visual_transformer_blocks.*": {"freqs": Split(dim=1, like="image")},
            },
            outputs={"visual_transformer_blocks.-1": Gather(dim=1, segment="image")},
            joint_order=("image",),
            attention={"visual_transformer_blocks.*.cross_attention": TO_TEXT},
        ),
        blocks=CachedBlocks(
            (BlockGroup(("visual_transformer_blocks",), ("visual_embed",), measured="visual_embed"),),
            conditions=("context",),
        ),
    ),
)

PIXART = RecordedPlan(
    cls="pixart.pixartms.PixArtMS",
    models="PixArt",
    arguments=("x", "timesteps", "context", "c_size", "c_ar"),
    adapter=Adapter(
        transformer="PixArtMS",
        pipelines="PixArt in ComfyUI",
        plan=Plan(
            inputs={},
            inner={"blocks.0": {"x": IMAGE}},
            outputs={"final_layer": Gather(dim=1, segment="image")},
            joint_order=("image",),
            attention={"blocks.*.cross_attn": TO_TEXT},
        ),
        blocks=CachedBlocks((BlockGroup(("blocks",), ("x",), measured="x"),), conditions=("context",)),
    ),
)

HUNYUAN_DIT = RecordedPlan(
    cls="hydit.models.HunYuanDiT",
    models="Hunyuan-DiT",
    arguments=(
        *("x", "t", "context", "text_embedding_mask", "encoder_hidden_states_t5", "text_embedding_mask_t5"),
        "image_meta_size",
    ),
    adapter=Adapter(
        transformer="HunYuanDiT",
        pipelines="Hunyuan-DiT in ComfyUI",
        plan=Plan(
            inputs={},
            inner={"blocks.0": {"x": IMAGE}, "blocks.*": {"freq_cis_img": Split(dim=0, like="image")}},
            outputs={"final_layer": Gather(dim=1, segment="image")},
            joint_order=("image",),
            attention={"blocks.*.attn2": TO_TEXT},
        ),
        # The model adds outputs of earlier blocks to the inputs of later ones, so no block may be skipped.
    ),
)
