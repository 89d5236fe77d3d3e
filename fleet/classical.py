"""Loading of classical diffusers pipelines: another class for the same weights, ControlNets, and single
files.

`build.py` calls it on each rank, and puts the pipeline on the ranks; the commands call only
:func:`check_ranks`, before any weight is read. Modular pipelines are loaded in `modular.py`, sharded weights
in :func:`para_core.adapters.from_pretrained_sharded`. The commands validate the names in the recipe
before, by `selection.py`. Tests: tests/fleet/test_model_files.py.
"""

from __future__ import annotations

from typing import Any

import torch

from para_core.adapters.weights.features import require_quantizer
from para_core.fleet.model_files import (
    ENCODER_WEIGHTS,
    GGUF,
    is_single_file,
    kind_of_file,
    read_config,
    read_index,
    weight_names,
)
from para_core.fleet.pipeline_info import PipelineInfo
from para_core.fleet.pipeline_source import CONTROLNET, DENOISERS, class_in
from para_core.fleet.recipe import Recipe
from para_core.option_values import Quantize


def check_ranks(model: PipelineInfo, ranks: int) -> None:
    """Check that the class of ``model`` runs on ``ranks`` ranks, before it is loaded.

    Raises:
        TypeError: The class runs on one rank only, and ``ranks`` is larger.
    """
    import diffusers

    if ranks == 1 or model.modular:
        return
    transformer = class_in(read_index(model.config or model.name).content, "transformer")
    if transformer == "SD3Transformer2DModel" and hasattr(
        getattr(diffusers, model.pipeline), "set_pag_applied_layers"
    ):
        raise TypeError(
            f"ranks is {ranks}, and {model.pipeline} runs on one: its perturbed attention masks image tokens by their "
            "number, which is that of one rank. Use --ranks 1, or a class without perturbed attention."
        )


def pipeline_class(recipe: Recipe) -> Any:
    """Return the class that loads the pipeline of ``recipe``: its own, or DiffusionPipeline, which reads the
    index.
    """
    import diffusers

    if recipe.pipeline is None:
        return diffusers.DiffusionPipeline
    return getattr(diffusers, recipe.pipeline)


def load_controlnets(recipe: Recipe, dtype: torch.dtype) -> dict[str, Any]:
    """Load the ControlNets of ``recipe``, and return them as a component of the pipeline; empty if it has
    none.

    Several become a list, from which the pipeline makes one module. ``dtype`` is that of their weights.
    """
    import diffusers

    nets: list[Any] = []
    for name in recipe.controlnet:
        cls = getattr(diffusers, str(read_config(name).get("_class_name")))
        nets.append(cls.from_pretrained(name, dtype=dtype))
    if not nets:
        return {}
    if len(nets) == 1:
        return {CONTROLNET: nets[0]}
    return {CONTROLNET: nets}


def load_classical(recipe: Recipe, *, dtype: torch.dtype, quantize: Quantize | None = None) -> Any:
    """Load the pipeline of ``recipe`` with all its weights. With ``quantize``, torchao quantizes its
    transformers.

    Raises what ``from_pretrained`` and ``from_single_file`` of diffusers raise.
    """
    cls = pipeline_class(recipe)
    parts = load_controlnets(recipe, dtype)
    if not is_single_file(recipe.model):
        config: dict[str, Any] = {}
        if quantize is not None:
            config["quantization_config"] = require_quantizer().loading_config(quantize)
        return cls.from_pretrained(recipe.model, dtype=dtype, **parts, **config)
    if kind_of_file(recipe.model) == "pipeline":
        pipe = _load_pipeline_file(recipe, cls, dtype, parts)
    else:
        pipe = cls.from_pretrained(recipe.config, dtype=dtype, **_load_denoiser_file(recipe, dtype), **parts)
    if quantize is not None:
        require_quantizer().quantize(pipe, quantize)
    return pipe


def _load_pipeline_file(recipe: Recipe, cls: Any, dtype: torch.dtype, parts: dict[str, Any]) -> Any:
    """Load a file with the weights of a whole pipeline, as the class of the configs, and make ``cls`` from
    it.

    ``parts`` are further components of the pipeline: those of :func:`load_controlnets`. ``recipe.config`` is
    set: :func:`~para_core.fleet.model_files.home_of` refuses a single file without it.
    """
    import diffusers
    from diffusers.loaders.single_file_utils import SingleFileComponentError

    home = recipe.config or ""
    own_class = getattr(diffusers, read_index(home).pipeline)
    if not hasattr(own_class, "from_single_file"):
        raise ValueError(
            f"model is {recipe.model!r}, a file with a whole pipeline, and {own_class.__name__} of {home!r} loads no "
            "such files. Use the folder or repository."
        )
    try:
        encoders = _load_other_encoders(recipe.model, home, dtype)
        pipe = own_class.from_single_file(recipe.model, config=home, dtype=dtype, **encoders)
    except SingleFileComponentError as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"model is {recipe.model!r}, and lacks weights of {own_class.__name__}: {reason} Use the folder or "
            "repository of the model."
        ) from error
    # Not every class can read single files, but each can be made from the components of another.
    if recipe.pipeline is None and not parts:
        return pipe
    return cls.from_pipe(pipe, dtype=dtype, **parts)


def _load_other_encoders(file: str, home: str, dtype: torch.dtype) -> dict[str, Any]:
    """Load the text and image encoders that diffusers cannot read from a single file, from its configs'
    folder.

    diffusers reads encoders of the families of CLIP and T5, if the file has their weights: these are left
    out here. ``home`` is the folder or repository with the configs.
    """
    import transformers

    names = weight_names(file)
    encoders: dict[str, Any] = {}
    for name, entry in read_index(home).content.items():
        cls = class_in({name: entry}, name)
        if cls is None or entry[0] != "transformers":
            continue
        kind: Any = getattr(transformers, cls)
        if not issubclass(kind, transformers.PreTrainedModel):
            continue
        family = next((family for family in ENCODER_WEIGHTS if cls.startswith(family)), None)
        if family is None or not any(weight.startswith(ENCODER_WEIGHTS[family]) for weight in names):
            encoders[name] = kind.from_pretrained(home, subfolder=name, dtype=dtype)
    return encoders


def _load_denoiser_file(recipe: Recipe, dtype: torch.dtype) -> dict[str, Any]:
    """Load a file with the weights of a transformer or UNet alone, and return it as a component of the
    pipeline: the first of ``DENOISERS`` that the index of the configs has.
    """
    import diffusers

    home = recipe.config or ""
    content = read_index(home).content
    name = next((name for name in DENOISERS if class_in(content, name) is not None), None)
    cls = None
    if name is not None:
        cls = getattr(diffusers, str(class_in(content, name)), None)
    if name is None or not hasattr(cls, "from_single_file"):
        raise ValueError(
            f"model is {recipe.model!r}, a file with a transformer, and diffusers reads no such files for the pipeline "
            f"of {home!r}. Use the folder or repository."
        )
    options: dict[str, Any] = {}
    if recipe.model.endswith(GGUF):
        options["quantization_config"] = diffusers.GGUFQuantizationConfig(compute_dtype=dtype)
    return {name: cls.from_single_file(recipe.model, config=home, subfolder=name, dtype=dtype, **options)}  # type: ignore[union-attr]
