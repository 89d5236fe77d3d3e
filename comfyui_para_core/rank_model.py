"""The diffusion model on one rank, loaded by ComfyUI's own loader and run over all ranks.

`ranks` makes a :class:`RankModel` in each process and calls its methods; ComfyUI's process uses nothing of
this file. Here are also what a cached block needs around it (:func:`keep_inputs_of_blocks`), and what calls
must share to run with one proposed plan (:func:`forms_of`). Tests: tests/comfyui/test_pack.py.
"""

from __future__ import annotations

import enum
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import comfy.model_management
import comfy.utils
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from para_core import ForeignCodeWarning, apply_cache, cache_context, init_context_parallel_mesh, reset_cache
from para_core.adapters import Adapter, parallelize_transformer
from para_core.adapters.weights.features import require_method
from para_core.cache.blocks import CachedBlocks

from .checks import require_checked
from .cut import use_cut
from .plans import find_plan
from .propose import propose_on_small_model
from .ranks import load_diffusion_model
from .settings import Settings
from .tensors import move_tensors


class State(enum.Enum):
    """State of the model of a rank between its file and its parallel form: see :class:`RankModel`."""

    LOADED = enum.auto()
    CHANGING = enum.auto()
    PARALLEL = enum.auto()


class RankModel:
    """ComfyUI's patcher of the file on this rank. Every rank calls each method with the same arguments.

    The model is parallelized in the first call of :meth:`forward`, because a plan may have to be proposed
    from the arguments of a call. :class:`~.ranks.ModelRanks` looks the methods up by their names.

    =========  ==========================================  =============================================
    state      the model                                   :meth:`forward` first
    =========  ==========================================  =============================================
    LOADED     has whole weights, and no plan              parallelizes it
    CHANGING   has a part of the changes: one has failed   loads the file again, and parallelizes it
    PARALLEL   has its plan, cache and shards of weights   does the same if the plan was proposed from a
                                                           call with other arguments
    =========  ==========================================  =============================================

    In the last two states :meth:`patch` loads the file again if the weights are sharded.

    Args:
        path, options, settings: As those of :class:`~.ranks.ModelRanks`.
    """

    def __init__(self, path: str, options: Mapping[str, Any], settings: Settings) -> None:
        self.path, self.options, self.settings = path, options, settings
        self.needs_plan = settings.ranks > 1 or settings.cache > 0
        self.shards_weights = settings.weights == "fsdp" and settings.ranks > 1
        if self.shards_weights:
            require_method("fsdp")
        self._read_file()

    def _read_file(self) -> None:
        """Load the model from its file, in place of the current one and all that was done to it."""
        self.patcher = load_diffusion_model(self.path, self.options)
        self.model: nn.Module = self.patcher.model.diffusion_model
        # Look the plan up before use_cut changes the class.
        self.recorded = find_plan(type(self.model))
        use_cut(self.model)
        self.state = State.LOADED
        # Of the call from which the plan was proposed, see forms_of. Empty with a recorded plan.
        self.forms: dict[str, str] = {}

    def patch(self, patches: dict[str, Any]) -> None:
        """Load the weights of the file, with ``patches`` applied by ComfyUI's own code."""
        # Parts of weights cannot be patched. Whole ones still have the patches of an earlier call of this
        # method, to which these would be added.
        if self.shards_weights and (self.state is not State.LOADED or self.patcher.patches):
            self._read_file()
        self._apply_patches(patches)

    def _apply_patches(self, patches: dict[str, Any]) -> None:
        """Load the weights with ``patches``. With FSDP only while they are whole: parts cannot be patched."""
        # With another uuid ComfyUI patches the weights again.
        self.patcher.patches, self.patcher.patches_uuid = patches, object()
        if not self.shards_weights:
            comfy.model_management.load_models_gpu([self.patcher], force_full_load=True)
            return
        # The whole model may be larger than the GPU, so patch one weight after the other there, as ComfyUI
        # does, and leave all in host memory. Sharding moves a part of each block to the GPU.
        model = self.patcher.model
        for name in patches:
            self.patcher.patch_weight_to_device(name, device_to=self.patcher.load_device)
            comfy.utils.set_attr_param(
                model, name, comfy.utils.get_attr(model, name).to(self.patcher.offload_device)
            )

    def _read_file_and_patch(self) -> None:
        """Load the model again, unparallelized and with the patches that it has now."""
        patches = self.patcher.patches
        self._read_file()
        self._apply_patches(patches)

    def memory(self) -> int:
        """Return the bytes that this rank holds on its device."""
        if self.patcher.load_device.type == "cuda":
            return torch.cuda.memory_reserved(self.patcher.load_device)
        return sum(_local_bytes(parameter) for parameter in self.model.parameters())

    def forward(self, arguments: Mapping[str, Any], begins_generation: bool) -> tuple[Any, int]:
        """Return the output of the model, and :meth:`memory`. A collective call.

        ``begins_generation`` says whether this is the first call of a generation.
        """
        inputs = move_tensors(arguments, self.patcher.load_device)
        # Tensors made in inference mode cannot be changed in place outside of it, and the cache and FSDP2
        # keep some between calls. Without inference mode, no_grad must disable gradients.
        with torch.inference_mode(False), torch.no_grad():
            if self.state is not State.PARALLEL or self._is_other_form(inputs):
                self._parallelize(inputs)
            if self.settings.ranks > 1 and self.recorded is not None:
                require_checked(self.recorded, self.model, inputs)
                if self.recorded.prepare is not None:
                    inputs = self.recorded.prepare(self.model, inputs)
            if self.settings.cache:
                output = self._call_cached(inputs, begins_generation)
            else:
                output = self.model(**inputs)
        return output, self.memory()

    def call_method(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of the method ``name`` of the model, which each rank computes alone. A collective
        call with FSDP, which gathers weights for it.
        """
        # With FSDP, the weights wait in host memory until the first call of the model shards them.
        waits = self.shards_weights and self.state is not State.PARALLEL
        device = self.patcher.offload_device if waits else self.patcher.load_device
        args, kwargs = move_tensors((args, kwargs), device)
        with torch.inference_mode(False), torch.no_grad(), self._gathering_weights_outside_of_blocks():
            return getattr(self.model, name)(*args, **kwargs)

    @contextmanager
    def _gathering_weights_outside_of_blocks(self) -> Iterator[None]:
        """Inside this context, this rank has the weights outside of the blocks, as FSDP gathers them while
        the model itself is called. A collective call.
        """
        if not (self.shards_weights and self.state is State.PARALLEL):
            yield
            return
        model: Any = self.model
        model.unshard()
        try:
            yield
        finally:
            model.reshard()

    def _call_cached(self, inputs: Mapping[str, Any], begins_generation: bool) -> Any:
        """Return the output of the model with First Block Cache, whose state is kept for each condition."""
        if begins_generation:
            reset_cache(self.model)
        options = inputs.get("transformer_options") or {}
        # ComfyUI names the conditions of a call, which stay the same from step to step.
        with cache_context(self.model, " ".join(map(str, options.get("uuids", ())))):
            return self.model(**inputs)

    def _is_other_form(self, inputs: Mapping[str, Any]) -> bool:
        """Whether the plan was proposed from a call with other arguments, which says nothing about this one."""
        return self.recorded is None and self.needs_plan and forms_of(inputs) != self.forms

    def _parallelize(self, inputs: Mapping[str, Any]) -> None:
        """Shard the model by its plan, or one proposed from ``inputs``, and attach the cache. A collective call."""
        if self.state is not State.LOADED:
            # Not all changes can be undone or made twice, such as sharding weights or the hooks of the
            # blocks.
            self._read_file_and_patch()
        settings = self.settings
        adapter: Adapter | None = None
        if self.recorded is not None:
            adapter = self.recorded.adapter
        if adapter is None and self.needs_plan:
            adapter = propose_on_small_model(self.patcher.model, self.model, inputs)
            self.forms = forms_of(inputs)
        device = self.patcher.load_device.type
        if settings.cache and (adapter is None or adapter.blocks is None):
            raise ValueError(
                f"cache is {settings.cache}, and no block stack is recorded for {type(self.model).__name__}; "
                "expected 0 for this model."
            )
        self.state = State.CHANGING
        if settings.ranks > 1:
            sizes = {"max_ring_dim_size": settings.ring, "max_ulysses_dim_size": settings.ulysses}
            mesh = init_context_parallel_mesh(device, **sizes)
            parallelize_transformer(self.model, mesh=mesh, adapter=adapter)
        if settings.cache and adapter is not None and adapter.blocks is not None:
            # The cache warns of hooks that it does not know. This one changes nothing that it sees. The
            # filter stays for the whole process, which runs this model alone, because the cache warns in
            # later calls.
            warnings.filterwarnings(
                "ignore", message=f".*{_copy_inputs.__name__}", category=ForeignCodeWarning
            )
            keep_inputs_of_blocks(self.model, adapter.blocks)
            apply_cache(self.model, adapter.blocks, residual_diff_threshold=settings.cache)
        if self.shards_weights:
            # Last, as in parallelize_pipe: nothing undoes it.
            mesh = init_device_mesh(device, (settings.ranks,))
            require_method("fsdp").shard(self.model, mesh, None, adapter)
        self.state = State.PARALLEL


def keep_inputs_of_blocks(model: nn.Module, blocks: CachedBlocks) -> None:
    """Give the blocks copies of their inputs: many blocks of ComfyUI change these in place, and the cache
    computes residuals from them.
    """
    for name in {name for group in blocks.groups for name in group.lists}:
        for block in model.get_submodule(name).children():
            block.register_forward_pre_hook(_copy_inputs, with_kwargs=True)


def _copy_inputs(block: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    copies = [_copy_tensor(value) for value in args]
    return tuple(copies), {name: _copy_tensor(value) for name, value in kwargs.items()}


def _copy_tensor(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def forms_of(inputs: Mapping[str, Any]) -> dict[str, str]:
    """Return for each argument that is given what decides how a model treats it: dims of tensors, and plain values."""
    return {
        name: _describe_form(value)
        for name, value in inputs.items()
        if name != "transformer_options" and value is not None
    }


def _describe_form(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.ndim} dims"
    if isinstance(value, Mapping):
        return str({key: _describe_form(entry) for key, entry in value.items()})
    if isinstance(value, (list, tuple)):
        return str(sorted({_describe_form(entry) for entry in value}))
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return type(value).__name__
    return repr(value)


def _local_bytes(parameter: Any) -> int:
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return int(local.numel() * local.element_size())
