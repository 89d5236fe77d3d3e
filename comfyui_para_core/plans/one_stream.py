"""Plans of models whose blocks take text and image tokens as one tensor. Compared with ComfyUI 0.33.0.

``COMFYUI=path python -m benchmarks.comfyui.classes --only NAME`` compares them, and ``make test`` runs none
of them; see `plans/__init__.py`, which finds them here.

Models that take two tensors are in `joint_attention`.
"""

from __future__ import annotations

from para_core.adapters import Adapter
from para_core.cache.blocks import BlockGroup, CachedBlocks
from para_core.plans.plan import FirstTokens, Gather, Plan, Split

from .recorded import RecordedPlan

LUMINA = RecordedPlan(
    cls="lumina.model.NextDiT",
    models="Lumina 2 and Z-Image",
    # The model does not use its attention mask.
    arguments=("x", "timesteps", "context", "num_tokens", "attention_mask"),
    adapter=Adapter(
        transformer="NextDiT",
        pipelines="Lumina 2 and Z-Image in ComfyUI",
        plan=Plan(
            inputs={},
            # The blocks before these, which refine text and image apart from each other, run on every rank.
            inner={
                "layers.0": {"x": Split(dim=1, segment="tokens")},
                "layers.*": {"freqs_cis": Split(dim=1, like="tokens")},
            },
            outputs={"layers.-1": Gather(dim=1, segment="tokens")},
            joint_order=("tokens",),
        ),
        blocks=CachedBlocks((BlockGroup(("layers",), ("x",), measured="x"),), conditions=("context",)),
    ),
)

OMNIGEN2 = RecordedPlan(
    cls="omnigen.omnigen2.OmniGen2Transformer2DModel",
    models="OmniGen 2",
    arguments=("x", "timesteps", "context", "num_tokens", "attention_mask", "ref_latents"),
    adapter=Adapter(
        transformer="OmniGen2Transformer2DModel",
        pipelines="OmniGen 2 in ComfyUI",
        plan=Plan(
            inputs={},
            inner={
                "layers.0": {"hidden_states": Split(dim=1, segment="tokens")},
                "layers.*": {"image_rotary_emb": Split(dim=1, like="tokens")},
            },
            outputs={"layers.-1": Gather(dim=1, segment="tokens")},
            joint_order=("tokens",),
        ),
        blocks=CachedBlocks((BlockGroup(("layers",)),), conditions=("context",)),
    ),
)

KREA2 = RecordedPlan(
    cls="krea2.model.SingleStreamDiT",
    models="Krea 2",
    arguments=("x", "timesteps", "context", "attention_mask", "ref_latents", "ref_latents_method"),
    adapter=Adapter(
        transformer="SingleStreamDiT",
        pipelines="Krea 2 in ComfyUI",
        plan=Plan(
            inputs={},
            inner={
                "blocks.0": {"x": Split(dim=1, segment="tokens")},
                "blocks.*": {
                    "freqs": Split(dim=2, like="tokens"),
                    # The number of tokens before those of reference images, which have the timestep 0.
                    "timestep_zero_index": FirstTokens("tokens"),
                },
            },
            outputs={"last": Gather(dim=1, segment="tokens")},
            joint_order=("tokens",),
        ),
        blocks=CachedBlocks((BlockGroup(("blocks",), ("x",), measured="x"),), conditions=("context",)),
    ),
)

ERNIE_IMAGE = RecordedPlan(
    cls="ernie.model.ErnieImageModel",
    models="ERNIE-Image",
    arguments=("x", "timesteps", "context"),
    adapter=Adapter(
        transformer="ErnieImageModel",
        pipelines="ERNIE-Image in ComfyUI",
        plan=Plan(
            inputs={},
            inner={
                "layers.0": {"x": Split(dim=1, segment="tokens")},
                "layers.*": {"rotary_pos_emb": Split(dim=1, like="tokens")},
            },
            outputs={"final_linear": Gather(dim=1, segment="tokens")},
            joint_order=("tokens",),
        ),
        blocks=CachedBlocks((BlockGroup(("layers",), ("x",), measured="x"),), conditions=("context",)),
    ),
)

BOOGU = RecordedPlan(
    cls="boogu.model.BooguTransformer2DModel",
    models="Boogu",
    arguments=("x", "timesteps", "context", "num_tokens", "attention_mask", "ref_latents"),
    adapter=Adapter(
        transformer="BooguTransformer2DModel",
        pipelines="Boogu in ComfyUI",
        plan=Plan(
            inputs={},
            # The blocks with two streams run on every rank.
            inner={
                "single_stream_layers.0": {"hidden_states": Split(dim=1, segment="tokens")},
                "single_stream_layers.*": {"image_rotary_emb": Split(dim=1, like="tokens")},
            },
            outputs={"single_stream_layers.-1": Gather(dim=1, segment="tokens")},
            joint_order=("tokens",),
        ),
        blocks=CachedBlocks((BlockGroup(("single_stream_layers",)),), conditions=("context",)),
    ),
)
