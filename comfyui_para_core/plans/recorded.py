"""The type of a recorded plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from para_core.adapters import Adapter

# Returns, for a model and the arguments of a call, what the plan does not describe, in a few words that fit
# into the message of checks.require_checked; "" if there is nothing.
Refusal = Callable[[nn.Module, Mapping[str, Any]], str]


@dataclass(frozen=True)
class RecordedPlan:
    """The plan of one class of ``comfy/ldm``, found by ``propose_plan`` and compared with ComfyUI.

    ``python -m benchmarks.comfyui.classes`` makes the comparison, on tiny models of the class.

    Args:
        cls: Module below ``comfy.ldm``, and class: ``"wan.model.WanModel"``.
        models: The models as users know them.
        arguments: Arguments of the method at the cut (:mod:`..cut`) that a call may have. Others are refused.
            benchmarks/comfyui/cases.py has those with which the plan was compared. The rest is read before
            the tokens are split, or not at all, or by blocks of a kind that was compared with it in another
            class (``clip_fea`` of VACE, ``attention_mask`` of LTX-2).
        adapter: The plan, and the block stack for First Block Cache; None if ``refused`` is given.
        refused: Why the class cannot run on several ranks.
        refusals: Functions that name values of ``arguments`` which the plan does not describe.
        prepare: Returns the arguments of a call in a form that the plan describes, with which the output is
            the same. It runs on every rank, on the arguments of all tokens.
    """

    cls: str
    models: str
    arguments: tuple[str, ...] = ()
    adapter: Adapter | None = None
    refused: str = ""
    refusals: tuple[Refusal, ...] = ()
    prepare: Callable[[nn.Module, Mapping[str, Any]], Mapping[str, Any]] | None = None
