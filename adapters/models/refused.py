"""Transformers of diffusers that cannot run on several ranks, each with the reason. Read against diffusers 0.42."""

from collections.abc import Mapping

_LINEAR = "its linear attention is no scaled_dot_product_attention, and convolutions mix neighbouring tokens between"
_FLEX = "it attends through flex attention, by a mask of blocks of the whole video"
_PART = "it is a part of a UNet, which would have to shard rows of an image, not tokens"

REFUSED: Mapping[str, str] = {
    "AnyFlowFARTransformer3DModel": _FLEX,
    "BriaFibo2Transformer2DModel": "nobody wrote one yet; docs/new_model.md says how",
    "DreamLiteTransformer2DModel": _PART,
    "Kandinsky6SRTransformer3DModel": _FLEX,
    "LatteTransformer3DModel": "its temporal blocks take a time step for each token of each sample in one dim, which no plan shards",
    "LuminaNextDiT2DModel": "its processor scales attention by the number of tokens that it is given, which would be those of one rank",
    "MiniMaxMusic3RVQDepthDecoder": "it decodes one step's 8 codebooks: there is no sequence to share",
    "MotifVideoTransformer3DModel": "its last blocks join video to video, and how many they are is said by the config, not by a plan",
    "PriorTransformer": "it attends to some 80 tokens of text and one embedding: there is no sequence to share",
    "QwenImage21Transformer2DModel": "its processor attends to one segment after the other, by their places in the whole sequence",
    "RFD4ProteinaTransformer": "it keeps a value for each pair of tokens, and updates them from all others",
    "SanaTransformer2DModel": _LINEAR,
    "SanaVideoTransformer3DModel": _LINEAR,
    "SanaWMLTX2RefinerTransformer3DModel": "it keeps keys of chunks that were generated before, by their places in the whole sequence",
    "SanaWMTransformer3DModel": _LINEAR,
    "T5FilmDecoder": "its only pipeline, SpectrogramDiffusion, is deprecated and has no component named transformer",
    "Transformer2DModel": _PART,
    "TransformerTemporalModel": _PART,
    "WanAnimate2Transformer3DModel": _FLEX,
}
