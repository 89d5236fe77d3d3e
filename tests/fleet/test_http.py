"""HTTP around the requests to generate: HEAD, ids, addresses behind a reverse proxy, policies of pages, and the log."""

import base64
import hashlib
import json
import logging
import re
from unittest import mock

import pytest
from diffusers import FluxPipeline

from tests.fleet.test_server import PATH, ask, get, serving


@pytest.fixture(scope="module")
def port(served):
    port, _ = served(FluxPipeline)
    ask(port, {"prompt": "a", "response_format": "url"}, X_Request_Id="stored")
    return port


ROUTES = [
    *("/", "/docs", "/docs/assets/swagger-ui.css", "/openapi.json", "/health", "/metrics", "/v1/models"),
    *("/v1/models/none", "/v1/files/stored/0", "/v1/files/none/0", "/none", PATH),
]


@pytest.mark.parametrize("path", ROUTES)
def test_head_is_get_without_a_body(port, path):
    expected, headers, body = get(port, path)
    status, head, nothing = ask(port, None, method="HEAD", path=path)
    assert (status, nothing) == (expected, b"") and body
    same = ("content-length", "content-type", "content-security-policy")
    if path != "/metrics":  # whose numbers change with every request
        assert [head[name] for name in same] == [headers[name] for name in same]


@pytest.mark.parametrize(("path", "method"), [*((path, "GET") for path in ROUTES), (PATH, "POST"), (PATH, "PUT")])
def test_each_answer_has_one_id(port, path, method):
    body = {"prompt": "a"} if method == "POST" else None
    for sent in ({}, {"X_Request_Id": "mine_1-A"}, {"X_Request_Id": "../x"}):
        _, headers, answer = ask(port, body, method=method, path=path, **sent)
        (id_,) = headers.get_all("x-request-id")
        assert re.fullmatch("mine_1-A" if "mine_1-A" in sent.values() else "[0-9a-f]{32}", id_)
        if method == "POST" and "../x" not in sent.values():
            assert answer["id"] == id_


PROXY = {"X_Forwarded_Proto": "https", "X_Forwarded_Host": "images.example:444", "X_Forwarded_Prefix": "/a/b/"}


def test_addresses_are_those_of_the_proxy(port):
    for headers, address in (
        (PROXY, "https://images.example:444/a/b"),
        ({"X_Forwarded_Proto": "HTTPS"}, "https://127.0.0.1:{port}"),
        ({"X_Forwarded_Host": "first.example, second.example"}, "http://first.example"),
        ({"X_Forwarded_Host": "[::1]:80"}, "http://[::1]:80"),
        ({"X_Forwarded_Host": 'a"><script>'}, "http://127.0.0.1:{port}"),
        ({"X_Forwarded_Proto": "javascript"}, "http://127.0.0.1:{port}"),
        ({"X_Forwarded_Prefix": "//evil.example"}, "http://127.0.0.1:{port}"),
    ):
        for fields in ({}, {"stream": True}):
            answer = ask(port, {"prompt": "a", "response_format": "url", **fields}, X_Request_Id="a", **headers)[2]
            url = re.search(r'"url": "([^"]*)"', answer.decode() if fields else json.dumps(answer))[1]
            assert url == f"{address.format(port=port)}/v1/files/a/0"


# Requests, blobs of results, and icons.
OWN_PARTS = {
    **dict.fromkeys(("default-src", "base-uri", "form-action", "frame-ancestors"), "'none'"),
    "connect-src": "'self'",
    "img-src": "'self' blob: data:",
    "media-src": "'self' blob:",
}


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_policy_lets_a_page_load_its_own_parts_only(port, path):
    status, headers, text = get(port, path)
    assert (status, headers["content-type"].split(";")[0]) == (200, "text/html")
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert OWN_PARTS.items() <= policy.items()
    assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "same-origin")
    assert not [word for value in policy.values() for word in value.split() if "//" in word or "*" in word]
    assert "unsafe" not in policy["script-src"]
    # Swagger UI sets style attributes, and browsers ignore 'unsafe-inline' beside a hash.
    assert ("'unsafe-inline'" in policy["style-src"], "sha256" in policy["style-src"]) == (path == "/docs", path == "/")
    for kind, code in re.findall(rb"<(script|style)[^>]*>([^<].*?)</\1>", text, re.DOTALL):
        assert base64.b64encode(hashlib.sha256(code).digest()).decode() in policy[f"{kind.decode()}-src"]
    addresses = re.findall(r'(?:src|href)="([^"]*)"', text.decode())
    assert addresses and not [address for address in addresses if address.startswith(("http", "//", "/"))]
    for address in addresses:
        if not address.startswith("data:"):
            assert get(port, f"/{address}")[0] == 200


def test_api_describes_the_fields_of_the_pipeline_and_its_own_address(served):
    document = get(served(steps=7)[0], "/openapi.json", **PROXY)[2]
    assert document["servers"] == [{"url": "."}]
    body = document["paths"][PATH]["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"]
    assert {"prompt", "seed", "size", "n", "stream", "response_format", "guidance_scale"} <= body.keys()
    steps = next(kind for kind in body["num_inference_steps"]["anyOf"] if kind["type"] == "integer")
    assert (steps["minimum"], steps["maximum"], "generator" in body) == (1, 7, False)


def test_failures_of_the_server_and_of_its_file_of_requests_are_in_the_log(caplog, tmp_path):
    with serving(request_log=tmp_path) as (port, backend):  # a folder
        backend.ready = mock.AsyncMock(side_effect=KeyError("ready"))
        status, headers, body = get(port, "/health", X_Request_Id="mine")
        assert get(port, "/v1/models")[0] == 200
    assert (status, body["error"]["type"], headers.get_all("x-request-id")) == (500, "server_error", ["mine"])
    (record,) = [record for record in caplog.records if record.exc_info]
    assert record.name.startswith("para_core.fleet")
    assert "mine" in record.getMessage() and record.exc_info[0] is KeyError
    assert [record.levelname for record in caplog.records if str(tmp_path) in record.getMessage()] == ["WARNING"]


# The options of requests, with the level and words of their lines in the log.
LOGGED = {
    "good": ({"body": {"prompt": "private", "steps": 2}}, ("INFO", PATH, "200")),
    "bad": ({"body": {"prompt": "private", "steps": 0}, "path": f"{PATH}?key=private"}, ("WARNING", "400", "'steps'")),
    "stranger": ({"body": {"prompt": "private"}, "Authorization": ""}, ("WARNING", "401", "Authorization")),
    "dead": ({"body": {"prompt": "dies"}}, ("ERROR", "500", "rank 1 died")),
    "stream": ({"body": {"prompt": "refused", "stream": True}}, ("WARNING", "200", "the pipeline says no")),
    "probe": ({"body": None, "method": "GET", "path": "/health"}, ("DEBUG", "/health", "200")),
    "forged": ({"body": None, "method": "GET", "path": "/a%0Ab%1b[31m"}, ("WARNING", r"/a\nb\x1b[31m", "404")),
}


def test_each_request_is_one_line_of_the_log_without_its_secrets(caplog, tmp_path):
    caplog.set_level(logging.DEBUG, "para_core")
    with serving(pipeline=FluxPipeline, api_key="secret", request_log=tmp_path / "log") as (port, _):
        for id_, (how, _) in LOGGED.items():
            ask(port, **{"Authorization": "Bearer secret", **how}, X_Request_Id=id_)
    lines = {}
    for record in caplog.records:
        if record.name == "para_core.fleet.http.middleware":
            lines.setdefault(record.getMessage().split(":")[0].removeprefix("request "), []).append(record)
    assert lines.keys() == LOGGED.keys()
    for id_, (_, (level, *words)) in LOGGED.items():
        (record,) = lines[id_]
        assert all(word in record.getMessage() for word in words), record.getMessage()
        assert record.levelname == level and re.search(r", \d+\.\d{3} s", record.getMessage())
    assert sum("is the first" in record.getMessage() for record in caplog.records) == 1
    records = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    statuses = [200, 400, 401, 500, 200, 200, 404]
    assert [(record["id"], record["status"]) for record in records] == list(zip(LOGGED, statuses, strict=True))
    assert (records[0]["method"], records[0]["path"]) == ("POST", PATH)
    everything = "".join(record.getMessage() for record in caplog.records) + (tmp_path / "log").read_text()
    assert "private" not in everything and "secret" not in everything
