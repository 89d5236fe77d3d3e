"""The cells of the table: which fault strikes when, on which pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.pipelines.latents import PIPELINES as TINY_PIPELINES

RANKS_PER_HOST = 2
NUM_HOSTS = 2
# The rank of all faults, and its host. It is not the first rank of its host, its ring or the world.
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

# Faults of a rank's process, or of the link of its host, at any moment.
PROCESS_FAULTS = ("killed", "stopped", "raises", "sleeps", "out of memory")
SLOW_LINK = "link delayed by 2 s"
LINK_FAULTS = ("link cut", SLOW_LINK, "link drops 5 %")
# Inputs of the faulty rank that differ from those of the others, and the moments: in the arguments of the call, by a
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
# Which run on which mesh, whose sizes are ring × ulysses.
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
        """Whether the call itself is another on the faulty rank."""
        return self.fault in GIVEN_FAULTS


def all_cells() -> Iterator[Cell]:
    """Yield the cells: both pipelines on the default mesh, and FLUX also where Ulysses crosses the link."""
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
    # Before anything is parallelized, as load_lora_weights would.
    from peft import LoraConfig

    pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v"]), LORA)
    fill_lora(pipe, seed=1)
    return pipe


def fill_lora(pipe: Any, seed: int) -> None:
    """Give the LoRA other weights, by their seed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in pipe.transformer.named_parameters():
            if "lora_" in name:
                weight.copy_(0.2 * torch.randn(weight.shape, generator=generator))


def call_of(name: str, **options: Any) -> dict[str, Any]:
    """Return the arguments of a short call that gives pixels."""
    call = TINY_PIPELINES[name].call(**CALL_SIZES[name])
    return {**call, "num_inference_steps": 2, "output_type": "pt", "return_dict": False, **options}
