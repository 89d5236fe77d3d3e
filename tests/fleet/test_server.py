"""The HTTP server over replicas that are stand-ins: results, limits, cancelling, access, LoRAs, and its routes."""

import asyncio
import base64
import contextlib
import http.client
import json
import re
import threading
import time
from dataclasses import replace

import pytest
import uvicorn
from diffusers import FluxInpaintPipeline, FluxKontextPipeline, FluxPipeline, SanaVideoPipeline, WanPipeline
from fastapi import FastAPI
from PIL import Image

from para_core.fleet.failures import EncodingFailed, RequestFailed
from para_core.fleet.http.bodies import ServerOptions
from para_core.fleet.http.server import Server
from para_core.fleet.memory import Memory
from para_core.fleet.outputs import Output, Result, encode
from para_core.fleet.pipeline_info import describe_class
from para_core.fleet.request import Delivery
from para_core.launcher.errors import Cancelled, RankDied

PATH, EDITS = "/v1/images/generations", "/v1/images/edits"


class StandIn:
    """One replica. By its prompt a request fails, kills the replica once, or waits until ``open`` or cancelled."""

    count, live, server, layers = 1, 1, None, 1

    def __init__(self):
        self.turn, self.deaths, self.open = asyncio.Lock(), 0, threading.Event()
        self.began, self.cancelled, self.ran = [], set(), []

    async def generate(self, id_, request, progress):
        async with self.turn:
            self.began.append(id_)
            prompt = request.fields["prompt"]
            if prompt == "dies" and self.deaths == 0:
                self.deaths += 1
                progress(1)
                raise RankDied("rank 1 died.")
            if prompt == "refused":
                raise RequestFailed("the pipeline says no.")
            if prompt == "not encoded":
                raise EncodingFailed("its result cannot be encoded: no encoder.")
            for index in range(request.delivery.partial_images):
                progress(Output(".png", b"partial %d" % index))
            for step in range(request.fields.get("num_inference_steps", 2)):
                progress(step + 1)
                await asyncio.sleep(0)
                while prompt == "waits" and not self.open.is_set() and id_ not in self.cancelled:
                    await asyncio.sleep(0.005)
                if id_ in self.cancelled:
                    raise Cancelled(f"cancelled after step {step + 1}.")
            self.ran.append((id_, request))
            return Result(self.outputs(request), {"seconds": 0.5})

    def outputs(self, request):
        suffix = f".{request.delivery.format_}"
        seeds = [seed for seed in request.seeds for _ in range(self.layers)]
        return tuple(Output(suffix, f"{request.fields['prompt']} {seed}".encode()) for seed in seeds)

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
def serving(backend=None, *, pipeline=FluxKontextPipeline, others=(), multiple=1, mounted="", **options):
    """Yield the port of a running server, in an application that mounts it at a path, and its backend."""
    backend = backend or StandIn()
    name = __file__.replace("test_server.py", "..")
    model = replace(describe_class(name, pipeline, {}), others=others, multiple=multiple)
    server = Server(backend, model, ServerOptions(**options))
    backend.server = server
    app = FastAPI()
    app.mount(mounted, server.app)
    served = app if mounted else server.app
    web = uvicorn.Server(uvicorn.Config(served, port=0, log_level="error", ws="none", lifespan="off"))
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
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    headers = {"Content-Type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    connection.request(method, path, body if isinstance(body, (bytes, str, type(None))) else json.dumps(body), headers)
    return connection


def answer_of(connection):
    """Return ``(status, headers, body)`` of the answer, the body as JSON if it is."""
    with contextlib.closing(connection):
        response = connection.getresponse()
        text = response.read()
    with contextlib.suppress(ValueError):
        text = json.loads(text)
    return response.status, response.headers, text


def ask(port, body, **how):
    return answer_of(start(port, body, **how))


def get(port, path, **headers):
    return ask(port, None, method="GET", path=path, **headers)


def events_of(text):
    return [json.loads(event.split("data: ")[1]) for event in text.decode().strip().split("\n\n")]


def image_url(image=None):
    (output,) = encode([image or Image.new("1", (8, 8))], Delivery())
    return f"data:image/png;base64,{base64.b64encode(output.data).decode()}"


def test_an_image_comes_as_base64_or_by_its_url(served, monkeypatch):
    port, backend = served()
    fields = {"prompt": "a", "seed": 3, "n": 1, "size": "64x32", "user": "", "partial_images": 2, "image": image_url()}
    status, _, body = ask(port, fields)
    assert (status, base64.b64decode(body["data"][0]["b64_json"])) == (200, b"a 3")
    request = backend.ran[-1][1]
    assert (request.fields["width"], request.fields["height"]) == (64, 32)
    assert (len(request.images["image"]), request.delivery.partial_images) == (1, 0)
    _, _, body = ask(port, {**fields, "response_format": "url"}, X_Request_Id="by_url")
    assert body["data"][0]["url"] == f"http://127.0.0.1:{port}/v1/files/by_url/0"
    status, headers, data = get(port, "/v1/files/by_url/0")
    assert (status, headers["content-type"], data) == (200, "image/png", b"a 3")
    for index in ("1", "-1", "9" * 5000, "x"):
        assert get(port, f"/v1/files/by_url/{index}")[0] == 404
    # The latest result is kept, also if it is too large.
    monkeypatch.setattr("para_core.fleet.http.server._STORED_BYTES", 1)
    ask(port, {**fields, "response_format": "url"}, X_Request_Id="later")
    assert [get(port, f"/v1/files/{id_}/0")[0] for id_ in ("by_url", "later")] == [404, 200]


@pytest.mark.parametrize(("pipeline", "name"), [(WanPipeline, "num_frames"), (SanaVideoPipeline, "frames")])
def test_video_pipeline_answers_at_videos_route(served, pipeline, name):
    port, backend = served(pipeline, delivery=Delivery("mp4"), pixels=64 * 32 * 17, seed=0)
    fields = {"prompt": "a", "size": "64x32", "frames": 17, "response_format": "url"}
    assert ask(port, fields, path="/v1/videos/sync", X_Request_Id="mine")[0] == 200
    assert backend.ran[-1][1].fields[name] == 17
    status, headers, data = get(port, "/v1/files/mine/0")
    assert (status, headers["content-type"], data) == (200, "video/mp4", b"a 0")
    # Without a number the pipeline would generate its own, 81 frames, which exceed the limit as well.
    for more, words in (({"frames": 33}, "32x32"), ({}, f"{64 * 32 * 81} pixels")):
        status, _, body = ask(port, {"prompt": "a", "size": "64x32", **more}, path="/v1/videos/sync")
        assert (status, words in body["error"]["message"]) == (400, True)
    assert "POST /v1/videos/sync" in str(ask(port, fields)[2])


ROUTES = [
    (FluxKontextPipeline, {PATH, EDITS}),
    (FluxPipeline, {PATH}),
    (FluxInpaintPipeline, {EDITS}),
    (WanPipeline, {"/v1/videos", "/v1/videos/sync"}),
]


@pytest.mark.parametrize(("pipeline", "routes"), ROUTES)
def test_unknown_path_lists_the_routes_that_exist(served, tmp_path, pipeline, routes):
    with serving(pipeline=pipeline, videos=tmp_path, loras=tmp_path) as (port, _):
        message = get(port, "/none")[2]["error"]["message"]
        listed = re.findall(r"(GET|POST|DELETE|PUT|PATCH) (/[^ ,]*[^ ,.])", message)
        assert {path for _, path in listed} >= {"/health", "/metrics", "/docs", "/v1/loras", "/v1/loras/unset"}
        assert ("GET", "/v1/files/{request_id}/{index}") in listed
        assert {path for method, path in listed if method == "POST" and "loras" not in path} == routes
        for method, path in listed:
            answer = ask(port, None, method=method, path=re.sub("{.*?}", "0", path))[2]
            assert "this server generates" not in str(answer), (method, path)
    # Routes that are off are not listed.
    assert not re.search(r"/v1/loras|POST /v1/videos,", get(served(pipeline)[0], "/none")[2]["error"]["message"])


def test_mounted_route_that_the_class_cannot_serve_names_those_that_can():
    for pipeline, path, other in ((FluxPipeline, EDITS, "FluxImg2ImgPipeline"), (FluxInpaintPipeline, PATH, "Other")):
        with serving(pipeline=pipeline, mounted="/flux", others=(other,)) as (port, _):
            status, _, body = ask(port, {"prompt": "a"}, path=f"/flux{path}")
            assert (status, other in body["error"]["message"]) == (404, True)


def test_size_beyond_rank_memory_names_one_that_fits():
    # A million pixels fit in memory besides the weights.
    with serving(multiple=64, memory=Memory(room=24e9, fixed=20e9, per_pixel=4000.0)) as (port, _):
        status, _, body = ask(port, {"prompt": "a", "size": "1600x1600"})
        assert status == 400
        assert re.search(r"30.2 GB .*24 GB.* 960x960", str(body))
        assert ask(port, {"prompt": "a", "size": "960x960", "n": 2})[0] == 400
        # From an image, two are generated one by one.
        assert ask(port, {"prompt": "a", "size": "960x960", "n": 2, "image": image_url()})[0] == 200


def test_one_request_more_than_may_wait_comes_back_later():
    with serving(waiting=1) as (port, backend):
        connections = [start(port, {"prompt": "waits"}, X_Request_Id=f"r{i}") for i in range(2)]
        until(lambda: b"para_core_requests_accepted 2.0" in get(port, "/metrics")[2])
        status, headers, body = ask(port, {"prompt": "b"})
        assert (status, body["error"]["code"], body["error"]["type"]) == (429, "busy", "rate_limit_error")
        assert int(headers["retry-after"]) >= 1
        assert b"para_core_requests_waiting 1.0" in get(port, "/metrics")[2]
        # The server refuses before it reads the body, so none is sent.
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
            connection.putrequest("POST", PATH)
            connection.putheader("Content-Type", "application/json")
            connection.putheader("Content-Length", "1000")
            connection.endheaders()
            assert connection.getresponse().status == 429
        backend.open.set()
        assert [answer_of(connection)[0] for connection in connections] == [200, 200]


def test_stream_reports_each_step_and_result(served):
    fields = {"prompt": "a", "seed": 0, "steps": 3, "stream": True, "progress": True}
    status, headers, text = ask(served()[0], fields)
    assert (status, headers["content-type"].split(";")[0]) == (200, "text/event-stream")
    events = events_of(text)
    assert [event["type"] for event in events] == ["accepted", *["progress"] * 3, "image_generation.completed"]
    assert [(event["step"], event["steps"]) for event in events[1:4]] == [(1, 3), (2, 3), (3, 3)]


def test_each_layer_has_the_seed_of_its_image():
    with serving() as (port, backend):
        backend.layers = 2
        body = ask(port, {"prompt": "a", "seed": 3, "n": 2})[2]
        assert [image["seed"] for image in body["data"]] == [3, 3, 4, 4]


@pytest.mark.parametrize(("stream", "words"), [(False, "499"), (True, "disconnected")])
def test_leaving_client_cancels_its_request_only_and_is_logged(caplog, stream, words):
    with serving() as (port, backend):
        leaving = start(port, {"prompt": "waits", "stream": stream}, X_Request_Id="leaves")
        until(lambda: backend.began == ["leaves"])
        staying = start(port, {"prompt": "stays"}, X_Request_Id="stays")
        leaving.close()
        assert answer_of(staying)[0] == 200
        assert backend.cancelled == {"leaves"}
        assert [id_ for id_, _ in backend.ran] == ["stays"]
        until(lambda: any("leaves" in line and words in line for line in caplog.messages))


def test_running_request_is_cancelled_by_its_id_which_is_unique():
    with serving() as (port, backend):
        running = start(port, {"prompt": "waits"}, X_Request_Id="long")
        until(lambda: backend.began)
        assert ask(port, {"prompt": "a"}, X_Request_Id="long")[0] == 409
        assert ask(port, None, method="DELETE", path=f"{PATH}/long")[0] == 200
        status, _, body = answer_of(running)
        assert (status, body["error"]["code"]) == (409, "cancelled")
        assert b'requests_total{outcome="cancelled"} 1.0' in get(port, "/metrics")[2]
        assert ask(port, None, method="DELETE", path=f"{PATH}/long")[0] == 404


def test_request_is_retried_if_its_replica_dies_and_cancelled_if_it_takes_too_long():
    with serving(retries=1, seconds=0.5) as (port, backend):
        assert ask(port, {"prompt": "dies"})[0] == 200
        text = get(port, "/metrics")[2].decode()
        counts = ("replica_deaths_total 1", 'requests_total{outcome="done"} 1', "steps_total 3", "requests_accepted 0")
        assert [count for count in counts if f"para_core_{count}.0" not in text] == []
        status, _, body = ask(port, {"prompt": "waits"}, X_Request_Id="long")
        assert (status, body["error"]["code"]) == (504, "timed_out")
        assert b'requests_total{outcome="timed_out"} 1.0' in get(port, "/metrics")[2]
        assert backend.cancelled == {"long"}
        assert ask(port, "{", Content_Length="9")[0] == 408


@pytest.mark.parametrize("key", ["secret", "schlüssel", "clé-à", "鍵"])
def test_only_who_has_the_key_is_answered(key):
    with serving(api_key=key) as (port, _):
        for scheme in ("Bearer", "bearer", "Bearer "):
            for encoding in ("utf-8", "latin-1"):
                with contextlib.suppress(UnicodeEncodeError):
                    assert get(port, "/v1/models", Authorization=f"{scheme} {key}".encode(encoding))[0] == 200
        for sent in ({}, {"Authorization": "Bearer secrets"}, {"Authorization": "Basic secret"}):
            assert ask(port, {"prompt": "a"}, **sent)[0] == get(port, "/metrics", **sent)[0] == 401
        assert get(port, "/health")[0] == 200
    with pytest.raises(ValueError, match="api_key is empty"), serving(api_key=" "):
        pass


def test_pages_of_listed_sites_may_use_the_server():
    site, other = "https://app.example", "https://evil.example"
    with serving(cors=(site,)) as (port, _):
        for how in ({"body": {"prompt": "a"}}, {"body": None, "method": "OPTIONS"}):
            status, headers, _ = ask(port, **how, Origin=site, Access_Control_Request_Method="POST")
            assert (status, headers["access-control-allow-origin"]) == (200, site)
        assert ask(port, {"prompt": "a"}, Origin=other)[0] == 403


def test_loras_are_listed_set_and_named_by_requests(served, tmp_path):
    folder = tmp_path / "loras"
    (folder / "style").mkdir(parents=True)
    # Of these only style may be named: none is no LoRA, and a file is used before the folder of its name.
    for name in ("style", "style/1", "none", "my style", "../secret"):
        (folder / f"{name}.safetensors").touch()
    with serving(loras=folder) as (port, backend):
        assert [lora["id"] for lora in get(port, "/v1/loras")[2]["data"]] == ["style"]
        assert ask(port, {"prompt": "a", "lora": "style:0.5"})[0] == 200
        for name in ("../secret", "", ".", "/etc/passwd", "style:nan2", "style:inf", "my style", "a" * 150, "a" * 500):
            status, _, body = ask(port, {"prompt": "a", "lora": name})
            problem = {"style:inf": "scale inf", "a" * 500: "at most 200"}.get(name, "expected one of style")
            assert status == 400 and problem in str(body)
        assert ask(port, None, path="/v1/loras/style:0.7/set")[2]["set"] == "style:0.7"
        ask(port, {"prompt": "a"})
        ask(port, {"prompt": "a", "lora": "none"})
        ask(port, None, path="/v1/loras/unset")
        ask(port, {"prompt": "a"})
        (folder / "new.safetensors").touch()
        ask(port, {"prompt": "a", "lora": "new"})
        (folder / "new.safetensors").write_bytes(b"replaced")
        ask(port, {"prompt": "a", "lora": "new"})
        used = [request.lora and (request.lora.path, request.lora.scale) for _, request in backend.ran]
        style, new = (str(folder / f"{name}.safetensors") for name in ("style", "new"))
        assert used == [(style, 0.5), (style, 0.7), None, None, (new, 1.0), (new, 1.0)]
        assert len({request.lora.version for _, request in backend.ran if request.lora}) == 3
        assert ask(port, None, path="/v1/loras/other/set")[0] == 404
    assert ask(served()[0], {"prompt": "a", "lora": "style"})[0] == 400


def test_loading_server_says_so():
    with serving() as (port, backend):
        backend.server.loading = True
        # Also while a replica has loaded already, and warms up.
        for live in (0, 1):
            backend.live = live
            status, _, body = get(port, "/health")
            assert (status, body["status"], body["ready"]) == (503, "loading", 0)
        status, headers, _ = ask(port, {"prompt": "a"})
        assert (status, headers["retry-after"]) == (503, "5")
