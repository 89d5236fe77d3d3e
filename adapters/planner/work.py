"""The work of one generation: sizes, operations of a transformer call, weights. Imports no torch.

:mod:`para_core.adapters.planner.count` counts it on a model without weights; published models have stored
counts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from para_core.adapters.planner.weights import Weights


@dataclass(frozen=True)
class GenerationSizes:
    """Sizes of one generation: pixels, frames (1 for an image) and text tokens; and the dtype of its inputs.

    A latent pixel has ``spatial`` pixels along each side, and a latent frame after the first has ``temporal``
    frames. A dtype of None stands for torch's default.
    """

    height: int
    width: int
    frames: int
    text: int
    spatial: int = 8
    temporal: int = 4
    dtype: torch.dtype | None = None

    @property
    def latents(self) -> tuple[int, int, int]:
        """Number of frames, height and width of the latents.
        Both are even: pixels that are left over are cut.
        """
        height, width = (2 * (side // (2 * self.spatial)) for side in (self.height, self.width))
        return (self.frames - 1) // self.temporal + 1, height, width

    @property
    def tokens(self) -> int:
        """Number of tokens of an image or of a latent frame, each of 2 × 2 latent pixels."""
        _, height, width = self.latents
        return (height // 2) * (width // 2)

    def __str__(self) -> str:
        pixels = f"{self.width} × {self.height}"
        if self.frames == 1:
            return pixels
        return f"{pixels} × {self.frames}"

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return an empty tensor of the dtype of the inputs, or of ``dtype``."""
        # Imported here, because the sizes of a published model need no torch.
        import torch

        return torch.empty(shape, dtype=dtype or self.dtype)


def check_size(name: str, sizes: GenerationSizes, *, is_video: bool) -> None:
    """Raise ValueError if model ``name`` cannot generate ``sizes``: frames of an image, or less than one token."""
    if not is_video and sizes.frames > 1:
        raise ValueError(f"frames is {sizes.frames}, but {name} generates images: omit frames.")
    least = 2 * sizes.spatial  # For most models a token is 2 × 2 latent pixels.
    if min(sizes.height, sizes.width) < least:
        raise ValueError(
            f"{sizes.width} × {sizes.height} pixels are less than one token of {name}; expected at least {least} × "
            f"{least}."
        )


@dataclass(frozen=True)
class AttentionWork:
    """Equal attention calls of a transformer call.

    Args:
        calls (`int`): Number of these calls.
        samples (`int`): Samples of the batch.
        heads, key_heads (`int`): Heads of the queries, and of the keys and values.
        width (`int`): Features of a head in a query (or key) and in a value together.
        element_size (`int`): Bytes of an element.
        queries, keys (`int`): Tokens of one sample.
        exchanges (`bool`): Whether ranks exchange the keys. They do for attention to the sharded tokens
            themselves, and do not for attention to a text that every rank has.
    """

    calls: int
    samples: int
    heads: int
    key_heads: int
    width: int
    element_size: int
    queries: int
    keys: int
    exchanges: bool


@dataclass(frozen=True)
class CallWork:
    """The work of one transformer call on one device: while its tokens are sharded over ranks, and otherwise.

    Args:
        products (`tuple[float, float]`): Floating-point operations of matrix products and convolutions.
        moved (`tuple[float, float]`): Bytes that other operators read and write.
        peak (`tuple[float, float]`): Bytes of activations when they are largest.
        split (`float`): Operations of ``products`` that tensor ranks share.
        summed (`float`): Bytes of the results that tensor ranks add up.
        returned (`float`): Bytes of the output.
        launches (`int`): Number of operators that are not views; an attention call counts as one.
    """

    attention: tuple[AttentionWork, ...] = ()
    products: tuple[float, float] = (0.0, 0.0)
    moved: tuple[float, float] = (0.0, 0.0)
    peak: tuple[float, float] = (0.0, 0.0)
    split: float = 0.0
    summed: float = 0.0
    returned: float = 0.0
    launches: int = 0

    @property
    def longest(self) -> AttentionWork | None:
        """The attention call with the most queries; None if there is no attention."""
        return max(self.attention, key=lambda call: call.queries, default=None)

    def divide_samples(self, parts: int) -> CallWork:
        """Return the work of one of ``parts`` equal parts of the samples; launches stay as many."""

        def share(pair: tuple[float, float]) -> tuple[float, float]:
            return pair[0] / parts, pair[1] / parts

        return replace(
            self,
            attention=tuple(replace(call, samples=-(-call.samples // parts)) for call in self.attention),
            products=share(self.products),
            moved=share(self.moved),
            peak=share(self.peak),
            split=self.split / parts,
            summed=self.summed / parts,
            returned=self.returned / parts,
        )


@dataclass(frozen=True)
class Workload:
    """The work of one generation with a pipeline.

    Args:
        name (`str`): Name of the pipeline or model and the sizes, for messages.
        steps (`int`): Number of denoising steps.
        weights (`Weights`): The bytes of its weights.
        call (`CallWork`): The work of one call of its transformer, with all samples.
        branches (`int`): Number of CFG branches per step, and of prompts that are encoded.
        batched (`bool`): Whether one transformer call computes all branches, as samples of a batch. Otherwise
            there is one call for each.
        heads (`int`): Number of key heads of the transformer; 0 if it is unknown.
        uncounted (`str`): Why the operations are not counted, so that only weights are compared; empty if
            they are.
    """

    name: str
    sizes: GenerationSizes
    steps: int
    weights: Weights
    call: CallWork = CallWork()
    branches: int = 1
    batched: bool = False
    heads: int = 0
    uncounted: str = ""

    def call_on_rank(self, batch: int) -> tuple[CallWork, int]:
        """Return the work of a transformer call on a rank, with ``batch`` ranks along that mesh dim, and its
        calls per step.
        """
        if self.batched:
            return self.call.divide_samples(batch), 1
        return self.call, -(-self.branches // batch)


def require_positive(name: str, value: Any) -> int:
    """Return ``value``. Raise ValueError, which names the argument ``name``, if it is not a positive integer."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is {value!r}; expected a positive integer.")
    return value
