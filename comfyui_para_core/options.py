"""The parts of a call of ComfyUI that reach the ranks, that stay in ComfyUI, and that are refused by name.

Nothing is dropped in silence: an entry of ``transformer_options`` or of a patcher that is not listed here is
an error. `remote_patcher` asks before each call. Arguments of the model with which a plan was not compared
are refused on the ranks (`checks.require_checked`). Tests: tests/comfyui/test_pack.py.
"""

from __future__ import annotations

import enum
import uuid
from collections.abc import Mapping
from typing import Any

import torch

# Plain values that the code of the models reads.
SENT = frozenset({"sigmas", "sample_sigmas", "cond_or_uncond", "uuids", "rope_options"})
# Entries that only code around the diffusion model reads, which runs in ComfyUI: wrappers and callbacks by
# kind, the state of ComfyUI's EasyCache and LazyCache nodes, which are such wrappers, the frames of a window
# of a longer video, and whether weights of a dynamic patcher are prefetched, which on ranks is False
# (RemotePatcher.is_dynamic).
LOCAL = frozenset({"wrappers", "callbacks", "easycache", "context_window", "prefetch_dynamic_vbars"})
# Dicts of functions that run inside of the model. They are refused if they hold any.
_INSIDE = ("patches", "patches_replace")
# Kinds of wrappers and callbacks that ComfyUI calls outside of the diffusion model, or just around it: values
# of WrappersMP and CallbacksMP in comfy/patcher_extension.py.
_OUTSIDE = frozenset(
    {
        # Wrappers.
        "outer_sample",
        "prepare_sampling",
        "sampler_sample",
        "predict_noise",
        "calc_cond_batch",
        "apply_model",
        "diffusion_model",
        # Callbacks.
        "on_clone",
        "on_deepclone_multigpu",
        "on_match_multigpu_clones",
        "on_load_after",
        "on_detach_after",
        "on_cleanup",
        "on_pre_run",
        "on_prepare_state",
        "on_apply_hooks",
        "on_register_all_hook_patches",
        "on_inject_model",
        "on_eject_model",
    }
)
_WAY_OUT = "Remove the node that sets it, or load this model with ComfyUI's own loader."
# Types of values that a pickle brings to the ranks unchanged.
_PLAIN = (bool, int, float, complex, str, bytes, enum.Enum, uuid.UUID, torch.dtype, torch.Size, torch.device)


class NotOnRanks(ValueError):
    """Raised if a workflow changes a model in a way that does not reach the ranks."""


def sent_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of ``transformer_options`` that go to the ranks.

    Raise NotOnRanks if one is a function that runs inside of the model, or is not known.
    """
    for key in _INSIDE:
        functions = [f"{name} ({_origin(function)})" for name, function in _functions(options.get(key) or {})]
        if functions:
            raise NotOnRanks(
                f"this workflow patches the inside of the model by Python functions, which do not reach the ranks: "
                f"{key} has {', '.join(sorted(set(functions)))}. {_WAY_OUT}"
            )
    for kind in ("wrappers", "callbacks"):
        unknown = [
            name
            for name, functions in (options.get(kind) or {}).items()
            if functions and name not in _OUTSIDE
        ]
        if unknown:
            raise NotOnRanks(
                f"this workflow sets {kind} of the kind {', '.join(map(repr, unknown))}; expected kinds that ComfyUI "
                f"calls outside of the diffusion model. {_WAY_OUT}"
            )
    unknown = [
        key for key, value in options.items() if key not in {*SENT, *LOCAL, *_INSIDE} and value is not None
    ]
    if unknown:
        named = ", ".join(f"{key!r} ({_origin(options[key])})" for key in unknown)
        raise NotOnRanks(
            f"this workflow sets transformer_options {named}, and it is not known whether the model reads them; "
            f"known are {', '.join(sorted(SENT))}. {_WAY_OUT}"
        )
    return {key: options[key] for key in SENT if key in options}


def _functions(patches: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return (name, function) for each function in ``patches``, whose values are lists or dicts of functions."""
    return [
        (str(name), function)
        for name, entries in patches.items()
        for function in (entries.values() if isinstance(entries, Mapping) else entries)
    ]


def _origin(value: Any) -> str:
    """Return where a function or the class of an object is defined."""
    defined = value if hasattr(value, "__qualname__") else type(value)
    return f"{defined.__module__}.{defined.__qualname__}"


def require_plain(name: str, value: Any) -> None:
    """Raise NotOnRanks if the argument ``name`` of the model holds anything but tensors and plain values."""
    if isinstance(value, Mapping):
        for entry in value.values():
            require_plain(name, entry)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for entry in value:
            require_plain(name, entry)
    elif type(value) is torch.Tensor or value is None:
        return
    elif not isinstance(value, _PLAIN):
        raise NotOnRanks(
            f"the argument {name} of the model holds a {type(value).__qualname__} ({_origin(value)}); expected "
            f"tensors, numbers and texts, which alone are sent to the ranks. {_WAY_OUT}"
        )


def require_supported(patcher: Any) -> None:
    """Raise NotOnRanks if ``patcher``, a ModelPatcher, changes the model in a way that does not reach the ranks."""
    # The ranks compute in the dtype that their own loader chooses.
    inside = [
        name
        for name in patcher.object_patches
        if name.startswith("diffusion_model") or name == "manual_cast_dtype"
    ]
    if inside:
        raise NotOnRanks(
            f"this workflow replaces parts of the model that the ranks hold: {', '.join(sorted(inside))}; only parts "
            f"outside of the diffusion model, such as model_sampling, can be replaced. {_WAY_OUT}"
        )
    for attribute, what in (
        ("weight_wrapper_patches", "wraps weights by functions"),
        ("injections", "injects code into the model"),
        ("hook_patches", "schedules weights by hooks (hook LoRAs)"),
    ):
        names = [str(name) for name in getattr(patcher, attribute, None) or {}]
        if names:
            raise NotOnRanks(
                f"this workflow {what}, which does not reach the ranks: {', '.join(names)}. {_WAY_OUT}"
            )
    if "multigpu" in getattr(patcher, "additional_models", {}):
        raise NotOnRanks(
            "this workflow gives a model on ranks to ComfyUI's own MultiGPU node; expected one of them: the ranks "
            "already use all GPUs. Remove the MultiGPU node."
        )
