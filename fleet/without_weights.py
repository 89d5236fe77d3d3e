"""Pipelines without weights: read their classes and configs, and make components on the meta device from these.

`cli/generation.py` and `cli/plan.py` predict with :func:`without_weights`; ``find_model`` of `build.py` calls
the rest. Tests: tests/fleet/test_model_files.py, tests/fleet/test_modular.py, tests/fleet/test_work.py.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from para_core.fleet.model_files import read_config, read_index
from para_core.fleet.modular import open_modular
from para_core.fleet.pipeline_info import PipelineInfo
from para_core.fleet.pipeline_source import CONTROLNET, DENOISERS, class_in, multiple_of_sides, read_pipeline

logger = logging.getLogger(__name__)


@contextmanager
def on_meta(dtype: torch.dtype = torch.bfloat16) -> Iterator[None]:
    """Inside this context, create modules on the meta device, in ``dtype``, and record nothing for a backward.

    The default dtype of torch is that of the whole process, so no other thread may create tensors meanwhile:
    the commands call this before they start ranks or a server.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"), torch.no_grad():
            yield
    finally:
        torch.set_default_dtype(before)


def without_weights(model: PipelineInfo, dtype: torch.dtype) -> Any:
    """Return the pipeline of ``model`` with components on the meta device, made from their configs in
    ``dtype``.

    Tokenizers, image processors, and components of other libraries than diffusers and transformers are None.
    Making a component from its config may raise anything.
    """
    import diffusers

    if model.modular:
        pipe = open_modular(model.name, trust_remote_code=model.trusted)
        for part in pipe.pretrained_component_names:
            spec = pipe.get_component_spec(part)
            repository, cls = spec.pretrained_model_name_or_path, spec.type_hint
            if repository is None or cls is None:
                continue
            library = cls.__module__.split(".")[0]
            component = _make_component(dtype, repository, spec.subfolder or "", library, cls.__name__)
            if component is not None:
                pipe.register_components(**{part: component})
        return pipe
    home = model.config or model.name
    cls = getattr(diffusers, model.pipeline)
    parameters = inspect.signature(cls.__init__).parameters
    components: dict[str, Any] = {}
    index = read_index(home).content
    for name, value in index.items():
        if name not in parameters:
            continue
        components[name] = value
        listed = class_in(index, name)
        if listed is not None:
            components[name] = _make_component(dtype, home, name, value[0], listed)
        elif value == [None, None]:
            # The folder lacks this optional component.
            components[name] = None
    # select_pipeline has refused a ControlNet of a class that the pipeline does not name, so each class exists.
    nets = [
        _make_component(dtype, name, "", "diffusers", str(read_config(name).get("_class_name")))
        for name in model.controlnet
    ]
    if len(nets) == 1:
        components[CONTROLNET] = nets[0]
    elif nets:
        components[CONTROLNET] = nets
    return cls(**{**_without_components(cls), **components})


def _without_components(cls: Any) -> dict[str, None]:
    """Return None for each argument that ``cls`` requires: some of them are optional components."""
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    required = [
        parameter
        for parameter in parameters
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    return {parameter.name: None for parameter in required}


def check_components_exist(name: str, index: Mapping[str, Any]) -> None:
    """Raise ValueError if the index of the folder of model ``name`` has a class that this diffusers lacks."""
    import diffusers

    for component, entry in index.items():
        cls = class_in(index, component)
        if cls is not None and entry[0] == "diffusers" and not hasattr(diffusers, cls):
            raise ValueError(
                f"model {name!r}: its {component} is a {cls}, which diffusers {diffusers.__version__} does not have. "
                "Install the version of diffusers with which it was published, or a later one."
            )


def component_classes(index: Mapping[str, Any]) -> dict[str, Any]:
    """Return the classes of diffusers' components in the index of a folder, as far as this diffusers has
    them.
    """
    import diffusers

    names = {name: class_in(index, name) for name, value in index.items() if isinstance(value, list)}
    classes = {name: getattr(diffusers, cls, None) for name, cls in names.items() if cls is not None}
    return {name: cls for name, cls in classes.items() if cls is not None}


def multiple_of_model(model: PipelineInfo) -> int:
    """Return the number that must divide height and width of a result of ``model``; 1 if its class states
    none.

    Only the autoencoder is made, on the meta device: a class computes the number from its config, and from
    that of the transformer.
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
            listed = class_in(index, name)
            if name not in source.components or listed is None:
                continue
            if "vae" in name:
                components[name] = _make_component(torch.float32, home, name, entry[0], listed)
            elif name in DENOISERS:
                components[name] = ConfigOnly(SimpleNamespace(**read_config(home, name)))
        return multiple_of_sides(source, cls(**components))
    except Exception as error:
        # A class may need other components to be made. Most of those state the number as a constant. A config
        # that cannot be read is no error here either, because an index alone must be enough to find a model
        # that will be refused. Loading the pipeline names the config, and the pipeline itself refuses sizes.
        logger.debug("%s is not made without weights: %s", model.pipeline, error)
        return multiple_of_sides(source, None)


@dataclass(frozen=True)
class ConfigOnly:
    """Stand-in for a component of a pipeline, with its config alone."""

    config: Any


def _make_component(dtype: torch.dtype, model: str, name: str, library: str, cls: str) -> Any:
    """Return the component in subfolder ``name`` of ``model``, its weights on the meta device.

    None if ``cls`` is neither a class of diffusers, which may be a model or a scheduler, nor a module of
    transformers.
    """
    import diffusers
    import transformers

    kind: Any = None
    if library == "diffusers":
        kind = getattr(diffusers, cls, None)
    elif library == "transformers":
        kind = getattr(transformers, cls, None)
    if kind is None:
        return None
    if library == "diffusers":
        config, make = kind.load_config(model, subfolder=name or None), kind.from_config
    elif issubclass(kind, torch.nn.Module):
        config, make = kind.config_class.from_pretrained(model, subfolder=name), kind
    else:
        return None
    with on_meta(dtype):
        return make(config)
