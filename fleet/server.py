"""The HTTP server of a fleet, as an ASGI application: access, validation, progress events and cancelling.

It uses replicas through :class:`Backend`; :mod:`para_core.fleet.serving` implements one on Ray.
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

from fastapi import Depends, FastAPI, Security
from fastapi.security import HTTPBearer
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse

from para_core.fleet.failures import ReplicaDied, RequestCancelled, RequestFailed
from para_core.fleet.limits import Limits, RequestError
from para_core.fleet.metrics import Metrics
from para_core.fleet.models import Model
from para_core.fleet.outputs import Output
from para_core.fleet.reading import body_schema, read_body, read_request
from para_core.fleet.request import Request
from para_core.fleet.work import Result

_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_MEDIA_TYPES = {"png": "image/png", "jpg": "image/jpeg", "webp": "image/webp", "gif": "image/gif", "mp4": "video/mp4"}
# Limit on the results that are kept in memory to be fetched by their URL.
_STORED_BYTES = 256 * 2**20
# Interval of checks that the client is still connected.
_POLL_SECONDS = 0.2


class Backend(Protocol):
    """Replicas that each answer one request at a time."""

    async def generate(self, id_: str, request: Request, progress: Callable[[int], None]) -> Result:
        """Return the result of a request. Waits while all replicas are busy.

        Raises:
            RequestFailed: If the pipeline failed.
            RequestCancelled: If :meth:`cancel` was called.
            ReplicaDied: If the replica died.
        """

    def cancel(self, id_: str) -> None:
        """End this request, waiting or running, after its current step."""

    async def ready(self) -> int:
        """Return the number of replicas that can answer."""


@dataclass
class PendingRequest:
    """A request that waits or runs."""

    id_: str
    request: Request
    events: asyncio.Queue[dict[str, Any]] = field(default_factory=asyncio.Queue)
    steps_done: int = 0


class Server:
    """An HTTP server for ``backend``. A web server such as uvicorn runs its ASGI application :attr:`app`.

    ``GET /docs`` documents the fields of a request.

    Args:
        api_key (`str`, *optional*): Key that requests must send. None accepts requests to loopback names only.
    """

    def __init__(
        self, backend: Backend, model: Model, limits: Limits, *, format_: str, replicas: int, api_key: str | None
    ) -> None:
        self._backend, self._model, self._limits = backend, model, limits
        self._format, self._replicas, self._api_key = format_, replicas, api_key
        self._jobs: dict[str, PendingRequest] = {}
        self._stored: OrderedDict[str, tuple[Output, ...]] = OrderedDict()
        self._metrics = Metrics()
        self._body_schema = body_schema(model, limits)
        path = "/v1/videos" if model.kind == "video" else "/v1/images/generations"
        self._routes = (
            f"this server generates {model.kind}s: POST {path}, DELETE {path}/ID, GET /docs, /health, /metrics."
        )
        self.app = FastAPI(
            title=f"para_core: {model.pipeline}",
            redoc_url=None,
            exception_handlers={RequestError: _refused, 404: self._absent, 405: self._absent, 500: _failed},
        )
        guard = [Depends(self._require_allowed)]
        if api_key is not None:
            guard.append(Security(HTTPBearer(auto_error=False)))  # the field for the key on the page /docs
        # The handler reads the body itself, after it has found room for the request and within limits.
        content = {"application/json": {"schema": self._body_schema.model_json_schema()}}
        body = {"requestBody": {"required": True, "content": content}}
        add: Any = self.app.add_api_route
        add("/", self._page, include_in_schema=False)
        add("/health", self._health)
        add("/metrics", self._show_metrics, dependencies=guard)
        add(path, self._generate, methods=["POST"], dependencies=guard, openapi_extra=body)
        add(path + "/{request_id}", self._cancel, methods=["DELETE"], dependencies=guard)
        add("/v1/files/{request_id}/{index}", self._file, dependencies=guard)

    async def _require_allowed(self, http: HttpRequest) -> None:
        if self._api_key is not None:
            header = http.headers.get("authorization", "")
            if not hmac.compare_digest(header.encode(), f"Bearer {self._api_key}".encode()):
                raise RequestError(
                    401, "invalid_api_key", "expected the header Authorization: Bearer with the server's key."
                )
        # A page of another site, in a browser on this machine, can send requests to a name that resolves to loopback.
        elif http.url.hostname not in ("127.0.0.1", "localhost", "::1"):
            raise RequestError(
                403, "not_local", f"this server has no API key and answers on {', '.join(_LOOPBACK)} only."
            )

    async def _absent(self, http: HttpRequest, error: Any) -> Response:
        code = {404: "not_found", 405: "method_not_allowed"}[error.status_code]
        return JSONResponse(RequestError(error.status_code, code, self._routes).body(), error.status_code)

    async def _page(self) -> Response:
        return HTMLResponse(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))

    async def _health(self) -> Response:
        """Status 200 if a replica is ready, else 503."""
        ready = await self._backend.ready()
        body = {"status": "ok" if ready else "no replica is ready", "ready": ready, "replicas": self._replicas}
        return JSONResponse(body, 200 if ready else 503)

    async def _show_metrics(self) -> Response:
        """Metrics for Prometheus."""
        self._metrics.accepted.set(len(self._jobs))
        self._metrics.waiting.set(max(0, len(self._jobs) - await self._backend.ready()))
        return Response(self._metrics.page(), media_type="text/plain; version=0.0.4")

    async def _cancel(self, request_id: str) -> Response:
        """Cancel a request after its current step."""
        if request_id not in self._jobs:
            raise RequestError(404, "not_found", f"no request {request_id!r} is waiting or running.")
        self._backend.cancel(request_id)
        return JSONResponse({"id": request_id, "cancelling": True})

    async def _file(self, request_id: str, index: str) -> Response:
        """Fetch a result that was requested with ``"response_format": "url"``."""
        outputs = {str(i): output for i, output in enumerate(self._stored.get(request_id, ()))}
        if index not in outputs:
            raise RequestError(
                404, "not_found", f"result {request_id[:64]!r}, {index[:64]!r} is not stored (any more)."
            )
        return Response(outputs[index].data, media_type=_MEDIA_TYPES[self._format])

    async def _generate(self, http: HttpRequest) -> Response:
        """Generate images or videos. With ``"stream": true`` the response is server-sent events."""
        # Checked before the body is read, which may be large.
        self._require_room()
        content = await read_body(http, self._limits)
        # In a thread, because decoding images would block the event loop.
        body = await asyncio.to_thread(read_request, content, self._body_schema, self._model, self._limits)
        job = self._accept(http, body.request)
        task = asyncio.ensure_future(self._work(job))
        if body.stream:
            events = self._events(job, task, http, body.response_format)
            return StreamingResponse(events, media_type="text/event-stream")
        try:
            await self._watch(job, task, http)
            return JSONResponse(self._body(job, task.result(), http, body.response_format))
        finally:
            self._end(job, task)

    def _require_room(self) -> None:
        room = self._replicas + self._limits.waiting
        if len(self._jobs) >= room:
            self._metrics.requests.labels("refused").inc()
            seconds = max(1, round(self._metrics.mean_seconds() * self._limits.waiting / self._replicas))
            message = f"{len(self._jobs)} requests run or wait; at most {room} may. Retry in {seconds} s."
            raise RequestError(429, "busy", message, {"Retry-After": str(seconds)})

    def _accept(self, http: HttpRequest, request: Request) -> PendingRequest:
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

    async def _watch(self, job: PendingRequest, task: asyncio.Future[Result], http: HttpRequest) -> None:
        """Wait until the request ends, its client disconnects, or its time runs out.

        Raises:
            RequestError: If it has no result.
        """
        start = time.monotonic()
        outcome = "failed"
        try:
            while not (await asyncio.wait({task}, timeout=_POLL_SECONDS))[0]:
                if time.monotonic() - start > self._limits.seconds:
                    outcome = "timed_out"
                    raise RequestError(504, "timed_out", f"not done after {self._limits.seconds:g} s; cancelled.")
                if await http.is_disconnected():
                    outcome = "cancelled"
                    raise RequestError(499, "client_left", "the client disconnected; cancelled.")
            error = task.exception()
            outcome = "cancelled" if isinstance(error, RequestCancelled) else "failed"
            if isinstance(error, RequestCancelled):
                raise RequestError(409, "cancelled", str(error))
            if isinstance(error, RequestFailed):
                raise RequestError(400, "refused_by_the_pipeline", str(error))
            if error is not None:
                raise RequestError(500, "replica_died", f"{error} The replica is being restarted.")
            outcome = "done"
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        finally:
            self._metrics.requests.labels(outcome).inc()
            self._metrics.seconds.observe(time.monotonic() - start)

    def _end(self, job: PendingRequest, task: asyncio.Future[Result]) -> None:
        """Cancel the request if it still runs, and remove the job once no replica works on it."""
        if task.done():
            self._forget(job, task)
        else:
            self._backend.cancel(job.id_)
            task.add_done_callback(lambda ended: self._forget(job, ended))

    def _forget(self, job: PendingRequest, task: asyncio.Future[Result]) -> None:
        self._jobs.pop(job.id_, None)
        if not task.cancelled():
            task.exception()  # retrieved, or asyncio would log that it never was

    async def _events(
        self, job: PendingRequest, task: asyncio.Future[Result], http: HttpRequest, respond: str
    ) -> AsyncIterator[bytes]:
        """Yield server-sent events: ``accepted``, ``progress`` after steps, then ``done`` or ``error``."""
        watching = asyncio.ensure_future(self._watch(job, task, http))
        try:
            yield _event({"type": "accepted", "id": job.id_})
            while not watching.done():
                event = asyncio.ensure_future(job.events.get())
                await asyncio.wait({event, watching}, return_when=asyncio.FIRST_COMPLETED)
                if event.done():
                    yield _event(event.result())
                event.cancel()
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

    def _body(self, job: PendingRequest, result: Result, http: HttpRequest, respond: str) -> dict[str, Any]:
        if respond == "url":
            self._store(job.id_, result.outputs)
            base = str(http.base_url).rstrip("/")
            data = [{"url": f"{base}/v1/files/{job.id_}/{index}"} for index in range(len(result.outputs))]
        else:
            data = [{"b64_json": base64.b64encode(output.data).decode()} for output in result.outputs]
        names = ("seconds", "size", "mesh", "versions")
        metadata = {name: result.metadata[name] for name in names if name in result.metadata}
        return {"id": job.id_, "created": int(time.time()), "data": data, "para_core": metadata}

    def _store(self, id_: str, outputs: tuple[Output, ...]) -> None:
        self._stored[id_] = outputs
        self._stored.move_to_end(id_)
        while len(self._stored) > 1 and sum(len(x.data) for o in self._stored.values() for x in o) > _STORED_BYTES:
            self._stored.popitem(last=False)


async def _refused(http: HttpRequest, refusal: RequestError) -> Response:
    return JSONResponse(refusal.body(), refusal.status, headers=refusal.headers)


async def _failed(http: HttpRequest, error: Exception) -> Response:
    refusal = RequestError(500, "server_error", "the server failed with this request; see its log.")
    return JSONResponse(refusal.body(), refusal.status)


def _event(data: Mapping[str, Any]) -> bytes:
    return f"event: {data['type']}\ndata: {json.dumps(data)}\n\n".encode()
