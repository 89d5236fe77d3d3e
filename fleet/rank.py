"""One rank of a replica, as the object of a Ray actor: it runs its part of the pipeline, one request at a time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from para_core.adapters.weights.encoded_prompts import EncodedPrompts
from para_core.fleet.failures import sentence
from para_core.fleet.foresee import Memory, bytes_of_device, predict_memory
from para_core.fleet.loras import LoadedLoras, Lora
from para_core.fleet.outputs import Output
from para_core.fleet.recipe import Recipe, build, mesh_shape
from para_core.fleet.request import Request
from para_core.fleet.work import Cancelled, Result, Watch, generate_batch

# The concurrency group of the actor's methods that run during a request.
CONTROL = "control"
# Environment variables that tell a process its rank. Ray's workers inherit them from the process that started Ray,
# whose rank is not theirs.
_LAUNCHER_PREFIXES = ("SLURM_", "TORCHELASTIC_", "OMPI_COMM_WORLD_", "PMI_", "PMIX_", "MV2_COMM_WORLD_")
_LAUNCHER_NAMES = frozenset(
    [
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
    ]
)


@dataclass(frozen=True)
class Kept:
    """Data that a rank keeps from one request to the next.

    Args:
        prompt_bytes (`int`): Host memory for outputs of text encoders. 0 keeps none.
        loras (`int`): LoRAs of requests that stay loaded. 0 refuses LoRAs.
    """

    prompt_bytes: int = 0
    loras: int = 0


@dataclass(frozen=True)
class Answer:
    """The outcome of a request on one rank.

    Args:
        result (`Result`, *optional*): The result, on the first rank of a request that is done.
        previews (`tuple[Output, ...]`): Partial images, those that were fetched before too.
        reason (`str`): Why the request failed, or the step after which it was cancelled.
    """

    kind: Literal["done", "failed", "cancelled"]
    result: Result | None = None
    reason: str = ""
    steps: int = 0
    previews: tuple[Output, ...] = ()


class Rank:
    """One of ``ranks`` processes that run one pipeline together."""

    def __init__(self, recipe: Recipe, rank: int, ranks: int, format_: str, fps: int, kept: Kept | None = None) -> None:
        self._kept = kept or Kept()
        self._encoded_prompts: EncodedPrompts | None = None
        self._loras: LoadedLoras | None = None
        self._recipe, self._rank, self._ranks = recipe, rank, ranks
        self._format, self._fps = format_, fps
        self._store: Any = None
        self._pipe: Any = None
        self._steps_done: dict[str, int] = {}
        self._cancelled: set[str] = set()
        self._previews: list[Output] = []
        # The memory that a failed request reserved is released before the next one.
        self._release_memory = False

    def open_store(self, host: str) -> int:
        """Open the store on the first rank, and return its port on ``host``, at which the other ranks connect."""
        timeout = timedelta(seconds=self._recipe.timeout)
        self._store = TCPStore(host, 0, self._ranks, is_master=True, timeout=timeout, wait_for_workers=False)
        return int(self._store.port)

    def join(self, host: str, port: int) -> dict[str, int]:
        """Connect to the other ranks, load the pipeline, and return the sizes of its mesh dims. A collective call."""
        _forget_launcher()
        timeout = timedelta(seconds=self._recipe.timeout)
        if self._ranks > 1:
            store = self._store or TCPStore(host, port, self._ranks, is_master=False, timeout=timeout)
            dist.init_process_group(store=store, rank=self._rank, world_size=self._ranks, timeout=timeout)
        self._pipe = build(self._recipe)
        if self._kept.prompt_bytes:
            self._encoded_prompts = EncodedPrompts(self._pipe, self._kept.prompt_bytes)
        if self._kept.loras:
            self._loras = LoadedLoras(self._pipe, self._recipe, self._kept.loras, self._encoded_prompts)
        return mesh_shape(self._pipe)

    def memory(self, mesh: dict[str, int], room: float | None) -> Memory | None:
        """Predict the memory of a rank with ``room`` bytes, by default those of the device. For the first rank."""
        return predict_memory(self._pipe, self._recipe, mesh, bytes_of_device() if room is None else room)

    def generate(self, id_: str, request: Request) -> Answer:
        """Run one request. A collective call: all ranks of the replica get the same request."""
        return self.generate_batch([(id_, request)])[0]

    def generate_batch(self, batch: Sequence[tuple[str, Request]]) -> list[Answer]:
        """Run requests with the same ``batch_key`` as one call. A collective call.

        The call ends early if all requests are cancelled. If it fails, all requests have failed.
        """
        if torch.cuda.is_available():
            torch.cuda.set_device(0)  # per thread, and Ray may call this method in any thread
        if self._release_memory:
            self._release_memory = False
            torch.cuda.empty_cache()
        ids, requests = [id_ for id_, _ in batch], [request for _, request in batch]
        watch = Watch(
            lambda done: self._steps_done.update(dict.fromkeys(ids, done)),
            lambda: self._cancelled.issuperset(ids),
            self._previews.append,
        )
        self._previews.clear()
        try:
            self._use_lora(requests[0].lora)
            results = generate_batch(
                self._pipe, requests, self._recipe, format_=self._format, fps=self._fps, watch=watch
            )
            return [self._answer(id_, results[i] if results else None, len(ids)) for i, id_ in enumerate(ids)]
        except Cancelled as error:
            return [Answer("cancelled", reason=str(error), steps=self.steps_done(id_)) for id_ in ids]
        except Exception as error:
            # The memory is released before the next request. cudaFree waits for the device's kernels, and a collective
            # of this request may wait for a rank that has left: this rank would never answer, and the reason would be
            # lost.
            self._release_memory = True
            return [Answer("failed", reason=sentence(error), steps=self.steps_done(id_)) for id_ in ids]
        finally:
            for id_ in ids:
                self._steps_done.pop(id_, None)
                self._cancelled.discard(id_)

    def _answer(self, id_: str, result: Result | None, batch: int) -> Answer:
        steps = self.steps_done(id_)
        if id_ in self._cancelled and batch > 1:
            return Answer("cancelled", reason=f"cancelled after step {steps}.", steps=steps)
        return Answer("done", result, steps=steps, previews=tuple(self._previews))

    def _use_lora(self, lora: tuple[str, float] | None) -> None:
        if self._loras is not None:
            self._loras.use(None if lora is None else Lora(*lora))
        elif lora is not None:
            raise ValueError("this replica takes no LoRA of a request.")

    def steps_done(self, id_: str) -> int:
        """Return the number of finished steps of a running request; 0 before the first."""
        return self._steps_done.get(id_, 0)

    def previews(self, sent: int) -> list[Output]:
        """Return the partial images of the running request after the first ``sent`` ones. For the first rank."""
        return self._previews[sent:]

    def cancel(self, id_: str) -> None:
        """Cancel this request, and no other, after its current step. For the first rank."""
        self._cancelled.add(id_)

    def process(self) -> int:
        """Return the process id."""
        return os.getpid()


def _forget_launcher() -> None:
    """Remove the environment variables by which a launcher tells a process its rank.

    An actor sees one GPU. ``init_device_mesh`` would select another one by the inherited ``LOCAL_RANK``.
    """
    for name in list(os.environ):
        if name in _LAUNCHER_NAMES or name.startswith(_LAUNCHER_PREFIXES):
            del os.environ[name]
