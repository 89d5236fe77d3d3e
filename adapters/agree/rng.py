"""Let all ranks draw the random numbers of the mesh's first rank during a call.

The calls of pipelines (``adapters/parallel/call.py``) and of autoencoders (``adapters/vae/run.py``) run
inside it. Tests: tests/adapters/agree/test_state.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from para_core.distributed.agree import broadcast_bytes
from para_core.distributed.mesh import GuidedMesh

_TOKEN_BYTES = 16


@contextmanager
def share_random_state(mesh: GuidedMesh) -> Iterator[str]:
    """Set the default generators of all ranks to the state of the first rank's generators, inside the
    ``with`` block. Collective.

    These are the generators of the CPU and of the current accelerator. Afterwards the other ranks get their
    own state back. Yields a random token of this call, equal on all ranks, by which :func:`share_reasons`
    names it.
    """
    # Use the current accelerator and not the device of the mesh: diffusers draws on the pipeline's device,
    # and a gloo mesh of type cpu may serve a pipeline on an accelerator.
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device_module = None
    if accelerator is not None:
        device_module = torch.get_device_module(accelerator)
    states = [torch.get_rng_state()]
    if device_module is not None:
        states.append(device_module.get_rng_state())
    token = torch.frombuffer(bytearray(os.urandom(_TOKEN_BYTES)), dtype=torch.uint8)
    shared: list[Tensor] = list(
        broadcast_bytes(torch.cat([token, *states]), mesh).split([_TOKEN_BYTES, *map(len, states)])
    )
    torch.set_rng_state(shared[1].clone())
    if device_module is not None:
        device_module.set_rng_state(shared[2].clone())
    try:
        yield bytes(shared[0].tolist()).hex()
    finally:
        if mesh.rank != 0:
            torch.set_rng_state(states[0])
            if device_module is not None:
                device_module.set_rng_state(states[1])
