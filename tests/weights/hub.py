"""A stand-in for the Hub: an HTTP server on this machine, from which huggingface_hub downloads folders."""

import contextlib
import hashlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest import mock
from urllib.parse import unquote, urlparse

from huggingface_hub import constants, hf_api

REPOSITORY = "someone/tiny-flux"
_COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """A stand-in for the Hub whose only repository is ``folder``. It records the files that were downloaded."""

    def __init__(self, folder: Path, *, seconds: float = 0.0):
        self.folder, self.seconds, self.downloaded = folder, seconds, []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()

    def _handler(hub):
        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self):
                self.do_GET()

            def do_GET(self):
                path = unquote(urlparse(self.path).path).strip("/")
                files = {str(x.relative_to(hub.folder)): x for x in sorted(hub.folder.rglob("*")) if x.is_file()}
                if path.startswith(f"api/models/{REPOSITORY}/tree/"):
                    tree = [
                        {"type": "file", "path": name, "size": x.stat().st_size, "oid": _etag(x)}
                        for name, x in files.items()
                    ]
                    self.answer(json.dumps(tree).encode())
                elif path.startswith(f"api/models/{REPOSITORY}"):
                    siblings = [{"rfilename": name} for name in files]
                    self.answer(json.dumps({"id": REPOSITORY, "sha": _COMMIT, "siblings": siblings}).encode())
                elif path.startswith(f"{REPOSITORY}/resolve/"):
                    name = path.removeprefix(f"{REPOSITORY}/resolve/").split("/", 1)[1]
                    if name not in files:
                        self.answer(b"", 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": _COMMIT})
                        return
                    if self.command == "GET":
                        time.sleep(hub.seconds)
                        hub.downloaded.append(name)
                    self.answer(
                        files[name].read_bytes(), 200, {"ETag": f'"{_etag(files[name])}"', "X-Repo-Commit": _COMMIT}
                    )
                else:
                    self.answer(b"{}", 404, {"X-Error-Code": "RepoNotFound"})

            def answer(self, data, status=200, headers=None):
                self.send_response(status)
                for key, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
                    self.send_header(key, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(data)

            def log_message(self, *_):
                pass

        return Handler


def _etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


@contextlib.contextmanager
def asking(endpoint: str):
    """Make huggingface_hub use ``endpoint`` as the Hub in this context. The library reads the environment only when it
    is imported.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(constants, "ENDPOINT", endpoint))
        template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        stack.enter_context(mock.patch.object(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template))
        stack.enter_context(mock.patch.object(hf_api.api, "endpoint", endpoint))
        yield
