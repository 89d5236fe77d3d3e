"""HTTP around the requests to generate: HEAD, ids, addresses behind a reverse proxy, policies of pages, and the log."""

import base64
import contextlib
import hashlib
import json
import logging
import re
import socket
import time

import pytest
from diffusers import FluxPipeline, WanPipeline

from para_core.fleet.request import Delivery
from tests.fleet.test_hostile import request, send
from tests.fleet.test_server import PATH, StandIn, ask, serving, until


class Broken(StandIn):
    async def ready(self):
        raise KeyError("ready")


@pytest.fixture(scope="module")
def port():
    with serving(pipeline=FluxPipeline) as (port, _):
        ask(port, {"prompt": "a", "response_format": "url"}, X_Request_Id="stored")
        yield port


ROUTES = [
    *("/", "/docs", "/docs/assets/swagger-ui.css", "/openapi.json", "/health", "/metrics", "/v1/models"),
    *("/v1/models/none", "/v1/files/stored/0", "/v1/files/none/0", "/none", PATH),
]


@pytest.mark.parametrize("path", ROUTES)
def test_head_is_get_without_a_body(port, path):
    expected, headers, body = ask(port, None, method="GET", path=path)
    status, head, nothing = ask(port, None, method="HEAD", path=path)
    assert (status, nothing) == (expected, b"")
    assert body
    same = ("content-length", "content-type", "content-security-policy")
    if path != "/metrics":  # whose numbers change with every request
        assert [head[name] for name in same] == [headers[name] for name in same]


def test_head_sends_no_byte_after_its_headers(port):
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(request(b"", method="HEAD", path="/v1/files/stored/0"))
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.endswith(b"\r\n\r\n")


def test_head_of_a_video(tmp_path):
    options = {"pipeline": WanPipeline, "delivery": Delivery("mp4"), "videos": tmp_path, "pixels": 64 * 32 * 9}
    with serving(**options) as (port, _):
        id_ = ask(port, {"prompt": "a", "size": "64x32", "frames": 9}, path="/v1/videos")[2]["id"]
        while ask(port, None, method="GET", path=f"/v1/videos/{id_}")[2]["status"] != "completed":
            time.sleep(0.05)
        for path in ("/v1/videos", f"/v1/videos/{id_}", f"/v1/videos/{id_}/content", "/v1/videos/none"):
            expected = ask(port, None, method="GET", path=path)[0]
            assert ask(port, None, method="HEAD", path=path)[::2] == (expected, b"")


@pytest.mark.parametrize(("path", "method"), [*((path, "GET") for path in ROUTES), (PATH, "POST"), (PATH, "PUT")])
def test_each_answer_has_one_id(port, path, method):
    body = {"prompt": "a"} if method == "POST" else None
    for sent in ({}, {"X_Request_Id": "mine_1-A"}):
        _, headers, answer = ask(port, body, method=method, path=path, **sent)
        (id_,) = headers.get_all("x-request-id")
        assert id_ == sent.get("X_Request_Id", id_)
        if method == "POST":
            assert answer["id"] == id_
    other = ask(port, body, method=method, path=path)[1]["x-request-id"]
    assert re.fullmatch("[0-9a-f]{32}", other)


def test_each_failure_has_one_id():
    with serving(Broken()) as (port, _):
        status, headers, _ = ask(port, None, method="GET", path="/health")
        assert (status, len(headers.get_all("x-request-id"))) == (500, 1)


@pytest.mark.parametrize("id_", ["../x", "a" * 65, "a b", "ä", ""])
def test_id_of_another_form_is_not_sent_back(port, id_):
    (answered,) = ask(port, None, method="GET", path="/health", X_Request_Id=id_)[1].get_all("x-request-id")
    assert re.fullmatch("[0-9a-f]{32}", answered)
    status, headers, _ = ask(port, {"prompt": "a"}, X_Request_Id=id_)
    assert status == (409 if id_ else 200)
    assert headers["x-request-id"] != id_


PROXY = {"X_Forwarded_Proto": "https", "X_Forwarded_Host": "images.example:444", "X_Forwarded_Prefix": "/a/b/"}


@pytest.mark.parametrize(
    ("headers", "address"),
    [
        (PROXY, "https://images.example:444/a/b"),
        ({"X_Forwarded_Host": "images.example"}, "http://images.example"),
        ({"X_Forwarded_Proto": "HTTPS"}, "https://127.0.0.1:{port}"),
        ({"X_Forwarded_Prefix": "/a"}, "http://127.0.0.1:{port}/a"),
        ({"X_Forwarded_Host": "first.example, second.example"}, "http://first.example"),
        ({"X_Forwarded_Host": "[::1]:80"}, "http://[::1]:80"),
        ({"X_Forwarded_Host": 'a"><script>'}, "http://127.0.0.1:{port}"),
        ({"X_Forwarded_Host": "a/b"}, "http://127.0.0.1:{port}"),
        ({"X_Forwarded_Host": ""}, "http://127.0.0.1:{port}"),
        ({"X_Forwarded_Proto": "javascript"}, "http://127.0.0.1:{port}"),
        ({"X_Forwarded_Prefix": "//evil.example"}, "http://127.0.0.1:{port}"),
        ({"X_Forwarded_Prefix": "a"}, "http://127.0.0.1:{port}"),
        ({"X_Forwarded_Prefix": "/"}, "http://127.0.0.1:{port}"),
    ],
)
def test_addresses_are_those_of_the_proxy(port, headers, address):
    for fields in ({}, {"stream": True}):
        answer = ask(port, {"prompt": "a", "response_format": "url", **fields}, X_Request_Id="a", **headers)[2]
        url = re.search(r'"url": "([^"]*)"', answer.decode() if fields else json.dumps(answer))[1]
        assert url == f"{address.format(port=port)}/v1/files/a/0"


def test_forwarded_host_gives_no_access(port):
    status, _, _ = ask(port, {"prompt": "a"}, Host="evil.example", X_Forwarded_Host=f"127.0.0.1:{port}")
    assert status == 403
    assert ask(port, {"prompt": "a"}, Origin="https://evil.example", X_Forwarded_Host="evil.example")[0] == 403


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_policy_lets_a_page_load_its_own_parts_only(port, path):
    _, headers, text = ask(port, None, method="GET", path=path)
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert not [word for value in policy.values() for word in value.split() if "//" in word or "*" in word]
    assert "unsafe" not in policy["script-src"]
    for code in re.findall(rb"<script>(.*?)</script>", text, re.DOTALL):
        assert base64.b64encode(hashlib.sha256(code).digest()).decode() in policy["script-src"]
    addresses = re.findall(r'(?:src|href)="([^"]*)"', text.decode())
    assert addresses
    assert not [address for address in addresses if address.startswith(("http", "//", "/"))]
    for address in addresses:
        if not address.startswith("data:"):
            assert ask(port, None, method="GET", path=f"/{address}")[0] == 200


def test_api_is_described_relative_to_its_own_address(port):
    document = ask(port, None, method="GET", path="/openapi.json", **PROXY)[2]
    assert document["servers"] == [{"url": "."}]


def test_each_request_is_one_line_of_the_log(caplog):
    caplog.set_level(logging.DEBUG, "para_core")
    with serving(StandIn(0.01), pipeline=FluxPipeline, api_key="secret") as (port, _):
        key = {"Authorization": "Bearer secret"}
        ask(port, {"prompt": "private", "steps": 2}, X_Request_Id="good", **key)
        ask(port, {"prompt": "private", "steps": 0}, path=f"{PATH}?token=private", X_Request_Id="bad", **key)
        ask(port, {"prompt": "private"}, X_Request_Id="stranger")
        ask(port, {"prompt": "dies"}, X_Request_Id="dead", **key)
        ask(port, {"prompt": "refused", "stream": True}, X_Request_Id="stream", **key)
        ask(port, None, method="GET", path="/health", X_Request_Id="probe")
        ask(port, None, method="GET", path="/a%0Ab%1b[31m", X_Request_Id="forged")
    lines = {}
    for record in caplog.records:
        if record.name == "para_core.fleet.http.middleware":
            lines.setdefault(record.getMessage().split(":")[0].removeprefix("request "), []).append(record)
    assert {id_: len(records) for id_, records in lines.items()} == dict.fromkeys(lines, 1)
    texts = {id_: (record.levelname, record.getMessage()) for id_, (record,) in lines.items()}
    expected = {
        "good": ("INFO", PATH, "200"),
        "bad": ("WARNING", "400", "'steps'"),
        "stranger": ("WARNING", "401", "Authorization"),
        "dead": ("ERROR", "500", "rank 1 died"),
        "stream": ("WARNING", "200", "the pipeline says no"),
        "probe": ("DEBUG", "/health", "200"),
        "forged": ("WARNING", r"/a\nb\x1b[31m", "404"),
    }
    assert texts.keys() == expected.keys()
    for id_, (level, *words) in expected.items():
        assert texts[id_][0] == level
        assert all(word in texts[id_][1] for word in words), texts[id_]
        assert re.search(r", \d+\.\d{3} s", texts[id_][1])
    everything = "".join(record.getMessage() for record in caplog.records)
    assert "private" not in everything
    assert "secret" not in everything
    assert sum("is the first" in record.getMessage() for record in caplog.records) == 1


def test_failure_of_the_server_is_logged_with_its_traceback(caplog):
    with serving(Broken()) as (port, _):
        ask(port, None, method="GET", path="/health", X_Request_Id="mine")
    (record,) = [record for record in caplog.records if record.exc_info]
    assert record.name.startswith("para_core.fleet")
    assert "mine" in record.getMessage()
    assert record.exc_info[0] is KeyError


@pytest.mark.parametrize(("stream", "words"), [(b"false", "499"), (b"true", "disconnected")])
def test_client_that_leaves_is_logged(caplog, stream, words):
    with serving(StandIn(0.1), pipeline=FluxPipeline) as (port, backend):
        with contextlib.closing(socket.create_connection(("127.0.0.1", port))) as connection:
            body = b'{"prompt": "a", "steps": 100, "stream": %s}' % stream
            connection.sendall(request(body, extra=b"X-Request-Id: leaves\r\n"))
            until(lambda: backend.began)
        until(lambda: backend.cancelled)
        assert send(port, request(b"", method="GET", path="/health", kind=None)) == 200
        until(lambda: any("leaves" in line and words in line for line in caplog.messages))
