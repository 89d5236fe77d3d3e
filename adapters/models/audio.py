"""Adapters of ACE-Step, Stable Audio 1 and 3, LongCat-AudioDiT and MiniMax-Music 3.
Written for diffusers 0.42.

Only sound is sharded; text that blocks attend to stays whole on every rank. Other tokens at the beginning of
the sequence (time step, memory) are sharded as if they were sound.
The last two have no ``batched``: their pipelines call the transformer once for each branch of guidance.
Tests: tests/adapters/test_transformers.py (``-k "ace-step or audio or minimax-music"``).
"""

from para_core.adapters.adapter import Adapter
from para_core.adapters.models.shared.constructors import chained, samples_in_dim_0
from para_core.cache.blocks import BlockGroup, CachedBlocks
from para_core.plans.plan import Attention, FirstTokens, Gather, Plan, Split

SOUND, POSITIONS = Split(dim=1, segment="sound"), Split(dim=0, like="sound")
GATHERED = Gather(dim=1, segment="sound")
TO_TEXT = (Attention(("sound",), ("text",)),)

ACE_STEP = Adapter(
    transformer="AceStepTransformer1DModel",
    pipelines="ACE-Step",
    plan=Plan(
        inputs={},
        # Masks of sliding-window attention cover all queries and keys, so the plan does not split them.
        inner={"layers.0": {"hidden_states": SOUND}, "layers.*": {"position_embeddings": POSITIONS}},
        outputs={"norm_out": GATHERED},
        joint_order=("sound",),
        attention={"layers.*.cross_attn": TO_TEXT},
        batched=samples_in_dim_0("timestep_r", "context_latents", "attention_kwargs"),
    ),
    # Only every second block gets a mask. chained=True would require the same arguments for all blocks.
    blocks=CachedBlocks((BlockGroup(("layers",)),)),
)

STABLE_AUDIO = Adapter(
    transformer="StableAudioDiTModel",
    pipelines="Stable Audio",
    plan=Plan(
        inputs={},
        inner={
            # The sequence begins with a time-step token, which is sharded as if it were a sound token.
            "transformer_blocks.0": {"hidden_states": SOUND},
            # The processor pads a mask to the number of keys that it gets, this rank's, so it is split.
            "transformer_blocks.*": {
                "rotary_embedding": POSITIONS,
                "attention_mask": Split(dim=1, like="sound"),
            },
        },
        outputs={"proj_out": GATHERED},
        joint_order=("sound",),
        attention={"**.attn1": (Attention(("sound",), mask="keys"),), "**.attn2": TO_TEXT},
        batched=samples_in_dim_0("global_hidden_states", "attention_mask", "encoder_attention_mask"),
        common=("rotary_embedding",),
    ),
    blocks=chained("transformer_blocks"),
)

STABLE_AUDIO3 = Adapter(
    transformer="StableAudio3DiTModel",
    pipelines="Stable Audio 3",
    plan=Plan(
        inputs={},
        inner={
            # The sequence begins with memory tokens, which are sharded as if they were sound tokens.
            "transformer_blocks.0": {"hidden_states": SOUND},
            "transformer_blocks.*": {"rope": POSITIONS, "num_memory_tokens": FirstTokens("sound")},
        },
        outputs={"transformer_blocks.-1": GATHERED},
        joint_order=("sound",),
        attention={"**.cross_attn": TO_TEXT},
        refused={
            "local_add_cond": "it has no entries for the tokens of memory, so its parts are not those of the sequence"
        },
        batched=samples_in_dim_0("global_hidden_states", "encoder_attention_mask"),
    ),
    blocks=chained("transformer_blocks"),
)

LONGCAT_AUDIO = Adapter(
    transformer="LongCatAudioDiTTransformer",
    pipelines="LongCat-AudioDiT",
    plan=Plan(
        inputs={},
        inner={
            "blocks.0": {"hidden_states": SOUND},
            # The mask hides keys, and is multiplied with the output, which has this rank's tokens.
            "blocks.*": {"rope": POSITIONS, "mask": Split(dim=1, like="sound")},
        },
        outputs={"blocks.-1": GATHERED},
        joint_order=("sound",),
        attention={
            "blocks.*.self_attn": (Attention(("sound",), mask="keys"),),
            "blocks.*.cross_attn": TO_TEXT,
        },
    ),
    blocks=chained("blocks"),
)

MINIMAX_MUSIC = Adapter(
    transformer="MiniMaxMusic3Transformer1DModel",
    pipelines="MiniMax-Music 3",
    plan=Plan(
        inputs={},
        inner={
            # The sequence begins with a time-step token, which is sharded as if it were a sound token.
            "transformer_blocks.0": {"hidden_states": SOUND},
            "transformer_blocks.*": {"rotary_emb": POSITIONS},
        },
        outputs={"transformer_blocks.-1": GATHERED},
        joint_order=("sound",),
    ),
    blocks=chained("transformer_blocks"),
)
