"""What can be known of a model before its weights are loaded: where it is, its pipeline, the fields of a call."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import para_core

# Of the repository; an installed package has no folder benchmarks/.
TINY_FLUX = Path("zoo/flux/pipeline")
# FLUX pads text to 512 tokens where it is not told otherwise, and this one was trained with at most 128.
TINY_FLUX_FIELDS = {"height": 128, "width": 128, "num_inference_steps": 20, "max_sequence_length": 64}

Kind = Literal["image", "video"]
# A call has one of these where it makes a video.
_FRAMES = ("num_frames", "video_length")
_SOUND = ("audio_length_in_s", "audio_duration", "audio_end_in_s", "audio_duration_s")
# What JSON cannot say, or what is not the caller's to say.
_OWN = ("self", "generator", "output_type", "return_dict", "args", "kwargs")


@dataclass(frozen=True)
class Model:
    """A pipeline that is not loaded.

    Args:
        name: a folder, or a repository on the Hub.
        pipeline: the name of its class in diffusers.
        fields: of its call, by name, with their defaults (``inspect.Parameter.empty`` where there is none).
        kind: what it generates.
        defaults: fields that are given where a request leaves them out.
        annotations: what the call says of its fields' types.
    """

    name: str
    pipeline: str
    fields: Mapping[str, Any]
    kind: Kind
    defaults: Mapping[str, Any] = field(default_factory=dict)
    annotations: Mapping[str, Any] = field(default_factory=dict)

    @property
    def images(self) -> tuple[str, ...]:
        """The fields that take an image, or several."""
        return tuple(name for name in self.fields if name.endswith("image") or name == "images")


def find_tiny_flux() -> Path:
    """The trained tiny FLUX of the repository that para_core is imported from, or that this process was started in.

    Raises:
        FileNotFoundError: it is in neither.
    """
    for root in (Path(para_core.__file__).parents[1], Path.cwd()):
        if (root / TINY_FLUX / "model_index.json").is_file():
            return root / TINY_FLUX
    raise FileNotFoundError(
        f"no model was named, and the tiny FLUX that stands in for one is part of the repository ({TINY_FLUX}), not of the "
        "installed package. Name a model (--model black-forest-labs/FLUX.1-dev, or a folder), or start in a checkout."
    )


def find_model(name: str | None) -> Model:
    """The model of this name; None: the tiny FLUX.

    Raises:
        FileNotFoundError, ValueError: there is no such model, or it generates no images and no videos.
    """
    defaults: Mapping[str, Any] = {}
    if name is None:
        name, defaults = str(find_tiny_flux()), TINY_FLUX_FIELDS
    import diffusers

    try:
        index = diffusers.DiffusionPipeline.load_config(name)
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"model {name!r} has no model_index.json that can be read: expected a folder that save_pretrained wrote, or a "
            f"repository of diffusers' on the Hub ({str(error).splitlines()[0]})"
        ) from error
    pipeline = str(index.get("_class_name"))
    cls = getattr(diffusers, pipeline, None)
    if cls is None:
        raise ValueError(f"model {name!r} is for {pipeline}, which diffusers {diffusers.__version__} does not have.")
    return describe(name, cls, defaults)


def describe(name: str, cls: Any, defaults: Mapping[str, Any]) -> Model:
    """The model ``name``, whose pipeline is a ``cls``."""
    parameters = inspect.signature(cls.__call__).parameters
    fields = {key: parameter.default for key, parameter in parameters.items() if _can_be_given(key)}
    if any(key in fields for key in _SOUND) and not any(key in fields for key in _FRAMES):
        raise ValueError(
            f"model {name!r} ({cls.__name__}) generates sound; only images and videos can be written here."
        )
    kind: Kind = "video" if any(key in fields for key in _FRAMES) else "image"
    annotations = {key: parameters[key].annotation for key in fields if _says_type(parameters[key].annotation)}
    return Model(name, cls.__name__, fields, kind, defaults, annotations)


def _says_type(annotation: Any) -> bool:
    # Text where the pipeline's file postpones annotations.
    return annotation is not inspect.Parameter.empty and not isinstance(annotation, str)


def _can_be_given(name: str) -> bool:
    tensor = name.endswith(("_embeds", "_mask")) or "latents" in name
    return name not in _OWN and not tensor and not name.startswith("callback")


def require_field(model: Model, name: str, given: str | None = None) -> None:
    """Raise ``ValueError``, with what it may have been meant for, unless a call of the pipeline takes ``name`` from JSON.

    Args:
        given: what the user calls it, if not ``name``.
    """
    if name in model.fields:
        return
    close = difflib.get_close_matches(name, [*model.fields, "seed", "size", "steps"], n=1)
    hint = f"Did you mean {close[0]}?" if close else f"It takes seed, size, steps, {', '.join(model.fields)}."
    raise ValueError(f"{model.pipeline} takes no field {(given or name)!r} here. {hint}")
