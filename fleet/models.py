"""Properties of a model that are known without its weights: its location, its pipeline, and the call's fields."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["image", "video"]
_IMAGES = ("images", "input_images", "reference_images", "memory_images", "gligen_images")
# Parameters that JSON cannot express or that the caller may not set.
_OWN = ("self", "generator", "output_type", "return_dict", "args", "kwargs")


@dataclass(frozen=True)
class Model:
    """A pipeline whose weights are not loaded.

    Args:
        name (`str`): Folder, or repository on the Hub.
        fields (`Mapping[str, Any]`): Parameters of its call with their defaults (``inspect.Parameter.empty`` if none).
        defaults (`Mapping[str, Any]`): Values of fields that a request omits.
        annotations (`Mapping[str, Any]`): Types of the parameters, as far as they are known.
        modular (`bool`): Whether it is a modular pipeline, whose fields are the inputs of its blocks.
        takes_loras (`bool`): Whether its class loads LoRAs.
        required (`tuple[str, ...]`): Image fields without which nothing is generated.
    """

    name: str
    pipeline: str
    fields: Mapping[str, Any]
    kind: Kind
    defaults: Mapping[str, Any] = field(default_factory=dict)
    annotations: Mapping[str, Any] = field(default_factory=dict)
    modular: bool = False
    takes_loras: bool = True
    required: tuple[str, ...] = ()

    @property
    def images(self) -> tuple[str, ...]:
        """Fields that take one or several images."""
        return tuple(name for name in self.fields if name.endswith("image") or name in _IMAGES)


def can_be_given(name: str) -> bool:
    """Whether a request may set the parameter of this name."""
    tensor = name.endswith(("_embeds", "_mask")) or "latents" in name
    return name not in _OWN and not tensor and not name.startswith("callback")


def unknown_field(model: Model, name: str) -> str:
    """Return the message of an unknown field, with the most similar known one."""
    close = difflib.get_close_matches(name, [*model.fields, "seed", "size", "steps"], n=1)
    hint = f"Did you mean {close[0]}?" if close else f"It takes seed, size, steps, {', '.join(model.fields)}."
    return f"{model.pipeline} has no field {name!r} here. {hint}"
