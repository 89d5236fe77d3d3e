"""Keep transformer blocks in host memory; each is copied to the device while the block before it runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from itertools import chain, pairwise
from typing import Any

import torch
from torch import nn

from para_core.adapters.inspect.components import stack_of
from para_core.adapters.weights.offloaded_modules import execution_device, require_not_offloaded
from para_core.adapters.weights.sharded_component import is_distributed
from para_core.distributed.mesh import GuidedMesh
from para_core.instance.modules import uncompiled
from para_core.instance.private_class import original_class
from para_core.instance.record import empty_slot, fill_slot, fill_slots
from para_core.instance.slots import Slot
from para_core.weights.parameters import plain_tensors

logger = logging.getLogger(__name__)


def num_resident(given: int | None) -> int:
    """Return the number of first blocks that stay on the device, for the option ``resident_blocks``: by default 1."""
    return 1 if given is None else given


class OffloadedBlocks:
    """Transformer blocks whose weights are in host memory, moved by diffusers' group-offload code.

    The first ``resident`` blocks of each transformer, and all weights outside of its block stack, stay on the device of
    ``mesh``. Each other block is copied to the device before it runs, and its copy is freed afterwards. On CUDA the
    copies come from pinned memory, and the next block is copied while one runs. Between two calls of a transformer all
    of these blocks are in host memory, so code that changes weights in place then changes the stored weights.

    The hooks of diffusers are not used, for two reasons: they would be inside a compiled block and break its graph, and
    they would copy blocks that a cache skips.
    """

    def __init__(self, transformers: Mapping[str, nn.Module], mesh: GuidedMesh, resident: int) -> None:
        self.transformers, self.mesh, self.resident = dict(transformers), mesh, resident
        self._undo = ExitStack()
        self._blocks: dict[nn.Module, HostBlock] = {}
        self._stream: Any = None

    def apply(self) -> None:
        """Offload the blocks. Raise ``ValueError`` if they are offloaded or sharded. A failure changes nothing."""
        require_not_offloaded(self.transformers, "Leave offload out.")
        for name, module in self.transformers.items():
            if is_distributed(module):
                raise ValueError(
                    f"pipe.{name} is sharded already. Leave offload out, or call unshard_weights(pipe) first."
                )
        device = execution_device(self.mesh)
        stream = self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        with ExitStack() as rollback:
            rollback.callback(self._blocks.clear)
            for name, module in self.transformers.items():
                blocks = offloaded_blocks(module, self.resident)
                rollback.callback(module.to, next(module.parameters()).device)
                for wrapped in (module, *blocks):
                    rollback.callback(empty_slot, wrapped, Slot.OFFLOADED_BLOCK)
                module_blocks = [HostBlock(block, device, stream) for block in blocks]
                for block, following in pairwise(module_blocks):
                    block.following = following
                _move_others(module, set(blocks), device)
                self._blocks |= dict(zip(blocks, module_blocks, strict=True))
                fill_slot(module, Slot.OFFLOADED_BLOCK, {"__call__": self._run_model})
                fill_slots(blocks, Slot.OFFLOADED_BLOCK, {"__call__": self._run})
                size = sum(x.nbytes for block in blocks for x in block.parameters())
                logger.info("%d blocks of pipe.%s, %.1f GB, are in host memory", len(blocks), name, size / 1e9)
            self._undo = rollback.pop_all()

    def remove(self) -> None:
        """Remove the offload, and move the weights back to the devices on which they were."""
        self._undo.close()

    def _run(self, call: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            raise RuntimeError(
                "offload='blocks' copies weights between two blocks, so the transformer cannot be one graph. Compile "
                "its blocks: transformer.compile_repeated_blocks(fullgraph=True)."
            )
        block = self._blocks[module]
        block.load()
        if block.following is not None:
            block.following.load()
        block.wait()
        try:
            return call(module, *args, **kwargs)
        finally:
            block.free()

    def _run_model(self, call: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        try:
            return call(module, *args, **kwargs)
        finally:
            # A block that was copied ahead has not run if a cache skipped it or the block before it raised.
            for block in self._blocks.values():
                block.free()
            if self._stream is not None:
                # The caller may now change the weights in host memory, so wait for the last copy from there.
                self._stream.synchronize()


class HostBlock:
    """One block, or another module, in host memory, and its copy on the device while there is one."""

    def __init__(self, module: nn.Module, device: torch.device, stream: Any) -> None:
        self.module, self.device, self.stream = module, device, stream
        self.following: HostBlock | None = None
        self._is_loaded = False
        self._state: list[tuple[int, int]] = []
        self._offload()

    def load(self) -> None:
        """Start to copy the block to the device, unless the block is there already."""
        if self._state != self._current_state():
            # Tensors of the block were replaced after the last offload: a LoRA was added or fused, or weights were
            # moved, quantized or loaded. Offload the new ones.
            self._offload()
        if not self._is_loaded:
            self._group.onload_()
            self._is_loaded = True
            self._state = self._current_state()

    def wait(self) -> None:
        """Make kernels that are launched from now on wait until the block is on the device. Does not block the host."""
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)

    def free(self) -> None:
        """Free the copy of the block on the device, if there is one."""
        # If tensors were replaced while the block ran, the next load() offloads the new ones.
        if self._is_loaded and self._state == self._current_state():
            self._group.offload_()
            self._state = self._current_state()
        self._is_loaded = False

    def _offload(self) -> None:
        # Import here, so that this module can be imported without diffusers.
        from diffusers.hooks.group_offloading import ModuleGroup

        host = torch.device("cpu")
        self.module.to(host)
        self._group = ModuleGroup(
            [self.module],
            offload_device=host,
            onload_device=self.device,
            offload_leader=self.module,
            # With a stream, diffusers would leave the copies of buffers that are not named here on the device.
            buffers=list(self.module.buffers()),
            stream=self.stream,
            record_stream=self.stream is not None,
        )
        self._group.offload_()
        self._is_loaded = False
        self._state = self._current_state()

    def _current_state(self) -> list[tuple[int, int]]:
        """Return ids and memory addresses of the block's tensors. They change if other code replaces a tensor."""
        tensors = chain(self.module.parameters(), self.module.buffers())
        return [(id(x), part.data_ptr()) for x in tensors for part in plain_tensors(x)]


def offloaded_blocks(transformer: nn.Module, resident: int) -> list[nn.Module]:
    """Return the blocks of ``transformer`` without the first ``resident`` ones, in the order in which they run.

    Raises ``TypeError`` if no adapter describes the blocks, and ``ValueError`` if no block is left.
    """
    blocks = [uncompiled(entry.block) for entry in stack_of(transformer)]
    if len(blocks) <= resident:
        raise ValueError(
            f"resident_blocks is {resident}, and {original_class(transformer).__name__} has {len(blocks)} blocks; "
            "expected fewer than it has, or leave offload out."
        )
    return blocks[resident:]


def _move_others(module: nn.Module, blocks: set[nn.Module], device: torch.device) -> None:
    """Move all parameters and buffers of ``module`` that are not in ``blocks`` to ``device``."""
    for parent in [part for part in module.modules() if part not in blocks and not blocks.isdisjoint(part.modules())]:
        for child in parent.children():
            if child not in blocks and blocks.isdisjoint(child.modules()):
                child.to(device)
        for x in chain(parent.parameters(recurse=False), parent.buffers(recurse=False)):
            x.data = x.data.to(device)
