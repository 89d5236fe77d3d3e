"""The cells of the table: the fault, its moment, the pipeline, the verdict, and docs/measured/faults.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.harness import markdown_table, read_results
from benchmarks.pipelines.latents import PIPELINES as TINY_PIPELINES

RANKS_PER_HOST = 2
NUM_HOSTS = 2
# All faults strike this rank and its host. It is not the first rank of its host, its ring or the world.
FAULTY_RANK = 3
FAULTY_HOST = FAULTY_RANK // RANKS_PER_HOST

BEFORE, ATTENTION, STEPS, VAE, END = (
    "before the first step",
    "inside attention",
    "between steps",
    "in the VAE",
    "at the end",
)
MOMENTS = (BEFORE, ATTENTION, STEPS, VAE, END)

# These are faults of a rank's process, or of the link of its host, at any moment.
PROCESS_FAULTS = ("killed", "stopped", "raises", "sleeps", "out of memory")
SLOW_LINK = "link delayed by 2 s"
LINK_FAULTS = ("link cut", SLOW_LINK, "link drops 5 %")
# These inputs of the faulty rank differ from those of the others. The moments are: in the arguments of the call, by a
# callback, before the VAE, or before the next call after a successful one.
GIVEN_FAULTS = {
    "another prompt": (BEFORE, STEPS, END),
    "another seed": (BEFORE, STEPS, END),
    "another size": (BEFORE, STEPS, END),
    "another LoRA": (BEFORE, STEPS, END),
    "another dtype": (BEFORE, STEPS, VAE, END),
    "another version of para_core": (BEFORE, END),
}
PIPELINES = ("flux", "wan")
# Each mesh (ring × ulysses) has the pipelines that run on it.
MESHES = {"ring 2 × Ulysses 2": PIPELINES, "Ulysses 4": ("flux",)}
SIZES = {"ring 2 × Ulysses 2": (2, 2), "Ulysses 4": (1, 4)}


@dataclass(frozen=True)
class Cell:
    """One run of four ranks, in which one fault strikes once."""

    pipeline: str
    mesh: str
    fault: str
    moment: str

    @property
    def name(self) -> str:
        return " | ".join(asdict(self).values())

    @property
    def of_link(self) -> bool:
        return self.fault in LINK_FAULTS

    @property
    def of_call(self) -> bool:
        """Return whether the call itself differs on the faulty rank."""
        return self.fault in GIVEN_FAULTS


def all_cells() -> Iterator[Cell]:
    """Yield the cells: both pipelines on the default mesh, and FLUX also on a mesh whose Ulysses group crosses the
    link.
    """
    for mesh, pipelines in MESHES.items():
        for pipeline in pipelines:
            for fault in (*PROCESS_FAULTS, *LINK_FAULTS, *GIVEN_FAULTS):
                for moment in GIVEN_FAULTS.get(fault, MOMENTS):
                    yield Cell(pipeline, mesh, fault, moment)


CALL_SIZES = {
    "flux": {"height": 64, "width": 56, "max_sequence_length": 13},
    "wan": {"height": 48, "width": 80, "num_frames": 9, "max_sequence_length": 13},
}
LORA = "style"


def build(name: str) -> Any:
    pipe = TINY_PIPELINES[name].build()
    # The LoRA is added before anything is parallelized, as load_lora_weights would.
    from peft import LoraConfig

    pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v"]), LORA)
    fill_lora(pipe, seed=1)
    return pipe


def fill_lora(pipe: Any, seed: int) -> None:
    """Give the LoRA other weights, drawn with this seed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in pipe.transformer.named_parameters():
            if "lora_" in name:
                weight.copy_(0.2 * torch.randn(weight.shape, generator=generator))


def call_of(name: str, **options: Any) -> dict[str, Any]:
    """Return the arguments of a short call that gives pixels."""
    call = TINY_PIPELINES[name].call(**CALL_SIZES[name])
    return {**call, "num_inference_steps": 2, "output_type": "pt", "return_dict": False, **options}


# -- The verdict.

# This bounds the relative norm of an image's error, compared with one process.
EXACT = 1e-4
# These parts of messages name the cause.
SIGNS = {
    "killed": ["rank 3 (process"],
    "stopped": ["rank 3 (process"],
    "raises": ["something that only this rank found"],
    "sleeps": ["rank 3 (process"],
    "out of memory": ["can't allocate memory"],
    "link cut": ["no answer from", "does not answer"],
    SLOW_LINK: ["slow or loses packets", "or very slow"],
    "link drops 5 %": ["slow or loses packets", "or very slow"],
    "another prompt": ["prompt"],
    "another seed": ["generator", "latents"],
    "another size": ["height", "latents"],
    "another LoRA": ["LoRA"],
    "another dtype": ["dtype"],
    "another version of para_core": ["version of para_core"],
}


def verdict(result: dict[str, Any]) -> str:
    """Return "good", or the reasons why a cell is bad."""
    bad = []
    survivors = _survivors(result)
    if not result["struck"]:
        return "the fault did not strike"
    if result["left"]["processes"] or any("seconds" not in rank for rank in survivors):
        bad.append("hang")
    if any(rank.get("error", 0.0) > EXACT for rank in result["ranks"]):
        bad.append("wrong image")
    # If every living rank has its image, no rank has an error to raise.
    if not all("error" in rank for rank in survivors):
        messages, signs = [rank.get("message", "") for rank in result["ranks"]], SIGNS[result["fault"]]
        if not any(sign in message for message in messages for sign in signs):
            bad.append("cause not named")
    if result["left"]["sockets"] or result["left"]["files"]:
        bad.append("something left")
    return ", ".join(bad) or "good"


def _survivors(result: dict[str, Any]) -> list[dict[str, Any]]:
    gone = result["fault"] in ("killed", "stopped")
    return [rank for index, rank in enumerate(result["ranks"]) if not (gone and index == FAULTY_RANK)]


# -- The page.


def parts() -> dict[str, list[str]]:
    """Return the parts of docs/measured/faults.md."""
    run = read_results("faults")
    results = run["cells"]
    return {"summary": _summary(run), "table": _tables(results)}


def _summary(run: dict[str, Any]) -> list[str]:
    results = list(run["cells"].values())
    bad = Counter(part for result in results for part in result["verdict"].split(", ") if part != "good")
    ends = [
        (rank.get("seconds", 0.0), cell) for cell in results if cell["fault"] != SLOW_LINK for rank in _survivors(cell)
    ]
    seconds, slowest = max(ends, key=lambda end: end[0])
    images = sum(all("error" in rank for rank in _survivors(result)) for result in results)
    counts = [f"{bad[kind]} {text}" for kind, text in _BAD.items()]
    text = (
        f"{len(results)} cells on {run['hosts']}, time-out {run['timeout']:g} s: {', '.join(counts)}. In {images} "
        "cells every living rank had the image of one process; in the others the ranks raised and named the cause. "
        f"Except on the delayed link, a living rank ended after at most {seconds:.1f} s ({slowest['fault']}, "
        f"{slowest['moment']})."
    )
    return [text]


_BAD = {
    "hang": "hangs",
    "wrong image": "wrong images",
    "cause not named": "causes not named",
    "something left": "with a socket or file left behind",
}


def _tables(results: dict[str, Any]) -> list[str]:
    """Return the table of the first pipeline and mesh, with one row for all given values. The JSON has the others."""
    first = next(iter(all_cells()))

    def cells(faults: Iterable[str], moment: str) -> list[dict[str, Any] | None]:
        return [results.get(Cell(first.pipeline, first.mesh, fault, moment).name) for fault in faults]

    rows = [
        [", ".join(faults).replace(", another", ","), *(_shown(cells(faults, moment)) for moment in MOMENTS)]
        for faults in (*((fault,) for fault in (*PROCESS_FAULTS, *LINK_FAULTS)), (*GIVEN_FAULTS,))
    ]
    return [f"**{first.pipeline}, {first.mesh}**", "", *markdown_table(["fault", *MOMENTS], rows)]


def _shown(cells: list[dict[str, Any] | None]) -> str:
    """Return the most seconds of some cells, and how each of them ended."""
    results = [result for result in cells if result is not None]
    bad = dict.fromkeys(result["verdict"] for result in results if result["verdict"] != "good")
    if bad or not results:
        return f"**{', '.join(bad)}**" if bad else "–"
    ranks = [_survivors(result) for result in results]
    seconds = max(rank.get("seconds", 0.0) for survivors in ranks for rank in survivors)
    kinds = ("image" if all("error" in rank for rank in survivors) else "error" for survivors in ranks)
    return f"{seconds:.1f} s, {' or '.join(dict.fromkeys(kinds))}"
