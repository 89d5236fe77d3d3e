"""The server under load, on loopback: throughput and latency at 1, 2 and 4 times what it can do, beside one plain pipeline.

python -m benchmarks.serve_load --replicas 2 --ranks 1

Each round sends a bounded number of requests from threads of this process, at a steady rate; what is refused with 429 is
counted, not sent again. The same HTTP application answers twice: over replicas on Ray, and over one unmodified pipeline of
diffusers in this process, called from one thread. Overhead is what a request takes beside its pipeline's call.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
import torch
import uvicorn
from diffusers import FluxPipeline

from benchmarks.environment import write_results
from para_core.fleet import serving
from para_core.fleet.group import Shape
from para_core.fleet.limits import Limits
from para_core.fleet.models import Model, find_model
from para_core.fleet.outputs import encode
from para_core.fleet.recipe import Recipe
from para_core.fleet.request import Request, call_arguments
from para_core.fleet.server import Server
from para_core.fleet.work import Result

HOST, PATH = "127.0.0.1", "/v1/images/generations"
BODY = {"prompt": "a large red circle in the centre on a white background", "seed": 0}


def ask(port: int, body: dict[str, Any]) -> tuple[int, float, float]:
    """``(status, seconds, seconds in the pipeline)``."""
    start = time.perf_counter()
    with contextlib.closing(http.client.HTTPConnection(HOST, port, timeout=600)) as connection:
        connection.request("POST", PATH, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = json.loads(response.read())
    inside = answer["para_core"]["seconds"] if response.status == 200 else 0.0
    return response.status, time.perf_counter() - start, inside


class PlainBackend:
    """One pipeline that para_core has not touched, which answers one request after the other."""

    def __init__(self, model: str) -> None:
        self._pipe = FluxPipeline.from_pretrained(model, dtype=torch.float32)
        self._pipe.set_progress_bar_config(disable=True)
        self._thread = ThreadPoolExecutor(1)

    async def generate(self, id_: str, request: Request, progress: Callable[[int], None]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._call, request)

    def _call(self, request: Request) -> Result:
        start = time.perf_counter()
        made = self._pipe(**call_arguments(request), generator=torch.Generator().manual_seed(request.seed))
        seconds = time.perf_counter() - start
        return Result(tuple(encode(made, "png", fps=16)), {"seconds": seconds})

    def cancel(self, id_: str) -> None:
        """Nothing here leaves."""

    async def ready(self) -> int:
        return 1


@contextlib.contextmanager
def plain_server(model: Model, limits: Limits, port: int) -> Iterator[None]:
    server = Server(PlainBackend(model.name), model, limits, format_="png", replicas=1, api_key=None)
    web = uvicorn.Server(uvicorn.Config(server.app, HOST, port, log_level="error", ws="none", lifespan="off"))
    thread = threading.Thread(target=web.run)
    thread.start()
    try:
        while not web.started:
            time.sleep(0.1)
        yield
    finally:
        web.should_exit = True
        thread.join()


@contextlib.contextmanager
def replica_server(model: Model, limits: Limits, port: int, replicas: int, ranks: int) -> Iterator[None]:
    shape, recipe = Shape(ranks), Recipe(model.name)
    options = {"replicas": replicas, "format_": "png", "fps": 16, "host": HOST, "port": port, "api_key": None}
    serving.start(model, recipe, shape, limits, **options)
    try:
        yield
    finally:
        serving.stop()
        ray.shutdown()


def load(port: int, body: dict[str, Any], requests: int, interval: float) -> dict[str, Any]:
    """Send ``requests``, one every ``interval`` seconds; what became of them."""
    start = time.perf_counter()

    def send(index: int) -> tuple[int, float, float]:
        time.sleep(max(0.0, start + index * interval - time.perf_counter()))
        return ask(port, body)

    with ThreadPoolExecutor(requests) as threads:
        answers = list(threads.map(send, range(requests)))
    wall = time.perf_counter() - start
    done = sorted(seconds for status, seconds, _ in answers if status == 200)
    return {
        "requests": requests,
        "done": len(done),
        "refused": sum(status == 429 for status, _, _ in answers),
        "failed": sum(status not in (200, 429) for status, _, _ in answers),
        "requests_per_second": len(done) / wall,
        "p50_seconds": statistics.median(done),
        "p99_seconds": done[min(len(done) - 1, round(0.99 * len(done)))],
    }


def measure(port: int, body: dict[str, Any], requests: int, running: int) -> dict[str, Any]:
    """One request at a time, then loads; ``running`` requests at once are what the server can do."""
    alone = [ask(port, body) for _ in range(6)][1:]
    seconds = statistics.median(seconds for _, seconds, _ in alone)
    overhead = statistics.median(seconds - inside for _, seconds, inside in alone)
    print(f"one request at a time: {seconds:.3f} s, of which {overhead * 1000:.0f} ms are not the pipeline's")
    # With all replicas busy: on a machine that has fewer cores than ranks want, more than one request alone takes.
    with ThreadPoolExecutor(running) as threads:
        start = time.perf_counter()
        list(threads.map(lambda _: ask(port, body), range(4 * running)))
    capacity = 4 * running / (time.perf_counter() - start)
    rows = []
    for factor in (1, 2, 4):
        row = load(port, body, requests, 1 / (factor * capacity))
        rows.append({"load": factor, **row})
        print(
            f"{factor} × {capacity:.2f} per s: {row['done']} done, {row['refused']} refused, {row['failed']} failed; "
            f"{row['requests_per_second']:.2f} per s, p50 {row['p50_seconds']:.2f} s, p99 {row['p99_seconds']:.2f} s"
        )
    return {
        "seconds_alone": seconds,
        "overhead_seconds": overhead,
        "capacity_per_second": capacity,
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--requests", type=int, default=24, help="of each round; at most 200")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--port", type=int, default=8124)
    options = parser.parse_args()
    if not 1 <= options.requests <= 200:
        parser.error(f"--requests {options.requests}: expected 1 to 200.")
    torch.set_num_threads(1)
    model = find_model(None)
    body = {**BODY, "steps": options.steps}
    results: dict[str, Any] = {"options": vars(options)}
    print("one plain pipeline behind the server")
    with plain_server(model, Limits(waiting=2), options.port):
        results["plain"] = measure(options.port, body, options.requests, 1)
    print(f"{options.replicas} replicas of {options.ranks} ranks behind the server")
    limits = Limits(waiting=2 * options.replicas)
    with replica_server(model, limits, options.port + 1, options.replicas, options.ranks):
        results["replicas"] = measure(options.port + 1, body, options.requests, options.replicas)
    print(write_results("serve_load", results, "diffusers", "ray"))


if __name__ == "__main__":
    main()
