"""Decide who may use the server, and return the address that it shows. Access depends on the API key, the Host
header, and the Origin of pages of other sites.

``server.py`` puts :meth:`Access.require` before each route but ``/health``, ``/openapi.json`` and the pages.
Answers to the preflights of browsers (CORS) are Starlette's. Tests: tests/fleet/test_hostile.py,
tests/fleet/test_server.py, tests/fleet/test_http.py.
"""

from __future__ import annotations

import contextlib
import hmac
import re
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.requests import Request as HttpRequest

from para_core.fleet.http.errors import RequestError

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_MAX_HEADER_BYTES = 2**16
# Value of a Host header (RFC 9110): a host and an optional port. An IPv6 address is in brackets. Other text of
# its characters may be there, too: without a key only _LOOPBACK is let through, and with one the host decides
# nothing.
_HOST_PATTERN = re.compile(r"([A-Za-z0-9._~%!$&'()*+,;=-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{0,5})?")
# Path below which a reverse proxy shows the server, in characters that need no quoting.
_PREFIX_PATTERN = re.compile(r"(/[A-Za-z0-9._~%@:+=-]+)+")


class Access:
    """Access check of requests: by the API key, or if the server has none, by the headers Host and Origin.

    The arguments are ``api_key`` and ``cors`` of :class:`~para_core.fleet.http.bodies.ServerOptions`. Raise
    ValueError if the key is empty, which everybody would have.
    """

    def __init__(self, api_key: str | None, origins: Sequence[str] = ()) -> None:
        self._keys: list[bytes] = []
        if api_key is not None:
            if not api_key.strip():
                raise ValueError("api_key is empty; expected a key, or None to answer on this machine only.")
            # Most clients encode headers in UTF-8, some in Latin-1.
            self._keys.append(api_key.strip().encode())
            with contextlib.suppress(UnicodeEncodeError):
                self._keys.append(api_key.strip().encode("latin-1"))
        self._origins = frozenset(origins)

    async def require(self, http: HttpRequest) -> None:
        """Raise RequestError if the request may not use the server, or its headers are too large or
        malformed.
        """
        if sum(len(name) + len(value) for name, value in http.headers.raw) > _MAX_HEADER_BYTES:
            raise RequestError(
                431, "headers_too_large", f"the headers have more than {_MAX_HEADER_BYTES} bytes."
            )
        hosts = http.headers.getlist("host")
        host = None
        if len(hosts) == 1:
            host = _HOST_PATTERN.fullmatch(hosts[0])
        if host is None:
            raise RequestError(
                400, "invalid_host", "expected one Host header with a host name and an optional port."
            )
        if self._keys:
            # The scheme "Bearer" is case-insensitive (RFC 9110). Starlette has decoded the header as Latin-1,
            # so encoding as Latin-1 restores the bytes that the client sent. Strip only the whitespace of
            # HTTP: the bytes of a UTF-8 key may decode to other whitespace, as the second one of "à" does.
            scheme, _, credentials = http.headers.get("authorization", "").strip(" \t").partition(" ")
            sent = b""
            if scheme.lower() == "bearer":
                sent = credentials.strip(" \t").encode("latin-1")
            if not any(hmac.compare_digest(sent, key) for key in self._keys):
                raise RequestError(
                    401,
                    "invalid_api_key",
                    "expected the header Authorization: Bearer with the server's key.",
                    {"WWW-Authenticate": "Bearer"},
                )
            return
        # A page of another site can send requests to its own host name after that name resolves to loopback
        # (DNS rebinding). The Host header then has that site's name.
        if host[1].strip("[]").lower() not in _LOOPBACK:
            raise RequestError(
                403, "not_local", f"this server has no API key and answers on {', '.join(_LOOPBACK)} only."
            )
        # A browser sends the form of another site without asking the server first (a "simple request" of
        # CORS), so the server must refuse it by the Origin header.
        origin = http.headers.get("origin")
        if origin is None or origin in self._origins or "*" in self._origins:
            return
        # A page of this server has the origin that the browser asks. The scheme may differ, because a proxy
        # on this machine may end TLS.
        if _authority_of(origin) != hosts[0].lower():
            raise RequestError(
                403,
                "foreign_page",
                f"pages of {origin[:80]} may not use this server, which has no API key; see --cors.",
            )


def _authority_of(origin: str) -> str:
    """Return the host and port of an Origin header in lower case; an empty text if it is malformed."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def public_address(http: HttpRequest) -> str:
    """Return the address of the server as its client sees it, without a slash at the end.

    A reverse proxy tells it by the headers ``X-Forwarded-Proto``, ``X-Forwarded-Host`` and
    ``X-Forwarded-Prefix``. If there are several proxies, the first value counts. A header that is missing or
    malformed is ignored: then this server's own scheme, Host header or path counts.

    Any client may send these headers. The address is only shown to the client that sent them, and decides no
    access. :meth:`Access.require` checks the Host header itself, before it lets a request through.
    """
    scheme, host, prefix = (
        http.headers.get(f"x-forwarded-{name}", "").split(",")[0].strip()
        for name in ("proto", "host", "prefix")
    )
    prefix = prefix.rstrip("/")
    # The path below which an application has mounted this one. http.base_url has only that of the
    # application.
    mounted = http.scope.get("root_path", "").rstrip("/")
    scheme = scheme.lower()
    if scheme not in ("http", "https"):
        scheme = http.base_url.scheme
    if not _HOST_PATTERN.fullmatch(host):
        host = http.base_url.netloc
    if not _PREFIX_PATTERN.fullmatch(prefix):
        prefix = ""
    return f"{scheme}://{host}{prefix}{mounted}"
