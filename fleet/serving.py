"""The server on Ray Serve: a deployment that answers HTTP, and a deployment of the replicas that generate."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray import serve

from para_core.fleet import group
from para_core.fleet.failures import ReplicaDied
from para_core.fleet.host_server import bind_socket
from para_core.fleet.http.bodies import ServerOptions
from para_core.fleet.jobs import Job
from para_core.fleet.log_relay import Entry, LogReader, LogRelay, Position
from para_core.fleet.memory import Memory
from para_core.fleet.outputs import Output
from para_core.fleet.pipeline_info import Model
from para_core.fleet.rank import ReplicaOptions
from para_core.fleet.recipe import Recipe
from para_core.fleet.request import Request
from para_core.fleet.server import Server

APP, REPLICAS = "para_core", "para_core_replicas"
_ANSWER_SECONDS = 10.0
# Seconds between two reports of a replica that it lives, and how long it counts as ready after a report.
_REPORT_SECONDS, _SILENT_SECONDS = 1.0, 4.0
# Seconds to wait, after all replicas have loaded, until all of them have reported.
_READY_SECONDS = 60.0
_LOG_SECONDS = 0.2
logger = logging.getLogger(__name__)


class ReplicaDeployment:
    """A replica as a Ray Serve deployment. It runs one batch of requests at a time.

    If a rank dies, the replica restarts all its ranks. Every second it reports to :class:`Front` that all ranks live.
    """

    async def __init__(self, recipe: Recipe, options: ReplicaOptions, log_level: int) -> None:  # type: ignore[misc]
        self._id = uuid.uuid4().hex
        self._busy = False
        self._starting = asyncio.Lock()
        self._log = LogRelay()
        self._log.attach(log_level)
        self._logging = asyncio.ensure_future(self._send_log())
        name = f"replica {self._id[:4]}"
        self._replica = group.Replica(recipe, options, name)
        await self._replica.start()
        self._memory = await self._replica.memory()
        for request in options.warmup:
            start = time.monotonic()
            logger.info("%s: warming up for %s", name, request.size)
            await self._replica.generate(request)
            logger.info("%s: warmed up for %s after %.1f s", name, request.size, time.monotonic() - start)
        self._reporting = asyncio.ensure_future(self._report())

    async def generate(self, batch: Sequence[tuple[str, Request]]) -> AsyncIterator[tuple[str, Any]]:
        """Run a batch, and yield its events as pairs of kind and value.

        The first event is ``begin``, with the actor of the first rank (for :func:`group.cancel`). Each ``step`` has the
        number of finished steps, or a partial image. The last event is ``done`` with the outcomes of the requests, or
        ``died`` with a message.
        """
        self._busy = True
        task = None
        try:
            await self._ensure_running()
            yield "begin", self._replica.actors[0]
            events: asyncio.Queue[int | Output | None] = asyncio.Queue()
            task = asyncio.ensure_future(self._replica.generate_batch(batch, events.put_nowait))
            task.add_done_callback(lambda _: events.put_nowait(None))
            while (event := await events.get()) is not None:
                yield "step", event
            try:
                yield "done", await task
            except ReplicaDied as error:
                yield "died", str(error)
                # Restart the ranks before this generator ends, because the queue then sends the next batch.
                await self._ensure_running()
        finally:
            self._busy = False
            # Cancel the batch if the caller abandoned this generator.
            if task is not None and not task.done() and self._replica.actors:
                for id_, _ in batch:
                    group.cancel(self._replica.actors[0], id_)

    async def _ensure_running(self) -> None:
        async with self._starting:
            if not self._replica.actors:
                await self._replica.start()

    async def _send_log(self) -> None:
        """Send what this process logs to :class:`Front`, for ever."""
        sent = Position()
        while True:
            await asyncio.sleep(_LOG_SECONDS)
            position, entries = self._log.read(sent)
            # The front may be restarting, so the entries wait for the next try.
            with suppress(Exception):
                if entries:
                    await serve.get_deployment_handle("Front", APP).add_log.remote(entries)
                sent = position

    async def _report(self) -> None:
        """Report to :class:`Front` every second that all ranks live. Restart ranks that died while no request ran."""
        while True:
            try:
                if await self._replica.alive():
                    await serve.get_deployment_handle("Front", APP).replica_lives.remote(
                        self._id, self._memory
                    )
                elif not self._busy:
                    await self._replica.stop()
                    await self._ensure_running()
            except Exception as error:
                # The front may be restarting or the cluster busy, so the replica tries again a second later.
                logger.warning("a replica cannot report: %s", group.describe_cause(error))
            await asyncio.sleep(_REPORT_SECONDS)


class Front:
    """The Ray Serve deployment that answers HTTP. It holds the server and its queue, and sends batches to replicas."""

    def __init__(self, model: Model, options: ServerOptions, replicas: int, log_level: int) -> None:
        self.count = replicas  # number of replicas, also of those that cannot answer now
        self._handle: Any = None
        self._reports: dict[str, float] = {}
        self._log = LogRelay()
        self._log.attach(log_level)
        # Ray Serve's proxy adds the header X-Request-Id to each response, and to a request that has none.
        self._server = Server(self, model, options, send_id=False)
        self._server.loading = True

    def __serve_build_asgi_app__(self) -> Any:
        return self._server.app

    async def run(self, batch: Sequence[Job]) -> None:
        """Run jobs as one batch on a free replica, and finish them. Return or raise when the replica is free again."""
        if self._handle is None:
            self._handle = serve.get_deployment_handle("Replicas", REPLICAS).options(
                method_name="generate", stream=True
            )
        try:
            async for kind, value in self._handle.remote([(job.id_, job.request) for job in batch]):
                for index, job in enumerate(batch):
                    if kind == "step":
                        job.progress(value)
                    elif kind == "begin":
                        job.first_rank = value
                        if job.cancelled:
                            self.cancel(job)
                    elif kind == "died":
                        job.first_rank = None
                        job.finish(ReplicaDied(value))
                    else:
                        job.first_rank = None
                        job.finish(value[index])
        except Exception as error:
            raise ReplicaDied(f"the replica's actor ended: {group.describe_cause(error)}") from error

    def cancel(self, job: Job) -> None:
        """Cancel a running job after its current step."""
        if job.first_rank is not None:
            group.cancel(job.first_rank, job.id_)

    async def ready(self) -> int:
        """Return the number of replicas that reported within the last ``_SILENT_SECONDS``."""
        now = time.monotonic()
        return sum(now - last < _SILENT_SECONDS for last in self._reports.values())

    async def add_log(self, entries: Iterable[Entry]) -> None:
        """Keep what a replica logged, for :meth:`read_log`."""
        self._log.add(entries)

    async def read_log(self, position: Position) -> tuple[Position, list[Entry]]:
        """Return what this process and the replicas logged after ``position``, and the next position."""
        return self._log.read(position)

    async def replica_lives(self, id_: str, memory: Memory | None) -> None:
        """Note that all ranks of replica ``id_`` are running. ``memory`` is the predicted memory of a rank."""
        self._reports[id_] = time.monotonic()
        self._server.set_memory(memory)
        self._server.loading = False


def start(
    model: Model,
    recipe: Recipe,
    options: ServerOptions,
    replica_options: ReplicaOptions,
    *,
    replicas: int = 1,
    host: str,
    port: int,
    log_level: int = logging.WARNING,
    debug: bool = False,
) -> LogReader:
    """Start the server with ``replicas`` replicas on Ray at this address, and return when all have loaded.

    What its processes log at ``log_level`` or above is logged in this process, by the loggers of this package, until
    the object that is returned is closed.

    Raise OSError if the port is in use, ValueError if the cluster is too small, and RuntimeError if a replica cannot
    start, the cluster runs such a server already, or Serve listens on another port. ``debug`` shows Ray's log messages.
    """
    if not debug:
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
    begun = time.monotonic()
    logger.info("starting: %s, %d replicas of %d ranks", model.pipeline, replicas, replica_options.ranks)
    reader: LogReader | None = None
    with bind_socket(host, port):
        pass  # Serve itself would notice a used port only after loading the replicas.
    logger.info("starting Ray, or connecting to its cluster")
    group.connect(replica_options.ranks * replicas, debug=debug)
    group.require_cluster(replica_options, replicas)
    if {APP, REPLICAS} & serve.status().applications.keys():
        raise RuntimeError(
            "this Ray cluster runs a para_core server already: stop it, or use another cluster."
        )
    try:
        serve.start(http_options={"host": host, "port": port}, proxy_location="HeadOnly")
        deployment = serve.deployment(ReplicaDeployment, name="Replicas").options(
            num_replicas=replicas,
            max_ongoing_requests=1,
            ray_actor_options={"num_cpus": 0},
            # A replica that cannot load would fail again, so Serve must not retry.
            max_constructor_retry_count=1,
        )
        front = serve.deployment(serve.ingress()(Front), name="Front").options(
            num_replicas=1,
            max_ongoing_requests=10_000,
            # Place the front on the head node: Ray Serve listens there, and the results of asynchronous videos are on
            # its disk.
            ray_actor_options={"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}},
        )
        # The front starts before the replicas, so that it can answer 503 while they load.
        handle = serve.run(front.bind(model, options, replicas, log_level), name=APP, route_prefix="/")
        reader = LogReader(
            lambda position: handle.read_log.remote(position).result(timeout_s=_ANSWER_SECONDS)
        )
        _require_answer(host, port)
        try:
            serve.run(deployment.bind(recipe, replica_options, log_level), name=REPLICAS, route_prefix=None)
        except RuntimeError as error:
            raise RuntimeError(f"a replica cannot start: {_constructor_error() or error}") from error
        if _wait_until_ready(lambda: handle.ready.remote().result(), replicas):
            logger.info("ready after %.1f s, on port %d of %s", time.monotonic() - begun, port, host)
        return reader
    except BaseException:
        if reader is not None:
            reader.close()
        stop()
        raise


def _wait_until_ready(count_ready: Callable[[], int], replicas: int) -> bool:
    """Wait at most ``_READY_SECONDS`` for ``replicas`` ready replicas. Return whether they are, else log a warning."""
    deadline = time.monotonic() + _READY_SECONDS
    while (ready := count_ready()) < replicas:
        if time.monotonic() > deadline:
            logger.warning(
                "%d of %d replicas are ready %g s after all loaded", ready, replicas, _READY_SECONDS
            )
            return False
        time.sleep(_REPORT_SECONDS / 4)
    return True


def _constructor_error() -> str:
    """Return the message that the constructor of a replica raised: Serve keeps it as text in its status. Else ""."""
    application = serve.status().applications.get(REPLICAS)
    if application is None:
        return ""
    messages = [deployment.message.strip() for deployment in application.deployments.values()]
    last_lines = [message.splitlines()[-1] for message in messages if message]
    if not last_lines:
        return ""
    return str(last_lines[0].partition("Error: ")[2])


def _require_answer(host: str, port: int) -> None:
    """Raise RuntimeError if nothing listens on this address: Serve ran before, with another port."""
    try:
        socket.create_connection((host, port), timeout=_ANSWER_SECONDS).close()
    except OSError as error:
        raise RuntimeError(
            f"Ray Serve runs on this cluster already and does not listen on {host}:{port}: pass its port with --port, "
            "or stop it first (serve shutdown)."
        ) from error


def stop() -> None:
    """Delete the server's deployments, if there are any. Ray and Serve themselves keep running."""
    if not ray.is_initialized():
        return  # serve.status() would start a Ray cluster.
    names = {APP, REPLICAS} & serve.status().applications.keys()
    if names:
        logger.info("stopping")
    for name in names:
        serve.delete(name)
    if names:
        logger.info("stopped")
