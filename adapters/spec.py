"""What an adapter is: the facts about one model family of diffusers that para_core needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import nn

from para_core.cache.blocks import CachedBlocks
from para_core.plans.plan import Plan
from para_core.weights.patch_plan import Frames
from para_core.weights.tensor_plan import TensorPlan

# Whether text tokens are sharded, or replicated.
Text = Literal["shard", "replicate"]


@dataclass(frozen=True)
class Adapter:
    """One transformer class of diffusers, how it is run in parallel, and what is cached of it.

    Args:
        transformer: name of the transformer class; subclasses of it are meant, too.
        pipelines: what a user calls the pipelines that it serves, for messages.
        plan: what is split and gathered; where text can be sharded, it is, as the segment ``text``. None: what the class
            publishes.
        complete: the plan of one module, made of ``plan``, where it depends on the module's config.
        text: the faster way to treat text.
        blocks: its block stack, for First Block Cache.
        uncached: why it has no ``blocks``, for a message; None: they are not known.
        tensor: what is sharded by tensor parallelism; None: what the class publishes (``_tp_plan``).
        frames: where a model that makes tokens of a video has its frames: PipeFusion's patches are frames. None: it is given tokens, or it
            is not known.
        empty_text: whether the model takes no tokens of text at all: PipeFusion's patches behind the first then have none, else each has all.
        steps_with_copies: Whether one of its pipelines takes its steps with copies of its scheduler, one for each frame, and leaves the
            scheduler itself alone (diffusion forcing).
        threshold: the default ``residual_diff_threshold``.
        threshold_source: who recommends it.
    """

    transformer: str
    pipelines: str
    plan: Plan | None = None
    complete: Callable[[Plan, nn.Module], Plan] | None = None
    text: Text = "shard"
    blocks: CachedBlocks | None = None
    uncached: str | None = None
    tensor: TensorPlan | None = None
    frames: Frames | None = None
    empty_text: bool = True
    steps_with_copies: bool = False
    threshold: float = 0.05
    threshold_source: str = "diffusers' FirstBlockCacheConfig"
