"""Support for diffusers' modular pipelines: describe what they take and generate, load them, and call them.

`build.py` loads and describes them, `without_weights.py` opens them without weights, and `work.py` calls
them. Classical pipelines are loaded in `classical.py`. Tests: tests/fleet/test_modular.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, get_args

import torch

from para_core.adapters.registry import USUAL_NAMES, is_transformer_class
from para_core.adapters.weights.features import require_quantizer
from para_core.fleet.model_files import read_index
from para_core.fleet.pipeline_info import OutputKind, PipelineInfo, can_be_given
from para_core.instance.private_class import original_class
from para_core.instance.record import empty_slot, fill_slot
from para_core.instance.slots import Slot
from para_core.option_values import Quantize
from para_core.progress import report

# Outputs of a modular pipeline that can be written to files. The values are the kind of result, and the
# attribute of a classical pipeline's output that holds it.
_OUTPUT_KINDS: Mapping[str, tuple[OutputKind, str]] = {
    "videos": ("video", "frames"),
    "images": ("image", "images"),
}
# Inputs that one block passes to the next. diffusers lists them as inputs of the pipeline, but requests must
# not set them.
_BETWEEN_BLOCKS = ("batch_size", "dtype", "timesteps", "preprocess_kwargs", "mask_overlay_kwargs")


def is_modular(pipe: Any) -> bool:
    """Whether ``pipe`` is a modular pipeline of diffusers."""
    from diffusers import ModularPipeline

    return isinstance(pipe, ModularPipeline)


def has_modular_index(name: str) -> bool:
    """Whether folder or repository ``name`` has the index file of a modular pipeline, and none of a classical
    one.
    """
    return read_index(name).modular


def open_modular(name: str, *, trust_remote_code: bool = False) -> Any:
    """Return the modular pipeline of a folder or repository, without the components that are loaded from
    files.

    Raises:
        ValueError: This diffusers lacks its class, or its repository has code of blocks that is not trusted.
    """
    import diffusers
    from diffusers import ModularPipeline, ModularPipelineBlocks

    pipeline = str(ModularPipeline.load_config(name).get("_class_name"))
    if not hasattr(diffusers, pipeline):
        raise ValueError(
            f"model {name!r} is for {pipeline}, which diffusers {diffusers.__version__} does not have."
        )
    try:
        has_remote_code = "auto_map" in ModularPipelineBlocks.load_config(name)
    except (OSError, ValueError):
        # A repository without a config of blocks uses those of diffusers.
        has_remote_code = False
    if has_remote_code and not trust_remote_code:
        raise ValueError(
            f"model {name!r} has blocks of its own, which are Python code. Read the code, and give "
            "--trust-remote-code to run it."
        )
    pipe = ModularPipeline.from_pretrained(name, trust_remote_code=trust_remote_code)
    _hide_progress(_blocks_of_pipe(pipe))
    return pipe


def describe_modular(name: str, pipe: Any) -> PipelineInfo:
    """Return the description of model ``name``, whose modular pipeline is ``pipe``, with or without loaded
    components. Its fields are inputs of the blocks, and the scales of :func:`guiders_of`.

    Raises:
        ValueError: ``pipe`` generates neither images nor videos, or requires a video, which cannot be given.
    """
    blocks, pipeline = _blocks_of_pipe(pipe), original_class(pipe)
    output = _output_of(blocks)
    if output is None:
        outputs = ", ".join(block_output.name for block_output in blocks.outputs)
        raise ValueError(
            f"model {name!r} ({pipeline.__name__}) generates {outputs}; expected images or videos."
        )
    inputs = {parameter.name: parameter for parameter in blocks.inputs if _can_set(parameter)}
    fields = {key: parameter.default for key, parameter in inputs.items()}
    for key, guider in guiders_of(pipe).items():
        fields[key] = getattr(pipe, guider).guidance_scale
    needed = [key for key, parameter in inputs.items() if parameter.required and parameter.default is None]
    for key in needed:
        if "video" in key:
            raise ValueError(
                f"model {name!r} ({pipeline.__name__}) needs {key!r}, a video, which cannot be given."
            )
    model = PipelineInfo(
        name,
        pipeline.__name__,
        fields,
        _OUTPUT_KINDS[output][0],
        annotations={
            key: parameter.type_hint for key, parameter in inputs.items() if parameter.type_hint is not None
        },
        modular=True,
        takes_loras=hasattr(pipeline, "load_lora_weights"),
    )
    # Only images are reported as required: other required inputs of a block may be set by a block that runs
    # before.
    return replace(model, required=tuple(key for key in model.images if key in needed))


def _can_set(parameter: Any) -> bool:
    """Whether a request may set ``parameter``, an InputParam of a block; its type hint may be None."""
    kinds = {*(get_args(parameter.type_hint) or [parameter.type_hint])} - {type(None)}
    is_tensor = kinds <= {torch.Tensor, torch.Generator, torch.dtype}
    name = parameter.name
    is_public = name is not None and not name.startswith("_") and name not in _BETWEEN_BLOCKS
    return is_public and can_be_given(name) and not is_tensor


def guiders_of(pipe: Any) -> dict[str, str]:
    """Return the names of guider components, keyed by the field of a request that sets their guidance scale.

    The field ``guidance_scale`` sets the scale of ``guider``, ``guidance_scale_2`` that of ``guider_2``. A
    field that is also an input of a block is left out, because the block takes it.
    """
    inputs = {parameter.name for parameter in _blocks_of_pipe(pipe).inputs}
    names = {name.replace("guider", "guidance_scale"): name for name in pipe.components if "guider" in name}
    return {
        field: name
        for field, name in names.items()
        if field not in inputs and hasattr(getattr(pipe, name), "guidance_scale")
    }


def load_modular(
    name: str, *, dtype: torch.dtype, quantize: Quantize | None = None, trust_remote_code: bool = False
) -> Any:
    """Load the modular pipeline of a folder or repository. With ``quantize``, torchao quantizes its
    transformers.

    Raises:
        RuntimeError: A component cannot be loaded.
    """
    pipe = open_modular(name, trust_remote_code=trust_remote_code)
    options: dict[str, Any] = {"dtype": dtype}
    if trust_remote_code:
        options["trust_remote_code"] = True
    if quantize is not None:
        types = {part: pipe.get_component_spec(part).type_hint for part in pipe.pretrained_component_names}
        transformers = [
            part for part, cls in types.items() if part in USUAL_NAMES or is_transformer_class(cls)
        ]
        config = require_quantizer().loading_config(quantize, transformers)
        options["quantization_config"] = config.quant_mapping
    names = [
        part
        for part in pipe.pretrained_component_names
        if pipe.get_component_spec(part).pretrained_model_name_or_path is not None
        and getattr(pipe, part, None) is None
    ]
    with _muting_block_errors():
        for index, part in enumerate(names):
            report(f"loading component {index + 1} of {len(names)}: {part}", index, len(names))
            pipe.load_components(names=part, **options)
    for part in pipe.pretrained_component_names:
        spec = pipe.get_component_spec(part)
        if getattr(pipe, part) is None and spec.pretrained_model_name_or_path is not None:
            # load_components logs an error and leaves the component None. Loading it alone raises the error.
            try:
                spec.load(dtype=dtype)
            except Exception as error:
                raise RuntimeError(f"{part} of model {name!r} cannot be loaded: {error}") from error
    return pipe


def call_modular(pipe: Any, arguments: Mapping[str, Any]) -> Any:
    """Call a modular pipeline with the arguments of a classical one.

    Guidance scales are set on its guiders, ``callback_on_step_end`` is called after each scheduler step, and
    arguments that are inputs of no block are ignored. Return a namespace with ``images`` or ``frames``, like
    a classical output. A collective call, as that of the pipeline is.
    """
    blocks, guiders = _blocks_of_pipe(pipe), guiders_of(pipe)
    inputs = {parameter.name for parameter in blocks.inputs}
    output = _output_of(blocks)  # not None, or describe_modular would have refused the model
    scales = {
        guiders[name]: value for name, value in arguments.items() if name in guiders and value is not None
    }
    # An input of the blocks without an argument gets its default from diffusers.
    fields = {name: value for name, value in arguments.items() if name in inputs}
    with (
        ExitStack() as stack,
        _muting_block_errors(),
        _calling_back(pipe, arguments.get("callback_on_step_end")),
    ):
        for name, scale in scales.items():
            guider = getattr(pipe, name)
            stack.callback(setattr, guider, "guidance_scale", guider.guidance_scale)
            guider.guidance_scale = scale
        samples = pipe(output=output, **fields)
    return SimpleNamespace(**{_OUTPUT_KINDS[output or ""][1]: samples})


@contextmanager
def _calling_back(pipe: Any, callback: Callable[..., Any] | None) -> Iterator[None]:
    """Inside this context, call ``callback`` after each step of the scheduler of ``pipe``, unless one of them
    is None.

    Modular pipelines take no callback argument, so the scheduler's ``step`` is wrapped.
    """
    scheduler = getattr(pipe, "scheduler", None)
    if scheduler is None or callback is None:
        yield
        return
    taken = 0  # number of finished steps
    last: int | None = None  # the scheduler's step_index after its previous call

    def step(call: Callable[..., Any], scheduler: Any, /, *args: Any, **kwargs: Any) -> Any:
        nonlocal taken, last
        output = call(scheduler, *args, **kwargs)
        index = getattr(scheduler, "step_index", None)
        # If step_index is the same as after the previous call, the scheduler repeated that step, which counts
        # once.
        if index is None or index != last:
            taken += 1
            latents = getattr(output, "prev_sample", None)
            if isinstance(output, tuple):
                latents = output[0]
            callback(pipe, taken - 1, None, {"latents": latents})
        last = index
        return output

    fill_slot(scheduler, Slot.STEP_CALLBACK, {"step": step}, permits_copies=True)
    try:
        yield
    finally:
        empty_slot(scheduler, Slot.STEP_CALLBACK)


@contextmanager
def _muting_block_errors() -> Iterator[None]:
    """Inside this context, turn off the log in which each enclosing block of diffusers repeats a raised
    exception.
    """
    blocks = logging.getLogger("diffusers.modular_pipelines.modular_pipeline")
    before = blocks.level
    blocks.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        blocks.setLevel(before)


def _blocks_of_pipe(pipe: Any) -> Any:
    # The public pipe.blocks makes a copy at each access, which takes longer than a step of a small model.
    return pipe._blocks


def _output_of(blocks: Any) -> str | None:
    """Return the name of the output that can be written to files, a key of ``_OUTPUT_KINDS``; None if there
    is none.
    """
    names = {block_output.name for block_output in blocks.outputs}
    return next((name for name in _OUTPUT_KINDS if name in names), None)


def _hide_progress(blocks: Any) -> None:
    """Turn off the progress bars of diffusers in ``blocks`` and all blocks below them."""
    if hasattr(blocks, "set_progress_bar_config"):
        blocks.set_progress_bar_config(disable=True)
    for block in getattr(blocks, "sub_blocks", {}).values():
        _hide_progress(block)
