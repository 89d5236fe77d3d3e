"""Plans are proposed for models whose blocks are arranged in other ways than in diffusers, or an error gives the
reason.
"""

from functools import partial

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
    EncoderModel,
    HalfByHand,
    HandAttention,
    ListVit,
    NormLists,
    PaddedModel,
    image,
)
from tests.outside.inputs import build, inputs_of
from tests.outside.official import DiT, MMDiTX
from tests.outside.others import VisionTransformer
from zoo.tiny.base import fill

pytestmark = pytest.mark.slow


def propose_exact(model, examples, inputs, ranks=2, **options):
    """Propose a plan from ``examples``, and return the proposal if it is exact for ``inputs``."""
    model = fill(model, seed=1).eval()
    proposal = propose_plan(model, examples, **options)
    assert proposal.plan is not None, str(proposal)
    check = check_parallel(model, plan=proposal.plan, ranks=ranks, **inputs)
    assert check.exact, str(check)
    assert check.error < 1e-5
    return proposal


def examples_of(name):
    return inputs_of(name, 0), inputs_of(name, 1)


IMAGES = image(16, 20), image(16, 32)
# The time step is an integer like the label, but it changes from step to step, so it identifies no branch.
DIT = {**inputs_of("DiT"), "t": torch.tensor([7, 7])}
TOKENS = [{"x": torch.randn(2, n, 4, generator=torch.Generator().manual_seed(n))} for n in (13, 21, 17)]
# The model, its examples, and the inputs of the check.
EXACT = {
    "blocks in a sequence": (VisionTransformer, examples_of("timm ViT"), inputs_of("timm ViT")),
    "blocks with any arguments": (
        MMDiTX,
        examples_of("Stable Diffusion 3.5"),
        inputs_of("Stable Diffusion 3.5"),
    ),
    "joint attention from one example": (
        MMDiTX,
        (inputs_of("Stable Diffusion 3.5"),),
        inputs_of("Stable Diffusion 3.5"),
    ),
    "a model of one size": (DiT, (DIT,), DIT),
    "nested lists": (ListVit, IMAGES, image(20, 24)),
    "lists of norms": (partial(ListVit, lists=NormLists), IMAGES, image(20, 24)),
    "torch's encoder": (EncoderModel, TOKENS[:2], TOKENS[2]),
}


@pytest.mark.parametrize("what", EXACT)
def test_plan_of_another_structure_is_exact(what):
    make, examples, inputs = EXACT[what]
    proposal = propose_exact(make(), examples, inputs, ranks=(2, 3) if make is DiT else 2)
    if make is VisionTransformer:
        assert proposal.blocks.groups[0].lists == ("blocks",)
        assert proposal.blocks.groups[0].chained
    if what == "blocks with any arguments":
        assert proposal.plan.inner["joint_blocks.0"]["args[1]"] == Split(1, segment="image")
        assert proposal.blocks.conditions == ("context",)
    if make is DiT:
        assert proposal.blocks.conditions == ("y",)
    if make is ListVit:
        assert proposal.plan.inner == {"transformer": {"x": Split(1, segment="image")}}
    if what == "lists of norms":
        # A cache of lists of norms would skip norms.
        assert proposal.blocks is None


class Listed(MMDiTX):
    """A model that takes text as Wan's official code does: a list of [L, C]."""

    def forward(self, x, t, context):
        return super().forward(x, t, torch.zeros(x.shape[0], 12), torch.stack(context))


class Pooled(DiT):
    """A model that takes an embedding for each sample instead of a label."""

    def forward(self, x, t, pooled):
        return super().forward(x, t, pooled.argmax(dim=1))


def test_conditions_are_found_in_lists_and_as_embeddings():
    inputs = inputs_of("Stable Diffusion 3.5")
    listed = {"x": inputs["x"], "t": inputs["t"], "context": [*inputs["context"]]}
    assert propose_plan(fill(Listed(), seed=1), (listed,)).blocks.conditions == ("context",)
    pooled = {"x": DIT["x"], "t": DIT["t"], "pooled": torch.randn(2, 6)}
    assert propose_plan(fill(Pooled(), seed=1), (pooled,)).blocks.conditions == ("pooled",)


REFUSED = {
    "two sizes for a model of one": (
        DiT,
        (DIT, {**DIT, "x": torch.randn(2, 4, 12, 12)}),
        r"second: RuntimeError: .*49.*example_inputs=\(inputs,\)",
    ),
    "attention by hand": (
        partial(ListVit, HandAttention),
        IMAGES,
        r"softmax .*transformer\.layers\.0\.0 .*\[2, 2, 20, 20\]",
    ),
    "attention partly by hand": (HalfByHand, IMAGES, r"softmax .*blocks\.layers\.0\.0 .*\[2, 2, 20, 20\]"),
    "one dict": (ListVit, image(16, 20), "example_inputs"),
    "no examples": (ListVit, (), "example_inputs"),
    "three examples": (ListVit, (image(16, 20),) * 3, "example_inputs"),
    "strings": (ListVit, ("x", "y"), "example_inputs"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_model_or_examples_are_refused(what):
    make, examples, message = REFUSED[what]
    with pytest.raises(TypeError if message == "example_inputs" else ValueError, match=message):
        propose_plan(fill(make(), seed=1), examples)


def test_answers_replace_guesses():
    answers = {"(x)": Split(1, segment="image"), "": Gather(1, "image"), "CachedBlocks": None, "samples": None}
    proposal = propose_exact(EncoderModel(), TOKENS[:2], TOKENS[2], answers=answers)
    assert proposal.plan.inputs == {"x": Split(1, segment="image")}
    assert proposal.plan.inner == {}
    assert proposal.plan.outputs == {"": Gather(1, "image")}
    assert proposal.questions == ()
    # Only inputs of blocks can be sharded here, not the tensor to which the position embedding is added.
    answers = {"blocks.0(0)": Split(1, segment="image")}
    proposal = propose_exact(DiT(), (DIT,), DIT, answers=answers)
    assert proposal.plan.inner == {"blocks.0": {0: Split(1, segment="image")}}
    assert propose_plan(fill(PaddedModel(), seed=1).eval(), TOKENS[:2]).plan is None
    by_heads = AttentionByHeads("image", ("q", "k", "v"), "out")
    proposal = propose_exact(PaddedModel(), TOKENS[:2], TOKENS[2], answers={"blocks.*.attn": by_heads})
    assert proposal.plan.attention == {"blocks.*.attn": by_heads}


def test_a_plan_is_an_answer():
    model, examples = build("timm ViT"), examples_of("timm ViT")
    plan = propose_plan(model, examples).plan
    other = examples[0], inputs_of("timm ViT")
    assert propose_plan(model, other, answers={"plan": plan}).plan == plan
    rejected = propose_plan(model, other, answers={"plan": plan, "norm": Gather(1, "tokens")})
    assert rejected.plan is None
    assert rejected.questions


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
    plan = Plan(
        cuts,
        {"out": (None, Gather(1, "image"))},
        ("image", "text"),
        {"blocks.0": {0: cuts["a"]}},
        attention,
        {"conv": Halo(1, "image", 1)},
        refused={"y": 'it is "new"'},
    )
    for part in (plan, Plan({}, {}, ("image",), attention={"c": attention["c"]})):
        adapter = Adapter("Model", "Model", part)
        names = {}
        exec(source_of(adapter), names)
        assert names["ADAPTER"] == adapter
