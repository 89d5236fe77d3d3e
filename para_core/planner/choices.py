"""A user's choices besides the sizes of a mesh, and alternatives to try if no mesh fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from para_core.planner.prediction import SHARING, Sharing
from para_core.planner.weights import Weights
from para_core.weights.pipefusion import PipeFusion

# The names of the quantization schemes in adapters/weights/quantize.py, which para_core.planner must not import.
QUANTIZE = ("int8", "fp8", "int8-dynamic", "fp8-dynamic")


@dataclass(frozen=True)
class Choices:
    """The user's choices besides the sizes of a mesh.

    The planner chooses what the user leaves at its default.

    Args:
        sharing (`Sequence[Sharing]`): Ways to shard weights that are considered: ``"tensor"``, ``"stages"``,
            ``"fsdp"``. ``"fsdp"`` is tried only if the weights do not fit otherwise.
        text_encoders (`str`, *optional*): Placement of the text encoders, as in ``parallelize_pipe``. Defaults to the
            default there, or to host memory if the weights do not fit otherwise.
        vae_placement (`str`, *optional*): Placement of the VAE, as in ``parallelize_pipe``. Defaults to the device, or
            to host memory if no mesh fits otherwise.
        offload (`bool`): Whether blocks may wait in host memory if the weights do not fit otherwise.
        quantize (`str`, *optional*): Scheme of quantized weights, which are not exact. Defaults to exact weights, or to
            int8 if no mesh fits otherwise.
        pipefusion (`PipeFusion`, *optional*): Options of PipeFusion, which is not exact. If given, meshes with
            PipeFusion are included.

    Raises:
        ValueError, TypeError: An argument has an unknown value.
    """

    sharing: Sequence[Sharing] = SHARING
    text_encoders: Literal["replicate", "fsdp", "offload", "first"] | None = None
    vae_placement: Literal["replicate", "offload", "first"] | None = None
    offload: bool = True
    quantize: str | None = None
    pipefusion: PipeFusion | None = None

    def __post_init__(self) -> None:
        if isinstance(self.sharing, str) or not set(self.sharing) <= set(SHARING):
            raise ValueError(f"weights is {self.sharing!r}; expected some of {SHARING}, or () to replicate them.")
        if self.text_encoders not in (None, "replicate", "fsdp", "offload", "first"):
            raise ValueError(
                f"text_encoders is {self.text_encoders!r}; expected 'replicate', 'fsdp', 'offload' or 'first'."
            )
        if self.vae_placement not in (None, "replicate", "offload", "first"):
            raise ValueError(f"vae_placement is {self.vae_placement!r}; expected 'replicate', 'offload' or 'first'.")
        if self.quantize not in (None, *QUANTIZE):
            raise ValueError(f"quantize is {self.quantize!r}; expected one of {', '.join(QUANTIZE)}.")
        if self.pipefusion is not None and not isinstance(self.pipefusion, PipeFusion):
            raise TypeError(
                f"pipefusion is {self.pipefusion!r}; expected a PipeFusion of para_core, or None for exact meshes "
                "alone."
            )

    def fallbacks(self, weights: Weights, ranks: int) -> Iterator[Choices]:
        """Yield these choices, then alternatives to try if no mesh fits: VAE in host memory, int8 weights, and both."""
        in_host_memory: Literal["first", "offload"] = "first" if ranks > 1 else "offload"
        placements = [self.vae_placement]
        placements += [in_host_memory] if self.vae_placement is None and weights.vae else []
        schemes = [self.quantize, *["int8"] * (self.quantize is None and weights.in_8_bits is not None)]
        for quantize, placement in product(schemes, placements):
            yield replace(self, quantize=quantize, vae_placement=placement)
