"""What an adapter is: the facts about one model family of diffusers that para_core needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from para_core.plan import Plan

# Whether text tokens are cut, or whole on every rank.
Text = Literal["shard", "replicate"]


@dataclass(frozen=True)
class Adapter:
    """One transformer class of diffusers, and how it is run in parallel.

    Args:
        transformer: name of the transformer class; subclasses of it are meant, too.
        pipelines: what a user calls the pipelines that it serves, for messages.
        plan: what is split and gathered; where text can be cut, it is, as the segment ``text``.
        text: the faster way to treat text.
    """

    transformer: str
    pipelines: str
    plan: Plan
    text: Text = "shard"
