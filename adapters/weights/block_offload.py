"""Keep transformer blocks in host memory; each is copied to the device while the block before it runs.

This is ``offload="blocks"`` of parallelize_pipe, found through ``features.py``. How one block is moved is in
``host_block.py``; offloads of whole components are in ``offloaded_modules.py``. Tests:
tests/weights/test_placement.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from itertools import chain, pairwise
from typing import Any

import torch
from torch import nn

from para_core.adapters.adapter import Adapter
from para_core.adapters.inspect.block_stack import stack_of
from para_core.adapters.weights.feature import ChangeRequest, Feature, FeatureChange
from para_core.adapters.weights.features import shard_methods
from para_core.adapters.weights.host_block import HostBlock
from para_core.adapters.weights.offloaded_modules import Offloader, check_not_offloaded, execution_device
from para_core.adapters.weights.one_way import load_again
from para_core.adapters.weights.sharded_component import is_distributed
from para_core.distributed.mesh import GuidedMesh
from para_core.instance.modules import uncompiled
from para_core.instance.private_class import original_class
from para_core.instance.record import empty_slots, fill_slot, fill_slots
from para_core.instance.slots import Slot
from para_core.option_values import num_resident

logger = logging.getLogger(__name__)


class OffloadedBlocks(FeatureChange):
    """Transformer blocks whose weights are in host memory, moved by diffusers' group-offload code.

    The first ``resident`` blocks of each transformer, and all weights outside of its block stack, stay on the
    device of ``mesh``. Each other block is copied to the device before it runs, and its copy is freed
    afterwards. On CUDA the copies come from pinned memory, and the next block is copied while one runs.
    Between two calls of a transformer all of these blocks are in host memory, so code that changes weights in
    place there (a LoRA that is fused) changes the stored weights.

    The host waits for copies, but not for kernels: if blocks take longer to compute than to copy, the memory
    of several freed blocks is still in use, unless the allocator needs it and waits. ``planner/weights.py``
    counts two blocks.

    The hooks of diffusers are not used, for two reasons: they would be inside a compiled block and break its
    graph, and they would copy blocks that a cache skips.
    """

    name = "offloading the blocks"
    offloader = Offloader(
        "offload='blocks' of parallelize_pipe", "unparallelize_pipe(pipe), with the pipeline of that call"
    )

    def __init__(
        self,
        transformers: Mapping[str, nn.Module],
        mesh: GuidedMesh,
        resident: int,
        adapter: Adapter | None = None,
    ) -> None:
        self.transformers, self.mesh, self.resident = dict(transformers), mesh, resident
        # The adapter that the user passed; None without one.
        self._adapter = adapter
        # The offloaded blocks of all transformers; empty while nothing is offloaded.
        self._blocks: dict[nn.Module, HostBlock] = {}
        # The device on which each transformer was before, to which :meth:`undo` moves it back.
        self._devices: dict[nn.Module, torch.device] = {}
        self._stream: Any = None

    def apply(self) -> None:
        """Offload the blocks. Raise ``ValueError`` if other code has offloaded them.

        A failure changes nothing.
        """
        check_not_offloaded(self.transformers, "Leave offload out.")
        device = execution_device(self.mesh)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        try:
            for name, module in self.transformers.items():
                self._offload(name, module, device)
        except BaseException:
            self.undo()
            raise

    def _offload(self, name: str, module: nn.Module, device: torch.device) -> None:
        """Offload the blocks of ``module``, the component ``name``, and move its other weights to ``device``."""
        blocks = _blocks_to_offload(module, self.resident, self._adapter)
        self._devices[module] = next(module.parameters()).device
        host_blocks = [HostBlock(block, device, self._stream) for block in blocks]
        for host_block, following in pairwise(host_blocks):
            host_block.following = following
        _move_others(module, set(blocks), device)
        self._blocks |= dict(zip(blocks, host_blocks, strict=True))
        fill_slot(module, Slot.OFFLOADED_BLOCK, {"__call__": self._run_model}, owner=self)
        fill_slots(blocks, Slot.OFFLOADED_BLOCK, {"__call__": self._run})
        num_bytes = sum(x.nbytes for block in blocks for x in block.parameters())
        logger.info("%d blocks of pipe.%s, %.1f GB, are in host memory", len(blocks), name, num_bytes / 1e9)

    def undo(self) -> None:
        """Remove the offload, and move the weights back to the devices on which they were."""
        empty_slots([*self._devices, *self._blocks], Slot.OFFLOADED_BLOCK)
        for module, device in self._devices.items():
            module.to(device)
        self._devices.clear()
        self._blocks.clear()

    def resume(self) -> None:
        self.apply()

    def _run(self, call: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """Run one block with its weights on the device, and begin to copy the block after it."""
        if torch.compiler.is_compiling():
            raise RuntimeError(
                "offload='blocks' copies weights between two blocks, so the transformer cannot be one "
                "graph. Compile its blocks: transformer.compile_repeated_blocks(fullgraph=True)."
            )
        block = self._blocks[module]
        block.load()
        # Before the next copy starts: to wait for the stream after that would be to wait for that copy, too.
        block.wait()
        if block.following is not None:
            block.following.load()
        try:
            return call(module, *args, **kwargs)
        finally:
            block.free()

    def _run_model(self, call: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """Run a call of the transformer, after which no block is on the device."""
        try:
            return call(module, *args, **kwargs)
        finally:
            # A block that was copied ahead has not run if a cache skipped it or the block before it raised.
            for block in self._blocks.values():
                block.free()
            if self._stream is not None:
                # The caller may now change the weights in host memory, so wait for the last copy from there.
                self._stream.synchronize()


def changes_for_block_offload(request: ChangeRequest) -> list[OffloadedBlocks]:
    """Return the change that the option ``offload`` asks for; none without it.

    Raise ``ValueError`` if the other options give each rank a part of the weights, or a transformer has too
    few blocks, ``TypeError`` if no adapter describes its blocks, and ``RuntimeError`` if its weights are
    sharded already.
    """
    if request.options.get("offload") is None:
        return []
    _check_other_options(request)
    resident = num_resident(request.options.get("resident_blocks"))
    for name, module in request.transformers.items():
        if is_distributed(module):
            raise RuntimeError(
                f"pipe.{name} is sharded already, and nothing gathers its weights again. Leave offload out, "
                f"or do not shard it: {load_again(request.owner)}"
            )
        _blocks_to_offload(module, resident, request.adapter)
    return [OffloadedBlocks(request.transformers, request.mesh, resident, request.adapter)]


def _check_other_options(request: ChangeRequest) -> None:
    """Raise ``ValueError`` if each rank will hold a part of the weights."""
    mesh, weights = request.mesh, request.options.get("weights")
    if mesh.ranks == 1:
        return
    other = None
    if mesh.pipe.size > 1:
        other = f"{mesh.pipe.size} stages"
    if weights in shard_methods():
        other = f"weights={weights!r}"
    if other is not None:
        raise ValueError(
            f"offload='blocks' with {other}: a rank holds a part of the weights, which group offload of "
            "diffusers cannot move. Leave one out; shard_weights(pipe, mesh, "
            "offload_policy=CPUOffloadPolicy()) keeps each rank's part in host memory."
        )


def _blocks_to_offload(transformer: nn.Module, resident: int, adapter: Adapter | None) -> list[nn.Module]:
    """Return the blocks of ``transformer`` without the first ``resident`` ones, in the order in which they
    run. ``adapter`` is the one that the user passed.

    Raises ``TypeError`` if no adapter describes the blocks, and ``ValueError`` if no block is left.
    """
    blocks = [uncompiled(entry.block) for entry in stack_of(transformer, adapter)]
    if len(blocks) <= resident:
        raise ValueError(
            f"resident_blocks is {resident}, and {original_class(transformer).__name__} has {len(blocks)} "
            "blocks; expected fewer than it has, or leave offload out."
        )
    return blocks[resident:]


def _move_others(module: nn.Module, blocks: set[nn.Module], device: torch.device) -> None:
    """Move all parameters and buffers of ``module`` that are not in ``blocks`` to ``device``."""
    # The modules that contain a block cannot be moved whole, so their children and own tensors are.
    parents = [
        part for part in module.modules() if part not in blocks and not blocks.isdisjoint(part.modules())
    ]
    for parent in parents:
        for child in parent.children():
            if child not in blocks and blocks.isdisjoint(child.modules()):
                child.to(device)
        for x in chain(parent.parameters(recurse=False), parent.buffers(recurse=False)):
            x.data = x.data.to(device)


FEATURE = Feature(option="offload", changes=changes_for_block_offload)
