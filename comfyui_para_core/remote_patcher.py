"""A MODEL for ComfyUI whose diffusion model computes on ranks.
Sampler, guidance and conditioning stay in ComfyUI.

The node of `loader` calls :func:`load_remote`. What cannot reach the ranks is refused in `options`, and the
processes are those of `ranks`. Tests: tests/comfyui/test_pack.py, and on ComfyUI itself
tests/comfyui/test_server.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import comfy.model_management
import comfy.model_patcher
import torch

from .checks import require_runnable
from .cut import bind_arguments, cut_method_of
from .options import NotOnRanks, require_plain, require_supported, sent_options
from .ranks import ModelRanks, load_diffusion_model
from .settings import Settings
from .tensors import first_device, move_tensors

# Methods of diffusion models that ComfyUI calls outside of a model call, and that read weights. They take no
# transformer_options.
_METHODS = ("preprocess_text_embeds",)


def load_remote(path: str, options: dict[str, Any], settings: Settings) -> RemotePatcher:
    """Return the MODEL of the file at ``path``, in place of what ComfyUI's loader returns."""
    patcher = load_diffusion_model(path, options)
    if patcher.load_device.type == "cuda" and settings.ranks > torch.cuda.device_count():
        raise ValueError(
            f"ranks is {settings.ranks}, and ComfyUI sees {torch.cuda.device_count()} GPUs; expected one for each rank."
        )
    model = patcher.model
    require_runnable(type(model.diffusion_model), settings)
    parameters = model.diffusion_model.parameters()
    weight_bytes = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    # Names and shapes of the weights stay, because LoRA keys and conditions need them.
    model.diffusion_model.to("meta")
    if settings.weights == "fsdp":
        weight_bytes = math.ceil(weight_bytes / settings.ranks)
    ranks = ModelRanks(path, options, settings, weight_bytes)
    _cut_model(model, ranks)
    remote = RemotePatcher(model, patcher.load_device, patcher.offload_device)
    remote.ranks = ranks
    return remote


def _cut_model(model: Any, ranks: ModelRanks) -> None:
    """Let ``model``, a BaseModel of ComfyUI, compute its diffusion model on ``ranks``.

    Each call of the model refuses changes that do not reach the ranks, because nodes may change a patcher
    until a sampler uses it.
    """
    diffusion_model = model.diffusion_model
    name = cut_method_of(type(diffusion_model))
    original = getattr(diffusion_model, name)

    def forward(*args: Any, **kwargs: Any) -> Any:
        patcher = _patcher_of(model)
        arguments = bind_arguments(original, args, kwargs)
        options = arguments.get("transformer_options")
        arguments["transformer_options"] = sent_options(options or {})
        require_supported(patcher)
        for argument, value in arguments.items():
            require_plain(argument, value)
        # A sampler may use the model with other patches than load did, so compare them before each call.
        ranks.start(patcher.patches, patcher.patches_uuid)
        output = ranks.forward(arguments, patcher.begins_generation)
        # Not before: if the first call raises, a call without another pre_run still begins the generation.
        patcher.begins_generation = False
        return move_tensors(output, first_device(arguments))

    setattr(diffusion_model, name, forward)
    for method in _METHODS:
        if hasattr(diffusion_model, method):
            setattr(diffusion_model, method, _make_remote_method(model, ranks, method))
    required = model.memory_required
    # Rank 0 holds its part of the activations on the GPU of ComfyUI.
    model.memory_required = lambda *args, **kwargs: required(*args, **kwargs) / ranks.settings.ranks


def _patcher_of(model: Any) -> Any:
    """Return the patcher, with its LoRAs, of the sampler that uses ``model``. Raise RuntimeError outside of one."""
    if model.current_patcher is None:
        raise RuntimeError(
            "the model was called outside of a sampler; expected a sampler node, which prepares it."
        )
    return model.current_patcher


def _make_remote_method(model: Any, ranks: ModelRanks, method: str) -> Callable[..., Any]:
    """Return a function that calls ``method`` of the diffusion model on the ranks.

    It checks nothing: these methods read weights alone, whose patches reach the ranks, and a call of the
    model follows, which refuses everything else.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        patcher = _patcher_of(model)
        ranks.start(patcher.patches, patcher.patches_uuid)
        return move_tensors(ranks.call_method(method, args, kwargs), first_device((args, kwargs)))

    return call


class RemotePatcher(comfy.model_patcher.ModelPatcher):  # type: ignore[misc]
    """A patcher whose weights are on the ranks, where LoRAs and other weight patches are applied to them.

    It overrides what ComfyUI 0.33.0 calls of a ModelPatcher to load, patch, unload and measure weights.
    Clones share the ranks and the model, and differ in their patches.

    ComfyUI's memory manager calls :meth:`partially_load` to load a model, which calls :meth:`load` through
    ComfyUI's ``patch_model``. To unload one it calls :meth:`partially_unload`, which frees nothing, and then
    :meth:`detach`, which calls :meth:`unpatch_model`. A sampler calls :meth:`pre_run` once per generation.
    """

    ranks: ModelRanks  # set by load_remote, after ComfyUI's constructor, which already asks for the size
    # Whether the next call of the model is the first of a generation. pre_run sets it, and the forward of
    # _cut_model clears it.
    begins_generation = True

    def clone(self, *args: Any, **kwargs: Any) -> RemotePatcher:
        """Return a patcher of the same ranks with its own patches."""
        cloned: RemotePatcher = super().clone(*args, **kwargs)
        cloned.ranks = self.ranks
        return cloned

    def close_ranks(self) -> None:
        """End the ranks, which frees their GPUs. They start again at the next use of the model."""
        self.ranks.close()
        self.model.model_loaded_weight_memory = 0

    # What ComfyUI's memory manager asks.

    def is_dynamic(self) -> bool:
        """Whether weights move during a call. They do not."""
        return False

    def model_size(self) -> int:
        """Return the bytes that rank 0 holds, or will hold, on the GPU of ComfyUI. They are at least 1,
        because ComfyUI takes a size of 0 for one that is not known yet.
        """
        ranks: ModelRanks | None = getattr(self, "ranks", None)
        if ranks is None or not self._shares_device():
            return 1
        return max(1, ranks.device_bytes or ranks.weight_bytes)

    def loaded_size(self) -> int:
        """Return the bytes that rank 0 holds on the GPU of ComfyUI now."""
        return self.ranks.device_bytes if self._shares_device() else 0

    def _shares_device(self) -> bool:
        """Whether rank 0 is on the device of ComfyUI: GPU 0, or a device without a number.

        Rank 0 has the first GPU, because :meth:`.ranks.ModelRanks.start` calls ``para_core.launch`` without
        ``devices``.
        """
        return getattr(self.load_device, "index", None) in (None, 0)

    def load(self, device_to: Any = None, *args: Any, **kwargs: Any) -> None:
        """Start the ranks, and send them the weight patches if these have changed.

        The other arguments of ComfyUI's own ``load`` are ignored: the ranks always load all weights.
        """
        self.ranks.start(self.patches, self.patches_uuid)
        # The attributes that ComfyUI's own load sets, and its memory manager and samplers read.
        self.model.device, self.model.model_lowvram = device_to, False
        self.model.model_loaded_weight_memory = self.loaded_size()
        self.model.current_weight_patches_uuid = self.patches_uuid
        for callback in self.get_all_callbacks(comfy.model_patcher.CallbacksMP.ON_LOAD):
            lowvram_bytes, forces_patches, loads_all = 0, False, True
            callback(self, device_to, lowvram_bytes, forces_patches, loads_all)

    def partially_load(self, device_to: Any, extra_memory: int = 0, force_patch_weights: bool = False) -> int:
        """Start the ranks, and return by how many bytes the model grew on the GPU of ComfyUI.

        ``extra_memory`` and ``force_patch_weights`` are ignored, as :meth:`load` ignores them.
        """
        before = self.model.model_loaded_weight_memory
        # Patches may have changed since an earlier load, so first restore what it replaced, as ComfyUI does.
        self.unpatch_model(None, unpatch_weights=False)
        self.patch_model(device_to)
        return int(self.model.model_loaded_weight_memory - before)

    def partially_unload(
        self, device_to: Any, memory_to_free: int = 0, force_patch_weights: bool = False
    ) -> int:
        """Return 0: a part of the weights cannot be freed. ComfyUI then calls :meth:`detach`."""
        return 0

    def unpatch_model(self, device_to: Any = None, unpatch_weights: bool = True) -> None:
        """Restore what was replaced in ComfyUI's process. The ranks keep their patches until others come."""
        super().unpatch_model(None, unpatch_weights=False)
        if unpatch_weights:
            self.model.current_weight_patches_uuid = None

    def detach(self, unpatch_all: bool = True) -> Any:
        """Restore the model. With ``unpatch_all``, by which ComfyUI unloads it, end the ranks, which are
        those of all clones: they start again at the next use of any.
        """
        model = super().detach(unpatch_all)
        if unpatch_all:
            self.close_ranks()
        return model

    def pre_run(self, *args: Any, **kwargs: Any) -> Any:
        """Begin a generation."""
        self.begins_generation = True
        return super().pre_run(*args, **kwargs)

    def inject_model(self) -> None:
        """Refuse code that other nodes inject into the model, by name."""
        require_supported(self)
        super().inject_model()

    # What needs the weights in ComfyUI's process.

    def add_wrapper_with_key(self, wrapper_type: str, key: str, wrapper: Callable[..., Any]) -> None:
        """Add a wrapper. Refuse the one that compiles the model, whose code is on the ranks."""
        if key == "torch.compile":
            raise NotOnRanks(
                "this workflow compiles the model by torch.compile (TorchCompileModel), whose code runs on the ranks, "
                "not in ComfyUI's process. Remove that node, or load this model with ComfyUI's own loader."
            )
        super().add_wrapper_with_key(wrapper_type, key, wrapper)

    def add_hook_patches(self, hook: Any, *args: Any, **kwargs: Any) -> Any:
        """Refuse LoRAs that hooks schedule by step."""
        raise NotOnRanks(
            "this workflow schedules a LoRA by hooks (a hook LoRA), which does not reach the ranks. Use a LoRA "
            "loader, or load this model with ComfyUI's own loader."
        )

    def get_key_patches(self, filter_prefix: str | None = None) -> Any:
        """Refuse merges of models."""
        raise NotOnRanks(_WEIGHTS_ELSEWHERE.format(what="merges a model"))

    def state_dict_for_saving(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse to save the model."""
        raise NotOnRanks(_WEIGHTS_ELSEWHERE.format(what="saves a model"))

    def deepclone_multigpu(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse ComfyUI's own use of several GPUs."""
        raise NotOnRanks(
            "this workflow gives a model on ranks to ComfyUI's own MultiGPU node; expected one of them: the ranks "
            "already use all GPUs. Remove the MultiGPU node."
        )


_WEIGHTS_ELSEWHERE = (
    "this workflow {what} whose weights are on ranks, and not in ComfyUI's process. Load this model with ComfyUI's own "
    "loader."
)
