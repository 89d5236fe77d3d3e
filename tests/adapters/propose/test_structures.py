"""A plan is proposed for models without an adapter, and only if it is exact, or an error or a question says why not."""

import re
from dataclasses import replace
from unittest import mock

import pytest
import torch
import transformers

from para_core import check_parallel
from para_core.adapters import Adapter, parallelize_transformer, propose_plan
from para_core.adapters.models import ADAPTERS
from para_core.adapters.propose import stack
from para_core.adapters.propose.conditions import guess_conditions
from para_core.adapters.propose.larger_call import imagine_larger_calls
from para_core.adapters.propose.overrides import with_answers
from para_core.adapters.propose.proposal import Proposal, source_of
from para_core.adapters.propose.questions import _ask_about_numbers
from para_core.adapters.propose.records import ModuleCall, ObservedAttention, ObservedCall, TensorRecord
from para_core.adapters.propose.region import ObservedRegion
from para_core.adapters.propose.start import Start
from para_core.cache.blocks import BlockGroup, CachedBlocks
from para_core.comparison.cached_call import CachedCallError
from para_core.comparison.virtual_ranks import first_error, outcomes_on_virtual_ranks, with_same_weights
from para_core.distributed.mesh import one_rank
from para_core.layout.sequence import Segment
from para_core.plans import plan as rules
from para_core.plans.apply import apply_plan
from para_core.plans.exchange import CachesOfCall
from para_core.plans.module_matching import match_modules
from para_core.plans.plan import CumulativeLengths, FirstTokens, Gather, Replicate, Split, SplitMask
from tests.adapters.propose import models
from tests.adapters.propose.models import OfFrames, frames_of, image, images_of, painter, painter_inputs, tokens_of
from tests.outside.inputs import build, inputs_of
from tests.outside.official import DiT, MMDiTX
from tests.outside.others import VisionTransformer
from tests.tiny import cpu_mesh, relative_errors
from zoo.tiny.base import fill, noise
from zoo.tiny.transformers.registry import MODELS

pytestmark = pytest.mark.slow

IMAGE = Split(1, segment="image")
PAINTER = painter_inputs(17), painter_inputs(31)
WEIGHTED = models.inputs_of_words(17), models.inputs_of_words(31)
IMAGES = image(16, 20), image(16, 32)
TOKENS = tokens_of(25), tokens_of(37)
VIT = inputs_of("timm ViT", 0), inputs_of("timm ViT", 1)
STREAMS = models.stream_inputs(25), models.stream_inputs(37)
BLOCKS = [{"input": noise(1, tokens, 24)} for tokens in (25, 37, 31)]
# The time step is an integer like the label, but it changes from step to step, so it identifies no branch.
DIT = {**inputs_of("DiT"), "t": torch.tensor([7, 7])}


OF_ROTARY = {"blocks.*.turn": {"x": Gather(-2, "image"), 0: Split(-2, like="image")}}
# The model, its examples, the inputs of the check, and rules of its inner modules.
EXACT = {
    "blocks in a sequence": (VisionTransformer, VIT, inputs_of("timm ViT"), {}),
    "only blocks": (lambda: torch.nn.Sequential(models.block(), models.block()), BLOCKS[:2], BLOCKS[2], {}),
    "blocks with any arguments": (
        MMDiTX,
        (inputs_of("Stable Diffusion 3.5", 0), inputs_of("Stable Diffusion 3.5", 1)),
        inputs_of("Stable Diffusion 3.5"),
        {"joint_blocks.0": {"args[1]": IMAGE}},
    ),
    "a model of one size": (DiT, (DIT,), DIT, {}),
    "nested lists": (models.lists, IMAGES, image(20, 24), {"transformer": {"x": IMAGE}}),
    "torch's encoder": (models.encoder, TOKENS, tokens_of(31), {}),
    "dataclasses": (models.streams, STREAMS, models.stream_inputs(31), {"blocks.0": {"stream.x": IMAGE}}),
    "rotary module": (models.rotated, TOKENS, tokens_of(31), OF_ROTARY),
    "table of last tokens": (
        models.with_others,
        TOKENS,
        tokens_of(31),
        {"blocks.*": {"angles": Split(0, like="image", only="last")}},
    ),
    "cumulative lengths": (
        models.tower,
        (images_of(5), images_of(9)),
        images_of(7),
        {"blocks.*": {"cu_seqlens": CumulativeLengths("image")}, "merger": {"x": Gather(-2, "image")}},
    ),
    "frames": (OfFrames, (frames_of(5), frames_of(7)), frames_of(5, 2, 5), models.OF_FRAMES),
}
# Inputs with fewer frames than ranks, or of which a rank has a single token.
FEW = {"frames": frames_of(2), "table of last tokens": tokens_of(4)}
CONDITIONS = {"blocks with any arguments": ("context",), "a model of one size": ("y",)}


def propose_exact(model, examples, inputs, ranks=2, **options):
    """Propose a plan from ``examples``, and return the proposal if it is exact for ``inputs``."""
    model = fill(model, seed=1).train()
    proposal = propose_plan(model, examples, **options)
    assert proposal.plan is not None, str(proposal)
    check = check_parallel(model, plan=proposal.plan, ranks=ranks, **inputs)
    assert check.exact and check.error < 1e-5, str(check)
    return proposal


@pytest.mark.parametrize("what", EXACT)
def test_plan_of_a_structure_is_exact(what):
    make, examples, inputs, inner = EXACT[what]
    model, segment = make(), "video" if what == "frames" else "image"
    ranks = (2, 3) if what in ("a model of one size", "rotary module", "cumulative lengths") else 2
    proposal = propose_exact(model, examples, inputs, ranks, segment=segment)
    for module, of_module in inner.items():
        assert of_module.items() <= proposal.plan.inner[module].items()
    if what in FEW:
        assert check_parallel(model, plan=proposal.plan, ranks=5, **FEW[what]).error < 1e-5
    if what in CONDITIONS:
        assert proposal.blocks.conditions == CONDITIONS[what]
    if what == "blocks in a sequence":
        assert proposal.blocks.groups[0].lists == ("blocks",) and proposal.blocks.groups[0].chained
    if what == "cumulative lengths":
        several = check_parallel(model, plan=proposal.plan, ranks=2, **images_of(4, 3))
        assert all("ValueError" in case.failure and "cu_seqlens" in case.failure for case in several.cases)


# Dynamo compiles flex_attention once for each virtual rank.
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_plan_of_flex_attention():
    model, other = (fill(models.causal_video(), seed=1) for _ in range(2))
    for block in model.blocks:
        block.compile(backend="eager")
    proposal = propose_plan(model, (models.causal_inputs(25, 7), models.causal_inputs(35, 7)))
    assert proposal.plan is not None, proposal
    assert any(isinstance(rule, SplitMask) for rule in proposal.plan.shard_rules)
    check = check_parallel(other, plan=proposal.plan, ranks=2, **models.causal_inputs(30, 7))
    assert check.error < 1e-5, check


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["flux", "wan", "hunyuan, image by token replacement"])
def test_known_models_are_found_without_their_adapters(name):
    model = MODELS[name]
    proposal = propose_plan(model.build(), (model.inputs(3, 6, 6), model.inputs(3, 6, 10)))
    assert proposal.error is not None and proposal.error < 1e-5 and proposal.blocks is not None
    assert adapter_of(proposal.source()) == proposal.adapter()


def adapter_of(source):
    """Return the adapter that the source of a module defines."""
    names = {}
    exec(source, names)
    return names["ADAPTER"]


def test_source_of_each_adapter_defines_it_again():
    for adapter in ADAPTERS:
        source = source_of(adapter)
        assert adapter_of(source) == adapter
        # Only a long text is longer than the formatter allows.
        assert all(len(line) <= 110 or line.endswith('",') for line in source.splitlines()), adapter.transformer
    with pytest.raises(NameError):
        adapter_of(source_of(replace(ADAPTERS[0], complete=lambda plan, module: plan)))
    with pytest.raises(ValueError, match="plan and its error"):
        Proposal("Model", ADAPTERS[0].plan)


# The model, its examples and the inputs of the ranks, answers, batch × ring × ulysses or the default mesh, and text=.
ON_RANKS = {
    "its own plan": (painter, PAINTER, painter_inputs(23), {}, (1, 1, 2), None),
    "samples": (painter, PAINTER, painter_inputs(23), {"samples": 2}, (2, 1, 1), None),
    "text, shard": (models.painter_of_words, WEIGHTED, models.inputs_of_words(23), {}, (1, 1, 2), "shard"),
    "text, replicate": (models.painter_of_words, WEIGHTED, models.inputs_of_words(23), {}, None, "replicate"),
}


def run_in_parallel(sources):
    outs = {}
    for what, (make, _, inputs, _, sizes, text) in ON_RANKS.items():
        mesh = None if sizes is None else cpu_mesh(*sizes[1:], batch=sizes[0])
        adapter = adapter_of(sources[what])
        transformer = parallelize_transformer(fill(make(), seed=1), mesh=mesh, text=text, adapter=adapter)
        with torch.no_grad():
            outs[what] = transformer(**inputs)
    return outs


def test_proposed_plans_are_exact_on_ranks(rank_pool):
    proposals, expected = {}, {}
    for what, (make, examples, inputs, answers, _, _) in ON_RANKS.items():
        transformer = fill(make(), seed=1)
        proposals[what] = propose_plan(transformer, examples, answers=answers)
        with torch.no_grad():
            expected[what] = transformer(**inputs)
    samples = proposals["samples"].plan
    assert (samples.batched, samples.common) == ({"latents": 0, "caption": 0}, ("positions",))
    assert proposals["text, shard"].plan.splits("text") and "text" in str(proposals["text, shard"])
    # Positions of text and image are one argument.
    own = proposals["its own plan"]
    assert not own.plan.splits("text")
    assert adapter_of(own.source()) == Adapter("Painter", "Painter", plan=own.plan, blocks=own.blocks)
    assert own.blocks.groups[0].streams == ("caption", "latents") and own.blocks.groups[0].chained
    assert "3 of 3 attention calls" in str(own)
    assert own.plan.batched == {} and "answers={'samples': 2}" in own.questions[0]
    for outs in rank_pool.run(run_in_parallel, 2, {what: proposal.source() for what, proposal in proposals.items()}):
        errors = relative_errors(outs, expected)
        assert max(errors.values()) < 1e-5, errors


def record(*shape, dtype=torch.float32):
    return TensorRecord(shape, dtype, identity=0, derived=False)


LABELS = record(2, dtype=torch.int64)
TIMES = {"timestep": record(2, 3, 1), "temb": record(2, 8), "t_emb": record(2, 3, 8)}


@pytest.mark.parametrize(
    ("arguments", "conditions"),
    [
        ({**TIMES, "y": LABELS, "pooled": record(2, 8), "prompt_s": record(2, 5, 16)}, ("prompt_s",)),
        ({**TIMES, "y": LABELS, "captions": [record(5, 16), record(4, 16)]}, ("captions",)),
        ({**TIMES, "y": LABELS, "grayscale_embeds": record(2, 8)}, ("grayscale_embeds",)),
        ({**TIMES, "y": LABELS, "logsnr": record(2, 8)}, ("y",)),
    ],
)
def test_conditions_are_text_or_else_embeddings_or_else_labels(arguments, conditions):
    small, large = (ObservedCall({"x": record(2, tokens, 4), **arguments}) for tokens in (16, 24))
    assert guess_conditions(small, large) == conditions


@pytest.mark.parametrize("more", [{}, {"left_out": 1}])
def test_arguments_between_blocks_and_that_leave_out_blocks_are_named(more):
    examples = [painter_inputs(tokens, controlled=True, **more) for tokens in (17, 31)]
    proposal = propose_plan(fill(painter(), seed=1), examples)
    assert proposal.blocks.groups[0].between == ("residuals",)
    assert proposal.blocks.groups[0].chained or more
    assert proposal.blocks.uncached == tuple(more)
    assert re.search(r"residuals: .*blocks of layers", str(proposal))
    assert ("left_out: " in str(proposal)) == bool(more)
    answers = {"plan": proposal.plan, "CachedBlocks": proposal.blocks}
    assert propose_plan(fill(painter(), seed=1), examples, answers=answers).blocks == proposal.blocks


def test_argument_with_which_no_cached_call_is_exact_is_named():
    failure = CachedCallError("a call that skips blocks is not exact")
    with mock.patch.object(stack, "error_of_cached_call", side_effect=failure):
        proposal = propose_plan(fill(painter(), seed=1), [painter_inputs(n, controlled=True) for n in (17, 31)])
    assert proposal.blocks.uncached == ("residuals",) and f"residuals: with it {failure}" in str(proposal)


def test_guess_is_checked_with_arguments_that_fail_alone():
    def forward(self, latents, caption, positions, residuals=None, left_out=None):
        if left_out is not None and residuals is None:
            raise ValueError("left_out needs residuals")
        return models.paint(self, latents, caption, positions, residuals, left_out)

    examples = [{"left_out": 1, **painter_inputs(tokens, controlled=True)} for tokens in (17, 31)]
    proposal = propose_plan(fill(painter(forward), seed=1), examples)
    assert proposal.blocks is None
    assert "between=('residuals',)" in proposal.questions[0] and "skips blocks fails" in proposal.questions[0]


def test_a_decoder_fills_its_cache_on_every_rank():
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 5}
    decoder = fill(transformers.MistralForCausalLM(transformers.MistralConfig(**sizes, **heads)), seed=1).eval()
    ids = {n: torch.randint(64, (2, n), generator=torch.Generator().manual_seed(n)) for n in (11, 13, 23)}
    plan = propose_plan(decoder, ({"input_ids": ids[13]}, {"input_ids": ids[23]}), segment="tokens").plan

    def outcomes(**options):
        copies = [with_same_weights(decoder) for _ in range(2)]

        def run(mesh):
            apply_plan(copies[mesh.rank], plan, mesh)
            return copies[mesh.rank].generate(ids[11], max_new_tokens=8, do_sample=False, **options)

        return outcomes_on_virtual_ranks(run, ring=1, ulysses=2, device=torch.device("cpu"))

    for options in ({}, {"num_beams": 2}):
        expected = decoder.generate(ids[11], max_new_tokens=8, do_sample=False, **options)
        for outcome in outcomes(**options):
            assert outcome.error is None and torch.equal(outcome.output, expected)
    _, error = first_error(outcomes(cache_implementation="static", disable_compile=True))
    assert isinstance(error, ValueError) and "use_cache=False" in str(error)
    # Also one that an earlier call has filled, whose tensors stay the same objects.
    static = transformers.StaticCache(decoder.config, max_cache_len=16)
    static.early_initialization(2, 2, 8, torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"use_cache=False"):
        CachesOfCall([static]).gather([static], None, [Segment("tokens", 11)], one_rank("cpu"))


def test_imagined_calls_have_one_more_token_and_numbers_that_grow_are_asked_about():
    sizes = {"x": (1, 64, 64), "text": (1, 7, 16), "temb": (1, 128), "table": (64, 64), "joint": (71, 8)}
    arguments = {name: record(*shape) for name, shape in sizes.items()}
    arguments |= {"cu_seqlens": replace(record(2, dtype=torch.int32), values=(0, 64)), "first": 64, "flag": True}
    call = ModuleCall("blocks.0", "blocks", 0, 9, arguments, arguments["x"])
    observed = ObservedCall(calls=[call], attention=[ObservedAttention("blocks.0", 1, 71, 71, None)])
    first, second, *_ = imagine_larger_calls(observed)  # The others have one more token of text.
    for larger, table in ((first, (65, 65)), (second, (65, 64))):
        records = larger.calls[0].arguments
        expected = {**sizes, "x": (1, 65, 64), "table": table, "joint": (72, 8)}
        assert {name: records[name].shape for name in sizes} == expected
        assert records["cu_seqlens"].values == (0, 65)
    assert [question.partition(": ")[0] for question in _ask_about_numbers(observed, first)] == ["blocks.*(first)"]


def test_writes_to_views_and_blocks_without_their_stream_or_without_a_call_are_observed():
    def forward(self, x):
        x = self.blocks[0](self.inp(x))
        table = torch.zeros_like(x)
        table[:, 1:].copy_(x[:, 1:])
        return self.blocks[0](table=table)

    of_either = models.block(lambda self, x=None, table=None: models.mix(self, x if table is None else table))
    model = models.model([of_either, models.block()], forward)
    starts = [Start(block, (5, 7), ("x",), 1) for block in ("blocks.0", "blocks.1")]
    regions = [ObservedRegion(start, ObservedCall(), ObservedCall(), "image") for start in starts]
    observed, other = (stack._observe_or_none(model, region, tokens_of(5)) for region in regions)
    assert observed.calls[-1].arguments["table"].derived and other is None
    # The larger call may leave out the start.
    assert replace(regions[0], small=observed).calls() == []


# -- No plan.


@pytest.mark.parametrize("kind", ["none", "attention"])
def test_mixer_and_only_softmaxes_between_split_and_gather_are_named(kind):
    model = fill(models.hybrid(kind), seed=1)
    proposal = propose_plan(model, TOKENS)
    assert proposal.plan is None
    with pytest.raises(ValueError, match="Hybrid"):
        proposal.source()
    (question,) = proposal.questions
    assert ("softmax" in question) == (kind == "attention")
    if kind == "none":
        assert "blocks.0.mixer (Mixer)" in question and "docs/own_model.md" in question
        # The way out that the error names is exact.
        answers = {"blocks.*.mixer(x)": Gather(-2, "image"), "blocks.*.mixer(0)": Split(-2, like="image")}
        assert all(f'"{name}"' in question for name in answers)
        assert propose_plan(model, TOKENS, answers=answers).error < 1e-5


def test_frames_that_do_not_grow_are_asked_for():
    (question,) = propose_plan(fill(OfFrames(), seed=1), (frames_of(5), frames_of(5, 3, 6))).questions
    assert "dim 3" in question


REFUSED = [
    (DiT, (DIT, {**DIT, "x": torch.randn(2, 4, 12, 12)}), r"second: RuntimeError: .*49.*example_inputs=\(inputs,\)"),
    (models.lists_by_hand, IMAGES, r"softmax .*transformer\.layers\.0\.0 .*\[2, 3, 20, 20\]"),
    (painter, (PAINTER[0], PAINTER[0]), r"Painter.* module lists"),
    (models.lists, IMAGES, "segment"),
    *[(models.lists, examples, "example_inputs") for examples in (IMAGES[0], (), IMAGES * 2, ("x", "y"))],
]


@pytest.mark.parametrize(("make", "examples", "message"), REFUSED)
def test_model_or_examples_are_refused(make, examples, message):
    with pytest.raises(TypeError if message in ("example_inputs", "segment") else ValueError, match=message):
        propose_plan(fill(make(), seed=1), examples, segment=None if message == "segment" else "image")


# -- Answers.


def test_answers_replace_guesses():
    answers = {"(x)": IMAGE, "": Gather(1, "image"), "CachedBlocks": None, "samples": None}
    proposal = propose_exact(models.encoder(), TOKENS, tokens_of(31), answers=answers)
    assert proposal.plan == rules.Plan({"x": IMAGE}, {"": Gather(1, "image")}, ("image",))
    assert proposal.questions == ()
    # Tokens are sharded at the model's input, so text alone is sharded at the first block.
    proposal = propose_exact(models.painter_of_words(), WEIGHTED, WEIGHTED[1], answers={"(latents)": IMAGE})
    assert proposal.plan.inner["layers.0"] == {"caption": Split(1, segment="text")}
    assert "(latents): from answers." in proposal.reasons
    # With sharded text "layers.*" has a rule for the words, so the plan with replicated text remains.
    assert propose_plan(fill(models.painter_of_words(), seed=1), WEIGHTED, answers={"layers.0(words)": None}).plan
    # Only inputs of blocks can be sharded here, not the tensor to which the position embedding is added.
    proposal = propose_exact(DiT(), (DIT,), DIT, answers={"blocks.0(0)": IMAGE})
    assert proposal.plan.inner == {"blocks.0": {0: IMAGE}}
    # Attention that pads all tokens to a multiple of 4 is answered by heads.
    padded, by_heads = models.padded(), rules.AttentionByHeads("image", ("q", "k", "v"), "out")
    assert propose_plan(fill(padded, seed=1), TOKENS).plan is None
    proposal = propose_exact(padded, TOKENS, tokens_of(31), answers={"blocks.*": by_heads})
    assert proposal.plan.attention == {"blocks.*": by_heads}
    assert propose_plan(fill(models.rotated(), seed=1), TOKENS, answers={"joint_order": ()}).plan is None
    wrong = {"positions": Split(0, like="image", then_replicated=True)}
    proposal = propose_plan(fill(painter(), seed=1), PAINTER, answers={"layers.*(positions)": wrong["positions"]})
    assert proposal.plan is None and proposal.guess.inner["layers.*"] == wrong
    # An answer for one module is an exception to a guess, or to a later answer, for several.
    model, like, whole = painter(), Split(0, like="image"), Replicate(0, "image")
    guess = rules.Plan({}, {}, ("image",), inner={"layers.*": {"positions": like}})
    for wider in ({}, {"layers.**(positions)": like}, {"layers.-1(positions)": like}):
        plan = with_answers(guess, {"layers.0(positions)": whole, **wider}, model)
        found = match_modules(model, plan)
        assert [found[f"layers.{i}"][1].of_inputs["positions"] for i in range(3)] == [whole, like, like]
    # The other rules of an answered name remain after those of an earlier name.
    inner = {"layers.0": {"caption": whole}, "layers.*": {"caption": like, "positions": like}}
    found = match_modules(model, with_answers(replace(guess, inner=inner), {"layers.*(positions)": whole}, model))
    assert found["layers.0"][1].of_inputs == {"caption": whole, "positions": whole}
    # None removes the rules of a wider name only under that name.
    attending = replace(guess, attention={"layers.*": (rules.Attention(("image",)),)})
    for name in ("layers.0(positions)", "layers.0"):
        with pytest.raises(ValueError, match=r"layers\.\*"):
            with_answers(attending, {name: None}, model)
    assert with_answers(attending, {"layers.**": None}, model).attention == {}
    whole_plan = replace(guess, outputs={"out": Gather(1, "image")})
    outputs = with_answers(guess, {"plan": whole_plan, "embed": Gather(1, "image")}, model).outputs
    assert [*outputs] == ["embed", "out"]


def test_blocks_and_plans_are_answers():
    transformer = fill(painter(), seed=1)
    right = CachedBlocks((BlockGroup(("layers",), ("caption", "latents"), measured="latents", chained=True),))
    wrong = CachedBlocks((BlockGroup(("layers",), ("latents", "caption"), measured="latents", chained=True),))
    for answer in (wrong, replace(right, uncached=("latents",))):  # The model needs its latents.
        incomplete = propose_plan(transformer, PAINTER, answers={"CachedBlocks": answer})
        assert incomplete.blocks is None and incomplete.questions[0].startswith("CachedBlocks: ")
    model, other = build("timm ViT"), (VIT[0], inputs_of("timm ViT"))
    plan = propose_plan(model, VIT).plan
    assert propose_plan(model, other, answers={"plan": plan}).plan == plan
    rejected = propose_plan(model, other, answers={"plan": plan, "norm": Gather(1, "tokens")})
    assert rejected.plan is None and rejected.questions


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("layers.*(positions)", "image"),
        ("out", FirstTokens("image")),
        ("layers.*", (Replicate(0, "text"),)),
        ("CachedBlocks", {"layers": ("latents",)}),
        ("common", (0,)),
        ("batched", {"latents": "0"}),
        ("(0)", IMAGE),
        ("(0)", None),
        ("layers.*(position)", None),
        ("outs", None),
    ],
)
def test_answer_of_unknown_kind_or_none_for_an_unknown_name_raises(name, answer):
    is_unknown = answer is None and name != "(0)"
    with pytest.raises(ValueError if is_unknown else TypeError, match=r"answers\[.*(parameter\)'|of this name)"):
        propose_plan(fill(painter(), seed=1), PAINTER, answers={name: answer})
