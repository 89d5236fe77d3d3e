"""Limits of a server, and the error response for a request that it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from para_core.fleet.foresee import Memory

# Longest string of a request, in characters per token that the model reads (English has about 4 per token). The limit
# exists because a tokenizer needs minutes for megabytes of text, although the model reads only the beginning.
CHARACTERS_PER_TOKEN = 32


@dataclass(frozen=True)
class Limits:
    """Limits on what a server accepts.

    Args:
        waiting (`int`): Requests that may wait while all replicas are busy.
        pixels (`int`): Largest number of pixels of a result, summed over all images or frames.
        steps (`int`): Largest number of denoising steps.
        body_bytes (`int`): Largest size of a request's body.
        seconds (`float`): Seconds after which a request is cancelled, the time in the queue included. Asynchronous
            videos have no such limit.
        retries (`int`): How often a request is run again after its replica died.
        memory (`Memory`, *optional*): Predicted memory of a rank, which also limits the pixels. None if unknown.
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
    """Raised to refuse a request. Holds the error response: HTTP status, code for programs, message for people."""

    def __init__(self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.headers = status, code, dict(headers or {})

    def body(self) -> dict[str, Any]:
        """Return the JSON body of the error response, in the form of OpenAI's API."""
        kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "code": self.code}}
