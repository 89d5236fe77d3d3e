"""Plans are proposed for models whose blocks are arranged in other ways than in diffusers, or an error gives the
reason.
"""

import pytest
import torch

from para_core import Gather, Split, check_parallel
from para_core.adapters import Adapter, propose_plan
from para_core.adapters.propose.proposal import source_of
from para_core.plans.plan import (
    Attention,
    AttentionByHeads,
    Count,
    Entries,
    FirstTokens,
    Halo,
    LastTokens,
    LinearAttention,
    OneForEach,
    Plan,
    Replicate,
    SplitMask,
)
from tests.adapters.propose.outside import (
    Dit,
    EncoderModel,
    FlashAttention,
    HalfByHand,
    HandAttention,
    Joint,
    ListVit,
    NormLists,
    PaddedModel,
    Vit,
    dit_inputs,
    image,
    joint_inputs,
)
from zoo.tiny.base import fill

pytestmark = pytest.mark.slow


def assert_exact(model, proposal, inputs, **options):
    assert proposal.plan is not None, str(proposal)
    check = check_parallel(model, plan=proposal.plan, **inputs, **options)
    assert check.exact, str(check)
    assert check.error < 1e-5


def test_blocks_in_a_sequence_are_found_with_their_stack():
    model = fill(Vit(), seed=1).eval()
    proposal = propose_plan(model, (image(16, 20), image(16, 32)))
    assert_exact(model, proposal, image(20, 24))
    assert proposal.blocks.groups[0].lists == ("blocks",)
    assert proposal.blocks.groups[0].chained


def test_blocks_with_any_arguments_are_found():
    model = fill(Joint(), seed=1).eval()
    proposal = propose_plan(model, (joint_inputs(8, 10), joint_inputs(8, 14)))
    assert_exact(model, proposal, joint_inputs(6, 14))
    assert proposal.plan.inner["joint_blocks.0"]["args[1]"] == Split(1, segment="image")
    assert proposal.blocks.conditions == ("context",)


def test_model_of_one_size_needs_one_example():
    model = fill(Dit(), seed=1).eval()
    proposal = propose_plan(model, (dit_inputs(),))
    assert_exact(model, proposal, dit_inputs(), ranks=(2, 3))
    # The time step is an integer like the label, but it changes from step to step, so it identifies no branch.
    assert proposal.blocks.conditions == ("y",)


class Listed(Joint):
    """A model that takes text as Wan's official code does: a list of [L, C]."""

    def forward(self, x, t, context):
        return super().forward(x, t, torch.zeros(x.shape[0], 6), torch.stack(context))


class Pooled(Dit):
    """A model that takes an embedding for each sample instead of a label."""

    def forward(self, x, t, pooled):
        return super().forward(x, t, pooled.argmax(dim=1))


def test_conditions_are_found_in_lists_and_as_embeddings():
    inputs = joint_inputs(6, 14)
    listed = {"x": inputs["x"], "t": inputs["t"], "context": [*inputs["context"]]}
    assert propose_plan(fill(Listed(), seed=1), (listed,)).blocks.conditions == ("context",)
    pooled = {"x": dit_inputs()["x"], "t": torch.tensor([7, 7]), "pooled": torch.randn(2, 6)}
    assert propose_plan(fill(Pooled(), seed=1), (pooled,)).blocks.conditions == ("pooled",)


def test_model_of_one_size_refuses_two_examples():
    with pytest.raises(ValueError, match=r"second: RuntimeError: .*25.*example_inputs=\(inputs,\)"):
        propose_plan(fill(Dit(), seed=1), (dit_inputs(), dit_inputs(12)))


@pytest.mark.parametrize("examples", [image(16, 20), (), (image(16, 20),) * 3, ("x", "y")])
def test_examples_that_are_no_dicts_raise(examples):
    with pytest.raises(TypeError, match="example_inputs"):
        propose_plan(fill(Vit(), seed=1), examples)


def test_joint_attention_is_found_from_one_example():
    model = fill(Joint(), seed=1).eval()
    proposal = propose_plan(model, (joint_inputs(6, 14),))
    assert_exact(model, proposal, joint_inputs(6, 14))


def test_nested_lists_are_found_by_their_parent():
    model = fill(ListVit(), seed=1).eval()
    proposal = propose_plan(model, (image(16, 20), image(16, 32)))
    assert_exact(model, proposal, image(20, 24))
    assert proposal.plan.inner == {"transformer": {"x": Split(1, segment="image")}}


def test_lists_of_norms_are_no_blocks():
    """Check that lists of norms are not taken for blocks, because a cache of these would skip norms."""
    model = fill(ListVit(lists=NormLists), seed=1).eval()
    proposal = propose_plan(model, (image(16, 20), image(16, 32)))
    assert_exact(model, proposal, image(20, 24))
    assert proposal.blocks is None


def test_attention_that_is_partly_written_by_hand_is_named():
    with pytest.raises(ValueError, match=r"softmax .*blocks\.layers\.0\.0 .*\[2, 2, 20, 20\]"):
        propose_plan(fill(HalfByHand(), seed=1), (image(16, 20), image(16, 32)))


def test_flash_attention_is_seen():
    model = fill(ListVit(FlashAttention), seed=1).eval()
    proposal = propose_plan(model, (image(16, 20), image(16, 32)))
    assert_exact(model, proposal, image(20, 24))


def test_attention_that_is_written_by_hand_is_named():
    with pytest.raises(ValueError, match=r"softmax .*transformer\.layers\.0\.0 .*\[2, 2, 20, 20\]"):
        propose_plan(fill(ListVit(HandAttention), seed=1), (image(16, 20), image(16, 32)))


def test_the_encoder_of_torch_is_found():
    model = fill(EncoderModel(), seed=1).eval()
    inputs = [{"x": torch.randn(2, n, 4)} for n in (13, 21, 17)]
    assert_exact(model, propose_plan(model, inputs[:2]), inputs[2])


def test_answers_say_all_of_a_plan_without_a_guess():
    model = fill(EncoderModel(), seed=1).eval()
    inputs = [{"x": torch.randn(2, n, 4)} for n in (13, 21, 17)]
    answers = {"(x)": Split(1, segment="image"), "": Gather(1, "image"), "CachedBlocks": None, "samples": None}
    proposal = propose_plan(model, inputs[:2], answers=answers)
    assert proposal.plan.inputs == {"x": Split(1, segment="image")}
    assert proposal.plan.inner == {}
    assert proposal.plan.outputs == {"": Gather(1, "image")}
    assert proposal.questions == ()
    assert_exact(model, proposal, inputs[2])


def test_split_of_output_replaces_the_guess():
    model = fill(Dit(), seed=1).eval()
    # Only inputs of blocks can be sharded here, not the tensor to which the position embedding is added.
    answers = {"blocks.0(0)": Split(1, segment="image")}
    proposal = propose_plan(model, (dit_inputs(),), answers=answers)
    assert proposal.plan.inner == {"blocks.0": {0: Split(1, segment="image")}}
    assert_exact(model, proposal, dit_inputs())


def test_a_plan_is_an_answer():
    model = fill(Vit(), seed=1).eval()
    plan = propose_plan(model, (image(16, 20), image(16, 32))).plan
    proposal = propose_plan(model, (image(16, 20), image(16, 24)), answers={"plan": plan})
    assert proposal.plan == plan
    wrong = {"plan": plan, "norm": Gather(1, "tokens")}
    rejected = propose_plan(model, (image(16, 20), image(16, 24)), answers=wrong)
    assert rejected.plan is None
    assert rejected.questions


def test_attention_by_heads_is_an_answer():
    model = fill(PaddedModel(), seed=1).eval()
    inputs = [{"x": torch.randn(2, n, 4)} for n in (13, 21, 17)]
    assert propose_plan(model, inputs[:2]).plan is None
    by_heads = AttentionByHeads("image", ("q", "k", "v"), "out")
    proposal = propose_plan(model, inputs[:2], answers={"blocks.*.attn": by_heads})
    assert_exact(model, proposal, inputs[2])
    assert proposal.plan.attention == {"blocks.*.attn": by_heads}


def test_source_imports_each_part_of_a_plan():
    joint, cross = Attention(("image", "text")), Attention(("image",), keys=("text",))
    cuts = {
        "a": Split(1, segment="image"),
        "b": Replicate(1, "text"),
        "c": Count("image", (0, 0)),
        "d": FirstTokens("image"),
        "e": LastTokens("image"),
        "f": Gather(1, "image"),
        "g": Entries((Split(1, like="image"), None)),
        "h": SplitMask(("image",)),
    }
    attention = {
        "a": (joint,),
        "b": OneForEach("texts", cross, joint),
        "c": LinearAttention("image", (("sum", 0),)),
        "d": AttentionByHeads("image", ("q",), "out"),
    }
    halos = {"conv": Halo(1, "image", 1)}
    plan = Plan(
        cuts, {"out": (None, Gather(1, "image"))}, ("image", "text"), {"blocks.0": {0: cuts["a"]}}, attention, halos
    )
    for part in (plan, Plan({}, {}, ("image",), attention={"c": attention["c"]})):
        adapter = Adapter("Model", "Model", part)
        names = {}
        exec(source_of(adapter), names)
        assert names["ADAPTER"] == adapter
