"""Selection of a pipeline class for a model, from its files and the sources of diffusers. Imports no torch.

`cli/checks.py` and `cli/plan.py` call it for the errors before torch is imported, and `build.py` again to
find the class. The files are read in `model_files.py`, the sources in `pipeline_source.py`; the class is
loaded in `classical.py`. Tests: tests/fleet/test_model_files.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from para_core.fleet.model_files import Index, home_of, is_single_file, kind_of_file, read_config, read_index
from para_core.fleet.pipeline_source import (
    CONTROLNET,
    PipelineSource,
    find_advisable_pipelines,
    find_fitting_pipelines,
    read_pipeline,
    require_pipeline,
)


@dataclass(frozen=True)
class Selection:
    """A model whose index was found, and the pipeline class that will load it."""

    home: str  # folder or repository with the configs
    index: Index
    pipeline: str  # name of the class
    # None for a modular pipeline, or a class that the installed diffusers lacks.
    source: PipelineSource | None

    @property
    def needs_prompt(self) -> bool:
        """Whether the call of the class is known to take a prompt."""
        return self.source is not None and "prompt" in self.source.call

    @property
    def is_other_class(self) -> bool:
        """Whether the class is another one than the index names."""
        return self.pipeline != self.index.pipeline


def select_pipeline(
    model: str, *, pipeline: str | None = None, config: str | None = None, controlnet: Sequence[str] = ()
) -> Selection:
    """Find the files of ``model``, and return the class that loads them: ``pipeline``, or that of the index
    if None.

    Args:
        model: Folder, repository on the Hub, or single file.
        pipeline: Name of a classical pipeline class of diffusers that takes the same weights.
        config: Folder or repository with the configs of a single file.
        controlnet: Folders or repositories of ControlNets for the class.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: The class, the configs or a ControlNet do not fit.
    """
    home = home_of(model, config)
    subject = "config"
    if config is None:
        subject = "model"
    index = read_index(home, subject=subject)
    if index.modular:
        for name, value in (
            ("pipeline", pipeline),
            ("controlnet", next(iter(controlnet), None)),
            ("config", config),
        ):
            if value is not None:
                raise ValueError(
                    f"{name} is {value!r}, and {home!r} is a modular pipeline, which loads as the class of its "
                    f"index, with its own components. Leave --{name} out, or use a classical pipeline."
                )
        return Selection(home, index, index.pipeline, None)
    if is_single_file(model):
        kind_of_file(model)  # raises if the file is damaged
    chosen = pipeline or index.pipeline
    source = read_pipeline(chosen)
    extra_components: tuple[str, ...] = ()
    if controlnet:
        extra_components = (CONTROLNET,)
    if pipeline is not None and (source is None or pipeline != index.pipeline):
        source = require_pipeline(pipeline, home, index.content, extra_components)
    if controlnet and source is not None:
        _require_controlnets(controlnet, source, index)
    return Selection(home, index, chosen, source)


def _require_controlnets(names: Sequence[str], source: PipelineSource, index: Index) -> None:
    """Raise ValueError if a ControlNet is not of a class that the pipeline takes, or it takes only one.

    Raise FileNotFoundError if one has no config.
    """
    classes = [str(read_config(name, subject="controlnet").get("_class_name")) for name in names]
    if not source.single_controlnets:
        raise ValueError(
            f"controlnet is {names[0]!r}, and {source.name} takes no ControlNet; expected --pipeline with one of "
            f"{', '.join(_classes_with(classes[0], index)) or 'the classes that take a ' + classes[0]}."
        )
    for name, cls in zip(names, classes, strict=True):
        if cls not in source.single_controlnets:
            raise ValueError(
                f"controlnet is {name!r}, a {cls}; expected a {' or '.join(source.single_controlnets)}, which "
                f"{source.name} takes."
            )
    if len(names) > 1 and not source.takes_several_controlnets:
        raise ValueError(
            f"controlnet has {len(names)} values, and {source.name} takes one ControlNet; expected one."
        )


def _classes_with(controlnet: str, index: Index) -> list[str]:
    """Return the classes for the weights of the index that take a ControlNet of the class ``controlnet``."""
    return [
        source.name
        for source in find_fitting_pipelines(index.content)
        if controlnet in source.single_controlnets
    ]


def pipelines_for(home: str, *, images: bool) -> list[str]:
    """Return the classes for the weights of a folder or repository that take images, or else that need none.

    Empty for a modular pipeline. Classes that need a ControlNet or weights of their own are left out.
    """
    index = read_index(home)
    if index.modular:
        return []
    fitting = [
        source for source in find_advisable_pipelines(index.content) if CONTROLNET not in source.components
    ]
    if images:
        return [source.name for source in fitting if source.takes_images]
    return [source.name for source in fitting if source.is_from_text]
