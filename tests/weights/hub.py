"""A stand-in for the Hub: an HTTP server on this machine, from which huggingface_hub downloads folders."""

import contextlib
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest import mock
from urllib.parse import unquote, urlparse

from huggingface_hub import constants, hf_api

REPOSITORY = "someone/tiny-flux"
_COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """A stand-in for the Hub whose only repository is ``folder``. It records the files that were downloaded."""

    def __init__(self, folder: Path):
        self.downloaded = []
        self._files = {str(x.relative_to(folder)): x for x in sorted(folder.rglob("*")) if x.is_file()}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, path, downloads):
        """Return the body, the status and the headers for a path."""
        files, commit = self._files, {"X-Repo-Commit": _COMMIT}
        if path.startswith(f"api/models/{REPOSITORY}/tree/"):
            tree = [{"type": "file", "path": x, "size": files[x].stat().st_size, "oid": _etag(files[x])} for x in files]
            return json.dumps(tree).encode(), 200, {}
        if path.startswith(f"api/models/{REPOSITORY}"):
            siblings = [{"rfilename": name} for name in files]
            return json.dumps({"id": REPOSITORY, "sha": _COMMIT, "siblings": siblings}).encode(), 200, {}
        if not path.startswith(f"{REPOSITORY}/resolve/"):
            return b"{}", 404, {"X-Error-Code": "RepoNotFound"}
        name = path.removeprefix(f"{REPOSITORY}/resolve/").split("/", 1)[1]
        if name not in files:
            return b"", 404, {"X-Error-Code": "EntryNotFound", **commit}
        if downloads:
            self.downloaded.append(name)
        return files[name].read_bytes(), 200, {"ETag": f'"{_etag(files[name])}"', **commit}

    def _handler(hub):
        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self):
                self.do_GET()

            def do_GET(self):
                downloads = self.command == "GET"
                data, status, headers = hub._answer(unquote(urlparse(self.path).path).strip("/"), downloads)
                self.send_response(status)
                for key, value in {"Content-Length": str(len(data)), **headers}.items():
                    self.send_header(key, value)
                self.end_headers()
                if downloads:
                    self.wfile.write(data)

            def log_message(self, *_):
                pass

        return Handler


def _etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


@contextlib.contextmanager
def asking(endpoint: str):
    """Make huggingface_hub use ``endpoint`` as the Hub. The library reads the environment only when it is imported."""
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    with (
        mock.patch.object(constants, "ENDPOINT", endpoint),
        mock.patch.object(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template),
        mock.patch.object(hf_api.api, "endpoint", endpoint),
    ):
        yield
