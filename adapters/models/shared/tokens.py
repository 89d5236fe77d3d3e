"""Rules for tokens that many model families share: how they are split, gathered, and attend to each other."""

from para_core.plans.plan import Attention, Gather, Split

IMAGE, ALL_IMAGE = Split(dim=1, segment="image"), Gather(dim=1, segment="image")
VIDEO, ALL_VIDEO = Split(dim=1, segment="video"), Gather(dim=1, segment="video")
# Positions with a row per token.
POSITIONS, VIDEO_POSITIONS = Split(dim=0, like="image"), Split(dim=0, like="video")
# Text and image tokens in one sequence.
TOKENS, ALL_TOKENS = Split(dim=1, segment="tokens"), Gather(dim=1, segment="tokens")
WITH_TOKENS = Split(dim=1, like="tokens")

# Order of the segments of a joint attention.
TEXT_THEN_IMAGE, IMAGE_THEN_TEXT = ("text", "image"), ("image", "text")
# A cross-attention, whose keys are replicated text tokens.
IMAGE_TO_TEXT = (Attention(("image",), ("text",)),)
VIDEO_TO_TEXT = (Attention(("video",), ("text",)),)
