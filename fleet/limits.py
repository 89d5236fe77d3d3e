"""What a server accepts, and the answer to what it does not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from para_core.fleet.foresee import Memory


@dataclass(frozen=True)
class Limits:
    """What a server accepts.

    Args:
        waiting: requests that wait while all replicas are busy; one more is told to come back later.
        pixels: of all images or frames of a request.
        seconds: a request takes, waiting included, before it is cancelled.
        retries: how often a request is tried again after the replica that had it died.
        memory: of a rank, which larger results would not fit in; None: it is not known.
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
    """An answer that is an error: its status, a code for programs and a message for people."""

    def __init__(self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.headers = status, code, dict(headers or {})

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "code": self.code}}
