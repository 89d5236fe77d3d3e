"""One rank of a replica, as the object that a Ray actor is: it holds its part of the pipeline, and answers one request at a time."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from para_core.fleet.foresee import Memory, bytes_of_device, predict_memory
from para_core.fleet.recipe import Recipe, build, mesh_shape
from para_core.fleet.request import Request
from para_core.fleet.work import Cancelled, Result, Watch, generate, sentence

# Of the actor's threads: one that works, and some that tell and are told in the meantime.
CONTROL = "control"
# Variables in which a launcher tells a process its place. Ray's workers inherit them from the process that started Ray, whose
# place is not theirs.
_PLACE_PREFIXES = ("SLURM_", "TORCHELASTIC_", "OMPI_COMM_WORLD_", "PMI_", "PMIX_", "MV2_COMM_WORLD_")
_PLACE_NAMES = frozenset(
    {
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "NODE_RANK",
        "ROLE_NAME",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    }
)


@dataclass(frozen=True)
class Answer:
    """What became of a request on one rank.

    Args:
        result: on the first rank of a request that is done; None elsewhere.
        reason: why it failed, or after which step it was cancelled.
        steps: done.
    """

    kind: Literal["done", "failed", "cancelled"]
    result: Result | None = None
    reason: str = ""
    steps: int = 0


class Rank:
    """One of ``ranks`` processes that hold one pipeline together."""

    def __init__(self, recipe: Recipe, rank: int, ranks: int, format_: str, fps: int) -> None:
        self._recipe, self._rank, self._ranks = recipe, rank, ranks
        self._format, self._fps = format_, fps
        self._store: Any = None
        self._pipe: Any = None
        self._steps_done: dict[str, int] = {}
        self._cancelled: set[str] = set()
        # Whether the last request failed, so that the memory it reserved is to be released.
        self._release_memory = False

    def open_store(self, host: str) -> int:
        """On the first rank: the port at which the others meet it on ``host``."""
        timeout = timedelta(seconds=self._recipe.timeout)
        self._store = TCPStore(host, 0, self._ranks, is_master=True, timeout=timeout, wait_for_workers=False)
        return int(self._store.port)

    def join(self, host: str, port: int) -> dict[str, int]:
        """Meet the other ranks and load the pipeline; the sizes of its mesh."""
        _forget_launcher()
        timeout = timedelta(seconds=self._recipe.timeout)
        if self._ranks > 1:
            store = self._store or TCPStore(host, port, self._ranks, is_master=False, timeout=timeout)
            dist.init_process_group(store=store, rank=self._rank, world_size=self._ranks, timeout=timeout)
        self._pipe = build(self._recipe)
        return mesh_shape(self._pipe)

    def memory(self, mesh: dict[str, int], room: float | None) -> Memory | None:
        """On the first rank: what results take of a rank; ``room`` bytes of it, or as many as the device has."""
        return predict_memory(self._pipe, self._recipe, mesh, bytes_of_device() if room is None else room)

    def generate(self, id_: str, request: Request) -> Answer:
        """All ranks of the replica are called with the same request."""
        if torch.cuda.is_available():
            torch.cuda.set_device(0)  # a setting of the thread
        if self._release_memory:
            self._release_memory = False
            torch.cuda.empty_cache()
        watch = Watch(lambda done: self._steps_done.__setitem__(id_, done), lambda: id_ in self._cancelled)
        try:
            result = generate(self._pipe, request, self._recipe, format_=self._format, fps=self._fps, watch=watch)
            return Answer("done", result, steps=self.steps_done(id_))
        except Cancelled as error:
            return Answer("cancelled", reason=str(error), steps=self.steps_done(id_))
        except Exception as error:
            # The memory is released by the next request. cudaFree waits for the kernels of this device, and a collective of
            # this request may wait for a rank that has left: this rank would never answer, and the reason would be lost.
            self._release_memory = True
            return Answer("failed", reason=sentence(error), steps=self.steps_done(id_))
        finally:
            self._steps_done.pop(id_, None)
            self._cancelled.discard(id_)

    def steps_done(self, id_: str) -> int:
        """Of a request that is running; 0 before the first step is done."""
        return self._steps_done.get(id_, 0)

    def cancel(self, id_: str) -> None:
        """On the first rank: end this request, and no other, after the step that is running."""
        self._cancelled.add(id_)

    def process(self) -> int:
        """The id of this rank's process."""
        return os.getpid()


def _forget_launcher() -> None:
    """Remove the environment variables that say which process of a launcher this is.

    An actor of Ray sees one GPU. With the ``LOCAL_RANK`` of the process that started Ray, ``init_device_mesh`` would select another.
    """
    for name in list(os.environ):
        if name in _PLACE_NAMES or name.startswith(_PLACE_PREFIXES):
            del os.environ[name]
