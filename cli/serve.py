"""``para_core serve``: serve replicas over HTTP until Ctrl-C or SIGTERM."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from para_core.cli import checks, options
from para_core.cli.options import INPUT, LIMITS, PIPELINE, RANKS, flag, option
from para_core.cli.progress import announce_imports
from para_core.fleet.models import Kind, Model
from para_core.fleet.outputs import choose_format, require_file
from para_core.fleet.request import Delivery, Request, make_request, read_size
from para_core.fleet.selection import pipelines_for

if TYPE_CHECKING:
    from para_core.fleet.recipe import Recipe

_RESULTS = Path("~/.cache/para_core/videos")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_LEVELS = ("debug", "info", "warning", "error")
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
    model: options.Model = None,
    host: Annotated[str, option("Other hosts need an API key.", "IP", INPUT)] = "127.0.0.1",
    port: Annotated[int, option(None, "N", INPUT, min=1, max=65535)] = 8000,
    api_key_env: Annotated[str, option("Variable with the API key.", "NAME", INPUT)] = "PARA_CORE_API_KEY",
    format_: options.Format = None,
    fps: options.Fps = 16,
    seed: Annotated[
        int | None, option("Of requests without one. Default: random.", "N", INPUT, min=0, max=2**63 - 1)
    ] = None,
    run: options.RunOptions,
    groups: options.GroupOptions,
    spread: Annotated[bool, flag("--spread", "Place a replica on several nodes.", RANKS)] = False,
    limits: LimitOptions,
    max_size: Annotated[str | None, option("Default: 2048x2048, videos 1280x720x129.", "WxH", LIMITS)] = None,
    out: Annotated[Path, option("Folder of asynchronous videos.", "DIR", INPUT, parser=options.read_folder)] = _RESULTS,
    encoded_prompts: Annotated[float, option("For encoded prompts, in host memory.", "GB", LIMITS, min=0)] = 1,
    loras: Annotated[Path | None, option("Folder of LoRAs that requests may name.", "DIR", PIPELINE)] = None,
    max_loras: Annotated[int, option("LoRAs of requests that stay loaded.", "N", LIMITS, min=1)] = 4,
    warmup: Annotated[list[str] | None, option("Generate this size before serving.", "WxH", INPUT)] = None,
    cors: Annotated[list[str] | None, option("Site whose pages may use the server.", "ORIGIN", INPUT)] = None,
    request_log: Annotated[Path | None, option("JSON lines, one per request.", "FILE", INPUT)] = None,
    log_level: Annotated[str, option("debug, info, warning or error.", "LEVEL", INPUT)] = "info",
    debug: options.Debug = False,
) -> None:
    """Serve images or videos over HTTP with OpenAI's images API, on Ray Serve."""
    api_key = os.environ.get(api_key_env) or None
    if api_key is None and host not in _LOOPBACK:
        raise typer.BadParameter(f"--host {host} is reachable from other hosts: set {api_key_env} to an API key.")
    if log_level.lower() not in _LEVELS:
        raise typer.BadParameter(f"--log-level {log_level}: expected {', '.join(_LEVELS[:-1])} or {_LEVELS[-1]}.")
    level = logging.getLevelNamesMapping()[log_level.upper()]
    _require_limits(limits)
    groups.require_valid()
    checked = checks.check(model, run, debug=debug)
    checked.require_ranks(groups.ranks, groups.replicas)
    checked.require_format(format_)
    recipe = checked.recipe
    _require_fit(recipe, limits.max_batch, loras)
    require_file(request_log)
    if max_size is not None:
        _pixels(max_size, "image")
    for size in warmup or ():
        _require_warmup(size)

    announce_imports()
    from para_core.cli.ranks import count_ranks, describe_signal, quiet, terminable
    from para_core.fleet import serving
    from para_core.fleet.classical import refuse_ranks
    from para_core.fleet.rank import ReplicaOptions
    from para_core.fleet.reading import ServerOptions

    quiet(debug)
    pipeline = checks.describe_model(model, checked)
    pipeline = replace(pipeline, others=tuple(pipelines_for(checked.selection.home, images=not pipeline.edits)))
    if loras is not None and not pipeline.takes_loras:
        raise typer.BadParameter(f"--loras {loras}: {pipeline.pipeline} loads no LoRAs.")
    delivery = Delivery(choose_format(pipeline, format_), fps)
    server_options = ServerOptions(
        api_key=api_key,
        delivery=delivery,
        seed=seed,
        videos=out.expanduser().absolute(),
        loras=None if loras is None else loras.absolute(),
        cors=tuple(cors or ()),
        request_log=None if request_log is None else request_log.absolute(),
        pixels=_pixels(max_size, pipeline.kind),
        **vars(limits),
    )
    ranks = count_ranks(groups.ranks, groups.replicas)
    refuse_ranks(pipeline, ranks)
    replica_options = ReplicaOptions(
        ranks,
        spread,
        groups.room,
        prompt_bytes=int(encoded_prompts * 1e9),
        loras=0 if loras is None else max_loras,
        warmup=tuple(_warmup_request(pipeline, size, delivery) for size in warmup or ()),
    )
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    # Ray prints messages on stdout, while this command uses stderr. docker stop and systemd send SIGTERM.
    with (
        Path(os.devnull).open("w") as sink,
        nullcontext() if debug else redirect_stdout(sink),
        _logged(level),
        terminable(),
    ):
        log = None
        try:
            log = serving.start(
                pipeline,
                recipe,
                server_options,
                replica_options,
                replicas=groups.replicas,
                host=host,
                port=port,
                log_level=level,
                debug=debug,
            )
            address = f"[{host}]" if ":" in host else host
            console.print(f"{pipeline.pipeline} answers on http://{address}:{port}/ (stop with Ctrl-C)", markup=False)
            while True:
                time.sleep(1)
        except KeyboardInterrupt as end:
            logger.info("%s", describe_signal(end)[0])
            if log is not None:
                log.close()
            serving.stop()


@contextmanager
def _logged(level: int) -> Iterator[None]:
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


def _require_limits(limits: LimitOptions) -> None:
    if limits.waiting < 0 or limits.retries < 0:
        raise typer.BadParameter(
            f"--queue {limits.waiting} and --retries {limits.retries}: expected at least 0 of each."
        )
    if limits.steps < 1 or not limits.seconds > 0:
        values = f"--max-steps {limits.steps} and --request-seconds {limits.seconds:g}"
        raise typer.BadParameter(f"{values}: expected more than 0 of each.")


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
            raise typer.BadParameter(f"--loras with {name} {value}: LoRAs of requests need layers that can change.")


def _warmup_request(model: Model, size: str, delivery: Delivery) -> Request:
    """Return a request of two steps for ``size``, given as ``"WxH"`` or ``"WxHxFRAMES"``."""
    fields: dict[str, Any] = {"size": size, **dict.fromkeys(model.required, "blank")}
    if "prompt" in model.fields:
        fields["prompt"] = "warm-up"
    if "num_inference_steps" in model.fields:
        fields["steps"] = 2
    if size.count("x") == 2:
        fields["size"], _, frames = size.rpartition("x")
        fields["frames"] = int(frames) if frames.isdecimal() else 0
    try:
        return replace(make_request(fields, model, read_image=_blank_image), delivery=delivery)
    except ValueError as error:
        raise typer.BadParameter(f"--warmup {size}: {error}") from None


def _blank_image(name: str) -> bytes:
    from PIL import Image

    file = BytesIO()
    Image.new("RGB", (64, 64), "white").save(file, "PNG")
    return file.getvalue()


def _require_warmup(size: str) -> None:
    """Raise typer.BadParameter if ``size`` is neither ``"WxH"`` nor ``"WxHxFRAMES"``."""
    plane, _, frames = size.rpartition("x") if size.count("x") == 2 else (size, "", "1")
    try:
        read_size(plane)
    except ValueError as error:
        raise typer.BadParameter(f"--warmup {size}: {error}") from None
    if not frames.isdecimal() or int(frames) < 1:
        raise typer.BadParameter(f"--warmup {size}: expected width x height, or width x height x frames.")


def _pixels(size: str | None, kind: Kind) -> int:
    if size is None:
        return {"image": 2048 * 2048, "video": 1280 * 720 * 129}[kind]
    # A third number, if any, is the number of frames.
    plane, _, frames = size.rpartition("x") if size.count("x") == 2 else (size, "", "1")
    width, height = read_size(plane)
    if not frames.isdecimal() or int(frames) < 1:
        raise typer.BadParameter(f"--max-size {size}: expected width x height, or width x height x frames.")
    return width * height * int(frames)
