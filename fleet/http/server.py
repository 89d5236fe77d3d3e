"""The HTTP server, as an ASGI application with the routes of OpenAI's images and videos API.

Requests wait in :class:`para_core.fleet.http.jobs.Jobs`, and run on the replicas of a
:class:`para_core.fleet.http.pool.Pool`. `host_server.py` runs the application; bodies are read in
`bodies.py`, and responses made in `answers.py`. Tests: tests/fleet/test_server.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Security
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPBearer
from prometheus_client import generate_latest
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse

from para_core.fleet.http.access import Access, public_address
from para_core.fleet.http.answers import MEDIA_TYPES, answer_body, answer_events
from para_core.fleet.http.bodies import ServerOptions, body_schema, read_content, read_request
from para_core.fleet.http.errors import RequestError
from para_core.fleet.http.jobs import Job, Jobs, Replicas
from para_core.fleet.http.lora_folder import LoraFolder
from para_core.fleet.http.middleware import ID, HeadAsGet, RequestLog, record_of
from para_core.fleet.http.model_card import make_model_card
from para_core.fleet.http.pages import add_pages
from para_core.fleet.http.videos import Videos
from para_core.fleet.image_classes import explain_refused_image
from para_core.fleet.memory import Memory
from para_core.fleet.no_effect import warnings_of
from para_core.fleet.outputs import Output, Result
from para_core.fleet.pipeline_info import PipelineInfo
from para_core.fleet.request import Request, estimate_pixels

_GENERATIONS, _EDITS = "/v1/images/generations", "/v1/images/edits"
# Size limit of the stored results in bytes. The latest result is kept even if it is larger.
_STORED_BYTES = 256 * 2**20
logger = logging.getLogger(__name__)


class Server:
    """HTTP routes in front of ``replicas``. ``GET /docs`` documents the fields of a request.

    Attributes:
        app: The ASGI application, which a web server such as uvicorn runs.
        loading: Whether requests are refused because no replica has loaded yet. Set by the creator of the
            server.
        ending: Whether requests are being cut because the process ends. Set by the creator of the server.
    """

    def __init__(self, replicas: Replicas, model: PipelineInfo, options: ServerOptions) -> None:
        self._replicas, self._model, self._options = replicas, model, options
        self._jobs = Jobs(replicas, options, self._fits)
        # The latest results whose requests asked for a URL instead of the data.
        self._stored: OrderedDict[str, tuple[Output, ...]] = OrderedDict()
        self._card = make_model_card(model)
        self.loading = self.ending = False
        self._loras: LoraFolder | None = None
        if options.loras is not None:
            self._loras = LoraFolder(options.loras)
        self._body_schema = body_schema(model, options)
        self._paths = generation_paths(model)
        handlers: dict[Any, Any] = dict.fromkeys((RequestError, RequestValidationError), _refuse)
        self.app = FastAPI(
            title=f"para_core: {model.pipeline}",
            docs_url=None,
            redoc_url=None,
            # A redirect would have the address by which a reverse proxy calls the server.
            redirect_slashes=False,
            # Relative to openapi.json, so that /docs calls the right routes behind a prefix.
            servers=[{"url": "."}],
            exception_handlers={**handlers, 404: self._absent, 405: self._absent},
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
        self.app.add_middleware(HeadAsGet)
        # Added last, so it is the outermost: it logs HEAD as HEAD, and preflights, which CORSMiddleware
        # answers.
        self.app.add_middleware(RequestLog, path=options.request_log, ending=lambda: self.ending)

    def set_memory(self, memory: Memory | None) -> None:
        """Limit the pixels of results by the predicted memory of a rank. None sets no such limit.

        Called before :attr:`loading` becomes False, so that no larger request was accepted. :class:`Jobs` and
        :class:`Videos` keep the earlier options, of which they need no memory.
        """
        self._options = replace(self._options, memory=memory)

    @property
    def unfinished(self) -> int:
        """Number of requests that wait or run."""
        return len(self._jobs)

    def _fits(self, requests: Sequence[Request]) -> bool:
        return sum(estimate_pixels(request, self._model) for request in requests) <= self._options.most_pixels

    def _add_routes(self) -> None:
        guard = [Depends(Access(self._options.api_key, self._options.cors).require)]
        if self._options.api_key is not None:
            # This dependency adds a field for the key to the page /docs.
            guard.append(Security(HTTPBearer(auto_error=False)))
        # FastAPI must not read the body: the handler reads it after it has checked the number of requests,
        # and stops at a number of bytes. So the schema for /docs is passed separately.
        content = {"application/json": {"schema": self._body_schema.model_json_schema()}}
        body = {"requestBody": {"required": True, "content": content}}
        add_pages(self.app)
        self.app.get("/health")(self._health)
        router = APIRouter(dependencies=guard)
        router.get("/metrics")(self._show_metrics)
        router.get("/v1/models")(self._list_models)
        router.get("/v1/models/{name:path}")(self._show_model)
        for path in self._paths:
            router.post(path, openapi_extra=body)(self._generate)
            router.delete(path + "/{request_id}")(self._cancel)
        if self._model.kind == "video" and self._options.videos is not None:
            videos = Videos(self._jobs, self._read, self._options, self._card, self._warnings_of)
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
        # In an application that mounts this one, the path begins with where it is mounted.
        path = http.url.path.removeprefix(http.scope.get("root_path", ""))
        # A thread may import diffusers' tables: the event loop must not be blocked.
        other_classes = await asyncio.to_thread(_other_classes, self._model, path)
        routes = ", ".join(await asyncio.to_thread(self._list_routes))
        message = f"{other_classes}this server generates {self._model.kind}s: {routes}, GET /docs."
        return await _refuse(http, RequestError(error.status_code, code, message, error.headers))

    def _list_routes(self) -> list[str]:
        """Return method and path of each route of the API, such as ``"GET /v1/models"``."""
        paths = self.app.openapi()["paths"]
        return [f"{method.upper()} {path}" for path, methods in paths.items() for method in methods]

    async def _health(self) -> Response:
        """Report the number of ready replicas: status 200 if there are any, else 503."""
        ready = 0
        # A replica that has loaded still warms up, and requests are refused until all replicas have.
        if not self.loading:
            ready = await self._replicas.ready()
        body = {"status": "ok", "ready": ready, "replicas": self._replicas.count}
        if ready:
            return JSONResponse(body, 200)
        body["status"] = "no replica is ready"
        if self.loading:
            body["status"] = "loading"
        return JSONResponse(body, 503)

    async def _show_metrics(self) -> Response:
        """Show the metrics in Prometheus' text format."""
        metrics = self._jobs.metrics
        metrics.accepted.set(len(self._jobs))
        metrics.waiting.set(self._jobs.waiting)
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
        """Return the request in the body of ``http``. Raise RequestError if it is refused."""
        if self.loading:
            raise RequestError(503, "loading", "the model is being loaded.", {"Retry-After": "5"})
        # The number of waiting requests is checked before the body is received, because the body may be
        # large.
        self._jobs.require_room()
        content = await read_content(http, self._options)
        # Decoding images takes long, so a thread does it: the event loop must not be blocked.
        return await asyncio.to_thread(
            read_request, *content, self._body_schema, self._model, self._options, self._loras
        )

    async def _generate(self, http: HttpRequest) -> Response:
        """Generate images or videos. With ``"stream": true`` the response is server-sent events."""
        is_edit = http.url.path.endswith("/edits")
        id_, base_url = _id_of(http), None
        request = await self._read(http)
        if is_edit and not request.images:
            takes = " or ".join(self._model.edited_images)
            raise RequestError(400, "invalid_value", f"an edit needs an image; expected field {takes}.")
        if request.delivery.url:
            base_url = public_address(http)
        # From here on nothing may raise before the job is in the hands of what ends it.
        job = self._jobs.start(request, id_)
        if request.delivery.stream:
            # No proxy may keep the events until the response ends (nginx does by default).
            headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            waiting = asyncio.ensure_future(self._wait(job, http, base_url))

            def end(ended: asyncio.Future[Result]) -> None:
                # Not in _events: if the client has left already, no event is asked for, and it never begins.
                self._jobs.end(job)
                if not ended.cancelled():
                    ended.exception()  # Asyncio reports exceptions that nobody has read.

            waiting.add_done_callback(end)
            events = self._events(job, waiting, http, base_url)
            return StreamingResponse(events, media_type="text/event-stream", headers=headers)
        try:
            result = await self._wait(job, http, base_url)
            return JSONResponse(answer_body(job, result, base_url, self._warnings_of(job)))
        finally:
            self._jobs.end(job)

    def _warnings_of(self, job: Job) -> tuple[str, ...]:
        """Return the warnings about the fields of a request, and log them."""
        warnings = warnings_of(job.request, self._model)
        for warning in warnings:
            logger.warning("request %s: %s", job.id_, warning)
        return warnings

    async def _wait(self, job: Job, http: HttpRequest, base_url: str | None) -> Result:
        """Return the result of a job, and store its files if ``base_url`` is set, for the route of files."""
        result = await self._jobs.wait(job, http.is_disconnected, self._options.seconds)
        if base_url is not None:
            stored = self._stored
            stored[job.id_] = result.outputs
            stored.move_to_end(job.id_)
            while (
                len(stored) > 1
                and sum(len(x.data) for outputs in stored.values() for x in outputs) > _STORED_BYTES
            ):
                stored.popitem(last=False)
        return result

    async def _events(
        self, job: Job, waiting: asyncio.Future[Result], http: HttpRequest, base_url: str | None
    ) -> AsyncIterator[bytes]:
        """Yield the events of a job whose result ``waiting`` gives, and cancel ``waiting`` if the client leaves."""
        kind = f"{self._model.kind}_generation"
        if http.url.path.endswith("/edits"):
            kind = "image_edit"
        try:
            async for event in answer_events(job, waiting, kind, base_url, self._warnings_of(job)):
                yield event
        finally:
            if not waiting.done():
                record_of(http.scope).reason = "the client disconnected; cancelled."
            elif not waiting.cancelled() and waiting.exception() is not None:
                record_of(http.scope).reason = str(waiting.exception())
            waiting.cancel()


def generation_paths(model: PipelineInfo) -> tuple[str, ...]:
    """Return the routes that generate with ``model``, without those that the class of its pipeline cannot
    serve.
    """
    if model.kind == "video":
        return ("/v1/videos/sync",)
    paths: list[str] = []
    if not model.required:
        paths.append(_GENERATIONS)
    if model.edits:
        paths.append(_EDITS)
    return tuple(paths)


def _other_classes(model: PipelineInfo, path: str) -> str:
    """Return a sentence with the classes that would serve a route for images that ``model`` cannot; else ""."""
    if model.kind == "video" or path not in (_GENERATIONS, _EDITS) or path in generation_paths(model):
        return ""
    if path == _EDITS:
        return f"{path} is not served: {explain_refused_image(model)} "
    hint = ""
    if model.others:
        hint = f": start it with --pipeline {' or '.join(model.others)}"
    return f"{path} is not served, because {model.pipeline} needs {' and '.join(model.required)}{hint}; "


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


def _id_of(http: HttpRequest) -> str:
    """Return the id of a request to generate. Raise RequestError (409) if the client sent an id that cannot
    be used.
    """
    sent = http.headers.get("x-request-id")
    if sent and not ID.fullmatch(sent):
        raise RequestError(
            409, "invalid_id", f"X-Request-Id {sent[:64]!r} is not 1 to 64 of A-Z a-z 0-9 _ -."
        )
    return record_of(http.scope).id_


async def _refuse(http: HttpRequest, error: RequestError | RequestValidationError) -> Response:
    """Respond to an exception: a RequestError, or a parameter that FastAPI refuses."""
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        error = RequestError(400, "invalid_value", f"parameter {first['loc'][-1]!r}: {first['msg'].lower()}.")
    record_of(http.scope).reason = str(error)
    return JSONResponse(error.body(), error.status, error.headers)
