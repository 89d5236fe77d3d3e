"""Running a diffusers pipeline, its transformer or its UNet, on several ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from para_core.adapters.compatibility import Case, When, cases_of, reason_against, refuse
from para_core.adapters.consistency.call import (
    ParallelCall,
    parallel_call,
    remove_parallel_call,
    require_same_inputs,
    set_timeout,
)
from para_core.adapters.models.vaes import vae_adapter
from para_core.adapters.parallel.mesh_choice import Mesh, guided_mesh_for, mesh_and_method
from para_core.adapters.registry import plan_for, transformers_of, unets_of
from para_core.adapters.rows.unet import parallelize_unet, unparallelize_unet
from para_core.adapters.rows.vae import parallelize_vae, unparallelize_vae
from para_core.adapters.spec import Adapter, Text
from para_core.adapters.weights.pipefusion import FusedPipe, patches_of
from para_core.adapters.weights.shard import (
    METHODS,
    Method,
    require_mesh_fits,
    shard_weights,
    unshard_weights,
    weights_groups,
)
from para_core.adapters.weights.stages import hold_stage, refuse_late_on_pipe, release_pipe, release_stage
from para_core.attention.backend_selection import Backend
from para_core.attention.mesh_attention import AttnFunc
from para_core.attention.options import AttnOptions, RotateMethod
from para_core.cache.apply import cache_options
from para_core.distributed.mesh import GuidedMesh
from para_core.instance_patching import original_class, uncompiled
from para_core.plans.region import apply_plan, remove_plan
from para_core.weights.pipefusion import PipeFusion, PipeFusionReport

Pipeline = TypeVar("Pipeline")
Transformer = TypeVar("Transformer", bound=nn.Module)

# Components of pipelines of images and sound, beside ``vae``.
_OF_SOUND = ("audio_vae", "sound_tokenizer")


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

    Every rank of the mesh calls the pipeline alike and gets the whole result. Calling this again with another mesh
    takes effect; :func:`unparallelize_pipe` undoes it. Other pipelines are not touched.

    Args:
        pipe: any diffusers pipeline on a supported transformer or UNet.
        mesh: a DeviceMesh with a ``ring`` and/or ``ulysses`` dim (also a slice of a larger one), or a ProcessGroup. Ranks
            along a ``batch`` dim share the branches of guidance; those along a ``pipe`` dim hold consecutive blocks of the transformers, and
            free the others (docs/stages.md): move the pipe to its device before. For a UNet, all others share the rows
            of its images. Left out: all
            ranks, in the mesh that :func:`plan_mesh` predicts to be the fastest at the pipeline's default sizes; where it does not know the
            device or the model, or on several hosts, half of them for each branch where the pipeline guides by default, then Ulysses up to
            the number of heads, then the ring; one rank where ``WORLD_SIZE`` is unset or 1. One log line says which, and why.
        text: ``"shard"`` shards the text tokens as those of the image are, ``"replicate"`` keeps all of them on every rank.
            Both are exact; left out: the faster one for this model.
        timeout: how long (seconds, if a number) the ranks of the mesh wait for one that does not answer, because it raised
            an exception of its own or died; set on the mesh's process groups. Then gloo raises, and NCCL ends the process. Left out:
            as it is.
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
            (docs/attention_kernel.md). ``"triton-int8"`` is not exact. Left out: what SDPA chooses.
        comm_dtype: ``torch.int8`` or ``torch.float8_e4m3fn``: what attention sends travels rounded to 8 bits. Not exact; left out: as it is.
        attn_func: computes their attention on one device in place of SDPA, as :class:`~para_core.UnifiedAttnMode` takes it:
            ``flash_attention_3()``.

    Returns:
        ``pipe``.

    Raises:
        TypeError, ValueError: the pipeline is not supported, or the mesh does not fit.
        RuntimeError: no ``mesh`` and no process group on several ranks; or two ranks of a mesh on NCCL have the same GPU.
    """
    unparallelize_pipe(pipe)
    refuse(When.PARALLELIZE, *cases_of(pipe, adapter))
    autoencoders = _vaes_of(pipe) if vae else []
    if weights not in (None, "replicate", *METHODS):
        raise ValueError(
            f"weights is {weights!r}; expected 'fsdp', 'tensor', 'replicate', or None to leave them as they are."
        )
    _require_transformer(
        pipe,
        text=text,
        adapter=adapter,
        weights="tensor" if weights == "tensor" else None,
        pipefusion=pipefusion,
        rotate_method=rotate_method,
        backend=backend,
        comm_dtype=comm_dtype,
        attn_func=attn_func,
    )
    _attention_options(rotate_method, backend, comm_dtype, attn_func)
    guided, chosen_method = mesh_and_method(mesh, pipe, weights)
    if rotate_method is None and comm_dtype is None:
        rotate_method = chosen_method
    # What it is refused for on several ranks.
    refuse(When.PARALLELIZE, *cases_of(pipe, adapter, guided))
    if guided.pipe.size > 1 and weights in METHODS:
        raise ValueError(
            f"weights={weights!r} with a mesh of {guided.pipe.size} stages: each rank holds its own blocks alone, and all of these. Leave "
            "weights= out, or use a mesh without 'pipe'; shard_weights(pipe, mesh, components=[...]) shards text encoders."
        )
    if guided.ranks > 1 and weights in METHODS:
        require_mesh_fits(guided, weights)
    transformers, unets = transformers_of(pipe), unets_of(pipe)
    if pipefusion is not None:
        if not isinstance(pipefusion, PipeFusion):
            raise TypeError(f"pipefusion is {pipefusion!r}; expected a PipeFusion of para_core, or None.")
        for module in transformers.values():
            patches_of(module, guided, adapter)
    plans = {name: plan_for(module, adapter=adapter) for name, module in transformers.items()}
    # Perturbed attention guidance takes the branches of a batch apart inside of the model: no rank has samples of its own.
    perturbed = hasattr(pipe, "pag_applied_layers")
    if guided.ranks > 1 and perturbed and transformers:
        plan: Any = plans["transformer"]
        name = original_class(transformers["transformer"]).__name__
        adapter = Adapter(name, type(pipe).__name__, replace(plan, batched={}))
        plans["transformer"] = adapter.plan
    for module in transformers.values():
        parallelize_transformer(
            module,
            mesh=guided,
            text=text,
            adapter=adapter,
            assume_equal=assume_equal,
            rotate_method=rotate_method,
            backend=backend,
            comm_dtype=comm_dtype,
            attn_func=attn_func,
        )
    for module in unets.values():
        parallelize_unet(module, mesh=guided, assume_equal=assume_equal, batched=not perturbed)
    if guided.ranks > 1 or pipefusion is not None:
        if timeout is not None:
            set_timeout(guided, timeout, *weights_groups(pipe))
        in_one_batch = bool(unets) or any(plan is not None and plan.batched for plan in plans.values())
        apart = guided.batch.size > 1 and not in_one_batch
        around = ParallelCall(transformers, unets, guided, apart=apart, assume_equal=assume_equal)
        around.vaes = [parallelize_vae(autoencoder, mesh=guided) for autoencoder in autoencoders]
        around.put_around(pipe)
        if guided.pipe.size > 1:
            refuse_late_on_pipe(pipe)
        if pipefusion is not None:
            around.fused = FusedPipe(transformers, pipefusion, guided, adapter)
        if weights is not None and weights != "replicate":
            shard_weights(pipe, guided, method=weights)
            around.sharded = True
    if weights == "replicate":
        unshard_weights(pipe)
    return pipe


def _require_transformer(pipe: Any, **options: Any) -> None:
    """Raise ``ValueError`` if ``pipe`` is given options that apply to transformers only, and has a UNet."""
    given = [f"{name}={value!r}" for name, value in options.items() if value is not None]
    if given and not transformers_of(pipe):
        raise ValueError(
            f"{', '.join(given)}: {original_class(pipe).__name__} has no transformer; its ranks share the rows of a UNet's images. "
            "Leave these options out. weights='fsdp' shards its text encoders."
        )


def _attention_options(
    rotate_method: RotateMethod | None,
    backend: Backend | None,
    comm_dtype: torch.dtype | None,
    attn_func: AttnFunc | None,
) -> AttnOptions:
    """Return the validated options of the transformers' attention."""
    if backend is not None and attn_func is not None:
        raise ValueError(
            f"backend={backend!r} and attn_func both say what computes attention on one device. Leave one out."
        )
    return AttnOptions(rotate_method=rotate_method or "alltoall", backend=backend, comm_dtype=comm_dtype)


def _vaes_of(pipe: Any) -> list[nn.Module]:
    found = getattr(pipe, "vae", None)
    if not isinstance(found, nn.Module):
        raise TypeError(f"vae=True: {original_class(pipe).__name__} has no autoencoder pipe.vae. Leave vae=True out.")
    of_sound = [getattr(pipe, name, None) for name in _OF_SOUND]
    # One that is refused is small, and decodes on every rank.
    return [found, *[one for one in of_sound if isinstance(one, nn.Module) and vae_adapter(one) is not None]]


def unparallelize_pipe(pipe: Pipeline) -> Pipeline:
    """Undo :func:`parallelize_pipe`; returns ``pipe``, which is then what it was before.

    Of a mesh with ``pipe``, all ranks call it: blocks that a rank has freed come from those that hold them.
    """
    around = parallel_call(pipe)
    for autoencoder in [] if around is None else around.vaes:
        unparallelize_vae(autoencoder)
    if around is not None and around.sharded:
        unshard_weights(pipe)
    if around is not None and around.fused is not None:
        around.fused.remove()
    remove_parallel_call(pipe)
    release_pipe(pipe)
    for module in transformers_of(pipe).values():
        release_stage(module)
        remove_plan(module)
    for module in unets_of(pipe).values():
        unparallelize_unet(module)
    return pipe


def pipefusion_report(pipe: Any) -> PipeFusionReport:
    """What PipeFusion did in the last generation of ``pipe``, on this rank."""
    around = parallel_call(pipe)
    if around is None or around.fused is None:
        raise ValueError(
            f"this {original_class(pipe).__name__} runs without PipeFusion: parallelize_pipe(pipe, mesh=mesh, pipefusion=PipeFusion())."
        )
    return around.fused.report()


def parallelize_transformer(
    transformer: Transformer,
    *,
    mesh: Mesh | GuidedMesh | None = None,
    text: Text | None = None,
    adapter: Adapter | None = None,
    assume_equal: bool = False,
    rotate_method: RotateMethod | None = None,
    backend: Backend | None = None,
    comm_dtype: torch.dtype | None = None,
    attn_func: AttnFunc | None = None,
) -> Transformer:
    """Run this one transformer over ``mesh``: every rank gives it the same input and gets the whole output.

    For a denoising loop of your own; :func:`parallelize_pipe` also keeps random numbers and arguments alike on all ranks.
    In eager code, and where it was compiled in place, each call first compares a digest of its inputs over the ranks.

    Args:
        transformer: a supported diffusers transformer, compiled or not.
        mesh, text, adapter, rotate_method, backend, comm_dtype, attn_func: as for :func:`parallelize_pipe`.
        assume_equal: do not compare. A comparison costs a fingerprint of the inputs on their device, 8 bytes to the host per tensor, and
            one small exchange.

    Returns:
        ``transformer``.
    """
    module = uncompiled(transformer)
    refuse(When.PARALLELIZE, Case(module, module, adapter=adapter))
    plan: Any = plan_for(module, text, adapter)
    attention = _attention_options(rotate_method, backend, comm_dtype, attn_func)
    guided = guided_mesh_for(mesh, module)
    refuse(When.PARALLELIZE, Case(module, module, adapter=adapter, mesh=guided))
    release_stage(module)

    def require_equal(given: Mapping[str, Any]) -> None:
        guided.check_alive()
        problem = reason_against(When.PARALLEL_CALL, Case(module, module, mesh=guided))
        if assume_equal:
            if problem is not None:
                raise RuntimeError(problem)
            return
        options = cache_options(module)
        cached = {} if options is None else {"its cache": options.as_text()}
        require_same_inputs({**given, **cached, **attention.by_name}, guided, f"this {type(module).__name__}", problem)

    in_stages = guided.pipe.size > 1
    # Asked once, by what stands outside.
    apply_plan(
        module,
        plan,
        guided.sequence,
        batch=guided.batch,
        require_equal=None if in_stages or guided.ranks == 1 else require_equal,
        options=attention,
        attn_func=attn_func,
    )
    if in_stages:
        hold_stage(module, guided.pipe, adapter, require_equal, guided)
    return transformer


def unparallelize_transformer(transformer: Transformer) -> Transformer:
    """Undo :func:`parallelize_transformer`; returns ``transformer``. All ranks of a mesh with ``pipe`` call it."""
    release_stage(uncompiled(transformer))
    remove_plan(uncompiled(transformer))
    return transformer
