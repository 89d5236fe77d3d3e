"""What an adapter is: the facts about one model family of diffusers that para_core needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from para_core.plan import Plan


@dataclass(frozen=True)
class Adapter:
    """One transformer class of diffusers, and how it is run in parallel.

    Args:
        transformer: name of the transformer class; subclasses of it are meant, too.
        pipelines: what a user calls the pipelines that it serves, for messages.
        plan: what is split and gathered.
        refused: keys of ``joint_attention_kwargs`` that cannot be computed in parallel yet, each with the reason.
    """

    transformer: str
    pipelines: str
    plan: Plan
    refused: Mapping[str, str] = field(default_factory=dict)
