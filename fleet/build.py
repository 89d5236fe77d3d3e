"""Lookup of a model by its name, loading of the pipeline of a recipe, and its parallelization on ranks.

The commands call :func:`find_model` before ranks start (`cli/checks.py`, `cli/plan.py`), and each rank
:func:`build` (`rank.py`, `cli/measurement.py`). `classical.py` and `modular.py` load; requests run in
`work.py`. Tests: tests/fleet/test_work.py, tests/fleet/test_model_files.py, tests/fleet/test_modular.py,
tests/fleet/test_encode_first.py.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from para_core.adapters import apply_cache_on_pipe, from_pretrained_sharded, parallelize_pipe
from para_core.adapters.inspect.components import encoders_with_blocks, text_encoders_of, vaes_of
from para_core.adapters.model_checks import check_component_classes
from para_core.adapters.registry import mesh_of, transformers_of
from para_core.adapters.weights.features import require_quantizer
from para_core.call_checks import CHECKS
from para_core.declared_options import values_of
from para_core.distributed.create_mesh import init_context_parallel_mesh
from para_core.distributed.mesh import one_guided_rank
from para_core.fleet.classical import load_classical, load_controlnets, pipeline_class
from para_core.fleet.encode_first import EncodeFirst
from para_core.fleet.loras import load_loras_of_recipe
from para_core.fleet.modular import (
    describe_modular,
    has_modular_index,
    is_modular,
    load_modular,
    open_modular,
)
from para_core.fleet.pipeline_info import TINY_FLUX_FIELDS, PipelineInfo, describe_class, find_tiny_flux
from para_core.fleet.pipeline_source import class_in
from para_core.fleet.recipe import Compile, Recipe
from para_core.fleet.selection import select_pipeline
from para_core.fleet.without_weights import check_components_exist, component_classes, multiple_of_model
from para_core.instance.private_class import original_class
from para_core.option_values import Offload
from para_core.pipeline_options import PipelineChoices
from para_core.progress import readable_bytes, report, report_components
from para_core.user_warnings import ParallelWarning
from para_core.weights.pipefusion_options import PipeFusion


def find_model(
    name: str | None,
    *,
    pipeline: str | None = None,
    config: str | None = None,
    controlnet: Sequence[str] = (),
    trust_remote_code: bool = False,
) -> PipelineInfo:
    """Return the description of a model without loading its weights.

    ``name`` is a folder, Hub repository or single file of a classical or modular pipeline, None for the tiny
    FLUX. With ``trust_remote_code``, the code of a modular pipeline's own blocks is run. The other arguments
    are as in :func:`select_pipeline`, which says what it raises.

    Raises:
        ValueError: This diffusers lacks the class of the pipeline or of a component, the model generates
            neither images nor videos, or its repository contains code that is not trusted.
        TypeError: para_core cannot run the pipeline.
    """
    import diffusers

    defaults: Mapping[str, Any] = {}
    if name is None:
        defaults, name = TINY_FLUX_FIELDS, str(find_tiny_flux())
    selection = select_pipeline(name, pipeline=pipeline, config=config, controlnet=controlnet)
    if selection.index.modular:
        modular = open_modular(name, trust_remote_code=trust_remote_code)
        return replace(describe_modular(name, modular), trusted=trust_remote_code)
    cls = getattr(diffusers, selection.pipeline, None)
    if cls is None:
        version = diffusers.__version__
        raise ValueError(
            f"model {name!r} is for {selection.pipeline}, which diffusers {version} does not have."
        )
    check_components_exist(name, selection.index.content)
    check_component_classes(selection.pipeline, component_classes(selection.index.content))
    model = replace(describe_class(name, cls, defaults), config=config, controlnet=tuple(controlnet))
    return replace(model, multiple=multiple_of_model(model))


def build(recipe: Recipe, encode_first: EncodeFirst | None = None) -> Any:
    """Load the pipeline of ``recipe``, and apply its options. A collective call on the default process group,
    if any.

    The order matters: LoRAs and quantization by fsdp's rules come before weights are sharded, tensor
    parallelism before quantization, and compilation last, because a graph holds what it was traced with.

    ``encode_first`` is attached to the pipeline if :meth:`EncodeFirst.fits` accepts the recipe, and then
    decides when text encoders and transformers are on the device.

    Raises what ``from_pretrained``, :func:`parallelize_pipe` and :func:`apply_cache_on_pipe` raise, and:

    Raises:
        ValueError: A LoRA cannot be loaded, or ``quantize`` or ``compile`` is set, and the pipeline has no
            transformer.
    """
    device = _device_type()
    ranks = 1
    if dist.is_initialized():
        ranks = dist.get_world_size()
    mesh = _make_mesh(recipe, device, ranks)
    sharding = None
    if ranks > 1:
        sharding = recipe.sharding
    loaded_parts = sharding is not None and _can_load_parts(recipe)
    if sharding is not None and loaded_parts:
        # EncodeFirst.fits refuses sharded weights, so encode_first has nothing to do here.
        mesh = mesh or init_context_parallel_mesh(device)
        pipe = _load_parts(recipe, mesh, sharding)
        # The weights are sharded already, so parallelize_pipe must not do so again.
        weights_to_shard = None
    else:
        pipe = _load_whole(recipe, sharding)
        _place_components(pipe, recipe, device, encode_first)
        weights_to_shard = sharding
    options = _parallel_options(recipe, pipe, ranks, loaded_parts=loaded_parts)
    if recipe.verify:
        _show_checks()
    if ranks > 1:
        report(f"parallelizing over {ranks} ranks")
    parallelize_pipe(pipe, mesh=mesh, weights=weights_to_shard, timeout=recipe.timeout, **options)
    if weights_to_shard == "tensor" and recipe.quantize is not None:
        require_quantizer().quantize(pipe, recipe.quantize)
    if recipe.offload == "model":
        _offload_components(pipe, device)
    if recipe.cache == "default":
        apply_cache_on_pipe(pipe)
    elif recipe.cache is not None:
        apply_cache_on_pipe(pipe, residual_diff_threshold=recipe.cache)
    _compile(pipe, recipe.compile)
    return pipe


def _make_mesh(recipe: Recipe, device: str, ranks: int) -> Any:
    """Return the mesh of the sizes that the recipe states; None if :func:`parallelize_pipe` shall choose it."""
    if not dist.is_initialized():
        # A launcher may have set WORLD_SIZE, which parallelize_pipe takes for a missing process group.
        return one_guided_rank(device)
    if recipe.mesh and ranks > 1:
        sizes = {f"max_{name}_dim_size": size for name, size in recipe.mesh}
        return init_context_parallel_mesh(device, **sizes)
    return None


def _can_load_parts(recipe: Recipe) -> bool:
    """Whether :func:`from_pretrained_sharded` loads the model: a classical pipeline in a folder or
    repository, without LoRAs, which need whole weights.
    """
    return not recipe.lora and recipe.config is None and not _names_modular(recipe)


def _names_modular(recipe: Recipe) -> bool:
    """Whether the model of ``recipe`` is a modular pipeline. :func:`select_pipeline` has made sure that a
    single file has a ``config``, and that a folder or repository with another index is classical.
    """
    return recipe.config is None and has_modular_index(recipe.model)


def _load_parts(recipe: Recipe, mesh: Any, weights: Literal["fsdp", "tensor"]) -> Any:
    """Load this rank's part of the weights of the pipeline. A collective call on ``mesh``."""
    dtype = dtype_of(recipe)
    with _reporting_components(recipe):
        pipe = from_pretrained_sharded(
            pipeline_class(recipe),
            recipe.model,
            mesh=mesh,
            weights=weights,
            quantize=recipe.quantize,
            dtype=dtype,
            **load_controlnets(recipe, dtype),
        )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _parallel_options(recipe: Recipe, pipe: Any, ranks: int, *, loaded_parts: bool) -> dict[str, Any]:
    """Return the options of :func:`parallelize_pipe` that the recipe states or implies, except mesh, weights
    and time-out.

    ``loaded_parts`` says that the weights are sharded already.
    """
    options = values_of(recipe, PipelineChoices)
    if ranks == 1:
        options["vae"] = False
    if not recipe.places_encoders:
        if not text_encoders_of(pipe):
            options["text_encoders"] = None
        elif recipe.offload == "blocks":
            options["text_encoders"] = "offload"
        elif loaded_parts and recipe.sharding == "tensor" and encoders_with_blocks(pipe):
            # parallelize_pipe would choose the same if it sharded the transformers itself.
            options["text_encoders"] = "fsdp"
    if recipe.offload == "blocks":
        options["offload"] = "blocks"
    if recipe.pipefusion is not None:
        options["pipefusion"] = PipeFusion(recipe.pipefusion)
    if recipe.comm_dtype is not None:
        options["comm_dtype"] = getattr(torch, recipe.comm_dtype)
    return options


def _device_type() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "cpu"


def _offload_components(pipe: Any, device: str) -> None:
    """Enable diffusers' model offload: a component is on this rank's device only while it runs."""
    if device == "cuda":
        # Without an index diffusers takes the first GPU of the host, on every rank.
        device = f"cuda:{torch.cuda.current_device()}"
    pipe.enable_model_cpu_offload(device=device)


def _show_checks() -> None:
    """Print on stderr what checks of calls find (``verify``), which commands otherwise hide with the messages
    of libraries.

    The checks run in later calls of the pipeline, so this process keeps these settings until it ends. A rank
    has one pipeline, and ``quiet`` has already set the logging and the warnings of its whole process.
    """
    for module in CHECKS.values():
        # All modules of the check's package log below the name of the package.
        logger = logging.getLogger(module.rpartition(".")[0])
        logger.setLevel(logging.INFO)
        # An earlier handler is replaced, because it writes to the stderr of its time.
        logger.handlers = [logging.StreamHandler()]
    warnings.filterwarnings("default", category=ParallelWarning)


def build_unmodified(recipe: Recipe) -> Any:
    """Load the pipeline of ``recipe`` on this rank alone, as diffusers runs it: no mesh, cache or
    compilation.

    LoRAs and quantization are applied. If the recipe shards weights or keeps them in host memory, diffusers'
    model offload is enabled, because all weights may not fit on this rank's GPU. A modular pipeline has no
    such offload, and is on the GPU with all weights.
    """
    device = _device_type()
    offload: Offload | None = None
    if recipe.moves_weights and device == "cuda" and not _names_modular(recipe):
        offload = "model"
    recipe = replace(recipe.without_placements, weights="replicate", offload=offload)
    pipe = _load_whole(recipe, None)
    _place_components(pipe, recipe, device)
    if offload is not None:
        _offload_components(pipe, device)
    return pipe


def _load_whole(recipe: Recipe, sharding: Literal["fsdp", "tensor"] | None) -> Any:
    """Load the pipeline with all weights and LoRAs into host memory.

    ``sharding`` says how the caller will shard the weights, None for not at all. Weights to shard are
    quantized after they are loaded: here for fsdp, and by the caller for tensor parallelism.
    """
    quantize, dtype = recipe.quantize, dtype_of(recipe)
    early = quantize
    if sharding is not None:
        early = None
    if _names_modular(recipe):
        pipe = load_modular(
            recipe.model, dtype=dtype, quantize=early, trust_remote_code=recipe.trust_remote_code
        )
    else:
        with _reporting_components(recipe):
            pipe = load_classical(recipe, dtype=dtype, quantize=early)
        pipe.set_progress_bar_config(disable=True)
    if quantize is not None and not transformers_of(pipe):
        raise ValueError(f"quantize is {quantize!r}, but {original_class(pipe).__name__} has no transformer.")
    load_loras_of_recipe(pipe, recipe)
    if quantize is not None and sharding == "fsdp":
        require_quantizer().quantize(pipe, quantize, gatherable=True)
    return pipe


def _place_components(
    pipe: Any, recipe: Recipe, device: str, encode_first: EncodeFirst | None = None
) -> None:
    """Move the components to ``device``, except for those that the recipe keeps in host memory. Attach
    ``encode_first`` before, if it fits.
    """
    on_host: set[str] = set()
    if recipe.encoders_wait_on_host:
        on_host |= {*text_encoders_of(pipe)}
    if recipe.vae_in_host_memory:
        on_host |= {*vaes_of(pipe)}
    if recipe.offload == "blocks":
        on_host |= {*transformers_of(pipe)}
    if encode_first is not None and encode_first.fits(recipe):
        # Only plain weights can be moved to host memory and back. Quantized denoisers remain on the device,
        # where they take little memory. Attach before the components are moved below: parked weights are
        # scalars on the device, so the text encoders and the denoisers are never there together.
        encode_first.attach(pipe, device, park=recipe.quantize is None)
    if recipe.offload != "model":
        if device != "cpu":
            report(f"moving the weights to {device}")
        for name, part in pipe.components.items():
            if isinstance(part, nn.Module) and name not in on_host:
                part.to(device)


def _reporting_components(recipe: Recipe) -> AbstractContextManager[None]:
    """Return a context that reports the components of the classical pipeline while diffusers loads them."""
    from diffusers import DiffusionPipeline

    if recipe.config is not None:
        report(f"loading {recipe.model} ({readable_bytes(Path(recipe.model).stat().st_size)})")
    home = recipe.config or recipe.model
    index = DiffusionPipeline.load_config(home)
    # A config may have lists of its own, such as the layers of a text encoder that a pipeline reads.
    return report_components(home, [key for key in index if class_in(index, key) is not None])


def read_mesh_sizes(pipe: Any) -> dict[str, int]:
    """Return the sizes of the mesh dims of a pipeline by name. The dims ``pipe`` and ``tensor`` are left out
    if 1.
    """
    mesh = mesh_of(pipe)
    if mesh is None:
        return {"batch": 1, "ring": 1, "ulysses": 1}
    sizes = {"batch": mesh.batch.size, "ring": mesh.sequence.ring.size, "ulysses": mesh.sequence.ulysses.size}
    others = {"pipe": mesh.pipe.size, "tensor": mesh.tensor.size}
    return {**sizes, **{name: size for name, size in others.items() if size > 1}}


def dtype_of(recipe: Recipe) -> torch.dtype:
    """Return the dtype in which this process loads the pipeline of ``recipe``."""
    if recipe.dtype == "auto":
        if torch.cuda.is_available():
            return torch.bfloat16
        return torch.float32
    dtype: torch.dtype = getattr(torch, recipe.dtype)
    return dtype


def _compile(pipe: Any, how: Compile) -> None:
    if how == "no":
        return
    transformers = transformers_of(pipe)
    if not transformers:
        raise ValueError(
            f"compile is {how!r}, but {original_class(pipe).__name__} has no transformer; expected 'no'."
        )
    report("the transformer is compiled at its first call of each size, which takes minutes")
    for name, transformer in transformers.items():
        module: Any = transformer
        if how == "blocks":
            module.compile_repeated_blocks(fullgraph=True)
        elif is_modular(pipe):
            # Compile in place, because the blocks of a modular pipeline read the signature and the truth
            # value of a transformer. The wrapper that torch.compile(module) returns has another signature,
            # and bool() of it raises.
            module.compile(fullgraph=True)
        else:
            setattr(pipe, name, torch.compile(module, fullgraph=True))
