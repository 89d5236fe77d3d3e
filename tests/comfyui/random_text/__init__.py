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


class Patched:
    """Node that changes a model as other packs of nodes do, by the name of the change."""

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    CATEGORY = "tests"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",), "how": ("STRING", {"default": ""})}}

    def patch(self, model, how):
        model = model.clone()
        options = model.model_options["transformer_options"]
        if how == "wrapper":

            def wrapper(executor, *args, **kwargs):
                return 1.5 * executor(*args, **kwargs)

            model.add_wrapper_with_key("diffusion_model", "tests", wrapper)
        elif how == "patches_replace":
            model.set_model_patch_replace(lambda args, extra: extra["original_block"](args), "dit", "double_block", 0)
        elif how == "patches":
            model.set_model_patch(lambda args: args, "double_block")
        elif how == "attention":
            options["optimized_attention_override"] = lambda attention, *args, **kwargs: attention(*args, **kwargs)
        elif how == "unknown":
            options["a_key_of_another_pack"] = True
        elif how == "object":
            model.add_object_patch("diffusion_model.head", model.model.diffusion_model.head)
        elif how == "weights":
            model.add_weight_wrapper("diffusion_model.head.head.weight", lambda weight: weight)
        elif how == "kind":
            model.add_wrapper_with_key("a_kind_of_another_pack", "tests", lambda executor, *args: executor(*args))
        elif how == "dtype":
            model.set_model_compute_dtype(torch.bfloat16)
        elif how == "injection":
            from comfy.patcher_extension import PatcherInjection

            model.set_injections("tests", [PatcherInjection(lambda patcher: None, lambda patcher: None)])
        else:
            raise ValueError(how)
        return (model,)


NODE_CLASS_MAPPINGS = {"TestRandomText": RandomText, "TestPatched": Patched}
