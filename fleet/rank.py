"""One rank of a pipeline, which runs requests together with the other ranks, whoever started its process.

`engine.py` loads it by :func:`load_rank` and calls its methods, on Ray `rank_actor.py` does. `build.py` makes
the pipeline, and `work.py` runs a request. Tests: tests/fleet/test_rank.py, tests/fleet/test_replicas.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from para_core.adapters.weights.encoded_prompts import EncodedPrompts
from para_core.fleet.build import build, read_mesh_sizes
from para_core.fleet.encode_first import EncodeFirst
from para_core.fleet.failures import EncodingFailed
from para_core.fleet.libraries import quiet
from para_core.fleet.loras import LoadedLoras
from para_core.fleet.memory import Memory, bytes_of_device, predict_memory
from para_core.fleet.outputs import Result
from para_core.fleet.prompt_file import Line
from para_core.fleet.recipe import Recipe
from para_core.fleet.request import Lora, Request
from para_core.fleet.work import Watch, call_pipe, generate_batch, generate_request
from para_core.launcher.errors import Cancelled
from para_core.launcher.link import NO_CALLER, CallerLink


@dataclass(frozen=True)
class ReplicaOptions:
    """Size and placement of a replica, and its options besides the recipe.

    A :class:`Rank` reads ``room``, ``prompt_bytes`` and ``loras``; the others are read where a replica is
    made and started.
    """

    ranks: int = 1  # each takes one GPU if the hosts have any
    spread: bool = False  # whether ranks may be on several nodes instead of one
    # Bytes that a rank may hold, weights included; None for the memory of its device.
    room: float | None = None
    # Bytes of host memory, on each rank, for cached outputs of text encoders; 0 disables the cache.
    prompt_bytes: int = 0
    loras: int = 0  # largest number of LoRAs of requests that stay loaded; 0 refuses requests with a LoRA
    warmup: tuple[Request, ...] = ()  # requests that a replica of a server generates before it is ready


class Rank:
    """The pipeline of ``recipe`` on this rank.

    The process group exists before, if there are several ranks. Loading, :meth:`generate`,
    :meth:`generate_batch` and :meth:`encode` are collective calls. ``encode_first`` prepares the pipeline for
    the phases of :class:`~para_core.fleet.encode_first.Encoder`, if the recipe fits. Callers in other
    processes (:class:`~para_core.fleet.engine.Ranks`) look methods up by their names.
    """

    def __init__(
        self, recipe: Recipe, options: ReplicaOptions = ReplicaOptions(), *, encode_first: bool = False
    ) -> None:
        if encode_first and (options.prompt_bytes or options.loras):
            # The phases have a store of encoded prompts of their own, in the same slot of the text encoders,
            # and encode without a LoRA.
            raise ValueError(
                f"prompt_bytes is {options.prompt_bytes} and loras {options.loras} with encode_first; expected 0."
            )
        self._recipe, self._options = recipe, options
        # Without encode_first it is never attached, and encodes_first returns False.
        self._encoder = EncodeFirst(call_pipe)
        attached: EncodeFirst | None = None
        if encode_first:
            attached = self._encoder
        self._pipe = build(recipe, attached)
        self._encoded_prompts: EncodedPrompts | None = None
        self._loras: LoadedLoras | None = None
        # Whether to release the GPU memory that a failed request left reserved, before the next request
        # begins.
        self._release_memory = False
        if options.prompt_bytes:
            self._encoded_prompts = EncodedPrompts(self._pipe, options.prompt_bytes)
        if options.loras:
            self._loras = LoadedLoras(self._pipe, recipe, options.loras, self._encoded_prompts)

    def memory(self) -> Memory | None:
        """Return the predicted memory of a rank, or None if it cannot be predicted."""
        room = self._options.room
        if room is None:
            room = bytes_of_device()
        return predict_memory(self._pipe, self._recipe, read_mesh_sizes(self._pipe), room)

    def generate(self, request: Request, link: CallerLink = NO_CALLER) -> Result | EncodingFailed | None:
        """Run one request, such as a line of a prompt file. Return the result on the first rank of the
        pipeline's mesh, or EncodingFailed there if it cannot be encoded, and None on others. Raise ValueError
        if its LoRA cannot be loaded.

        The numbers of finished steps are pushed to ``link``. The request cannot be cancelled, so the ranks
        need not agree on that after each step.
        """
        with self._releasing_memory():
            self._use_lora(request.lora)
            return generate_request(self._pipe, request, self._recipe, Watch(progress=link.push))

    def generate_batch(
        self, requests: Sequence[Request], link: CallerLink = NO_CALLER
    ) -> list[Result | EncodingFailed] | None:
        """Run requests with the same ``batch_key`` as one call of the pipeline.

        Return the results on the first rank of the pipeline's mesh, with EncodingFailed in place of those
        that cannot be encoded, and None on others. Numbers of finished steps and partial images are pushed to
        ``link``. Raise Cancelled if ``link`` of the first rank says so after a step, and ValueError if the
        LoRA of the requests cannot be loaded.
        """
        with self._releasing_memory():
            self._use_lora(requests[0].lora)
            watch = Watch(progress=link.push, cancelled=link.cancelled, preview=link.push)
            return generate_batch(self._pipe, requests, self._recipe, watch)

    def _use_lora(self, lora: Lora | None) -> None:
        """Activate the LoRA of the next request, None for none. Raise ValueError if it cannot be loaded."""
        if self._loras is not None:
            self._loras.use(lora)
        elif lora is not None:
            raise ValueError("this replica takes no LoRA of a request.")

    @contextmanager
    def _releasing_memory(self) -> Iterator[None]:
        """Inside this context, run a request or encode its prompts. Memory that the previous one left
        reserved when it failed is released first.
        """
        # It is not released at once: cudaFree waits for running kernels, among which may be a collective that
        # waits for a rank that has raised. This rank would then never report the reason.
        if self._release_memory:
            self._release_memory = False
            torch.cuda.empty_cache()  # does nothing without a GPU
        try:
            yield
        except Exception as error:
            # What a cancelled request left is what a finished one leaves: the next takes it over.
            self._release_memory = not isinstance(error, Cancelled)
            raise

    # The phases of an Encoder, see encode_first.py. LineRun of lines.py calls them on all ranks.

    def encodes_first(self) -> bool:
        return self._encoder.encodes_first()

    def begin_encoding(self) -> None:
        self._encoder.begin_encoding()

    def encode(self, line: Line) -> bool:
        with self._releasing_memory():
            return self._encoder.encode(line)

    def end_encoding(self, keep_encoders: bool) -> None:
        self._encoder.end_encoding(keep_encoders=keep_encoders)


def load_rank(
    recipe: Recipe, options: ReplicaOptions, *, encode_first: bool = False, debug: bool = False
) -> Rank:
    """Return a new :class:`Rank` in this process, whose libraries are quiet unless ``debug``."""
    quiet(debug)
    return Rank(recipe, options, encode_first=encode_first)
