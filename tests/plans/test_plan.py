"""Plans: what they refuse, their rules one by one, and the graphs of a model whose plan comes and goes."""

import gc
from dataclasses import replace
from types import SimpleNamespace
from weakref import ref

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.transformers.transformer_ltx2 import AudioVisualModelOutput
from torch import nn
from torch._dynamo.testing import CompileCounter

from para_core import Attention, Plan
from para_core.distributed.mesh import MeshDim, dim_of_one, one_rank, sequence_mesh
from para_core.instance.record import filled_slots
from para_core.plans.apply import apply_plan, remove_plan
from para_core.plans.apply_rules import RuleExecutor
from para_core.plans.module_matching import matching_modules
from para_core.plans.plan import AttentionByHeads, Count, Entries, Gather, Replicate, Split
from para_core.plans.published_plan import convert_published_plan
from para_core.plans.region import mesh_of_plan
from para_core.plans.samples import gather_samples
from tests.plans.test_exactness import (
    BY_HEADS,
    CROSS,
    EXAMPLES,
    GATHER,
    HEADS,
    INSIDE,
    ROWS,
    Checkpointed,
    Model,
    OfRows,
    call,
    cut,
    fused,
    noise,
    rows,
    tokens,
)
from tests.tiny import cpu_mesh, fill, flux_inputs, relative_error


def apply_in_rounds():
    model, counter = fill(Model(), seed=1), CompileCounter()
    model.compile(backend=counter, fullgraph=True)
    meshes = {shape: sequence_mesh(cpu_mesh(*shape)) for shape in [(1, 2), (2, 1)]}
    outs, frames = [], []
    for shape in [(1, 2), (1, 2), (2, 1), (1, 2), (2, 1)]:
        apply_plan(model, INSIDE, meshes[shape])
        assert mesh_of_plan(model) == meshes[shape]
        outs.append(model(tokens(11)))
        remove_plan(model)
        assert type(model) is Model
        gc.collect()
        outs.append(model(tokens(11)))
        frames.append(counter.frame_count)
    reference = ref(model)
    torch._dynamo.reset()
    del model
    gc.collect()
    return outs, frames, reference() is None


def test_next_equal_plan_of_a_compiled_model_uses_its_graphs(rank_pool):
    expected = fill(Model(), seed=1)(tokens(11))
    for outs, frames, collected in rank_pool.run(apply_in_rounds, 2):
        assert max(relative_error(out, expected) for out in outs) < 1e-5
        assert frames == [2, 2, 3, 3, 3]
        assert collected


def planned(model, plan, args):
    """Return the output of ``model`` under ``plan`` on two ranks."""
    apply_plan(model, plan, sequence_mesh(cpu_mesh(1, 2)))
    return call(model, args)


def with_unfitting_plan(model, plan, *earlier):
    mesh = sequence_mesh(cpu_mesh(1, 2))
    next(model.children()).processor = "an attention module without a rule"
    for plan_before in earlier:
        apply_plan(model, plan_before, mesh)
    classes, mesh_before = [type(part) for part in model.modules()], mesh_of_plan(model)
    try:
        apply_plan(model, plan, mesh)
    finally:
        assert ([type(part) for part in model.modules()], mesh_of_plan(model)) == (classes, mesh_before)
        remove_plan(model)
        assert not any(map(filled_slots, model.modules()))


def after_an_error():
    model = nn.Sequential(Grouped(), Grouped())
    apply_plan(model, replace(HEADS, attention={"*": BY_HEADS}, inputs={}), sequence_mesh(cpu_mesh(1, 2)))
    model[1] = SECOND_WITHOUT[1]
    with pytest.raises(AttributeError):
        model(noise(2, 7, 20))
    model(noise(2, 7, 20))


def with_example(example, args):
    planned(example.model(), example.plan, args)


def applied(*steps):
    executor = RuleExecutor(replace(one_rank("cpu"), ulysses=MeshDim("ulysses", 3, 0, "", None)))
    for value, rule in steps:
        executor.apply(value, rule, "rope")


def by_rows(attend=None, num=6, checkpointing=False):
    model = OfRows()
    if attend is not None:
        model.attend.forward = attend
    model.gradient_checkpointing, model._gradient_checkpointing_func = checkpointing, None
    with torch.set_grad_enabled(checkpointing):
        planned(model, ROWS, rows(num)[0])


def inside_itself():
    model = Model()
    model.proj_out.register_forward_hook(lambda *_: model(tokens(7)))
    planned(model, INSIDE, [tokens(7)])


def with_bypass_in_a_graph():
    model = Checkpointed("none")
    model.blocks[0].attn1.forward = lambda x, context: x
    plan = replace(CROSS, attention={"blocks.*.attn1": (Attention(("image",)),), **CROSS.attention})
    apply_plan(model, plan, sequence_mesh(cpu_mesh(1, 2)))
    torch.compile(model, backend="eager", fullgraph=True)(noise(2, 7, 16), noise(2, 4, 16))


class Grouped(nn.Module):
    """Attention with four heads of queries and two heads of keys and values."""

    def __init__(self):
        super().__init__()
        self.heads, self.mask = 4, None
        self.q, self.k, self.v = nn.Linear(20, 16), nn.Linear(20, 8), nn.Linear(20, 8)
        self.out = nn.Linear(16, 20)

    def forward(self, x):
        q, k, v = (project(x).unflatten(2, (-1, 4)).transpose(1, 2) for project in (self.q, self.k, self.v))
        mask = None if self.mask is None else self.mask[: x.shape[1], : x.shape[1]]
        out = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        return self.out(out.transpose(1, 2).flatten(2))


def with_grouped_heads(attention, mask=None, inner=None):
    model = nn.Sequential(Grouped())
    model[0].mask = mask
    inputs = {} if inner else {"input": Split(1, "tokens")}
    plan = replace(HEADS, inputs=inputs, inner=inner or {}, attention={"0": attention})
    planned(model, plan, [noise(2, 7, 20)])


def published(plan):
    return convert_published_plan, (plan,), ValueError


INPUT, THREE_IDS = {"hidden_states": cut()}, {**flux_inputs(10, 5), "img_ids": torch.zeros(1, 10, 3)}
SECOND_WITHOUT = nn.Sequential(Grouped(), Grouped())
del SECOND_WITHOUT[1].heads
MISSING = Plan({"hidden_states": Split(1, "image")}, {"nothing.-1": Gather(1, "image")}, ("image",))
AT_ONE = RuleExecutor(one_rank("cpu"))
NOT_WHOLE = [Split(1, "a", per=2), Split(1, "a", after="b"), Split(1, "a", after_replicated=True), Count("a", (0,))]
TO_ITSELF, ONE, CAUSAL = (Attention(("tokens",)),), torch.zeros(1, 1), torch.ones(4, 4).tril().bool()
ATTENDING_Q = replace(HEADS, attention={"0": BY_HEADS, "0.q": TO_ITSELF})
PAIR, LIKE, FRAMES = (noise(5), None), Split(0, like="video"), Split(0, "video", together=(1,))
WRONG_FIELDS = [{"segment": "a", "like": "b"}, {"after": "a"}, {"like": "a", "per": 0}, {"like": "a", "only": "middle"}]
WRONG_FIELDS += [{"like": "", "only": "last", x: 1} for x in ("runs", "after", "after_replicated", "then_replicated")]
WRONG_FIELDS += [{"like": "a", "runs": True, "per": None}, {"segment": "a", "together": (2,), "per": 2}]
# For tensors that accompany 7 tokens: the number of entries, the fields of the rule, and the words of the message.
MISFITS = [(3, {}, "3 tokens .* 7,"), (7, {"dim": 1}, "dim 1"), (8, {"only": "last"}, "7"), (3, {"per": 2}, "of 2")]
MISFITS += [(8, {"per": None}, "of 7"), (8, {"runs": True}, "of 7"), (6, {"then_replicated": True}, "7")]
NO_RULES = [{"inputs": {"x": 1}}, {"inner": {"0": {"x": 1}}}, {"outputs": {"x": LIKE}}, {"batched": {"x": "0"}}]
NO_RULES += [{"halos": {"x": LIKE}}, {"attention": {"x": TO_ITSELF[0]}}, {"attention": {"x": ("tokens",)}}]
OF_TWO, OF_THREE, WHOLE = Entries((None, LIKE)), Entries((None, LIKE, LIKE)), Replicate(0, "video", together=(1,))
SPLIT_INSIDE = {f"0.{name}": {"input": Split(1, "tokens")} for name in "qkv"}
SUMS = r"scaled_dot_product_attention .*LinearAttention\("
REFUSED = [
    (with_unfitting_plan, (Model(), MISSING, INSIDE), ValueError, r"'nothing\.-1'.* Model "),
    *[(AT_ONE.apply_to_outputs, (out, {1: LIKE}, "norm"), ValueError, r"norm\[1\].* 1 ") for out in (ONE, (ONE,))],
    (AT_ONE.apply_to_outputs, ({"x": ONE}, {0: LIKE}, "norm"), TypeError, "norm returned a dict"),
    (gather_samples, ([ONE] * 3, 1, dim_of_one("batch")), ValueError, r"list \[3, 1, 1\] for the 1 sample"),
    (AT_ONE.gather_outputs, (iter([ONE]), (Gather(1, "image"),)), TypeError, "list_iterator; expected a tensor"),
    (with_unfitting_plan, (SECOND_WITHOUT, replace(HEADS, attention={"*": BY_HEADS})), AttributeError, "heads"),
    (after_an_error, (), AttributeError, "no attribute 'heads'"),
    (with_example, (EXAMPLES["flux, published"], THREE_IDS), ValueError, r"img_ids has 3 dims \[1, 10, 3\].* 2"),
    (applied, ((PAIR, OF_TWO), (PAIR, OF_THREE)), TypeError, r"rope.* tuple of 2.* 3 "),
    *[
        (applied, ((noise(7), Split(0, "video")), (noise(num), replace(LIKE, **fields))), ValueError, f"rope.* {words}")
        for num, fields, words in MISFITS
    ],
    (applied, ((noise(3), Replicate(0, "text")), (noise(2), Split(0, "video", after="text"))), ValueError, "least 3,"),
    (applied, ((ONE, Replicate(2, "text")),), ValueError, r"2 dims \[1, 1\].* dim 2"),
    (applied, ((ONE, Split(0, "video", together=(2,))),), ValueError, r"2 dims \[1, 1\].* 0 and \(2,\)"),
    (applied, ((noise(4), Split(0, "video")), (noise(3), LIKE)), ValueError, "rope has 3 tokens .* 4,"),
    # One entry for all frames is kept.
    (applied, ((noise(5, 4), FRAMES), (noise(1), LIKE), (noise(3), LIKE)), ValueError, "has 3 entries; expected 20,"),
    *[(applied, ((noise(2, 4), x), (noise(2), LIKE), (noise(3), LIKE)), ValueError, "d 8,") for x in (FRAMES, WHOLE)],
    *[(Plan({"x": rule}, {}, ()).with_replicated, ("a",), ValueError, "'a' by ") for rule in NOT_WHOLE],
    (with_grouped_heads, (BY_HEADS, None, {"0.q": {0: LIKE}}), ValueError, "0.q"),
    (with_unfitting_plan, (nn.Sequential(Grouped()), ATTENDING_Q), ValueError, "0.q"),
    *[(lambda fields=fields: Split(1, **fields), (), ValueError, r"^Split\(dim=1, ") for fields in WRONG_FIELDS],
    (Gather, (1, "a", None, True), ValueError, r"^Gather\(dim=1, "),
    (Entries, ((None, Split(1, "a")),), ValueError, "expected like='a'"),
    *[(kind, ("abc", "abc", "abc"), TypeError, "'abc'.* tuple") for kind in (Attention, AttentionByHeads, Plan)],
    *[(lambda fields=fields: replace(HEADS, **fields), (), TypeError, r"\['x'\] is ") for fields in NO_RULES],
    *[(kind, (dim, "a"), TypeError, f"dim={dim!r}.* int") for kind in (Split, Gather) for dim in ("1", True, 1.0)],
    (Attention, (("a",), None, "key"), ValueError, "'key'.* 'pairs'"),
    (by_rows, (lambda x: F.scaled_dot_product_attention(x, x, x),), RuntimeError, SUMS),
    (by_rows, (lambda x: torch.ops.aten.scaled_dot_product_attention(x, x, x),), RuntimeError, SUMS),
    (by_rows, (lambda x: x,), RuntimeError, r"\[\('sum', 0\), \('matmul', 1\)\]"),
    (by_rows, (None, 3), ValueError, r"3 rows on 2 ranks.* 2 "),
    (by_rows, (None, 6, True), RuntimeError, r"OfRows .*activation checkpointing"),
    (with_bypass_in_a_graph, (), RuntimeError, "2 ranks"),
    (inside_itself, (), RuntimeError, "this Model is already running"),
    (with_grouped_heads, (TO_ITSELF, None, SPLIT_INSIDE), ValueError, "'tokens' at 0.q, inside 0,"),
    (with_grouped_heads, ((Attention(("tokens",), None, "keys"),), ONE), ValueError, "1 columns.* [34] keys"),
    (with_grouped_heads, ((Attention(("tokens",), None, "pairs"),), ONE), ValueError, r"float32 .* \[1, 1\].*'pairs'"),
    (with_grouped_heads, ((Attention(("tokens",), None, "pairs"),), CAUSAL), ValueError, "hides pairs"),
    (with_example, (fused(2, None), [noise(2, 7, 20)]), ValueError, "qkv"),
    (with_example, (fused(2, 5), [noise(2, 7, 20)]), ValueError, "3 heads .*36 entries.* 5 part"),
    (with_grouped_heads, (BY_HEADS,), ValueError, r"4 heads.*\[4, 2\]"),
    (AttentionByHeads, ("tokens", ("qkv",), "out", "heads", (), (3, 1)), ValueError, r"\(3, 1\) .*qkv"),
    (*published({"": INPUT, "proj_out": None}), "'hidden_states' .*gather"),
    (*published({"": {**INPUT, 0: cut(output=True)}, "proj_out": GATHER}), r"outputs \[0\]"),
    (*published({"": {"hidden_states": [cut(), cut()]}, "proj_out": GATHER}), "list of tensors"),
    (*published({"": {"hidden_states": cut(output=True)}, "proj_out": GATHER}), "split_output=False"),
    (*published({"": {"hidden_states": SimpleNamespace(split_dim=1, split_output=False)}}), "'expected_dims'"),
    (*published({"": INPUT, "proj_out": 1}), "'proj_out' is 1.* 'gather_dim'"),
]


def refuse_all():
    for function, args, error, message in REFUSED:
        with pytest.raises(error, match=message):
            function(*args)


def test_what_does_not_fit_raises_on_every_rank(rank_pool):
    rank_pool.run(refuse_all, 2)


def test_entries_that_accompany_replicated_tokens_stay_whole():
    plan = Plan({"ids": Entries((Split(1, like="text"), LIKE))}, {}, ())
    assert plan.with_replicated("text").inputs == {"ids": Entries((None, LIKE))}


def test_last_module_is_the_last_of_a_compiled_list_that_holds_one_twice():
    block = nn.Linear(1, 1)
    model = torch.compile(nn.ModuleDict({"blocks": torch.compile(nn.Sequential(block, block, nn.Linear(1, 1)))}))
    assert [[*matching_modules(model, name)] for name in ("blocks.-1", "*")] == [["blocks.2"], ["blocks"]]


def test_gather_of_unsharded_segment_is_named():
    executor = RuleExecutor(one_rank("cpu"))
    with pytest.raises(ValueError, match=r"segment 'image'.* none\."):
        executor.gather_outputs(torch.ones(1, 2), (Gather(1, "image"),))
    assert type(executor.apply_to_outputs([torch.ones(1, 2)], {0: Split(1, "image")}, "norm")) is list
    assert executor.gather_outputs(torch.ones(1, 2), (Gather(1, "image"),)).shape == (1, 2)
    # An output has no entry for a field that is None.
    output = AudioVisualModelOutput(None, torch.ones(1, 2))
    assert executor.gather_outputs(output, (Gather(1, "video"), Gather(1, "image"))) is output
