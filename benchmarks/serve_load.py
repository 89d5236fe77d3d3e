"""The server under load, on loopback: throughput and latency at 1, 2 and 4 times what it can do, beside one plain pipeline.

python -m benchmarks.serve_load --replicas 2 --ranks 1

Each round sends a bounded number of requests from threads of this process, at a steady rate; what is refused with 429 is
counted, not sent again. One plain pipeline, called in this process, says what a request costs without a server.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
import torch
from diffusers import FluxPipeline

from benchmarks.environment import write_results
from para_core.fleet import serving
from para_core.fleet.group import Shape
from para_core.fleet.models import find_model
from para_core.fleet.recipe import Recipe
from para_core.fleet.server import Limits

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


def plain_seconds(model: str, call: dict[str, Any], rounds: int) -> float:
    """Median of a call of the unmodified pipeline in this process."""
    pipe = FluxPipeline.from_pretrained(model, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    taken = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        pipe(BODY["prompt"], generator=torch.Generator().manual_seed(0), **call)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


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
    call = {**model.defaults, "num_inference_steps": options.steps}
    plain = plain_seconds(model.name, call, rounds=5)
    print(f"plain pipeline: {plain:.3f} s per request")
    serving.start(
        model,
        Recipe(model.name),
        Shape(options.ranks),
        Limits(waiting=2 * options.replicas),
        replicas=options.replicas,
        format_="png",
        fps=16,
        host=HOST,
        port=options.port,
        api_key=None,
    )
    body = {**BODY, "steps": options.steps}
    alone = [ask(options.port, body) for _ in range(6)][1:]
    seconds = statistics.median(seconds for _, seconds, _ in alone)
    overhead = statistics.median(seconds - inside for _, seconds, inside in alone)
    print(f"one request at a time: {seconds:.3f} s, of which {overhead * 1000:.0f} ms are not the pipeline's")
    rows = []
    for factor in (1, 2, 4):
        row = load(options.port, body, options.requests, seconds / options.replicas / factor)
        rows.append({"load": factor, **row})
        print(
            f"{factor} × capacity: {row['done']} done, {row['refused']} refused, {row['failed']} failed; "
            f"{row['requests_per_second']:.2f} per s, p50 {row['p50_seconds']:.2f} s, p99 {row['p99_seconds']:.2f} s"
        )
    serving.stop()
    ray.shutdown()
    results = {
        "options": vars(options),
        "plain_seconds": plain,
        "seconds_alone": seconds,
        "overhead_seconds": overhead,
        "rows": rows,
    }
    print(write_results("serve_load", results, "diffusers", "ray"))


if __name__ == "__main__":
    main()
