"""Shared parts of all benchmarks: environment, JSON, rank processes, timing, meters, and tables of Markdown."""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


# -- Results.


def environment(*packages: str) -> dict[str, Any]:
    """Return the date, the device, the number of cores, and the versions of Python, torch and ``packages``."""
    return {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in ("torch", *packages)},
    }


def write_results(name: str, results: Mapping[str, Any], *packages: str) -> Path:
    """Write ``results`` with its environment, in place of an earlier one in ``results``, to
    ``benchmarks/results/<name>.json``.
    """
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    now = {"environment": environment(*packages)}
    path.write_text(json.dumps({**now, **results, **now}, indent=2) + "\n")
    return path


def read_results(name: str) -> dict[str, Any]:
    """Return the content of ``benchmarks/results/<name>.json``."""
    results: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return results


# -- Rank processes.


def launch(module: str, num_ranks: int, *arguments: str) -> None:
    """Run ``python -m module arguments`` in ``num_ranks`` processes of one thread each, under torchrun if several."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"] if num_ranks > 1 else []
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *torchrun, "-m", module, *arguments], check=True, env=variables, cwd=ROOT)


def measure_on_ranks(function: Callable[..., Any], num_ranks: int, *args: Any, timeout: float = 1800.0) -> Any:
    """Call a top-level function in ``num_ranks`` new processes, and return the result of the first rank.

    Several processes have a gloo group, and one has none.

    Args:
        args: values that JSON can hold. The result is anything that pickle can hold.
        timeout: seconds that a collective waits.
    """
    module = function.__module__
    if module == "__main__":
        module = sys.modules["__main__"].__spec__.name  # type: ignore[union-attr]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output"
        launch("benchmarks.harness", num_ranks, json.dumps([module, function.__name__, args, timeout]), str(output))
        return torch.load(output, weights_only=False)


def _run_on_this_rank(call: str, output: Path) -> None:
    module, name, args, timeout = json.loads(call)
    torch.set_num_threads(1)
    if parallel := "RANK" in os.environ:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout))
    result = getattr(importlib.import_module(module), name)(*args)
    if not parallel or dist.get_rank() == 0:
        torch.save(result, output)
    if parallel:
        dist.destroy_process_group()


@contextmanager
def fake_group(ranks: int) -> Iterator[None]:
    """Make this process rank 0 of ``ranks``. Nothing is sent, no rank is waited for, and results are undefined."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


# -- Measuring.


def relative_error(out: Tensor, expected: Tensor) -> float:
    """Return ‖out − expected‖ / ‖expected‖, or infinity if the shapes differ or a number is NaN."""
    if out.shape != expected.shape:
        return math.inf
    error = (out.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)
    return float(error.nan_to_num(nan=math.inf))


def largest_over_ranks(value: float) -> float:
    """Return the largest ``value`` of all ranks."""
    values = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return values.item()


def true_on_all_ranks(flag: bool) -> bool:
    return largest_over_ranks(float(not flag)) == 0


def in_turns(
    ways: Mapping[str, Callable[[], Any]],
    rounds: int,
    clock: Callable[[], float],
    before: Callable[[], Any] = lambda: None,
) -> dict[str, list[float]]:
    """Return the seconds of each way in each round, in alternating order. ``before`` is called before each way."""
    for way in ways.values():
        way()
        way()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        gc.collect()
        gc.disable()
        for name in list(ways)[:: 1 if number % 2 == 0 else -1]:
            before()
            start = clock()
            ways[name]()
            seconds[name].append(clock() - start)
        gc.enable()
    return seconds


def calls_in_python(way: Callable[[], Any]) -> int:
    """Return how many functions Python calls during ``way()``, including those of C. Exact on every machine."""
    calls = 0

    def count(_: Any, event: str, __: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        way()
    finally:
        sys.setprofile(None)
    return calls


# -- Meters of one rank.


class TrafficCounter(TorchDispatchMode):
    """A counter of the collectives that para_core starts in this process, and of the bytes they send."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives = 0
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        sent = _sent(func, args)
        if sent is not None:
            self.collectives += 1
            self.bytes += sent
        return func(*args, **(kwargs or {}))


def _sent(func: Any, args: Sequence[Any]) -> int | None:
    """Return the bytes that a collective sends to other ranks, or None if ``func`` is no collective."""
    if func in (torch.ops.c10d.alltoall_base_.default, torch.ops.para_core.all_to_all.default):
        if func is torch.ops.para_core.all_to_all.default:
            x, sizes, _, name, *_ = args
            group = dist.distributed_c10d._resolve_process_group(name)
        else:
            _, x, boxed, _, sizes, *_ = args
            group = dist.ProcessGroup.unbox(boxed)
            sizes = sizes or [len(x) // group.size()] * group.size()
        return (sum(sizes) - sizes[group.rank()]) * x.element_size() * (x.numel() // max(1, len(x)))
    if func is torch.ops.c10d._allgather_base_.default:
        # The import is not at the top, because gpu-check lists its sections without importing para_core.
        from para_core.distributed.agree import is_record

        # Records by which ranks agree do not count.
        if is_record(args[0]):
            return None
        return args[1].nbytes * (dist.ProcessGroup.unbox(args[2]).size() - 1)
    if func is torch.ops.para_core.all_gather.default:
        x, sizes, *_ = args
        return x.nbytes * (len(sizes) - 1)
    return None


@contextmanager
def counted_traffic() -> Iterator[TrafficCounter]:
    """Yield a :class:`TrafficCounter` that also counts the exchange of guidance branches."""
    # Imported here for the reason in _sent.
    from para_core.distributed.collectives import all_gather

    traffic = TrafficCounter()

    def gather_branches(x: Tensor, sizes: Sequence[int], tensor_dim: int, dim: Any) -> Tensor:
        # It is often called inside a tensor's own dispatch, where a dispatch mode sees nothing.
        collectives, sent = traffic.collectives, traffic.bytes
        gathered = all_gather(x, sizes, tensor_dim, dim)
        traffic.collectives = collectives + 1
        traffic.bytes = sent + x.numel() * x.element_size() * (dim.size - 1)
        return gathered

    with traffic, mock.patch("para_core.cfg.guidance.all_gather", gather_branches):
        yield traffic


class PeakMemory(TorchDispatchMode):
    """A meter of the most bytes that tensors created inside the mode occupied at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        inputs = {x.untyped_storage()._cdata for x in tree_leaves([args, kwargs]) if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        for storage in (x.untyped_storage() for x in tree_leaves(out) if isinstance(x, Tensor)):
            if storage._cdata not in self._known and storage._cdata not in inputs:
                self._known[storage._cdata] = weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())
                self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        return out

    def _forget(self, key: int, size: int) -> None:
        self._known.pop(key, None)
        self.now -= size


# -- Tables.


def markdown_table(heads: Sequence[str], rows: Iterable[Iterable[object]], right: Sequence[int] = ()) -> list[str]:
    """Return the lines of a table of Markdown. ``right`` has the indices of the columns that are aligned to the
    right.
    """
    rule = ["---:" if index in right else "---" for index in range(len(heads))]
    return ["| " + " | ".join(map(str, cells)) + " |" for cells in (heads, rule, *rows)]


def fill(text: str, parts: Mapping[str, Sequence[str]]) -> str:
    """Return ``text`` with the lines between each ``<!-- name -->`` and ``<!-- end of name -->`` replaced.

    Raises:
        ValueError: the text has no such markers.
    """
    for name, lines in parts.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, has_begin, rest = text.partition(begin)
        _, has_end, after = rest.partition(end)
        if not (has_begin and has_end):
            raise ValueError(f"the page has no part between {begin.strip()} and {end}")
        text = before + begin + "\n" + "\n".join(lines) + "\n\n" + end + after
    return text


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help begins with the docstring of a program."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


if __name__ == "__main__":
    _run_on_this_rank(sys.argv[1], Path(sys.argv[2]))
