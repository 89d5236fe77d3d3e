"""Count the Python functions of para_core that run where a pipeline is changed, and in one step, one attention call.

    python -m benchmarks.walks

The counts are exact: the same on every machine. Two ranks run a tiny FLUX of two double and two single blocks. Writes
benchmarks/results/walks.json.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.harness import ROOT, markdown_table, measure_on_ranks, parser_of, write_results
from para_core import UnifiedAttnMode, init_context_parallel_mesh
from para_core.adapters import apply_cache_on_pipe, parallelize_pipe
from tests.tiny import flux_call, flux_pipe

PACKAGES = tuple(f"{ROOT / name}/" for name in ("para_core", "adapters", "kernels"))
# The first steps build what later ones look up. A cache computes the step after one that it skips only if it must.
STEPS, COUNTED_STEP = 6, 4
SHOWN = 25


class WalkCounter:
    """A counter of the calls of Python functions in files of ``packages``, by function."""

    def __init__(self, packages: tuple[str, ...] = PACKAGES) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        self._packages = packages

    def __call__(self, frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(self._packages):
            self.calls[frame.f_code.co_filename, frame.f_code.co_qualname] += 1

    def summary(self) -> dict[str, Any]:
        """Return the number of calls and of files, and the calls by function, most frequent first."""
        functions = {
            f"{Path(file).relative_to(ROOT) if file.startswith(str(ROOT)) else file}: {name}": calls
            for (file, name), calls in self.calls.most_common()
        }
        files = {file for file, _ in self.calls}
        return {"calls": sum(self.calls.values()), "files": len(files), "functions": functions}


@contextmanager
def counted(packages: tuple[str, ...] = PACKAGES) -> Iterator[WalkCounter]:
    """Yield a counter of the calls that this thread makes inside the ``with`` block."""
    counter = WalkCounter(packages)
    sys.setprofile(counter)
    try:
        yield counter
    finally:
        sys.setprofile(None)


class _CountedSteps:
    """A progress bar of a pipeline that counts the calls of each step."""

    def __init__(self) -> None:
        self.steps: list[WalkCounter] = []

    def __call__(self, *_: Any, **__: Any) -> _CountedSteps:
        return self

    def __enter__(self) -> _CountedSteps:
        self.update()
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def update(self) -> None:
        """End a step, and begin to count the next one."""
        sys.setprofile(None)
        counter = WalkCounter()
        self.steps.append(counter)
        sys.setprofile(counter)


def count_step(pipe: Any) -> dict[str, Any]:
    """Return the counts of one step of ``pipe``."""
    steps = _CountedSteps()
    pipe.progress_bar = steps
    pipe(**flux_call(num_inference_steps=STEPS))
    return steps.steps[COUNTED_STEP].summary()


def count_pipe() -> dict[str, Any]:
    """Return the counts of a pipeline's walks on the ranks of this process group."""
    walks = {}
    mesh = init_context_parallel_mesh("cpu")
    parallelize_pipe(flux_pipe(), mesh=mesh)
    pipe = flux_pipe()
    with counted() as walk:
        parallelize_pipe(pipe, mesh=mesh)
    walks["parallelize_pipe"] = walk.summary()
    walks["a step"] = count_step(pipe)
    apply_cache_on_pipe(pipe, compute_steps=range(STEPS))
    walks["a step that the cache computes"] = count_step(pipe)
    apply_cache_on_pipe(pipe, residual_diff_threshold=1e9)
    walks["a step that the cache skips"] = count_step(pipe)
    pipe = flux_pipe()
    torch.accelerator.device_count = dist.get_world_size
    from diffusers import ContextParallelConfig

    with counted((str(Path(sys.modules["diffusers"].__file__ or "").parent),)) as walk:
        pipe.transformer.enable_parallelism(config=ContextParallelConfig(ulysses_degree=2))
    walks["enable_parallelism of diffusers"] = walk.summary()
    return walks


def count_attention() -> dict[str, Any]:
    """Return the counts of one SDPA call in a mode, on the ranks of this process group."""
    walks = {}
    query, key, value = torch.randn(3, 1, 4, 64, 16)
    for name, ring in (("ulysses", 1), ("ring", dist.get_world_size())):
        mode = UnifiedAttnMode(init_context_parallel_mesh("cpu", max_ring_dim_size=ring), assume_equal=True)
        with torch.no_grad(), mode:
            attend: Callable[..., Any] = F.scaled_dot_product_attention
            for _ in range(3):
                attend(query, key, value)
            with counted() as walk:
                attend(query, key, value)
        walks[f"an SDPA call, {name} of {dist.get_world_size()}"] = walk.summary()
    return walks


def measure() -> dict[str, Any]:
    """Return the counts of all walks on the ranks of this process group."""
    torch.manual_seed(1)
    return {**count_pipe(), **count_attention()}


def table(walks: dict[str, Any]) -> list[str]:
    """Return the lines of a table with one row per walk."""
    rows = [(name, walk["calls"], walk["files"]) for name, walk in walks.items()]
    return markdown_table(("walk", "Python calls", "files"), rows, right=(1, 2))


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("--functions", action="store_true", help="print the functions that are called most often")
    options = parser.parse_args()
    walks = measure_on_ranks(measure, 2)
    for name, walk in walks.items() if options.functions else ():
        print(f"\n{name}: {walk['calls']} calls in {walk['files']} files")
        for function, calls in list(walk["functions"].items())[:SHOWN]:
            print(f"{calls:6} {function}")
    print("\n".join(table(walks)))
    write_results("walks", {"walks": walks}, "diffusers")
