"""HTTP client for ``para_core serve``, which imports the standard library only."""

from __future__ import annotations

import base64
import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

_SECONDS = 3600.0


def generate(
    server: str, path: str, fields: dict[str, Any], progress: Callable[[int, int | None], None]
) -> list[bytes]:
    """Send a request to the server, wait for the result, and return the contents of its files.

    The API key is read from the environment variable ``PARA_CORE_API_KEY``, because a workflow file that is shared
    should not contain it.

    Args:
        server (`str`): Address, such as ``"http://127.0.0.1:8000"``.
        path (`str`): Path of the API, such as ``"/v1/images/generations"``.
        fields (`dict[str, Any]`): Fields of the request.
        progress (`Callable`): Called with the number of finished steps, and the number of all steps or None. If it
            raises, the server cancels the request.

    Raises:
        RuntimeError: If the server cannot be reached or refuses the request.
    """
    body = json.dumps({**fields, "stream": True, "progress": True}).encode()
    key = os.environ.get("PARA_CORE_API_KEY")
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    if not server.startswith(("http://", "https://")):
        raise RuntimeError(f"server is {server!r}; expected an address such as http://127.0.0.1:8000.")
    request = urllib.request.Request(server.rstrip("/") + path, body, headers)
    files = []
    try:
        # If progress raises, leaving this block closes the connection, and the server cancels the request.
        with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
            for event in _events(answer):
                if event["type"] == "progress":
                    progress(event["step"], event["steps"])
                elif event["type"] == "error":
                    raise RuntimeError(event["error"]["message"])
                elif event["type"].endswith(".completed"):
                    files.append(base64.b64decode(event["b64_json"]))
    except urllib.error.HTTPError as error:
        with error:
            raise RuntimeError(_message(error)) from None
    except urllib.error.URLError as error:
        raise RuntimeError(f"{server} cannot be reached: {error.reason}. Is para_core serve running?") from None
    if not files:
        raise RuntimeError(f"{server} ended the connection before the result.")
    return files


def _events(answer: Any) -> Iterator[dict[str, Any]]:
    for line in answer:
        if line.startswith(b"data: "):
            yield json.loads(line[6:])


def _message(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(error.read())["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {error.code} {error.reason}."
