"""Validation of parallelize_pipe, and the parts of which it consists: look up, refuse and choose, then apply."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from para_core.adapters.compatibility.phases import check_parallelize, models_to_parallelize
from para_core.adapters.components import TextEncoders
from para_core.adapters.models.vaes import vae_adapter
from para_core.adapters.parallel.call import ParallelCall
from para_core.adapters.parallel.call_parts import CallPart, PipeFusionPart, SchedulePart
from para_core.adapters.parallel.parallelize_unet import UnetPart, resolve_unet
from para_core.adapters.parallel.session import ParallelSession, Part, Undo, nothing
from para_core.adapters.parallel.transformer import ParallelOptions, TransformerPart, resolve_transformer
from para_core.adapters.planner.default_mesh import Mesh, mesh_and_method
from para_core.adapters.registry import DIFFUSION_DECODER, decoders_of, transformers_of, unets_of
from para_core.adapters.rows.vae import parallelize_vae, require_parallel_vae, unparallelize_vae
from para_core.adapters.weights.block_offload import OffloadedBlocks, offloaded_blocks
from para_core.adapters.weights.fused_pipe import patches_of
from para_core.adapters.weights.shard import (
    check_shard,
    release_shards,
    require_mesh_fits,
    shard_components,
    weights_groups,
)
from para_core.adapters.weights.sharded_component import METHODS, Method, is_distributed
from para_core.adapters.weights.text_encoders import (
    OffloadedEncoders,
    encoders_with_blocks,
    offloader_of,
    require_not_offloaded,
    require_text_encoders,
    text_encoders_of,
)
from para_core.attention.attention_options import AttnOptions
from para_core.distributed.consistency import exchange, raising_on_all
from para_core.distributed.mesh import GuidedMesh, groups_among, host_group
from para_core.distributed.timeouts import as_timedelta, override_timeouts
from para_core.instance_patching import original_class
from para_core.weights.group import timeout_of, weights_mesh

# Autoencoders next to ``vae`` in pipelines that also generate sound.
_SOUND_VAES = ("audio_vae", "sound_tokenizer")


def resolve(pipe: Any, mesh: Mesh | None, options: ParallelOptions, *, unshards: bool = False) -> ParallelSession:
    """Validate the options and return the session that runs ``pipe`` on ``mesh``. Changes nothing.

    Every rank of the mesh calls it. If one rank refuses after the mesh is known, every rank raises.

    Args:
        unshards: Whether weights that are sharded now are gathered before the session starts.

    Raises:
        TypeError, ValueError, RuntimeError: As :func:`parallelize_pipe` documents.
    """
    if mesh is None:
        # The default mesh depends on the model.
        check_parallelize(models_to_parallelize(pipe, options.adapter))
    guided, predicted_method = mesh_and_method(mesh, pipe, options.weights)
    ranks = _global_ranks(guided) if guided.ranks > 1 and _needs_ranks(options) else set()
    with raising_on_all(guided, f"this {original_class(pipe).__name__} cannot run on these ranks"):
        check_parallelize(models_to_parallelize(pipe, options.adapter), guided, unshards=unshards)
        autoencoders = _vaes_of(pipe) if options.vae else list(decoders_of(pipe).values())
        _require_transformer(pipe, options)
        _require_weights_fit(guided, options)
        placement = _placement_of_text_encoders(pipe, guided, options)
        if placement is not None:
            require_text_encoders(pipe, placement)
        transformers, unets = _parts_of_models(pipe, guided, options, options.attention(predicted_method))
        if options.pipefusion is not None:
            for module in transformers_of(pipe).values():
                patches_of(module, guided, options.adapter)
        for vae in autoencoders:
            require_parallel_vae(vae)
        if guided.ranks > 1 and options.weights in METHODS:
            check_shard(pipe)
        session = ParallelSession(guided, [*transformers, *unets])
        if ranks and options.timeout is not None:
            session.parts.append(_timeout_part(pipe, guided, options.timeout, ranks))
        session.parts += _parts_of_pipe(pipe, guided, options, transformers, session, autoencoders)
        if guided.ranks > 1 and options.weights in ("fsdp", "tensor"):
            names = list(transformers_of(pipe)) if placement is not None else None
            session.parts.append(WeightsPart(pipe, guided, options.weights, names))
        elif options.weights == "replicate" or (unshards and guided.pipe.size == 1):
            session.parts.append(WeightsPart(pipe, guided, None))
        if placement is not None:
            session.parts.append(TextEncodersPart(pipe, guided, ranks, placement))
        if options.offload is not None:
            _require_blocks_offload(pipe, guided, options)
            session.parts.append(BlocksPart(pipe, guided, options.resident_blocks))
    return session


def _needs_ranks(options: ParallelOptions) -> bool:
    """Whether a part may need the global ranks of the mesh. Does not read the pipeline, so all ranks agree."""
    return options.timeout is not None or options.text_encoders == "fsdp" or options.weights == "tensor"


def _placement_of_text_encoders(pipe: Any, mesh: GuidedMesh, options: ParallelOptions) -> TextEncoders | None:
    """Return the placement to apply; None to leave it, or to leave it to ``weights="fsdp"``, which shards them too."""
    if options.text_encoders is None:
        names = encoders_with_blocks(pipe) if options.weights == "tensor" and mesh.ranks > 1 else []
        # A user who has offloaded them wants them in host memory.
        return "fsdp" if names and not any(map(offloader_of, text_encoders_of(pipe).values())) else None
    return "replicate" if options.text_encoders == "fsdp" and mesh.ranks == 1 else options.text_encoders


def _parts_of_pipe(
    pipe: Any,
    mesh: GuidedMesh,
    options: ParallelOptions,
    transformers: list[TransformerPart],
    session: ParallelSession,
    autoencoders: list[nn.Module],
) -> list[Part]:
    """Return the parts for the call of the pipeline: none on one rank, unless an option needs the call."""
    if mesh.ranks == 1 and options.pipefusion is None and not options.offloads and options.schedule is None:
        return []
    batched = bool(unets_of(pipe) or decoders_of(pipe)) or any(part.plan.batched for part in transformers)
    call = ParallelCall(
        transformers_of(pipe),
        unets_of(pipe),
        mesh,
        sequential_cfg=mesh.batch.size > 1 and not batched,
        assume_equal=options.assume_equal,
        session=session,
    )
    parts: list[Part] = [CallPart(pipe, call), *[VaePart(vae, mesh) for vae in autoencoders]]
    if options.pipefusion is not None:
        parts.append(PipeFusionPart(call, transformers_of(pipe), options.pipefusion, options.adapter))
    if options.schedule is not None:
        parts.append(SchedulePart(pipe, call, options.schedule, transformers[0].attention, options.adapter))
    return parts


def _parts_of_models(
    pipe: Any, mesh: GuidedMesh, options: ParallelOptions, attention: AttnOptions
) -> tuple[list[TransformerPart], list[UnetPart]]:
    # Perturbed attention guidance splits the batch into branches inside the model, so its samples cannot be sharded.
    # A guider calls the transformer once for each branch, also if the model's other pipelines concatenate them.
    batched = mesh.ranks == 1 or not (hasattr(pipe, "pag_applied_layers") or getattr(pipe, "guider", None) is not None)
    transformers = [
        resolve_transformer(module, mesh, options, attention, batched=batched)
        for module in transformers_of(pipe).values()
    ]
    unets = [
        UnetPart(resolve_unet(module, mesh, assume_equal=options.assume_equal, batched=batched))
        for module in unets_of(pipe).values()
    ]
    return transformers, unets


def _global_ranks(mesh: GuidedMesh) -> set[int]:
    """Return the global ranks of ``mesh``. All of them call it."""
    groups = [dim.group for dim in mesh.dims if dim.group is not None]
    if len(groups) > 1:
        return {record["rank"] for record in exchange({"rank": dist.get_rank()}, mesh)}
    return {rank for group in groups for rank in dist.get_process_group_ranks(group)}


def _timeout_part(pipe: Any, mesh: GuidedMesh, timeout: timedelta | float, ranks: set[int]) -> TimeoutPart:
    """Return the part that sets the time-out of all groups among these ranks.

    These are the groups of ``mesh``, and those made before for stages, rows of an image, CPU tensors and weights.
    """
    of_mesh = [group for dim in mesh.dims if dim.group is not None for group in {dim.group, host_group(dim)}]
    groups = dict.fromkeys([*of_mesh, *groups_among(ranks), *weights_groups(pipe)])
    return TimeoutPart(list(groups), as_timedelta(timeout), ranks)


def _require_transformer(pipe: Any, options: ParallelOptions) -> None:
    """Raise ``ValueError`` if ``pipe`` has no transformer and the user gave an option that only one takes."""
    if options.of_transformers and not transformers_of(pipe):
        named = ", ".join(f"{name}={value!r}" for name, value in options.of_transformers.items())
        raise ValueError(
            f"{named}: {original_class(pipe).__name__} has no transformer; its ranks shard rows of images. Leave these "
            "options out. weights='fsdp' shards its text encoders."
        )


def _require_weights_fit(mesh: GuidedMesh, options: ParallelOptions) -> None:
    if options.weights not in METHODS or mesh.ranks == 1:
        return
    if mesh.pipe.size > 1:
        raise ValueError(
            f"weights={options.weights!r} with a mesh of {mesh.pipe.size} stages: each rank holds the full weights of "
            "its own blocks only. Leave weights= out, or use a mesh without 'pipe'; shard_weights(pipe, mesh, "
            "components=[...]) shards text encoders."
        )
    require_mesh_fits(mesh, options.weights)


def _require_blocks_offload(pipe: Any, mesh: GuidedMesh, options: ParallelOptions) -> None:
    """Raise ``ValueError`` if the blocks of a transformer cannot wait in host memory."""
    if mesh.ranks > 1 and (options.weights in METHODS or mesh.pipe.size > 1):
        other = f"weights={options.weights!r}" if options.weights in METHODS else f"{mesh.pipe.size} stages"
        raise ValueError(
            f"offload='blocks' with {other}: a rank holds a part of the weights, which group offload of diffusers "
            "cannot move. Leave one out; shard_weights(pipe, mesh, offload_policy=CPUOffloadPolicy()) keeps each "
            "rank's part in host memory."
        )
    for module in transformers_of(pipe).values():
        offloaded_blocks(module, options.resident_blocks)


def _vaes_of(pipe: Any) -> list[nn.Module]:
    """Return the autoencoders and the diffusion decoder of ``pipe`` that run on all ranks, ``pipe.vae`` first.

    Raises:
        TypeError: If ``pipe.vae`` is not a module, unless ``pipe`` only decodes.
    """
    if decoders := decoders_of(pipe):
        return list(decoders.values())
    vae = getattr(pipe, "vae", None)
    if not isinstance(vae, nn.Module):
        raise TypeError(f"vae=True: {original_class(pipe).__name__} has no autoencoder pipe.vae. Leave vae=True out.")
    others = [getattr(pipe, name, None) for name in (*_SOUND_VAES, DIFFUSION_DECODER)]
    # A sound autoencoder without an adapter is small, so every rank decodes with all of it.
    return [vae, *[part for part in others if isinstance(part, nn.Module) and vae_adapter(part) is not None]]


# -- parts. Each applies itself and returns its undo.


@dataclass(frozen=True)
class TimeoutPart(Part):
    """Time-out of process groups."""

    groups: Collection[ProcessGroup]
    timeout: timedelta
    ranks: Collection[int]
    name = "setting the time-out"

    def apply(self) -> Undo:
        return override_timeouts(self.groups, self.timeout, self.ranks)

    def suspend(self, undo: Undo, mesh: GuidedMesh) -> Undo:
        # The time-out stays until the next session runs. The one set last counts, so there is nothing to restore.
        return nothing

    def finish(self, undo: Undo) -> None:
        undo()


@dataclass(frozen=True)
class VaePart(Part):
    """One autoencoder that runs on all ranks."""

    vae: nn.Module
    mesh: GuidedMesh
    name = "the VAE"

    def apply(self) -> Undo:
        parallelize_vae(self.vae, mesh=self.mesh)
        return self.undo

    def undo(self) -> None:
        unparallelize_vae(self.vae)


@dataclass(frozen=True)
class WeightsPart(Part):
    """Weights that are sharded by ``method``, or replicated if ``method`` is None."""

    pipe: Any
    mesh: GuidedMesh
    method: Method | None
    components: Sequence[str] | None = None  # None: all that the method can shard
    name = "sharding the weights"

    def apply(self) -> Undo:
        if self.method is None:
            release_shards(self.pipe, self.components)
            return nothing
        names = shard_components(self.pipe, self.mesh, self.method, self.components, keep=True)
        return partial(_release, self.pipe, names)

    @property
    def shards_weights(self) -> bool:  # type: ignore[override]
        return self.method is not None

    def suspend(self, undo: Undo, mesh: GuidedMesh) -> Undo:
        # The next session shards the weights again or has a part that releases them. Only stages need full weights
        # before.
        return release_shards(self.pipe, self.components) if self.shards_weights and mesh.pipe.size > 1 else nothing


@dataclass
class TextEncodersPart(Part):
    """Text encoders that are placed by ``placement``. ``ranks`` are the global ranks of ``mesh``."""

    pipe: Any
    mesh: GuidedMesh
    ranks: Collection[int]
    placement: TextEncoders
    name = "placing the text encoders"

    def __post_init__(self) -> None:
        self.shards_weights = self.placement == "fsdp"
        self._offloaded = OffloadedEncoders(self.pipe, self.mesh, first_rank_only=self.placement == "first")

    def clear(self) -> Undo:
        return nothing if self.placement == "fsdp" else release_shards(self.pipe, text_encoders_of(self.pipe))

    def apply(self) -> Undo:
        if self.placement == "replicate":
            return nothing
        # Not earlier, because the session that this one replaces may have offloaded them.
        require_not_offloaded(self.pipe)
        if self.placement == "fsdp":
            mesh = weights_mesh(sorted(self.ranks), self.mesh.sequence.device_type, timeout=timeout_of(self.mesh))
            names = shard_components(self.pipe, mesh, "fsdp", encoders_with_blocks(self.pipe), keep=True)
            return partial(_release, self.pipe, names)
        self._offloaded.apply()
        return self._offloaded.remove

    def suspend(self, undo: Undo, mesh: GuidedMesh) -> Undo:
        if self.placement in ("fsdp", "replicate"):
            # As for WeightsPart, the next session shards these weights or releases them.
            return nothing
        undo()
        return self._offloaded.apply


@dataclass
class BlocksPart(Part):
    """Blocks of the transformers that wait in host memory."""

    pipe: Any
    mesh: GuidedMesh
    resident: int
    name = "offloading the blocks"

    def __post_init__(self) -> None:
        self._offloaded = OffloadedBlocks(transformers_of(self.pipe).values(), self.mesh, self.resident)

    def apply(self) -> Undo:
        for name, module in transformers_of(self.pipe).items():
            # Not earlier, because the session that this one replaces may have offloaded the blocks.
            offloader = offloader_of(module)
            if offloader is not None or is_distributed(module):
                raise ValueError(
                    f"pipe.{name} is {'sharded' if offloader is None else f'offloaded by {offloader}'} already. Leave "
                    "offload out, or undo that first (unshard_weights(pipe), pipe.remove_all_hooks())."
                )
        self._offloaded.apply()
        return self._offloaded.remove

    def suspend(self, undo: Undo, mesh: GuidedMesh) -> Undo:
        undo()
        return self._offloaded.apply


def _release(pipe: Any, names: Collection[str]) -> None:
    release_shards(pipe, names)
