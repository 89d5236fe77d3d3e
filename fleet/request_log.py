"""The request log of a server: a file with one line of JSON for each HTTP request."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, MutableMapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

Message = MutableMapping[str, Any]


class RequestLog:
    """ASGI middleware that appends one JSON object per finished HTTP request to a file, which may be rotated away.

    The object has time, client, method, path, status, seconds and bytes, but never the body, API key or query string.
    """

    def __init__(self, app: Callable[..., Awaitable[None]], path: Path) -> None:
        self._app, self._path = app, path

    async def __call__(
        self,
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
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
            headers = {name.lower(): value.decode("latin-1") for name, value in answer.get("headers", ())}
            record = {
                "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "client": (scope.get("client") or [None])[0],
                "method": scope["method"],
                "path": scope["path"],
                "status": answer.get("status"),
                "seconds": round(time.monotonic() - start, 3),
                "bytes": sent,
                "id": headers.get(b"x-request-id"),
            }
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
