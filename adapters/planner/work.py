"""The work of one generation: sizes, operations of a transformer call, weights. Imports no torch.

:mod:`.count` counts it on a model without weights, and :mod:`.published` has stored counts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from para_core.adapters.planner.weights import Weights


@dataclass(frozen=True)
class GenerationSizes:
    """Sizes of one generation: pixels, frames (1 for an image) and text tokens.

    A latent pixel has ``spatial`` pixels along each side, a latent frame ``temporal`` frames, the first one 1.
    """

    height: int
    width: int
    frames: int
    text: int
    spatial: int = 8
    temporal: int = 4

    @property
    def uncut_latents(self) -> tuple[int, int, int]:
        """Number of frames, height and width of the latents of a model with a token for each latent pixel."""
        return (self.frames - 1) // self.temporal + 1, self.height // self.spatial, self.width // self.spatial

    @property
    def latents(self) -> tuple[int, int, int]:
        """Number of frames, height and width of the latents. Both sides are even: the rest is cut."""
        frames, height, width = self.uncut_latents
        return frames, height // 2 * 2, width // 2 * 2

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


def check_size(name: str, sizes: GenerationSizes, *, is_video: bool) -> None:
    """Raise ValueError if model ``name`` cannot generate ``sizes``: frames of an image, or less than one token."""
    if not is_video and sizes.frames > 1:
        raise ValueError(f"frames is {sizes.frames}, but {name} generates images: omit frames.")
    least = 2 * sizes.spatial  # For most models a token is 2 × 2 latent pixels.
    if min(sizes.height, sizes.width) < least:
        raise ValueError(
            f"{sizes.width} × {sizes.height} pixels are no token of {name}; expected at least {least} × {least}."
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
    """The work of one transformer call on one device.

    Args:
        products (`float`): Floating-point operations of matrix products and convolutions.
        moved (`float`): Bytes that other operators read and write.
        peak (`tuple[float, float]`): Bytes of activations at their peak: of those that ranks shard, and of
            those that each rank holds.
        summed (`float`): Bytes of the results that tensor ranks add up.
        launches (`int`): Number of operators that are not views; an attention call counts as one.
    """

    attention: tuple[AttentionWork, ...] = ()
    products: float = 0.0
    moved: float = 0.0
    peak: tuple[float, float] = (0.0, 0.0)
    summed: float = 0.0
    launches: int = 0

    def divide_samples(self, parts: int) -> CallWork:
        """Return the work of one of ``parts`` equal parts of the samples; launches stay as many."""
        return CallWork(
            attention=tuple(replace(call, samples=-(-call.samples // parts)) for call in self.attention),
            products=self.products / parts,
            moved=self.moved / parts,
            peak=(self.peak[0] / parts, self.peak[1] / parts),
            summed=self.summed / parts,
            launches=self.launches,
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
        uncounted (`str`): The reason why only weights are compared, not operations; empty if both are.
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
        """Return the work of a call and the calls per step of a rank, with ``batch`` ranks along that dim."""
        if self.batched:
            return self.call.divide_samples(batch), 1
        return self.call, -(-self.branches // batch)


def require_positive(name: str, value: Any) -> int:
    """Return ``value``. Raise ValueError, which names the argument ``name``, if it is not a positive integer."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is {value!r}; expected a positive integer.")
    return value
