"""Pipeline stages of a diffusers transformer: each rank along ``pipe`` holds consecutive blocks and frees the
others.

:class:`~para_core.weights.stages.Stages` runs the blocks. Here is what diffusers needs: methods that would
move or save all weights, or cast single layers, raise. ``half()``, ``float()`` and the like work, if all
ranks call them. LoRAs are changed by :mod:`.staged_loras`.

Other methods see freed weights as tensors on the meta device. ``state_dict()`` returns them too, and cannot
raise, because diffusers and peft read its names and shapes while they load a LoRA: to save a model, load it
again.

``features.py`` finds :data:`FEATURE`. Tests: tests/weights/test_stages.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from para_core.adapters.adapter import Adapter
from para_core.adapters.denoisers import kind_of
from para_core.adapters.inspect.block_stack import stack_of, why_no_stages
from para_core.adapters.registry import adapter_for, transformers_of
from para_core.adapters.weights.feature import ChangeRequest, Feature, FeatureChange
from para_core.adapters.weights.one_way import load_again, one_way
from para_core.adapters.weights.sharded_component import is_distributed
from para_core.adapters.weights.staged_loras import agree_on_loras, wrappers_of_lora_methods
from para_core.cache.options import CacheOptions
from para_core.distributed.agree import together
from para_core.distributed.agreed_inputs import AgreeOnInputs
from para_core.distributed.mesh import PIPE_DIM, GuidedMesh
from para_core.instance.modules import is_compiled
from para_core.instance.private_class import original_class
from para_core.instance.record import empty_slots, fill_slot, fill_slots, slot_owner
from para_core.instance.slots import Slot
from para_core.weights.balance import split_by_cost
from para_core.weights.stack import stages_of
from para_core.weights.stages import Stages, check_freeable, free_other_blocks

# Methods of a model that save the weights of all blocks, move or cast them. The values complete the error
# message. PyTorch itself would raise in cpu() and cuda(), but only at the first freed weight, with others moved.
_REFUSED_METHODS = {
    **dict.fromkeys(("to", "cpu", "cuda"), "moving it"),
    "enable_group_offload": "offloading it",
    "enable_layerwise_casting": "casting its layers",
    "save_pretrained": "saving it",
    "save_lora_adapter": "saving its LoRA",
}
# Methods of a pipeline that would call the methods in _REFUSED_METHODS. The pipeline's own wrappers raise
# before other components are changed. The values complete the error message.
_REFUSED_METHODS_OF_PIPE = {
    "to": "moving it",
    "enable_model_cpu_offload": "offloading it",
    "enable_sequential_cpu_offload": "offloading it",
    "enable_group_offload": "offloading it",
    "save_pretrained": "saving it",
}


class StageChange(FeatureChange):
    """The change that runs one transformer in stages over the ``pipe`` dim of ``mesh``.

    LoRAs may be loaded, fused and unloaded before and after it; after it, all ranks of ``mesh`` must do so
    together.

    Its life: :func:`changes_for_stages` has checked everything before the constructor. :meth:`apply` installs
    the stages, and :meth:`undo` can remove them until :meth:`complete` frees the other blocks, after all
    other changes of a ``parallelize_pipe`` have succeeded. From then on nothing undoes it, and
    ``requires_grad`` is False for all parameters of the transformer. A later ``parallelize_pipe`` makes a new
    StageChange for the same transformer, which keeps the ranges of the earlier one.

    Args:
        owner: The pipeline, or the transformer itself.
        module: The transformer, not compiled.
        mesh: All ranks of the pipeline; the stages are its dim ``pipe``.
        agree_on_inputs: Called with the named arguments of each call of the model; raises if ranks differ.
        adapter: The adapter that the user passed; None without one.
    """

    name = "the stages"

    def __init__(
        self,
        owner: Any,
        module: nn.Module,
        mesh: GuidedMesh,
        agree_on_inputs: AgreeOnInputs | None,
        adapter: Adapter | None = None,
    ) -> None:
        self._owner, self._module, self._mesh, self.adapter = owner, module, mesh, adapter
        self._agree_on_inputs = agree_on_inputs
        self._stages: Stages | None = None
        # Whether an earlier call of parallelize_pipe has freed the blocks of other stages already. Read here,
        # because complete must not count what this change frees itself.
        self._was_split = has_freed_blocks(module)

    def apply(self) -> None:
        """Install the stages. Collective. Frees no weights: see :meth:`complete`."""
        module, mesh = self._module, self._mesh
        # What follows communicates, so a rank that fails before it must tell the others here.
        with together(mesh, "stages could not be made"):
            blocks = stack_of(module, self.adapter)
        agree_on_loras(module, mesh)
        # If blocks are freed already, keep their ranges: a freed block has no weights to compute with, and
        # the costs by which ranges are balanced may have changed with a LoRA.
        earlier = stages_of(module)
        ranges = None if earlier is None else earlier.ranges
        stages = self._stages = Stages(module, blocks, mesh.pipe, self._agree_on_inputs, ranges)
        stages.install()
        refused = _wrappers_that_raise(_REFUSED_METHODS, module, _raise_on_freed_blocks)
        loras = wrappers_of_lora_methods(stages, mesh)
        fill_slot(module, Slot.STAGED_WEIGHTS, {**refused, **loras}, owner=self)
        # diffusers' group offload moves single blocks and layers, so each layer must refuse to move.
        freed = [part for block in stages.other_blocks for part in block.modules()]
        fill_slots(freed, Slot.STAGED_WEIGHTS, {"to": partial(_raise_on_moved_layer, module)})
        if self._owner is not module:
            # The pipeline would change other components before the transformer raises.
            refused = _wrappers_that_raise(
                _REFUSED_METHODS_OF_PIPE, self._owner, _raise_on_freed_blocks_of_pipe
            )
            fill_slot(self._owner, Slot.STAGED_WEIGHTS, refused)

    def undo(self) -> None:
        """Remove the stages, unless weights are freed: without its stages the model would compute with none.

        The slots are then left filled. If a session fails, it restores them in any case, as
        :meth:`.FeatureChange.apply` says.
        """
        if self._stages is None or has_freed_blocks(self._module):
            return
        self._stages.remove()
        empty_slots([self._owner, *self._module.modules()], Slot.STAGED_WEIGHTS)

    def complete(self) -> None:
        """Free the weights of the blocks of other stages. Collective, unless an earlier call has freed them."""
        if self._stages is None or self._was_split:
            return
        with one_way(self._owner, [self._module], self._mesh, "freeing the blocks of other stages"):
            free_other_blocks(self._stages)

    @contextmanager
    def generation(self, pipe: Any, kwargs: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Synchronise the links between stages, and skip the comparison of inputs in each call of the model.

        The pipeline has compared its arguments, so the inputs of its model are equal. Collective.
        """
        if self._stages is None:
            yield kwargs
            return
        with self._stages.generation():
            yield kwargs


def _wrappers_that_raise(
    actions: Mapping[str, str], instance: Any, wrapper: Callable[..., Any]
) -> dict[str, Callable[..., Any]]:
    """Return a wrapper of each method in ``actions`` that ``instance`` has: ``wrapper`` with the action to name."""
    return {
        method: partial(wrapper, action) for method, action in actions.items() if hasattr(instance, method)
    }


def changes_for_stages(request: ChangeRequest) -> list[StageChange]:
    """Return the change for each transformer on a mesh with ``pipe``; none on other meshes.

    Raise ``ValueError`` if a transformer has fewer blocks than stages, or a weight that cannot be freed,
    ``TypeError`` if no adapter describes its blocks, and ``RuntimeError`` if it runs in other stages already.
    An earlier run in other stages that was undone has no stages any more, so those that are left have freed
    blocks.
    """
    mesh = request.mesh
    for module in request.transformers.values():
        _check_earlier_stages(request.owner, module, mesh)
        if mesh.pipe.size > 1:
            blocks = stack_of(module, request.adapter)
            check_freeable(module, blocks)
            # Called for its error: there are fewer blocks than stages.
            split_by_cost([entry.cost for entry in blocks], mesh.pipe.size)
    if mesh.pipe.size == 1:
        return []
    return [
        StageChange(request.owner, module, mesh, request.agree_on_inputs(module), request.adapter)
        for module in request.transformers.values()
    ]


def has_freed_blocks(module: nn.Module) -> bool:
    """Whether ``module`` runs in stages, and a block of another stage is on the meta device, so it is freed."""
    stages = stages_of(module)
    return stages is not None and any(x.is_meta for block in stages.other_blocks for x in block.parameters())


def _check_earlier_stages(owner: Any, module: nn.Module, mesh: GuidedMesh) -> None:
    """Raise ``RuntimeError`` if ``module`` runs in stages, and this rank would be another one on ``mesh``."""
    stages = stages_of(module)
    if stages is None or (stages.dim.size, stages.dim.index) == (mesh.pipe.size, mesh.pipe.index):
        return
    raise RuntimeError(
        f"this {original_class(module).__name__} runs in {stages.dim.size} stages, this rank is stage "
        f"{stages.dim.index}, and the blocks of the others are freed; on this mesh it would be stage "
        f"{mesh.pipe.index} of {mesh.pipe.size}. {load_again(owner)} Or pass a mesh with the same 'pipe'."
    )


def _raise_on_freed_blocks(
    action: str, call: object, module: nn.Module, /, *args: object, **kwargs: object
) -> None:
    """Raise ``RuntimeError`` in place of ``call``. ``action`` names what ``call`` does, such as ``"moving it"``."""
    raise RuntimeError(
        f"this {original_class(module).__name__} runs in stages, and this rank holds only the blocks of its stage: "
        f"{action} would leave out the others. {load_again(module)} Do it before parallelize_pipe(pipe, mesh=mesh)."
    )


def _raise_on_moved_layer(
    staged: nn.Module, call: object, layer: nn.Module, /, *args: object, **kwargs: object
) -> None:
    _raise_on_freed_blocks("moving a layer of it", call, staged)


def _raise_on_freed_blocks_of_pipe(
    action: str, call: Callable[..., Any], pipe: Any, /, *args: Any, **kwargs: Any
) -> Any:
    """Raise ``RuntimeError`` in place of a method of the pipeline if one of its transformers runs in stages."""
    staged = [module for module in transformers_of(pipe).values() if stages_of(module) is not None]
    if staged:
        _raise_on_freed_blocks(action, call, staged[0])
    return call(pipe, *args, **kwargs)


def check_has_stages(module: nn.Module, name: str, mesh: GuidedMesh, adapter: Adapter | None) -> None:
    """Refuse stages for a model whose blocks cannot be distributed over them."""
    if mesh.pipe.size == 1:
        return
    kind = kind_of(module)
    reason = why_no_stages(module, adapter) if kind is None else kind.why_no_stages
    if reason is not None:
        raise TypeError(
            f"{original_class(module).__name__} cannot run in stages: {reason}. Use a mesh without 'pipe' "
            "(max_pipe_dim_size); weights='fsdp' shards any model."
        )


def check_moved_weights(module: nn.Module, name: str, mesh: GuidedMesh, adapter: Adapter | None) -> None:
    """Refuse stages for weights that accelerate moves."""
    if mesh.pipe.size > 1 and any(hasattr(part, "_hf_hook") for part in module.modules()):
        raise ValueError(
            f"{name} is moved by a hook of accelerate, and a stage frees the blocks of other stages. Call "
            "pipe.remove_all_hooks() before parallelize_pipe(pipe, mesh=mesh), or use a mesh without 'pipe'."
        )


def check_sharded_weights(module: nn.Module, name: str, mesh: GuidedMesh, adapter: Adapter | None) -> None:
    """Refuse stages for weights that are sharded."""
    if mesh.pipe.size > 1 and is_distributed(module):
        raise RuntimeError(
            f"{name} has its weights sharded, a stage holds all weights of its own blocks, and nothing "
            "gathers them again. Load the pipeline again (from_pretrained), and shard none of it; or use a "
            "mesh without 'pipe'."
        )


def check_compiled_stages(module: nn.Module, name: str, called: Any, mesh: GuidedMesh) -> None:
    """Refuse stages for a transformer that is compiled as one graph."""
    if stages_of(module) is not None and (called is not module or is_compiled(module)):
        raise RuntimeError(
            f"{name} was compiled as one graph, and a graph cannot wait for another stage. Use it "
            "uncompiled, and compile its blocks: transformer.compile_repeated_blocks(fullgraph=True)."
        )


def check_cache_on_stages(module: nn.Module, name: str, called: Any, options: CacheOptions) -> None:
    """Refuse a cache whose options do not work in stages."""
    stages = stages_of(module)
    if stages is None:
        return
    change = slot_owner(module, Slot.STAGED_WEIGHTS, StageChange)
    adapter = adapter_for(module, None if change is None else change.adapter)
    if adapter is None or adapter.blocks is None:
        return
    # The first blocks may cross a stage, because the output of the last of them is sent to all stages. That
    # of the last skipped block is not sent, so the last stage, which forecasts it, must compute it itself.
    num_last = len(stages.ranges[-1])
    if len(adapter.blocks.groups) > 1:
        reason = "it has two block groups, and the residual of the first is on another stage"
    elif options.decides_before_blocks:
        reason = "its rule reads weights of the first block, which only the first stage has"
    elif options.last_blocks >= num_last:
        reason = f"last_blocks={options.last_blocks} always run, and the last stage has {num_last} blocks"
    else:
        return
    raise RuntimeError(
        f"{name} runs in stages, and cannot be cached with these options: {reason}. Use other options, or "
        "remove_cache_from_pipe(pipe); or load the pipeline again, for a mesh without 'pipe'."
    )


FEATURE = Feature(
    mesh_dim=PIPE_DIM,
    changes=changes_for_stages,
    has_freed=has_freed_blocks,
    parallelize_checks=(check_has_stages, check_moved_weights, check_sharded_weights),
    call_checks=(check_compiled_stages,),
    cached_call_checks=(check_cache_on_stages,),
)
