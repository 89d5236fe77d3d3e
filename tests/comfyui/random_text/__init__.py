"""A node of ComfyUI in place of a text encoder: random conditioning of Wan, the same for the same text."""

import zlib

import torch


class RandomText:
    """Node that turns a text into random tokens."""

    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "encode"
    CATEGORY = "tests"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"text": ("STRING", {"default": ""})}}

    def encode(self, text):
        generator = torch.Generator().manual_seed(zlib.crc32(text.encode()))
        return ([[torch.randn(1, 32, 4096, generator=generator), {}]],)


NODE_CLASS_MAPPINGS = {"TestRandomText": RandomText}
