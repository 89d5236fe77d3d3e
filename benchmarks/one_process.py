"""Cost of driving ranks from one Python process: start, calls, steps, callbacks and large results.

python -m benchmarks.one_process

Writes benchmarks/results/one_process.json. The pipeline of the costs computes nothing, so all of a call's time is the
launcher's.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.harness import markdown_table, parser_of, read_results, write_results
from para_core import launch

FLUX = """
import json, sys, time
begun = time.perf_counter()
from para_core import launch

def load():
    import torch
    from diffusers import FluxPipeline
    from para_core.adapters import parallelize_pipe
    from zoo.flux import PIPELINE
    return parallelize_pipe(FluxPipeline.from_pretrained(PIPELINE, dtype=torch.float32))

ranks = int(sys.argv[1])
pipe = launch(load, ranks=ranks, progress=False) if ranks else load()
seconds = {"ready": time.perf_counter() - begun}
for call in ("first call", "second call", "third call"):
    begun = time.perf_counter()
    pipe("a red circle", height=128, width=128, num_inference_steps=4)
    seconds[call] = time.perf_counter() - begun
print(json.dumps(seconds))
"""


class Idle:
    """A pipeline whose steps do nothing."""

    def __init__(self) -> None:
        self.video = torch.randint(0, 255, (129, 720, 1280, 3), dtype=torch.uint8)

    def progress_bar(self, iterable: Any = None, total: int | None = None) -> Any:
        """Let launch replace this method."""
        raise NotImplementedError

    def __call__(self, steps: int, shape: tuple[int, ...] = (1, 1), callback_on_step_end: Any = None) -> None:
        tensors = {"latents": torch.zeros(shape, dtype=torch.bfloat16)}
        with self.progress_bar(total=steps) as bar:
            for step in range(steps):
                if callback_on_step_end is not None:
                    tensors = callback_on_step_end(self, step, 0, tensors)
                bar.update()

    def frames(self, kind: str) -> Any:
        """Return 129 frames of 720p."""
        if kind == "uint8":
            return self.video.numpy()
        if kind == "float32":
            return self.video.numpy().astype(np.float32)
        from PIL import Image

        return [Image.fromarray(frame) for frame in self.video.numpy()]


def seconds_of(function: Callable[[], Any], repeats: int) -> list[float]:
    """Return the seconds of each of ``repeats`` calls."""
    taken = []
    for _ in range(repeats):
        begun = time.perf_counter()
        function()
        taken.append(time.perf_counter() - begun)
    return taken


def milliseconds(function: Callable[[], Any], repeats: int, per: int = 1) -> float:
    """Return the median milliseconds of a call, divided by ``per``."""
    return round(1000 * statistics.median(seconds_of(function, repeats)) / per, 3)


def keep(pipe: Any, step: int, timestep: Any, tensors: Any) -> Any:
    """Return the tensors as they are."""
    return tensors


def change(pipe: Any, step: int, timestep: Any, tensors: Any) -> Any:
    """Return other latents."""
    return {"latents": tensors["latents"] * 1}


def costs(ranks: int) -> dict[str, float]:
    """Return what calls, steps, callbacks and results cost on ``ranks`` ranks, in milliseconds."""
    video = (1, 16, 33, 90, 160)
    with launch(Idle, ranks=ranks, progress=False) as pipe:
        call = milliseconds(partial(pipe, 0), 200)
        return {
            "a call": call,
            "a step": milliseconds(partial(pipe, 200), 5, 200),
            "a step with a callback that gets 0.5 MB": milliseconds(partial(pipe, 20, (1, 4096, 64), keep), 3, 20),
            "a step with a callback that gets 15 MB": milliseconds(partial(pipe, 10, video, keep), 3, 10),
            "a step with a callback that changes 15 MB": milliseconds(partial(pipe, 10, video, change), 3, 10),
            "129 frames of 720p to the caller, uint8": milliseconds(partial(pipe.frames, "uint8"), 3),
            "129 frames of 720p to the caller, float32": milliseconds(partial(pipe.frames, "float32"), 3),
            "129 frames of 720p to the caller, PIL images": milliseconds(partial(pipe.frames, "PIL"), 3),
        }


def start(ranks: int) -> dict[str, float]:
    """Return the seconds until the small FLUX is ready, and of its first calls, in a new process. 0 ranks: alone."""
    done = subprocess.run([sys.executable, "-c", FLUX, str(ranks)], stdout=subprocess.PIPE, text=True, check=True)
    seconds: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return {name: round(value, 2) for name, value in seconds.items()}


def parts() -> dict[str, list[str]]:
    """Return the tables of docs/one_process.md."""
    results = read_results("one_process")
    ranks = list(results["costs"])
    names = list(results["costs"][ranks[0]])
    costs_ = [[name, *(f"{results['costs'][number][name]:.3g}" for number in ranks)] for name in names]
    starts = list(results["start"])
    events = list(results["start"][starts[0]])
    begun = [[event, *(f"{results['start'][number][event]:.2f}" for number in starts)] for event in events]
    head = [f"{number} ranks" if number != "0" else "in one process" for number in starts]
    head = [text.replace("1 ranks", "1 rank") for text in head]
    return {
        "costs": markdown_table(
            ["milliseconds", *(f"{n} rank{'s' if n != '1' else ''}" for n in ranks)], costs_, right=[1, 2, 3]
        ),
        "start": markdown_table(["seconds", *head], begun, right=[1, 2, 3]),
    }


def main() -> None:
    """Measure, print and write the results."""
    parser_of(__doc__).parse_args()
    results = {
        "start": {str(ranks): start(ranks) for ranks in (0, 1, 2)},
        "costs": {str(ranks): costs(ranks) for ranks in (1, 2)},
    }
    write_results("one_process", results, "diffusers", "transformers", "cloudpickle")
    for lines in parts().values():
        print("\n".join(lines), end="\n\n")


if __name__ == "__main__":
    main()
