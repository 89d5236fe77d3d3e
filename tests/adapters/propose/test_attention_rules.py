"""Segments of attention calls are guessed from lengths in a smaller and in a larger call, which are given here."""

import pytest

from para_core.adapters.propose.attention_rules import guess_attention
from para_core.adapters.propose.choices import Choice
from para_core.adapters.propose.records import ModuleCall, ObservedAttention, ObservedCall
from para_core.adapters.propose.region import Ending, ObservedRegion
from para_core.adapters.propose.start import Start
from para_core.plans.plan import Attention

# The smaller call has 12 tokens, 3 of text and 4 frames; the larger one 20 tokens. Calls are (name, queries, keys).
IMAGE, JOINT, TO_TEXT, FRAME = ((12, 20), (12, 20)), ((15, 23), (15, 23)), ((12, 20), (3, 3)), ((7, 9), (3, 3))
TEXT_FIRST, ALONE, BOTH = ("text", "image"), Attention(("image",)), Attention(("image",), ("text",))
BY_KEYS = Attention(("image",), None, "keys")


def call(name, ended):
    return ModuleCall(name, None, 0, ended, {}, None)


def guess(*lengths, names=None, ended=50, columns=None, **choice):
    """Return the guess for attention calls of these lengths in ``names`` and, if they differ, in larger ``names``."""
    small, large = names or [[f"blocks.{index}.attn" for index in range(len(lengths))]] * 2
    calls = [
        ObservedCall(
            calls=[call("blocks.0", 99)],
            attention=[
                # The mask has the keys as columns.
                ObservedAttention(name, time, queries[which], keys[which], (1, 1, 1, columns or keys[which]))
                for time, (name, (queries, keys)) in enumerate(zip(of_call, lengths, strict=True), start=1)
            ],
        )
        for which, of_call in enumerate((small, large))
    ]
    region = ObservedRegion(Start("blocks.0", (12, 20), ("x",), 1), *calls, "image")
    choice = Choice(**{"text_first": True, "split_masks": False, "mask": None, **choice})
    return guess_attention(region, choice, Ending(call("head", ended), ()))


@pytest.mark.parametrize(
    ("lengths", "choice", "order", "rules"),
    [
        ([JOINT], {"text_first": False}, ("image", "text"), {}),
        ([JOINT, IMAGE], {}, TEXT_FIRST, {"blocks.1.attn": (ALONE,)}),
        ([IMAGE, JOINT, JOINT], {}, TEXT_FIRST, {"blocks.0.attn": (ALONE,)}),
        # A mask with one column for all keys, and a call after the tokens are gathered.
        ([IMAGE], {"mask": "keys", "columns": 1}, ("image",), {}),
        ([IMAGE, ((7, 9), (7, 9))], {"ended": 2}, ("image",), {}),
        ([IMAGE, TO_TEXT], {"mask": "keys"}, ("image",), {"blocks.0.attn": (BY_KEYS,), "blocks.1.attn": (BOTH,)}),
        ([FRAME, FRAME], {}, ("image",), {"blocks.*.attn": (BOTH,)}),
        # Calls of one module are one rule.
        ([IMAGE, TO_TEXT, TO_TEXT], {"names": [["a", "a", "a"]] * 2}, ("image",), {"a": (ALONE, BOTH)}),
    ],
)
def test_guess(lengths, choice, order, rules):
    found = guess(*lengths, **choice)
    assert (found.joint_order, found.rules) == (order, rules)


def test_reason_does_not_claim_a_length_that_was_not_observed():
    assert not any("lengths are those" in reason for reason in guess(FRAME).reasons)
    assert "lengths are those" in guess(JOINT, IMAGE).reasons[-1]


@pytest.mark.parametrize(
    ("lengths", "names"),
    [([((7, 9), (12, 20))], None), ([((12, 20), (7, 9))], None), ([IMAGE, TO_TEXT], [["a", "b"], ["b", "a"]])],
)
def test_lengths_that_fit_nothing_and_other_modules_give_no_guess(lengths, names):
    assert guess(*lengths, names=names) is None
