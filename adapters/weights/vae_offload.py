"""Keep the weights of autoencoders in host memory, and copy them to the device once per ``encode`` or
``decode``.

This is ``vae_placement="offload"`` and ``"first"`` of parallelize_pipe, found through ``features.py``. What
both have in common with text encoders is in ``offloaded_modules.py``. Tests: tests/weights/test_placement.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from para_core.adapters.inspect.components import VAE_METHODS, vaes_of
from para_core.adapters.weights.feature import ChangeRequest, Feature
from para_core.adapters.weights.host_block import HostBlock
from para_core.adapters.weights.offloaded_modules import OffloadedModules
from para_core.instance.modules import uncompiled
from para_core.instance.private_class import original_class
from para_core.instance.record import empty_slots, fill_slot
from para_core.instance.slots import Slot
from para_core.torch_internals import pytree

# The part of an autoencoder whose weights a method does not need, by the method.
_UNUSED_BY = {"encode": "decoder", "decode": "encoder"}


class OffloadedVaes(OffloadedModules):
    """Autoencoders in host memory, copied to the device for each call of ``encode`` or ``decode``.

    On CUDA they are copied from pinned memory, and never copied back: inference does not change weights.
    diffusers' group offload would copy each layer in each of its calls, and some autoencoders decode a video
    frame by frame.
    """

    name = "placing the VAE"

    def _place(self, module: nn.Module, device: torch.device) -> None:
        """Move the children of ``module`` to host memory, and wrap its methods, which copy them to ``device``."""
        from diffusers.hooks import HookRegistry

        host = _HostVae(module, device)
        # The children are in host memory now. Weights that are in no child are few, and stay on the device.
        for x in chain(module.parameters(recurse=False), module.buffers(recurse=False)):
            x.data = x.data.to(device)
        fill_slot(module, Slot.VAE_OFFLOAD, {method: partial(host.run, method) for method in VAE_METHODS})
        # By this hook diffusers finds the device on which the autoencoder computes, and refuses to move it.
        # It has the name of a hook of group offload, so offloader_of finds it, and super().undo() removes it.
        HookRegistry.check_if_exists_or_initialize(module).register_hook(
            _hook_for(device), "group_offloading"
        )

    def undo(self) -> None:
        empty_slots(self.modules.values(), Slot.VAE_OFFLOAD)
        super().undo()


class _HostVae:
    """The parts of one autoencoder in host memory, and their copies on ``device`` while a method runs."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.device = device
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._blocks: dict[nn.Module, HostBlock] = {}
        # Names of the children that are on the device now, because a method runs.
        self._loaded: set[str] = set()
        # Called because it moves all children to host memory.
        self._blocks_of(module, unused=None)

    def run(
        self, method: str, call: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Run ``method`` of the autoencoder with its weights on the device. Inputs are moved there, too."""
        if torch.compiler.is_compiling():
            raise RuntimeError(
                f"vae_placement='offload' and 'first' copy weights before {method}, so it cannot be one "
                "graph. Compile the part inside it, without vae=True: vae.decoder.compile(fullgraph=True); "
                "or leave vae_placement out."
            )
        args, kwargs = pytree.tree_map_only(Tensor, lambda x: x.to(self.device), (args, kwargs))
        with self._on_device(module, _UNUSED_BY.get(method)):
            return call(module, *args, **kwargs)

    @contextmanager
    def _on_device(self, module: nn.Module, unused: str | None) -> Iterator[None]:
        """Have the children of ``module`` on the device inside the ``with`` block, except the one named ``unused``."""
        # If a method of the autoencoder calls another one, the inner one may need parts that the outer one
        # does not. It loads what is missing, and frees only that.
        blocks = self._blocks_of(module, None if self._loaded else unused)
        added = blocks.keys() - self._loaded
        self._loaded |= added
        try:
            for name in added:
                blocks[name].load()
                blocks[name].wait()
            yield
        finally:
            for name in added:
                blocks[name].free()
            self._loaded -= added
            if self._stream is not None:
                # The caller may now change the weights in host memory, so wait for the last copy from there.
                self._stream.synchronize()

    def _blocks_of(self, module: nn.Module, unused: str | None) -> dict[str, HostBlock]:
        """Return the children of ``module`` by name, except the one named ``unused``.

        A child that was added or replaced since the last call is moved to host memory.
        """
        children = {name: uncompiled(child) for name, child in module.named_children() if name != unused}
        for child in children.values():
            if child not in self._blocks:
                self._blocks[child] = HostBlock(child, self.device, self._stream)
        return {name: self._blocks[child] for name, child in children.items()}


def _hook_for(device: torch.device) -> Any:
    """Return a hook of diffusers that tells ``device`` as a hook of group offload does, and moves nothing."""
    from diffusers.hooks import ModelHook
    from diffusers.hooks.group_offloading import GroupOffloadingConfig, GroupOffloadingType

    hook: Any = ModelHook()
    hook.config = GroupOffloadingConfig(
        onload_device=device,
        offload_device=torch.device("cpu"),
        offload_type=GroupOffloadingType.BLOCK_LEVEL,
        non_blocking=False,
        record_stream=False,
        low_cpu_mem_usage=False,
        num_blocks_per_group=1,
    )
    return hook


def changes_for_vaes(request: ChangeRequest) -> list[OffloadedVaes]:
    """Return the change that the option ``vae_placement`` asks for; none if it keeps them on the device.

    Raise ``ValueError`` if the pipeline has no autoencoder.
    """
    placement = request.options.get("vae_placement")
    if placement is None:
        return []
    vaes = vaes_of(request.owner)
    if not vaes:
        name = original_class(request.owner).__name__
        raise ValueError(f"vae_placement={placement!r}: this {name} has no autoencoder. Leave it out.")
    if placement == "replicate":
        return []
    first_rank_only = placement == "first"
    return [
        OffloadedVaes(
            vaes, request.mesh, "vae_placement", methods=VAE_METHODS, first_rank_only=first_rank_only
        )
    ]


FEATURE = Feature(option="vae_placement", changes=changes_for_vaes)
