"""Verify that all ranks call an autoencoder with equal images and settings, and that each can run the call.

``run.py`` begins each call with it; in a compiled graph nothing is checked. Calls of UNets are compared in
``adapters/compatibility/checks.py``. Tests: tests/spatial/test_vaes.py (``ERRORS``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from para_core.adapters.agree.arguments import agree_on_values
from para_core.adapters.vae.families import tiling_settings
from para_core.distributed.mesh import GuidedMesh
from para_core.distributed.records import Record, describe_differences
from para_core.instance.modules import has_compiled_parts

# Ranks compare their inputs up to this number of bytes. Of a larger input they compare evenly spaced values.
_MAX_COMPARED_BYTES = 1 << 24


def check_equal_calls(name: str, vae: Any, x: Any, others: Sequence[Any], mesh: GuidedMesh) -> None:
    """Raise on every rank if a rank cannot run this call, or if inputs or settings differ between ranks.
    Collective.

    Args:
        name: Name of the class of ``vae``.
        x: The image or the latents of the call; ``others`` are its other arguments, those by keyword with
            their names.

    Raises:
        TypeError: ``x`` is not a tensor.
        RuntimeError: ``x`` requires a gradient, or a part of ``vae`` was compiled.
        ValueError: ``x`` has no rows, or the images, other arguments or settings differ.
    """
    agree_on_values(
        partial(_values_to_compare, vae, x, others),
        mesh,
        f"the {name}",
        partial(_check_call, name, vae, x),
        partial(_explain_unequal_calls, name),
    )


def _check_call(name: str, vae: Any, x: Any) -> None:
    """Raise if this rank cannot run the call."""
    if not isinstance(x, Tensor):
        raise TypeError(f"this {name} was called with a {type(x).__name__}; expected a tensor.")
    if x.ndim < 2:
        raise ValueError(
            f"this {name} was called with a tensor of shape {list(x.shape)}; expected images [B, C, H, W], a video "
            "[B, C, frames, H, W], or a waveform [B, C, length] or [C, length]."
        )
    if x.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            "the image requires a gradient, and none is computed over ranks. Call the VAE under torch.no_grad(), "
            "or unparallelize_vae(vae)."
        )
    if has_compiled_parts(vae):
        raise RuntimeError(
            f"a part of this {name} was compiled, and a graph of a part does not see the sizes of all ranks. Compile "
            "the method around it (vae.decode = torch.compile(vae.decode)), or unparallelize_vae(vae)."
        )


def _values_to_compare(vae: Any, x: Tensor, others: Sequence[Any]) -> Mapping[str, Any]:
    """Return what must be equal on all ranks, by name: the input, the other arguments and the settings of tiles."""
    sample = x
    if x.nbytes > _MAX_COMPARED_BYTES:
        sample = x.flatten()[:: -(-x.nbytes // _MAX_COMPARED_BYTES)]
    return {"shape": list(x.shape), "sample": sample, "other arguments": list(others), **tiling_settings(vae)}


def _explain_unequal_calls(name: str, records: list[Record]) -> str:
    """Return the message of the error if the ``records`` of the ranks differ."""
    # Every call of an autoencoder has this field, and no other call: a name with a space is no argument's.
    elsewhere = next((rank for rank, record in enumerate(records) if "other arguments" not in record), None)
    if elsewhere is not None:
        return (
            f"rank {elsewhere} does not call this {name}, and other ranks do, perhaps in a callback that runs on one "
            "rank. All ranks must call it, and any of them may use the result."
        )
    return (
        f"the ranks must call this {name} with equal images and settings. "
        f"{'; '.join(describe_differences(records))}. Draw random numbers from a generator with the same seed on "
        "all ranks."
    )
