"""Validate the arguments of parallelize_pipe, and choose the changes of the pipeline that they require.

Nothing of the pipeline is changed here; process groups may be created, which later calls reuse. The chosen
changes are returned as the parts of a session, which applies them in this order: models, time-outs, the
pipeline's call, features, sharded weights. Only ``parallelize.py`` calls this. Tests:
tests/adapters/compatibility/test_checks.py, tests/adapters/parallel/test_undo.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn

from para_core.adapters.compatibility.checks import check_parallelize, models_to_parallelize
from para_core.adapters.default_mesh import mesh_and_method
from para_core.adapters.denoisers import denoisers_by_kind
from para_core.adapters.inspect.components import (
    components_with_blocks,
    encoders_with_blocks,
    text_encoders_of,
)
from para_core.adapters.parallel.call import ParallelCall, remove_parallel_call
from para_core.adapters.parallel.denoiser_runs import make_denoiser_run
from para_core.adapters.parallel.options import ParallelOptions
from para_core.adapters.parallel.parts import FeaturePart, ShardPart, TimeoutPart
from para_core.adapters.parallel.scheduled_attention import ScheduledAttention
from para_core.adapters.parallel.session import Change, ParallelSession, Part
from para_core.adapters.parallel.transformer import TransformerPart, make_call_agreement, resolve_transformer
from para_core.adapters.registry import decoders_of, transformers_of
from para_core.adapters.weights.feature import ChangeRequest, FeatureChange
from para_core.adapters.weights.features import make_changes, require_method, shard_methods
from para_core.adapters.weights.offloaded_modules import offloader_of
from para_core.adapters.weights.one_way import check_holds_all
from para_core.adapters.weights.shard import check_can_be_sharded, prepare_sharding
from para_core.attention.attention_options import AttnOptions
from para_core.attention.option import AttentionOption
from para_core.distributed.agree import exchange, together
from para_core.distributed.mesh import GuidedMesh
from para_core.distributed.timeouts import as_timedelta
from para_core.instance.private_class import original_class
from para_core.modes.registry import needs_mode
from para_core.option_values import TextEncoders
from para_core.weights.group import timeout_of, weights_mesh


def resolve(pipe: Any, options: ParallelOptions) -> ParallelSession:
    """Return the session that runs ``pipe`` with the checked ``options``.

    Changes nothing of the pipeline; may create process groups. Every rank of the mesh must call this function
    with equal options. The errors are those of :func:`parallelize_pipe`, on every rank.
    """
    guided, predicted_method = mesh_and_method(options.mesh, pipe, options.weights)
    # The time-out needs the global ranks, for which the ranks run an exchange: not inside of together(), where
    # a rank may raise alone. All ranks decide the same. So do the handlers of denoisers, whose groups need one.
    ranks: set[int] | None = None
    if options.timeout is not None and guided.ranks > 1:
        ranks = _global_ranks(guided)
    with together(guided, f"this {original_class(pipe).__name__} cannot run on these ranks"):
        check_parallelize(models_to_parallelize(pipe, options.adapter), guided)
        transformers = transformers_of(pipe)
        options = options.with_encoders(_placement_of_encoders(pipe, guided, options))
        _check_options_fit(pipe, transformers, guided, options)
        attention = options.attention(predicted_method)
        batched = _has_batched_calls(pipe)
        # A part has the compiled wrapper, if there is one.
        planned = [
            resolve_transformer(getattr(pipe, name), guided, options, attention, batched=batched)
            for name in transformers
        ]
        session = ParallelSession(guided, [])
        after_models: list[Part] = []
        if ranks is not None and options.timeout is not None:
            after_models.append(TimeoutPart(pipe, guided, as_timedelta(options.timeout), ranks))
        after_models += _pipeline_parts(pipe, transformers, planned, session, options, attention)
        if options.weights == "replicate":
            check_holds_all(pipe, components_with_blocks(pipe).values(), "weights='replicate'")
    others = _denoiser_parts(pipe, guided, options, batched=batched)
    sharding = _weight_parts(pipe, transformers, guided, options)
    # Models come first, because the part of the pipeline records the meshes that they then have
    # (ParallelCall.attach), and sharded weights last, because nothing undoes them.
    session.parts += [*planned, *others, *after_models, *sharding]
    return session


def _has_batched_calls(pipe: Any) -> bool:
    """Whether the calls of the models of ``pipe`` have all branches of guidance on their batch dim."""
    # Samples are sharded over ``batch`` only if a call has all branches of guidance on its batch dim.
    # Perturbed attention guidance splits the batch inside the model. A pipeline with a guider calls the
    # transformer once per branch, even if other pipelines of the same model concatenate the branches.
    has_guider = getattr(pipe, "guider", None) is not None
    return not (hasattr(pipe, "pag_applied_layers") or has_guider)


def _denoiser_parts(pipe: Any, mesh: GuidedMesh, options: ParallelOptions, *, batched: bool) -> list[Part]:
    """Return the parts of the denoisers that are no transformers. Collective; may create process groups."""
    runs: list[Part] = []
    for kind, path, module in denoisers_by_kind(pipe):
        run = make_denoiser_run(kind, module, mesh, assume_equal=options.assume_equal, batched=batched)
        runs.append(Change(f"pipe.{path}", run.apply, run.remove))
    return runs


def _pipeline_parts(
    pipe: Any,
    transformers: Mapping[str, nn.Module],
    planned: Sequence[TransformerPart],
    session: ParallelSession,
    options: ParallelOptions,
    attention: AttnOptions,
) -> list[Part]:
    """Return the part of the pipeline's call, if it needs one, and those of its features.

    The features come after the call, which knows them.
    """
    mesh, denoisers = session.mesh, denoisers_by_kind(pipe)
    shards_samples = bool(denoisers or decoders_of(pipe)) or any(part.plan.batched for part in planned)
    compare = partial(make_call_agreement, mesh=mesh, assume_equal=options.assume_equal)
    changes = make_changes(
        ChangeRequest(
            pipe, transformers, mesh, vars(options), compare, has_calls_per_branch=not shards_samples
        )
    )
    parts: list[Part] = []
    if mesh.ranks > 1 or changes or options.schedule is not None:
        others = {path: module for _, path, module in denoisers}
        call = _make_call(transformers, others, session, options, attention, changes)
        parts.append(Change("the pipeline", partial(call.attach, pipe), partial(remove_parallel_call, pipe)))
    return [*parts, *map(FeaturePart, changes)]


def _make_call(
    transformers: Mapping[str, nn.Module],
    others: Mapping[str, nn.Module],
    session: ParallelSession,
    options: ParallelOptions,
    attention: AttnOptions,
    changes: list[FeatureChange],
) -> ParallelCall:
    """Return the wrapper of the pipeline's call, with its transformers and other denoisers by name."""
    call = ParallelCall(
        transformers,
        others,
        session.mesh,
        assume_equal=options.assume_equal,
        session=session,
        verify=options.verify,
        changes=changes,
    )
    if options.schedule is not None:
        call.scheduled = ScheduledAttention(transformers, options.schedule, attention, options.adapter)
    return call


def _placement_of_encoders(pipe: Any, mesh: GuidedMesh, options: ParallelOptions) -> TextEncoders | None:
    """Return the placement of the text encoders' weights to apply; None to leave them where they are.

    Also None if ``weights`` shards text encoders like transformers, and the user chose no placement.
    """
    if options.shards_encoders and mesh.ranks == 1:
        return "replicate"
    if options.places_encoders or not _shards_only_transformers(options) or mesh.ranks == 1:
        return options.placement_of_encoders
    # If the user has offloaded the text encoders, leave them in host memory.
    if not encoders_with_blocks(pipe) or any(map(offloader_of, text_encoders_of(pipe).values())):
        return None
    return "fsdp"


def _shards_only_transformers(options: ParallelOptions) -> bool:
    """Whether ``weights`` names a method that shards no text encoders."""
    method = shard_methods().get(options.weights or "")
    return method is not None and not method.shards_encoders


def _check_options_fit(
    pipe: Any, transformers: Mapping[str, nn.Module], mesh: GuidedMesh, options: ParallelOptions
) -> None:
    """Raise ``ValueError`` if an option does not fit the components of ``pipe``, the mesh or another option."""
    cls, stages = original_class(pipe).__name__, mesh.pipe.size
    if options.transformer_options and not transformers:
        named = ", ".join(f"{name}={value!r}" for name, value in options.transformer_options.items())
        raise ValueError(
            f"{named}: {cls} has no transformer; its ranks shard rows of images. Leave these options out. "
            "weights='fsdp' shards its text encoders."
        )
    shards = options.weights in shard_methods() and mesh.ranks > 1
    if shards and options.places_encoders and not transformers:
        raise ValueError(
            f"weights={options.weights!r} and {options.encoders_setting}: {cls} has no transformer, so "
            "both place its text encoders. Leave one of them out."
        )
    if shards and stages > 1:
        raise ValueError(
            f"weights={options.weights!r} with a mesh of {stages} stages: each rank holds the full weights of its own "
            "blocks only. Leave weights= out, or use a mesh without 'pipe'; shard_weights(pipe, mesh, "
            "components=[...]) shards text encoders."
        )
    if shards:
        require_method(str(options.weights)).check_mesh(mesh, True)
        check_can_be_sharded(pipe, options.adapter)
    middle = None
    if options.schedule is not None:
        middle = options.schedule.middle
    for name, module in transformers.items():
        if isinstance(middle, AttentionOption) and needs_mode(module):
            raise ValueError(
                f"backend= is an AttentionSchedule with {middle}, and pipe.{name} attends by flex_attention, whose "
                "mask selects the keys. Use a schedule with a backend in the middle."
            )
    if options.schedule is not None and getattr(pipe, "scheduler", None) is None:
        raise ValueError(
            f"backend= is an AttentionSchedule, and this {cls} has no scheduler whose steps could be counted. Name one "
            "backend for all steps."
        )


def _weight_parts(
    pipe: Any, transformers: Mapping[str, nn.Module], mesh: GuidedMesh, options: ParallelOptions
) -> list[Part]:
    """Return the parts that shard weights as the options ask. Collective.

    Changes nothing of the pipeline; may create the process groups of the weights.
    """
    parts: list[Part] = []
    if mesh.ranks > 1 and options.weights in shard_methods():
        names = None
        if options.places_encoders:
            names = list(transformers)
        sharding = prepare_sharding(pipe, mesh, str(options.weights), names, adapter=options.adapter)
        parts.append(ShardPart(sharding))
    if options.shards_encoders and encoders_with_blocks(pipe):
        ranks, device_type = sorted(_global_ranks(mesh)), mesh.sequence.device_type
        over_all_ranks = weights_mesh(ranks, device_type, timeout=timeout_of(mesh))
        encoders = encoders_with_blocks(pipe)
        sharding = prepare_sharding(pipe, over_all_ranks, "fsdp", encoders, adapter=options.adapter)
        parts.append(ShardPart(sharding))
    return parts


def _global_ranks(mesh: GuidedMesh) -> set[int]:
    """Return the global ranks of ``mesh``. With more than one mesh dim this is a collective call."""
    groups = [dim.group for dim in mesh.dims if dim.group is not None]
    if len(groups) > 1:
        return {record["rank"] for record in exchange({"rank": dist.get_rank()}, mesh)}
    return {rank for group in groups for rank in dist.get_process_group_ranks(group)}
