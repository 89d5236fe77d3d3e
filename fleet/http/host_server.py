"""The server: a web server and the owner of the replicas, which may be on other hosts, in this process.

`cli/serve.py` calls :func:`run_server`. The routes stand in `server.py`, which other web servers can run as
an ASGI application, and the replicas in `pool.py`. Tests: tests/fleet/test_host_server.py,
tests/cli/test_interrupts.py.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import uvicorn

from para_core.fleet.http.bodies import ServerOptions
from para_core.fleet.http.pool import Pool
from para_core.fleet.http.server import Server
from para_core.fleet.pipeline_info import PipelineInfo
from para_core.fleet.rank import ReplicaOptions
from para_core.fleet.recipe import Recipe
from para_core.fleet.result_files import lock_folder

# Largest size of a request's head in bytes, above what the server itself accepts, so that it answers and not
# uvicorn.
_HEAD_BYTES = 2**20
logger = logging.getLogger(__name__)


class _WebServer(uvicorn.Server):
    """Web server that leaves signals to its caller."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run_server(
    model: PipelineInfo,
    recipe: Recipe,
    options: ServerOptions,
    replica_options: ReplicaOptions,
    *,
    replicas: int = 1,
    host: str,
    port: int,
    ready: Callable[[], None],
    debug: bool = False,
) -> None:
    """Serve ``replicas`` replicas at this address until SIGINT or SIGTERM, which is logged. No rank remains.
    Called in the main thread, which alone gets signals.

    Requests are answered with 503 until all replicas have loaded; then ``ready`` is called. ``debug`` shows
    Ray's log messages.

    Raises:
        OSError: The port is in use.
        ValueError: There are too few GPUs, or the Ray cluster is too small.
        RuntimeError: A replica cannot start, or another command has the folder of asynchronous videos.
    """
    logger.info("starting: %s, %d replicas of %d ranks", model.pipeline, replicas, replica_options.ranks)
    with ExitStack() as stack:
        listener = stack.enter_context(bind_socket(host, port))
        if model.kind == "video" and options.videos is not None:
            options.videos.mkdir(parents=True, exist_ok=True)
            stack.enter_context(lock_folder(options.videos))
        pool = Pool(recipe, replica_options, replicas, debug=debug)
        server = Server(pool, model, options)
        server.loading = True
        begun = time.monotonic()

        def on_loaded() -> None:
            logger.info("ready after %.1f s, on port %d of %s", time.monotonic() - begun, port, host)
            ready()

        asyncio.run(_serve_until_signal(pool, server, listener, on_loaded))


async def _serve_until_signal(
    pool: Pool, server: Server, listener: socket.socket, on_loaded: Callable[[], None]
) -> None:
    """Load the replicas and serve, until a signal arrives. Raise what loading raises."""
    loop = asyncio.get_running_loop()
    received: asyncio.Future[signal.Signals] = loop.create_future()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, _note_signal, received, number)
    # This package logs requests itself. Connections that the end of this process cuts are no errors.
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
    config = uvicorn.Config(
        server.app,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        h11_max_incomplete_event_size=_HEAD_BYTES,
    )
    web = asyncio.ensure_future(_WebServer(config).serve(sockets=[listener]))
    tasks = [web, asyncio.ensure_future(_load_replicas(pool, server, on_loaded))]
    try:
        waiting: set[asyncio.Future[Any]] = {received, *tasks}
        while not received.done():
            ended, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()  # raises what loading raised
        server.ending = True
        word = "ended by SIGTERM"
        if received.result() == signal.SIGINT:
            word = "interrupted"
        lost = ""
        if server.unfinished:
            lost = f", {server.unfinished} requests were not finished"
        logger.info("%s: all ranks end%s", word, lost)
    finally:
        for task in tasks:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await pool.stop()


def _note_signal(received: asyncio.Future[signal.Signals], number: signal.Signals) -> None:
    if not received.done():
        received.set_result(number)


async def _load_replicas(pool: Pool, server: Server, on_loaded: Callable[[], None]) -> None:
    """Load the replicas, and let the server accept requests, once the limit of its memory is known."""
    await pool.start()
    server.set_memory(await pool.memory())
    server.loading = False
    on_loaded()


@contextmanager
def bind_socket(host: str, port: int) -> Iterator[socket.socket]:
    """Yield a socket with this address, on which nobody listens yet. Raise OSError if the port cannot be
    used.
    """
    family = socket.AF_INET
    if ":" in host:
        family = socket.AF_INET6
    with socket.socket(family) as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((host, port))
        except OSError as error:
            raise OSError(
                f"port {port} of {host} cannot be used ({error.strerror}): choose another with --port."
            ) from error
        yield bound
