"""The nodes that load a diffusion model of ComfyUI on ranks, and that end the ranks.

ComfyUI finds them in `__init__.py`, and imports this file also without para_core, so `remote_patcher`, which
does the work, is imported by the node. Tests: tests/comfyui/test_pack.py, tests/comfyui/test_server.py.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from .settings import AUTOMATIC, WEIGHTS, Settings

# The options of ComfyUI's load_diffusion_model for each weight_dtype, as its node UNETLoader sets them.
_OPTIONS_OF_DTYPE: dict[str, dict[str, Any]] = {
    "default": {},
    "fp8_e4m3fn": {"dtype": torch.float8_e4m3fn},
    "fp8_e4m3fn_fast": {"dtype": torch.float8_e4m3fn, "fp8_optimizations": True},
    "fp8_e5m2": {"dtype": torch.float8_e5m2},
}
_MESH_TIP = (
    "auto, or how the ranks share a call: 'ulysses 2', 'ring 3', 'ulysses 2 ring 2'. The sizes multiply to the "
    "number of ranks."
)
_CACHE_TIP = (
    "0: exact. Above 0: First Block Cache; a step whose first block changes by less than this is not computed. 0.1 "
    "skips a part of the steps."
)
_WEIGHTS_TIP = (
    "replicated: each rank holds the whole model. fsdp: each rank holds a part, for models larger than a GPU."
)


class LoadOnRanks:
    """Node that takes the place of "Load Diffusion Model": the model computes on ranks, all else stays in ComfyUI."""

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "load"
    CATEGORY = "para_core"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        import folder_paths

        return {
            "required": {
                "unet_name": (folder_paths.get_filename_list("diffusion_models"),),
                "weight_dtype": (list(_OPTIONS_OF_DTYPE), {"advanced": True}),
                "ranks": (
                    "INT",
                    {"default": 2, "min": 1, "max": 64, "tooltip": "Number of GPUs, one process for each."},
                ),
                "mesh": ("STRING", {"default": AUTOMATIC, "tooltip": _MESH_TIP}),
                "cache": (
                    "FLOAT",
                    {"default": 0.0, "min": 0.0, "max": 2.0, "step": 0.01, "tooltip": _CACHE_TIP},
                ),
                "weights": (list(WEIGHTS), {"tooltip": _WEIGHTS_TIP}),
            }
        }

    def load(
        self, unet_name: str, weight_dtype: str, ranks: int, mesh: str, cache: float, weights: str
    ) -> tuple[Any]:
        """Return a MODEL whose diffusion model computes on ``ranks`` processes, which start when it is first used.

        Raises:
            ValueError: A setting is not valid, there are fewer GPUs than ranks, or the model cannot run so.
            RuntimeError: A package that the ranks need is not installed.
            FileNotFoundError: ComfyUI has no such model.
        """
        import folder_paths

        # First what needs neither para_core, which remote_patcher imports, nor the file, which takes long to read.
        settings = Settings.of(ranks=ranks, mesh=mesh, cache=cache, weights=weights)
        if weight_dtype not in _OPTIONS_OF_DTYPE:
            raise ValueError(
                f"weight_dtype is {weight_dtype!r}; expected one of {', '.join(_OPTIONS_OF_DTYPE)}."
            )
        _require_para_core()
        from .remote_patcher import load_remote

        path = folder_paths.get_full_path_or_raise("diffusion_models", unet_name)
        # A copy, so that the table stays as it is if ComfyUI changes its options.
        return (load_remote(path, {**_OPTIONS_OF_DTYPE[weight_dtype]}, settings),)


class CloseRanks:
    """Node that ends the ranks of a model after the latent is computed, so that the GPUs are free for what follows."""

    RETURN_TYPES = ("LATENT",)
    FUNCTION = "close"
    CATEGORY = "para_core"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "model": ("MODEL",),
                "samples": ("LATENT", {"tooltip": "Passed on after the ranks ended."}),
            }
        }

    def close(self, model: Any, samples: Any) -> tuple[Any]:
        """End the ranks of ``model``, which start again at its next use, and return ``samples``.

        Raises:
            ValueError: ``model`` does not come from the node that loads on ranks.
        """
        if not hasattr(model, "close_ranks"):
            raise ValueError(
                f"this model ({type(model).__name__}) has no ranks; expected one that comes from the node "
                f'"{NODE_DISPLAY_NAME_MAPPINGS["ParaCoreLoadOnRanks"]}".'
            )
        model.close_ranks()
        return (samples,)


def _require_para_core() -> None:
    """Raise RuntimeError if a package that the ranks need is not installed."""
    missing = [name for name in ("para_core", "cloudpickle") if not _is_installed(name)]
    if missing:
        raise RuntimeError(
            f"{' and '.join(missing)} cannot be imported by the Python that runs ComfyUI, and the ranks need it: run "
            "`python -m pip install 'para_core[launch]'` with that Python, and start ComfyUI again. The nodes that "
            "send requests to `para_core serve` work without it."
        )


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


NODE_CLASS_MAPPINGS = {"ParaCoreLoadOnRanks": LoadOnRanks, "ParaCoreCloseRanks": CloseRanks}
NODE_DISPLAY_NAME_MAPPINGS = {
    "ParaCoreLoadOnRanks": "Load Diffusion Model (ranks)",
    "ParaCoreCloseRanks": "Close ranks (para_core)",
}
