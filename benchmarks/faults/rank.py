"""One rank of one cell: the steps of a user's program, and when and how the fault strikes the faulty rank."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.faults.cells import (
    ATTENTION,
    BEFORE,
    END,
    FAULTY_RANK,
    SIZES,
    STEPS,
    VAE,
    Cell,
    build,
    call_of,
    fill_lora,
)
from benchmarks.harness import relative_error
from para_core import init_context_parallel_mesh, version
from para_core.adapters import parallelize_pipe

OTHER_PROMPT = "a small blue square"
CALLBACK_INPUTS = {"callback_on_step_end_tensor_inputs": ["latents", "prompt_embeds"]}
TIMEOUT = 8.0  # A collective waits for these seconds.
SLEEP = TIMEOUT + 6.0


class _AtFirstAttention(TorchDispatchMode):
    """A mode that calls ``strike`` at the first attention operator after it was armed, between two exchanges."""

    def __init__(self, strike: Callable[[], None]) -> None:
        super().__init__()
        self.armed = False
        self._strike = strike

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.armed and "scaled_dot_product" in str(function):
            self.armed = False
            self._strike()
        return function(*args, **(kwargs or {}))


@contextmanager
def at(moment: str, pipe: Any, strike: Callable[[], None]) -> Iterator[dict[str, Any]]:
    """Call ``strike`` once when a call of ``pipe`` reaches ``moment``. Yield further arguments for that call."""
    with ExitStack() as stack:
        more: dict[str, Any] = {}
        if moment == BEFORE:
            hook = pipe.transformer.register_forward_pre_hook(_once(strike))
            stack.callback(hook.remove)
        elif moment == ATTENTION:
            mode = stack.enter_context(_AtFirstAttention(strike))
            blocks = getattr(pipe.transformer, "transformer_blocks", None) or pipe.transformer.blocks
            hook = blocks[1].register_forward_pre_hook(_once(partial(setattr, mode, "armed", True)))
            stack.callback(hook.remove)
        elif moment == STEPS:
            once = _once(strike)
            more["callback_on_step_end"] = lambda pipe, step, timestep, tensors: once() or tensors
        elif moment == VAE:
            hook = pipe.vae.decoder.mid_block.register_forward_pre_hook(_once(strike))
            stack.callback(hook.remove)
        elif moment == END:
            processor = getattr(pipe, "image_processor", None) or pipe.video_processor
            name = "postprocess_video" if hasattr(processor, "postprocess_video") else "postprocess"
            original, once = getattr(processor, name), _once(strike)
            stack.enter_context(mock.patch.object(processor, name, lambda *a, **k: once() or original(*a, **k)))
        yield more


def _once(strike: Callable[[], None]) -> Callable[..., None]:
    left = [strike]
    return lambda *_: left.pop()() if left else None


def process_fault(fault: str, note: Callable[[], None]) -> Callable[[], None]:
    """Return a function that strikes this process with ``fault``. It calls ``note`` directly before."""

    def strike() -> None:
        note()
        if fault in ("killed", "stopped"):
            os.kill(os.getpid(), signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
        elif fault == "raises":
            raise ValueError("something that only this rank found")
        elif fault == "sleeps":
            time.sleep(SLEEP)
        else:  # The fault is out of memory.
            torch.empty(1 << 50)

    return strike


def link_fault(folder: Path, note: Callable[[], None]) -> Callable[[], None]:
    """Ask the program that created the hosts to disturb the link, and wait until it has."""

    def strike() -> None:
        (folder / "strike").touch()
        while not (folder / "struck").exists():
            time.sleep(0.005)
        note()

    return strike


# -- Other inputs.


def given(cell: Cell, pipe: Any, note: Callable[[], None]) -> dict[str, Any]:
    """Change the faulty rank's call or pipeline as the fault says. Return further arguments."""
    if cell.moment == STEPS:
        return _given_by_callback(cell, note)
    note()
    if cell.moment == VAE:
        pipe.vae.to(torch.bfloat16)
        return {}
    height = call_of(cell.pipeline)["height"]
    if cell.fault == "another LoRA":
        fill_lora(pipe, seed=2)
    elif cell.fault == "another dtype":
        pipe.transformer.to(torch.bfloat16)
    elif cell.fault == "another version of para_core":
        mock.patch.object(version, "version_and_sources", lambda: "0.0.1").start()
    return {
        "another prompt": {"prompt": OTHER_PROMPT},
        "another seed": {"generator": torch.Generator().manual_seed(8)},
        "another size": {"height": height + 16},
    }.get(cell.fault, {})


def _given_by_callback(cell: Cell, note: Callable[[], None]) -> dict[str, Any]:
    def callback(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if step != 0:
            return tensors
        note()
        latents, prompt = tensors["latents"], tensors["prompt_embeds"]
        if cell.fault == "another LoRA":
            fill_lora(pipe, seed=2)
        changed = {
            "another prompt": {"prompt_embeds": prompt.flip(1)},
            "another seed": {
                "latents": latents + torch.randn(latents.shape, generator=torch.Generator().manual_seed(8))
            },
            "another size": {"latents": latents[..., :-2, :]},
            "another dtype": {"latents": latents.double()},
        }
        return {**tensors, **changed.get(cell.fault, {})}

    return {"callback_on_step_end": callback, **CALLBACK_INPUTS}


def unchanging_callback(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """Change nothing, as callback of the other ranks if the faulty rank's callback changes something."""
    return tensors


def run_rank(cell: Cell, rank: int, folder: Path, store: tuple[str, int], expected: Any) -> None:
    """Generate as a user's program would, and write the outcome. End as that program would end."""
    report: dict[str, Any] = {}
    try:
        _connect(rank, store)
        image = _generate(cell, rank, folder)
        report = {"error": relative_error(image, expected)}
    except BaseException as raised:
        traceback.print_exc()
        report = {"raised": type(raised).__name__, "message": str(raised)}
    finally:
        (folder / f"rank{rank}.json").write_text(json.dumps(report))
        sys.stderr.flush()
        if dist.is_initialized():
            dist.destroy_process_group()


def _connect(rank: int, store: tuple[str, int]) -> None:
    """Connect as under torchrun, where the agent and no rank holds the store."""
    agent = {"MASTER_ADDR": store[0], "MASTER_PORT": store[1], "TORCHELASTIC_USE_AGENT_STORE": True}
    variables = {"RANK": rank, "WORLD_SIZE": 4, "LOCAL_RANK": rank % 2, **agent}
    os.environ.update({name: str(value) for name, value in variables.items()})
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))


def _generate(cell: Cell, rank: int, folder: Path) -> Any:
    ring, ulysses = SIZES[cell.mesh]
    mesh = init_context_parallel_mesh("cpu", max_ring_dim_size=ring, max_ulysses_dim_size=ulysses)
    pipe = parallelize_pipe(build(cell.pipeline), mesh=mesh, vae=True, timeout=TIMEOUT)

    def note() -> None:
        (folder / "struck at").write_text(str(time.monotonic()))

    with torch.no_grad():
        if cell.of_call:
            return _generate_otherwise(cell, pipe, note if rank == FAULTY_RANK else None)
        if rank != FAULTY_RANK:
            # Either all ranks have a callback or none, because a difference would be reported.
            more = {"callback_on_step_end": unchanging_callback} if cell.moment == STEPS else {}
            return pipe(**call_of(cell.pipeline, **more))[0]
        struck = link_fault(folder, note) if cell.of_link else process_fault(cell.fault, note)
        with at(cell.moment, pipe, struck) as more:
            return pipe(**call_of(cell.pipeline, **more))[0]


def _generate_otherwise(cell: Cell, pipe: Any, note: Any) -> Any:
    if cell.moment == END:
        pipe(**call_of(cell.pipeline))
    more: dict[str, Any] = {}
    if note is not None:
        more = given(cell, pipe, note)
    elif cell.moment == STEPS:
        more = {"callback_on_step_end": unchanging_callback, **CALLBACK_INPUTS}
    return pipe(**call_of(cell.pipeline, **more))[0]
