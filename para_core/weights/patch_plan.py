"""Patch plans, which say how PipeFusion splits the tokens of a model into patches, and how they follow from a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from para_core.layout.sequence import Run, Segment
from para_core.plans.module_matching import gathers_as_tuple, parameters_of
from para_core.plans.plan import AttentionByHeads, Entries, FirstTokens, LastTokens, Plan, Replicate, Split


@dataclass(frozen=True)
class Frames:
    """A description of the frames of a video model. A patch consists of whole frames.

    Tokens must be ordered by frame, with equally many tokens for each frame.

    Args:
        dim (`int`): The dim of the frames in ``hidden_states`` and in the output.
        together (`str`, *optional*): Name of the entry of ``module.config`` with the number of latent frames
            that the model turns into one frame of tokens, such as a temporal patch size. If the entry is a
            tuple, its first number counts. Defaults to one latent frame.
    """

    dim: int
    together: str | None = None


@dataclass(frozen=True)
class PatchPlan:
    """A description of how one model is split into patches.

    Args:
        plan: The plan of the model.
        segment: Name of the segment that is split into patches. Other sharded segments of ``plan`` belong to
            the first patch, replicated segments to every patch.
        dim: The dim along which ``hidden_states``, of ``ndim`` dims, and the output are split.
        together: Number of consecutive entries along ``dim`` that stay in one patch.
    """

    plan: Plan
    segment: str
    dim: int
    together: int
    ndim: int

    @property
    def returns_patch(self) -> bool:
        """Whether the model returns only the tokens of a patch.

        If not, only the patch in its whole output is valid.
        """
        return "" in self.plan.outputs

    def runs(self, hidden_states: Tensor, num_patches: int) -> list[Run]:
        """Return the first index and the length of each patch along ``dim`` of ``hidden_states``.

        Raise ``ValueError`` if it does not have the expected dims, or has fewer tokens or frames than
        patches.
        """
        shape, together = list(hidden_states.shape), self.together
        if len(shape) != self.ndim or shape[self.dim] % together:
            raise ValueError(
                f"the model's input is {shape}; PipeFusion expects {self.ndim} dims, and in dim {self.dim} a "
                f"multiple of {together}."
            )
        what = "frames of latents"
        if self.ndim == 3:
            what = "tokens"
        patches = patch_runs(shape[self.dim] // together, num_patches, what)
        return [(together * begin, together * length) for begin, length in patches]


def patch_plan(plan: Plan | None, module: nn.Module, frames: Frames | None) -> PatchPlan:
    """Return how ``plan`` splits the tokens of ``module`` into patches.

    Raise ``TypeError``, with why, if it cannot.
    """
    if plan is None or "hidden_states" not in parameters_of(module):
        raise TypeError("no plan says which of its inputs are tokens")
    gathers = [
        gather for rule in plan.outputs.values() for gather in gathers_as_tuple(rule) if gather is not None
    ]
    if (
        len(gathers) != 1
        or len(gathers_as_tuple(plan.outputs.get("", gathers[0]))) != 1
        or gathers[0].per != 1
        or gathers[0].after_replicated
        or gathers[0].then_replicated
    ):
        raise TypeError("what it returns are not the tokens of one image or video")
    rules = plan.shard_rules
    if plan.halos or not all(
        isinstance(rule, (Split, Replicate, FirstTokens, LastTokens, Entries)) for rule in rules
    ):
        raise TypeError("some of its modules need the tokens of other patches")
    if any(isinstance(rule, Split) and (rule.then_replicated or rule.after_replicated) for rule in rules):
        raise TypeError("its tokens share a tensor with others")
    attention = plan.attention.values()
    if any(isinstance(calls, AttentionByHeads) for calls in attention):
        raise TypeError("its attention needs the tokens of all patches at once")
    if not all(
        isinstance(calls, tuple) and all(call.mask != "pairs" for call in calls) for calls in attention
    ):
        raise TypeError("it attends to sums, to lists, or by a mask of pairs of tokens")
    rule, segment = plan.inputs.get("hidden_states"), gathers[0].segment
    # The scheduler adds the model's output to hidden_states, so both hold tokens, or both hold latents.
    takes_tokens = "" in plan.outputs or (isinstance(rule, Split) and rule.segment == segment)
    if takes_tokens and gathers[0].dim == 1:
        return PatchPlan(plan, segment, dim=1, together=1, ndim=3)
    if frames is None or takes_tokens:
        raise TypeError(
            "it makes tokens from its input, and its adapter does not say from which part (Adapter(frames=Frames(...)))"
        )
    config: Any = module.config
    together = None
    if frames.together is not None:
        together = config[frames.together]
    if isinstance(together, (tuple, list)):
        together = together[0]
    together = int(together or 1)
    return PatchPlan(plan, segment, frames.dim, together, ndim=5)


def patch_runs(total: int, num_patches: int, what: str = "tokens") -> list[Run]:
    """Return the first index and the length of each patch of ``total`` entries (``what``), as
    ``torch.tensor_split`` splits them. Raise ``ValueError`` if there are more patches than entries.

    >>> patch_runs(10, 4)
    [(0, 3), (3, 3), (6, 2), (8, 2)]
    """
    if num_patches > total:
        raise ValueError(
            f"{total} {what} cannot be split into num_patches={num_patches} patches. Choose fewer."
        )
    return [Segment("patches", total).runs(patch, num_patches)[0] for patch in range(num_patches)]
