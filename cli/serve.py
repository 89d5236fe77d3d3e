"""``para_core serve``: replicas behind HTTP, until Ctrl-C."""

from __future__ import annotations

import os
import signal
import time
from typing import Annotated, cast

import typer
from rich.console import Console

from para_core.attention.options import RotateMethod
from para_core.cli.generate import count_ranks, read_threshold
from para_core.cli.ranks import quiet
from para_core.fleet.limits import Limits
from para_core.fleet.models import Kind, find_model
from para_core.fleet.outputs import choose_format
from para_core.fleet.recipe import Compile, Dtype, Recipe, Weights, read_mesh_sizes, require_loras
from para_core.fleet.request import read_size

WHAT, HOW, LIMITS = "What", "How", "Limits"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def serve(
    model: Annotated[
        str | None,
        typer.Option(help="Folder, Hub name; left out: tiny FLUX.", metavar="NAME", rich_help_panel=WHAT),
    ] = None,
    replicas: Annotated[int, typer.Option(help="Groups of ranks.", metavar="N", rich_help_panel=WHAT)] = 1,
    ranks: Annotated[
        int | None, typer.Option(help="Of each; left out: all GPUs, evenly.", metavar="N", rich_help_panel=WHAT)
    ] = None,
    host: Annotated[
        str, typer.Option(help="Others need an API key.", metavar="IP", rich_help_panel=WHAT)
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, metavar="N", rich_help_panel=WHAT)] = 8000,
    api_key_env: Annotated[
        str, typer.Option(help="Environment variable with the API key.", metavar="NAME", rich_help_panel=WHAT)
    ] = "PARA_CORE_API_KEY",
    format_: Annotated[
        str | None,
        typer.Option("--format", help="png, jpg, webp; mp4, gif, webp.", metavar="EXT", rich_help_panel=WHAT),
    ] = None,
    fps: Annotated[int, typer.Option(min=1, help="Frames per second.", metavar="N", rich_help_panel=WHAT)] = 16,
    cache: Annotated[
        str | None, typer.Option(help="First Block Cache: a threshold, or default.", metavar="X", rich_help_panel=HOW)
    ] = None,
    compile_: Annotated[
        str, typer.Option("--compile", help="no, blocks or whole.", metavar="HOW", rich_help_panel=HOW)
    ] = "no",
    weights: Annotated[
        str, typer.Option(help="replicate, fsdp or tensor.", metavar="HOW", rich_help_panel=HOW)
    ] = "replicate",
    vae: Annotated[bool, typer.Option("--vae", help="The VAE on all ranks, too.", rich_help_panel=HOW)] = False,
    dtype: Annotated[
        str, typer.Option(help="auto, float32, bfloat16 or float16.", metavar="TYPE", rich_help_panel=HOW)
    ] = "auto",
    lora: Annotated[
        list[str] | None, typer.Option(help="File or Hub name[:scale].", metavar="NAME", rich_help_panel=HOW)
    ] = None,
    mesh: Annotated[
        str, typer.Option(help="batch=2,ring=2; left out: chosen.", metavar="DIMS", rich_help_panel=HOW)
    ] = "",
    rotate_method: Annotated[
        str | None, typer.Option(help="Of keys in a ring: alltoall, allgather, 2d.", metavar="HOW", rich_help_panel=HOW)
    ] = None,
    spread: Annotated[
        bool, typer.Option("--spread", help="Ranks of a replica on several nodes.", rich_help_panel=HOW)
    ] = False,
    timeout: Annotated[
        float, typer.Option(help="Seconds ranks wait for others.", metavar="S", rich_help_panel=HOW)
    ] = 600,
    queue: Annotated[int, typer.Option(help="Requests that may wait.", metavar="N", rich_help_panel=LIMITS)] = 8,
    max_size: Annotated[
        str | None,
        typer.Option(
            help="Pixels of a request; left out: 2048x2048, videos 1280x720x129.", metavar="WxH", rich_help_panel=LIMITS
        ),
    ] = None,
    memory: Annotated[
        float | None,
        typer.Option(help="Of a rank; left out: its device's.", metavar="GB", rich_help_panel=LIMITS),
    ] = None,
    max_steps: Annotated[int, typer.Option(metavar="N", rich_help_panel=LIMITS)] = 200,
    request_seconds: Annotated[
        float, typer.Option(help="Waiting included.", metavar="S", rich_help_panel=LIMITS)
    ] = 600,
    retries: Annotated[int, typer.Option(help="After a replica died.", metavar="N", rich_help_panel=LIMITS)] = 0,
    debug: Annotated[
        bool, typer.Option("--debug", help="Tracebacks, and all messages.", rich_help_panel=LIMITS)
    ] = False,
) -> None:
    """Serve images or videos over HTTP with OpenAI's images API, on Ray Serve."""
    quiet(debug)
    api_key = os.environ.get(api_key_env) or None
    if api_key is None and host not in _LOOPBACK:
        raise typer.BadParameter(f"--host {host} is reached from elsewhere: set {api_key_env} to an API key first.")
    try:
        from para_core.fleet import serving
        from para_core.fleet.group import ReplicaShape
    except ModuleNotFoundError as error:
        raise ImportError(f"serve needs {error.name}: pip install 'para_core[fleet]'.") from error
    found = find_model(model)
    recipe = Recipe(
        found.name,
        dtype=cast(Dtype, dtype),
        mesh=read_mesh_sizes(mesh),
        rotate_method=cast(RotateMethod | None, rotate_method),
        cache=read_threshold(cache),
        compile=cast(Compile, compile_),
        weights=cast(Weights, weights),
        vae=vae,
        lora=tuple(lora or ()),
        timeout=timeout,
    )
    require_loras(recipe)
    if memory is not None and not memory > 0:
        raise typer.BadParameter(f"--memory {memory:g}: expected more than 0 GB.")
    if queue < 0 or retries < 0:
        raise typer.BadParameter(f"--queue {queue} and --retries {retries}: expected at least 0 of each.")
    if max_steps < 1 or not request_seconds > 0:
        given = f"--max-steps {max_steps} and --request-seconds {request_seconds:g}"
        raise typer.BadParameter(f"{given}: expected more than 0 of each.")
    limits = Limits(
        waiting=queue, pixels=_pixels(max_size, found.kind), steps=max_steps, seconds=request_seconds, retries=retries
    )
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    serving.start(
        found,
        recipe,
        ReplicaShape(count_ranks(ranks, replicas), spread),
        limits,
        replicas=replicas,
        format_=choose_format(found, format_),
        fps=fps,
        host=host,
        port=port,
        api_key=api_key,
        room=None if memory is None else memory * 1e9,
        debug=debug,
    )
    try:
        # What docker stop and systemd send ends the server as Ctrl-C does (Ray has set a handler of its own before): Serve would
        # outlive this process on a cluster of others.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        address = f"[{host}]" if ":" in host else host
        console.print(f"{found.pipeline} answers on http://{address}:{port}/ (Ctrl-C ends it)", markup=False)
        while True:
            time.sleep(1)
    except KeyboardInterrupt:
        serving.stop()


def _pixels(size: str | None, kind: Kind) -> int:
    if size is None:
        return {"image": 2048 * 2048, "video": 1280 * 720 * 129}[kind]
    # A third number is that of frames.
    plane, _, frames = size.rpartition("x") if size.count("x") == 2 else (size, "", "1")
    width, height = read_size(plane)
    if not frames.isdecimal() or int(frames) < 1:
        raise typer.BadParameter(f"--max-size {size}: expected width x height, or width x height x frames.")
    return width * height * int(frames)
