"""Running a diffusers pipeline on several ranks: the public functions."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch

from para_core.adapters.parallel.call import parallel_call, remove_parallel_call
from para_core.adapters.parallel.options import ParallelOptions
from para_core.adapters.parallel.resolve import resolve
from para_core.adapters.parallel.session import replace_session
from para_core.adapters.parallel.transformer import unparallelize_transformer
from para_core.adapters.planner.mesh_choice import Mesh
from para_core.adapters.registry import transformers_of, unets_of
from para_core.adapters.rows.unet import unparallelize_unet
from para_core.adapters.spec import Adapter, Text
from para_core.adapters.weights.sharded_component import Method
from para_core.adapters.weights.stages import release_pipe
from para_core.attention.backend_selection import Backend
from para_core.attention.mesh_attention import AttnFunc
from para_core.attention.options import RotateMethod
from para_core.instance_patching import original_class
from para_core.weights.pipefusion import PipeFusion, PipeFusionReport

Pipeline = TypeVar("Pipeline")


def parallelize_pipe(
    pipe: Pipeline,
    *,
    mesh: Mesh | None = None,
    text: Text | None = None,
    timeout: timedelta | float | None = None,
    adapter: Adapter | None = None,
    assume_equal: bool = False,
    vae: bool = False,
    weights: Method | Literal["replicate"] | None = None,
    pipefusion: PipeFusion | None = None,
    rotate_method: RotateMethod | None = None,
    backend: Backend | None = None,
    comm_dtype: torch.dtype | None = None,
    attn_func: AttnFunc | None = None,
) -> Pipeline:
    """Generate each image of this one pipeline on all ranks of ``mesh``, exactly as on one.

    Every rank of the mesh calls the pipeline alike and gets the whole result. Calling this again replaces the previous settings;
    :func:`unparallelize_pipe` restores the pipeline. If anything is invalid or fails, on any rank, every rank raises, and the pipeline stays
    as it was, with the previous settings. Every rank of the mesh calls it. Other pipelines are not touched.

    Args:
        pipe: any diffusers pipeline on a supported transformer or UNet.
        mesh: a DeviceMesh with a ``ring`` and/or ``ulysses`` dim (also a slice of a larger one), or a ProcessGroup. Ranks
            along a ``batch`` dim share the branches of guidance; those along a ``pipe`` dim hold consecutive blocks of the transformers, and
            free the others (docs/stages.md): move the pipe to its device before. For a UNet, all others share the rows
            of its images. Left out: all
            ranks, in the mesh that :func:`plan_mesh` predicts to be the fastest at the pipeline's default sizes; where it does not know the
            device or the model, or on several hosts, half of them for each branch where the pipeline guides by default, then Ulysses up to
            the number of heads, then the ring; one rank where ``WORLD_SIZE`` is unset or 1. A log line (level INFO) says which, and why.
        text: ``"shard"`` shards the text tokens as those of the image are, ``"replicate"`` keeps all of them on every rank.
            Both are exact; left out: the faster one for this model.
        timeout: how long (seconds, if a number) the ranks of the mesh wait for one that does not answer, because it raised
            an exception of its own or died; set on the mesh's process groups. Then gloo raises, and NCCL ends the process. If several
            pipelines set it on the same groups, the latest one counts that is not undone. Left out: as it is.
        adapter: what is to be known of a transformer that is not supported, or instead of what is known here.
        assume_equal: do not compare arguments over the ranks once per call. Arguments that differ then give wrong results or a
            hang. Random numbers are still those of the first rank.
        vae: encode and decode on all ranks, too: ``parallelize_vae(pipe.vae, mesh=mesh)``, and of an autoencoder of sound likewise.
        weights: ``"fsdp"`` or ``"tensor"``: ``shard_weights(pipe, mesh, method=weights)``; ``"replicate"``: every rank holds them all.
            Left out: as they are.
        pipefusion: ``PipeFusion(...)``: the stages of a mesh with ``pipe`` work at once, on patches of the image that attend to keys of the
            step before. Not exact; left out: stages are. Without stages one process computes the same (docs/stages.md).
        rotate_method: how the keys and values of other ring ranks get here: ``"alltoall"``, passed on from neighbour to neighbour;
            ``"allgather"``, all at once; ``"2d"``, the ring's ranks as rows and columns, of which queries travel along the former and keys
            along the latter. All are exact. Left out: ``"alltoall"``, or without ``mesh`` what :func:`plan_mesh` predicts.
        backend: what computes the transformers' attention on one device, on one rank, too: one of PyTorch's, or ``"triton"``
            (docs/kernels.md). ``"triton-int8"`` is not exact. Left out: what SDPA chooses.
        comm_dtype: ``torch.int8`` or ``torch.float8_e4m3fn``: what attention sends travels rounded to 8 bits. Not exact; left out: as it is.
        attn_func: computes their attention on one device in place of SDPA, as :class:`~para_core.UnifiedAttnMode` takes it:
            ``flash_attention_3()``.

    Returns:
        ``pipe``.

    Raises:
        TypeError, ValueError: the pipeline is not supported, or the mesh does not fit.
        RuntimeError: no ``mesh`` and no process group on several ranks; or two ranks of a mesh on NCCL have the same GPU.
    """
    options = ParallelOptions(
        text=text,
        timeout=timeout,
        adapter=adapter,
        assume_equal=assume_equal,
        vae=vae,
        weights=weights,
        pipefusion=pipefusion,
        rotate_method=rotate_method,
        backend=backend,
        comm_dtype=comm_dtype,
        attn_func=attn_func,
    )
    call = parallel_call(pipe)
    previous = None if call is None else call.session
    unshards = previous is not None and previous.shards_weights
    replace_session(pipe, previous, resolve(pipe, mesh, options, unshards=unshards))
    return pipe


def unparallelize_pipe(pipe: Pipeline) -> Pipeline:
    """Undo :func:`parallelize_pipe`; returns ``pipe``, which is then what it was before, time-outs of process groups included.

    With a ``pipe`` mesh dim, or with sharded weights, every rank calls it: each receives the weights that it does not hold.
    """
    call = parallel_call(pipe)
    if call is not None:
        call.session.stop()
    # Plans may have been applied without a session: on one rank, or to a component by hand.
    remove_parallel_call(pipe)
    release_pipe(pipe)
    for module in transformers_of(pipe).values():
        unparallelize_transformer(module)
    for module in unets_of(pipe).values():
        unparallelize_unet(module)
    return pipe


def pipefusion_report(pipe: Any) -> PipeFusionReport:
    """What PipeFusion did in the last generation of ``pipe``, on this rank."""
    call = parallel_call(pipe)
    if call is None or call.fused is None:
        raise ValueError(
            f"this {original_class(pipe).__name__} runs without PipeFusion: parallelize_pipe(pipe, mesh=mesh, pipefusion=PipeFusion())."
        )
    return call.fused.report()
