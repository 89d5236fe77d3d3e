"""Table of everything that is refused, one rule per row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from para_core.adapters.applied import applied_mesh
from para_core.adapters.compatibility.context import CompatibilityContext, When, is_unet
from para_core.adapters.compatibility.hooks import (
    attention_by_scores,
    cache_of_diffusers,
    unfit_guider,
    unfit_hook,
    unseen_attention,
)
from para_core.adapters.compatibility.models import (
    compiled_unet,
    has_no_plan,
    no_scheduler,
    perturbed_joint_attention,
    uncached_blocks,
    unfit_class,
    unfit_unet,
    unknown_blocks,
    was_replaced,
)
from para_core.adapters.compatibility.placement import (
    cached_in_one_graph,
    changed_since_sharded,
    compiled_fusion,
    compiled_stages,
    config_of_diffusers,
    no_stages,
    pipe_on_several_devices,
    placed_by_accelerate,
    placed_stages,
    several_devices,
    sharded_without_breaks,
    shared_beyond_sequence,
    tensor_ranks_differ,
    tensors_of_diffusers,
    uncached_stages,
    unet_on_tensor_ranks,
)
from para_core.adapters.spec import Adapter


@dataclass(frozen=True)
class CompatibilityRule:
    """Rule that refuses one combination.

    Args:
        title: Name of the combination, for docs/refusals.md.
        when: Calls before which the rule is tested.
        test: Returns whether the combination is present, or the fields of ``message`` if it is, and otherwise None.
        message: Error message with fields, from ``test`` and :attr:`CompatibilityContext.fields`.
        error: Class of the error.
    """

    title: str
    when: tuple[When, ...]
    test: Callable[[CompatibilityContext], Mapping[str, Any] | bool | None]
    message: str
    error: type[Exception] = RuntimeError


# If several rules apply, the first one raises.
REFUSALS: tuple[CompatibilityRule, ...] = (
    CompatibilityRule(
        "a pipeline without a transformer, in parallel",
        (When.PARALLELIZE,),
        lambda case: case.module is None,
        "{owner} is not supported: it has no transformer. Supported are {supported}.",
        TypeError,
    ),
    CompatibilityRule(
        "an unsupported UNet",
        (When.PARALLELIZE,),
        unfit_unet,
        "{owner} is not supported: the rows of images in {cls} cannot be sharded: {reason}. Give each rank its own "
        "prompts "
        "instead. Supported are {supported}.",
        TypeError,
    ),
    CompatibilityRule(
        "a pipeline without a transformer, with a cache",
        (When.CACHE,),
        lambda case: case.module is None,
        "{owner} cannot be cached: it has no transformer.",
        TypeError,
    ),
    CompatibilityRule(
        "a cache on a UNet",
        (When.CACHE,),
        is_unet,
        "{owner} cannot be cached: First Block Cache skips blocks whose output has the size of their input. The "
        "blocks of {cls} "
        "pass residuals of many sizes to each other.",
        TypeError,
    ),
    CompatibilityRule(
        "an adapter= that is not an Adapter",
        (When.PARALLELIZE, When.CACHE),
        lambda case: case.adapter is not None and not isinstance(case.adapter, Adapter),
        "adapter is {adapter!r}; expected an Adapter, or None: adapter=Adapter(transformer={cls!r}, pipelines='…', "
        "blocks=CachedBlocks(...), plan=Plan(...)).",
        TypeError,
    ),
    CompatibilityRule(
        "a transformer class that cannot have a plan",
        (When.PARALLELIZE,),
        unfit_class,
        "{owner} is not supported: {cls} has no plan, because {reason}. Give each rank its own prompts instead. "
        "Supported are "
        "{supported}.",
        TypeError,
    ),
    CompatibilityRule(
        "a transformer without a plan",
        (When.PARALLELIZE,),
        has_no_plan,
        "{owner} is not supported: there is no plan for {cls}. A plan says in about ten lines what the model shards "
        "and "
        "gathers: parallelize_pipe(pipe, mesh=mesh, adapter=Adapter(transformer={cls!r}, pipelines=..., "
        "plan=Plan(...))). "
        "propose_plan finds most plans; docs/new_model.md shows how to write one. Supported are {supported}.",
        TypeError,
    ),
    CompatibilityRule(
        "a cache on blocks that cannot be skipped",
        (When.CACHE,),
        uncached_blocks,
        "{owner} cannot be cached: {reason} ({cls}). Leave the cache out; parallelize_pipe runs it on several ranks.",
        TypeError,
    ),
    CompatibilityRule(
        "a cache on blocks that no adapter describes",
        (When.CACHE,),
        unknown_blocks,
        "{owner} cannot be cached: no adapter describes the blocks of {cls}. Supported are {cached}. Describe them: "
        "apply_cache_on_pipe(pipe, adapter=Adapter(transformer='…', pipelines='…', "
        "blocks=CachedBlocks((BlockGroup(('blocks',)),)))).",
        TypeError,
    ),
    CompatibilityRule(
        "a cache that follows a schedule, without a scheduler",
        (When.CACHE, When.CACHED_CALL),
        no_scheduler,
        "{option} needs a scheduler, and this {owner} has none. Leave it out.",
        ValueError,
    ),
    *(
        CompatibilityRule(
            f"a {what} on several devices",
            (When.PARALLELIZE, When.SHARD),
            test,
            "{spread} is spread over the devices {devices} by its device_map, for one process; here each device has "
            "its own process. Load "
            "it without device_map, and shard its weights over the devices of all ranks: parallelize_pipe(pipe, "
            "mesh=mesh, "
            "weights='fsdp').",
            ValueError,
        )
        for what, test in (("transformer", several_devices), ("pipeline", pipe_on_several_devices))
    ),
    CompatibilityRule(
        "weights that accelerate moves layer by layer",
        (When.SHARD,),
        placed_by_accelerate,
        "{placed} is moved by a hook of accelerate, layer by layer ({hook} on {at}: enable_sequential_cpu_offload, "
        "device_map). Its weights are on "
        "the meta device and are loaded for each call of a layer, so there is nothing to shard. Call "
        "pipe.remove_all_hooks() "
        "first. pipe.enable_model_cpu_offload() works with sharded weights, and shard_weights(pipe, mesh, "
        "offload_policy=torch.distributed.fsdp.CPUOffloadPolicy()) keeps each rank's shard in host memory.",
        ValueError,
    ),
    CompatibilityRule(
        "heads sharded over other ranks than those along tensor",
        (When.PARALLEL_CALL,),
        tensor_ranks_differ,
        "{name} has its heads sharded over {shared} ranks, and the mesh dim 'tensor' of this rank has {ranks}. Call "
        "parallelize_pipe(pipe, "
        "mesh=mesh, weights='tensor') with a mesh of init_context_parallel_mesh(max_tensor_dim_size=...). For a model "
        "that diffusers' "
        "TensorParallelConfig(mesh=mesh['tensor']) sharded, pass the same mesh without weights=.",
    ),
    CompatibilityRule(
        "a UNet on ranks along tensor",
        (When.PARALLELIZE,),
        unet_on_tensor_ranks,
        "the mesh has {tensor_ranks} ranks along 'tensor', which shard the heads of a transformer, and {cls} is a "
        "UNet, whose weights are not "
        "sharded. Give these ranks to 'ulysses' or 'ring', which shard the rows of its images, or to 'batch'.",
        ValueError,
    ),
    CompatibilityRule(
        "stages of a model whose blocks pass on more than tokens",
        (When.PARALLELIZE,),
        no_stages,
        "{cls} cannot run in stages: {reason}. Use a mesh without 'pipe' (max_pipe_dim_size); weights='fsdp' shards "
        "any model.",
        TypeError,
    ),
    CompatibilityRule(
        "stages of weights that are moved or sharded otherwise",
        (When.PARALLELIZE,),
        placed_stages,
        "{name} {placed}, and a stage frees the blocks of other stages. Call {undo} before parallelize_pipe(pipe, "
        "mesh=mesh), or use a mesh "
        "without 'pipe'.",
        ValueError,
    ),
    CompatibilityRule(
        "stages in one graph",
        (When.PARALLEL_CALL,),
        compiled_stages,
        "{name} was compiled as one graph, and a graph cannot wait for another stage. Use it uncompiled, and compile "
        "its blocks: "
        "transformer.compile_repeated_blocks(fullgraph=True).",
    ),
    CompatibilityRule(
        "PipeFusion in one graph",
        (When.PARALLEL_CALL,),
        compiled_fusion,
        "{name} runs under PipeFusion, and was compiled as one graph, which cannot return patch by patch. Use it "
        "uncompiled, and compile "
        "its blocks: transformer.compile_repeated_blocks(fullgraph=True).",
    ),
    CompatibilityRule(
        "a cache that stages do not support",
        (When.CACHED_CALL,),
        uncached_stages,
        "{name} runs in stages, and cannot be cached with these options: {reason}. Use a mesh without 'pipe' (and no "
        "pipefusion=), other options, or "
        "remove_cache_from_pipe(pipe).",
    ),
    CompatibilityRule(
        "weights sharded over ranks that may run different blocks",
        (When.PARALLEL_CALL, When.CACHED_CALL),
        shared_beyond_sequence,
        "{name} has its weights sharded over {shared} ranks, and its sequence over {sequence}. The other ranks have "
        "{reason}, so they may run "
        "other blocks, and ranks would wait for each other. Shard weights over the sequence ranks: "
        "shard_weights(pipe, mesh) with the mesh of "
        "parallelize_pipe.",
    ),
    CompatibilityRule(
        "a cache in one graph over sharded weights",
        (When.CACHED_CALL,),
        cached_in_one_graph,
        "{name} is compiled as one graph, with a cache, and its weights are sharded (weights={method!r}). The "
        "branches of torch.cond support "
        "neither hooks of FSDP2 nor DTensors. Compile its blocks instead: "
        "{name}.compile_repeated_blocks(fullgraph=True); or leave out one "
        "of the three.",
    ),
    CompatibilityRule(
        "one graph over weights that FSDP2 shards",
        (When.PARALLEL_CALL,),
        sharded_without_breaks,
        "{name} is compiled with fullgraph=True, and its weights are sharded (weights='fsdp'). FSDP2 gathers the "
        "weights of each "
        "block in a hook, where the graph breaks. Compile its blocks instead: "
        "{name}.compile_repeated_blocks(fullgraph=True); or leave "
        "fullgraph=True out.",
    ),
    CompatibilityRule(
        "weights that were quantized after FSDP2 sharded them",
        (When.PARALLEL_CALL, When.CACHED_CALL),
        changed_since_sharded,
        "{at} of {name} became a {kind} after FSDP2 sharded its weights, and FSDP2 would restore the old weight. Load "
        "the pipeline again, and "
        "quantize before sharding (int8_weight_only_quantized_training()), or after weights='tensor'.",
    ),
    CompatibilityRule(
        "diffusers' own parallelism",
        (When.PARALLELIZE,),
        lambda case: config_of_diffusers(case.module) is not None and tensors_of_diffusers(case.module) is None,
        "the transformer already runs under diffusers' own enable_parallelism(config=...). Use one of the two: load "
        "it without parallel_config, and call parallelize_pipe(pipe, mesh=...) alone.",
        ValueError,
    ),
    CompatibilityRule(
        "perturbed attention over joint tokens",
        (When.PARALLELIZE,),
        perturbed_joint_attention,
        "{owner} is not supported: its perturbed attention masks image tokens by their number, which is that of one "
        "rank. Use the pipeline without perturbed attention. Supported are {supported}.",
        TypeError,
    ),
    CompatibilityRule(
        "another transformer than the one that was parallelized",
        (When.PARALLEL_CALL,),
        was_replaced,
        "{name} is another module than when the pipe was parallelized, and would run on one rank. Call "
        "parallelize_pipe(pipe, mesh=...) again.",
    ),
    CompatibilityRule(
        "another transformer than the one that was cached",
        (When.CACHED_CALL,),
        was_replaced,
        "{name} is another module than when the cache was applied. Call apply_cache_on_pipe(pipe, ...) again.",
    ),
    CompatibilityRule(
        "a transformer whose plan was replaced or removed",
        (When.PARALLEL_CALL,),
        lambda case: bool(case.component) and applied_mesh(case.module) != case.applied,
        "{name} got another mesh, or was unparallelized, after the pipe was parallelized, perhaps through a pipe that "
        "shares it. "
        "Call parallelize_pipe(pipe, mesh=...) again, or unparallelize_pipe(pipe).",
    ),
    CompatibilityRule(
        "a compiled UNet",
        (When.PARALLEL_CALL,),
        compiled_unet,
        "{name} was compiled, and a compiled graph does not know the layout of the rows. Use it uncompiled, or "
        "unparallelize_pipe(pipe).",
    ),
    CompatibilityRule(
        "attention that does not call scaled_dot_product_attention",
        (When.PARALLEL_CALL,),
        unseen_attention,
        "{name} attends with diffusers' backend {backend!r} in {at!r}, which does not call "
        "scaled_dot_product_attention: "
        "each of {sequence_ranks} ranks would attend to its own tokens only. Switch to a native backend: "
        "{name}.set_attention_backend('native').",
    ),
    CompatibilityRule(
        "an attention processor that computes scores itself",
        (When.PARALLEL_CALL,),
        attention_by_scores,
        "{name} attends with the processor {processor} in {at!r}, which does not call scaled_dot_product_attention: "
        "each of "
        "{sequence_ranks} ranks would attend to its own tokens only. Set one that does: "
        "{name}.set_attn_processor(AttnProcessor2_0()), "
        "from diffusers.models.attention_processor.",
    ),
    CompatibilityRule(
        "a cache of diffusers",
        (When.PARALLEL_CALL,),
        cache_of_diffusers,
        "{name} has a cache of diffusers ({cache}), which decides per rank: ranks would skip different steps, and "
        "wait for each other. Call {name}.disable_cache(), and use apply_cache_on_pipe(pipe, ...), which decides for "
        "all ranks.",
    ),
    CompatibilityRule(
        "a hook of diffusers that may need tokens of other ranks",
        (When.PARALLEL_CALL,),
        unfit_hook,
        "{name} has diffusers' {hook} at {at!r}: {reason}.",
    ),
    CompatibilityRule(
        "a guider that adds such a hook",
        (When.PARALLEL_CALL,),
        unfit_guider,
        "pipe.guider is a {guider}: {reason}.",
    ),
)
