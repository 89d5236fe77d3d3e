"""Transformers of diffusers that cannot run on several ranks, and the reason for each.
Written for diffusers 0.42.
"""

from collections.abc import Mapping

_PART = "it is a part of a UNet, which would have to shard rows of an image, not tokens"

REFUSED: Mapping[str, str] = {
    "DreamLiteTransformer2DModel": _PART,
    "LuminaNextDiT2DModel": "its processor scales attention by the number of tokens in its input, which would be that "
    "of one rank",
    "MiniMaxMusic3RVQDepthDecoder": "it decodes one step's 8 codebooks: there is no sequence to shard",
    "PriorTransformer": "it attends to about 80 tokens of text and one embedding: there is no sequence to shard",
    "RFD4ProteinaTransformer": "it keeps a value for each pair of tokens, and updates it from all others",
    "SanaWMLTX2RefinerTransformer3DModel": "it caches keys of chunks that were generated before, by their positions "
    "in the full sequence",
    "SanaWMTransformer3DModel": "most of its blocks compute a recurrence over frames, and convolve over neighbouring "
    "tokens",
    "T5FilmDecoder": "its only pipeline, SpectrogramDiffusion, is deprecated and has no component named transformer",
    "Transformer2DModel": _PART,
    "TransformerTemporalModel": _PART,
}
