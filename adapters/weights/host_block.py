"""Modules in host memory that are copied to the device while they run, by diffusers' group-offload code.

``block_offload.py`` and ``vae_offload.py`` decide when each module is loaded and freed; here is only how.
Tests: tests/weights/test_placement.py.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import nn

from para_core.weights.parameters import plain_tensors


class HostBlock:
    """One block, or another module, in host memory, and its copy on the device while there is one.

    Args:
        module: The block. Making the object moves its weights to host memory.
        device: The device that computes.
        stream: The stream for copies, from ``torch.cuda.Stream``; None copies on the stream that computes.

    Attributes:
        following: The block that runs after this one, for a caller that copies it ahead.
    """

    def __init__(self, module: nn.Module, device: torch.device, stream: Any) -> None:
        self.module, self.device, self.stream = module, device, stream
        self.following: HostBlock | None = None
        self._is_loaded = False
        # The result of _current_state() after the last copy: if it differs now, other code has replaced a
        # tensor.
        self._state: list[tuple[int, int]] = []
        self._offload()

    def load(self) -> None:
        """Start to copy the block to the device, unless the block is there already.

        Call :meth:`wait` before the block runs.
        """
        if self._state != self._current_state():
            # Tensors of the block were replaced after the last offload: a LoRA was added or fused, weights
            # were moved, quantized or loaded, or the offload was undone and resumed with another HostBlock
            # (FeatureChange.resume), and the slot that was restored runs this one. Offload the new ones.
            self._offload()
        if not self._is_loaded:
            self._group.onload_()
            self._is_loaded = True
            self._state = self._current_state()

    def wait(self) -> None:
        """Make kernels that are launched from now on wait until the block is on the device.

        They wait for all copies that were started on the stream, also for those of other blocks. Does not
        block the host.
        """
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)

    def free(self) -> None:
        """Free the copy of the block on the device, if there is one."""
        # If tensors were replaced while the block ran, offload_() would put the old ones back, in silence.
        # The next load() offloads the new ones.
        if self._is_loaded and self._state == self._current_state():
            self._group.offload_()
            self._state = self._current_state()
        self._is_loaded = False

    def _offload(self) -> None:
        """Move the block's tensors, as they are now, to host memory, with a new group of diffusers for them."""
        # Import here, so that this module can be imported without diffusers.
        from diffusers.hooks.group_offloading import ModuleGroup

        host = torch.device("cpu")
        self.module.to(host)
        self._group = ModuleGroup(
            [self.module],
            offload_device=host,
            onload_device=self.device,
            offload_leader=self.module,
            # With a stream, diffusers would leave the copies of buffers that are not named here on the
            # device.
            buffers=list(self.module.buffers()),
            stream=self.stream,
            record_stream=self.stream is not None,
        )
        self._group.offload_()
        self._is_loaded = False
        self._state = self._current_state()

    def _current_state(self) -> list[tuple[int, int]]:
        """Return ids and memory addresses of the block's tensors.

        They change if other code replaces a tensor.
        """
        tensors = chain(self.module.parameters(), self.module.buffers())
        return [(id(x), part.data_ptr()) for x in tensors for part in plain_tensors(x)]
