"""``para_core plan``: whether a generation fits, how long it takes, and on which mesh. ``para_core doctor``: check a
machine.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from para_core.cli import options
from para_core.cli.options import flag, option
from para_core.cli.plan_weights import ComponentBytes, WeightOptions, WeightsOnly
from para_core.distributed.mesh_shape import parse_mesh_sizes
from para_core.fleet.model_files import GGUF, SAFETENSORS, home_of
from para_core.fleet.outputs import require_file
from para_core.fleet.recipe import Compile
from para_core.fleet.request import read_size
from para_core.pipeline_options import PIPELINE, RANKS

if TYPE_CHECKING:
    from para_core.planner.mesh_plan import MeshPlan
    from para_core.planner.prediction import Workload

# The planner knows the speed of 16-bit products only.
_DTYPES = ("auto", "bfloat16", "float16")
_FIELDS = {"frames": "num_frames", "steps": "num_inference_steps"}
# Options on which the answer for a model depends whose work cannot be counted, in addition to those of WeightOptions.
_OF_WEIGHTS = ("model", "pipeline", "config", "trust-remote-code", "dtype", "device", "memory", "debug")
_INDEX_FILES = ("model_index.json", "modular_model_index.json")


def plan(
    context: typer.Context,
    *,
    model: Annotated[str, option("Published name (--list), folder or Hub name.", "NAME")] = "FLUX.1-dev",
    ranks: Annotated[int, option("Number of devices.", "N")] = 1,
    device: Annotated[str, option("Such as 4090, or name,GB,TFLOPs,link.", "NAME")] = "H100",
    link: Annotated[str | None, option("nvlink or pcie. Default: usual for the device.", "NAME")] = None,
    per_host: Annotated[int | None, option("Devices per host. Default: 8, for a GB200 72.", "N")] = None,
    size: Annotated[str | None, option("Width x height: 1024x768. Default: published.", "WxH")] = None,
    frames: Annotated[int | None, option("Frames of a video.", "N")] = None,
    steps: Annotated[int | None, option("Denoising steps.", "N")] = None,
    pipeline: Annotated[str | None, option("Another class: FluxImg2ImgPipeline.", "CLASS", PIPELINE)] = None,
    compile_: Annotated[str, option("no, blocks or whole.", "HOW", PIPELINE, "--compile")] = "whole",
    dtype: Annotated[str, option("auto, bfloat16 or float16.", "TYPE", PIPELINE)] = "auto",
    weights: Annotated[str | None, option("replicate, fsdp or tensor. Default: any.", "HOW", PIPELINE)] = None,
    offload: Annotated[str | None, option("Wait in host memory: blocks or model.", "WHAT", PIPELINE)] = None,
    choices: options.PlanOptions,
    mesh: Annotated[str, option("Largest sizes: batch=2,ring=2. Default: any.", "DIMS", RANKS)] = "",
    memory: Annotated[float | None, option("Of a rank. Default: its device's.", "GB", RANKS)] = None,
    trust_remote_code: Annotated[bool, flag("--trust-remote-code", "Run a modular repository's code.", PIPELINE)] = (
        False
    ),
    measured: Annotated[
        Path | None, option("JSON of `para_core doctor`, whose figures replace the table's.", "FILE")
    ] = None,
    out: Annotated[Path | None, option("Image file for a chart of the meshes.", "FILE")] = None,
    list_: Annotated[bool, flag("--list", "List the published models and the devices.")] = False,
    config: options.Config = None,
    debug: options.Debug = False,
) -> None:
    """Predict whether a generation fits, and the seconds of every mesh. Nothing is loaded or computed."""
    from para_core.adapters.planner.plan_mesh import plan_mesh
    from para_core.weights.pipefusion_options import PipeFusion

    console = Console(soft_wrap=True, highlight=False)
    if list_:
        _print_names(console)
        return
    require_file(out)
    _require_chart(out)
    if memory is not None and not memory > 0:
        raise typer.BadParameter(f"--memory {memory:g}: expected more than 0 GB.")
    _require_dtype(dtype)
    if compile_ not in get_args(Compile):
        raise ValueError(f"compile is {compile_!r}; expected one of {', '.join(get_args(Compile))}.")
    width, height = (None, None) if size is None else read_size(size)
    patches = choices.pipefusion
    settings: dict[str, Any] = {
        "ranks": ranks,
        "device": device,
        "link": link,
        "ranks_per_host": per_host,
        "compiled": compile_ != "no",
        "mesh": dict(parse_mesh_sizes(mesh)),
        "memory": None if memory is None else memory * 1e9,
        **vars(choices),
        "pipefusion": None if patches is None else PipeFusion(patches),
        "measured": measured,
        **({} if weights is None else {"weights": weights}),
        **({} if offload is None else {"offload": offload}),
    }
    sizes: dict[str, Any] = {"height": height, "width": width, "frames": frames, "steps": steps}
    source = _Source(model, pipeline, next(iter(config or ()), None))
    subject: _Subject | WeightsOnly
    if source.is_counted:
        # Validate the options before the model is looked for and counted, which takes seconds.
        plan_mesh("FLUX.1-dev", **settings)
        source.require_files(debug=debug)
        with _status(f"Counting the operations of {model} without its weights", debug=debug):
            subject = _counted(source, sizes, dtype, trust_remote_code=trust_remote_code, debug=debug)
    else:
        subject = _published(source, sizes)
    if isinstance(subject, WeightsOnly):
        _require_no_chart(out, subject)
        weight_options = WeightOptions(ranks, weights, offload, choices.quantize)
        _require_components(subject, weight_options, patches)
        used = {*_OF_WEIGHTS, *weight_options.used}
        unused = [name for name in _chosen_options(context) if name not in used]
        _print_weights(subject, device, settings["memory"], weight_options, unused, console)
        return
    mesh_plan = plan_mesh(subject.work, **settings)
    if console.is_terminal:
        _print_table(mesh_plan, console)
    else:
        console.print(mesh_plan.markdown(), markup=False)
    if patches is not None and all(row.shape.pipefusion is None for row in mesh_plan.rows):
        console.print(
            f"\n--pipefusion {patches} is not used: it is predicted on several ranks, one for each stage of a mesh "
            "with pipe.",
            markup=False,
        )
    further_options = {
        "pipeline": pipeline,
        "config": source.config,
        "dtype": dtype if dtype != "auto" else None,
        "memory": None if memory is None else f"{memory:g}",
    }
    command = _command(mesh_plan, subject, compile_, further_options)
    if command is not None:
        console.print(f"\nAs a command: {command}", markup=False)
    if out is not None:
        mesh_plan.plot(out)


def _require_dtype(dtype: str) -> None:
    """Raise ValueError if the planner does not predict for ``dtype``."""
    if dtype == "float32":
        raise ValueError(
            "dtype is 'float32', for which the planner has no figures: its devices are described by their 16-bit "
            "products. Expected auto, bfloat16 or float16."
        )
    if dtype not in _DTYPES:
        raise ValueError(f"dtype is {dtype!r}; expected one of {', '.join(_DTYPES)}.")


def _print_names(console: Console) -> None:
    """Print the names of the published models, and of the devices."""
    from para_core.adapters.planner.published import PUBLISHED
    from para_core.planner.hardware import DEVICES

    names = ["Models, or any folder or Hub repository of diffusers:", *PUBLISHED]
    console.print("\n".join([*names, "", "Devices, or name,GB,TFLOPs,link:", *DEVICES]), markup=False)


@dataclass(frozen=True)
class _Source:
    """The model that the user named, and the class and the configs for it, as in ``para_core generate``."""

    model: str
    pipeline: str | None
    config: str | None

    @property
    def is_counted(self) -> bool:
        """Whether the work is counted on the configs, and not looked up in the table of published models."""
        from para_core.adapters.planner.published import is_published

        path = Path(self.model)
        if self.config is not None or path.exists() or path.suffix in (SAFETENSORS, GGUF):
            return True
        return "/" in self.model and (self.pipeline is not None or not is_published(self.model))

    def require_files(self, *, debug: bool) -> None:
        """Validate the model without torch, which takes seconds to import.

        Raise FileNotFoundError if its configs do not exist or cannot be read, and ValueError if the class or the
        configs do not fit.
        """
        from para_core.fleet.selection import select_pipeline

        if not debug:
            logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
        if self.model.endswith(GGUF):
            raise ValueError(
                f"model is {self.model!r}, and the bytes of its packed weights cannot be told from configs. Use the "
                "folder or repository of the model with --quantize int8, which takes about as many bytes."
            )
        home = home_of(self.model, self.config)
        if not Path(home).is_dir():
            _require_repository(home, "model" if self.config is None else "config")
        select_pipeline(self.model, pipeline=self.pipeline, config=self.config)


@dataclass(frozen=True)
class _Subject:
    """A model whose work is known: its name in commands, its work, and the fields that its pipeline's call takes.

    ``images`` are the fields for images that every call requires.
    """

    name: str
    work: Workload
    fields: frozenset[str] = frozenset({"height", "num_inference_steps", "prompt"})
    images: tuple[str, ...] = ()


def _published(source: _Source, sizes: dict[str, Any]) -> _Subject:
    """Return the work of one generation with a published model.

    Raise ValueError if ``source`` names none, or a class for it, or a size is invalid.
    """
    from para_core.adapters.planner.plan_mesh import workload
    from para_core.adapters.planner.published import PUBLISHED, find_published

    published = PUBLISHED[find_published(source.model)]
    if source.pipeline is not None:
        raise ValueError(
            f"pipeline is {source.pipeline!r}, and model {source.model!r} is the name of a published model, whose work "
            f"is known for its own class only. Use a folder or the repository, --model {published.repository}."
        )
    video = {"num_frames"} if published.sizes.frames > 1 else set()
    return _Subject(published.repository, workload(source.model, **sizes), _Subject.fields | video)


def _counted(
    source: _Source, sizes: dict[str, Any], dtype: str, *, trust_remote_code: bool, debug: bool
) -> _Subject | WeightsOnly:
    """Count the work of the pipeline of ``source``, which is made from its configs."""
    import torch

    from para_core.adapters.planner.count import UnknownModelError
    from para_core.adapters.planner.plan_mesh import workload
    from para_core.fleet.build import find_model
    from para_core.fleet.foresee import without_weights
    from para_core.fleet.libraries import quiet

    quiet(debug)
    described = find_model(
        source.model, pipeline=source.pipeline, config=source.config, trust_remote_code=trust_remote_code
    )
    pipe = without_weights(described, torch.float16 if dtype == "float16" else torch.bfloat16)
    fields = frozenset(described.fields)
    if described.modular:
        # The call of a modular pipeline has no parameters with defaults; its blocks have.
        of_blocks = {name: described.fields.get(_FIELDS.get(name, name)) for name in sizes}
        defaults = {name: value for name, value in of_blocks.items() if isinstance(value, int)}
        sizes = {name: defaults.get(name) if value is None else value for name, value in sizes.items()}
    if not debug:
        # A model that cannot be counted is no error, and the reason is part of the answer.
        logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    try:
        work = workload(pipe, **sizes)
    except ValueError:
        # A size that the user gave.
        raise
    except UnknownModelError as error:
        return WeightsOnly(source.model, _component_bytes(pipe), str(error))
    except Exception as error:
        # The config may be of a version or kind of model whose inputs the planner does not know.
        return WeightsOnly(source.model, _component_bytes(pipe), f"counting raised {type(error).__name__}: {error}.")
    images = dict.fromkeys(described.required)
    if described.fields.get("image") is Parameter.empty:
        images["image"] = None
    named = replace(work, name=f"{source.model}, {work.name.partition(', ')[2]}")
    return _Subject(source.model, named, fields, tuple(images))


def _component_bytes(pipe: Any) -> dict[str, ComponentBytes]:
    """Return the bytes of the components of ``pipe`` by name. Transformers alone are quantized."""
    import torch

    from para_core.adapters.inspect.components import components_of
    from para_core.adapters.planner.count import module_bytes
    from para_core.adapters.registry import transformers_of

    transformers, can_be_sharded = transformers_of(pipe), components_of(pipe)
    modules = {name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}
    return {
        name: ComponentBytes(
            module_bytes(module),
            module_bytes(module, in_8_bits=True) if name in transformers else None,
            name in can_be_sharded,
        )
        for name, module in modules.items()
    }


def _require_no_chart(path: Path | None, subject: WeightsOnly) -> None:
    """Raise ValueError if a chart is to be written to ``path``, because there are no seconds to show."""
    if path is not None:
        raise ValueError(
            f"out is {str(path)!r}, and there is no chart without seconds, which cannot be predicted: {subject.reason} "
            "Plan without --out."
        )


def _chosen_options(context: typer.Context) -> list[str]:
    """Return the names of the options that the user has set, on the command line or in a file of options."""
    chosen: list[str] = []
    for parameter in context.command.params:
        source = None if parameter.name is None else context.get_parameter_source(parameter.name)
        if source is not None and source.name != "DEFAULT":
            chosen.append(parameter.opts[0].lstrip("-"))
    return chosen


def _require_components(subject: WeightsOnly, weight_options: WeightOptions, pipefusion: int | None) -> None:
    """Raise ValueError if an option needs components that the model does not have, as loading it does."""
    if weight_options.shards and not any(component.can_be_sharded for component in subject.components.values()):
        raise ValueError(
            f"weights is 'fsdp', but {subject.name} has no transformer or text encoder whose weights can be sharded. "
            "Leave --weights out."
        )
    if any(component.in_8_bits is not None for component in subject.components.values()):
        return
    values = {
        "quantize": weight_options.quantize,
        "offload": "blocks" if weight_options.offload == "blocks" else None,
        "weights": "tensor" if weight_options.weights == "tensor" else None,
        "pipefusion": pipefusion,
    }
    for name, value in values.items():
        if value is not None:
            raise ValueError(f"{name} is {value!r}, but {subject.name} has no transformer. Leave --{name} out.")


def _print_weights(
    subject: WeightsOnly,
    device: str,
    room: float | None,
    weight_options: WeightOptions,
    unused: Sequence[str],
    console: Console,
) -> None:
    """Print whether the weights fit into ``room`` bytes, by default what ``device`` leaves a model."""
    from para_core.planner.hardware import device_named
    from para_core.planner.prediction import RESERVED

    card = device_named(device)
    room = card.memory - RESERVED if room is None else room
    console.print(subject.answer(card.name, room, weight_options, unused), markup=False)


def _require_repository(model: str, subject: str) -> None:
    """Raise FileNotFoundError if ``model`` is no repository on the Hub, or cannot be asked for and is not cached.

    ``subject`` says in the message what ``model`` is.
    diffusers finds that out, too, but without a network only after a minute.
    """
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    from para_core.adapters.planner.published import similar_published

    hint = similar_published(model)
    other = "expected a folder of diffusers, a repository on the Hub, or a name of --list"
    try:
        if any(isinstance(try_to_load_from_cache(model, file), str) for file in _INDEX_FILES):
            return
        HfApi().model_info(model, timeout=10)
    except HFValidationError:
        raise FileNotFoundError(f"{subject} {model!r} is no folder here{hint}; {other}.") from None
    except RepositoryNotFoundError:
        raise FileNotFoundError(
            f"{subject} {model!r} is no folder here and no repository on the Hub{hint}; {other}."
        ) from None
    except HfHubHTTPError:
        # The Hub answers, and its answer to the download will say more.
        return
    except Exception as error:
        # Whatever a network may raise.
        raise FileNotFoundError(
            f"{subject} {model!r} is no folder here{hint}, and the Hub cannot be reached ({type(error).__name__}). "
            "Connect to it, or give a folder or a name of --list."
        ) from error


@contextmanager
def _status(text: str, *, debug: bool) -> Iterator[None]:
    """Say on stderr what is being done inside this context: a spinner in a terminal, otherwise one line."""
    console = Console(stderr=True, highlight=False)
    if console.is_terminal and not debug:
        with console.status(f"{text} …"):
            yield
        return
    typer.echo(f"{text} …", err=True)
    yield


def _print_table(plan: MeshPlan, console: Console) -> None:
    """Print the plan: its title, a table that fits the terminal, and its notes."""
    from para_core.planner.verdict import duration

    table = Table(
        "s", "s/step", "compute", "waits", "GB", "mesh, and why it loses", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for column in table.columns[:-1]:
        column.justify, column.no_wrap = "right", True
    for row in plan.printed:
        step = row.step
        figures = [f"{seconds:.3f}" for seconds in (step.total, step.compute, step.communication + step.host)]
        reason = row.problem or row.why
        text = Text.assemble((str(row), "bold"), f": {reason}" if reason else "")
        table.add_row(duration(row.seconds), *figures, f"{row.memory / 1e9:.0f}", text)
    console.print("\n".join([*plan.verdict, "", plan.title]), markup=False, soft_wrap=False)
    console.print(table, soft_wrap=False)
    console.print("\n\n".join([*plan.notes, plan.advice]), markup=False, soft_wrap=False)


def _require_chart(path: Path | None) -> None:
    """Raise BadParameter if matplotlib cannot write a file with the suffix of ``path``. None is accepted."""
    if path is None:
        return
    from matplotlib.backend_bases import FigureCanvasBase

    formats = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        raise typer.BadParameter(f"--out {path}: expected a suffix of {', '.join(sorted(formats))}.")


def _command(plan: MeshPlan, subject: _Subject, compile_: str, further_options: dict[str, Any]) -> str | None:
    """Return the shell command that generates on the plan's fastest mesh. None if that mesh cannot run.

    ``compile_`` is what the user compiles. Instead of a whole transformer, its blocks are compiled on some meshes.
    ``further_options`` have their values by name, None for those that are left out.
    """
    row, work = plan.best, plan.work
    start = _launcher(plan)
    if not row.runs or start is None:
        return None
    placement = row.placement
    if compile_ == "whole" and (row.shape.fsdp or placement.resident is not None or placement.takes_turns):
        compile_ = "blocks"
    named: dict[str, Any] = {
        "model": subject.name,
        "prompt": "a red circle" if "prompt" in subject.fields else None,
        "image": "input.png" if "image" in subject.images else None,
        "size": f"{work.width}x{work.height}" if "height" in subject.fields and work.width else None,
        "frames": work.frames if "num_frames" in subject.fields else None,
        "steps": work.steps if "num_inference_steps" in subject.fields else None,
        "compile": None if compile_ == "no" else compile_,
        **row.command_options,
        **further_options,
    }
    words = [word for name, value in named.items() if value is not None for word in (f"--{name}", f"{value}")]
    for name in subject.images:
        if name != "image":
            words += ["--set", f"{name}={name}.png"]
    return f"{start} {shlex.join(words)}"


def _launcher(plan: MeshPlan) -> str | None:
    """Return the beginning of the command: ``para_core generate``, or on several hosts torchrun on each of them.

    None if the ranks cannot be divided evenly over hosts.
    """
    per_host = plan.machine.topology.per_host
    hosts = -(-plan.ranks // per_host)
    if hosts == 1:
        return f"para_core generate --ranks {plan.ranks}"
    if plan.ranks % hosts:
        return None
    # Of $HOST, the shell puts in one of the hosts.
    rendezvous = "--rdzv-backend=c10d --rdzv-endpoint=$HOST:29400"
    return f"torchrun --nnodes={hosts} --nproc_per_node={plan.ranks // hosts} {rendezvous} -m para_core generate"


def doctor(
    out: Annotated[Path | None, option("JSON file for `para_core plan --measured`.", "FILE")] = None,
    ring: Annotated[int | None, option("Size of the ring mesh dim; other ranks go to ulysses.", "N")] = None,
    cpu: Annotated[bool, flag("--cpu", "Use the CPU and gloo.")] = False,
    config: options.OptionFiles = None,
    debug: options.Debug = False,
) -> None:
    """Check versions, exactness and speed of this machine in a minute; under torchrun, of all ranks."""
    from para_core.planner.doctor import examine_machine

    require_file(out)
    broken = examine_machine(out, ring=ring, cpu=cpu)
    if broken:
        raise typer.Exit(broken)
