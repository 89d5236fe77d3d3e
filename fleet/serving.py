"""The server on Ray Serve: one deployment of replicas, and one that answers HTTP and hands requests to them."""

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
# An event is a kind and a value.
Event = tuple[str, Any]
_FAILURES = {"failed": RequestFailed, "cancelled": RequestCancelled, "died": ReplicaDied}


class ReplicaDeployment:
    """One replica in Serve's hands: it answers one request at a time, and makes its ranks again when one has died."""

    async def __init__(  # type: ignore[misc]
        self, recipe: Recipe, shape: group.ReplicaShape, format_: str, fps: int
    ) -> None:
        self._replica = group.Replica(recipe, shape, format_=format_, fps=fps)
        await self._replica.start()

    async def generate(self, id_: str, request: Request) -> AsyncIterator[Event]:
        """``begin`` with the first rank, by which the request can be cancelled; ``step``; then ``done``, or how it failed."""
        events: asyncio.Queue[Event] = asyncio.Queue()
        if not self._replica.actors:  # it could not be made again before
            await self._replica.restart()
        yield "begin", self._replica.actors[0]
        task = asyncio.ensure_future(self._answer(id_, request, events))
        try:
            while True:
                kind, value = await events.get()
                yield kind, value
                if kind == "died":
                    # While this goes on Serve sends no other request here.
                    yield "restarted", await self._replica.restart()
                if kind != "step":
                    break
        finally:
            if not task.done() and self._replica.actors:  # nobody listens any more
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
    """The replicas behind a handle of Serve's, which sends each request to one that is free."""

    def __init__(self, handle: Any, replicas: int) -> None:
        self._handle = handle.options(method_name="generate", stream=True)
        self._replicas = replicas
        self._restarting = 0
        self._first_ranks: dict[str, Any] = {}
        self._cancelled: set[str] = set()
        self._reading: set[asyncio.Future[None]] = set()
        # When a client leaves, Serve cancels its request with every task of Ray's that was started in its context, running ranks
        # among them. What goes to replicas is started in this one, and cancelled between two steps instead.
        self._context = contextvars.copy_context()

    async def generate(self, id_: str, request: Request, progress: Callable[[int], None]) -> Result:
        answer: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        # Read to its end in any case: a replica that died is made again behind its answer.
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
    """What answers HTTP: Serve builds it in an actor of its own."""

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
        room: bytes that results and weights may take of a rank; None: as much as its device has.

    Raises:
        OSError: the port is in use.
        ValueError: the cluster has no room for the replicas.
        RuntimeError: a replica cannot be made, or the cluster has such a server, or another one of Serve's at another port.
    """
    _require_free(host, port)
    group.connect(shape.ranks * replicas, debug=debug)
    group.require_cluster(shape, replicas)
    if {APP, REPLICAS} & serve.status().applications.keys():
        raise RuntimeError(
            "this Ray cluster has a para_core server already: end that one, or start this one on another cluster."
        )
    try:
        serve.start(http_options={"host": host, "port": port}, proxy_location="HeadOnly")
        made = serve.deployment(ReplicaDeployment, name="Replicas").options(
            num_replicas=replicas,
            max_ongoing_requests=1,
            ray_actor_options={"num_cpus": 0},
            # What cannot be loaded once cannot be loaded a third time.
            max_constructor_retry_count=1,
        )
        front = serve.deployment(serve.ingress()(Front), name="Front").options(
            num_replicas=1, max_ongoing_requests=10_000, ray_actor_options={"num_cpus": 0}
        )
        try:
            handle = serve.run(made.bind(recipe, shape, format_, fps), name=REPLICAS, route_prefix=None)
        except RuntimeError as error:
            raise RuntimeError(f"a replica cannot be made: {_why_not_made() or error}") from error
        limits = replace(limits, memory=handle.memory.remote(room).result())
        serve.run(front.bind(handle, model, limits, format_, replicas, api_key), name=APP, route_prefix="/")
        _require_answer(host, port)
    except BaseException:
        stop()
        raise


def _why_not_made() -> str:
    """What the constructor of a replica raised: Serve keeps it, as text with its traceback, and says only that it failed."""
    application = serve.status().applications.get(REPLICAS)
    deployments = application.deployments.values() if application is not None else ()
    lines = [deployment.message.strip().splitlines()[-1] for deployment in deployments if deployment.message.strip()]
    return lines[0].partition("Error: ")[2] if lines else ""


def _require_free(host: str, port: int) -> None:
    """Before replicas are loaded: Serve would find it afterwards."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((host, port))
        except OSError as error:
            raise OSError(
                f"port {port} of {host} cannot be had ({error.strerror}): name another with --port."
            ) from error


def _require_answer(host: str, port: int) -> None:
    """Serve that was there before listens where it did."""
    try:
        socket.create_connection((host, port), timeout=_ANSWER_SECONDS).close()
    except OSError as error:
        raise RuntimeError(
            f"Ray Serve runs on this cluster already, and does not listen on {host}:{port}: name its port with --port, or end it "
            "first (serve shutdown)."
        ) from error


def stop() -> None:
    """End the server; the cluster goes on, if it was there before, and so does Serve, with what else it has there."""
    for name in {APP, REPLICAS} & serve.status().applications.keys():
        serve.delete(name)
