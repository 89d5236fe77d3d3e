"""Which fault strikes when: the cells of the table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

RANKS_PER_HOST = 2
NUM_HOSTS = 2
# Of it, as of its host, all faults are. Not the first of anything: not of its host, of its ring or of the world.
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

# What happens to a rank's process, or to the link of its host; at any moment.
PROCESS_FAULTS = ("killed", "stopped", "raises", "sleeps", "out of memory")
LINK_FAULTS = ("link cut", "link delayed by 2 s", "link drops 5 %")
# What a rank is given otherwise than the others, and when it can be: with the call's arguments; by a callback; before the VAE;
# before the next call, after one that went well.
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

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def all_cells() -> Iterator[Cell]:
    """Both pipelines on the mesh that para_core chooses; FLUX where Ulysses crosses the link, too."""
    for mesh, pipelines in MESHES.items():
        for pipeline in pipelines:
            for fault in (*PROCESS_FAULTS, *LINK_FAULTS, *GIVEN_FAULTS):
                for moment in GIVEN_FAULTS.get(fault, MOMENTS):
                    yield Cell(pipeline, mesh, fault, moment)
