"""Lookup of a model by name: its index file names the pipeline class, whose ``__call__`` gives a request's fields."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import para_core
from para_core.fleet.models import Kind, Model, can_be_given

# This folder exists in a checkout of the repository, but not in an installed package.
TINY_FLUX = Path("zoo/flux/pipeline")
# FLUX pads prompts to 512 tokens by default, but this model was trained with at most 128.
TINY_FLUX_FIELDS = {"height": 128, "width": 128, "num_inference_steps": 20, "max_sequence_length": 64}

# A pipeline generates videos if its call has one of the parameters _FRAMES, else audio if it has one of _SOUND.
_FRAMES = ("num_frames", "video_length")
_SOUND = ("audio_length_in_s", "audio_duration", "audio_end_in_s", "audio_duration_s")


def find_tiny_flux() -> Path:
    """Return the folder of the small trained FLUX, in the checkout of para_core or below the current folder.

    Raise FileNotFoundError if it is in neither.
    """
    for root in (Path(para_core.__file__).parents[1], Path.cwd()):
        if (root / TINY_FLUX / "model_index.json").is_file():
            return root / TINY_FLUX
    raise FileNotFoundError(
        f"no model was given, and the default, the tiny FLUX, is part of the repository ({TINY_FLUX}), not of the "
        "installed package. Name a model (--model black-forest-labs/FLUX.1-dev, or a folder), or start in a checkout."
    )


def find_model(name: str | None, *, trust_remote_code: bool = False) -> Model:
    """Return the description of a model without loading its weights.

    Raise FileNotFoundError if there is no such folder or repository, and ValueError if this diffusers lacks the
    pipeline's class, the model generates neither images nor videos, or its repository contains code that is not
    trusted.

    Args:
        name (`str`, *optional*): Folder or Hub repository of a classical or modular pipeline. None for the tiny FLUX.
        trust_remote_code (`bool`): Whether code in a modular pipeline's repository may run.
    """
    defaults: Mapping[str, Any] = {}
    if name is None:
        name, defaults = str(find_tiny_flux()), TINY_FLUX_FIELDS
    import diffusers

    try:
        index = diffusers.DiffusionPipeline.load_config(name)
    except (OSError, ValueError) as error:
        from para_core.fleet.modular import describe_modular, has_modular_index, open_modular

        if has_modular_index(name):
            return describe_modular(name, open_modular(name, trust_remote_code=trust_remote_code))
        raise FileNotFoundError(
            f"model {name!r} has no readable model_index.json or modular_model_index.json; expected a folder written "
            f"by save_pretrained, or a diffusers repository on the Hub ({str(error).splitlines()[0]})"
        ) from error
    pipeline = str(index.get("_class_name"))
    cls = getattr(diffusers, pipeline, None)
    if cls is None:
        raise ValueError(f"model {name!r} is for {pipeline}, which diffusers {diffusers.__version__} does not have.")
    return describe(name, cls, defaults)


def describe(name: str, cls: Any, defaults: Mapping[str, Any]) -> Model:
    """Return the description of model ``name``, whose pipeline class is ``cls``, with these defaults of fields.

    Raise ValueError if ``cls`` generates audio only.
    """
    parameters = inspect.signature(cls.__call__).parameters
    fields = {key: parameter.default for key, parameter in parameters.items() if can_be_given(key)}
    if any(key in fields for key in _SOUND) and not any(key in fields for key in _FRAMES):
        raise ValueError(f"model {name!r} ({cls.__name__}) generates audio; expected images or videos.")
    kind: Kind = "video" if any(key in fields for key in _FRAMES) else "image"
    annotations = {
        key: parameters[key].annotation
        for key in fields
        # A string annotation (from __future__ import annotations in the pipeline's module) is not evaluated.
        if not isinstance(parameters[key].annotation, str) and parameters[key].annotation is not inspect.Parameter.empty
    }
    return Model(name, cls.__name__, fields, kind, defaults, annotations)
