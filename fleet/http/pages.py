"""The two HTML pages of the server: one to try it, and one that documents its API. Both load only what it sends."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files
from pathlib import Path

from fastapi import FastAPI
from starlette.responses import HTMLResponse
from starlette.staticfiles import StaticFiles

_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


def add_pages(app: FastAPI) -> None:
    """Add the page ``/``, and ``/docs`` with the assets of Swagger UI, which the package fastapi_offline contains."""
    home, docs = _read_page("page.html"), _read_page("docs.html", "style-src 'self' 'unsafe-inline'")

    @app.get("/", include_in_schema=False)
    async def show_home() -> HTMLResponse:
        return home

    @app.get("/docs", include_in_schema=False)
    async def show_docs() -> HTMLResponse:
        return docs

    app.mount("/docs/assets", StaticFiles(directory=str(files("fastapi_offline") / "static")))


def _read_page(name: str, *directives: str) -> HTMLResponse:
    """Return the page in the file ``name``, with a policy that lets it load only its own scripts, styles and data.

    ``directives`` replace those of the policy with the same name.
    """
    text = Path(__file__).with_name(name).read_text(encoding="utf-8")
    hashes: dict[str, list[str]] = {"script": [], "style": []}
    for kind, code in _INLINE.findall(text):
        digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{digest}'")
    policy = {
        "default-src": "'none'",
        "script-src": " ".join(["'self'", *hashes["script"]]),
        "style-src": " ".join(["'self'", *hashes["style"]]),
        "img-src": "'self' blob: data:",
        "media-src": "'self' blob:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    for directive in directives:
        key, _, value = directive.partition(" ")
        policy[key] = value
    headers = {
        "Content-Security-Policy": "; ".join(f"{key} {value}" for key, value in policy.items()),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "same-origin",
    }
    return HTMLResponse(text, headers=headers)
