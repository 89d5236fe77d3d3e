"""The server under load, on loopback: throughput and latency at 1, 2 and 4 times its capacity, next to one plain
pipeline.

python -m benchmarks.serving.load

The same HTTP application answers at two ports: over replicas on Ray, and over one unmodified pipeline of diffusers in
this process, called from one thread. Rounds ask them in turns, each with a bounded number of requests from threads of
this process, at a steady rate. Requests that are refused with 429 are counted, and not sent again. Overhead is the time
of a request minus that of its pipeline's call.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import uvicorn
from diffusers import FluxPipeline

from benchmarks.harness import markdown_table, parser_of, read_results, write_results
from para_core.fleet.build import find_model
from para_core.fleet.outputs import Result, encode
from para_core.fleet.pipeline_info import PipelineInfo
from para_core.fleet.request import Request, call_arguments

# The loads are relative to the capacity of a server.
FACTORS = (1, 2, 4)
HOST, PATH = "127.0.0.1", "/v1/images/generations"
BODY = {"prompt": "a large red circle in the centre on a white background", "seed": 0, "steps": 8}
# ``requests`` is the number of requests of each load in a round. The replicas have the port after that of the plain
# pipeline.
OPTIONS = {"replicas": 2, "ranks": 1, "requests": 12, "rounds": 5, "port": 8124}


@contextlib.contextmanager
def response_of(port: int, method: str, path: str, body: dict[str, Any] | None = None) -> Iterator[Any]:
    """Send a request to a server on this machine, and yield the response. The connection ends with the context."""
    with contextlib.closing(http.client.HTTPConnection(HOST, port, timeout=600)) as connection:
        connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
        yield connection.getresponse()


def ask(port: int) -> tuple[int, float, float]:
    """Send one request. Return ``(status, seconds, seconds in the pipeline)``."""
    start = time.perf_counter()
    with response_of(port, "POST", PATH, BODY) as response:
        answer = json.loads(response.read())
    inside = answer["para_core"]["seconds"] if response.status == 200 else 0.0
    return response.status, time.perf_counter() - start, inside


class PlainBackend:
    """An unmodified pipeline that answers one request after the other."""

    count = 1

    def __init__(self, model: str) -> None:
        self._pipe = FluxPipeline.from_pretrained(model, dtype=torch.float32)
        self._pipe.set_progress_bar_config(disable=True)
        self._thread = ThreadPoolExecutor(1)

    async def run(self, batch: Sequence[Any]) -> None:
        for job in batch:
            job.finish(await asyncio.get_running_loop().run_in_executor(self._thread, self._call, job.request))

    def _call(self, request: Request) -> Result:
        start = time.perf_counter()
        output = self._pipe(**call_arguments(request), generator=torch.Generator().manual_seed(request.seed))
        seconds = time.perf_counter() - start
        return Result(tuple(encode(output.images, request.delivery)), {"seconds": seconds})

    def png(self, request: Request) -> bytes:
        """Return the image of ``request``."""
        return self._call(request).outputs[0].data

    def cancel(self, job: Any) -> None:
        """Do nothing, because no client of this program leaves."""

    async def ready(self) -> int:
        return 1


@contextlib.contextmanager
def plain_server(model: PipelineInfo, port: int) -> Iterator[None]:
    # The page of the figures is written without the server.
    from para_core.fleet.http.bodies import ServerOptions
    from para_core.fleet.http.server import Server

    server = Server(PlainBackend(model.name), model, ServerOptions(waiting=2))
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
def replica_server(**options: int) -> Iterator[None]:
    """Run ``para_core serve`` with these options over replicas on a Ray cluster that the command starts."""
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "para_core", "serve", "--log-level", "error", *words]
    environment = {**os.environ, "RAY_ADDRESS": "local"}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        lines = []
        for line in process.stderr or ():
            lines.append(line)
            if " answers on " in line:
                break
        else:
            raise RuntimeError(f"the server ended before it answered: {''.join(lines)}")
        try:
            yield
        finally:
            process.terminate()
            process.communicate()


def load(port: int, requests: int, interval: float) -> dict[str, Any]:
    """Send ``requests``, one every ``interval`` seconds. Return their outcomes."""
    start = time.perf_counter()

    def send(index: int) -> tuple[int, float, float]:
        time.sleep(max(0.0, start + index * interval - time.perf_counter()))
        return ask(port)

    with ThreadPoolExecutor(requests) as threads:
        answers = list(threads.map(send, range(requests)))
    return {
        "wall": time.perf_counter() - start,
        "statuses": [status for status, _, _ in answers],
        "seconds": [seconds for status, seconds, _ in answers if status == 200],
    }


def measure(port: int, requests: int, running: int) -> dict[str, Any]:
    """Measure one round: requests one at a time, then as many as the server runs at once, and then the loads."""
    alone = [ask(port) for _ in range(4)][1:]
    with ThreadPoolExecutor(running) as threads:
        start = time.perf_counter()
        list(threads.map(lambda _: ask(port), range(4 * running)))
    capacity = 4 * running / (time.perf_counter() - start)
    return {
        "seconds_alone": [seconds for _, seconds, _ in alone],
        "overhead_seconds": [seconds - inside for _, seconds, inside in alone],
        "capacity_per_second": capacity,
        "loads": {str(factor): load(port, requests, 1 / (factor * capacity)) for factor in FACTORS},
    }


def summarize(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures over all rounds of one server."""
    rows = []
    for factor in FACTORS:
        loads = [each["loads"][str(factor)] for each in rounds]
        statuses = [status for each in loads for status in each["statuses"]]
        done = sorted(seconds for each in loads for seconds in each["seconds"])
        rows.append(
            {
                "load": factor,
                "requests": len(statuses),
                "done": len(done),
                "refused": statuses.count(429),
                "failed": sum(status not in (200, 429) for status in statuses),
                "requests_per_second": len(done) / sum(each["wall"] for each in loads),
                "p50_seconds": statistics.median(done),
                "p99_seconds": done[min(len(done) - 1, round(0.99 * len(done)))],
            }
        )
    return {
        "seconds_alone": statistics.median(x for each in rounds for x in each["seconds_alone"]),
        "overhead_seconds": statistics.median(x for each in rounds for x in each["overhead_seconds"]),
        "capacity_per_second": [each["capacity_per_second"] for each in rounds],
        "rows": rows,
    }


def table(results: dict[str, Any]) -> list[str]:
    """Return the table of docs/serving.md, with the smallest and the largest load."""
    options = results["options"]
    names = {
        "plain": "one plain pipeline",
        "replicas": f"{options['replicas']} replicas of {options['ranks']} rank{'s' * (options['ranks'] > 1)}",
    }
    rows = []
    for name, shown in names.items():
        for row in results[name]["rows"][:: len(results[name]["rows"]) - 1]:
            figures = [f"{row[name]:.2f}" for name in ("requests_per_second", "p50_seconds", "p99_seconds")]
            rows.append([shown, f"{row['load']} ×", f"{row['done']} of {row['requests']}", *figures])
    overheads = [f"{results[name]['overhead_seconds'] * 1000:.0f}" for name in names]
    pairs = zip(results["replicas"]["capacity_per_second"], results["plain"]["capacity_per_second"], strict=True)
    times = statistics.median(replicas / plain for replicas, plain in pairs)
    failed = sum(row["failed"] for name in names for row in results[name]["rows"])
    summary = (
        f"Requests that were not done were refused with 429; {failed or 'none'} failed. Under full load the replicas "
        f"did {times:.2f} times as many requests per second as the plain pipeline (median of "
        f"{options['rounds']} rounds). The server adds {overheads[0]} ms to a single request on the plain pipeline, "
        f"and {overheads[1]} ms on a replica."
    )
    heads = ["", "load", "done", "per s", "p50, s", "p99, s"]
    return [*markdown_table(heads, rows, right=range(2, 6)), "", summary]


def parts() -> dict[str, list[str]]:
    """Return the part of docs/serving.md."""
    return {"serve_load": table(read_results("serve_load"))}


def main() -> None:
    parser_of(__doc__).parse_args()
    torch.set_num_threads(1)
    replicas, ranks, requests, num_rounds, port = OPTIONS.values()
    model = find_model(None)
    rounds: dict[str, list[dict[str, Any]]] = {"plain": [], "replicas": []}
    # Both servers run all the time and are asked in turns, so that other programs on the machine affect both equally.
    of_replicas = replica_server(port=port + 1, replicas=replicas, ranks=ranks, queue=2 * replicas)
    with plain_server(model, port), of_replicas:
        for number in range(num_rounds):
            for name, of_server, running in (("plain", port, 1), ("replicas", port + 1, replicas)):
                rounds[name].append(measure(of_server, requests, running))
                print(f"round {number}, {name}: {rounds[name][-1]['capacity_per_second']:.2f} per s", flush=True)
    results = {
        "options": {**OPTIONS, "steps": BODY["steps"]},
        **{name: summarize(each) for name, each in rounds.items()},
    }
    print("\n".join(table(results)))
    print(write_results("serve_load", results, "diffusers", "ray"))


if __name__ == "__main__":
    main()
