"""A launched pipeline behind FastAPI: requests wait for each other, and the event loop answers others meanwhile."""

import json
import socket
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import fastapi
import uvicorn


def test_requests_share_a_pipeline(steps):
    app = fastapi.FastAPI()

    @app.get("/generate/{number}")
    async def generate(number: int):
        return await steps.call(5, seconds=0.05, number=number)

    @app.get("/health")
    async def health():
        return "ok"

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        port = listener.getsockname()[1]

        def get(path):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
                return json.load(answer), time.monotonic()

        with ThreadPoolExecutor() as clients:
            images = [clients.submit(get, f"/generate/{number}") for number in range(3)]
            time.sleep(0.1)
            _, answered = get("/health")
        assert sorted(image.result()[0]["number"] for image in images) == [0, 1, 2]
        assert answered < max(image.result()[1] for image in images)
        server.should_exit = True
        thread.join()
