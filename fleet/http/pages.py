"""The two HTML pages of the server: one to try it, and one that documents its API. Both load only what it
sends.

:mod:`para_core.fleet.http.server` calls it. Tests: tests/fleet/test_http.py, through a running server.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from fastapi import FastAPI
from starlette.responses import HTMLResponse
from starlette.staticfiles import StaticFiles

# The kind and the code of an inline script or style. The code is empty if it is in a file (``src=``).
_INLINE = re.compile(r"<(script|style)\b[^>]*>(.*?)</\1>", re.DOTALL)
# A browser refuses whatever a page loads beyond this. The hashes of the page's inline code are added.
_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    # Results are shown as blobs, and icons are data.
    "img-src": "'self' blob: data:",
    "media-src": "'self' blob:",
    # The page sends requests to this server, and /docs loads openapi.json.
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
}


def add_pages(app: FastAPI) -> None:
    """Add the page ``/``, and ``/docs`` with the assets of Swagger UI, which the package fastapi_offline
    contains.
    """
    # One response object serves all requests of a page. This is safe because a middleware that changes headers
    # changes a copy: MutableHeaders(scope=message) of Starlette copies the list.
    home = _read_page("page.html", {})
    # Swagger UI sets style attributes, which a hash cannot allow.
    docs = _read_page("docs.html", {"style-src": "'self' 'unsafe-inline'"})

    @app.get("/", include_in_schema=False)
    async def show_home() -> HTMLResponse:
        return home

    @app.get("/docs", include_in_schema=False)
    async def show_docs() -> HTMLResponse:
        return docs

    app.mount("/docs/assets", StaticFiles(directory=str(files("fastapi_offline") / "static")))


def _read_page(name: str, directives: Mapping[str, str]) -> HTMLResponse:
    """Return the page in the file ``name``, with a policy that lets it load only its own scripts, styles and
    data.

    ``directives`` replace those of the policy with the same name, with its hashes.
    """
    text = Path(__file__).with_name(name).read_text(encoding="utf-8")
    policy = dict(_POLICY)
    for kind, code in _INLINE.findall(text):
        if code:
            digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
            policy[f"{kind}-src"] += f" 'sha256-{digest}'"
    policy.update(directives)
    headers = {
        "Content-Security-Policy": "; ".join(f"{key} {value}" for key, value in policy.items()),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "same-origin",
    }
    return HTMLResponse(text, headers=headers)
