"""``para_core serve``: serve replicas over HTTP until Ctrl-C or SIGTERM.

This file has the options and their checks; `fleet/http/host_server.py` serves. Tests:
tests/cli/test_serve.py, tests/cli/test_refusals.py, tests/fleet/test_host_server.py.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from io import BytesIO
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from para_core.cli import checks, options
from para_core.cli.options import INPUT, LIMITS, flag, option
from para_core.cli.progress import announce_imports
from para_core.cli.signals import SignalCode
from para_core.fleet.choice_of_ray import uses_ray
from para_core.fleet.outputs import choose_format
from para_core.fleet.pipeline_info import PipelineInfo
from para_core.fleet.request import Delivery, Request, make_request
from para_core.fleet.request_schema import read_size
from para_core.fleet.result_files import require_file
from para_core.fleet.selection import pipelines_for
from para_core.pipeline_options import PIPELINE, RANKS

if TYPE_CHECKING:
    from para_core.fleet.recipe import Recipe

_VIDEO_FOLDER = Path("~/.cache/para_core/videos")
_FRAMES_PATTERN = re.compile(r"[1-9][0-9]{0,8}")
# Default of --max-size.
_DEFAULT_PIXELS = {"image": 2048 * 2048, "video": 1280 * 720 * 129}
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_LOG_LEVELS = ("debug", "info", "warning", "error")
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LimitOptions:
    """Options that are fields of ServerOptions. Each field is an option."""

    waiting: Annotated[int, option("Requests that may wait.", "N", LIMITS, "--queue")] = 8
    steps: Annotated[int, option(None, "N", LIMITS, "--max-steps")] = 200
    seconds: Annotated[float, option("Waiting included.", "S", LIMITS, "--request-seconds")] = 600
    retries: Annotated[int, option("Tries after a replica died.", "N", LIMITS)] = 0
    keep_hours: Annotated[float, option("How long asynchronous videos are kept.", "H", LIMITS, min=0)] = 24
    max_batch: Annotated[int, option("Requests of one size generated at once.", "N", LIMITS, min=1)] = 1


def serve(
    *,
    model: options.ModelOption = None,
    host: Annotated[str, option("Other hosts need an API key.", "IP", INPUT)] = "127.0.0.1",
    port: Annotated[int, option(None, "N", INPUT, min=1, max=65535)] = 8000,
    api_key_env: Annotated[str, option("Variable with the API key.", "NAME", INPUT)] = "PARA_CORE_API_KEY",
    format_: options.FormatOption = None,
    fps: options.FpsOption = 16,
    seed: Annotated[
        int | None, option("Of requests without one. Default: random.", "N", INPUT, min=0, max=2**63 - 1)
    ] = None,
    run: options.RunOptions,
    groups: options.GroupOptions,
    spread: Annotated[bool, flag("--spread", "Place a replica on several nodes.", RANKS)] = False,
    limits: LimitOptions,
    max_size: Annotated[str | None, option("Default: 2048x2048, videos 1280x720x129.", "WxH", LIMITS)] = None,
    out: Annotated[
        Path, option("Folder of asynchronous videos.", "DIR", INPUT, parser=options.read_folder)
    ] = _VIDEO_FOLDER,
    encoded_prompts: Annotated[
        float, option("For encoded prompts, in host memory.", "GB", LIMITS, min=0)
    ] = 1,
    loras: Annotated[Path | None, option("Folder of LoRAs that requests may name.", "DIR", PIPELINE)] = None,
    max_loras: Annotated[int, option("LoRAs of requests that stay loaded.", "N", LIMITS, min=1)] = 4,
    warmup: Annotated[list[str] | None, option("Generate this size before serving.", "WxH", INPUT)] = None,
    cors: Annotated[list[str] | None, option("Site whose pages may use the server.", "ORIGIN", INPUT)] = None,
    request_log: Annotated[Path | None, option("JSON lines, one per request.", "FILE", INPUT)] = None,
    log_level: Annotated[str, option("debug, info, warning or error.", "LEVEL", INPUT)] = "info",
    debug: options.DebugOption = False,
) -> None:
    """Serve images or videos over HTTP with OpenAI's images API."""
    api_key = _read_api_key(api_key_env, host)
    level = _read_level(log_level)
    _require_limits(limits, encoded_prompts)
    groups.require_valid()
    checked = checks.validate(model, run, debug=debug)
    checked.require_ranks(groups.ranks, groups.replicas)
    checked.require_format(format_)
    recipe = checked.recipe
    _require_fit(recipe, limits.max_batch, loras)
    require_file(request_log)
    checks.require_package("uvicorn", "serve")
    checks.require_package("fastapi", "serve")
    if uses_ray(spread=spread):
        checks.require_package("ray", "--spread, or RAY_ADDRESS,")
    largest: _Shape | None = None
    if max_size is not None:
        largest = _Shape.read("--max-size", max_size)
    shapes = [_Shape.read("--warmup", size) for size in warmup or ()]

    announce_imports()
    from para_core.cli.ranks import count_ranks
    from para_core.fleet.classical import check_ranks
    from para_core.fleet.http import host_server
    from para_core.fleet.http.bodies import ServerOptions
    from para_core.fleet.libraries import quiet
    from para_core.fleet.rank import ReplicaOptions

    quiet(debug)
    pipeline = checks.describe_model(model, checked)
    pipeline = replace(
        pipeline, others=tuple(pipelines_for(checked.selection.home, images=not pipeline.edits))
    )
    if loras is not None and not pipeline.takes_loras:
        raise typer.BadParameter(f"--loras {loras}: {pipeline.pipeline} loads no LoRAs.")
    delivery = Delivery(choose_format(pipeline, format_), fps)
    pixels = _DEFAULT_PIXELS[pipeline.kind]
    if largest is not None:
        pixels = largest.pixels
    lora_folder: Path | None = None
    loaded_loras = 0
    if loras is not None:
        lora_folder = loras.absolute()
        loaded_loras = max_loras
    if request_log is not None:
        request_log = request_log.absolute()
    server_options = ServerOptions(
        api_key=api_key,
        delivery=delivery,
        seed=seed,
        videos=out.expanduser().absolute(),
        loras=lora_folder,
        cors=tuple(cors or ()),
        request_log=request_log,
        pixels=pixels,
        **vars(limits),
    )
    ranks = count_ranks(groups.ranks, groups.replicas)
    check_ranks(pipeline, ranks)
    replica_options = ReplicaOptions(
        ranks,
        spread,
        groups.room,
        prompt_bytes=int(encoded_prompts * 1e9),
        loras=loaded_loras,
        warmup=tuple(_warmup_request(pipeline, shape, delivery) for shape in shapes),
    )

    address = host
    if ":" in host:
        address = f"[{host}]"
    message = f"{pipeline.pipeline} answers on http://{address}:{port}/ (stop with Ctrl-C)"
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    ready = partial(console.print, message, markup=False)
    with _logging_to_stderr(level):
        host_server.run_server(
            pipeline,
            recipe,
            server_options,
            replica_options,
            replicas=groups.replicas,
            host=host,
            port=port,
            ready=ready,
            debug=debug,
        )
    raise typer.Exit(SignalCode(0))


def _read_api_key(variable: str, host: str) -> str | None:
    """Return the API key in this environment variable, or None. Raise BadParameter if ``host`` needs one."""
    api_key = os.environ.get(variable, "").strip() or None
    if api_key is None and host not in _LOOPBACK:
        raise typer.BadParameter(
            f"--host {host} is reachable from other hosts: set {variable} to an API key."
        )
    return api_key


def _read_level(name: str) -> int:
    """Return the level of the log with this name. Raise BadParameter if there is none."""
    if name.lower() not in _LOG_LEVELS:
        raise typer.BadParameter(
            f"--log-level {name}: expected {', '.join(_LOG_LEVELS[:-1])} or {_LOG_LEVELS[-1]}."
        )
    return logging.getLevelNamesMapping()[name.upper()]


@contextmanager
def _logging_to_stderr(level: int) -> Iterator[None]:
    """Inside this context, write what this package logs at ``level`` or above to stderr, with its time."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    package = logging.getLogger("para_core")
    previous = package.level
    package.setLevel(level)
    package.addHandler(handler)
    try:
        yield
    finally:
        package.removeHandler(handler)
        package.setLevel(previous)


def _require_limits(limits: LimitOptions, encoded_prompts: float) -> None:
    """Raise BadParameter if a limit is too small, or not finite. Limits with a ``min`` are checked by typer."""
    if limits.waiting < 0 or limits.retries < 0:
        raise typer.BadParameter(
            f"--queue {limits.waiting} and --retries {limits.retries}: expected at least 0 of each."
        )
    if limits.steps < 1 or not limits.seconds > 0:
        values = f"--max-steps {limits.steps} and --request-seconds {limits.seconds:g}"
        raise typer.BadParameter(f"{values}: expected more than 0 of each.")
    for name, value in (("--keep-hours", limits.keep_hours), ("--encoded-prompts", encoded_prompts)):
        if not isfinite(value):
            raise typer.BadParameter(f"{name} {value:g}: expected a finite number.")


def _require_fit(recipe: Recipe, max_batch: int, loras: Path | None) -> None:
    """Raise BadParameter if ``max_batch`` or ``loras`` contradicts the recipe, or ``loras`` is not a folder."""
    if max_batch > 1 and recipe.cache is not None:
        raise typer.BadParameter(
            f"--max-batch {max_batch} with --cache: the cache decides for a whole batch, so a request would get "
            "another image than alone."
        )
    if loras is None:
        return
    if not loras.is_dir():
        raise typer.BadParameter(f"--loras {loras}: expected a folder.")
    for name, value, needed in (
        ("--compile", recipe.compile, "no"),
        ("--weights", recipe.weights, "replicate"),
        ("--quantize", recipe.quantize, None),
        ("--offload", recipe.offload, None),
    ):
        if value != needed:
            raise typer.BadParameter(
                f"--loras with {name} {value}: LoRAs of requests need layers that can change."
            )


@dataclass(frozen=True)
class _Shape:
    """Width and height in pixels, and the number of frames if it was stated, of the value of an option."""

    option: str
    text: str
    width: int
    height: int
    frames: int | None  # None counts as one frame in pixels

    @classmethod
    def read(cls, option: str, text: str) -> _Shape:
        """Parse ``"WxH"`` or ``"WxHxFRAMES"``. Raise typer.BadParameter if ``text``, given to ``option``, is
        neither.

        >>> _Shape.read("--max-size", "64x32x9").pixels
        18432
        """
        plane = text
        frames: int | None = None
        if text.count("x") == 2:
            plane, _, last = text.rpartition("x")
            if _FRAMES_PATTERN.fullmatch(last) is None:
                raise typer.BadParameter(
                    f"{option} {text}: expected width x height, or width x height x frames."
                )
            frames = int(last)
        try:
            width, height = read_size(plane)
        except ValueError as error:
            raise typer.BadParameter(f"{option} {text}: {error}") from None
        return cls(option, text, width, height, frames)

    @property
    def pixels(self) -> int:
        """Number of pixels of all frames."""
        return self.width * self.height * (self.frames or 1)


def _warmup_request(model: PipelineInfo, shape: _Shape, delivery: Delivery) -> Request:
    """Return a request of two steps for results of this shape, with a white image of its size in each
    required field. A pipeline that takes no width and height chooses them by that image.
    """
    fields: dict[str, Any] = dict.fromkeys(model.required, "blank")
    if "width" in model.fields or not model.required:
        fields["size"] = f"{shape.width}x{shape.height}"
    if "prompt" in model.fields:
        fields["prompt"] = "warm-up"
    if "num_inference_steps" in model.fields:
        fields["steps"] = 2
    if shape.frames is not None:
        fields["frames"] = shape.frames
    try:
        request = make_request(fields, model, read_image=lambda _: _make_white_image(shape))
    except ValueError as error:
        raise typer.BadParameter(f"{shape.option} {shape.text}: {error}") from None
    return replace(request, delivery=delivery)


def _make_white_image(shape: _Shape) -> bytes:
    from PIL import Image

    file = BytesIO()
    Image.new("RGB", (shape.width, shape.height), "white").save(file, "PNG")
    return file.getvalue()
