"""Patch plans, which say how PipeFusion splits the tokens of a model into patches, and how they follow from a plan.

``adapters/weights/fused_pipe.py`` asks for one when PipeFusion is switched on; :mod:`.patch_hooks` and
:mod:`.pipefusion` apply it. Tests: tests/weights/test_pipefusion.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from para_core.layout.sequence import Run, Segment
from para_core.plans.module_matching import gathers_as_tuple, parameters_of
from para_core.plans.plan import (
    AttentionByHeads,
    Entries,
    FirstTokens,
    Gather,
    LastTokens,
    Plan,
    Replicate,
    ShardRule,
    Split,
)


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
        kind: What is split: the tokens of ``hidden_states`` ``[B, S, D]``, or the frames of its latents
            ``[B, C, T, H, W]``.
        dim: The dim along which ``hidden_states`` and the output are split.
        together: Number of consecutive entries along ``dim`` that stay in one patch.
    """

    plan: Plan
    segment: str
    kind: Literal["tokens", "frames"]
    dim: int
    together: int = 1

    @property
    def ndim(self) -> int:
        """Number of dims of ``hidden_states``."""
        if self.kind == "tokens":
            return 3
        return 5

    @property
    def returns_patch(self) -> bool:
        """Whether the model returns only the tokens of a patch.

        If not, only the patch in its whole output is valid.
        """
        return "" in self.plan.outputs

    def runs(self, hidden_states: Tensor, num_patches: int) -> list[Run]:
        """Return the first index and the length of each patch along ``dim`` of ``hidden_states``.

        Raise ``ValueError`` if it does not have the expected dims, or fewer tokens or groups of frames than
        patches.
        """
        shape, together = list(hidden_states.shape), self.together
        if len(shape) != self.ndim or shape[self.dim] % together:
            raise ValueError(
                f"the model's input is {shape}; PipeFusion expects {self.ndim} dims, and in dim {self.dim} a "
                f"multiple of {together}."
            )
        what = "tokens"
        if self.kind == "frames" and together == 1:
            what = "frames of latents"
        elif self.kind == "frames":
            what = f"groups of {together} frames of latents"
        patches = patch_runs(shape[self.dim] // together, num_patches, what)
        return [(together * begin, together * length) for begin, length in patches]


def patch_plan(plan: Plan | None, module: nn.Module, frames: Frames | None) -> PatchPlan:
    """Return how ``plan`` splits the tokens of ``module`` into patches.

    Raise ``TypeError``, with why, if it cannot.
    """
    if plan is None or "hidden_states" not in parameters_of(module):
        raise TypeError("no plan says which of its inputs are tokens")
    gather = _require_one_gather(plan)
    _check_rules(plan)
    rule, segment = plan.inputs.get("hidden_states"), gather.segment
    # The scheduler adds the model's output to hidden_states, so both hold tokens, or both hold latents.
    takes_tokens = "" in plan.outputs or (isinstance(rule, Split) and rule.segment == segment)
    if takes_tokens and gather.dim != 1:
        raise TypeError(f"its output has tokens in dim {gather.dim}; PipeFusion expects [B, S, D]")
    if takes_tokens:
        return PatchPlan(plan, segment, "tokens", dim=1)
    if frames is None:
        raise TypeError(
            "it makes tokens from its input, and its adapter does not say from which part (Adapter(frames=Frames(...)))"
        )
    return PatchPlan(plan, segment, "frames", frames.dim, _latent_frames_together(module, frames))


def _latent_frames_together(module: nn.Module, frames: Frames) -> int:
    """Return how many latent frames ``module`` turns into one frame of tokens. Raise ``TypeError`` if its
    config does not have the entry that ``frames`` names.
    """
    if frames.together is None:
        return 1
    config: Any = getattr(module, "config", {})
    if frames.together not in config:
        raise TypeError(
            f"its config has no {frames.together!r}, which Frames(together=...) of its adapter names"
        )
    together = config[frames.together]
    if isinstance(together, (tuple, list)):
        together = together[0]
    # CogVideoX has None there, and CogVideoX 1.5 a number.
    return int(together or 1)


def _require_one_gather(plan: Plan) -> Gather:
    """Return the rule that gathers the only output of a model with ``plan``. Raise ``TypeError`` if it has
    another.

    ``Fusion`` (pipefusion.py) puts the model's only output tensor together from the patches: patch m is the
    run m of ``PatchPlan.dim``. With several outputs it would not know which, and with other entries before or
    after the tokens, or several for each token, the runs would be wrong.
    """
    gathers = [
        gather for rule in plan.outputs.values() for gather in gathers_as_tuple(rule) if gather is not None
    ]
    gathers_one_tensor = len(gathers) == 1 and len(gathers_as_tuple(plan.outputs.get("", gathers[0]))) == 1
    if gathers_one_tensor:
        (gather,) = gathers
        holds_only_tokens = gather.per == 1 and not (gather.after_replicated or gather.then_replicated)
        if holds_only_tokens:
            return gather
    raise TypeError("what it returns are not the tokens of one image or video")


def _check_rules(plan: Plan) -> None:
    """Raise ``TypeError`` if patch_hooks.py or stale_keys.py cannot run ``plan`` on one patch."""
    rules = plan.shard_rules
    # The executor of a patch sends nothing, so it can neither fetch rows of a neighbour (halos) nor gather an
    # input. The other rules that are not listed were never tried on patches.
    if plan.halos or not all(
        isinstance(rule, (Split, Replicate, FirstTokens, LastTokens, Entries)) for rule in rules
    ):
        raise TypeError("some of its modules need the tokens of other patches")
    # Each patch would run the other entries of such a tensor again. A Split with ``runs`` or ``only`` holds
    # nothing but entries for tokens, of which a patch takes its own, as a rank does.
    splits: list[ShardRule | None] = []
    for rule in rules:
        if isinstance(rule, Entries):
            splits += rule.cuts
        else:
            splits.append(rule)
    if any(isinstance(rule, Split) and (rule.then_replicated or rule.after_replicated) for rule in splits):
        raise TypeError("its tokens share a tensor with others")
    # Such a segment has groups of its own, which the number of frames of a call does not change.
    if any(isinstance(rule, Split) and rule.together for rule in splits):
        raise TypeError("its tokens are split before they have one dim")
    # PatchHooks intercepts attention calls only, each of which StaleKeys gives the stored keys. It neither
    # exchanges tokens for heads, nor adds up the sums of LinearAttention, nor counts the entries of
    # OneForEach.
    attention = plan.attention.values()
    if any(isinstance(calls, AttentionByHeads) for calls in attention):
        raise TypeError("its attention needs the tokens of all patches at once")
    # StaleKeys stores a mask of keys. A mask of pairs has the rows of one patch only.
    if not all(
        isinstance(calls, tuple) and all(call.mask != "pairs" for call in calls) for calls in attention
    ):
        raise TypeError("it attends to sums, to lists, or by a mask of pairs of tokens")


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
