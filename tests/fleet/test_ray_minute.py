"""A minute with real Ray: a file of prompts on two replicas, then a server over two ranks. More of it is in
test_on_ray.py.

The file has one cluster. If several processes run tests at once, later ones wait for it, because two cores are few for
one.
"""

import base64
import contextlib
import fcntl
import http.client
import io
import json
import re
import signal
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import openai
import pytest
import torch
from diffusers import FluxPipeline
from PIL import Image

pytest.importorskip("ray", reason="the extra ray is not installed")

import ray

from para_core.cli.app import run
from para_core.fleet import group
from para_core.fleet.pipeline_info import find_tiny_flux
from tests.fleet.commands import messages, serve

# Ray keeps sockets and threads open until the cluster ends, which raises warnings.
pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore")]
PORT = 8129
PATH = "/v1/images/generations"
CAPTION = "a large red circle"
SMALL = {"size": "64x48", "steps": 2}
# This is the time limit of each test. Ray starts in about ten seconds, or in minutes on a busy machine.
SECONDS = 540


@contextlib.contextmanager
def within(seconds):
    """Raise TimeoutError in the main thread after ``seconds``."""

    def late(*_):
        raise TimeoutError(f"not done within {seconds} s.")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def cluster():
    with (Path(tempfile.gettempdir()) / "para_core_tests_with_ray").open("w") as lock:
        with within(SECONDS):
            fcntl.flock(lock, fcntl.LOCK_EX)
            group.connect(2, debug=False)
        yield
        with within(SECONDS):
            ray.shutdown()


@pytest.fixture(autouse=True)
def time_limit(cluster):
    with within(SECONDS):
        yield


@pytest.fixture(scope="module")
def server(cluster):
    """Serve with one replica of two ranks."""
    address = ray.get_runtime_context().gcs_address
    with serve("--ranks", 2, "--queue", 2, "--port", PORT, seconds=SECONDS, RAY_ADDRESS=address) as command:
        command.read_until(f":{PORT}/")
        yield
        assert not [text for level, text in messages(command.end()) if level == "ERROR"]


def ask(body=None, *, method="POST", path=PATH, **headers):
    headers = {"Content-Type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", PORT, timeout=SECONDS)) as connection:
        connection.request(method, path, json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, response.read()


def pixels(data):
    return np.asarray(Image.open(io.BytesIO(data))).astype(int)


@pytest.fixture(scope="module")
def expected():
    """Generate with diffusers alone."""
    pipe = FluxPipeline.from_pretrained(find_tiny_flux(), dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    call = {"height": 48, "width": 64, "num_inference_steps": 2, "max_sequence_length": 64}
    return np.asarray(pipe(CAPTION, generator=torch.Generator().manual_seed(1), **call).images[0]).astype(int)


# This test runs before the server, which takes all of the cluster.
@pytest.mark.long
def test_prompts_on_two_replicas_report_bad_lines(tmp_path, capsys, expected):
    path, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    lines = [json.dumps({"prompt": CAPTION, "seed": seed, **SMALL}) for seed in (1, 2, 1, 3)]
    path.write_text("\n".join([*lines, "{"]))
    arguments = ["generate", "--prompts", str(path), "--out", str(out), "--replicas", "2", "--ranks", "1"]
    assert run(arguments) == 1
    stderr = capsys.readouterr().err
    assert re.search(r"line 5: .*JSON", stderr)
    assert "4 generated" in stderr
    images = [(out / f"{number:05d}.png").read_bytes() for number in range(1, 5)]
    assert np.array_equal(pixels(images[0]), expected)
    # Two replicas take lines in turns. The files differ by their line number.
    assert np.array_equal(pixels(images[0]), pixels(images[2]))
    assert len({pixels(image).tobytes() for image in images}) == 3


def test_server_answers_with_image_of_plain_pipeline(server, expected):
    status, body = ask(method="GET", path="/health")
    assert (status, json.loads(body)["ready"]) == (200, 1)
    status, body = ask({"prompt": CAPTION, "seed": 1, **SMALL})
    assert status == 200, body
    answer = json.loads(body)
    assert answer["para_core"]["mesh"] == {"batch": 1, "ring": 1, "ulysses": 2}
    assert np.abs(pixels(base64.b64decode(answer["data"][0]["b64_json"])) - expected).max() <= 1
    assert b'para_core_requests_total{outcome="done"} 1.0' in ask(method="GET", path="/metrics")[1]


def test_cancelled_request_lets_the_next_run(server):
    with ThreadPoolExecutor(1) as threads:
        long = threads.submit(ask, {"prompt": CAPTION, **SMALL, "steps": 200}, X_Request_Id="long")
        while ask(method="DELETE", path=f"{PATH}/long")[0] == 404:
            time.sleep(0.05)
        status, body = long.result()
    assert status == 409, body
    assert b"cancelled after step" in body
    assert ask({"prompt": CAPTION, **SMALL})[0] == 200


@pytest.mark.long
def test_openai_client_streams_partial_images(server, expected):
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{PORT}/v1", api_key="none", max_retries=0)
    assert client.models.list().data[0].owned_by == "para_core"
    fields = {"prompt": CAPTION, "size": "64x48", "extra_body": {"steps": 2, "seed": 1}}
    *partials, last = list(client.images.generate(stream=True, partial_images=1, **fields))
    assert [event.type for event in partials] == ["image_generation.partial_image"]
    assert last.type == "image_generation.completed"
    assert np.abs(pixels(base64.b64decode(last.b64_json)) - expected).max() <= 1
    assert pixels(base64.b64decode(partials[0].b64_json)).shape == expected.shape
    client.close()
