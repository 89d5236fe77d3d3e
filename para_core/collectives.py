"""Functional collectives with uneven sizes, in eager code and inside compiled graphs.

The only module that knows torch's own names for them. All of them are built on all-to-all: it takes uneven sizes, has
a backward, and exists on every backend for every device (gloo has no point-to-point for CUDA tensors).
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from para_core.mesh import GuidedMesh, MeshDim, SequenceMesh, host_group

# gloo's threads drop the tensors of the last collective a little after it is done, and need the GIL for it. At exit they
# would not get it any more, and a script that ends right after a collective aborts in one of four runs ("terminate called
# without an active exception", pytorch/pytorch#190489). Sleeping releases the GIL while there is still an interpreter.
atexit.register(time.sleep, 0.05)  # seconds


def start_all_to_all(x: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int], dim: MeshDim) -> Tensor:
    """Begin to send ``send_sizes[i]`` rows of ``x`` to rank ``i`` of ``dim``; :func:`wait` before use of the result.

    Args:
        x: contiguous, cut along its first dim.
        send_sizes: rows for each rank of ``dim``, in order.
        receive_sizes: rows from each rank of ``dim``: what that rank sends here.

    Returns:
        What arrives, in the order of the senders, concatenated along the first dim.
    """
    differentiable = torch.is_grad_enabled() and x.requires_grad
    namespace = torch.ops._c10d_functional_autograd if differentiable else torch.ops._c10d_functional
    received: Tensor = namespace.all_to_all_single(x, list(receive_sizes), list(send_sizes), dim.group_name)
    return received


def wait(x: Tensor) -> Tensor:
    """Wait for a collective that was started; the same call in eager code and while tracing."""
    done: Tensor = torch.ops._c10d_functional.wait_tensor(x)
    return done


def all_to_all(x: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int], dim: MeshDim) -> Tensor:
    """:func:`start_all_to_all`, finished. Nothing moves where ``dim`` has one rank."""
    if dim.size == 1:
        return x
    return wait(start_all_to_all(x, send_sizes, receive_sizes, dim))


def start_ring_shift(x: Tensor, receive_size: int, dim: MeshDim, *, distance: int = 1) -> Tensor:
    """Begin to send ``x`` (1-D) to the rank ``distance`` after this one, and to receive ``receive_size`` elements."""
    send_sizes = [0] * dim.size
    receive_sizes = [0] * dim.size
    send_sizes[(dim.index + distance) % dim.size] = x.numel()
    receive_sizes[(dim.index - distance) % dim.size] = receive_size
    return start_all_to_all(x, send_sizes, receive_sizes, dim)


def all_gather(x: Tensor, sizes: Sequence[int], tensor_dim: int, dim: MeshDim) -> Tensor:
    """Concatenate the ``x`` of all ranks of ``dim`` along ``tensor_dim``; rank ``i`` gives ``sizes[i]`` along it."""
    if dim.size == 1:
        return x
    if x.dtype == torch.bool:  # gloo moves no bool
        return all_gather(x.view(torch.uint8), sizes, tensor_dim, dim).view(torch.bool)
    rows = x.movedim(tensor_dim, 0).contiguous()
    sent = rows.expand(dim.size, *rows.shape).flatten(0, 1)
    gathered = all_to_all(sent, [rows.shape[0]] * dim.size, sizes, dim)
    return gathered.movedim(0, tensor_dim)


def all_gather_bytes(x: Tensor, dim: MeshDim) -> Tensor:
    """The equally long uint8 CPU tensors ``x`` of all ranks of ``dim``, concatenated. Eager code only; blocks.

    Goes over the CPU, also where the group of ``dim`` does not (:func:`~para_core.mesh.host_group`): nothing is waited for
    but the other ranks.
    """
    if dim.group is None:
        return x
    group = host_group(dim)
    gathered = x.new_empty(dim.size * x.numel())
    # torch 2.11 has only the second name; 2.13 warns of it.
    all_gather_into = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    all_gather_into(gathered, x, group=group)
    if group is not dim.group:
        # torch sorts the ranks of a new group; those of the one that it stands beside may be in another order.
        rows = [dist.get_group_rank(group, rank) for rank in dist.get_process_group_ranks(dim.group)]
        gathered = gathered.view(dim.size, -1)[rows].flatten()
    return gathered


def broadcast_bytes(x: Tensor, mesh: SequenceMesh | GuidedMesh) -> Tensor:
    """``x`` of the first rank of ``mesh``, where all ranks give an equally long uint8 CPU tensor. Eager code only."""
    for dim in mesh.dims:
        x = all_gather_bytes(x, dim)[: x.numel()]
    return x


def pack(tables: Sequence[Sequence[Tensor]]) -> Tensor:
    """One flat buffer that holds ``tables`` one after the other, each element moved once.

    Args:
        tables: each one tensor of any shape, or several ``[m, n, …]`` that become one ``[m, n, columns of all]``.
    """
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        # Inductor fuses the flattening into the concatenation; eager code would copy a strided column twice.
        return torch.cat(
            [
                table[0].reshape(-1)
                if len(table) == 1
                else torch.cat([column.flatten(2) for column in table], dim=2).reshape(-1)
                for table in tables
            ]
        )
    buffer = tables[0][0].new_empty(sum([column.numel() for table in tables for column in table]))
    offset = 0
    for table in tables:
        size = sum([column.numel() for column in table])
        region = buffer[offset : offset + size]
        offset += size
        if len(table) == 1:
            region.view(table[0].shape).copy_(table[0])
            continue
        widths = [column.shape[2] * column.shape[3] for column in table]
        for part, column in zip(region.view(*table[0].shape[:2], sum(widths)).split(widths, dim=2), table, strict=True):
            torch.unflatten(part, 2, column.shape[2:]).copy_(column)
    return buffer
