"""The HTTP side over replicas that are stand-ins: requests that are accepted, refused, reported and cancelled. On
loopback, in milliseconds.
"""

import asyncio
import base64
import contextlib
import http.client
import io
import json
import re
import threading
import time
from dataclasses import replace

import pytest
import uvicorn
from diffusers import FluxKontextPipeline, FluxPipeline, WanPipeline
from fastapi import FastAPI
from PIL import Image

from para_core.fleet.failures import RequestFailed
from para_core.fleet.http.bodies import ServerOptions
from para_core.fleet.http.server import Server
from para_core.fleet.memory import Memory
from para_core.fleet.outputs import Output, Result
from para_core.fleet.pipeline_info import describe
from para_core.fleet.request import Delivery
from para_core.launcher.errors import Cancelled, RankDied

PATH = "/v1/images/generations"


class StandIn:
    """One replica whose steps take ``seconds`` each; a prompt may make it fail."""

    count, live, server = 1, 1, None

    def __init__(self, seconds=0.0):
        self.seconds, self.turn, self.deaths = seconds, asyncio.Lock(), 0
        self.began, self.cancelled, self.ran = [], set(), []

    async def generate(self, id_, request, progress):
        async with self.turn:
            self.began.append(id_)
            prompt = request.fields["prompt"]
            if prompt == "dies" and self.deaths == 0:
                self.deaths += 1
                raise RankDied("rank 1 died.")
            if prompt == "refused":
                raise RequestFailed("the pipeline says no.")
            for step in range(request.fields.get("num_inference_steps", 2)):
                await asyncio.sleep(self.seconds)
                if id_ in self.cancelled:
                    raise Cancelled(f"cancelled after step {step + 1}.")
                progress(step + 1)
            self.ran.append((id_, request))
            suffix = f".{request.delivery.format_}"
            return Result((Output(suffix, f"{prompt} {request.seed}".encode()),), {"seconds": 0.5})

    async def run(self, batch):
        for job in batch:
            try:
                job.finish(await self.generate(job.id_, job.request, job.progress))
            except Exception as error:
                job.finish(error)

    def cancel(self, job):
        self.cancelled.add(job.id_)

    async def ready(self):
        return self.live


@contextlib.contextmanager
def serving(backend=None, *, pipeline=FluxKontextPipeline, others=(), mounted="", **options):
    """Yield the port of a running server, in an application that mounts it at a path, and its backend."""
    backend = backend or StandIn()
    model = replace(describe("", pipeline, {}), others=others)
    server = Server(backend, model, ServerOptions(**options))
    backend.server = server
    app = FastAPI()
    app.mount(mounted, server.app)
    web = uvicorn.Server(
        uvicorn.Config(app if mounted else server.app, port=0, log_level="error", ws="none", lifespan="off")
    )
    thread = threading.Thread(target=web.run, daemon=True)
    thread.start()
    while not web.started:
        time.sleep(0.01)
    try:
        yield web.servers[0].sockets[0].getsockname()[1], backend
    finally:
        web.should_exit = True
        thread.join()


def until(condition, seconds=30):
    """Wait until ``condition()`` is true. A request that was sent is not yet one that runs."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not true within {seconds} s"
        time.sleep(0.01)


def start(port, body, *, method="POST", path=PATH, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    headers = {"Content-Type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    connection.request(method, path, body if isinstance(body, (bytes, str, type(None))) else json.dumps(body), headers)
    return connection


def ask(port, body, **how):
    """Send a request and return ``(status, headers, body)``."""
    with contextlib.closing(start(port, body, **how)) as connection:
        response = connection.getresponse()
        text = response.read()
    with contextlib.suppress(ValueError):
        text = json.loads(text)
    return response.status, response.headers, text


def status_of(connection):
    with contextlib.closing(connection):
        return connection.getresponse().status


def image_url(width=8, height=8):
    buffer = io.BytesIO()
    Image.new("1", (width, height)).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def test_an_image_comes_as_base64_or_by_its_url():
    with serving() as (port, backend):
        fields = {"prompt": "a", "seed": 3, "n": 1, "size": "64x32", "user": "me", "image": image_url()}
        status, _, body = ask(port, fields)
        assert status == 200
        assert base64.b64decode(body["data"][0]["b64_json"]) == b"a 3"
        request = backend.ran[0][1]
        assert (request.fields["width"], request.fields["height"]) == (64, 32)
        assert len(request.images["image"]) == 1
        _, _, body = ask(port, {**fields, "response_format": "url"}, X_Request_Id="mine")
        url = body["data"][0]["url"]
        assert url == f"http://127.0.0.1:{port}/v1/files/mine/0"
        status, headers, data = ask(port, None, method="GET", path="/v1/files/mine/0")
        assert (status, headers["content-type"], data) == (200, "image/png", b"a 3")
        for index in ("1", "-1", "9" * 5000, "x"):
            assert ask(port, None, method="GET", path=f"/v1/files/mine/{index}")[0] == 404


def test_video_pipeline_answers_at_videos_route():
    with serving(pipeline=WanPipeline, delivery=Delivery("mp4"), pixels=64 * 32 * 17, seed=0) as (port, backend):
        fields = {"prompt": "a", "size": "64x32", "frames": 17, "response_format": "url"}
        status, _, body = ask(port, fields, path="/v1/videos/sync", X_Request_Id="mine")
        assert status == 200
        assert backend.ran[0][1].fields["num_frames"] == 17
        status, headers, data = ask(port, None, method="GET", path="/v1/files/mine/0")
        assert (status, headers["content-type"], data) == (200, "video/mp4", b"a 0")
        status, _, body = ask(port, {**fields, "frames": 33}, path="/v1/videos/sync")
        assert status == 400
        assert "32x32" in body["error"]["message"]
        assert "POST /v1/videos/sync" in str(ask(port, fields)[2])


@pytest.mark.parametrize("pipeline", [FluxKontextPipeline, WanPipeline])
def test_unknown_path_lists_the_routes_that_exist(tmp_path, pipeline):
    with serving(pipeline=pipeline, videos=tmp_path, loras=tmp_path) as (port, _):
        message = ask(port, None, method="GET", path="/none")[2]["error"]["message"]
        listed = re.findall(r"(GET|POST|DELETE|PUT|PATCH) (/[^ ,]*[^ ,.])", message)
        assert {path for _, path in listed} >= {"/health", "/metrics", "/docs", "/v1/loras", "/v1/loras/unset"}
        assert ("GET", "/v1/files/{request_id}/{index}") in listed
        assert (("POST", "/v1/videos") in listed) == (pipeline is WanPipeline)
        assert (("POST", PATH) in listed) == (pipeline is FluxKontextPipeline)
        for method, path in listed:
            _, _, answer = ask(port, None, method=method, path=re.sub("{.*?}", "0", path))
            assert "this server generates" not in str(answer), (method, path)


@pytest.mark.parametrize("mounted", ["", "/flux"])
def test_route_that_the_class_cannot_serve_names_those_that_can(mounted):
    with serving(pipeline=FluxPipeline, mounted=mounted) as (port, _):
        status, _, body = ask(port, {"prompt": "a"}, path=f"{mounted}/v1/images/edits")
        assert (status, "FluxImg2ImgPipeline" in body["error"]["message"]) == (404, True)


def test_unknown_path_lists_no_route_that_is_off():
    with serving(pipeline=WanPipeline) as (port, _):
        message = ask(port, None, method="GET", path="/none")[2]["error"]["message"]
        assert "/v1/videos/sync" in message
        assert not re.search(r"/v1/loras|POST /v1/videos,", message)


@pytest.fixture(scope="module")
def server():
    with serving(body_bytes=200_000) as (port, _):
        yield port


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ("{", 400, "body .*JSON"),
        ("[" * 100_000, 400, "body .*JSON"),
        ([], 400, "body .*object"),
        ({}, 400, "'prompt'"),
        ({"prompt": "a", "size": "4096x4096"}, 400, "4194304 .*2048x2048"),
        ({"prompt": "a", "size": "1024x1024", "n": 16}, 400, "4194304 .*512x512"),
        ({"prompt": ["a"] * 16, "size": "1024x1024"}, 400, "16777216 pixels"),
        ({"prompt": "a", "height": 10**6}, 400, "1000000000000 pixels"),
        ({"prompt": "a", "n": 1000}, 400, "1048576000 pixels"),
        ({"prompt": "a", "size": "99999x99999"}, 400, "9999800001 pixels"),
        ({"prompt": "a", "size": "abc"}, 400, "'size' .*'abc'"),
        ({"prompt": "a", "size": "0x8"}, 400, "'size' .*'0x8'"),
        ({"prompt": "a", "size": "auto"}, 200, ""),
        (b'{"prompt": "a", "guidance_scale": NaN}', 400, "'guidance_scale' .*nan.* finite"),
        (
            b'{"prompt": "a", "sigmas": [1.0, 1e400]}',
            400,
            "'sigmas' .*inf.* finite",
        ),
        ({"prompt": "a", "size": "9" * 5000 + "x1"}, 400, "."),
        ({"prompt": "a", "n": -1}, 400, "'n' .*-1"),
        ({"prompt": "a", "steps": -3}, 400, "'steps' .*-3"),
        ({"prompt": "a", "seed": 1.5}, 400, "'seed' .*1.5"),
        ({"prompt": "a", "seed": 2**63}, 400, "'seed' .*9223372036854775808"),
        ({"prompt": "a \ud800"}, 400, "JSON"),
        ({"prompt": "a", "max_sequence_length": 10**9}, 400, "'max_sequence_length' .*1000000000.* 4096"),
        ({"prompt": "a", "height": 10**400}, 400, "'height' "),
        ({"prompt": "a", "joint_attention_kwargs": {"scale": "\ud800"}}, 400, "."),
        (b'{"prompt": "a", "joint_attention_kwargs": {"scale": 1e400}}', 400, "'joint_attention_kwargs' .*inf"),
        ({"prompt": "a", "image": [image_url()] * 17}, 400, r"'image' .*\b16\b.*\b17\b"),
        (b"\xff\xfe{", 400, "body .*JSON"),
        ({"prompt": "a", "steps": 201}, 400, "201.* 200"),
        ({"prompt": "a", "sigmas": [1.0] * 201}, 400, "201 steps"),
        ({"prompt": "a", "seed": -2}, 400, "'seed' .*-2"),
        ({"prompt": "a", "guidance_scale": "much"}, 400, "'guidance_scale' .*'much'"),
        ({"prompt": "a", "guidance_scale": True}, 400, "'guidance_scale' .*True"),
        ({"prompt": "a", "guidance_scale": 3}, 200, ""),
        ({"prompt": "a", "sigmas": [1.0, "0"]}, 400, "'sigmas' .*'0'"),
        ({"prompt": "a", "sigmas": 1.0}, 400, "'sigmas' .*1.0"),
        ({"prompt": "a", "prompt_2": 5}, 400, "'prompt_2' .*5"),
        ({"prompt": "a", "prompt_2": ["b"], "negative_prompt": None}, 200, ""),
        ({"prompt": "a", "generator": 1}, 400, "'generator'"),
        ({"prompt": "a", "image": "/etc/passwd"}, 400, "addresses"),
        ({"prompt": "a", "image": "http://127.0.0.1/x.png"}, 400, "addresses"),
        ({"prompt": "a", "image": image_url(4096, 4096)}, 400, "4096 × 4096 .*4194304"),
        ({"prompt": "a", "image": "data:image/png;base64,AAAA"}, 400, "image"),
        ({"prompt": "a", "response_format": "path"}, 400, "'response_format' .*'path'"),
        ({"prompt": "refused"}, 400, "the pipeline says no"),
        ({"prompt": "dies"}, 500, "rank 1 died"),
        ({"prompt": "a" * 200_000}, 413, "200000 bytes"),
    ],
)
def test_bad_requests_are_refused_with_values(server, body, status, message):
    answered, _, answer = ask(server, body)
    assert answered == status
    assert re.search(message, "" if status == 200 else answer["error"]["message"])


def test_size_beyond_rank_memory_names_one_that_fits():
    # A million pixels fit in memory besides the weights.
    memory = Memory(room=24e9, fixed=20e9, per_pixel=4000.0)
    with serving(memory=memory) as (port, _):
        status, _, body = ask(port, {"prompt": "a", "size": "1600x1600"})
        assert status == 400
        assert re.search(r"30.2 GB .*24 GB.* 992x992", str(body))
        assert ask(port, {"prompt": "a", "size": "992x992"})[0] == 200
        assert ask(port, {"prompt": "a", "size": "992x992", "n": 2})[0] == 400


def test_every_error_is_a_json_object():
    class Broken(StandIn):
        async def ready(self):
            raise KeyError("ready")

    with serving(Broken()) as (port, _):
        for method, path, expected in (("POST", "/v1/videos", 404), ("GET", PATH, 405)):
            status, _, body = ask(port, None, method=method, path=path)
            assert status == expected
            assert "POST /v1/images/generations" in body["error"]["message"]
        status, _, body = ask(port, None, method="GET", path="/health")
        assert (status, body["error"]["type"]) == (500, "server_error")


def test_null_is_what_was_left_out():
    with serving() as (port, backend):
        assert ask(port, {"prompt": "a", "n": None, "size": None, "stream": None, "response_format": None})[0] == 200
        assert dict(backend.ran[0][1].fields) == {"prompt": "a"}


@pytest.mark.slow
def test_one_request_more_than_may_wait_comes_back_later():
    def accepted(port):
        return "para_core_requests_accepted 2.0" in ask(port, None, method="GET", path="/metrics")[2].decode()

    with serving(StandIn(1.0), waiting=1) as (port, _):
        connections = [start(port, {"prompt": "a"}, X_Request_Id=f"r{i}") for i in range(2)]
        until(lambda: accepted(port))
        status, headers, body = ask(port, {"prompt": "b"})
        assert (status, body["error"]["code"]) == (429, "busy")
        assert int(headers["retry-after"]) >= 1
        text = ask(port, None, method="GET", path="/metrics")[2].decode()
        assert "para_core_requests_accepted 2.0" in text
        assert "para_core_requests_waiting 1.0" in text
        # The server refuses before it reads the body, so none is sent.
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
            connection.putrequest("POST", PATH)
            connection.putheader("Content-Type", "application/json")
            connection.putheader("Content-Length", "1000")
            connection.endheaders()
            assert connection.getresponse().status == 429
        assert [status_of(connection) for connection in connections] == [200, 200]


def test_stream_reports_each_step_and_result():
    with serving(seed=0) as (port, _):
        status, headers, text = ask(port, {"prompt": "a", "steps": 3, "stream": True, "progress": True})
        assert (status, headers["content-type"].split(";")[0]) == (200, "text/event-stream")
        events = [json.loads(event.split("data: ")[1]) for event in text.decode().strip().split("\n\n")]
        assert [event["type"] for event in events] == ["accepted", *["progress"] * 3, "image_generation.completed"]
        assert [event.get("step") for event in events[1:4]] == [1, 2, 3]
        assert base64.b64decode(events[-1]["b64_json"]) == b"a 0"


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_client_cancels_its_request_only(stream):
    with serving(StandIn(0.1)) as (port, backend):
        leaving = start(port, {"prompt": "leaves", "steps": 100, "stream": stream}, X_Request_Id="leaves")
        until(lambda: backend.began == ["leaves"])
        staying = start(port, {"prompt": "stays"}, X_Request_Id="stays")
        leaving.close()
        assert status_of(staying) == 200
        assert backend.cancelled == {"leaves"}
        assert [id_ for id_, _ in backend.ran] == ["stays"]


def test_request_is_cancelled_by_id():
    with serving(StandIn(0.1)) as (port, backend):
        running = start(port, {"prompt": "a", "steps": 100}, X_Request_Id="long")
        until(lambda: backend.began)
        assert ask(port, None, method="DELETE", path=f"{PATH}/long")[0] == 200
        with contextlib.closing(running):
            answer = running.getresponse()
            assert (answer.status, json.loads(answer.read())["error"]["code"]) == (409, "cancelled")
        assert ask(port, None, method="DELETE", path=f"{PATH}/long")[0] == 404


def test_a_request_that_takes_too_long_is_cancelled():
    with serving(StandIn(0.1), seconds=0.3) as (port, backend):
        status, _, body = ask(port, {"prompt": "a", "steps": 100}, X_Request_Id="long")
        assert (status, body["error"]["code"]) == (504, "timed_out")
        assert backend.cancelled == {"long"}


def test_request_of_dead_replica_is_retried_on_demand():
    with serving(retries=1) as (port, _):
        assert ask(port, {"prompt": "dies"})[0] == 200
        text = ask(port, None, method="GET", path="/metrics")[2].decode()
        assert "para_core_replica_deaths_total 1.0" in text
        assert 'para_core_requests_total{outcome="done"} 1.0' in text
        assert "para_core_steps_total 2.0" in text
        assert "para_core_requests_accepted 0.0" in text


def test_only_who_has_the_key_is_answered():
    with serving(api_key="secret") as (port, _):
        assert ask(port, {"prompt": "a"})[0] == 401
        assert ask(port, {"prompt": "a"}, Authorization="Bearer secrets")[0] == 401
        assert ask(port, None, method="GET", path="/metrics")[0] == 401
        assert ask(port, None, method="GET", path="/health")[0] == 200
        assert ask(port, {"prompt": "a"}, Authorization="Bearer secret")[0] == 200


def test_foreign_pages_need_a_key():
    with serving() as (port, _):
        assert ask(port, {"prompt": "a"}, Host="elsewhere.example")[0] == 403
        assert ask(port, json.dumps({"prompt": "a"}), Content_Type="text/plain")[0] == 415


def test_request_id_is_unique_and_no_path():
    with serving(StandIn(1.0)) as (port, backend):
        first = start(port, {"prompt": "a"}, X_Request_Id="one")
        until(lambda: backend.began)
        assert ask(port, {"prompt": "a"}, X_Request_Id="one")[0] == 409
        assert ask(port, {"prompt": "a"}, X_Request_Id="../one")[0] == 409
        assert status_of(first) == 200


def test_openapi_describes_the_fields_of_the_pipeline():
    with serving(steps=7) as (port, _):
        assert ask(port, None, method="GET", path="/docs")[0] == 200
        document = ask(port, None, method="GET", path="/openapi.json")[2]
        body = document["paths"][PATH]["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"]
        assert {"prompt", "seed", "size", "n", "stream", "response_format", "guidance_scale"} <= body.keys()
        steps = next(kind for kind in body["num_inference_steps"]["anyOf"] if kind["type"] == "integer")
        assert (steps["minimum"], steps["maximum"]) == (1, 7)
        assert "generator" not in body


def test_the_page_is_served():
    with serving() as (port, _):
        status, headers, text = ask(port, None, method="GET", path="/")
        assert (status, headers["content-type"].split(";")[0]) == (200, "text/html")
        assert b"v1/images/generations" in text


@pytest.mark.sample(3)
@pytest.mark.parametrize("key", ["secret", "schlüssel", "鍵"])
@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "Bearer "])
def test_key_in_each_form_that_http_allows(key, scheme):
    with serving(api_key=key) as (port, _):
        for encoding in ("utf-8", "latin-1"):
            with contextlib.suppress(UnicodeEncodeError):
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
                connection.request("GET", "/v1/models", headers={"Authorization": f"{scheme} {key}".encode(encoding)})
                assert status_of(connection) == 200
        assert ask(port, None, method="GET", path="/v1/models", Authorization=f"Basic {'secret'}")[0] == 401


def test_pages_of_listed_sites_may_use_the_server():
    site, other = "https://app.example", "https://evil.example"
    with serving(cors=(site,)) as (port, _):
        status, headers, _ = ask(port, {"prompt": "a"}, Origin=site)
        assert (status, headers["access-control-allow-origin"]) == (200, site)
        status, headers, _ = ask(port, None, method="OPTIONS", Origin=site, Access_Control_Request_Method="POST")
        assert (status, headers["access-control-allow-origin"]) == (200, site)
        assert ask(port, {"prompt": "a"}, Origin=other)[0] == 403


def test_requests_are_logged_without_their_secrets(tmp_path):
    with serving(api_key="secret", request_log=tmp_path / "log") as (port, _):
        ask(port, {"prompt": "private"}, Authorization="Bearer secret", X_Request_Id="mine")
        _, headers, _ = ask(port, {"prompt": "private"}, path=PATH + "?token=private")
    lines = (tmp_path / "log").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [(record["method"], record["path"], record["status"]) for record in records] == [
        ("POST", PATH, 200),
        ("POST", PATH, 401),
    ]
    assert records[0]["id"] == "mine"
    assert records[1]["id"] == headers["x-request-id"]
    assert "private" not in "".join(lines)
    assert "secret" not in "".join(lines)


def test_loras_are_listed_set_and_named_by_requests(tmp_path):
    (tmp_path / "style.safetensors").touch()
    with serving(loras=tmp_path) as (port, backend):
        assert [lora["id"] for lora in ask(port, None, method="GET", path="/v1/loras")[2]["data"]] == ["style"]
        assert ask(port, {"prompt": "a", "lora": "style:0.5"})[0] == 200
        for name in ("../style", "other"):
            assert ask(port, {"prompt": "a", "lora": name})[0] == 400
        assert ask(port, None, path="/v1/loras/style:0.7/set")[2]["set"] == "style:0.7"
        ask(port, {"prompt": "a"})
        ask(port, {"prompt": "a", "lora": "none"})
        ask(port, None, path="/v1/loras/unset")
        ask(port, {"prompt": "a"})
        (tmp_path / "new.safetensors").touch()
        ask(port, {"prompt": "a", "lora": "new"})
        used = [
            request.lora and (request.lora.path.rpartition("/")[2], request.lora.scale) for _, request in backend.ran
        ]
        style, new = "style.safetensors", "new.safetensors"
        assert used == [(style, 0.5), (style, 0.7), None, None, (new, 1.0)]
        assert ask(port, None, path="/v1/loras/other/set")[0] == 404
    with serving() as (port, _):
        assert ask(port, {"prompt": "a", "lora": "style"})[0] == 400


def test_loading_server_says_so():
    with serving() as (port, backend):
        backend.server.loading = True
        backend.live = 0
        status, _, body = ask(port, None, method="GET", path="/health")
        assert (status, body["status"]) == (503, "loading")
        status, headers, _ = ask(port, {"prompt": "a"})
        assert (status, headers["retry-after"]) == (503, "5")
        backend.server.loading, backend.live = False, 1
        assert ask(port, {"prompt": "a"})[0] == 200
