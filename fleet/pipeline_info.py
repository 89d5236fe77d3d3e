"""Descriptions of models without their weights: the pipeline, and the fields of a request, which its call
has.

``find_model`` of `build.py` makes a :class:`PipelineInfo` of a class, `modular.py` one of a modular pipeline,
and `cli/checks.py` a draft of one from the source, before diffusers is imported. `request_schema.py` makes
the schema of its fields. Tests: tests/fleet/test_model_files.py, tests/fleet/test_fields.py.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import para_core

OutputKind = Literal["image", "video"]
_IMAGE_PARAMETERS = (
    *("images", "input_images", "reference_images", "memory_images", "gligen_images"),
    "image_reference",
)
# Parameters of a pipeline's call that a request may not set, because the command or server sets them itself.
_SET_BY_CALLER = ("self", "generator", "output_type", "return_dict", "args", "kwargs")
# Names of tensors: "prompt_embeds_2" and "prompt_attention_mask_2", but not "prompt_embeds_scale", a number,
# or "padding_mask_crop", pixels.
_TENSORS = re.compile(r"latents|_embeds(?!_scale)|_embeddings?$|_mask(_\d)?$|_cu_seqlens$|_hidden_states$")

# This folder exists in a checkout of the repository, but not in an installed package.
TINY_FLUX = Path("zoo/flux/pipeline")
# The T5 of the tiny FLUX learned from captions of at most 64 tokens (zoo/flux/tune.py).
TINY_FLUX_FIELDS = {"height": 128, "width": 128, "num_inference_steps": 20, "max_sequence_length": 64}

# A pipeline generates videos if its call has one of FRAME_PARAMETERS, else audio if it has one of
# _AUDIO_PARAMETERS, else images.
FRAME_PARAMETERS = ("num_frames", "video_length", "frames")
_AUDIO_PARAMETERS = ("audio_length_in_s", "audio_duration", "audio_end_in_s", "audio_duration_s")


@dataclass(frozen=True)
class PipelineInfo:
    """Description of a pipeline, without its weights."""

    name: str  # folder, repository on the Hub, or single file
    pipeline: str  # name of the pipeline's class
    # Parameters of the pipeline's call that a request may set, with their defaults (inspect.Parameter.empty
    # if there is none). For a modular pipeline, inputs of its blocks.
    fields: Mapping[str, Any]
    kind: OutputKind
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of fields, if they differ from the pipeline's
    # Types of the parameters, as far as they are known.
    annotations: Mapping[str, Any] = field(default_factory=dict)
    modular: bool = False
    trusted: bool = False  # whether Python code of a modular pipeline's repository may run
    takes_loras: bool = True  # whether the class has load_lora_weights; True in a draft of cli/checks.py
    required: tuple[str, ...] = ()  # image fields that every request must set
    # Folder or repository with the configs, if ``name`` is a single file of weights.
    config: str | None = None
    controlnet: tuple[str, ...] = ()  # folders or repositories of ControlNets
    # Classes that take the same weights, and images if this class takes none, or none if it needs some.
    others: tuple[str, ...] = ()
    # Number of pixels that must divide height and width. 1 also if it is unknown.
    multiple: int = 1

    @property
    def edited_images(self) -> tuple[str, ...]:
        """Names of the fields that take an image from which the result is made. That of an IP adapter is
        none.
        """
        return tuple(name for name in self.images if "ip_adapter" not in name)

    @property
    def edits(self) -> bool:
        """Whether a request may have an image to start from or to edit."""
        return bool(self.edited_images)

    @property
    def images(self) -> tuple[str, ...]:
        """Names of the fields that take one or several images."""
        # The number num_prompts_per_image is none.
        return tuple(
            name for name in self.fields if re.search(r"(?<!_per_)image$", name) or name in _IMAGE_PARAMETERS
        )


def can_be_given(name: str) -> bool:
    """Whether a request may set the parameter ``name`` of a pipeline's call.

    False for tensors (embeddings, masks and latents), for callbacks, and for what the command or server sets
    itself.
    """
    is_tensor = _TENSORS.search(name) is not None
    return name not in _SET_BY_CALLER and not is_tensor and "callback" not in name


def describe_unknown_field(model: PipelineInfo, name: str) -> str:
    """Return the error message for an unknown field. It suggests the most similar known field, or lists all."""
    close = difflib.get_close_matches(name, [*model.fields, "seed", "size", "steps"], n=1)
    hint = f"It takes seed, size, steps, {', '.join(model.fields)}."
    if close:
        hint = f"Did you mean {close[0]}?"
    return f"{model.pipeline} has no field {name!r} here. {hint}"


def find_tiny_flux() -> Path:
    """Return the folder of the small trained FLUX, in the checkout of para_core or below the current folder.

    Raises:
        FileNotFoundError: The folder is in neither.
    """
    for root in (Path(para_core.__file__).parents[1], Path.cwd()):
        if (root / TINY_FLUX / "model_index.json").is_file():
            return root / TINY_FLUX
    raise FileNotFoundError(
        f"no model was given, and the default, the tiny FLUX, is part of the repository ({TINY_FLUX}), not of the "
        "installed package. Name a model (--model black-forest-labs/FLUX.1-dev, or a folder), or start in a checkout."
    )


def describe_class(name: str, cls: Any, defaults: Mapping[str, Any]) -> PipelineInfo:
    """Return the description of model ``name``, whose classical pipeline class is ``cls``, with these
    defaults of fields.

    Raises:
        ValueError: ``cls`` generates audio only.
    """
    parameters = inspect.signature(cls.__call__).parameters
    fields = {key: parameter.default for key, parameter in parameters.items()}
    model = describe_call(name, cls.__name__, fields, defaults)
    types = {key: parameters[key].annotation for key in model.fields}
    annotations = {
        key: kind
        for key, kind in types.items()
        # A string annotation (from __future__ import annotations in the pipeline's module) is not evaluated.
        if not isinstance(kind, str) and kind is not inspect.Parameter.empty
    }
    return replace(model, annotations=annotations, takes_loras=hasattr(cls, "load_lora_weights"))


def describe_call(
    name: str, pipeline: str, parameters: Mapping[str, Any], defaults: Mapping[str, Any]
) -> PipelineInfo:
    """Return the description of a model by the parameters of its pipeline's call and their defaults, without
    types.

    ``defaults`` are of the model, such as those of the tiny FLUX: they are set in every request that leaves
    the field out, and those of unknown fields are dropped.

    Raises:
        ValueError: The pipeline generates audio only.
    """
    fields = {key: default for key, default in parameters.items() if can_be_given(key)}
    kind: OutputKind = "image"
    if any(key in fields for key in FRAME_PARAMETERS):
        kind = "video"
    elif any(key in fields for key in _AUDIO_PARAMETERS):
        raise ValueError(f"model {name!r} ({pipeline}) generates audio; expected images or videos.")
    model = PipelineInfo(
        name, pipeline, fields, kind, {key: value for key, value in defaults.items() if key in fields}
    )
    return replace(
        model, required=tuple(key for key in model.images if _is_required(key, pipeline, fields[key]))
    )


# Fields for images whose default is None, although every call of such a class needs them: classes that are
# named for what they do with the image. The patterns match names of classes.
_NEEDED_BY = {
    "image": re.compile(
        "Img2Img|Inpaint|Fill|Image(To|2)Video|I2V|Upscale|SuperResolution|Pix2Pix|Depth2Img|ImageEdit|Layered|ControlNet"
        "|Adapter|Refiner"
    ),
    "mask_image": re.compile("Inpaint|Fill"),
    "control_image": re.compile("Control"),
}


def _is_required(name: str, pipeline: str, default: Any) -> bool:
    """Whether the image field ``name`` of a classical pipeline class must be set, given the default of its
    call.
    """
    if default is inspect.Parameter.empty:
        return True
    return default is None and name in _NEEDED_BY and _NEEDED_BY[name].search(pipeline) is not None
