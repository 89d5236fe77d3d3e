"""``para_core bench``: measure a generation on several ranks, and with ``--check`` compare it with one rank.

This file has the options and the printing. `measurement.py` measures, and `comparison.py` compares. Tests:
tests/cli/test_bench.py, tests/same_bits/test_command.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from para_core.cli import checks, options
from para_core.cli.options import INPUT, flag, option
from para_core.cli.progress import announce_imports
from para_core.cli.torchrun import is_first_of_torchrun, read_stated_ranks
from para_core.cli.traces import require_new_traces
from para_core.fleet.image_files import read_image_file
from para_core.fleet.pipeline_info import FRAME_PARAMETERS, PipelineInfo
from para_core.fleet.request import Request, make_request
from para_core.fleet.result_files import require_file, write_atomically

_DEFAULT_PROMPT = "a large red circle in the centre on a white background"
_MB = 1e6  # bytes


def bench(
    *,
    model: options.ModelOption = None,
    prompt: Annotated[str, option("What to generate.", "TEXT", INPUT)] = _DEFAULT_PROMPT,
    call: options.CallOptions,
    out: Annotated[Path | None, option("JSON file of the figures.", "FILE", INPUT)] = None,
    warmup_runs: Annotated[int, option("Generations before the timed ones.", "N", INPUT, min=0)] = 1,
    runs: Annotated[int, option("Timed generations.", "N", INPUT, min=1)] = 3,
    check: Annotated[bool, flag("--check", "Compare the result with that of one rank.", INPUT)] = False,
    profile: Annotated[Path | None, option("Folder for a trace of each rank.", "DIR", INPUT)] = None,
    run: options.RunOptions,
    ranks: options.RanksOption = None,
    debug: options.DebugOption = False,
) -> None:
    """Measure a generation: seconds, memory, launches and bytes sent. No image or video is written."""
    common = call.fields()
    checked = checks.validate(model, run, debug=debug)
    fields = common
    # Before the imports the class is known by its source only. _read_request asks the class itself.
    if checked.selection.needs_prompt:
        fields = {"prompt": prompt, **common}
    checked.require_request(fields, call.seed)
    checked.require_ranks(ranks, 1)
    _require_new_file(out)
    stated = read_stated_ranks(ranks, 1)
    if profile is not None:
        # Without a stated number of ranks there is at least one. The others are checked as soon as GPUs are
        # counted.
        require_new_traces(profile, stated or 1)

    announce_imports()
    from para_core.cli.measurement import MeasurementJob, measure
    from para_core.cli.ranks import count_ranks, is_first_rank
    from para_core.cli.signals import describe_signal, terminable
    from para_core.distributed.mesh_shape import mesh_sizes
    from para_core.fleet.classical import check_ranks
    from para_core.fleet.libraries import quiet

    quiet(debug)
    recipe = checked.recipe
    pipeline = checks.describe_model(model, checked)
    num_ranks = count_ranks(ranks, 1)
    mesh_sizes(num_ranks, dict(recipe.mesh))  # raises if the mesh does not fit
    check_ranks(pipeline, num_ranks)
    if profile is not None and stated is None:
        require_new_traces(profile, num_ranks)
    request = _read_request(pipeline, common, prompt, call.seed)
    job = MeasurementJob(recipe, request, warmup_runs, runs, check, profile, debug)

    def report_end(end: KeyboardInterrupt) -> int:
        ended, code = describe_signal(end)
        console = Console(stderr=True, soft_wrap=True, quiet=not is_first_rank())
        console.show_cursor()  # which progress bars hide
        console.print(f"{ended}: there are no figures.")
        return code

    try:
        with terminable(report_end):
            figures = measure(job, num_ranks)
    except KeyboardInterrupt as end:
        raise typer.Exit(report_end(end)) from None
    if figures is None:
        return
    _print(figures, Console(highlight=False))
    if out is not None:
        write_atomically(out, (json.dumps(figures, indent=2) + "\n").encode())
    if check and not figures["check"]["passed"]:
        raise typer.Exit(1)


def _require_new_file(path: Path | None) -> None:
    """Raise OSError on the first rank, which alone writes the figures, if it cannot write a new file at ``path``."""
    # This runs before torch is imported, so is_first_rank of ranks.py cannot be asked.
    if path is None or not is_first_of_torchrun():
        return
    require_file(path)
    if path.exists():
        raise FileExistsError(
            f"{path} exists, and is not overwritten. Use another file with --out, or delete it."
        )


def _read_request(model: PipelineInfo, common: dict[str, Any], prompt: str, seed: int) -> Request:
    if "prompt" in model.fields:
        common = {"prompt": prompt, **common}
    checks.require_images(model, common)
    return make_request(common, model, seed=seed, read_image=read_image_file)


def _print(figures: dict[str, Any], console: Console) -> None:
    """Print the figures of ``MeasuredRank.measure``: as tables in a terminal, as Markdown elsewhere."""
    console.print(_make_title(figures), markup=False, soft_wrap=True)
    seconds = figures["seconds"]
    rows = [
        [f"s per {name}", *(f"{values[key]:.4g}" for key in ("median", "min", "max"))]
        for name, values in (("generation", seconds["per generation"]), ("step", seconds["per step"]))
        if values is not None
    ]
    _print_table(["", "median", "min", "max"], rows, console)
    columns = {
        "device MB": ("device memory", _MB),
        "host MB": ("host memory", _MB),
        "launches per step": ("launches per step", 1),
        "MB sent per step": ("bytes sent per step", _MB),
        "MB sent": ("bytes sent", _MB),
    }
    ranks = [[_format_number(rank[key], unit) for key, unit in columns.values()] for rank in figures["ranks"]]
    _print_table(["rank", *columns], [[str(index), *cells] for index, cells in enumerate(ranks)], console)
    if figures["recipe"]["compile"] != "no":
        console.print(
            "Launches are those of eager code, which a compiled graph has fewer of.", soft_wrap=True
        )
    if figures["check"] is not None:
        console.print("\n".join(describe_check(figures["check"])), markup=False, soft_wrap=True)


def _make_title(figures: dict[str, Any]) -> str:
    """Return a line with what was measured: pipeline, sizes, steps, dtype, devices and runs."""
    mesh = " × ".join(f"{name} {size}" for name, size in figures["mesh"].items() if size > 1)
    request = figures["request"]
    names = ("width", "height", *FRAME_PARAMETERS)
    sizes = [str(request[name]) for name in names if request.get(name) is not None]
    parts = [figures["pipeline"]]
    if sizes:
        parts.append(" × ".join(sizes))
    if request.get("num_inference_steps"):
        parts.append(f"{request['num_inference_steps']} steps")
    parts.append(figures["dtype"])
    devices = f"{len(figures['ranks'])} × {figures['device']}"
    if mesh:
        devices += f" ({mesh})"
    parts.append(devices)
    runs = f"{figures['runs']} run"
    if figures["runs"] > 1:
        runs += "s"
    parts.append(f"{runs} after {figures['warmup_runs']} to warm up")
    return ", ".join(parts)


def _format_number(value: float | None, unit: float = 1) -> str:
    """Return ``value / unit`` as text, an empty text for a figure that there is not."""
    if value is None:
        return ""
    return f"{value / unit:.5g}"


def _print_table(heads: Sequence[str], rows: Sequence[Sequence[str]], console: Console) -> None:
    if not console.is_terminal:
        lines = ["| " + " | ".join(cells) + " |" for cells in (heads, ["---:"] * len(heads), *rows)]
        console.print("\n" + "\n".join(lines) + "\n", markup=False, soft_wrap=True)
        return
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for head in heads:
        table.add_column(head, justify="right")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def describe_check(check: dict[str, Any]) -> list[str]:
    """Return the lines that report ``check``, a result of :func:`para_core.cli.comparison.compare`."""
    return [
        _describe_verdict(check),
        f"two runs: {_describe_equality(check['runs equal'])}",
        f"all ranks: {_describe_equality(check['ranks equal'])}",
        f"one rank and all: {_describe_equality(check['same bits'])}",
        f"SHA-256 of one rank: {check['sha256 of one rank']}",
        *[
            f"SHA-256 of rank {rank}: {digest}"
            for rank, digest in _group_digests(check["sha256 of each rank"])
        ],
    ]


def _describe_verdict(check: dict[str, Any]) -> str:
    """Return whether ``check`` has passed, and by which error from which reference."""
    from para_core.cli.comparison import ROUNDINGS

    error = "not finite"
    if check["relative error"] is not None:
        error = f"{check['relative error']:.3g}"
    if check["same bits required"]:
        verdict = "WRONG: the bits differ from"
        if check["passed"]:
            verdict = "the same bits as"
        elif check["same bits"]:
            verdict = "WRONG: pixels are not finite, in the same bits as"
        return f"{verdict} one rank, with --same-bits: relative error {error}"
    if check["approximations"]:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in check["approximations"])
        if check["relative error"] is None:
            return f"WRONG ({names}): pixels are not finite, or the sizes differ from those of one rank"
        return f"not exact ({names}): relative error {error} from one rank with the same options; no bound applies"
    verdict = "WRONG"
    if check["passed"]:
        verdict = "exact"
    reference = "the unmodified pipeline"
    if check["products"] is not None:
        reference = f"the pipeline with --products {check['products']}"
    return (
        f"{verdict}: relative error {error} from {reference} on one rank; another order of sums explains at most "
        f"{check['bound']:.3g} ({ROUNDINGS} times what one rounding of each output of the transformer changes)"
    )


def _group_digests(digests: Sequence[str]) -> list[tuple[str, str]]:
    """Return (rank, digest) for each rank, or once for all ranks that have the same."""
    if len(set(digests)) == 1 and len(digests) > 1:
        return [(f"0 to {len(digests) - 1}", digests[0])]
    return [(str(rank), digest) for rank, digest in enumerate(digests)]


def _describe_equality(equal: bool) -> str:
    if equal:
        return "the same bits"
    return "different bits"
