"""ASGI middleware of the server: an id and a line in the log for each HTTP request, and answers to HEAD.

`server.py` adds it, and writes the reason of a refusal to :func:`record_of` the request. Tests:
tests/fleet/test_http.py.
"""

from __future__ import annotations

import json
import logging
import re
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from para_core.fleet.http.errors import RequestError

logger = logging.getLogger(__name__)
ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_ID_HEADER = "x-request-id"
_SCOPE_KEY = "para_core.request"
# Routes that are asked again and again by probes, so that their requests are logged at the level debug.
_PROBED_ROUTES = ("/health", "/metrics")


@dataclass
class HttpRecord:
    """Facts about an HTTP request that its scope lacks, for the log."""

    id_: str
    reason: str = ""  # why the request was refused or failed; server.py sets it


def record_of(scope: Scope) -> HttpRecord:
    """Return the record of the HTTP request with this ASGI scope. It has a new id if :class:`RequestLog`
    never ran.
    """
    record: HttpRecord = scope.setdefault(_SCOPE_KEY, HttpRecord(uuid.uuid4().hex))
    return record


class RequestLog:
    """ASGI middleware that gives each HTTP request an id, and logs it when its response has ended or failed.

    The id is the header ``X-Request-Id`` of the request if that is 1 to 64 letters, digits, ``_`` and ``-``,
    else a random one. The log has one line per request: a warning if it was refused, an error if it failed,
    and one of the level debug for the routes that probes ask. The file ``path`` gets one JSON object per
    request; it may be rotated away. If it cannot be written, a warning says so once, and again only after it
    could be written meanwhile. Neither has the body, API key or query string. An exception of the application
    is logged with its traceback, and answered with status 500.

    Args:
        app: The application.
        path: File of JSON lines. None writes none.
        ending: Function that returns whether the server is ending, which cuts requests: that is no error of
            theirs.
    """

    def __init__(
        self,
        app: ASGIApp,
        path: Path | None = None,
        *,
        ending: Callable[[], bool] = lambda: False,
    ) -> None:
        self._app, self._path, self._ending = app, path, ending
        self._told_of_path = False  # whether a warning has said that the file cannot be written

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application, and log the request when its response has ended or failed."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        id_ = Headers(scope=scope).get(_ID_HEADER, "")
        if not ID.fullmatch(id_):
            id_ = uuid.uuid4().hex
        record = HttpRecord(id_)
        start, size, status = time.monotonic(), 0, 0

        async def send_counted(message: Message) -> None:
            nonlocal size, status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                del headers[_ID_HEADER]
                headers[_ID_HEADER] = record.id_
            size += len(message.get("body", b""))
            await send(message)

        try:
            await self._app({**scope, _SCOPE_KEY: record}, receive, send_counted)
        except Exception as error:
            logger.exception("request %s: the server failed", record.id_)
            record.reason = f"{type(error).__name__}, see above"
            if status:
                raise  # The response has begun, so the web server must cut the connection.
            failure = RequestError(500, "server_error", "the server failed with this request; see its log.")
            await JSONResponse(failure.body(), failure.status)(scope, receive, send_counted)
        finally:
            seconds = time.monotonic() - start
            if self._ending() and not record.reason:
                record.reason = "the server ended."
            _log(scope, record, status, seconds, debug=self._ending() or _is_probed(scope))
            if self._path is not None:
                line: dict[str, Any] = {
                    "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                    "client": (scope.get("client") or [None])[0],
                    "method": scope["method"],
                    "path": scope["path"],
                    "status": status or None,
                    "seconds": round(seconds, 3),
                    "bytes": size,
                    "id": record.id_,
                }
                self._write(self._path, json.dumps(line) + "\n")

    def _write(self, path: Path, line: str) -> None:
        """Append ``line`` to the file ``path``. If that fails, only log it, because the client has its answer."""
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(line)
            self._told_of_path = False
        except OSError as error:
            if not self._told_of_path:
                logger.warning("the log of requests %s cannot be written: %s", path, error.strerror)
            self._told_of_path = True


def _is_probed(scope: Scope) -> bool:
    return scope["path"].removeprefix(scope.get("root_path", "")) in _PROBED_ROUTES


def _log(scope: Scope, record: HttpRecord, status: int, seconds: float, *, debug: bool) -> None:
    """Log one line: id, route, status (0 if no response has begun), seconds, and the reason if the request
    was refused or failed. With ``debug`` the level is that, whatever the status.
    """
    refused = 400 <= status < 500
    failed = status >= 500 or status == 0
    level = logging.INFO
    if refused or record.reason:
        level = logging.WARNING
    if failed:
        level = logging.ERROR
    if debug:
        level = logging.DEBUG
    word = "failed"
    if refused:
        word = "refused"
    reason = ""
    if refused or failed or record.reason:
        reason = f", {word}: {record.reason or 'no reason was given'}"
    route = escape_unprintable(f"{scope['method']} {scope['path']}")
    number = status or "no status"
    logger.log(
        level, "request %s: %s, %s, %.3f s%s", record.id_, route, number, seconds, escape_unprintable(reason)
    )


def escape_unprintable(text: str) -> str:
    """Return ``text`` with characters that could forge or hide lines of a log replaced by escapes."""
    letters: list[str] = []
    for letter in text:
        if letter.isprintable():
            letters.append(letter)
        else:
            letters.append(repr(letter)[1:-1])
    return "".join(letters)


class HeadAsGet:
    """ASGI middleware that answers HEAD like GET, without a body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application for GET, and send the status and headers of its response only."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_without_body(message: Message) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        # Without extensions, by which a server sends a file by itself.
        await self._app({**scope, "method": "GET", "extensions": {}}, receive, send_without_body)
