"""Seconds of whole generations, with all ways in turns. Each way is a process with one thread that generates one
caption.

The time is CPU time, because a single thread that never waits does all the work, and other programs of the machine
hardly change it.
"""

from __future__ import annotations

import multiprocessing
import re
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch._dynamo.utils import counters

from benchmarks.cache.judged import Computed, scenes_of
from benchmarks.cache.ways import NO_CACHE, NUM_COMPILED, SPEED, generate, load
from zoo.flux import scenes as grammar

STEPS = 28


def measure(rounds: int, *, compiled: bool) -> list[dict[str, Any]]:
    """Return a row per way. The first is no cache, with which the other ways are compared in each round."""
    number = NUM_COMPILED if compiled else len(SPEED)
    chosen = [i for i, way in enumerate(SPEED[:number]) if way.installed]
    rows = []
    with ExitStack() as stack:
        processes = [stack.enter_context(_Worker(index, compiled)) for index in chosen]
        for process in processes:
            rows.append(process.ready())
            print(rows[-1], flush=True)
        running = [(process, row) for process, row in zip(processes, rows, strict=True) if "refused" not in row]
        seconds: dict[str, list[float]] = {row["name"]: [] for _, row in running}
        for _ in range(rounds):
            for process, row in running:
                seconds[row["name"]].append(process.generate())
    for _, row in running:
        row.update(compared(seconds[row["name"]], seconds[NO_CACHE.name]))
    return rows


def compared(own: Sequence[float], uncached: Sequence[float]) -> dict[str, Any]:
    """Return the median of the seconds, and the median and quartiles of the ratios of each round.

    >>> compared([1.0, 4.0, 2.0], [2.0, 4.0, 6.0])
    {'cpu_seconds': 2.0, 'speed_up': 2.0, 'range': [1.5, 2.5]}
    """
    ratios = [x / y for x, y in zip(uncached, own, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return {"cpu_seconds": statistics.median(own), "speed_up": statistics.median(ratios), "range": [low, high]}


class _Worker:
    """A process that generates in one way when it is told to."""

    def __init__(self, index: int, compiled: bool) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(index, compiled, theirs), daemon=True)

    def __enter__(self) -> _Worker:
        return self

    def ready(self) -> dict[str, Any]:
        """Start the process, and return its row without times. Only one process compiles at a time."""
        self._process.start()
        row: dict[str, Any] = self._connection.recv()
        return row

    def generate(self) -> float:
        self._connection.send("generate")
        seconds: float = self._connection.recv()
        return seconds

    def __exit__(self, *_: object) -> None:
        if self._process.is_alive():
            self._process.terminate()
            self._process.join()


def _serve(index: int, compiled: bool, connection: Connection) -> None:
    torch.set_num_threads(1)
    way = SPEED[index]
    caption = grammar.caption(scenes_of(1)[0])
    row: dict[str, Any] = {"name": way.name, "cache": way.cache, "setting": way.setting}
    for fullgraph in (True, False) if compiled else (False,):
        torch._dynamo.reset()
        counters.clear()
        pipe = load()
        again = way.put(pipe, STEPS)
        # The hook that counts steps would be part of the graph. In eager code it takes no measurable time.
        counter = None if compiled else Computed(pipe)
        if compiled:
            pipe.transformer = torch.compile(pipe.transformer, fullgraph=fullgraph)

        def run(pipe: Any = pipe, again: Any = again) -> float:
            if again is not None:
                again()
            start = time.process_time()
            generate(pipe, caption, steps=STEPS, seed=0)
            return time.process_time() - start

        try:
            start = time.monotonic()
            run()
            row["first_call_seconds"] = round(time.monotonic() - start, 1)
            if counter is not None:
                row["computed"] = counter.steps
            run()
        except Exception as error:
            row["refused" if not fullgraph else "refused as one graph"] = short(error)
            continue
        if compiled:
            row["fullgraph"] = fullgraph
            row["graphs"] = counters["stats"]["unique_graphs"]
            row["graph breaks"] = sum(counters["graph_break"].values())
        break
    connection.send(row)
    while "refused" not in row:
        connection.recv()
        connection.send(run())


def short(error: Exception) -> str:
    """Return the type of the error and the beginning of its message, in one line."""
    words = " ".join(str(error).split())
    # Folders and addresses differ from machine to machine.
    words = re.sub(r" at 0x[0-9a-f]+", "", re.sub(r"(/[\w.\-]+)+/", "", words))
    return f"{type(error).__name__}: {words[:260]}"
