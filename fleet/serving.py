"""The server on Ray Serve: one deployment of replicas, and one that answers HTTP and forwards requests to them."""

from __future__ import annotations

import asyncio
import contextvars
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

from ray import serve

from para_core.fleet import group
from para_core.fleet.failures import ReplicaDied, RequestCancelled, RequestFailed
from para_core.fleet.foresee import Memory
from para_core.fleet.limits import Limits
from para_core.fleet.models import Model
from para_core.fleet.recipe import Recipe
from para_core.fleet.request import Request
from para_core.fleet.server import Server
from para_core.fleet.work import Result

APP, REPLICAS = "para_core", "para_core_replicas"
_ANSWER_SECONDS = 10.0
# A kind and its value.
Event = tuple[str, Any]
_FAILURES = {"failed": RequestFailed, "cancelled": RequestCancelled, "died": ReplicaDied}


class ReplicaDeployment:
    """A replica as a Serve deployment. It answers one request at a time, and restarts its ranks after one died."""

    async def __init__(  # type: ignore[misc]
        self, recipe: Recipe, shape: group.ReplicaShape, format_: str, fps: int
    ) -> None:
        self._replica = group.Replica(recipe, shape, format_=format_, fps=fps)
        await self._replica.start()

    async def generate(self, id_: str, request: Request) -> AsyncIterator[Event]:
        """Yield ``begin`` with the first rank (for :func:`group.cancel`), ``step``, and then ``done`` or a failure."""
        events: asyncio.Queue[Event] = asyncio.Queue()
        if not self._replica.actors:  # an earlier restart failed
            await self._replica.restart()
        yield "begin", self._replica.actors[0]
        task = asyncio.ensure_future(self._answer(id_, request, events))
        try:
            while True:
                kind, value = await events.get()
                yield kind, value
                if kind == "died":
                    # Serve sends no other request here until the generator ends.
                    yield "restarted", await self._replica.restart()
                if kind != "step":
                    break
        finally:
            if not task.done() and self._replica.actors:  # the caller stopped iterating
                group.cancel(self._replica.actors[0], id_)

    async def _answer(self, id_: str, request: Request, events: asyncio.Queue[Event]) -> None:
        def progress(done: int) -> None:
            events.put_nowait(("step", done))

        try:
            events.put_nowait(("done", await self._replica.generate(request, id_=id_, progress=progress)))
        except tuple(_FAILURES.values()) as error:
            kind = next(name for name, failure in _FAILURES.items() if isinstance(error, failure))
            events.put_nowait((kind, str(error)))

    async def memory(self, room: float | None) -> Memory | None:
        return await self._replica.memory(room)


class ServeBackend:
    """Backend of the server that sends each request to a free replica through a Serve handle."""

    def __init__(self, handle: Any, replicas: int) -> None:
        self._handle = handle.options(method_name="generate", stream=True)
        self._replicas = replicas
        self._restarting = 0
        self._first_ranks: dict[str, Any] = {}
        self._cancelled: set[str] = set()
        self._reading: set[asyncio.Future[None]] = set()
        # When a client disconnects, Serve cancels every Ray task that was started in the request's context, including
        # running ranks. Calls of replicas run in a copy of this context instead, and are cancelled between two steps.
        self._context = contextvars.copy_context()

    async def generate(self, id_: str, request: Request, progress: Callable[[int], None]) -> Result:
        answer: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        # Events are read to their end, even if nobody waits: a replica that died is restarted after its last answer.
        reading = asyncio.get_running_loop().create_task(
            self._read(id_, request, progress, answer), context=self._context.copy()
        )
        self._reading.add(reading)
        reading.add_done_callback(self._reading.discard)
        return await asyncio.shield(answer)

    async def _read(
        self, id_: str, request: Request, progress: Callable[[int], None], answer: asyncio.Future[Result]
    ) -> None:
        died = False
        try:
            async for kind, value in self._handle.remote(id_, request):
                if kind == "begin":
                    self._first_ranks[id_] = value
                    if id_ in self._cancelled:
                        group.cancel(value, id_)
                elif kind == "step":
                    progress(value)
                elif kind == "done":
                    answer.set_result(value)
                elif kind in _FAILURES:
                    died = kind == "died"
                    self._restarting += died
                    answer.set_exception(_FAILURES[kind](value))
                    self._first_ranks.pop(id_, None)
        except Exception as error:
            if not answer.done():
                answer.set_exception(ReplicaDied(f"the replica's actor ended: {group.cause(error)}"))
        finally:
            if not answer.done():
                answer.set_exception(ReplicaDied("the replica ended without an answer."))
            self._restarting -= died
            self._first_ranks.pop(id_, None)
            self._cancelled.discard(id_)

    def cancel(self, id_: str) -> None:
        self._cancelled.add(id_)
        if id_ in self._first_ranks:
            self._context.copy().run(group.cancel, self._first_ranks[id_], id_)

    async def ready(self) -> int:
        return self._replicas - self._restarting


class Front:
    """The deployment that answers HTTP."""

    def __init__(
        self, handle: Any, model: Model, limits: Limits, format_: str, replicas: int, api_key: str | None
    ) -> None:
        backend = ServeBackend(handle, replicas)
        self._server = Server(backend, model, limits, format_=format_, replicas=replicas, api_key=api_key)

    def __serve_build_asgi_app__(self) -> Any:
        return self._server.app


def start(
    model: Model,
    recipe: Recipe,
    shape: group.ReplicaShape,
    limits: Limits,
    *,
    replicas: int,
    format_: str,
    fps: int,
    host: str,
    port: int,
    api_key: str | None,
    room: float | None = None,
    debug: bool = False,
) -> None:
    """Start the server on Ray, and return when it answers.

    Args:
        api_key (`str`, *optional*): Key that requests must send.
        room (`float`, *optional*): Bytes of a rank for weights and results. Defaults to the memory of its device.

    Raises:
        OSError: If the port is in use.
        ValueError: If the cluster is too small.
        RuntimeError: If a replica cannot start, the cluster runs such a server already, or Serve listens on another
            port.
    """
    _require_free(host, port)
    group.connect(shape.ranks * replicas, debug=debug)
    group.require_cluster(shape, replicas)
    if {APP, REPLICAS} & serve.status().applications.keys():
        raise RuntimeError("this Ray cluster runs a para_core server already: stop it, or use another cluster.")
    try:
        serve.start(http_options={"host": host, "port": port}, proxy_location="HeadOnly")
        deployment = serve.deployment(ReplicaDeployment, name="Replicas").options(
            num_replicas=replicas,
            max_ongoing_requests=1,
            ray_actor_options={"num_cpus": 0},
            # Loading that fails once fails again.
            max_constructor_retry_count=1,
        )
        front = serve.deployment(serve.ingress()(Front), name="Front").options(
            num_replicas=1, max_ongoing_requests=10_000, ray_actor_options={"num_cpus": 0}
        )
        try:
            handle = serve.run(deployment.bind(recipe, shape, format_, fps), name=REPLICAS, route_prefix=None)
        except RuntimeError as error:
            raise RuntimeError(f"a replica cannot start: {_constructor_error() or error}") from error
        limits = replace(limits, memory=handle.memory.remote(room).result())
        serve.run(front.bind(handle, model, limits, format_, replicas, api_key), name=APP, route_prefix="/")
        _require_answer(host, port)
    except BaseException:
        stop()
        raise


def _constructor_error() -> str:
    """Return what the constructor of a replica raised. Serve raises a general error and keeps this one as text."""
    application = serve.status().applications.get(REPLICAS)
    deployments = application.deployments.values() if application is not None else ()
    lines = [deployment.message.strip().splitlines()[-1] for deployment in deployments if deployment.message.strip()]
    return lines[0].partition("Error: ")[2] if lines else ""


def _require_free(host: str, port: int) -> None:
    """Raise OSError if the port is in use. Serve would notice only after loading the replicas."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise OSError(
                f"port {port} of {host} cannot be used ({error.strerror}): choose another with --port."
            ) from error


def _require_answer(host: str, port: int) -> None:
    """Raise RuntimeError if Serve, which may have been started before, listens on another port."""
    try:
        socket.create_connection((host, port), timeout=_ANSWER_SECONDS).close()
    except OSError as error:
        raise RuntimeError(
            f"Ray Serve runs on this cluster already and does not listen on {host}:{port}: pass its port with --port, "
            "or stop it first (serve shutdown)."
        ) from error


def stop() -> None:
    """Stop the server. A Ray cluster and a Serve instance that existed before keep running."""
    for name in {APP, REPLICAS} & serve.status().applications.keys():
        serve.delete(name)
