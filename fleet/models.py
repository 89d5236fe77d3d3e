"""Description of a model that is known without its weights: its name, its pipeline, and the fields of a request."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["image", "video"]
_IMAGES = ("images", "input_images", "reference_images", "memory_images", "gligen_images")
# Parameters of a pipeline's call that a request may not set, because the command or server sets them itself.
_OWN = ("self", "generator", "output_type", "return_dict", "args", "kwargs")


@dataclass(frozen=True)
class Model:
    """Description of a pipeline, without its weights."""

    name: str  # folder, or repository on the Hub
    pipeline: str  # name of the pipeline's class
    # Parameters of the pipeline's call that a request may set, with their defaults (inspect.Parameter.empty if there
    # is none). For a modular pipeline, inputs of its blocks.
    fields: Mapping[str, Any]
    kind: Kind
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of fields, if they differ from the pipeline's
    annotations: Mapping[str, Any] = field(default_factory=dict)  # types of the parameters, as far as they are known
    modular: bool = False
    takes_loras: bool = True
    required: tuple[str, ...] = ()  # image fields that every request must set

    @property
    def images(self) -> tuple[str, ...]:
        """Names of the fields that take one or several images."""
        return tuple(name for name in self.fields if name.endswith("image") or name in _IMAGES)


def can_be_given(name: str) -> bool:
    """Whether a request may set the parameter ``name`` of a pipeline's call.

    False for tensors (embeddings, masks and latents), for callbacks, and for what the command or server sets itself.
    """
    tensor = name.endswith(("_embeds", "_mask")) or "latents" in name
    return name not in _OWN and not tensor and not name.startswith("callback")


def unknown_field(model: Model, name: str) -> str:
    """Return the error message for an unknown field. It suggests the most similar known field, or lists all."""
    close = difflib.get_close_matches(name, [*model.fields, "seed", "size", "steps"], n=1)
    hint = f"Did you mean {close[0]}?" if close else f"It takes seed, size, steps, {', '.join(model.fields)}."
    return f"{model.pipeline} has no field {name!r} here. {hint}"
