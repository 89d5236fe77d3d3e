"""The HTTP server, as an ASGI application with the routes of OpenAI's images and videos API.

Requests wait in :class:`para_core.fleet.jobs.Jobs`; :mod:`para_core.fleet.serving` runs the server on Ray.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Security
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPBearer
from prometheus_client import generate_latest
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from para_core.fleet.access import Access
from para_core.fleet.answers import MEDIA_TYPES, answer_body, answer_events
from para_core.fleet.failures import RequestError
from para_core.fleet.foresee import Memory
from para_core.fleet.jobs import Job, Jobs, Replicas
from para_core.fleet.loras import LoraFolder
from para_core.fleet.models import Model
from para_core.fleet.outputs import Output, Result
from para_core.fleet.reading import ServerOptions, body_schema, read_content, read_request
from para_core.fleet.request import Request, estimated_pixels
from para_core.fleet.videos import Videos

_GENERATIONS, _EDITS = "/v1/images/generations", "/v1/images/edits"
# Size limit of the stored results in bytes. The latest result is kept even if it is larger.
_STORED_BYTES = 256 * 2**20


class RequestLog:
    """ASGI middleware that appends one JSON object per finished HTTP request to a file, which may be rotated away.

    The object has time, client, method, path, status, seconds and bytes, but never the body, API key or query string.
    """

    def __init__(self, app: ASGIApp, path: Path) -> None:
        self._app, self._path = app, path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application, and log the request when its response has ended or failed."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, sent = time.monotonic(), 0
        answer: dict[str, Any] = {}

        async def counted(message: Message) -> None:
            nonlocal sent
            if message["type"] == "http.response.start":
                answer.update(message)
            sent += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, counted)
        finally:
            record = {
                "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "client": (scope.get("client") or [None])[0],
                "method": scope["method"],
                "path": scope["path"],
                "status": answer.get("status"),
                "seconds": round(time.monotonic() - start, 3),
                "bytes": sent,
                "id": Headers(raw=answer.get("headers", ())).get("x-request-id"),
            }
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")


class Server:
    """HTTP routes in front of ``replicas``. ``GET /docs`` documents the fields of a request.

    Attributes:
        app: The ASGI application, which a web server such as uvicorn runs.
        loading: Whether requests are refused because no replica has loaded yet. Set by the creator of the server.
    """

    def __init__(self, replicas: Replicas, model: Model, options: ServerOptions) -> None:
        self._replicas, self._model, self._options = replicas, model, options
        self._jobs = Jobs(replicas, options, self._fits)
        # The latest results whose requests asked for a URL instead of the data.
        self._stored: OrderedDict[str, tuple[Output, ...]] = OrderedDict()
        # If the model is a local folder or file, show only the last part of the path, because clients must not learn
        # paths of this machine.
        name = Path(model.name).name if Path(model.name).exists() else model.name
        card = {"id": name or model.pipeline, "object": "model", "created": int(time.time()), "owned_by": "para_core"}
        self._card: dict[str, Any] = {**card, "pipeline": model.pipeline, "kind": model.kind}
        self.loading = False
        self._loras = None if options.loras is None else LoraFolder(options.loras)
        self._body_schema = body_schema(model, options)
        self._paths = generation_paths(model)
        own: dict[Any, Any] = dict.fromkeys((RequestError, RequestValidationError, 500), _refuse)
        self.app = FastAPI(
            title=f"para_core: {model.pipeline}",
            redoc_url=None,
            exception_handlers={**own, 404: self._absent, 405: self._absent},
        )
        self._add_routes()
        if options.cors:
            self.app.add_middleware(
                CORSMiddleware,
                allow_origins=options.cors,
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=["X-Request-Id", "Retry-After"],
            )
        if options.request_log is not None:
            self.app.add_middleware(RequestLog, path=options.request_log)

    def set_memory(self, memory: Memory | None) -> None:
        """Limit the pixels of results by the predicted memory of a rank. None sets no such limit."""
        self._options = replace(self._options, memory=memory)

    def _fits(self, requests: Sequence[Request]) -> bool:
        return sum(estimated_pixels(request, self._model.kind) for request in requests) <= self._options.most_pixels

    def _add_routes(self) -> None:
        guard = [Depends(Access(self._options.api_key, self._options.cors).require)]
        if self._options.api_key is not None:
            # This dependency adds a field for the key to the page /docs.
            guard.append(Security(HTTPBearer(auto_error=False)))
        # FastAPI must not read the body: the handler reads it after it has checked the number of requests, and stops at
        # a number of bytes. So the schema for /docs is passed separately.
        content = {"application/json": {"schema": self._body_schema.model_json_schema()}}
        body = {"requestBody": {"required": True, "content": content}}
        self.app.get("/", include_in_schema=False)(self._page)
        self.app.get("/health")(self._health)
        router = APIRouter(dependencies=guard)
        router.get("/metrics")(self._show_metrics)
        router.get("/v1/models")(self._list_models)
        router.get("/v1/models/{name:path}")(self._show_model)
        for path in self._paths:
            router.post(path, openapi_extra=body)(self._generate)
            router.delete(path + "/{request_id}")(self._cancel)
        if self._model.kind == "video" and self._options.videos is not None:
            videos = Videos(self._jobs, self._read, self._options, self._card["id"])
            router.post("/v1/videos", openapi_extra=body)(videos.create)
            router.get("/v1/videos")(videos.list)
            router.get("/v1/videos/{video_id}")(videos.get)
            router.get("/v1/videos/{video_id}/content")(videos.content)
            router.delete("/v1/videos/{video_id}")(videos.delete)
        if self._loras is not None:
            _add_lora_routes(router, self._loras)
        router.get("/v1/files/{request_id}/{index}")(self._file)
        self.app.include_router(router)

    async def _absent(self, http: HttpRequest, error: Any) -> Response:
        code = {404: "not_found", 405: "method_not_allowed"}[error.status_code]
        posts = ", ".join(f"POST {path}" for path in self._paths)
        message = _other_classes(self._model, http.url.path) + (
            f"this server generates {self._model.kind}s: {posts}, DELETE {self._paths[0]}/ID, GET /docs, /health, "
            "/metrics, /v1/models."
        )
        return await _refuse(http, RequestError(error.status_code, code, message))

    async def _page(self) -> Response:
        return FileResponse(Path(__file__).with_name("page.html"))

    async def _health(self) -> Response:
        """Report the number of ready replicas: status 200 if there are any, else 503."""
        ready = await self._replicas.ready()
        status = "ok" if ready else "loading" if self.loading else "no replica is ready"
        body = {"status": status, "ready": ready, "replicas": self._options.replicas}
        return JSONResponse(body, 200 if ready else 503)

    async def _show_metrics(self) -> Response:
        """Show the metrics in Prometheus' text format."""
        metrics = self._jobs.metrics
        metrics.accepted.set(len(self._jobs))
        metrics.waiting.set(max(0, len(self._jobs) - await self._replicas.ready()))
        return Response(generate_latest(metrics.registry), media_type="text/plain; version=0.0.4")

    async def _list_models(self) -> dict[str, Any]:
        """List the one model that this server runs."""
        return {"object": "list", "data": [self._card]}

    async def _show_model(self, name: str) -> dict[str, Any]:
        """Show the model of this name."""
        if name != self._card["id"]:
            message = f"no model {name[:80]!r} is served; expected {self._card['id']!r}."
            raise RequestError(404, "model_not_found", message)
        return self._card

    async def _cancel(self, request_id: str) -> dict[str, Any]:
        """Cancel a request: at once if it waits, after its current step if it runs."""
        self._jobs.cancel(request_id)
        return {"id": request_id, "cancelling": True}

    async def _file(self, request_id: str, index: str) -> Response:
        """Fetch a file of a result that was requested with ``"response_format": "url"``."""
        outputs = {str(i): output for i, output in enumerate(self._stored.get(request_id, ()))}
        if index not in outputs:
            message = f"result {request_id[:64]!r}, {index[:64]!r} is not stored (any more)."
            raise RequestError(404, "not_found", message)
        return Response(outputs[index].data, media_type=MEDIA_TYPES[outputs[index].format_])

    async def _read(self, http: HttpRequest) -> Request:
        if self.loading:
            raise RequestError(503, "loading", "the model is being loaded.", {"Retry-After": "5"})
        # The number of waiting requests is checked before the body is received, because the body may be large.
        self._jobs.require_room()
        content = await read_content(http, self._options)
        # Decoding images takes long, so a thread does it: the event loop must not be blocked.
        return await asyncio.to_thread(
            read_request, *content, self._body_schema, self._model, self._options, self._loras
        )

    async def _generate(self, http: HttpRequest) -> Response:
        """Generate images or videos. With ``"stream": true`` the response is server-sent events."""
        request = await self._read(http)
        if http.url.path.endswith("/edits") and not request.images:
            takes = " or ".join(self._model.images) or "none, as this pipeline takes no image"
            raise RequestError(400, "invalid_value", f"an edit needs an image; expected field {takes}.")
        job = self._jobs.start(request, http.headers.get("x-request-id"))
        headers = {"X-Request-Id": job.id_}
        base_url = str(http.base_url).rstrip("/") if request.delivery.url else None
        if request.delivery.stream:
            events = self._events(job, http, base_url)
            return StreamingResponse(events, media_type="text/event-stream", headers=headers)
        try:
            return JSONResponse(answer_body(job, await self._wait(job, http, base_url), base_url), headers=headers)
        finally:
            self._jobs.end(job)

    async def _wait(self, job: Job, http: HttpRequest, base_url: str | None) -> Result:
        result = await self._jobs.wait(job, http.is_disconnected, self._options.seconds)
        if base_url is not None:
            stored = self._stored
            stored[job.id_] = result.outputs
            stored.move_to_end(job.id_)
            while len(stored) > 1 and sum(len(x.data) for outputs in stored.values() for x in outputs) > _STORED_BYTES:
                stored.popitem(last=False)
        return result

    async def _events(self, job: Job, http: HttpRequest, base_url: str | None) -> AsyncIterator[bytes]:
        waiting = asyncio.ensure_future(self._wait(job, http, base_url))
        kind = "image_edit" if http.url.path.endswith("/edits") else f"{self._model.kind}_generation"
        try:
            async for event in answer_events(job, waiting, kind, base_url):
                yield event
        finally:
            waiting.cancel()
            self._jobs.end(job)


def generation_paths(model: Model) -> tuple[str, ...]:
    """Return the routes that generate with ``model``, without those that the class of its pipeline cannot serve."""
    if model.kind == "video":
        return ("/v1/videos/sync",)
    paths = () if model.required else (_GENERATIONS,)
    return (*paths, _EDITS) if model.edits else paths


def _other_classes(model: Model, path: str) -> str:
    """Return a sentence with the classes that would serve a route for images that ``model`` cannot; else ""."""
    if model.kind == "video" or path not in (_GENERATIONS, _EDITS) or path in generation_paths(model):
        return ""
    by_images = path == _EDITS
    needs = "takes no image" if by_images else f"needs {' and '.join(model.required)}"
    hint = f": start it with --pipeline {' or '.join(model.others)}" if model.others else ""
    return f"{path} is not served, because {model.pipeline} {needs}{hint}; "


def _add_lora_routes(router: APIRouter, loras: LoraFolder) -> None:
    @router.get("/v1/loras")
    async def list_loras() -> dict[str, Any]:
        """List the LoRAs that requests may name, and the default for requests that name none."""
        data = [{"id": name, "object": "lora"} for name in loras.names()]
        return {"object": "list", "data": data, "set": loras.default}

    @router.post("/v1/loras/{name}/set")
    async def set_lora(name: str) -> dict[str, Any]:
        """Set the default LoRA, as name or name:scale, for requests that name none."""
        try:
            loras.find(name)
        except ValueError as error:
            raise RequestError(404, "not_found", str(error)) from None
        loras.default = name
        return await list_loras()

    @router.post("/v1/loras/unset")
    async def unset_lora() -> dict[str, Any]:
        """Remove the default LoRA, so that a request that names none is generated without one."""
        loras.default = None
        return await list_loras()


async def _refuse(http: HttpRequest, error: Exception) -> Response:
    """Respond to an exception: a refusal, a parameter that FastAPI refuses, or else a failure of the server."""
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        error = RequestError(400, "invalid_value", f"parameter {first['loc'][-1]!r}: {first['msg'].lower()}.")
    if not isinstance(error, RequestError):
        error = RequestError(500, "server_error", "the server failed with this request; see its log.")
    return JSONResponse(error.body(), error.status, error.headers)
