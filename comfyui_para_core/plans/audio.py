"""Plans of ACE-Step and Stable Audio.
Compared with ComfyUI 0.33.0, ``comfy/ldm/ace`` and ``comfy/ldm/audio``.

``COMFYUI=path python -m benchmarks.comfyui.classes --only NAME`` compares them, and ``make test`` runs none
of them; see `plans/__init__.py`, which finds them here.
"""

from __future__ import annotations

from para_core.adapters import Adapter
from para_core.cache.blocks import BlockGroup, CachedBlocks
from para_core.plans.plan import Attention, Entries, Gather, Halo, LinearAttention, Plan, Split

from .recorded import RecordedPlan

AUDIO = Split(dim=1, segment="audio")
TO_TEXT = (Attention(("audio",), ("text",)),)

ACE_STEP = RecordedPlan(
    cls="ace.model.ACEStepTransformer2DModel",
    models="ACE-Step 1",
    arguments=(
        "x",
        "timestep",
        "context",
        "speaker_embeds",
        "lyric_token_idx",
        "lyric_mask",
        "lyrics_strength",
    ),
    adapter=Adapter(
        transformer="ACEStepTransformer2DModel",
        pipelines="ACE-Step in ComfyUI",
        plan=Plan(
            inputs={},
            inner={
                "transformer_blocks.0": {"hidden_states": AUDIO},
                "transformer_blocks.*": {"rotary_freqs_cis": Split(dim=0, like="audio")},
            },
            outputs={"transformer_blocks.-1": Gather(dim=1, segment="audio")},
            joint_order=("audio",),
            # Half of its kernel of 3 tokens (GLUMBConv of ace/attention.py).
            halos={"transformer_blocks.*.ff.depth_conv": Halo(dim=2, segment="audio", size=1)},
            attention={
                # Products of keys and values, summed over all tokens (CustomLiteLAProcessor2_0 of
                # ace/attention.py).
                "transformer_blocks.*.attn": LinearAttention("audio", sums=(("matmul", 0),)),
                "transformer_blocks.*.cross_attn": TO_TEXT,
            },
        ),
        # A generation may differ between its branches in the text alone, or in the lyrics alone.
        blocks=CachedBlocks(
            (BlockGroup(("transformer_blocks",)),), conditions=("context", "lyric_token_idx")
        ),
    ),
)

ACE_STEP15 = RecordedPlan(
    cls="ace.ace_step15.AceStepConditionGenerationModel",
    models="ACE-Step 1.5",
    refused="its attention over a sliding window makes a mask from the tokens that it gets, which on each rank "
    "are only a part.",
)

STABLE_AUDIO = RecordedPlan(
    cls="audio.dit.AudioDiffusionTransformer",
    models="Stable Audio",
    arguments=("x", "timestep", "context", "global_embed"),
    adapter=Adapter(
        transformer="AudioDiffusionTransformer",
        pipelines="Stable Audio in ComfyUI",
        plan=Plan(
            inputs={},
            inner={
                # Unless it has adaLN, the model puts a token of the time step and global_embed in front of the
                # audio, and drops it after the last layer (_forward of audio/dit.py). Between these it counts as
                # audio.
                "transformer.layers.0": {"x": AUDIO},
                # A table with an entry for each token, and its scale.
                "transformer.layers.*": {"rotary_pos_emb": Entries((Split(dim=0, like="audio"), None))},
            },
            outputs={"transformer.layers.-1": Gather(dim=1, segment="audio")},
            joint_order=("audio",),
            attention={"transformer.layers.*.cross_attn": TO_TEXT},
        ),
        # The context has the text and the seconds, which global_embed repeats.
        blocks=CachedBlocks(
            (BlockGroup(("transformer.layers",), streams=("x",), measured="x"),), conditions=("context",)
        ),
    ),
)
