"""Guess which arguments of a model distinguish CFG branches.

``block_groups.py`` and ``stack.py`` call it. The cache uses the answer to keep the branches apart
(``para_core/cache/branches.py``). Tests: tests/adapters/propose/test_structures.py.
"""

from __future__ import annotations

import re
from enum import Enum, auto
from typing import Any

from para_core.adapters.propose.records import ObservedCall, tensors_of

# Matches the words in names (between underscores) of arguments that change between steps, or with the strength of
# guidance: t, t_emb, temb, timesteps, r_timestep, sigma, logsnr, guidance, control_scale.
_TIME_WORD = re.compile(r"[trs]|scales?|(log)?(time|temb|step|sigma|snr|noise|guidance|alpha).*")
# Matches those that occur in no name of a text, such as timestep in timestep_proj. In prompt_s and text_time the
# words s and time may name texts.
_CERTAIN_TIME_WORD = re.compile(r"(timestep|temb|sigma|(log)?snr).*")
# Matches the words that may stand beside the others: time_embed is an embedding of a time step.
_EMBEDDING_WORD = re.compile(r"emb.*|proj|mod|cond|level")


class _Condition(Enum):
    """The kind of a condition, in the order in which kinds are preferred.

    A sequence, the text, differs between all prompts. An embedding may be one of the image size, and a tensor
    of integers or bools a mask, so these count only without the kinds before them.
    """

    SEQUENCE = auto()
    EMBEDDING = auto()
    LABEL = auto()


def guess_conditions(small: ObservedCall, large: ObservedCall) -> tuple[str, ...]:
    """Return the names of the arguments that distinguish CFG branches.

    These are sequences (text); if there are none, embeddings with one vector per sample; if there are none
    either, labels. Left out are arguments that grow with the tokens, and those whose names suggest time steps
    or embeddings of them. Some models take one for each frame, so these may look like a sequence.
    """
    image = _image_arguments(small, large)
    kinds = {
        name: _kind_of(name, value, large.inputs.get(name))
        for name, value in small.inputs.items()
        if name not in image
    }
    for kind in _Condition:
        names = tuple(name for name in kinds if kinds[name] is kind)
        if names:
            return names
    return ()


def _kind_of(name: str, value: Any, larger: Any) -> _Condition | None:
    """Return the kind of condition that the argument ``name`` holds; None if it holds none."""
    # A list may be longer in the larger call: what it has more grows.
    pairs = zip(tensors_of(value), tensors_of(larger), strict=False)
    fixed = [record for record, larger_record in pairs if record.shape == larger_record.shape]
    floating = [record.shape for record in fixed if record.dtype.is_floating_point]
    dims_of_sequence = 3
    if isinstance(value, (list, tuple)):
        dims_of_sequence = 2  # A list holds one tensor per sample, without the batch dim.
    is_sequence = any(len(shape) >= dims_of_sequence for shape in floating)
    if _is_named_after_time(name, is_sequence):
        return None
    if is_sequence:
        return _Condition.SEQUENCE
    if any(len(shape) == 2 and shape[1] > 1 for shape in floating):
        return _Condition.EMBEDDING
    if len(floating) < len(fixed):
        return _Condition.LABEL
    return None


def _is_named_after_time(name: str, is_sequence: bool) -> bool:
    """Whether the argument ``name`` probably holds time steps or strengths of guidance, or embeddings of them.

    If it is a sequence, it may as well be a text with a short name, so the whole name must say so.
    """
    words = name.lower().split("_")
    if not any(map(_TIME_WORD.fullmatch, words)):
        return False
    if not is_sequence or any(map(_CERTAIN_TIME_WORD.fullmatch, words)):
        return True
    return all(_TIME_WORD.fullmatch(word) or _EMBEDDING_WORD.fullmatch(word) for word in words)


def _image_arguments(small: ObservedCall, large: ObservedCall) -> list[str]:
    """Return the names of the arguments that hold the image if both calls have equal shapes; otherwise
    ``[]``.

    The calls have equal shapes if the model accepts one image size only. Of the arguments from which the
    tokens were computed, those with the most dims hold the image. If a text has as many dims and
    equal calls do not tell it apart, it is left out with them.
    """
    shapes = _shapes_by_name(small)
    if shapes != _shapes_by_name(large):
        return []
    most = max((len(shape) for name in small.sources for shape in shapes[name]), default=0)
    return [name for name in small.sources if any(len(shape) == most for shape in shapes[name])]


def _shapes_by_name(observed: ObservedCall) -> dict[str, list[tuple[int, ...]]]:
    return {name: [x.shape for x in tensors_of(value)] for name, value in observed.inputs.items()}
