"""A web page of gradio with two visitors, whose process launches the ranks."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from zoo.flux import PIPELINE

pytestmark = pytest.mark.long


@pytest.fixture
def port():
    """Start the example on two ranks, and return its port."""
    # gradio 6 wants an older Pillow than constraints.txt has, so it is in no extra.
    pytest.importorskip("gradio", reason="gradio is not installed: pip install gradio")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    example = Path("parallel_examples/launch_gradio.py")
    arguments = ["--ranks", "2", "--model", PIPELINE, "--size", "64", "--port", str(port)]
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    with subprocess.Popen([sys.executable, example, *arguments], env=environment) as program:
        yield port
        program.send_signal(signal.SIGTERM)


def connect(port):
    """Return a client, when the page answers."""
    import gradio_client

    for _ in range(120):
        try:
            return gradio_client.Client(f"http://127.0.0.1:{port}", verbose=False)
        except Exception:
            time.sleep(1)
    raise TimeoutError("the page does not answer")


def test_two_visitors_wait_for_each_other_and_one_is_stopped(port):
    visitors = [connect(port) for _ in range(2)]
    images = [visitor.submit("a red circle", 4, api_name="/generate") for visitor in visitors]
    assert len({Path(image.result(timeout=60)).read_bytes() for image in images}) == 2
    endless = visitors[0].submit("a red circle", 100_000, api_name="/generate")
    time.sleep(2)
    visitors[1].predict(api_name="/stop")
    with pytest.raises(Exception, match="stopped"):
        endless.result(timeout=60)
    assert visitors[1].predict("a blue square", 2, api_name="/generate")
