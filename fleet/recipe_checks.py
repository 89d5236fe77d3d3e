"""Checks that commands run on a recipe before they load anything."""

from __future__ import annotations

from pathlib import Path

from para_core.fleet.models import Model
from para_core.fleet.recipe import Recipe, read_lora


def require_loras(recipe: Recipe) -> None:
    """Raise FileNotFoundError if a LoRA of the recipe is a path that does not exist.

    A LoRA that may be a Hub repository, ``owner/name``, is not checked.
    """
    for text in recipe.lora:
        name, _ = read_lora(text)
        path = Path(name)
        is_file = path.suffix in (".safetensors", ".bin", ".pt") or path.is_absolute() or len(path.parts) != 2
        if is_file and not path.exists():
            raise FileNotFoundError(
                f"lora {name!r} does not exist here; expected a file, a folder, or owner/name of the Hub."
            )


def refuse_options(model: Model, recipe: Recipe) -> None:
    """Raise ValueError if the pipeline of ``model`` lacks a method that a LoRA or ``offload="model"`` needs."""
    if recipe.lora and not model.takes_loras:
        raise ValueError(f"lora is {recipe.lora[0]!r}, but {model.pipeline} loads no LoRAs. Leave --lora out.")
    if recipe.offload == "model" and model.modular:
        raise ValueError(
            f"offload is 'model', but {model.pipeline} is a modular pipeline, and diffusers moves components as a "
            "whole for classical ones only. Use --offload blocks, or --text-encoders offload."
        )
