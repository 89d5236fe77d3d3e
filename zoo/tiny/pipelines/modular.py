"""Tiny modular pipelines of diffusers: the blocks that denoise, tiny components, and a short call for each.

The blocks that encode and decode run whole on every rank, as in any pipeline, and some need tokenizers of checkpoints.
They are left out: the call takes what they would compute, and returns latents.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import diffusers
import torch
from diffusers import ClassifierFreeGuidance, FlowMatchEulerDiscreteScheduler, MiniMaxH3Scheduler, modular_pipelines
from diffusers.guiders import LTX2Guidance
from diffusers.models import MiniMaxMusic3ConditionEncoder
from torch import Tensor
from torch.utils._pytree import tree_leaves

from zoo.flux.models import CLIP_WIDTH, SHIFT
from zoo.tiny.base import IMAGE_WIDTH, SECOND_TEXT_WIDTH, TEXT_WIDTH, fill, noise
from zoo.tiny.pipelines import cosmos, options, unet, video
from zoo.tiny.pipelines.components import random_model, wan_vae
from zoo.tiny.pipelines.options import MEDIUM, SIZE, VIDEO, embeddings, first, masks, of_both
from zoo.tiny.torchvision_stand_in import stand_in_for_torchvision
from zoo.tiny.transformers.registry import MODELS

Parts = Callable[[], dict[str, Any]]


class TinyModular:
    """Components of a modular pipeline and the arguments of a short call.

    Args:
        name: Name of the class without its ending ``ModularPipeline``.
        parts: Function that returns components by name. The others are what the blocks create.
        tables, options: Arguments of the call; later ones win.
        guided: Whether the pipeline calls a transformer once for each branch of guidance.
        config: Configuration values of the pipeline.
        outputs: Names of the results, each a tensor or a list of tensors.
    """

    def __init__(
        self,
        name: str,
        parts: Parts,
        *tables: dict[str, Any],
        guided: bool = False,
        config: dict[str, Any] | None = None,
        outputs: tuple[str, ...] = ("latents",),
        **options: Any,
    ) -> None:
        self.name, self.parts, self.guided, self.config, self.outputs = name, parts, guided, config or {}, outputs
        self.options = {name: value for table in (*tables, options) for name, value in table.items()}

    @property
    def cls(self) -> str:
        return f"{self.name}ModularPipeline"

    def build(self) -> Any:
        """Build the pipeline with the blocks of ``denoise`` only."""
        blocks = getattr(modular_pipelines, getattr(modular_pipelines, self.cls).default_blocks_name)()
        for name in [name for name in blocks.sub_blocks if name != "denoise"]:
            blocks.sub_blocks.pop(name)
        pipe = blocks.init_pipeline()
        expected = {component.name for component in blocks.expected_components}
        parts = {name: part for name, part in self.parts().items() if name in expected}
        pipe.update_components(**parts, **self.config)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def generate(self, pipe: Any) -> Tensor:
        """Return the results of a short call as one vector."""
        options = {"num_inference_steps": 3, **self.options}
        options = {name: value for name, value in options.items() if value is not None}
        results = pipe(**options, generator=torch.Generator().manual_seed(7), output=list(self.outputs))
        return torch.cat([x.flatten() for x in tree_leaves(results)])


# -- Components.


def model(name: str, **config: Any) -> Parts:
    """Return a function that builds a transformer and a scheduler."""
    scheduler = partial(FlowMatchEulerDiscreteScheduler, shift=SHIFT)
    return lambda: {"transformer": MODELS[name].build(**config), "scheduler": scheduler()}


def two(first_model: str, second_model: str, second_config: dict[str, Any] | None = None, **config: Any) -> Parts:
    """Return a function that builds two transformers of Wan, each for a part of the steps."""
    parts = model(first_model, **config)
    return lambda: {**parts(), "transformer_2": MODELS[second_model].build(11, **{**config, **(second_config or {})})}


def guided(parts: Parts) -> Parts:
    """Return a function that adds guidance, which is off by default in some pipelines."""
    return lambda: {**parts(), "guider": ClassifierFreeGuidance(guidance_scale=3.0)}


def anima() -> dict[str, Any]:
    stand_in_for_torchvision()
    widths = dict.fromkeys(("source_dim", "target_dim", "model_dim"), TEXT_WIDTH)
    sizes = {"num_layers": 1, "num_attention_heads": 2, "target_vocab_size": 32, "min_sequence_length": 9}
    conditioner = random_model("AnimaTextConditioner", 4, **sizes, **widths)
    return {**model("cosmos", extra_pos_embed_type=None, concat_padding_mask=True)(), "text_conditioner": conditioner}


def cosmos3() -> dict[str, Any]:
    return {**model("cosmos 3")(), "scheduler": cosmos.flow_unipc(), "vae": wan_vae()}


def ltx2() -> dict[str, Any]:
    guidance = {"guidance_scale": 3.0, "stg_scale": 1.0, "modality_scale": 3.0, "spatio_temporal_guidance_blocks": [1]}
    guiders = {name: LTX2Guidance(**guidance) for name in ("guider", "audio_guider")}
    return {**video.ltx2("LTX2Pipeline").components, **guiders}


def helios(scheduler: str = "HeliosScheduler", **schedule: Any) -> Parts:
    parts = model("helios", in_channels=16, out_channels=16)
    return lambda: {**parts(), "scheduler": getattr(diffusers, scheduler)(**schedule)}


def ideogram() -> dict[str, Any]:
    return {**model("ideogram 4")(), "unconditional_transformer": MODELS["ideogram 4"].build(2)}


def minimax_h3() -> dict[str, Any]:
    """Return components of MiniMax H3. Without VAEs the pipeline takes the trained number of channels."""
    config = {"in_channels": 24, "audio_in_channels": 32}
    return {
        "transformer": MODELS["minimax-h3"].build(1, **config),
        "transformer_ref": MODELS["minimax-h3"].build(2, **config),
        "scheduler": MiniMaxH3Scheduler(shift=12.0),
        "audio_scheduler": MiniMaxH3Scheduler(shift=3.0),
    }


def minimax_music() -> dict[str, Any]:
    encoder = MiniMaxMusic3ConditionEncoder(condition_hidden_dim=8, num_condition_layers=2, out_dim=TEXT_WIDTH)
    return {**model("minimax-music")(), "condition_encoder": fill(encoder, 3)}


def wan_animate_2() -> dict[str, Any]:
    return {**model("wan animate 2", in_dim=36, out_dim=16)(), "vae": video.wan_vae_16()}


# -- Options of a call.


def _alone(options: dict[str, Any]) -> dict[str, Any]:
    """Return ``options`` without those of the negative prompt."""
    return {name: value for name, value in options.items() if not name.startswith("negative")}


_BOTH = embeddings(9, TEXT_WIDTH)
_PROMPT = {"prompt_embeds": _BOTH["prompt_embeds"]}
_LISTS = options.listed(_BOTH)
_MASKED = {**_BOTH, **masks("embeds_mask", torch.int64)}
_FLUX = {**SIZE, **_PROMPT, "pooled_prompt_embeds": options.pooled()["pooled_prompt_embeds"]}
_QWEN = {**SIZE, **_MASKED}
# These are latents of a given image.
_GIVEN = noise(1, 4, 1, 6, 10, seed=5)
# There are 4 × 6 image tokens of 16 × 16 pixels. No token of the text represents an image.
_QWEN_21 = {**_MASKED, **MEDIUM, **of_both(image_pad_mask=lambda _: first(0))}
_KREA = SIZE | of_both(
    prompt_embeds=lambda i: noise(1, 9, 3, TEXT_WIDTH, seed=i), prompt_embeds_mask=lambda i: first(9 - 4 * i)
)
_HUNYUAN_15 = {**VIDEO, **_MASKED, "batch_size": 1} | of_both(
    prompt_embeds_2=lambda i: noise(1, 4, SECOND_TEXT_WIDTH, seed=i),
    prompt_embeds_mask_2=lambda i: first(3 - i, 4).long(),
)
_XL = SIZE | of_both(
    prompt_embeds=lambda i: noise(1, 9, 2 * CLIP_WIDTH, seed=i),
    pooled_prompt_embeds=lambda i: noise(1, CLIP_WIDTH, seed=i),
)
_ANIMA = SIZE | of_both(
    qwen_prompt_embeds=lambda i: noise(1, 9, TEXT_WIDTH, seed=i),
    qwen_attention_mask=lambda i: first(9 - 4 * i).long(),
    t5_input_ids=lambda i: torch.arange(7)[None] + 9 * i,
    t5_attention_mask=lambda i: torch.ones(1, 7).long(),
)
_COSMOS = {**VIDEO, "cond_input_ids": list(range(1, 8)), "uncond_input_ids": [1, 9, 10], "fps": 24.0}
_DISTILLED = {"distilled_sigmas": [1.0, 0.7, 0.3, 0.0]}
_SOUND = {"audio_in_channels": 128, "audio_out_channels": 128}
_LTX = {"height": 96, "width": 160, "num_frames": 17}
_CONNECTED = of_both(
    connector_prompt_embeds=lambda i: noise(1, 9, TEXT_WIDTH, seed=i),
    connector_audio_prompt_embeds=lambda i: noise(1, 9, TEXT_WIDTH, seed=i + 2),
    connector_attention_mask=lambda _: torch.ones(1, 9).long(),
)
_LTX2 = {**_LTX, **_CONNECTED, "batch_size": 1, "dtype": torch.float32}
_ECHO = {**_LTX, **_alone(_CONNECTED), "sigmas": [1.0, 0.6, 0.2, 0.0], "num_inference_steps": None}
_HELIOS = {**_BOTH, **VIDEO, "num_latent_frames_per_chunk": 2, "history_sizes": [4, 2, 1]}
_STAGES = {"stages": 2, "stage_range": [0, 0.5, 1], "gamma": 0.3}
_PYRAMID = {**_HELIOS, **MEDIUM, "pyramid_num_inference_steps_list": [2, 2], "num_inference_steps": None}
# There are 37 frames of latents, because the pipeline makes at least five seconds.
_H3 = {**MEDIUM, "num_frames": 124, **_PROMPT, "text_token_tags": torch.ones(9).long()}
_WAN = {"in_channels": 16, "out_channels": 16}
_WAN_IMAGE = {"in_channels": 36, "out_channels": 16}
_FROM_IMAGE = {**VIDEO, "image_condition_latents": noise(1, 20, 3, 6, 10)}
_CONTEXT = {**_FROM_IMAGE, **embeddings(512, TEXT_WIDTH), "prompt": None, "image_embeds": noise(1, 5, IMAGE_WIDTH)}
_CONTROL = {"control_hidden_states": noise(1, 96, 3, 6, 10), "control_hidden_states_scale": torch.tensor([1.0, 0.5])}
# There are two segments. The end of the first one is the condition of the second.
_SEGMENTS = {
    "segment_frame_length": 9,
    "num_segments": 2,
    "effective_segment": 8,
    "prev_segment_conditioning_frames": 1,
}
_ANIMATE = {
    **SIZE,
    **_BOTH,
    **_SEGMENTS,
    "reference_image_latents": noise(20, 1, 6, 10),
    "driving_video_pixels": noise(1, 3, 17, 48, 80).clamp(-1, 1),
    "condition_clip_context": noise(1, 5, 1280),
    "prompt_ref_embeds": _BOTH["prompt_embeds"],
    "denoiser_input_fields": {"encoder_hidden_states_image": noise(1, 5, 1280, seed=1)},
}

_guided = partial(TinyModular, guided=True)
_with_sound = partial(TinyModular, outputs=("latents", "audio_latents"))
_frames = partial(TinyModular, outputs=("segment_frames",))
_layers = model("qwen-image", use_additional_t_cond=True, use_layer3d_rope=True)
_klein = model("flux2", guidance_embeds=False)

_ALL = (
    _guided("Anima", anima, _ANIMA),
    _guided("Cosmos3Omni", cosmos3, _COSMOS),
    TinyModular("Cosmos3Distilled", model("cosmos 3"), _COSMOS, num_inference_steps=None, config=_DISTILLED),
    _with_sound("Echo", model("ltx2", **_SOUND), _ECHO),
    _guided("ErnieImage", model("ernie-image", patch_size=1), SIZE, _LISTS),
    TinyModular("Flux", model("flux"), _FLUX),
    TinyModular("FluxKontext", model("flux"), _FLUX, image_latents=_GIVEN[:, :, 0], max_area=48 * 80),
    TinyModular("Flux2", model("flux2"), SIZE, _PROMPT),
    TinyModular("Flux2Klein", _klein, SIZE, _PROMPT),
    _guided("Flux2KleinBase", _klein, SIZE, _BOTH),
    _guided("Flux3", model("flux3"), SIZE, _BOTH),
    TinyModular("Flux3Distilled", model("flux3", flow_map=True), SIZE, _PROMPT),
    _guided("Helios", helios(stages=1, stage_range=[0, 1]), _HELIOS),
    _guided("HeliosPyramid", helios(**_STAGES), _PYRAMID),
    TinyModular("HeliosPyramidDistilled", helios("HeliosDMDScheduler", **_STAGES), _PYRAMID),
    _guided("HunyuanVideo15", model("hunyuan 1.5", in_channels=65, out_channels=32), _HUNYUAN_15),
    _guided(
        "Ideogram4", ideogram, SIZE, text_features=_BOTH["prompt_embeds"], text_lengths=[9], guidance_schedule=[3.0] * 3
    ),
    _guided("Krea2", model("krea 2"), _KREA),
    TinyModular("Krea2Turbo", model("krea 2"), _alone(_KREA)),
    _guided("LTX", model("ltx"), _LTX, _BOTH, masks("attention_mask")),
    # In addition to the two branches of text, one has no attention in a block, and one lacks the other modality.
    _with_sound("LTX2", ltx2, _LTX2, guided=True),
    _with_sound("LTX25", ltx2, _LTX2, guided=True),
    _with_sound("MiniMaxH3", minimax_h3, _H3),
    _guided("MiniMaxMusic3", minimax_music, frame_hiddens=noise(1, 9, 16), outputs=("latent_chunks",)),
    _guided("QwenImage", model("qwen-image"), _QWEN),
    _guided("QwenImageEdit", model("qwen-image, editing"), _QWEN, image_latents=_GIVEN),
    _guided("QwenImageEditPlus", model("qwen-image, editing"), _QWEN, image_latents=[_GIVEN, noise(1, 4, 1, 4, 6)]),
    _guided("QwenImageLayered", _layers, _MASKED, image_latents=_GIVEN.transpose(1, 2), layers=2),
    _guided("QwenImage21", guided(model("qwen-image 2.1")), _QWEN_21),
    TinyModular("QwenImage21Turbo", model("qwen-image 2.1"), _alone(_QWEN_21)),
    _guided("StableDiffusion3", model("sd3"), SIZE, _BOTH, options.pooled()),
    # Every rank along ``batch`` would compute both branches, which its guider computes in two calls.
    TinyModular("StableDiffusionXL", lambda: unet.stable_diffusion_xl().components, _XL),
    _guided("Wan", model("wan", **_WAN), VIDEO, _BOTH),
    _guided("WanImage2Video", model("wan, image context", **_WAN_IMAGE), _CONTEXT),
    _guided("Wan22", two("wan", "wan", **_WAN), VIDEO, _BOTH),
    _guided("Wan22Image2Video", two("wan", "wan", **_WAN_IMAGE), _FROM_IMAGE, _BOTH),
    _guided(
        "Wan22Vace",
        two("wan", "wan vace", {"vace_in_channels": 96}, **_WAN),
        {**VIDEO, **_BOTH, "num_reference_images": 0, "denoiser_input_fields": _CONTROL},
    ),
    _frames("WanAnimate2", wan_animate_2, _ANIMATE, guided=True),
    _frames("WanAnimate2Distilled", wan_animate_2, _ANIMATE),
    _guided("ZImage", guided(model("z-image")), SIZE, _LISTS),
)

MODULAR: dict[str, TinyModular] = {pipeline.name: pipeline for pipeline in _ALL}
