"""Checks of a command's options before torch is imported, and then the description of the model by its class.

``generate``, ``serve`` and ``bench`` call :func:`validate`, the methods of its :class:`Checked`, and after
they have imported torch :func:`describe_model`. Most checks themselves stand in `fleet/recipe.py`,
`fleet/selection.py` and `fleet/request.py`. Tests: tests/cli/test_refusals.py.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import typer

from para_core.cli.options import RecipeOptions
from para_core.cli.torchrun import read_stated_ranks
from para_core.distributed.mesh_shape import mesh_sizes, parse_mesh_sizes

if TYPE_CHECKING:
    from para_core.attention.schedule import AttentionSchedule
    from para_core.fleet.pipeline_info import PipelineInfo
    from para_core.fleet.recipe import Recipe
    from para_core.fleet.selection import Selection


@dataclass(frozen=True)
class Checked:
    """Options of a command that were validated without torch: where the model is, and how it would be loaded."""

    # With the tiny FLUX as model if none was named. Its pipeline is None for the class that the index names.
    recipe: Recipe
    selection: Selection
    # By the source of the class, without types of fields. None for a modular pipeline or a class of unknown
    # source.
    draft: PipelineInfo | None

    def require_request(self, fields: dict[str, Any], seed: int, *, several: bool = False) -> None:
        """Validate the fields of a request as far as they can be without the class itself.

        ``several`` says that other requests complete the fields, so that prompt and images may be missing.

        Raises:
            typer.BadParameter: The prompt is missing.
            ValueError, OSError: A field is invalid.
        """
        from para_core.fleet.image_files import read_image_file
        from para_core.fleet.request import make_request

        if self.draft is None:
            return
        if "prompt" in self.draft.fields and fields.get("prompt") is None:
            if not several:
                raise typer.BadParameter("there is no prompt; expected --prompt TEXT or --prompts FILE.")
            fields = {**fields, "prompt": "a"}
        if not several:
            require_images(self.draft, fields)
        self._require_image_fields(fields, self.draft)
        draft = replace(self.draft, required=())
        make_request(fields, draft, seed=seed, read_image=read_image_file)

    def _require_image_fields(self, fields: dict[str, Any], draft: PipelineInfo) -> None:
        """Raise typer.BadParameter if the class takes no such image, while others for the same weights do."""
        from para_core.fleet.pipeline_source import CONTROLNET, find_advisable_pipelines

        for name in ("image", "mask_image", "control_image"):
            if name not in fields or name in draft.fields:
                continue
            content = self.selection.index.content
            sources = [source for source in find_advisable_pipelines(content) if name in source.call]
            if name != "control_image":
                sources = [source for source in sources if CONTROLNET not in source.components]
            classes = [source.name for source in sources]
            if classes:
                way = f"--set {name}"
                if name == "image":
                    way = "--image"
                raise typer.BadParameter(
                    f"{way}: {self.selection.pipeline} takes none; expected --pipeline with one of "
                    f"{', '.join(classes)}."
                )

    def require_ranks(self, requested: int | None, replicas: int) -> None:
        """Check the number of ranks, unless it depends on the GPUs, which only torch can count.

        Raises:
            ValueError: The mesh does not fit the ranks.
            typer.BadParameter: A number is below 1, or torchrun has started another number of ranks.
        """
        ranks = read_stated_ranks(requested, replicas)
        if ranks is not None:
            mesh_sizes(ranks, dict(self.recipe.mesh))

    def require_format(self, format_: str | None) -> None:
        """Check the format of the results, as far as the class is known.

        Raises:
            ValueError: The results of the model cannot be files of this format.
        """
        from para_core.fleet.outputs import choose_format

        if self.draft is not None:
            choose_format(self.draft, format_)


def validate(model: str | None, options: RecipeOptions, *, debug: bool = False) -> Checked:
    """Validate how a command would load ``model``. Imports no torch, so that a wrong option is answered at
    once.

    Unless ``debug``, retries of downloads are not logged.

    Raises:
        FileNotFoundError: The model, a ControlNet or a LoRA does not exist.
        ModuleNotFoundError: An option needs a package that is not installed.
        ValueError, typer.BadParameter: An option is invalid.
    """
    from para_core.fleet.pipeline_info import TINY_FLUX_FIELDS, describe_call, find_tiny_flux
    from para_core.fleet.recipe import Recipe, require_loras
    from para_core.fleet.selection import select_pipeline

    values = dict(vars(options))
    schedule = _read_schedule(values.pop("attention_schedule"), values["backend"])
    if schedule is not None:
        values["backend"] = schedule
    values["mesh"] = parse_mesh_sizes(values["mesh"])
    values["config"] = next(iter(values["config"] or ()), None)
    for name in ("controlnet", "lora"):
        values[name] = tuple(values.get(name) or ())
    if values["cache"] is not None:
        with suppress(ValueError):  # Recipe refuses other texts than "default".
            values["cache"] = float(values["cache"])
    if not debug:
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    recipe = Recipe(model or "", **values)
    require_loras(recipe)
    _require_packages(recipe)
    defaults: Mapping[str, Any] = {}
    if model is None:
        recipe, defaults = replace(recipe, model=str(find_tiny_flux())), TINY_FLUX_FIELDS
    selection = select_pipeline(
        recipe.model, pipeline=recipe.pipeline, config=recipe.config, controlnet=recipe.controlnet
    )
    draft = None
    if selection.source is not None:
        draft = describe_call(recipe.model, selection.pipeline, selection.source.call, defaults)
    # The class that the index names gives the same results, whether it was named or not.
    recipe = replace(recipe, pipeline=None)
    if selection.is_other_class:
        recipe = replace(recipe, pipeline=selection.pipeline)
    return Checked(recipe, selection, draft)


def _require_packages(recipe: Recipe) -> None:
    """Raise ModuleNotFoundError if an option needs a package that is not installed."""
    needed = {
        "peft": ("--lora", bool(recipe.lora)),
        "torchao": ("--quantize", recipe.quantize is not None),
        "gguf": ("a GGUF file", recipe.model.endswith(".gguf")),
    }
    for package, (user, is_needed) in needed.items():
        if is_needed:
            require_package(package, user)


def require_package(package: str, user: str) -> None:
    """Check that ``package``, which ``user`` needs, is installed.

    Raises:
        ModuleNotFoundError: The package is not installed.
    """
    if find_spec(package) is None:
        raise ModuleNotFoundError(f"{user} needs {package}", name=package)


def describe_model(model: str | None, checked: Checked) -> PipelineInfo:
    """Return the description of ``model``, which :func:`validate` accepted, by its class. Imports torch and
    diffusers.

    Raises:
        ImportError: A library is not installed.
        ValueError, TypeError: The pipeline cannot run, or lacks what an option needs.
    """
    from para_core.attention.backends.added import check_library
    from para_core.fleet.build import find_model
    from para_core.fleet.recipe import check_options_of_model

    recipe = checked.recipe
    for backend in recipe.backends:
        check_library(backend)
    description = find_model(
        model,
        pipeline=recipe.pipeline,
        config=recipe.config,
        controlnet=recipe.controlnet,
        trust_remote_code=recipe.trust_remote_code,
    )
    check_options_of_model(description, recipe)
    return description


def require_images(model: PipelineInfo, fields: dict[str, Any]) -> None:
    """Check that ``fields`` have the images that every request of the pipeline needs.

    Raises:
        typer.BadParameter: An image is missing.
    """
    for name in model.required:
        if fields.get(name) is None:
            way = f"--set {name}=FILE"
            if name == "image":
                way = "--image FILE"
            raise typer.BadParameter(f"{model.pipeline} needs {way}.")


def _read_schedule(text: str | None, exact: str | None) -> AttentionSchedule | None:
    """Parse ``text``, such as ``"sage:4:4"`` or ``"keys=0.5:4:4"``. ``exact`` is the backend of other steps."""
    if text is None:
        return None
    from para_core.attention.features import OPTIONS_OF_STEPS, load
    from para_core.attention.schedule import AttentionSchedule

    middle, *steps = text.split(":")
    if len(steps) not in (0, 2) or not all(step.isdecimal() for step in steps):
        raise typer.BadParameter(
            f"--attention-schedule {text}: expected a backend or a share of the keys, or either with the numbers of "
            "first and last steps that stay exact, such as sage:4:4 or keys=0.5:4:4."
        )
    values: dict[str, Any] = {"exact": exact}
    values |= zip(("first", "last"), map(int, steps), strict=False)
    try:
        values["middle"] = middle
        word, _, number = middle.partition("=")
        if number and word in OPTIONS_OF_STEPS:
            values["middle"] = load(OPTIONS_OF_STEPS[word])(float(number))
        return AttentionSchedule(**values)
    except ValueError as error:
        arguments = f"--attention-schedule {text}"
        if exact is not None:
            arguments += f" with --backend {exact}"
        raise typer.BadParameter(f"{arguments}: {error}") from None
