"""Limits of a server, and the error responses for requests that exceed them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from para_core.fleet.foresee import Memory

# Longest text of a request, in characters per token that the model reads. English has about 4. A tokenizer needs
# minutes for a text of megabytes, although the model reads only its beginning.
CHARACTERS_PER_TOKEN = 32


@dataclass(frozen=True)
class Limits:
    """Limits on what a server accepts.

    Args:
        waiting (`int`): Requests that may wait while all replicas are busy.
        pixels (`int`): Pixels of all images or frames of a request.
        seconds (`float`): Seconds after which a request that a client waits for is cancelled, waiting included.
        retries (`int`): How often a request is retried after its replica died.
        memory (`Memory`, *optional*): Memory of a rank, which limits the size of results. None if it is unknown.
    """

    waiting: int = 8
    pixels: int = 2048 * 2048
    steps: int = 200
    body_bytes: int = 32 * 2**20
    seconds: float = 600.0
    retries: int = 0
    memory: Memory | None = None

    def __post_init__(self) -> None:
        for name in ("pixels", "steps", "body_bytes", "seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected more than 0.")
        for name in ("waiting", "retries"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 0.")


class RequestError(Exception):
    """Error response to a request: an HTTP status, a code for programs and a message for people."""

    def __init__(self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.headers = status, code, dict(headers or {})

    def body(self) -> dict[str, Any]:
        """Return the JSON body of the response, in the form of OpenAI's API."""
        kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "code": self.code}}
