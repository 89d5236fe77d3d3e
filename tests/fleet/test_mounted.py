"""The server in an application of one's own, as docs/serving.md shows it: mounted below a path, and without it."""

import base64
import io
import os
import re
import signal
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import uvicorn
from PIL import Image

from para_core.fleet.pipeline_info import find_tiny_flux
from tests.fleet.test_server import ask

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]
PAGE = Path(__file__).parents[2] / "docs" / "serving.md"
PATH = "/flux/v1/images/generations"
KEY = {"Authorization": "Bearer secret"}
FIELDS = {"prompt": "a large red circle", "size": "64x48", "steps": 2, "max_sequence_length": 64}


def rank_processes():
    """Return the process ids of the ranks that this process started."""
    return [child.pid for child in psutil.Process().children() if "RANK" in child.environ()]


@pytest.fixture(scope="module")
def port():
    """Run the application of the page on the small model, and return its port."""
    (program,) = [block for block in re.findall(r"^```py\n(.*?)^```", PAGE.read_text(), re.M | re.S) if "Pool" in block]
    program = program.replace("black-forest-labs/FLUX.1-dev", str(find_tiny_flux()))
    small = '"height": 48, "width": 64, "num_inference_steps": 2, "max_sequence_length": 64, "prompt": prompt'
    names: dict[str, object] = {}
    exec(compile(program.replace('"prompt": prompt', small), str(PAGE), "exec"), names)
    web = uvicorn.Server(uvicorn.Config(names["app"], port=0, log_level="error", ws="none"))
    thread = threading.Thread(target=web.run, daemon=True)
    thread.start()
    while not web.started:
        assert thread.is_alive()
        time.sleep(0.1)
    yield web.servers[0].sockets[0].getsockname()[1]
    web.should_exit = True
    thread.join()
    assert rank_processes() == []


def image(data):
    return np.asarray(Image.open(io.BytesIO(data))).astype(int)


def test_own_endpoint_and_mounted_server_give_the_same_image(port):
    status, headers, drawn = ask(port, None, path="/draw?prompt=a+large+red+circle&seed=3")
    assert (status, headers["content-type"]) == (200, "image/png")
    answer = ask(port, {**FIELDS, "seed": 3}, path=PATH, **KEY)[2]
    assert base64.b64decode(answer["data"][0]["b64_json"]) == drawn
    assert answer["seed"] == 3
    other = ask(port, FIELDS, path=PATH, **KEY)[2]
    assert np.abs(image(base64.b64decode(other["data"][0]["b64_json"])) - image(drawn)).max() > 1


def test_own_endpoint_draws_a_seed_for_each_call(port):
    first, second = (ask(port, None, path="/draw?prompt=a+large+red+circle")[2] for _ in range(2))
    assert np.abs(image(first) - image(second)).max() > 1


def test_replica_that_dies_while_idle_starts_again(port):
    def ready():
        return ask(port, None, method="GET", path="/flux/health")[2]["ready"]

    def wait_for(count):
        deadline = time.monotonic() + 120
        while ready() != count:
            assert time.monotonic() < deadline, f"not {count} replicas"
            time.sleep(0.2)

    wait_for(1)
    os.kill(rank_processes()[-1], signal.SIGKILL)
    wait_for(0)
    wait_for(1)
    assert ask(port, FIELDS, path=PATH, **KEY)[0] == 200


def test_addresses_pages_and_refusals_are_below_the_path(port):
    assert ask(port, FIELDS, path=PATH)[0] == 401
    answer = ask(port, {**FIELDS, "response_format": "url"}, path=PATH, X_Request_Id="mine", **KEY)[2]
    assert answer["data"][0]["url"] == f"http://127.0.0.1:{port}/flux/v1/files/mine/0"
    assert ask(port, None, method="GET", path="/flux/v1/files/mine/0", **KEY)[0] == 200
    for path in ("/flux/", "/flux/docs", "/flux/docs/assets/swagger-ui.css", "/flux/health"):
        assert ask(port, None, method="HEAD", path=path)[0] == 200
    status, _, body = ask(port, FIELDS, path="/flux/v1/images/edits", **KEY)
    assert (status, "FluxImg2ImgPipeline" in body["error"]["message"]) == (404, True)


def test_running_request_is_cancelled(port):
    with_many = {**FIELDS, "steps": 200}
    answers = []
    thread = threading.Thread(
        target=lambda: answers.append(ask(port, with_many, path=PATH, X_Request_Id="long", **KEY)[0])
    )
    thread.start()
    time.sleep(2)
    assert ask(port, None, method="DELETE", path=f"{PATH}/long", **KEY)[0] == 200
    thread.join(60)
    assert answers == [409]
    assert ask(port, FIELDS, path=PATH, **KEY)[0] == 200


def test_replica_that_died_starts_again(port, caplog):
    answers = []
    thread = threading.Thread(target=lambda: answers.append(ask(port, {**FIELDS, "steps": 200}, path=PATH, **KEY)))
    thread.start()
    time.sleep(2)
    os.kill(rank_processes()[-1], signal.SIGKILL)
    thread.join(60)
    assert answers[0][0] == 500
    assert ask(port, FIELDS, path=PATH, **KEY)[0] == 200
    assert any("SIGKILL" in record.getMessage() for record in caplog.records if record.levelname == "ERROR")
