"""``para_core plan``: whether a generation fits, how long it takes, and on which mesh. ``para_core doctor``: check a
machine.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from para_core.cli import options
from para_core.cli.options import PIPELINE, RANKS, flag, option
from para_core.distributed.mesh_shape import parse_mesh_sizes
from para_core.fleet.outputs import require_file
from para_core.fleet.request import read_size

if TYPE_CHECKING:
    from para_core.planner.mesh_plan import MeshPlan
    from para_core.planner.prediction import Workload

# The planner knows the speed of 16-bit products only.
_DTYPES = ("auto", "bfloat16", "float16")
_FIELDS = {"frames": "num_frames", "steps": "num_inference_steps"}
_INDEX_FILES = ("model_index.json", "modular_model_index.json")


def plan(
    model: Annotated[str, option("Published name (--list), folder or Hub name.", "NAME")] = "FLUX.1-dev",
    ranks: Annotated[int, option("Number of devices.", "N")] = 1,
    device: Annotated[str, option("Such as 4090, or name,GB,TFLOPs,link.", "NAME")] = "H100",
    link: Annotated[str | None, option("nvlink or pcie. Default: usual for the device.", "NAME")] = None,
    per_host: Annotated[int | None, option("Devices per host. Default: 8, for a GB200 72.", "N")] = None,
    size: Annotated[str | None, option("Width x height: 1024x768. Default: published.", "WxH")] = None,
    frames: Annotated[int | None, option("Frames of a video.", "N")] = None,
    steps: Annotated[int | None, option("Denoising steps.", "N")] = None,
    compiled: Annotated[bool, flag("--compiled/--eager", "Whether the transformer is compiled.")] = True,
    dtype: Annotated[str, option("auto, bfloat16 or float16.", "TYPE", PIPELINE)] = "auto",
    weights: Annotated[str | None, option("replicate, fsdp or tensor. Default: any.", "HOW", PIPELINE)] = None,
    offload: Annotated[str | None, option("Wait in host memory: blocks or model.", "WHAT", PIPELINE)] = None,
    text_encoders: options.TextEncoders = None,
    vae_placement: options.VaePlacement = None,
    quantize: options.Quantize = None,
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
    config: options.OptionFiles = None,
    debug: options.Debug = False,
) -> None:
    """Predict whether a generation fits, and the seconds of every mesh. Nothing is loaded or computed."""
    from para_core.adapters.planner.plan_mesh import plan_mesh

    console = Console(soft_wrap=True, highlight=False)
    if list_:
        _print_names(console)
        return
    require_file(out)
    _require_chart(out)
    if memory is not None and not memory > 0:
        raise typer.BadParameter(f"--memory {memory:g}: expected more than 0 GB.")
    _require_dtype(dtype)
    width, height = (None, None) if size is None else read_size(size)
    settings: dict[str, Any] = {
        "ranks": ranks,
        "device": device,
        "link": link,
        "ranks_per_host": per_host,
        "compiled": compiled,
        "mesh": dict(parse_mesh_sizes(mesh)),
        "memory": None if memory is None else memory * 1e9,
        "text_encoders": text_encoders,
        "vae_placement": vae_placement,
        "quantize": quantize,
        "measured": measured,
        **({} if weights is None else {"weights": weights}),
        **({} if offload is None else {"offload": offload}),
    }
    sizes: dict[str, Any] = {"height": height, "width": width, "frames": frames, "steps": steps}
    subject: _Subject | _UnknownWork | None = _published(model, sizes)
    if subject is None:
        # Validate the options before the model is looked for and counted, which takes seconds.
        plan_mesh("FLUX.1-dev", **settings)
        with _status(f"Counting the operations of {model} without its weights", debug=debug):
            subject = _counted(model, sizes, dtype, trust_remote_code=trust_remote_code, debug=debug)
    if isinstance(subject, _UnknownWork):
        console.print(subject.answer(device, settings["memory"]), markup=False)
        return
    mesh_plan = plan_mesh(subject.work, **settings)
    if console.is_terminal:
        _print_table(mesh_plan, console)
    else:
        console.print(mesh_plan.markdown(), markup=False)
    command = _command(
        mesh_plan,
        subject,
        {"dtype": dtype if dtype != "auto" else None, "memory": None if memory is None else f"{memory:g}"},
    )
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
class _Subject:
    """A model whose work is known: its name in commands, its work, and the fields that its pipeline's call takes.

    ``needs_image`` says whether the call requires an image.
    """

    name: str
    work: Workload
    fields: frozenset[str] = frozenset({"height", "num_inference_steps", "prompt"})
    needs_image: bool = False


@dataclass(frozen=True)
class _UnknownWork:
    """A model whose operations cannot be counted: the bytes of its components, and the reason."""

    name: str
    bytes_: dict[str, int]
    reason: str

    def answer(self, device: str, room: float | None) -> str:
        """Return whether the weights fit into ``room`` bytes, by default what ``device`` leaves a model."""
        from para_core.planner.hardware import device_named
        from para_core.planner.prediction import RESERVED

        card = device_named(device)
        room = card.memory - RESERVED if room is None else room
        total, largest = sum(self.bytes_.values()), max(self.bytes_.values(), default=0)
        parts = ", ".join(f"{name} {size / 1e9:.3g}" for name, size in self.bytes_.items())
        fits = "fit" if total <= room else "do not fit"
        held = f"{total / 1e9:.3g} GB of {room / 1e9:.3g} that a rank may hold"
        lines = [f"{self.name}: its weights {fits} 1 × {card.name}: {held} ({parts})."]
        if total > room >= largest:
            lines.append(f"What makes it fit: --offload model (the largest component has {largest / 1e9:.3g} GB).")
        elif total > room:
            lines.append("What makes it fit: --quantize int8, a larger card, or --weights fsdp on several.")
        lines.append(f"Activations and seconds are not predicted: {self.reason}")
        return "\n\n".join(lines)


def _published(model: str, sizes: dict[str, Any]) -> _Subject | None:
    """Return the work of one generation with a published ``model``; None for a folder or another repository.

    Raise ValueError if ``model`` is none of these, or a size is invalid.
    """
    from para_core.adapters.planner.plan_mesh import workload
    from para_core.adapters.planner.published import PUBLISHED, find_published, is_published

    if Path(model).is_dir() or ("/" in model and not is_published(model)):
        return None
    work, published = workload(model, **sizes), PUBLISHED[find_published(model)]
    video = {"num_frames"} if published.sizes.frames > 1 else set()
    return _Subject(published.repository, work, _Subject.fields | video)


def _counted(
    model: str, sizes: dict[str, Any], dtype: str, *, trust_remote_code: bool, debug: bool
) -> _Subject | _UnknownWork:
    """Count the work of the pipeline in folder or repository ``model``, which is made from its configs."""
    import torch

    from para_core.adapters.planner.count import UnknownModelError, bytes_of
    from para_core.adapters.planner.plan_mesh import workload
    from para_core.cli.ranks import quiet
    from para_core.fleet.foresee import without_weights
    from para_core.fleet.loading import find_model

    quiet(debug)
    if not Path(model).is_dir():
        _require_repository(model)
    described = find_model(model, trust_remote_code=trust_remote_code)
    pipe = without_weights(described, torch.float16 if dtype == "float16" else torch.bfloat16)
    fields = frozenset(described.fields)
    if described.modular:
        # The call of a modular pipeline has no parameters with defaults; its blocks have.
        defaults = {name: described.fields.get(_FIELDS.get(name, name)) for name in sizes}
        known = {name: value for name, value in defaults.items() if isinstance(value, int)}
        sizes = {name: known.get(name) if value is None else value for name, value in sizes.items()}
    if not debug:
        # A model that cannot be counted is no error, and the reason is part of the answer.
        logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    try:
        work = workload(pipe, **sizes)
    except ValueError:
        # A size that the user gave.
        raise
    except Exception as error:
        # The config may be of a version or kind of model whose inputs the planner does not know.
        reason = (
            str(error) if isinstance(error, UnknownModelError) else f"counting raised {type(error).__name__}: {error}"
        )
        parts = {name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}
        return _UnknownWork(model, {name: bytes_of(part) for name, part in parts.items()}, reason)
    needs_image = "image" in described.required or described.fields.get("image") is Parameter.empty
    named = replace(work, name=f"{model}, {work.name.partition(', ')[2]}")
    return _Subject(model, named, fields, needs_image)


def _require_repository(model: str) -> None:
    """Raise FileNotFoundError if ``model`` is no repository on the Hub, or cannot be asked for and is not cached.

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
        raise FileNotFoundError(f"model {model!r} is no folder here{hint}; {other}.") from None
    except RepositoryNotFoundError:
        raise FileNotFoundError(
            f"model {model!r} is no folder here and no repository on the Hub{hint}; {other}."
        ) from None
    except HfHubHTTPError:
        # The Hub answers, and its answer to the download will say more.
        return
    except Exception as error:
        # Whatever a network may raise.
        raise FileNotFoundError(
            f"model {model!r} is no folder here{hint}, and the Hub cannot be reached ({type(error).__name__}). Connect "
            "to it, or give a folder or a name of --list."
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


def _command(plan: MeshPlan, subject: _Subject, further_options: dict[str, Any]) -> str | None:
    """Return the shell command that generates on the plan's fastest mesh. None if that mesh cannot run.

    ``further_options`` have their values by name, None for those that are left out.
    """
    row, work = plan.best, plan.work
    start = _launcher(plan)
    if not row.runs or start is None:
        return None
    placement = row.placement
    compiled = "blocks" if row.shape.fsdp or placement.resident is not None or placement.takes_turns else "whole"
    named: dict[str, Any] = {
        "model": subject.name,
        "prompt": "a red circle" if "prompt" in subject.fields else None,
        "image": "input.png" if subject.needs_image else None,
        "size": f"{work.width}x{work.height}" if "height" in subject.fields and work.width else None,
        "frames": work.frames if "num_frames" in subject.fields else None,
        "steps": work.steps if "num_inference_steps" in subject.fields else None,
        "compile": compiled if plan.machine.runtime.compiled else None,
        **row.command_options,
        **further_options,
    }
    words = [word for name, value in named.items() if value is not None for word in (f"--{name}", f"{value}")]
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
