"""``para_core serve``: serve replicas over HTTP until Ctrl-C."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from para_core.cli import options
from para_core.cli.options import INPUT, LIMITS, RANKS, flag, option
from para_core.fleet.models import Kind, find_model
from para_core.fleet.outputs import choose_format
from para_core.fleet.request import read_size

_RESULTS = Path("~/.cache/para_core/videos")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def serve(
    model: options.Model = None,
    host: Annotated[str, option("Other hosts need an API key.", "IP", INPUT)] = "127.0.0.1",
    port: Annotated[int, option(None, "N", INPUT, min=1, max=65535)] = 8000,
    api_key_env: Annotated[str, option("Variable with the API key.", "NAME", INPUT)] = "PARA_CORE_API_KEY",
    format_: options.Format = None,
    fps: options.Fps = 16,
    cache: options.Cache = None,
    compile_: options.Compile = "no",
    weights: options.Weights = "replicate",
    text_encoders: options.TextEncoders = None,
    offload: options.Offload = None,
    resident_blocks: options.ResidentBlocks = 1,
    quantize: options.Quantize = None,
    backend: options.Backend = None,
    vae: options.Vae = False,
    dtype: options.Dtype = "auto",
    lora: options.Lora = None,
    replicas: Annotated[int, option("Groups of ranks.", "N", RANKS)] = 1,
    ranks: Annotated[int | None, option("Ranks of each. Default: all GPUs, evenly.", "N", RANKS)] = None,
    mesh: options.Mesh = "",
    rotate_method: options.RotateMethod = None,
    comm_dtype: options.CommDtype = None,
    spread: Annotated[bool, flag("--spread", "Place a replica on several nodes.", RANKS)] = False,
    timeout: options.Timeout = 600,
    queue: Annotated[int, option("Requests that may wait.", "N", LIMITS)] = 8,
    max_size: Annotated[str | None, option("Default: 2048x2048, videos 1280x720x129.", "WxH", LIMITS)] = None,
    memory: Annotated[float | None, option("Of a rank. Default: its device's.", "GB", LIMITS)] = None,
    max_steps: Annotated[int, option(None, "N", LIMITS)] = 200,
    request_seconds: Annotated[float, option("Waiting included.", "S", LIMITS)] = 600,
    results: Annotated[Path, option("Folder of asynchronous videos.", "DIR", INPUT)] = _RESULTS,
    keep_hours: Annotated[float, option("How long these videos are kept.", "H", LIMITS, min=0)] = 24,
    retries: Annotated[int, option("Tries after a replica died.", "N", LIMITS)] = 0,
    debug: options.Debug = False,
) -> None:
    """Serve images or videos over HTTP with OpenAI's images API, on Ray Serve."""
    from para_core.cli.ranks import count_ranks, quiet
    from para_core.fleet.limits import Limits
    from para_core.fleet.recipe import require_loras

    quiet(debug)
    api_key = os.environ.get(api_key_env) or None
    if api_key is None and host not in _LOOPBACK:
        raise typer.BadParameter(f"--host {host} is reachable from other hosts: set {api_key_env} to an API key.")
    from para_core.fleet import serving
    from para_core.fleet.group import ReplicaShape
    from para_core.fleet.server import ServerOptions

    pipeline = find_model(model)
    recipe = options.make_recipe(
        pipeline.name,
        mesh=mesh,
        cache=cache,
        lora=lora,
        dtype=dtype,
        rotate_method=rotate_method,
        compile=compile_,
        weights=weights,
        text_encoders=text_encoders,
        offload=offload,
        resident_blocks=resident_blocks,
        quantize=quantize,
        backend=backend,
        comm_dtype=comm_dtype,
        vae=vae,
        timeout=timeout,
    )
    require_loras(recipe)
    if memory is not None and not memory > 0:
        raise typer.BadParameter(f"--memory {memory:g}: expected more than 0 GB.")
    if queue < 0 or retries < 0:
        raise typer.BadParameter(f"--queue {queue} and --retries {retries}: expected at least 0 of each.")
    if max_steps < 1 or not request_seconds > 0:
        values = f"--max-steps {max_steps} and --request-seconds {request_seconds:g}"
        raise typer.BadParameter(f"{values}: expected more than 0 of each.")
    pixels = _pixels(max_size, pipeline.kind)
    limits = Limits(waiting=queue, pixels=pixels, steps=max_steps, seconds=request_seconds, retries=retries)
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    serving.start(
        pipeline,
        recipe,
        ReplicaShape(count_ranks(ranks, replicas), spread),
        limits,
        ServerOptions(
            choose_format(pipeline, format_),
            replicas,
            api_key,
            fps,
            videos=results.expanduser(),
            keep_hours=keep_hours,
        ),
        host=host,
        port=port,
        room=None if memory is None else memory * 1e9,
        debug=debug,
    )
    try:
        # SIGTERM, which docker stop and systemd send, should act like Ctrl-C: with Ray's own handler, Serve would
        # outlive this process on a cluster that others started.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        address = f"[{host}]" if ":" in host else host
        console.print(f"{pipeline.pipeline} answers on http://{address}:{port}/ (stop with Ctrl-C)", markup=False)
        while True:
            time.sleep(1)
    except KeyboardInterrupt:
        serving.stop()


def _pixels(size: str | None, kind: Kind) -> int:
    if size is None:
        return {"image": 2048 * 2048, "video": 1280 * 720 * 129}[kind]
    # The third number, if any, counts frames.
    plane, _, frames = size.rpartition("x") if size.count("x") == 2 else (size, "", "1")
    width, height = read_size(plane)
    if not frames.isdecimal() or int(frames) < 1:
        raise typer.BadParameter(f"--max-size {size}: expected width x height, or width x height x frames.")
    return width * height * int(frames)
