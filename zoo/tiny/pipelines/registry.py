"""Tiny diffusers pipelines of every video family, and of the image families beside FLUX.1: random weights, nothing to
load.

Each is whole: text encoders and tokenizers (but FLUX.2 [dev]), VAE, scheduler. What they generate means nothing, but
every part of the input matters to it, so it shows what parallel runs get wrong.
"""

from __future__ import annotations

import diffusers
import torch
from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video_image2video import (
    DEFAULT_PROMPT_TEMPLATE as LLAVA_TEMPLATE,
)
from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2VideoCondition
from diffusers.pipelines.ltx2.pipeline_ltx2_hdr_lora import LTX2HDRReferenceCondition
from diffusers.pipelines.ltx2.pipeline_ltx2_ic_lora import LTX2ReferenceCondition

from zoo.tiny.pipelines.image import (
    auraflow,
    flux2,
    hidream,
    lumina2,
    pixart,
    qwen_controlnet,
    qwen_image,
    qwen_image_edit,
    stable_diffusion_3,
    visual_cloze,
)
from zoo.tiny.pipelines.parts import (
    IMAGE_TOKENS,
    IMAGE_WIDTH,
    PROMPT,
    TEXT_WIDTH,
    TinyPipeline,
    embeddings,
    random_image,
    random_video,
)
from zoo.tiny.pipelines.shelf import SHELF_PIPELINES
from zoo.tiny.pipelines.video import (
    cogvideox,
    framepack,
    helios,
    hunyuan_video,
    hunyuan_video_15,
    hunyuan_video_15_image,
    hunyuan_video_image,
    hunyuan_video_skyreels,
    ltx,
    ltx2,
    mochi,
    wan,
    wan_animate,
)

_SIZE = {"height": 48, "width": 80, "num_frames": 9}
_TEXT = {"max_sequence_length": 13}
_IMAGE = {"image": random_image(48, 80)}
_WAN_SIZE = {**_SIZE, **_TEXT}
_QWEN_SIZE = {"height": 48, "width": 80, "negative_prompt": "a blue square"}
# 3 × 5 image tokens of 8 × 8 pixels; of 13 text tokens nine are valid, and five of the negative ones.
_SMALL_IMAGE = {"height": 24, "width": 40, **embeddings(13, TEXT_WIDTH)}
_PIXART = {"height": 24, "width": 40, **_TEXT, "clean_caption": False, "use_resolution_binning": False}
_POOLED = {
    f"{kind.removesuffix('prompt')}pooled_prompt_embeds": embeddings(1, IMAGE_WIDTH)[f"{kind}_embeds"][:, 0]
    for kind in ("prompt", "negative_prompt")
}
_SD3_IMAGE = {**_SMALL_IMAGE, **_POOLED}
_VALID = {
    f"{kind}_attention_mask": (torch.arange(13) < number)[None]
    for kind, number in (("prompt", 9), ("negative_prompt", 5))
}
_QWEN_TEXT = {
    **embeddings(13, TEXT_WIDTH),
    **{
        f"{kind}_embeds_mask": (torch.arange(13) < number)[None].long()
        for kind, number in (("prompt", 9), ("negative_prompt", 13))
    },
}
# 3 × 3 × 5 video tokens of 32 × 32 pixels in 8 frames.
_LTX_SIZE = {"height": 96, "width": 160, "num_frames": 17, **_TEXT}
_LTX2_SIZE = {**_LTX_SIZE, "spatio_temporal_guidance_blocks": [1], "frame_rate": 25.0}
_LTX2_CONDITIONS = [
    LTX2VideoCondition(random_image(96, 160), crf=0),
    LTX2VideoCondition(random_video(9, 96, 160), index=8, strength=0.8),
]
# One example of a task, and the question.
_EXAMPLES = {
    "task_prompt": "a large red circle",
    "content_prompt": PROMPT,
    "image": [[random_image(48, 80, seed=1), random_image(48, 80, seed=2)], [random_image(48, 80, seed=3), None]],
    **_TEXT,
}
_EMBEDDINGS = embeddings(13, TEXT_WIDTH)
_SKYREELS = "SkyReelsV2Transformer3DModel"
_MASK = random_image(48, 80, seed=1).convert("L")
_LLAVA_TEMPLATE = {
    **LLAVA_TEMPLATE,
    "image_emb_end": LLAVA_TEMPLATE["image_emb_start"] + 4,
    "image_emb_len": 4,
}

PIPELINES: dict[str, TinyPipeline] = {
    # 3 × 3 × 5 video tokens.
    "hunyuan": TinyPipeline(hunyuan_video, {**_SIZE, **_TEXT}),
    "mochi": TinyPipeline(mochi, {**_SIZE, "num_frames": 13, "max_sequence_length": 16}),
    "cogvideox": TinyPipeline(cogvideox, {**_SIZE, **_TEXT}),
    "cogvideox, rotary": TinyPipeline(lambda: cogvideox(use_rotary_positional_embeddings=True), {**_SIZE, **_TEXT}),
    "cogvideox 1.5": TinyPipeline(
        lambda: cogvideox(use_rotary_positional_embeddings=True, patch_size_t=2, patch_bias=False), {**_SIZE, **_TEXT}
    ),
    "cogvideox, image": TinyPipeline(
        lambda: cogvideox("CogVideoXImageToVideoPipeline", in_channels=8, use_rotary_positional_embeddings=True),
        {**_SIZE, **_TEXT, **_IMAGE},
    ),
    "cogvideox 1.5, image": TinyPipeline(
        lambda: cogvideox(
            "CogVideoXImageToVideoPipeline",
            in_channels=8,
            use_rotary_positional_embeddings=True,
            patch_size_t=2,
            patch_bias=False,
            ofs_embed_dim=8,
        ),
        {**_SIZE, **_TEXT, **_IMAGE},
    ),
    "cogvideox, video": TinyPipeline(
        lambda: cogvideox("CogVideoXVideoToVideoPipeline"),
        {"height": 48, "width": 80, **_TEXT, "video": random_video(9, 48, 80), "strength": 0.9},
    ),
    "cogvideox, control": TinyPipeline(
        lambda: cogvideox("CogVideoXFunControlPipeline", in_channels=8),
        {"height": 48, "width": 80, **_TEXT, "control_video": random_video(9, 48, 80)},
    ),
    "wan": TinyPipeline(wan, _WAN_SIZE),
    "wan 2.2": TinyPipeline(lambda: wan(two=True), _WAN_SIZE),
    "wan, a time step for each token": TinyPipeline(lambda: wan(expand_timesteps=True), _WAN_SIZE),
    "wan, image": TinyPipeline(
        lambda: wan("WanImageToVideoPipeline", in_channels=36, image_dim=IMAGE_WIDTH, added_kv_proj_dim=36),
        # The model takes the last 512 tokens of its context for text.
        {**_SIZE, **_IMAGE, **embeddings(512, TEXT_WIDTH)},
    ),
    "wan, first and last image": TinyPipeline(
        lambda: wan(
            "WanImageToVideoPipeline",
            in_channels=36,
            image_dim=IMAGE_WIDTH,
            added_kv_proj_dim=36,
            pos_embed_seq_len=2 * IMAGE_TOKENS,
        ),
        {**_SIZE, **_IMAGE, "last_image": random_image(48, 80, seed=3), **embeddings(512, TEXT_WIDTH)},
    ),
    "wan 2.2, image": TinyPipeline(
        lambda: wan("WanImageToVideoPipeline", two=True, in_channels=36),
        {**_SIZE, **_IMAGE, **embeddings(13, TEXT_WIDTH)},
    ),
    "wan, image by time steps": TinyPipeline(
        lambda: wan("WanImageToVideoPipeline", expand_timesteps=True), {**_SIZE, **_IMAGE, **embeddings(13, TEXT_WIDTH)}
    ),
    "chronoedit": TinyPipeline(
        lambda: wan(
            "ChronoEditPipeline",
            model="ChronoEditTransformer3DModel",
            in_channels=36,
            image_dim=IMAGE_WIDTH,
            added_kv_proj_dim=36,
        ),
        {**_SIZE, **_IMAGE, **embeddings(512, TEXT_WIDTH)},
    ),
    "lucy": TinyPipeline(
        lambda: wan("LucyEditPipeline", in_channels=32),
        {**_SIZE, "video": random_video(9, 48, 80), **embeddings(13, TEXT_WIDTH)},
    ),
    "wan, video": TinyPipeline(
        lambda: wan("WanVideoToVideoPipeline"),
        {
            "height": 48,
            "width": 80,
            "video": random_video(9, 48, 80),
            "strength": 0.9,
            **embeddings(13, TEXT_WIDTH),
        },
    ),
    "wan vace": TinyPipeline(
        lambda: wan("WanVACEPipeline", model="WanVACETransformer3DModel", vace_layers=[0, 1], vace_in_channels=96),
        {**_SIZE, "video": random_video(9, 48, 80), **embeddings(13, TEXT_WIDTH)},
    ),
    "wan animate": TinyPipeline(
        wan_animate,
        {
            "height": 48,
            "width": 80,
            **_IMAGE,
            "pose_video": random_video(12, 48, 80),
            "face_video": random_video(12, 16, 16),
            # Two segments, the second with the end of the first as its condition.
            "segment_frame_length": 9,
            "guidance_scale": 3.0,
            **embeddings(512, TEXT_WIDTH),
        },
    ),
    "wan animate, replacing": TinyPipeline(
        wan_animate,
        {
            "height": 48,
            "width": 80,
            **_IMAGE,
            "pose_video": random_video(9, 48, 80),
            "face_video": random_video(9, 16, 16),
            "background_video": random_video(9, 48, 80),
            "mask_video": random_video(9, 48, 80),
            "mode": "replace",
            "segment_frame_length": 9,
            **embeddings(512, TEXT_WIDTH),
        },
    ),
    "skyreels v2": TinyPipeline(lambda: wan("SkyReelsV2Pipeline", model=_SKYREELS), {**_SIZE, **_EMBEDDINGS}),
    "skyreels v2, image": TinyPipeline(
        lambda: wan(
            "SkyReelsV2ImageToVideoPipeline",
            model=_SKYREELS,
            in_channels=36,
            image_dim=IMAGE_WIDTH,
            added_kv_proj_dim=36,
        ),
        {**_SIZE, **_IMAGE, **embeddings(512, TEXT_WIDTH)},
    ),
    # Frames get noise of their own, frame after frame, in windows.
    "skyreels v2, forcing": TinyPipeline(
        lambda: wan("SkyReelsV2DiffusionForcingPipeline", model=_SKYREELS, inject_sample_info=True),
        {
            **_SIZE,
            **_EMBEDDINGS,
            "num_frames": 13,
            "overlap_history": 5,
            "base_num_frames": 9,
        },
    ),
    "skyreels v2, forcing from an image": TinyPipeline(
        lambda: wan("SkyReelsV2DiffusionForcingImageToVideoPipeline", model=_SKYREELS, num_frame_per_block=3),
        {**_SIZE, **_IMAGE, **_EMBEDDINGS, "ar_step": 1, "causal_block_size": 3},
    ),
    "skyreels v2, forcing from a video": TinyPipeline(
        lambda: wan("SkyReelsV2DiffusionForcingVideoToVideoPipeline", model=_SKYREELS),
        {
            **_SIZE,
            **_EMBEDDINGS,
            "num_frames": 17,
            "video": random_video(9, 48, 80),
            "overlap_history": 5,
            "base_num_frames": 9,
        },
    ),
    "hunyuan, image": TinyPipeline(
        lambda: hunyuan_video_image("latent_concat"), {**_SIZE, **_TEXT, **_IMAGE, "prompt_template": _LLAVA_TEMPLATE}
    ),
    "hunyuan, image by token replacement": TinyPipeline(
        lambda: hunyuan_video_image("token_replace"), {**_SIZE, **_TEXT, **_IMAGE, "prompt_template": _LLAVA_TEMPLATE}
    ),
    "skyreels, image": TinyPipeline(hunyuan_video_skyreels, {**_SIZE, **_TEXT, **_IMAGE}),
    "framepack": TinyPipeline(framepack, {**_SIZE, **_TEXT, **_IMAGE, "latent_window_size": 3}),
    "hunyuan 1.5": TinyPipeline(hunyuan_video_15, {**_SIZE, "prompt": f'{PROMPT}, with the text "red"'}),
    "hunyuan 1.5, image": TinyPipeline(hunyuan_video_15_image, {**_IMAGE, "num_frames": 9}),
    "qwen-image": TinyPipeline(qwen_image, _QWEN_SIZE),
    "qwen-image, image": TinyPipeline(
        lambda: qwen_image("QwenImageImg2ImgPipeline"), {**_QWEN_SIZE, **_IMAGE, "strength": 0.9}
    ),
    "qwen-image, inpainting": TinyPipeline(
        lambda: qwen_image("QwenImageInpaintPipeline"),
        {**_QWEN_SIZE, **_IMAGE, "mask_image": random_image(48, 80, seed=1).convert("L"), "strength": 0.9},
    ),
    "qwen-image, controlnet": TinyPipeline(
        lambda: qwen_image("QwenImageControlNetPipeline", controlnet=qwen_controlnet()),
        {**_QWEN_SIZE, "control_image": random_image(48, 80)},
    ),
    "qwen-image, controlnet, inpainting": TinyPipeline(
        lambda: qwen_image("QwenImageControlNetInpaintPipeline", controlnet=qwen_controlnet(mask_channels=4)),
        {**_QWEN_SIZE, "control_image": random_image(48, 80), "control_mask": _MASK},
    ),
    "qwen-image, editing": TinyPipeline(lambda: qwen_image_edit("QwenImageEditPipeline"), {**_IMAGE, **_QWEN_TEXT}),
    "qwen-image, editing, inpainting": TinyPipeline(
        lambda: qwen_image_edit("QwenImageEditInpaintPipeline"),
        {**_IMAGE, **_QWEN_TEXT, "mask_image": _MASK, "strength": 0.9},
    ),
    "qwen-image, editing two images": TinyPipeline(
        lambda: qwen_image_edit("QwenImageEditPlusPipeline"),
        {"image": [random_image(48, 80), random_image(48, 48, seed=2)], **_QWEN_TEXT},
    ),
    "qwen-image, layers": TinyPipeline(
        lambda: qwen_image_edit("QwenImageLayeredPipeline", layers=True),
        {
            "image": random_image(48, 80).convert("RGBA"),
            "layers": 2,
            "resolution": 1024,
            **_QWEN_TEXT,
            "prompt": PROMPT,
            "output_type": "pt",
        },
    ),
    "ltx": TinyPipeline(ltx, _LTX_SIZE),
    "ltx, image": TinyPipeline(lambda: ltx("LTXImageToVideoPipeline"), {**_LTX_SIZE, "image": random_image(96, 160)}),
    "ltx, condition": TinyPipeline(lambda: ltx("LTXConditionPipeline"), {**_LTX_SIZE, "image": random_image(96, 160)}),
    "ltx, long": TinyPipeline(
        lambda: ltx("LTXI2VLongMultiPromptPipeline", scheduler=diffusers.LTXEulerAncestralRFScheduler()),
        {
            **_LTX_SIZE,
            "num_frames": 25,
            "prompt": "a red circle|a green square",
            "guidance_scale": 3.0,
            "cond_image": random_image(96, 160),
            "temporal_tile_size": 16,
            "temporal_overlap": 8,
        },
    ),
    "ltx2": TinyPipeline(
        ltx2,
        _LTX2_SIZE,
    ),
    "ltx2, image": TinyPipeline(
        lambda: ltx2("LTX2ImageToVideoPipeline"),
        {
            **_LTX_SIZE,
            "spatio_temporal_guidance_blocks": [1],
            "frame_rate": 25.0,
            "image": random_image(96, 160),
            "image_crf": 0,
        },
    ),
    "ltx2, condition": TinyPipeline(
        lambda: ltx2("LTX2ConditionPipeline"), {**_LTX2_SIZE, "conditions": _LTX2_CONDITIONS}
    ),
    "ltx2, in context": TinyPipeline(
        lambda: ltx2("LTX2InContextPipeline"),
        {
            **_LTX2_SIZE,
            "conditions": _LTX2_CONDITIONS[:1],
            "reference_conditions": LTX2ReferenceCondition(random_video(9, 96, 160)),
            "conditioning_attention_strength": 0.7,
        },
    ),
    "ltx2, dfr": TinyPipeline(
        lambda: ltx2("LTX2DFRPipeline", use_keyframes_abs_pos_embedding=True),
        {**_LTX_SIZE, "frame_rate": 25.0, "sigmas": [1.0, 0.8, 0.4]},
        without=("num_inference_steps",),
    ),
    "ltx2, hdr": TinyPipeline(
        lambda: ltx2("LTX2HDRPipeline"),
        {**_LTX_SIZE, "frame_rate": 25.0, "reference_conditions": LTX2HDRReferenceCondition(random_video(9, 96, 160))},
    ),
    "flux2": TinyPipeline(
        lambda: flux2("Flux2Pipeline"),
        {"height": 48, "width": 80, "prompt": None, "prompt_embeds": embeddings(13, 3 * TEXT_WIDTH)["prompt_embeds"]},
    ),
    "flux2 klein": TinyPipeline(
        lambda: flux2("Flux2KleinPipeline"),
        {"height": 48, "width": 80, **_TEXT, "text_encoder_out_layers": (1, 2, 3)},
    ),
    "flux2 klein, inpainting": TinyPipeline(
        lambda: flux2("Flux2KleinInpaintPipeline"),
        {"height": 48, "width": 80, **_TEXT, **_IMAGE, "mask_image": _MASK, "text_encoder_out_layers": (1, 2, 3)},
    ),
    "stable diffusion 3": TinyPipeline(stable_diffusion_3, _SD3_IMAGE),
    "stable diffusion 3, image": TinyPipeline(
        lambda: stable_diffusion_3("StableDiffusion3Img2ImgPipeline"),
        {**_SD3_IMAGE, "image": random_image(24, 40), "strength": 0.9},
    ),
    "stable diffusion 3, inpainting": TinyPipeline(
        lambda: stable_diffusion_3("StableDiffusion3InpaintPipeline"),
        {
            **_SD3_IMAGE,
            "image": random_image(24, 40),
            "mask_image": random_image(24, 40, seed=1).convert("L"),
            "strength": 0.9,
        },
    ),
    "stable diffusion 3, controlnet": TinyPipeline(
        lambda: stable_diffusion_3("StableDiffusion3ControlNetPipeline"),
        {**_SD3_IMAGE, "control_image": random_image(24, 40)},
    ),
    "stable diffusion 3, controlnet, inpainting": TinyPipeline(
        lambda: stable_diffusion_3("StableDiffusion3ControlNetInpaintingPipeline", mask_channels=1),
        {
            **_SD3_IMAGE,
            "control_image": random_image(24, 40),
            "control_mask": random_image(24, 40, seed=1).convert("L"),
        },
    ),
    "hidream": TinyPipeline(
        hidream,
        {
            "height": 24,
            "width": 40,
            "prompt": None,
            **_POOLED,
            **{
                f"{kind}_embeds_{encoder}": noise[None].repeat(4, 1, 1, 1) if encoder == "llama3" else noise
                for kind in ("prompt", "negative_prompt")
                for encoder, tokens in (("t5", 5), ("llama3", 9))
                for noise in (embeddings(tokens, TEXT_WIDTH)[f"{kind}_embeds"],)
            },
        },
    ),
    "auraflow": TinyPipeline(auraflow, {**_SMALL_IMAGE, **_VALID}),
    "pixart": TinyPipeline(pixart, _PIXART),
    "pixart alpha": TinyPipeline(lambda: pixart("PixArtAlphaPipeline"), _PIXART),
    "pixart, perturbed": TinyPipeline(lambda: pixart("PixArtSigmaPAGPipeline", pag_applied_layers="blocks.1"), _PIXART),
    "lumina2": TinyPipeline(lumina2, {**_SMALL_IMAGE, **_VALID, "height": 48, "width": 80}),
    # Two chunks of frames, the second with the first as its history.
    "helios": TinyPipeline(
        lambda: helios(stages=1, stage_range=[0, 1]),
        {**_SIZE, "num_latent_frames_per_chunk": 2, "history_sizes": [4, 2, 1], **_EMBEDDINGS},
    ),
    "helios, pyramid": TinyPipeline(
        lambda: helios("HeliosPyramidPipeline", stages=2, stage_range=[0, 0.5, 1], gamma=0.3),
        {
            **_SIZE,
            "height": 64,
            "width": 96,
            "num_latent_frames_per_chunk": 2,
            "history_sizes": [4, 2, 1],
            "pyramid_num_inference_steps_list": [2, 2],
            **_EMBEDDINGS,
        },
        without=("num_inference_steps",),
    ),
    "visual cloze": TinyPipeline(
        lambda: visual_cloze("VisualClozePipeline"),
        {**_EXAMPLES, "upsampling_height": 48, "upsampling_width": 80},
        without=("prompt",),
    ),
    "visual cloze, generation": TinyPipeline(
        lambda: visual_cloze("VisualClozeGenerationPipeline"), _EXAMPLES, without=("prompt",)
    ),
    **SHELF_PIPELINES,
}
