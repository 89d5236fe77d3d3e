"""The error responses of the server, and the conversion of failures to them, by which `jobs.py` answers.

Tests: tests/fleet/test_hostile.py, tests/fleet/test_server.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from para_core.fleet.failures import EncodingFailed, RequestFailed
from para_core.launcher.errors import Cancelled


class RequestError(Exception):
    """Raised to refuse a request. Holds the error response: HTTP status, code for programs, message for
    people.
    """

    def __init__(
        self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.headers = status, code, dict(headers or {})

    def body(self) -> dict[str, Any]:
        """Return the JSON body of the error response, in the form of OpenAI's API."""
        kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
        usual = "server_error"
        if self.status < 500:
            usual = "invalid_request_error"
        kind = kinds.get(self.status, usual)
        return {"error": {"message": str(self), "type": kind, "code": self.code}}


def response_to(failure: BaseException) -> RequestError:
    """Return the error response to a request that has ended without a result, by why it has none.

    That is one of the exceptions that :mod:`para_core.fleet.failures` describes.
    """
    if isinstance(failure, Cancelled):
        return RequestError(409, "cancelled", str(failure))
    if isinstance(failure, EncodingFailed):
        return RequestError(500, "not_encoded", str(failure))
    if isinstance(failure, RequestFailed):
        return RequestError(400, "refused_by_the_pipeline", str(failure))
    return RequestError(500, "replica_died", f"{failure} The replica is being restarted.")
