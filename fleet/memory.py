"""The memory of ranks: what they have, and what a feature predicts that results of a size need.

The counting itself stands in `adapters/planner`, which is found by its feature. `rank.py` predicts for the
server, which refuses larger results (`http/bodies.py`), and `cli/generation.py` before anything is loaded.
Tests: tests/fleet/test_work.py.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any

import torch

from para_core.adapters.features import feature
from para_core.devices import RESERVED
from para_core.distributed.mesh_shape import mesh_sizes
from para_core.fleet.model_files import GGUF
from para_core.fleet.recipe import Recipe
from para_core.option_values import num_resident

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Memory:
    """Predicted memory of one rank, as a linear function of the pixels of a result.

    :func:`predict_memory` makes one only if at least one pixel fits.

    >>> Memory(room=24e9, fixed=20e9, per_pixel=1000.0).pixels
    4000000
    """

    room: float  # bytes that the rank may hold
    fixed: float  # bytes of weights and of activations of text tokens
    per_pixel: float  # bytes of activations per pixel of an image or frame

    @property
    def pixels(self) -> int:
        """Largest number of pixels that fits, summed over all images or frames."""
        return int((self.room - self.fixed) / self.per_pixel)

    def bytes_of(self, pixels: int) -> float:
        """Return the bytes that a rank needs for a result of ``pixels`` pixels."""
        return self.fixed + pixels * self.per_pixel

    def prediction(self, pixels: int) -> str:
        """Return what is predicted for a result of ``pixels`` pixels, as a part of a sentence."""
        needed = self.bytes_of(pixels) / 1e9
        return f"predicted to take {needed:.3g} GB of each rank, which may hold {self.room / 1e9:.3g} GB"

    def problem(self, pixels: int) -> str | None:
        """Return an error message if a result of ``pixels`` pixels does not fit, else None."""
        if pixels <= self.pixels:
            return None
        return f"{pixels} pixels in total are {self.prediction(pixels)}: at most {self.pixels} pixels fit."


def bytes_of_device(shares: int | None = None) -> float:
    """Return the bytes that a rank may hold: the memory of the current GPU, less a reserve.

    Without a GPU, return the memory of the machine divided by ``shares``, the number of ranks on it, by
    default that of CPU cores.
    """
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory - RESERVED
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (shares or os.cpu_count() or 1)


def predict_memory(pipe: Any, recipe: Recipe, mesh: dict[str, int], room: float) -> Memory | None:
    """Predict the memory of weights and transformer activations on a rank, which may hold ``room`` bytes.

    Activations of the VAE are not included. ``pipe`` may lack weights. ``mesh`` has the sizes of the mesh
    dims by name, and ``room`` is :func:`bytes_of_device` or what the user states. Return None if no feature
    predicts it or knows the pipeline, if components take turns on the device
    (``offload="model"``), or if not even the weights are predicted to fit.
    """
    predict = feature("predict_bytes")
    if predict is None or recipe.offload == "model":
        return None
    # The weights of a GGUF file have at most 8 bits.
    quantize = recipe.quantize
    resident: int | None = None
    if recipe.model.endswith(GGUF):
        quantize = quantize or "int8"
    if recipe.offload == "blocks":
        resident = num_resident(recipe.resident_blocks)
    try:
        fixed, per_pixel = predict(
            pipe,
            mesh,
            fsdp=recipe.weights == "fsdp",
            resident=resident,
            encoders=recipe.encoders_placement,
            vae=recipe.placement_of_vae,
            quantize=quantize,
        )
    except Exception as error:
        # Counting may raise anything, because the pipeline's class or config may be the user's own. A missing
        # prediction is no error.
        logger.debug("no memory is predicted for %s: %s", type(pipe).__name__, error)
        return None
    if per_pixel <= 0:
        return None
    memory = Memory(room, fixed, per_pixel)
    if memory.pixels <= 0:
        return None
    return memory


def foresee_mesh(pipe: Any, recipe: Recipe, ranks: int) -> dict[str, int]:
    """Return the mesh sizes by dim that :func:`~para_core.fleet.build.build` will choose for ``ranks`` ranks.

    ``pipe`` may lack weights. It is not used if the recipe states a mesh or ``ranks`` is 1.

    Raises:
        ValueError: The sizes that the recipe states leave ranks over.
    """
    if recipe.mesh and ranks > 1:
        return mesh_sizes(ranks, dict(recipe.mesh))
    choose = feature("choose_default_mesh")
    if ranks == 1 or choose is None:
        return {"batch": 1, "ring": 1, "ulysses": ranks}
    device = "cpu"
    if torch.cuda.is_available():
        device = "cuda"
    # As if all ranks are on one host. On several hosts, build may choose another mesh.
    choice = choose(pipe, ranks, device, on_host=ranks)
    return {"batch": choice.batch, "ring": choice.ring, "ulysses": choice.ulysses}
