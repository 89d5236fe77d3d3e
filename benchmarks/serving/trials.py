"""The first steps of a new user, and failures of replicas: a first image from a fresh clone, a rank killed during 50
prompts, clients that leave the server, a rank of the server killed.

python -m benchmarks.serving.trials first
python -m benchmarks.serving.trials prompts
python -m benchmarks.serving.trials server

It generates small images with the tiny FLUX, so that the fleet is measured: starting, spreading, cancelling,
restarting. Images of some requests are compared with those of one unmodified pipeline of diffusers. Imports of Ray are
inside the functions that need it, so that the page can be written without it.
"""

from __future__ import annotations

import base64
import io
import json
import os
import signal
import statistics
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.harness import ROOT, markdown_table, parser_of, read_results, write_results
from benchmarks.serving.load import PATH, PlainBackend, replica_server, response_of
from para_core.fleet.build import find_model
from para_core.fleet.outputs import Result
from para_core.fleet.prompt_file import Line, read_prompts
from para_core.fleet.recipe import Recipe
from para_core.fleet.request import make_request
from para_core.fleet.result_files import choose_names, write_result
from para_core.launcher.processes import IN_RANK

PORT = 8127
CAPTIONS = ("a large red circle", "a blue square", "a green triangle", "a small yellow star")
SMALL: dict[str, Any] = {"size": "64x48", "steps": 4}
REPLICAS, RANKS = 2, 2
PROMPTS, COMPARED = 50, 5
# These are the clients at once, those of them that leave, and the steps that the leaving ones ask for.
CLIENTS, LEAVING, LONG = 20, 5, 200


def rank_processes() -> list[int]:
    """Return the process ids of the ranks on this machine: those that this process started, or those of Ray."""
    import psutil

    own = [child.pid for child in psutil.Process().children() if IN_RANK in child.environ()]
    named = [(process.pid, process.info["cmdline"]) for process in psutil.process_iter(["cmdline"])]
    return sorted(own or [pid for pid, words in named if words and words[0].startswith("ray::Rank")])


def compare(pairs: list[tuple[bytes, bytes]]) -> dict[str, Any]:
    """Return how many images have the same bytes of pixels, and the largest difference of a pixel, out of 255."""
    pixels = [[np.asarray(Image.open(io.BytesIO(data))).astype(int) for data in pair] for pair in pairs]
    return {
        "compared": len(pairs),
        "equal_bytes": sum(np.array_equal(x, y) for x, y in pixels),
        "largest_difference": int(max(np.abs(x - y).max() for x, y in pixels)),
    }


def try_first() -> dict[str, Any]:
    """Install a fresh clone, and generate the first image on one process and on ranks."""
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:

        def timed(name: str, *command: str, cwd: str) -> None:
            start = time.perf_counter()
            subprocess.run(
                command, cwd=cwd, check=True, env={**os.environ, "PYTHONPATH": ""}, stdout=subprocess.DEVNULL
            )
            seconds[name] = time.perf_counter() - start

        clone = f"{folder}/para_core"
        timed("clone", "git", "clone", "--quiet", str(ROOT), clone, cwd=folder)
        timed("install", "make", "--silent", ".venv/.installed", cwd=clone)
        generate = (".venv/bin/para_core", "generate", "--prompt", CAPTIONS[0])
        timed("image", *generate, cwd=clone)
        timed("image_on_ranks", *generate, "--ranks", str(RANKS), "--out", "ranks", cwd=clone)
        images = [(Path(clone) / out / "00001.png").read_bytes() for out in ("out", "ranks")]
    model = find_model(None)
    plain = PlainBackend(model.name).png(make_request({"prompt": CAPTIONS[0]}, model))
    return {"ranks": RANKS, "seconds": seconds, **compare([(image, plain) for image in images])}


def try_prompts() -> dict[str, Any]:
    """Generate a file of prompts on replicas, and kill a rank when half of them are written."""
    from para_core.fleet.rank import ReplicaOptions
    from para_core.fleet.replicas import generate_lines

    model = find_model(None)
    written: dict[int, float] = {}
    killed: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        file, out = Path(folder) / "prompts.jsonl", Path(folder) / "out"
        out.mkdir()
        file.write_text("\n".join(json.dumps({"prompt": CAPTIONS[i % 4], **SMALL}) for i in range(PROMPTS)))
        lines, problems = read_prompts(file, model, {})
        lines, _ = choose_names(out, lines, None)
        start = time.perf_counter()

        def write(line: Line, result: Result) -> None:
            write_result(out, line, result)
            written[line.number] = time.perf_counter() - start
            if len(written) == PROMPTS // 2:
                os.kill(rank_processes()[0], signal.SIGKILL)
                killed.append(time.perf_counter() - start)

        problems += generate_lines(lines, Recipe(model.name), ReplicaOptions(RANKS), REPLICAS, write=write)
        seconds = time.perf_counter() - start
        plain = PlainBackend(model.name)
        some = lines[:: max(1, PROMPTS // COMPARED)][:COMPARED]
        compared = compare([((out / f"{line.name}.png").read_bytes(), plain.png(line.request)) for line in some])
        files = len(list(out.glob("*.png")))
    return {
        "prompts": PROMPTS,
        "replicas": REPLICAS,
        "ranks": RANKS,
        "files": files,
        "lost": PROMPTS - files,
        "problems": [problem.reason for problem in problems],
        "seconds_to_first": min(written.values()),
        "seconds_to_kill": killed[0],
        "seconds": seconds,
        **compared,
    }


def ask(body: dict[str, Any]) -> tuple[int, bytes, float]:
    """Send one request. Return ``(status, the image or the error, seconds)``."""
    start = time.perf_counter()
    with response_of(PORT, "POST", PATH, body) as response:
        text = response.read()
    image = base64.b64decode(json.loads(text)["data"][0]["b64_json"]) if response.status == 200 else text
    return response.status, image, time.perf_counter() - start


def leave_amid(body: dict[str, Any]) -> int:
    """Disconnect at the first progress event of the stream. Return the number of its step."""
    with response_of(PORT, "POST", PATH, {**body, "stream": True, "progress": True}) as response:
        while line := response.readline():
            event = json.loads(line[5:]) if line.startswith(b"data:") else {}
            if event.get("type") == "progress":
                return int(event["step"])
    raise RuntimeError("the stream ended before a step was told.")


def look(path: str) -> bytes:
    with response_of(PORT, "GET", path) as response:
        return bytes(response.read())


def metric(name: str) -> float:
    lines = [line.rpartition(" ") for line in look("/metrics").decode().splitlines()]
    return float(next((value for key, _, value in lines if key == name), 0.0))


def wait_until(reached: Any, what: str, seconds: float = 300.0) -> float:
    """Wait until ``reached()``, and return the seconds that it took."""
    start = time.perf_counter()
    while not reached():
        if time.perf_counter() - start > seconds:
            raise TimeoutError(f"{what}: not within {seconds:g} s.")
        time.sleep(0.05)
    return time.perf_counter() - start


def ready() -> int:
    return int(json.loads(look("/health"))["ready"])


def try_clients() -> dict[str, Any]:
    """Send requests of all clients at once, some of which ask for many steps and leave after one."""
    body = {"prompt": CAPTIONS[0], "seed": 0, **SMALL}
    alone = statistics.median(ask(body)[2] for _ in range(5))
    steps = metric("para_core_steps_total")
    start = time.perf_counter()
    with ThreadPoolExecutor(CLIENTS) as threads:
        # The clients that leave are sent first, and run as long as they stay.
        left = [threads.submit(leave_amid, {**body, "steps": LONG}) for _ in range(LEAVING)]
        stay = [{**body, "prompt": CAPTIONS[i % 4], "seed": i} for i in range(CLIENTS - LEAVING)]
        answers = list(threads.map(ask, stay))
        for future in left:
            future.result()
    seconds = time.perf_counter() - start
    freed = wait_until(lambda: metric("para_core_requests_accepted") == 0, "requests that were left")
    status, _, after = ask(body)
    served = sum(status == 200 for status, _, _ in answers)
    # Steps of the clients that stayed, and of the last request, are no steps of those that left.
    done = metric("para_core_steps_total") - steps - (served + (status == 200)) * SMALL["steps"]
    plain, model = PlainBackend(find_model(None).name), find_model(None)
    compared = compare(
        [(answers[i][1], plain.png(make_request(stay[i], model))) for i in range(COMPARED) if answers[i][0] == 200]
    )
    return {
        "clients": CLIENTS,
        "left": LEAVING,
        "served": served,
        "cancelled": int(metric('para_core_requests_total{outcome="cancelled"}')),
        "failed": int(metric('para_core_requests_total{outcome="failed"}')),
        "steps_of_cancelled": int(done),
        "steps_asked_by_cancelled": LEAVING * LONG,
        "seconds": seconds,
        "seconds_until_free": freed,
        "seconds_alone": alone,
        "seconds_after": after,
        **compared,
    }


def try_death() -> dict[str, Any]:
    """Kill a rank while three requests for each replica run and wait. Each of them may be tried once more."""
    requests = 3 * REPLICAS
    body = {"prompt": CAPTIONS[1], **SMALL, "steps": 40}
    before = metric("para_core_steps_total")
    with ThreadPoolExecutor(requests) as threads:
        futures = [threads.submit(ask, {**body, "seed": seed}) for seed in range(requests)]
        wait_until(lambda: metric("para_core_steps_total") > before + 2, "a step")
        os.kill(rank_processes()[0], signal.SIGKILL)
        start = time.perf_counter()
        wait_until(lambda: ready() < REPLICAS, "the death")
        noticed = time.perf_counter() - start
        wait_until(lambda: ready() == REPLICAS, "the replica")
        restored = time.perf_counter() - start
        answers = [future.result() for future in futures]
    return {
        "requests": requests,
        "answered": sum(status == 200 for status, _, _ in answers),
        "lost": sum(status != 200 for status, _, _ in answers),
        "deaths": int(metric("para_core_replica_deaths_total")),
        "seconds_until_noticed": noticed,
        "seconds_until_it_serves": restored,
    }


def try_server() -> dict[str, Any]:
    start = time.perf_counter()
    with replica_server(port=PORT, replicas=REPLICAS, ranks=RANKS, queue=CLIENTS, retries=1):
        started = time.perf_counter() - start
        results = {"clients": try_clients(), "death": try_death()}
    return {"replicas": REPLICAS, "ranks": RANKS, "seconds_to_start": started, **results}


PARTS = {"first": try_first, "prompts": try_prompts, "server": try_server}
# Each part has the case and its outcome.
ROWS = (
    (
        "first",
        "first image in a fresh clone: one process; {ranks} ranks; against the plain pipeline",
        "{seconds[image]:.0f} s; {seconds[image_on_ranks]:.0f} s; off by at most {largest_difference} of 255",
    ),
    (
        "prompts",
        "{prompts} prompts on {replicas} replicas × {ranks} ranks, a rank killed after half of them",
        "{files} images, {lost} lost, {seconds:.0f} s (first {seconds_to_first:.0f} s, kill {seconds_to_kill:.0f} s)",
    ),
    (
        "clients",
        "{clients} clients at once on {replicas} replicas × {ranks} ranks, {left} of them leave",
        "{served} served, {cancelled} cancelled, {failed} failed, {seconds:.1f} s",
    ),
    ("clients", "steps computed for the {left} that left", "{steps_of_cancelled} of {steps_asked_by_cancelled}"),
    ("clients", "the next single request", "{seconds_after:.2f} s (before: {seconds_alone:.2f} s)"),
    (
        "death",
        "a rank killed with {requests} requests accepted, `--retries 1`",
        "{answered} answered, {lost} lost",
    ),
    (
        "death",
        "time until its replica serves again",
        "{seconds_until_it_serves:.1f} s (noticed after {seconds_until_noticed:.1f} s)",
    ),
)


def table(results: dict[str, Any]) -> list[str]:
    """Return the table of docs/serving.md."""
    server = results["server"]
    figures = {**results, "clients": {**server, **server["clients"]}, "death": server["death"]}
    return markdown_table(["", ""], [[text.format(**figures[part]) for text in texts] for part, *texts in ROWS])


def parts() -> dict[str, list[str]]:
    """Return the part of docs/serving.md."""
    return {"fleet_trials": table(read_results("fleet_trials"))}


def main() -> None:
    """Run one part, and write it next to the others."""
    parser = parser_of(__doc__)
    parser.add_argument("part", choices=PARTS)
    part = parser.parse_args().part
    results = read_results("fleet_trials")
    torch.set_num_threads(1)
    results[part] = PARTS[part]()
    print(json.dumps(results[part], indent=2))
    write_results("fleet_trials", results, "diffusers", "ray")


if __name__ == "__main__":
    main()
