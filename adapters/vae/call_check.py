"""Verify that all ranks call an autoencoder with equal images and settings, and that each can run the call.

``run.py`` begins each call with it; in a compiled graph nothing is checked. Calls of UNets are compared in
``adapters/compatibility/checks.py``. Tests: tests/spatial/test_vaes.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from para_core.adapters.agree.arguments import describe_all
from para_core.distributed.agree import agree
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
    if not isinstance(x, Tensor):
        # This raises on every rank.
        refused = TypeError(f"this {name} was called with a {type(x).__name__}; expected a tensor.")
        agree(refused, mesh)
    problem: Exception | None = None
    if x.ndim < 2:
        problem = ValueError(
            f"this {name} was called with a tensor of shape {list(x.shape)}; expected images [B, C, H, W], a video "
            "[B, C, frames, H, W] or a waveform [B, C, length]."
        )
    elif x.requires_grad and torch.is_grad_enabled():
        problem = RuntimeError(
            "the image requires a gradient, and none is computed over ranks. Call the VAE under torch.no_grad(), "
            "or unparallelize_vae(vae)."
        )
    elif has_compiled_parts(vae):
        problem = RuntimeError(
            f"a part of this {name} was compiled, and a graph of a part does not see the sizes of all ranks. Compile "
            "the method around it (vae.decode = torch.compile(vae.decode)), or unparallelize_vae(vae)."
        )
    values = x
    if x.nbytes > _MAX_COMPARED_BYTES:
        values = x.flatten()[:: -(-x.nbytes // _MAX_COMPARED_BYTES)]
    tiling = {key: value for key, value in vars(vae).items() if key.startswith(("tile_", "use_"))}
    texts = describe_all({"sample": values, "other arguments": list(others)})
    texts["sample"] = f"{list(x.shape)} {texts['sample']}"
    record = {**texts, "tiling": repr(sorted(tiling.items()))}
    agree(problem or record, mesh, explain=partial(_explain_unequal_calls, name), call=f"the {name}")


def _explain_unequal_calls(name: str, records: list[Record]) -> str:
    """Return the message of the error if the ``records`` of the ranks differ."""
    elsewhere = next((rank for rank, record in enumerate(records) if "sample" not in record), None)
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
