"""Steps that a user takes with diffusers alone: build a tiny pipeline, change it (LoRA, dtype, int8 …), call it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.tiny import flux_call, flux_pipe
from tests.together.options import Case
from zoo.tiny.base import fill
from zoo.tiny.pipelines import PIPELINES
from zoo.tiny.pipelines.components import TinyPipeline
from zoo.tiny.pipelines.unet import UNET_PIPELINES

_NEGATIVE = {"negative_prompt": "a blue square"}
_PLAIN = {"guidance_scale": 1.0}


class _Pipeline:
    """A builder of a tiny pipeline, with the arguments of its calls.

    Args:
        plain, guided: arguments without and with classifier-free guidance.
        second: arguments of a second call with another size.
    """

    def __init__(
        self, tiny: TinyPipeline, plain: Mapping[str, Any], guided: Mapping[str, Any], second: Mapping[str, Any]
    ) -> None:
        self.tiny, self.guidance, self.second = tiny, {"plain": plain, "cfg": guided}, second


_FLUX = TinyPipeline(lambda _: flux_pipe(shared_parts=False), "FluxPipeline", {**flux_call(), "generator": None})
_VIDEO = {"height": 64, "width": 48, "num_frames": 9}
_IMAGE = {"height": 64, "width": 48}

_PIPELINES = {
    "flux": _Pipeline(_FLUX, {}, {**_NEGATIVE, "true_cfg_scale": 2.0}, {"height": 48, "width": 80}),
    "klein": _Pipeline(PIPELINES["flux2 klein"], _PLAIN, {}, _IMAGE),
    "wan": _Pipeline(PIPELINES["wan"], _PLAIN, {}, _VIDEO),
    "wan22": _Pipeline(PIPELINES["wan 2.2"], _PLAIN, {}, _VIDEO),
    "ltx": _Pipeline(PIPELINES["ltx"], _PLAIN, {}, {"height": 64, "width": 96, "num_frames": 9}),
    "cogvideox": _Pipeline(PIPELINES["cogvideox"], _PLAIN, {}, _VIDEO),
    "sd3": _Pipeline(PIPELINES["stable diffusion 3"], _PLAIN, {}, {"height": 40, "width": 24}),
    "mochi": _Pipeline(PIPELINES["mochi"], _PLAIN, {}, {"height": 64, "width": 48, "num_frames": 13}),
    "qwen": _Pipeline(PIPELINES["qwen-image"], {"true_cfg_scale": 1.0}, {}, {"height": 64, "width": 96}),
    "hunyuan": _Pipeline(PIPELINES["hunyuan"], {}, {**_NEGATIVE, "true_cfg_scale": 3.0}, _VIDEO),
    "pixart": _Pipeline(PIPELINES["pixart"], _PLAIN, {}, {"height": 40, "width": 24}),
    "unet": _Pipeline(UNET_PIPELINES["sd"], _PLAIN, {}, {"height": 104, "width": 72}),
}

# Two tensor ranks share four heads, and three stages share three blocks. The other sizes follow from these.
_CONFIGS: dict[str, dict[str, int]] = {
    **{name: {"num_layers": 3} for name in ("wan", "wan22", "cogvideox", "mochi", "qwen")},
    **{name: {} for name in ("klein", "hunyuan")},
    "ltx": {"num_layers": 3, "cross_attention_dim": 128},
    "sd3": {"caption_projection_dim": 128},
    "pixart": {"num_layers": 3, "cross_attention_dim": 128},
}

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def build(case: Case, dtype: torch.dtype | None = None) -> Any:
    """Return the pipeline of ``case``. Weights are drawn in the case's dtype, and cast to ``dtype``."""
    pipe = _PIPELINES[case["pipeline"]].tiny.build()
    changed = _CONFIGS.get(case["pipeline"])
    for name, part in pipe.components.items():
        if changed is not None and name in denoisers(pipe):
            config = {**part.config, "num_attention_heads": 4, **changed}
            setattr(pipe, name, fill(type(part).from_config(config), seed=len(name)))
        elif isinstance(part, nn.Module):
            # Some tiny pipelines share an autoencoder, which a case must not change for others.
            setattr(pipe, name, copy.deepcopy(part))
            if hasattr(part, "clear_cache"):
                # The VAEs of Wan and Qwen-Image create counters in their first call, which may be on one rank only.
                getattr(pipe, name).clear_cache()
    for module in denoisers(pipe).values():
        # Loaded models require gradients. The tiny ones do not.
        module.requires_grad_(True)
    for wanted in (DTYPES[case["dtype"]], dtype):
        if wanted is not None:
            _cast_weights(pipe, wanted)
    return pipe


def _cast_weights(pipe: Any, dtype: torch.dtype) -> None:
    """Cast the weights as ``from_pretrained(dtype=...)`` does, which keeps some modules in float32."""
    cast: dict[nn.Parameter, nn.Parameter] = {}  # Encoders tie weights, so each parameter is cast once.
    for part in pipe.components.values():
        kept = getattr(part, "_keep_in_fp32_modules", None) or []
        if isinstance(part, nn.Module):
            for at, module in part.named_modules():
                for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
                    if tensor is None or not tensor.is_floating_point() or {*at.split("."), name} & set(kept):
                        continue
                    if name in module._buffers:
                        module._buffers[name] = tensor.to(dtype)
                    else:
                        if tensor not in cast:
                            cast[tensor] = nn.Parameter(tensor.detach().to(dtype), tensor.requires_grad)
                        module._parameters[name] = cast[tensor]


def denoisers(pipe: Any) -> dict[str, nn.Module]:
    """Return the transformers or the UNet by component, without the wrapper of ``torch.compile``."""
    names = ("transformer", "transformer_2", "unet")
    modules = {name: getattr(pipe, name, None) for name in names}
    return {name: getattr(module, "_orig_mod", module) for name, module in modules.items() if module is not None}


def steps_of(case: Case) -> int:
    """Return 8 steps for PipeFusion, 4 for a cache that skips, computes and skips again, otherwise 2."""
    if case["pipefusion"] != "exact-stages":
        return 8
    return 2 if case["cache"] in ("uncached", "zero") else 4


def arguments(case: Case, dtype: torch.dtype | None = None) -> list[dict[str, Any]]:
    """Return the arguments of each call. Tensors have ``dtype``, or the case's dtype if it is None."""
    pipeline = _PIPELINES[case["pipeline"]]
    sizes: list[Mapping[str, Any]] = [{}, pipeline.second] if case["sizes"] == "sizes" else [{}]
    calls = []
    for size in sizes:
        options = {**pipeline.guidance[case["guidance"]], **size, "num_inference_steps": steps_of(case)}
        decodes = case["vae"] == "vae" or case["vae placement"] != "auto-vae"
        options["output_type"] = "pt" if decodes else "latent"
        call = pipeline.tiny.call(**{**options, "generator": torch.Generator().manual_seed(7)})
        if case["prompts"] == "prompts":
            call = {name: _of_two_prompts(name, value) for name, value in call.items()}
        calls.append({name: _cast(value, dtype or DTYPES[case["dtype"]]) for name, value in call.items()})
    return calls


def _of_two_prompts(name: str, value: Any) -> Any:
    if name in ("prompt", "negative_prompt") and isinstance(value, str):
        return [value, "a small green triangle on black"]
    if isinstance(value, Tensor) and name.endswith("_embeds"):
        return torch.cat([value, value.flip(-1)])
    return torch.cat([value, value]) if isinstance(value, Tensor) else value


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def generate(pipe: Any, case: Case, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Return the output of each call as a tensor."""
    outs = []
    for call in arguments(case, dtype):
        out = pipe(**call)[0]
        outs.append(out if isinstance(out, Tensor) else torch.stack([torch.as_tensor(each) for each in out]))
    return outs


def add_lora(pipe: Any) -> None:
    """Add a random LoRA that is equal on every rank and large enough to change the output measurably."""
    from peft import LoraConfig

    with torch.random.fork_rng():
        torch.manual_seed(0)
        for module in denoisers(pipe).values():
            module.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False))
            for name, parameter in module.named_parameters():
                if "lora_" in name:
                    # peft creates LoRA weights in float32.
                    parameter.data = parameter.data.to(module.dtype)


def fuse_lora(pipe: Any) -> None:
    for module in denoisers(pipe).values():
        module.fuse_lora()


def unload_lora(pipe: Any) -> None:
    for module in denoisers(pipe).values():
        module.unload_lora()


def quantize(pipe: Any) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    for module in denoisers(pipe).values():
        quantize_(module, Int8WeightOnlyConfig())


def _offload(pipe: Any, case: Case, when: str) -> None:
    how, _, moment = case["offload"].partition("-")
    if moment != when:
        return
    if how == "model":
        pipe.enable_model_cpu_offload(device="cpu")
        return
    cpu = torch.device("cpu")
    for module in denoisers(pipe).values():
        if how == "group":
            module.enable_group_offload(cpu, offload_type="block_level", num_blocks_per_group=1)
        else:
            module.enable_group_offload(cpu, offload_type="leaf_level")


def compile_denoisers(pipe: Any, how: str) -> None:
    # This backend runs the captured graphs without a code generator, which would take minutes.
    options: dict[str, Any] = {"fullgraph": True, "backend": "aot_eager"}
    for name, module in denoisers(pipe).items():
        if how == "whole":
            setattr(pipe, name, torch.compile(module, **options))
        elif how == "in-place":
            module.compile(**options)
        else:
            module.compile_repeated_blocks(**options)


def uncompile(pipe: Any) -> None:
    """Undo :func:`compile_denoisers`."""
    for name, module in denoisers(pipe).items():
        setattr(pipe, name, module)
        for part in module.modules():
            part._compiled_call_impl = None


def before(pipe: Any, case: Case) -> None:
    """Apply the user's changes that come before para_core."""
    if case["compile"] != "eager" and case["compile order"] == "compile-first":
        compile_denoisers(pipe, case["compile"])
    if case["quantized"] == "int8":
        quantize(pipe)
    if case["lora"] in ("lora-before", "lora-fused", "lora-fused-after", "lora-unloaded"):
        add_lora(pipe)
    if case["lora"] == "lora-fused":
        fuse_lora(pipe)
    _offload(pipe, case, "before")


def after(pipe: Any, case: Case) -> None:
    """Apply the user's changes that come after para_core."""
    if case["lora"] == "lora-after":
        add_lora(pipe)
    if case["lora"] == "lora-fused-after":
        fuse_lora(pipe)
    if case["lora"] == "lora-unloaded":
        unload_lora(pipe)
    if case["quantized"] == "int8-late":
        quantize(pipe)
    _offload(pipe, case, "after")
    if case["compile"] != "eager" and case["compile order"] == "compile-last":
        compile_denoisers(pipe, case["compile"])
