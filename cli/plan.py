"""``para_core plan``: whether a generation fits, on which mesh, and a range of seconds. Nothing is computed.

This file has the options and the printed command; predictions are made in `adapters/planner`. What
``generate`` itself predicts before it loads stands in `fleet/memory.py`. Tests: tests/cli/test_plan.py.
"""

from __future__ import annotations

import json
import logging
import shlex
from dataclasses import asdict, dataclass, replace
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from para_core.cli import options
from para_core.cli.options import flag, option
from para_core.distributed.mesh_shape import parse_mesh_sizes
from para_core.fleet.model_files import GGUF, SAFETENSORS, home_of
from para_core.fleet.recipe import Compile
from para_core.fleet.request_schema import read_size
from para_core.pipeline_options import PIPELINE, RANKS

if TYPE_CHECKING:
    from para_core.adapters.planner.predict import Prediction
    from para_core.adapters.planner.predictions import Predictions
    from para_core.adapters.planner.work import Workload
    from para_core.fleet.pipeline_info import PipelineInfo


@dataclass(frozen=True)
class _Subject:
    """The work that is predicted, and the model as the printed command names it, with its fields and images."""

    work: Workload
    model: str
    fields: frozenset[str]
    images: tuple[str, ...] = ()


def plan(
    *,
    model: Annotated[str, option("Published name (--list), folder or Hub name.", "NAME")] = "FLUX.1-dev",
    ranks: Annotated[int, option("Number of devices.", "N")] = 1,
    device: Annotated[str, option("Such as 4090, or name,GB,TFLOPs,link.", "NAME")] = "H100",
    link: Annotated[
        str | None, option("nvlink, pcie or GB/s. Default: usual for the device.", "NAME")
    ] = None,
    per_host: Annotated[int | None, option("Devices per host. Default: 8, for a GB200 72.", "N")] = None,
    size: Annotated[str | None, option("Width x height: 1024x768. Default: published.", "WxH")] = None,
    frames: Annotated[int | None, option("Frames of a video.", "N")] = None,
    steps: Annotated[int | None, option("Denoising steps.", "N")] = None,
    pipeline: Annotated[str | None, option("Another class: FluxImg2ImgPipeline.", "CLASS", PIPELINE)] = None,
    compile_: Annotated[str, option("no, blocks or whole.", "HOW", PIPELINE, "--compile")] = "whole",
    dtype: Annotated[str, option("auto, bfloat16 or float16.", "TYPE", PIPELINE)] = "auto",
    weights: Annotated[
        str | None, option("replicate, fsdp or tensor. Default: any.", "HOW", PIPELINE)
    ] = None,
    offload: Annotated[str | None, option("Wait in host memory: blocks or model.", "WHAT", PIPELINE)] = None,
    choices: options.PlanOptions,
    mesh: Annotated[str, option("Largest sizes: batch=2,ring=2. Default: any.", "DIMS", RANKS)] = "",
    memory: Annotated[float | None, option("Of a rank. Default: its device's.", "GB", RANKS)] = None,
    trust_remote_code: Annotated[
        bool, flag("--trust-remote-code", "Run a modular repository's code.", PIPELINE)
    ] = False,
    json_: Annotated[bool, flag("--json", "Print all predictions as JSON.")] = False,
    list_: Annotated[bool, flag("--list", "List the published models and the devices.")] = False,
    config: options.ConfigOption = None,
    debug: options.DebugOption = False,
) -> None:
    """Predict whether a generation fits, on which mesh, and a range of seconds.
    Nothing is loaded or computed.
    """
    from para_core.adapters.planner.plan_mesh import plan_mesh

    if list_:
        _print_names()
        return
    _require_predictable(memory, dtype, compile_)
    sizes: dict[str, Any] = {"height": None, "width": None, "frames": frames, "steps": steps}
    if size is not None:
        sizes["width"], sizes["height"] = read_size(size)
    settings: dict[str, Any] = {
        "ranks": ranks,
        "device": device,
        "link": link,
        "ranks_per_host": per_host,
        "compiled": compile_ != "no",
        "mesh": dict(parse_mesh_sizes(mesh)),
        "weights": weights,
        "offload": offload,
        **vars(choices),
    }
    if offload is None:
        settings["offload"] = True
    # Options that plan_mesh does not choose, for the command that is printed.
    further: dict[str, Any] = {"pipeline": pipeline, "trust-remote-code": trust_remote_code or None}
    if memory is not None:
        settings["memory"] = memory * 1e9
        further["memory"] = f"{memory:g}"
    if dtype != "auto":
        further["dtype"] = dtype
    configs = next(iter(config or ()), None)
    if _is_published(model, pipeline, configs):
        subject = _find_published(model, pipeline, sizes)
    else:
        # Validate the options before the model is looked for and counted, which takes seconds.
        plan_mesh("FLUX.1-dev", **settings)
        described = _describe_model(
            model, pipeline, configs, trust_remote_code=trust_remote_code, debug=debug
        )
        typer.echo(f"Counting the operations of {model} without its weights …", err=True)
        subject = _count_model(model, described, sizes, dtype)
    predictions = plan_mesh(subject.work, **settings)
    if json_:
        typer.echo(_make_json(predictions))
        return
    typer.echo(str(predictions))
    command = _make_command(predictions, subject, compile_, {**further, "config": configs})
    if command:
        typer.echo(f"\nAs a command: {command}")


def _require_predictable(memory: float | None, dtype: str, compile_: str) -> None:
    """Raise ValueError or BadParameter if an option has a value for which there is no prediction."""
    options.require_memory(memory)
    if dtype == "float32":
        raise ValueError(
            "dtype is 'float32', for which the planner has no figures: its devices are described by their 16-bit "
            "products. Expected auto, bfloat16 or float16."
        )
    if dtype not in ("auto", "bfloat16", "float16"):
        raise ValueError(f"dtype is {dtype!r}; expected one of auto, bfloat16, float16.")
    if compile_ not in get_args(Compile):
        raise ValueError(f"compile is {compile_!r}; expected one of {', '.join(get_args(Compile))}.")


def _print_names() -> None:
    """Print the names of the published models, and of the devices."""
    from para_core.adapters.planner.published import read_counts
    from para_core.devices import DEVICES

    names = ["Models, or any folder or Hub repository of diffusers:", *read_counts()]
    typer.echo("\n".join([*names, "", "Devices, or name,GB,TFLOPs,link:", *DEVICES]))


def _is_published(model: str, pipeline: str | None, configs: str | None) -> bool:
    """Whether the work of ``model`` is stored, and not counted on its configs."""
    from para_core.adapters.planner.published import find_published

    path = Path(model)
    if configs is not None or path.exists() or path.suffix in (SAFETENSORS, GGUF):
        return False
    if "/" not in model:
        # Neither a file or folder nor a repository, so an unknown name is best compared with the published
        # ones.
        return True
    try:
        find_published(model)
    except ValueError:
        return False
    # The stored work is that of the repository's own class.
    return pipeline is None


def _find_published(model: str, pipeline: str | None, sizes: dict[str, Any]) -> _Subject:
    """Return the stored work of one generation with a published model.

    Raise ValueError if ``model`` names none, or a class is chosen for it, or a size is invalid.
    """
    from para_core.adapters.planner.plan_mesh import workload_of
    from para_core.adapters.planner.published import find_published, read_counts

    repository = str(read_counts()[find_published(model)]["repository"])
    if pipeline is not None:
        raise ValueError(
            f"pipeline is {pipeline!r}, and model {model!r} is the name of a published model, whose work is known for "
            f"its own class only. Use a folder or the repository, --model {repository}."
        )
    work = workload_of(model, **sizes)
    fields = frozenset({"height", "num_inference_steps", "prompt"})
    if work.sizes.frames > 1:
        fields |= {"num_frames"}
    return _Subject(work, repository, fields)


def _count_model(model: str, described: PipelineInfo, sizes: dict[str, Any], dtype: str) -> _Subject:
    """Return the counted work of ``model``. Raise ValueError if a size is invalid."""
    images = list(described.required)
    if described.fields.get("image") is Parameter.empty and "image" not in images:
        images.append("image")
    work = _count(described, sizes, dtype)
    return _Subject(work, model, frozenset(described.fields), tuple(images))


def _describe_model(
    model: str, pipeline: str | None, configs: str | None, *, trust_remote_code: bool, debug: bool
) -> PipelineInfo:
    """Return the description of a model that is not published, from its configs.

    Raise FileNotFoundError if its configs cannot be read, and ValueError if the class or the configs do not
    fit.
    """
    if model.endswith(GGUF):
        raise ValueError(
            f"model is {model!r}, and the bytes of its packed weights cannot be told from configs. Use the folder or "
            "repository of the model with --quantize int8, which takes about as many bytes."
        )
    from para_core.fleet.selection import select_pipeline

    home = home_of(model, configs)
    if not Path(home).is_dir():
        subject = "config"
        if configs is None:
            subject = "model"
        _check_repository(home, subject)
    # Check the files and the class before torch is imported, which takes seconds.
    select_pipeline(model, pipeline=pipeline, config=configs)
    from para_core.fleet.build import find_model
    from para_core.fleet.libraries import quiet

    quiet(debug)
    return find_model(model, pipeline=pipeline, config=configs, trust_remote_code=trust_remote_code)


def _check_repository(name: str, subject: str) -> None:
    """Raise FileNotFoundError if the Hub has no repository ``name``, or cannot be asked for it and it is not
    cached.

    diffusers finds that out, too, but without a network only after a minute.
    """
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    from para_core.adapters.planner.published import read_counts
    from para_core.devices import similar_names

    hint = similar_names(name.rpartition("/")[2], read_counts())
    absent = f"{subject} {name!r} is no folder here{hint}"
    try:
        files = ("model_index.json", "modular_model_index.json")
        if not any(isinstance(try_to_load_from_cache(name, file), str) for file in files):
            HfApi().model_info(name, timeout=10)
    except (HFValidationError, RepositoryNotFoundError):
        raise FileNotFoundError(f"{absent}, and no repository on the Hub; or use a name of --list.") from None
    except HfHubHTTPError:
        # The Hub answers, and its answer to the download will say more.
        return
    except Exception as error:
        # Whatever a network may raise.
        raise FileNotFoundError(
            f"{absent}, and the Hub cannot be reached ({type(error).__name__}). Connect to it, or give a folder or a "
            "name of --list."
        ) from error


def _count(described: PipelineInfo, sizes: dict[str, Any], dtype: str) -> Workload:
    """Return the work of the described pipeline; its weights alone if its operations cannot be counted.

    Raise ValueError if a size is invalid.
    """
    import torch

    from para_core.adapters.planner.count import uncounted_workload
    from para_core.adapters.planner.inputs import UnknownModelError
    from para_core.adapters.planner.plan_mesh import workload_of
    from para_core.fleet.without_weights import without_weights
    from para_core.torch_internals import fake_tensor_logger

    loaded_dtype = torch.bfloat16
    if dtype == "float16":
        loaded_dtype = torch.float16
    pipe = without_weights(described, loaded_dtype)
    has_sizes = any(value is not None for value in sizes.values())
    if described.modular:
        # The call of a modular pipeline has no parameters with defaults; its blocks have.
        names = {"height": "height", "width": "width", "frames": "num_frames", "steps": "num_inference_steps"}
        defaults = {name: described.fields.get(field) for name, field in names.items()}
        usual = {name: value for name, value in defaults.items() if isinstance(value, int)}
        sizes = {**sizes, **{name: value for name, value in usual.items() if sizes[name] is None}}
    # A model that cannot be counted is no error, and the reason is part of the answer.
    fake_tensor_logger.setLevel(logging.CRITICAL)
    try:
        return workload_of(pipe, **sizes)
    except UnknownModelError as error:
        return uncounted_workload(pipe, str(error))
    except Exception as error:
        if has_sizes and isinstance(error, ValueError):
            # About a size that the user gave, as far as one can tell: models of diffusers refuse sizes, too.
            raise
        # The config may be of a version or kind of model whose inputs the planner does not know.
        return uncounted_workload(pipe, f"counting raised {type(error).__name__}: {error}.")


def _make_command(predictions: Predictions, subject: _Subject, compile_: str, further: dict[str, Any]) -> str:
    """Return the shell command that generates on the best mesh; empty if none is known to run.

    Instead of a whole transformer, its blocks are compiled on some meshes. ``further`` options have their
    values by name, True for a flag, None for those that are left out.
    """
    row = predictions.best
    from para_core.fleet.pipeline_info import FRAME_PARAMETERS

    work, fields, images = subject.work, subject.fields, subject.images
    hosts = -(-predictions.ranks // predictions.machine.per_host)
    if not row.runs or work.uncounted or predictions.ranks % hosts:
        return ""
    start = f"para_core generate --ranks {predictions.ranks}"
    if hosts > 1:
        # The user sets the shell's variable HOST to the name of the first host.
        ranks = f"--nnodes={hosts} --nproc_per_node={predictions.ranks // hosts}"
        start = f"torchrun {ranks} --rdzv-backend=c10d --rdzv-endpoint=$HOST:29400 -m para_core generate"
    if compile_ == "whole" and (
        row.shape.fsdp or row.placement.resident is not None or row.placement.takes_turns
    ):
        compile_ = "blocks"
    named: dict[str, Any] = {"model": subject.model}
    if "prompt" in fields:
        named["prompt"] = "a red circle"
    if "image" in images:
        named["image"] = "input.png"
    if "height" in fields and work.sizes.width:
        named["size"] = f"{work.sizes.width}x{work.sizes.height}"
    if fields.intersection(FRAME_PARAMETERS) and work.steps:
        named["frames"] = work.sizes.frames
    if "num_inference_steps" in fields and work.steps:
        named["steps"] = work.steps
    if compile_ != "no":
        named["compile"] = compile_
    named |= {**_options_of(row), **further}
    words: list[str] = []
    for name, value in named.items():
        if value is not None:
            words.append(f"--{name}")
        if value is not None and value is not True:
            words.append(f"{value}")
    for name in images:
        if name != "image":
            words += ["--set", f"{name}={name}.png"]
    return f"{start} {shlex.join(words)}"


def _options_of(row: Prediction) -> dict[str, str]:
    """Return the options of ``para_core generate`` for a mesh, without ``--ranks``, by name without dashes.

    With blocks in host memory ``generate`` places text encoders there, too, unless it is told otherwise
    (``_parallel_options`` in fleet/build.py), so that placement is left out.
    """
    from para_core.adapters.planner.weights import default_text_encoders

    placement = row.placement
    if placement.resident is not None and placement.encoders == "offload":
        row = replace(row, placement=replace(placement, encoders=default_text_encoders(row.shape)))
    named = dict(row.options)
    if placement.takes_turns:
        named["offload"] = "model"
    if placement.quantize is not None:
        named["quantize"] = placement.quantize
    if row.shape.ranks > 1:
        sizes = [f"{name[len('max_') : -len('_dim_size')]}={size}" for name, size in row.mesh_options.items()]
        named = {"mesh": ",".join(sizes), **named}
    return {name.replace("_", "-"): str(value) for name, value in named.items()}


def _make_json(predictions: Predictions) -> str:
    """Return the predictions as JSON: seconds as a range, and bytes."""
    meshes = []
    for row in predictions.rows:
        derived: dict[str, Any] = {"description": str(row), "runs": row.runs, "code": None, "seconds": None}
        if row.runs:
            derived["code"] = row.code
        if not predictions.work.uncounted:
            derived["seconds"] = predictions.seconds_of(row)
        meshes.append({**asdict(row), **derived})
    content = {
        "model": predictions.work.name,
        "steps": predictions.work.steps,
        "device": predictions.machine.device.name,
        "ranks": predictions.ranks,
        "fits": predictions.best.runs,
        "uncounted": predictions.work.uncounted,
        "meshes": meshes,
    }
    return json.dumps(content, indent=2, ensure_ascii=False)
