"""Predictions for a pipeline on ranks before it generates: the mesh sizes, and how many pixels fit into memory."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from para_core.adapters.planner.count import on_meta
from para_core.adapters.planner.default_mesh import MeshChoice, choose_mesh, fastest_mesh
from para_core.adapters.planner.inputs import default_guidance, number_of_heads
from para_core.adapters.planner.plan_mesh import workload
from para_core.adapters.registry import transformers_of
from para_core.distributed.mesh_shape import mesh_sizes
from para_core.fleet.model_files import GGUF, read_config, read_index
from para_core.fleet.modular import open_modular
from para_core.fleet.pipeline_info import Model
from para_core.fleet.pipeline_source import CONTROLNET, DENOISERS, class_in, multiple_of_sides, read_pipeline
from para_core.fleet.recipe import Recipe
from para_core.option_values import num_resident
from para_core.planner.prediction import RESERVED, memory_of
from para_core.planner.traffic import MeshShape
from para_core.planner.weights import Placement

logger = logging.getLogger(__name__)

# Memory is predicted for square results with these sides, in pixels. The two predictions give the bytes per pixel, as
# the slope of a line. Every model can shard latents of these sizes.
_SIDES = (512, 1024)


@dataclass(frozen=True)
class Memory:
    """Predicted memory of one rank, as a linear function of the pixels of a result.

    >>> Memory(room=24e9, fixed=20e9, per_pixel=1000.0).pixels
    4000000
    """

    room: float  # bytes that the rank may hold
    fixed: float  # bytes of weights and of activations of text tokens
    per_pixel: float  # bytes of activations per pixel of an image or frame

    @property
    def pixels(self) -> int:
        """Largest number of pixels that fits, summed over all images or frames."""
        return int((self.room - self.fixed) / self.per_pixel)

    def bytes_of(self, pixels: int) -> float:
        """Return the bytes that a rank needs for a result of ``pixels`` pixels."""
        return self.fixed + pixels * self.per_pixel

    def prediction(self, pixels: int) -> str:
        """Return what is predicted for a result of ``pixels`` pixels, as a part of a sentence."""
        needed = self.bytes_of(pixels) / 1e9
        return f"predicted to take {needed:.3g} GB of each rank, which may hold {self.room / 1e9:.3g} GB"

    def problem(self, pixels: int) -> str | None:
        """Return an error message if a result of ``pixels`` pixels does not fit, else None."""
        if pixels <= self.pixels:
            return None
        return f"{pixels} pixels in total are {self.prediction(pixels)}: at most {self.pixels} pixels fit."


def bytes_of_device(shares: int | None = None) -> float:
    """Return the bytes that a rank may hold: the memory of the current GPU, less a reserve.

    Without a GPU, return the memory of the machine divided by ``shares``, by default the number of CPU cores.
    """
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory - RESERVED
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (shares or os.cpu_count() or 1)


def predict_memory(pipe: Any, recipe: Recipe, mesh: dict[str, int], room: float) -> Memory | None:
    """Predict the memory of weights and transformer activations on a rank, which may hold ``room`` bytes.

    Activations of the VAE are not included. ``mesh`` has the sizes of the mesh dims by name. Return None if the planner
    does not know the pipeline, if components take turns on the device (``offload="model"``), or if not even the weights
    are predicted to fit.
    """
    if recipe.offload == "model":
        return None
    sizes: dict[str, Any] = {**mesh, "fsdp": recipe.weights == "fsdp"}
    shape = MeshShape(**sizes)
    try:
        (less, few), (more, many) = (_bytes_at(pipe, recipe, shape, side) for side in _SIDES)
    except Exception as error:
        # The planner may raise anything, because the pipeline's class or config may be the user's own. A missing
        # prediction is no error.
        logger.debug("no memory is predicted for %s: %s", type(pipe).__name__, error)
        return None
    per_pixel = (more - less) / (many - few)
    memory = Memory(room, less - per_pixel * few, per_pixel)
    return memory if per_pixel > 0 and memory.pixels > 0 else None


def _bytes_at(pipe: Any, recipe: Recipe, shape: MeshShape, side: int) -> tuple[float, int]:
    """Return ``(bytes of a rank, pixels of all frames)`` for square frames of ``side``, in the default number."""
    work = workload(pipe, height=side, width=side, ends=False)
    resident: int | None = None
    if recipe.offload == "blocks":
        resident = num_resident(recipe.resident_blocks)
    # The weights of a GGUF file have at most 8 bits.
    quantize = recipe.quantize or ("int8" if recipe.model.endswith(GGUF) else None)
    placement = Placement(recipe.encoders_placement, resident, quantize, recipe.placement_of_vae)
    return memory_of(shape, work, placement), side * side * work.frames


def without_weights(model: Model, dtype: torch.dtype) -> Any:
    """Return the pipeline of ``model`` with components on the meta device, made from their configs in ``dtype``.

    Tokenizers, image processors, and components of other libraries than diffusers and transformers are None. Making a
    component from its config may raise anything.
    """
    import diffusers

    if model.modular:
        pipe = open_modular(model.name)
        for part in pipe.pretrained_component_names:
            spec = pipe.get_component_spec(part)
            repository, cls = spec.pretrained_model_name_or_path, spec.type_hint
            if repository is None or cls is None:
                continue
            library = cls.__module__.split(".")[0]
            component = _component(dtype, repository, spec.subfolder or "", library, cls.__name__)
            if component is not None:
                pipe.register_components(**{part: component})
        return pipe
    home = model.config or model.name
    cls = getattr(diffusers, model.pipeline)
    components = {
        name: _component(dtype, home, name, *value) if isinstance(value, list) and len(value) == 2 else value
        for name, value in read_index(home).content.items()
        if name in inspect.signature(cls.__init__).parameters
    }
    nets = [_component(dtype, name, "", "diffusers", _class_of_config(name)) for name in model.controlnet]
    if nets:
        components[CONTROLNET] = nets[0] if len(nets) == 1 else nets
    return cls(**{**_without_components(cls), **components})


def _without_components(cls: Any) -> dict[str, None]:
    """Return None for each argument that ``cls`` requires: some of them are optional components."""
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    return {x.name: None for x in parameters if x.default is x.empty and x.kind is x.POSITIONAL_OR_KEYWORD}


def component_classes(index: Mapping[str, Any]) -> dict[str, Any]:
    """Return the classes of diffusers' components in the index of a folder, as far as this diffusers has them."""
    import diffusers

    names = {name: class_in(index, name) for name, value in index.items() if isinstance(value, list)}
    classes = {name: getattr(diffusers, cls, None) for name, cls in names.items() if cls is not None}
    return {name: cls for name, cls in classes.items() if cls is not None}


def multiple_of_model(model: Model) -> int:
    """Return the number that must divide height and width of a result of ``model``; 1 if its class states none.

    Only the autoencoder is made, on the meta device: a class computes the number from its config, and from that of the
    transformer.
    """
    import diffusers

    home = model.config or model.name
    source, cls = read_pipeline(model.pipeline), getattr(diffusers, model.pipeline)
    if source is None or not source.divisors:
        return 1
    index = read_index(home).content
    components: dict[str, Any] = {**_without_components(cls)}
    try:
        for name, entry in index.items():
            if name not in source.components or class_in(index, name) is None:
                continue
            if "vae" in name:
                components[name] = _component(torch.float32, home, name, *entry)
            elif name in DENOISERS:
                components[name] = ConfigOnly(SimpleNamespace(**read_config(home, name)))
        return multiple_of_sides(source, cls(**components))
    except Exception as error:
        # A class may need other components to be made. Most of those state the number as a constant.
        logger.debug("%s is not made without weights: %s", model.pipeline, error)
        return multiple_of_sides(source, None)


@dataclass(frozen=True)
class ConfigOnly:
    """Stand-in for a component of a pipeline, with its config alone."""

    config: Any


def _class_of_config(name: str) -> str:
    return str(read_config(name).get("_class_name"))


def _component(dtype: torch.dtype, model: str, name: str, library: str | None, cls: str | None) -> Any:
    import diffusers
    import transformers

    kind: Any = getattr({"diffusers": diffusers, "transformers": transformers}.get(library or ""), cls or "", None)
    if library == "diffusers" and kind is not None:
        config, make = kind.load_config(model, subfolder=name or None), kind.from_config
    elif kind is not None and issubclass(kind, torch.nn.Module):
        config, make = kind.config_class.from_pretrained(model, subfolder=name), kind
    else:
        return None
    with on_meta(dtype):
        return make(config)


def foresee_mesh(pipe: Any, recipe: Recipe, ranks: int) -> dict[str, int]:
    """Return the mesh sizes by dim that :func:`~para_core.fleet.build.build` will choose for ``ranks`` ranks.

    ``pipe`` may lack weights. It is not used if the recipe states a mesh (then see :func:`mesh_of_recipe`) or ``ranks``
    is 1.
    """
    if recipe.mesh and ranks > 1:
        return mesh_of_recipe(recipe, ranks)
    if ranks == 1:
        return {"batch": 1, "ring": 1, "ulysses": 1}
    choice = fastest_mesh(pipe, ranks) if torch.cuda.is_available() else None
    if not isinstance(choice, MeshChoice):
        transformer = next(iter(transformers_of(pipe).values()))
        choice = choose_mesh(ranks, number_of_heads(transformer), default_guidance(pipe, transformer))
    return {"batch": choice.batch, "ring": choice.ring, "ulysses": choice.ulysses}


def mesh_of_recipe(recipe: Recipe, ranks: int) -> dict[str, int]:
    """Return the mesh sizes by dim for ``ranks`` ranks within the largest sizes that the recipe states.

    Raise ValueError if ``ranks`` exceeds the product of these sizes.
    """
    return mesh_sizes(ranks, dict(recipe.mesh))
