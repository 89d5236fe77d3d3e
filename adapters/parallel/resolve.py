"""Validate the arguments of parallelize_pipe, and choose the changes of the pipeline that they require.

Nothing is changed here. The chosen changes are returned as the parts of a session, which applies them.
"""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch.distributed as dist
from torch import nn

from para_core.adapters.compatibility.checks import check_parallelize, models_to_parallelize
from para_core.adapters.default_mesh import mesh_and_method
from para_core.adapters.denoisers import denoisers_by_kind, other_denoisers_of
from para_core.adapters.inspect.components import VAE_METHODS, encoders_with_blocks, text_encoders_of, vaes_of
from para_core.adapters.parallel.call import ParallelCall, remove_parallel_call
from para_core.adapters.parallel.denoiser_runs import make_denoiser_run
from para_core.adapters.parallel.options import ParallelOptions
from para_core.adapters.parallel.parts import OffloadPart, TextEncodersPart, TimeoutPart, WeightsPart
from para_core.adapters.parallel.scheduled_attention import ScheduledAttention
from para_core.adapters.parallel.session import Change, ParallelSession, Part
from para_core.adapters.parallel.transformer import TransformerPart, resolve_transformer
from para_core.adapters.registry import DIFFUSION_DECODER, decoders_of, transformers_of
from para_core.adapters.vae.vae import parallelize_vae, require_parallel_vae, unparallelize_vae
from para_core.adapters.vae.vae_adapter import vae_adapter
from para_core.adapters.weights.block_offload import OffloadedBlocks, num_resident, offloaded_blocks
from para_core.adapters.weights.fused_pipe import patches_of
from para_core.adapters.weights.offloaded_modules import OffloadedModules, offloader_of
from para_core.adapters.weights.shard import check_shard, require_mesh_fits, weights_groups
from para_core.adapters.weights.sharded_component import METHODS
from para_core.adapters.weights.vae_offload import OffloadedVaes
from para_core.attention.schedule import KeptKeys
from para_core.distributed.agree import exchange, raising_on_all
from para_core.distributed.mesh import GuidedMesh, groups_among, host_group
from para_core.distributed.timeouts import as_timedelta
from para_core.instance.private_class import original_class
from para_core.modes.registry import needs_mode
from para_core.option_values import TextEncoders


def resolve(pipe: Any, options: ParallelOptions, *, unshards: bool = False) -> ParallelSession:
    """Return the session that runs ``pipe`` with the checked ``options``. Changes nothing.

    Every rank of the mesh must call this function with equal options. The errors are those of
    :func:`parallelize_pipe`, on every rank. ``unshards`` says whether the current session shards weights, so that the
    new one must gather them if it does not shard them itself.
    """
    guided, predicted_method = mesh_and_method(options.mesh, pipe, options.weights)
    # Only these options need the global ranks, for which the ranks run an exchange. All ranks decide the same.
    needs_ranks = options.timeout is not None or options.text_encoders == "fsdp" or options.weights == "tensor"
    if guided.ranks > 1 and needs_ranks:
        ranks = _global_ranks(guided)
    else:
        ranks = set()
    with raising_on_all(guided, f"this {original_class(pipe).__name__} cannot run on these ranks"):
        check_parallelize(models_to_parallelize(pipe, options.adapter), guided, unshards=unshards)
        if options.vae:
            autoencoders = _parallel_vaes_of(pipe)
        else:
            autoencoders = list(decoders_of(pipe).values())
        for vae in autoencoders:
            require_parallel_vae(vae)
        placement = _placement_of_text_encoders(pipe, guided, options)
        _require_options_fit(pipe, guided, options, placement)
        # Perturbed attention guidance splits the batch into branches inside the model, so samples cannot be sharded. A
        # pipeline with a guider calls the transformer once per branch, even if other pipelines of the same model
        # concatenate branches on the batch dim.
        perturbs = hasattr(pipe, "pag_applied_layers") or getattr(pipe, "guider", None) is not None
        batched = guided.ranks == 1 or not perturbs
        attention = options.attention(predicted_method)
        transformers = [
            resolve_transformer(module, guided, options, attention, batched=batched)
            for module in transformers_of(pipe).values()
        ]
        runs: list[Part] = []
        for kind, _, module in denoisers_by_kind(pipe):
            run = make_denoiser_run(kind, module, guided, assume_equal=options.assume_equal, batched=batched)
            runs.append(Change("the UNet", run.apply, run.remove))
        session = ParallelSession(guided, [*transformers, *runs])
        if ranks and options.timeout is not None:
            session.parts.append(_timeout_part(pipe, guided, options.timeout, ranks))
        session.parts += _parts_of_pipe(pipe, guided, options, transformers, session, autoencoders)
        session.parts += _parts_of_weights(pipe, guided, options, placement, ranks, unshards)
    return session


def _placement_of_text_encoders(pipe: Any, mesh: GuidedMesh, options: ParallelOptions) -> TextEncoders | None:
    """Return the placement of the text encoders' weights to apply; None to leave them where they are.

    Also None if ``weights="fsdp"`` and the user chose no placement: :class:`WeightsPart` then shards text encoders too.
    """
    if options.text_encoders == "fsdp" and mesh.ranks == 1:
        return "replicate"
    if options.places_encoders or options.weights != "tensor" or mesh.ranks == 1:
        return options.text_encoders
    # If the user has offloaded the text encoders, leave them in host memory.
    if not encoders_with_blocks(pipe) or any(map(offloader_of, text_encoders_of(pipe).values())):
        return None
    return "fsdp"


def _require_options_fit(pipe: Any, mesh: GuidedMesh, options: ParallelOptions, placement: TextEncoders | None) -> None:
    """Raise ``ValueError`` if an option does not fit the components of ``pipe``, the mesh or another option."""
    cls, stages = original_class(pipe).__name__, mesh.pipe.size
    if options.vae_placement is not None and not vaes_of(pipe):
        raise ValueError(f"vae_placement={options.vae_placement!r}: this {cls} has no autoencoder. Leave it out.")
    if options.of_transformers and not transformers_of(pipe):
        named = ", ".join(f"{name}={value!r}" for name, value in options.of_transformers.items())
        raise ValueError(
            f"{named}: {cls} has no transformer; its ranks shard rows of images. Leave these options out. "
            "weights='fsdp' shards its text encoders."
        )
    if placement is not None and not text_encoders_of(pipe):
        raise ValueError(f"text_encoders={placement!r}: this {cls} has no text encoder. Leave it out.")
    shards = options.weights in METHODS and mesh.ranks > 1
    if shards and stages > 1:
        raise ValueError(
            f"weights={options.weights!r} with a mesh of {stages} stages: each rank holds the full weights of its own "
            "blocks only. Leave weights= out, or use a mesh without 'pipe'; shard_weights(pipe, mesh, "
            "components=[...]) shards text encoders."
        )
    if shards:
        require_mesh_fits(mesh, str(options.weights))
        check_shard(pipe)
    if options.offload is not None and mesh.ranks > 1 and (shards or stages > 1):
        if shards:
            other = f"weights={options.weights!r}"
        else:
            other = f"{stages} stages"
        raise ValueError(
            f"offload='blocks' with {other}: a rank holds a part of the weights, which group offload of diffusers "
            "cannot move. Leave one out; shard_weights(pipe, mesh, offload_policy=CPUOffloadPolicy()) keeps each "
            "rank's part in host memory."
        )
    for name, module in transformers_of(pipe).items():
        if options.offload is not None:
            offloaded_blocks(module, num_resident(options.resident_blocks))
        if options.pipefusion is not None:
            patches_of(module, mesh, options.adapter)
        middle = None
        if options.schedule is not None:
            middle = options.schedule.middle
        if isinstance(middle, KeptKeys) and needs_mode(module):
            raise ValueError(
                f"backend= is an AttentionSchedule with {middle}, and pipe.{name} attends by flex_attention, whose "
                "mask selects the keys. Use a schedule with a backend in the middle."
            )
    if options.schedule is not None and getattr(pipe, "scheduler", None) is None:
        raise ValueError(
            f"backend= is an AttentionSchedule, and this {cls} has no scheduler whose steps could be counted. Name one "
            "backend for all steps."
        )


def _parts_of_pipe(
    pipe: Any,
    mesh: GuidedMesh,
    options: ParallelOptions,
    transformers: list[TransformerPart],
    session: ParallelSession,
    autoencoders: list[nn.Module],
) -> list[Part]:
    """Return the parts of the session that change the pipeline's call and its autoencoders.

    The list is empty on one rank, unless PipeFusion, offload or an attention schedule is on.
    """
    if mesh.ranks == 1 and options.pipefusion is None and not options.offloads and options.schedule is None:
        return []
    batched = bool(other_denoisers_of(pipe) or decoders_of(pipe)) or any(part.plan.batched for part in transformers)
    call = ParallelCall(
        transformers_of(pipe),
        other_denoisers_of(pipe),
        mesh,
        sequential_cfg=mesh.batch.size > 1 and not batched,
        assume_equal=options.assume_equal,
        session=session,
        verify=options.verify,
    )
    parts: list[Part] = [Change("the pipeline", partial(call.attach, pipe), partial(remove_parallel_call, pipe))]
    for vae in autoencoders:
        parts.append(Change("the VAE", partial(parallelize_vae, vae, mesh=mesh), partial(unparallelize_vae, vae)))
    if options.pipefusion is not None:
        parts.append(Change("PipeFusion", partial(call.fuse, options.pipefusion, options.adapter), call.unfuse))
    if options.schedule is not None:
        attention = transformers[0].attention
        call.scheduled = ScheduledAttention(transformers_of(pipe), options.schedule, attention, options.adapter)
    return parts


def _parts_of_weights(
    pipe: Any,
    mesh: GuidedMesh,
    options: ParallelOptions,
    placement: TextEncoders | None,
    ranks: set[int],
    unshards: bool,
) -> list[Part]:
    """Return the parts of the session that change where weights are."""
    parts: list[Part] = []
    if mesh.ranks > 1 and options.weights in ("fsdp", "tensor"):
        names = None
        if placement is not None:
            names = list(transformers_of(pipe))
        parts.append(WeightsPart(pipe, mesh, options.weights, names))
    elif options.weights == "replicate" or (unshards and mesh.pipe.size == 1):
        parts.append(WeightsPart(pipe, mesh, None))
    if placement is not None:
        method: Literal["fsdp"] | None = None
        if placement == "fsdp":
            method = "fsdp"
        parts.append(TextEncodersPart(pipe, mesh, method, encoders_with_blocks(pipe), ranks))
    if placement in ("offload", "first"):
        first = placement == "first"
        offloaded = OffloadedModules(text_encoders_of(pipe), mesh, "text_encoders", first_rank_only=first)
        parts.append(OffloadPart(offloaded, "placing the text encoders"))
    if options.vae_in_host_memory:
        in_host_memory = OffloadedVaes(
            vaes_of(pipe),
            mesh,
            "vae_placement",
            methods=VAE_METHODS,
            first_rank_only=options.vae_on_first_rank,
        )
        parts.append(OffloadPart(in_host_memory, "placing the VAE"))
    if options.offload is not None:
        blocks = OffloadedBlocks(transformers_of(pipe), mesh, num_resident(options.resident_blocks))
        parts.append(OffloadPart(blocks, "offloading the blocks"))
    return parts


def _global_ranks(mesh: GuidedMesh) -> set[int]:
    """Return the global ranks of ``mesh``. With more than one mesh dim this is a collective call."""
    groups = [dim.group for dim in mesh.dims if dim.group is not None]
    if len(groups) > 1:
        return {record["rank"] for record in exchange({"rank": dist.get_rank()}, mesh)}
    return {rank for group in groups for rank in dist.get_process_group_ranks(group)}


def _timeout_part(pipe: Any, mesh: GuidedMesh, timeout: timedelta | float, ranks: set[int]) -> TimeoutPart:
    """Return the part that sets ``timeout`` on all process groups that the ranks of ``mesh`` use.

    These are its groups with their CPU groups, those that para_core made among ``ranks``, and those of sharded weights.
    """
    of_mesh = [group for dim in mesh.dims if dim.group is not None for group in {dim.group, host_group(dim)}]
    groups = dict.fromkeys([*of_mesh, *groups_among(ranks), *weights_groups(pipe)])
    return TimeoutPart(list(groups), as_timedelta(timeout), ranks)


def _parallel_vaes_of(pipe: Any) -> list[nn.Module]:
    """Return the modules that ``vae=True`` runs on all ranks: autoencoders with an adapter and the diffusion decoder.

    ``pipe.vae`` is first; without it ``TypeError`` is raised. For a pipeline that only decodes, return its decoders.
    """
    if decoders := decoders_of(pipe):
        return list(decoders.values())
    vaes = vaes_of(pipe)
    if "vae" not in vaes:
        raise TypeError(f"vae=True: {original_class(pipe).__name__} has no autoencoder pipe.vae. Leave vae=True out.")
    others = [part for name, part in vaes.items() if name != "vae"]
    others += [part for part in [getattr(pipe, DIFFUSION_DECODER, None)] if isinstance(part, nn.Module)]
    # An audio autoencoder without an adapter is left out, so every rank decodes all the audio, which takes little time.
    return [vaes["vae"], *[part for part in others if vae_adapter(part) is not None]]
