"""Run a diffusers transformer in pipeline stages, and keep LoRAs working while the blocks of other stages are freed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from para_core.adapters.adapter import Adapter
from para_core.adapters.agree.arguments import require_equal as require_equal_values
from para_core.adapters.agree.loras import described_model, lora_weights
from para_core.adapters.denoisers import kind_of
from para_core.adapters.inspect.components import stack_of, why_no_stages
from para_core.adapters.registry import adapter_for, transformers_of
from para_core.adapters.weights.lora import ADDS, CHANGES, on_all_ranks, require_equal_lora, require_own_values
from para_core.adapters.weights.sharded_component import is_distributed
from para_core.cache.options import CacheOptions
from para_core.distributed.agree import Record, RequireEqual, differing_fields, raising_on_all
from para_core.distributed.mesh import GuidedMesh, MeshDim
from para_core.instance.modules import is_compiled, submodules_of
from para_core.instance.private_class import original_class
from para_core.instance.record import empty_slot, empty_slots, fill_slot, fill_slots, is_filled
from para_core.instance.slots import Slot
from para_core.weights.balance import balanced
from para_core.weights.parameters import stand_ins, weights_of
from para_core.weights.pipefusion import fusion_of
from para_core.weights.stages import Stages, free_others, gather_stages, others, require_sendable, stages_of

# Methods of a model that need the weights of all blocks, or would move them. The values complete the error message.
_TOO_LATE = {
    "to": "moving it",
    "enable_group_offload": "offloading it",
    "enable_layerwise_casting": "casting its layers",
    "save_pretrained": "saving it",
    "save_lora_adapter": "saving its LoRA",
}
# Methods of a pipeline that would call the methods in _TOO_LATE. The pipeline's own wrappers raise before other
# components are changed. The values complete the error message.
_TOO_LATE_FOR_PIPE = {
    "to": "moving it",
    "enable_model_cpu_offload": "offloading it",
    "enable_sequential_cpu_offload": "offloading it",
    "enable_group_offload": "offloading it",
    "save_pretrained": "saving it",
}


def hold_stage(
    module: nn.Module, mesh: GuidedMesh, adapter: Adapter | None = None, require_equal: RequireEqual | None = None
) -> None:
    """Run a transformer in stages over the ``pipe`` dim of ``mesh``. Collective. Frees no weights: see
    :func:`free_other_stages`.

    LoRAs may be loaded, fused and unloaded before and after this call; after it, all ranks of ``mesh`` must do so
    together. ``require_equal`` is called with the named arguments of each call of the model; it raises if ranks differ.
    """
    # Creating the stages communicates, so a rank that fails before must tell the others here.
    with raising_on_all(mesh, "stages could not be made"):
        blocks = stack_of(module, adapter)

    def explain(records: list[Record]) -> str:
        return (
            "the ranks of one mesh must call parallelize_pipe with equal models. "
            f"{'; '.join(differing_fields(records))}. Load the same LoRAs on all ranks before it."
        )

    # Compare LoRAs while every rank has all of their weights.
    require_equal_values(
        partial(described_model, "transformer", module), mesh, "parallelize_pipe", lambda: None, explain
    )
    stages = Stages(module, blocks, mesh.pipe, require_equal)
    stages.install()
    late = {name: partial(_too_late, what) for name, what in _TOO_LATE.items() if hasattr(module, name)}
    # diffusers' group offload moves single blocks and layers, so each layer must refuse to move.
    elsewhere = [part for block in others(stages) for part in block.modules()]
    fill_slots(elsewhere, Slot.STAGED_WEIGHTS, {"to": partial(_too_late_inside, module)})
    for method in CHANGES:
        if hasattr(module, method):
            change = _add_lora if method in ADDS else _change_lora
            late[method] = partial(change, stages, mesh)
    fill_slot(module, Slot.STAGED_WEIGHTS, late)


def free_other_stages(module: nn.Module) -> None:
    """Free the weights of the blocks of other stages. Does nothing if ``module`` has no stages.

    Every rank must have returned from :func:`hold_stage` before any rank calls this function.
    """
    stages = stages_of(module)
    if stages is not None:
        free_others(stages)


def refuse_late_on_pipe(pipe: Any) -> None:
    """Wrap methods of ``pipe`` such as ``to``, so that they raise while it has a staged transformer.

    The transformer refuses them too, but only after other components have been changed.
    """
    late = {name: partial(_too_late_for_pipe, what) for name, what in _TOO_LATE_FOR_PIPE.items() if hasattr(pipe, name)}
    fill_slot(pipe, Slot.STAGED_WEIGHTS, late)


def release_pipe(pipe: Any) -> None:
    """Undo :func:`refuse_late_on_pipe`."""
    empty_slot(pipe, Slot.STAGED_WEIGHTS)


def release_stage(module: nn.Module) -> None:
    """Undo :func:`hold_stage`: every rank holds all blocks again. A collective call; does nothing without stages."""
    gather_stages(module)
    if is_filled(module, Slot.STAGED_WEIGHTS):
        # The module itself comes last, so that a second call after a failure finds its slot filled and empties the
        # rest.
        empty_slots(reversed(submodules_of(module)), Slot.STAGED_WEIGHTS)


def suspend_stage(module: nn.Module) -> Callable[[], None]:
    """Call :func:`release_stage`. Return a function that installs the stages, but not the wrappers of methods."""
    stages = stages_of(module)
    release_stage(module)

    def resume() -> None:
        if stages is not None:
            stages.install()
            free_others(stages)

    return resume


def require_stages_fit(module: nn.Module, dim: MeshDim, adapter: Adapter | None = None) -> None:
    """Raise ``ValueError`` if ``module`` has fewer blocks than stages, or a weight that ranks cannot send."""
    blocks = stack_of(module, adapter)
    require_sendable(module, blocks)
    balanced([block.cost for block in blocks], dim.size)


def _too_late(what: str, call: object, module: nn.Module, /, *args: object, **kwargs: object) -> None:
    raise RuntimeError(
        f"this {original_class(module).__name__} runs in stages, and holds its own blocks alone: {what} would leave "
        "out the others. "
        "Do it before parallelize_pipe(pipe, mesh=mesh); unparallelize_pipe(pipe), on all ranks, gives all blocks back."
    )


def _too_late_inside(staged: nn.Module, call: object, part: nn.Module, /, *args: object, **kwargs: object) -> None:
    _too_late("moving a layer of it", call, staged)


def _too_late_for_pipe(what: str, call: Callable[..., Any], pipe: Any, /, *args: Any, **kwargs: Any) -> Any:
    staged = [module for module in transformers_of(pipe).values() if stages_of(module) is not None]
    if staged:
        _too_late(what, call, staged[0])
    return call(pipe, *args, **kwargs)


def _change_lora(
    stages: Stages, mesh: GuidedMesh, call: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any
) -> Any:
    """Run ``call``, a method of ``module`` that changes loaded LoRAs.

    Weights of other stages' blocks are on the meta device, so peft must not read their values.
    """
    layers = [layer for block in others(stages) for layer in block.modules() if hasattr(layer, "adapter_layer_names")]
    with on_all_ranks(mesh):
        try:
            fill_slots(layers, Slot.STAGED_MERGE, {"merge": _merge_unseen})
            return call(module, *args, **kwargs)
        finally:
            empty_slots(layers, Slot.STAGED_MERGE)


def _merge_unseen(call: Callable[..., Any], layer: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Merge a LoRA into a layer whose weights are freed, without peft's check for NaN, which would read them."""
    bound = inspect.signature(call).bind(layer, *args, **kwargs)
    bound.arguments["safe_merge"] = False
    return call(*bound.args, **bound.kwargs)


def _add_lora(
    stages: Stages, mesh: GuidedMesh, call: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any
) -> Any:
    """Add a LoRA to all blocks, then free its weights in the blocks of other stages.

    During the call zeros on this rank's device replace these blocks' weights, because peft reads device and dtype.
    """
    with on_all_ranks(mesh):
        require_own_values(module, args, kwargs)
        require_equal_lora(mesh, args, kwargs)
        device = next(stages.blocks[stages.own.start].block.parameters()).device
        of_lora = {id(x) for x in lora_weights(module)}
        elsewhere = [weight for block in others(stages) for weight in weights_of(block)]
        try:
            with stand_ins(elsewhere, device, of_lora):
                added = call(module, *args, **kwargs)
                stages.gradients.forget()
                return added
        finally:
            free_others(stages)


def refuse_unchained_stages(module: nn.Module, adapter: Adapter | None) -> None:
    """Refuse stages for a model whose blocks pass more than tokens to the next block."""
    kind = kind_of(module)
    reason = why_no_stages(module, adapter) if kind is None else kind.why_no_stages
    if reason is not None:
        raise TypeError(
            f"{original_class(module).__name__} cannot run in stages: {reason}. Use a mesh without 'pipe' "
            "(max_pipe_dim_size); weights='fsdp' shards any model."
        )


def refuse_moved_stages(module: nn.Module, name: str, *, unshards: bool) -> None:
    """Refuse stages for weights that accelerate moves or that are sharded."""
    if any(hasattr(part, "_hf_hook") for part in module.modules()):
        problem, undo = "is moved by a hook of accelerate", "pipe.remove_all_hooks()"
    elif not unshards and is_distributed(module):
        problem, undo = "has its weights sharded", "unshard_weights(pipe)"
    else:
        return
    raise ValueError(
        f"{name} {problem}, and a stage frees the blocks of other stages. Call {undo} before parallelize_pipe(pipe, "
        "mesh=mesh), or use a mesh without 'pipe'."
    )


def refuse_compiled_stages(module: nn.Module, name: str, called: Any) -> None:
    """Refuse stages for a transformer that is compiled as one graph."""
    if stages_of(module) is not None and (called is not module or is_compiled(module)):
        raise RuntimeError(
            f"{name} was compiled as one graph, and a graph cannot wait for another stage. Use it uncompiled, and "
            "compile its blocks: transformer.compile_repeated_blocks(fullgraph=True)."
        )


def refuse_cache_on_stages(module: nn.Module, name: str, options: CacheOptions) -> None:
    """Refuse a cache whose options do not work in stages."""
    stages, adapter = stages_of(module), adapter_for(module)
    num_last = 0 if stages is None else len(stages.ranges[-1])
    if fusion_of(module) is not None:
        reason = "under PipeFusion a step computes patches with keys of the previous step, which must not be skipped"
    elif stages is None or adapter is None or adapter.blocks is None:
        return
    elif len(adapter.blocks.groups) > 1:
        reason = "it has two block groups, and the residual of the first is on another stage"
    elif options.decides_before_blocks:
        reason = "its rule reads weights of the first block, which only the first stage has"
    elif options.last_blocks >= num_last:
        reason = f"last_blocks={options.last_blocks} always run, and the last stage has {num_last} blocks"
    else:
        return
    raise RuntimeError(
        f"{name} runs in stages, and cannot be cached with these options: {reason}. Use a mesh without 'pipe' (and "
        "no pipefusion=), other options, or remove_cache_from_pipe(pipe)."
    )
