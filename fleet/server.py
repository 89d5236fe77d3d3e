"""The HTTP side of a fleet, as an ASGI application: who may ask, what is refused, how progress is told, and cancelling.

It knows replicas only as a :class:`Backend`; those on Ray are in :mod:`para_core.fleet.serving`.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import re
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from para_core.fleet.failures import ReplicaDied, RequestCancelled, RequestFailed
from para_core.fleet.limits import Limits, RequestError
from para_core.fleet.metrics import Metrics
from para_core.fleet.models import Model
from para_core.fleet.outputs import Output
from para_core.fleet.reading import read_body, read_request
from para_core.fleet.request import Request
from para_core.fleet.work import Result

_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_MEDIA_TYPES = {"png": "image/png", "jpg": "image/jpeg", "webp": "image/webp", "gif": "image/gif", "mp4": "video/mp4"}
# Of results that wait to be fetched by their url, in the memory of the server.
_STORED_BYTES = 256 * 2**20
# Between looks whether the client is still there.
_LOOK_SECONDS = 0.2


class Backend(Protocol):
    """Replicas, of which each answers one request at a time."""

    async def generate(self, id_: str, request: Request, progress: Callable[[int], None]) -> Result:
        """The result; raises RequestFailed, RequestCancelled or ReplicaDied. Waits while all replicas are busy."""

    def cancel(self, id_: str) -> None:
        """End this request, waiting or running, after the step that is running."""

    async def ready(self) -> int:
        """How many replicas can answer."""


@dataclass
class PendingRequest:
    """A request that was accepted."""

    id_: str
    request: Request
    events: asyncio.Queue[dict[str, Any]] = field(default_factory=asyncio.Queue)
    steps_done: int = 0


class Server:
    """An ASGI application over ``backend``; :attr:`app` is what a web server runs.

    Args:
        replicas: how many there are, so that as many requests run while others wait.
        api_key: what every request has to carry; None: whoever reaches the server may ask, so it is reached from this
            machine alone.
    """

    def __init__(
        self, backend: Backend, model: Model, limits: Limits, *, format_: str, replicas: int, api_key: str | None
    ) -> None:
        self._backend, self._model, self._limits = backend, model, limits
        self._format, self._replicas, self._api_key = format_, replicas, api_key
        self._jobs: dict[str, PendingRequest] = {}
        self._stored: OrderedDict[str, tuple[Output, ...]] = OrderedDict()
        self._metrics = Metrics()
        path = "/v1/videos" if model.kind == "video" else "/v1/images/generations"
        self.app = Starlette(
            routes=[
                Route("/", self._page),
                Route("/health", self._health),
                Route("/metrics", self._guarded(self._show_metrics)),
                Route(path, self._guarded(self._generate), methods=["POST"]),
                Route(path + "/{id}", self._guarded(self._cancel), methods=["DELETE"]),
                Route("/v1/files/{id}/{index}", self._guarded(self._file)),
            ],
            exception_handlers={404: self._absent, 405: self._absent, 500: _failed},
        )
        self._said = f"this server generates {model.kind}s: POST {path}, DELETE {path}/ID, GET /health, /metrics and /."

    def _guarded(self, answer: Callable[[Any], Any]) -> Callable[[Any], Any]:
        async def guarded(http: Any) -> Response:
            try:
                self._require_allowed(http)
                response: Response = await answer(http)
            except RequestError as refusal:
                return JSONResponse(refusal.body(), refusal.status, headers=refusal.headers)
            return response

        return guarded

    def _require_allowed(self, http: Any) -> None:
        if self._api_key is not None:
            given = http.headers.get("authorization", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {self._api_key}".encode()):
                raise RequestError(
                    401, "invalid_api_key", "expected the header Authorization: Bearer with the server's key."
                )
        # Another site's page in a browser on this machine could ask by a name that leads here.
        elif http.url.hostname not in ("127.0.0.1", "localhost", "::1"):
            raise RequestError(
                403, "not_local", f"this server has no API key and answers on {', '.join(_LOOPBACK)} alone."
            )

    async def _absent(self, http: Any, error: Any) -> Response:
        code = {404: "not_found", 405: "method_not_allowed"}[error.status_code]
        return JSONResponse(RequestError(error.status_code, code, self._said).body(), error.status_code)

    async def _page(self, http: Any) -> Response:
        return HTMLResponse(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))

    async def _health(self, http: Any) -> Response:
        ready = await self._backend.ready()
        body = {"status": "ok" if ready else "no replica is ready", "ready": ready, "replicas": self._replicas}
        return JSONResponse(body, 200 if ready else 503)

    async def _show_metrics(self, http: Any) -> Response:
        self._metrics.accepted.set(len(self._jobs))
        self._metrics.waiting.set(max(0, len(self._jobs) - await self._backend.ready()))
        return Response(self._metrics.page(), media_type="text/plain; version=0.0.4")

    async def _cancel(self, http: Any) -> Response:
        id_ = http.path_params["id"]
        if id_ not in self._jobs:
            raise RequestError(404, "not_found", f"no request {id_!r} is waiting or running.")
        self._backend.cancel(id_)
        return JSONResponse({"id": id_, "cancelling": True})

    async def _file(self, http: Any) -> Response:
        id_, index = http.path_params["id"], http.path_params["index"]
        outputs = {str(place): output for place, output in enumerate(self._stored.get(id_, ()))}
        if index not in outputs:
            raise RequestError(404, "not_found", f"no result {id_[:64]!r}, {index[:64]!r} is stored here (any more).")
        return Response(outputs[index].data, media_type=_MEDIA_TYPES[self._format])

    async def _generate(self, http: Any) -> Response:
        # Before a body is read, which may be large.
        self._require_room()
        given = await read_body(http, self._limits)
        respond, stream = given.pop("response_format", "b64_json"), given.pop("stream", False)
        if respond not in ("b64_json", "url") or not isinstance(stream, bool):
            raise RequestError(
                400, "invalid_value", "expected response_format 'b64_json' or 'url', and stream true or false."
            )
        # Beside the loop that answers others: images are decoded.
        job = self._accept(http, await asyncio.to_thread(read_request, given, self._model, self._limits))
        task = asyncio.ensure_future(self._work(job))
        if stream:
            return StreamingResponse(self._events(job, task, http, respond), media_type="text/event-stream")
        try:
            await self._watch(job, task, http)
            return JSONResponse(self._body(job, task.result(), http, respond))
        finally:
            self._end(job, task)

    def _require_room(self) -> None:
        room = self._replicas + self._limits.waiting
        if len(self._jobs) >= room:
            self._metrics.requests.labels("refused").inc()
            seconds = max(1, round(self._metrics.mean_seconds() * self._limits.waiting / self._replicas))
            message = f"{len(self._jobs)} requests run or wait, and {room} may. Come back in {seconds} s."
            raise RequestError(429, "busy", message, {"Retry-After": str(seconds)})

    def _accept(self, http: Any, request: Request) -> PendingRequest:
        self._require_room()
        id_ = http.headers.get("x-request-id") or uuid.uuid4().hex
        if not _ID.fullmatch(id_) or id_ in self._jobs:
            raise RequestError(
                409, "invalid_id", f"X-Request-Id {id_[:64]!r} is in use, or not 1 to 64 of A-Z a-z 0-9 _ -."
            )
        job = self._jobs[id_] = PendingRequest(id_, request)
        return job

    async def _work(self, job: PendingRequest) -> Result:
        def progress(done: int) -> None:
            if done == job.steps_done:
                return
            self._metrics.steps.inc(max(0, done - job.steps_done))
            job.steps_done = done
            steps = job.request.fields.get("num_inference_steps")
            job.events.put_nowait({"type": "progress", "step": done, "steps": steps})

        for tries_left in range(self._limits.retries, -1, -1):
            try:
                return await self._backend.generate(job.id_, job.request, progress)
            except ReplicaDied:
                self._metrics.deaths.inc()
                job.steps_done = 0
                if tries_left == 0:
                    raise
        raise RuntimeError("the number of retries is negative.")

    async def _watch(self, job: PendingRequest, task: asyncio.Future[Result], http: Any) -> None:
        """Until the request has ended, whose client may leave, or whose time may run out.

        Raises:
            Refusal: it has no result.
        """
        start = time.monotonic()
        outcome = "failed"
        try:
            while not (await asyncio.wait({task}, timeout=_LOOK_SECONDS))[0]:
                if time.monotonic() - start > self._limits.seconds:
                    outcome = "timed_out"
                    raise RequestError(504, "timed_out", f"not done after {self._limits.seconds:g} s; cancelled.")
                if await http.is_disconnected():
                    outcome = "cancelled"
                    raise RequestError(499, "client_left", "the client left; cancelled.")
            error = task.exception()
            outcome = "cancelled" if isinstance(error, RequestCancelled) else "failed"
            if isinstance(error, RequestCancelled):
                raise RequestError(409, "cancelled", str(error))
            if isinstance(error, RequestFailed):
                raise RequestError(400, "refused_by_the_pipeline", str(error))
            if error is not None:
                raise RequestError(500, "replica_died", f"{error} The replica is being made again.")
            outcome = "done"
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        finally:
            self._metrics.requests.labels(outcome).inc()
            self._metrics.seconds.observe(time.monotonic() - start)

    def _end(self, job: PendingRequest, task: asyncio.Future[Result]) -> None:
        """The job leaves the table once no replica has it."""
        if task.done():
            self._forget(job, task)
        else:
            self._backend.cancel(job.id_)
            task.add_done_callback(lambda ended: self._forget(job, ended))

    def _forget(self, job: PendingRequest, task: asyncio.Future[Result]) -> None:
        self._jobs.pop(job.id_, None)
        if not task.cancelled():
            task.exception()  # seen, so that asyncio does not complain

    async def _events(
        self, job: PendingRequest, task: asyncio.Future[Result], http: Any, respond: str
    ) -> AsyncIterator[bytes]:
        """Server-sent events: ``accepted``, ``progress`` after steps, then ``done`` or ``error``."""
        watching = asyncio.ensure_future(self._watch(job, task, http))
        try:
            yield _event({"type": "accepted", "id": job.id_})
            while not watching.done():
                told = asyncio.ensure_future(job.events.get())
                await asyncio.wait({told, watching}, return_when=asyncio.FIRST_COMPLETED)
                if told.done():
                    yield _event(told.result())
                told.cancel()
            while not job.events.empty():
                yield _event(job.events.get_nowait())
            try:
                await watching
                yield _event({"type": "done", **self._body(job, task.result(), http, respond)})
            except RequestError as refusal:
                yield _event({"type": "error", **refusal.body()})
        finally:
            watching.cancel()
            self._end(job, task)

    def _body(self, job: PendingRequest, result: Result, http: Any, respond: str) -> dict[str, Any]:
        if respond == "url":
            self._store(job.id_, result.outputs)
            base = str(http.base_url).rstrip("/")
            data = [{"url": f"{base}/v1/files/{job.id_}/{index}"} for index in range(len(result.outputs))]
        else:
            data = [{"b64_json": base64.b64encode(output.data).decode()} for output in result.outputs]
        about = {
            name: result.metadata[name] for name in ("seconds", "size", "mesh", "versions") if name in result.metadata
        }
        return {"id": job.id_, "created": int(time.time()), "data": data, "para_core": about}

    def _store(self, id_: str, outputs: tuple[Output, ...]) -> None:
        self._stored[id_] = outputs
        self._stored.move_to_end(id_)
        while (
            len(self._stored) > 1 and sum(len(o.data) for kept in self._stored.values() for o in kept) > _STORED_BYTES
        ):
            self._stored.popitem(last=False)


async def _failed(http: Any, error: Exception) -> Response:
    refusal = RequestError(500, "server_error", "the server failed at this request; its log says why.")
    return JSONResponse(refusal.body(), refusal.status)


def _event(data: Mapping[str, Any]) -> bytes:
    return f"event: {data['type']}\ndata: {json.dumps(data)}\n\n".encode()
