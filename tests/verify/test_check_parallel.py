"""check_parallel finds what differs on several ranks, names the module, and leaves the model as it is."""

import threading
from dataclasses import make_dataclass, replace
from itertools import combinations
from math import inf, nan

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from para_core import Attention, Gather, Plan, Segment, Split, check_parallel
from para_core.adapters.models.shared.flux import FLUX_PLAN
from para_core.comparison.call_record import CallRecord, RecordEntry
from para_core.comparison.difference import compare_records
from para_core.comparison.digests import digest
from para_core.comparison.model_inputs import ModelInputs, dims_of_tokens
from para_core.comparison.tensor_parts import relative_error
from para_core.comparison.virtual_ranks import RanksDiffer, outcomes_on_virtual_ranks
from para_core.distributed.collectives import all_gather, all_to_all
from para_core.instance.record import fill_slot
from para_core.instance.slots import Slot
from zoo.tiny.transformers.registry import MODELS

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning")]


class Block(nn.Module):
    def __init__(self, *, centred=False):
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(16, 48), nn.Linear(16, 16), nn.LayerNorm(16)
        self.register_buffer("calls", torch.zeros(()))
        self.drop = nn.Dropout(0.5)
        self.centred = centred

    def forward(self, x):
        self.calls += 1
        q, k, v = self.qkv(self.norm(x)).unflatten(2, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        x = x + self.drop(self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))
        return x - x.mean(dim=1, keepdim=True) if self.centred else x


class Model(nn.Module):
    """A model with an embedding of pixel patches, blocks and a head. ``change`` is applied to each block's input."""

    def __init__(self, *, centred=(), change=lambda x: x, result=lambda y: y):
        super().__init__()
        self.embed, self.head = nn.Linear(4, 16), nn.Linear(16, 4)
        self.blocks = nn.ModuleList(Block(centred=i in centred) for i in range(3))
        self.change, self.result = change, result

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(self.change(x))
        return self.result(self.head(x))


def make(**options):
    torch.manual_seed(0)
    return Model(**options)


def shard_pixels(cp, model, x):
    x = cp.shard(model.embed(x), dim=1)
    for block in model.blocks:
        x = block(x)
    return cp.gather(model.head(x), dim=1)


def shard_input(cp, model, x, **masks):
    y = model(cp.shard(x, dim=1), *map(cp.shard, masks.values()))
    return cp.gather(y if isinstance(y, torch.Tensor) else y[1], dim=1)


def gather_twice(cp, model, x):
    return shard_input(cp, model, x).flip(1)


class OfInputs(Model):
    def forward(self, inputs):
        return super().forward(inputs.x * inputs.scale)


class Masked(Model):
    def forward(self, x, mask):
        q = self.embed(x)[:, None]
        if isinstance(mask, BlockMask):
            return self.head(flex_attention(q, q, q, block_mask=mask)[:, 0])
        return self.head(F.scaled_dot_product_attention(q, q, q, mask)[:, 0])


class Fails(nn.Module):
    def __init__(self, tokens, error):
        super().__init__()
        self.tokens, self.error = tokens, error

    def forward(self, x):
        if x.shape[1] == self.tokens:
            raise self.error(f"{self.tokens} tokens")
        return x


def pixels(model, **options):
    return model, {"x": torch.randn(1, 12, 4), **options}


def layers(*modules, tokens=12, width=16):
    return nn.Sequential(*modules), {"input": torch.randn(2, tokens, width)}


def flux(plan):
    return MODELS["flux"].build(), {"plan": plan, **MODELS["flux"].inputs(1, 5, 7)}


def of_inputs(dim):
    return OfInputs(), {"inputs": Inputs(torch.randn(2, 12, 4), torch.randn(1, 12, 1)), "dim": dim}


Inputs = make_dataclass("Inputs", ["x", "scale"])
BLOCKS = create_block_mask(lambda b, h, q, k: q >= k, None, None, 12, 12, device="cpu", BLOCK_SIZE=4)
ROWS = torch.ones(12, 12, dtype=torch.bool).tril()[None, None]
FORBID = {"result": lambda y: y.masked_fill(torch.arange(4) == 1, float("-inf"))}
FILL = {"result": lambda y: y.masked_fill(torch.arange(4) == 1, -1e9)}
# After the first block every rank has all tokens, so attention on one rank is complete.
EARLY = Plan({"x": Split(1, "image")}, {"blocks.0": Gather(1, "image")}, ("image",))
INSIDE = Plan({}, {"head": Gather(1, "image")}, ("image",), {"blocks.0": {"x": Split(1, "image")}})
# Each row has a model with its inputs, and the numbers of tokens that are tried.
EXACT = {
    "own lines": (lambda: pixels(make(), forward=shard_pixels), {12}),
    "the second of equal shapes": (lambda: pixels(make(result=lambda y: (y, 2 * y)), forward=shard_input), {12, 11}),
    "a token for each rank": (lambda: layers(Block(), tokens=2), {2}),
    "fields of a dataclass": (lambda: of_inputs({"inputs.x": 1, "inputs.scale": 1}), {12, 11}),
    "infinite outputs": (lambda: pixels(make(**FORBID)), {12, 11}),
    "conjugate outputs": (lambda: pixels(make(result=lambda y: torch.complex(y, y).conj())), {12, 11}),
    "a plan": (lambda: flux(FLUX_PLAN), {35, 34}),
    "an early gather": (lambda: pixels(make(), plan=EARLY), {12, 11}),
    "a plan that splits inside": (lambda: pixels(make(), plan=INSIDE), {12}),
    "a mask": (lambda: pixels(Masked(), mask=ROWS, dim={"x": 1, "mask": 2}), {12, 11}),
    "a block mask": (lambda: pixels(Masked(), mask=BLOCKS, forward=shard_input), {12, 11}),
    "torch's encoder": (lambda: layers(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)), {12, 11}),
}


@pytest.mark.parametrize("name", EXACT)
def test_models_without_token_mixing_are_exact(name):
    build, tokens = EXACT[name]
    torch.manual_seed(0)
    model, inputs = build()
    check = check_parallel(model, ranks=2, **inputs)
    assert check.exact and check.error < 1e-5, str(check)
    assert {case.tokens for case in check.cases} == tokens
    assert bool(check.notes) == (len(tokens) == 1)


def test_check_leaves_the_model_and_the_random_state():
    model, x = make().train(), torch.randn(2, 13, 4, requires_grad=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    check = check_parallel(model, x)
    assert check and check.error < 1e-6
    lengths = {(case.method, case.ranks, case.tokens) for case in check.cases}
    assert lengths == {(m, r, n) for m in ("ring", "ulysses") for r, n in [(2, 13), (2, 12), (3, 13), (3, 12)]}
    assert all(module.training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert x.grad is None and all(weight.grad is None for weight in model.parameters())


WRONG_PLAN = replace(FLUX_PLAN, attention={"transformer_blocks.1.attn": (Attention(("image",), ("image",)),)})
# Each row has a model with its inputs, the module that differs on two ranks, and words of the report.
DIFFERENCES = {
    "a mean in the first block": (lambda: pixels(make(centred=[0])), "blocks.0", "blocks.0 (Block)"),
    "code between modules": (lambda: pixels(make(change=lambda x: x * x.shape[1] ** 0.5)), "", "blocks.0"),
    "own lines with a wrong block": (lambda: pixels(make(centred=[1]), forward=shard_pixels), "blocks.1", "blocks.1"),
    "own lines that are wrong": (lambda: pixels(make(), forward=gather_twice), "", "forward="),
    "wrong lines, fillers": (lambda: pixels(make(**FILL), forward=gather_twice), "", "forward="),
    "own lines that miss infinities": (lambda: pixels(make(**FORBID), forward=shard_pixels), "", "inf"),
    "a plan": (lambda: flux(WRONG_PLAN), "transformer_blocks.1.attn", "transformer_blocks.1.attn"),
    "random numbers": (lambda: pixels(make(change=lambda x: x + torch.randn_like(x))), "", "random numbers"),
    "an exception": (lambda: layers(Fails(5, ArithmeticError), tokens=11), "", "ArithmeticError: 5 tokens"),
    # It fails before attention, in which the first rank waits.
    "an exception of the second": (lambda: layers(Fails(6, IndexError), Model(), tokens=13, width=4), "0", "6 tokens"),
    "a number of tokens": (lambda: pixels(make(result=lambda y: (y, y.shape[1]))), "", "outside of them"),
    # No rank has more than six tokens.
    "an output ranks lack": (lambda: pixels(make(result=lambda y: (y, y) if y.shape[1] > 6 else (y,))), "", "[1, 1]"),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_difference_is_located(name):
    build, module, words = DIFFERENCES[name]
    torch.manual_seed(0)
    model, inputs = build()
    check = check_parallel(model, ranks=2, **inputs)
    assert not check and not check.exact
    assert check.first_difference.module == module
    assert words in str(check)
    assert all(case.error > 1e-3 for case in check.cases if case.failure is None)


def test_bfloat16_and_autocast_are_compared_coarsely():
    with torch.autocast("cpu", torch.bfloat16):
        check = check_parallel(make(), torch.randn(1, 12, 4), ranks=2)
    assert check.exact and check.tolerance == 5e-2
    mixed = make(centred=[1]).bfloat16()
    mixed.table = nn.Parameter(torch.ones(1))  # It comes before the weights of submodules.
    check = check_parallel(mixed, torch.randn(1, 12, 4).bfloat16(), ranks=2)
    assert check.error > 5e-2 == check.tolerance


def parallel():
    model = MODELS["flux"].build()
    fill_slot(model, Slot.PLAN, {"__call__": lambda call, module, *args: call(module, *args)})
    return model


@pytest.mark.parametrize(
    ("build", "options", "error", "words"),
    [
        (make, {"dim": 7}, ValueError, "dim 7"),
        (make, {"dim": {"y": 1}}, ValueError, "'y'"),
        *[(make, {"dim": dim}, TypeError, "expected an int") for dim in ("1", {"x": "1"})],
        *[(make, {"ranks": ranks}, ValueError, "ranks") for ranks in (1, ())],
        *[(make, {name: 2.5}, TypeError, f"{name} is .*; expected") for name in ("ranks", "plan", "forward")],
        (make, {"dim": 1, "forward": shard_input}, ValueError, "forward="),
        (lambda: make(change=threading.Lock()), {}, RuntimeError, r"Model .*copied .*lock"),
        (parallel, {"plan": FLUX_PLAN}, ValueError, "FluxTransformer2DModel is already parallel"),
        (lambda: F.relu, {}, TypeError, "function"),
        (lambda: make().to("meta"), {}, ValueError, "Model is on the meta device"),
        (lambda: nn.Sequential(Fails(12, ArithmeticError)), {}, ArithmeticError, "12 tokens"),
    ],
)
def test_what_cannot_be_checked_raises(build, options, error, words):
    with pytest.raises(error, match=words):
        check_parallel(build(), torch.randn(1, 12, 4), **options)


def test_digest_of_complex_numbers_sees_both_parts():
    x = torch.randn(4, 6, 3, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    with torch.device("meta"):  # The default device of a user is not that of the random vectors.
        full, part = digest(x), digest(x[:, :2])
    assert [row.shape[0] for row in full.rows] == [4, 6, 3]
    torch.testing.assert_close(part.rows[1], full.rows[1][:2])
    for other in (torch.complex(x.imag, x.real), x.conj(), x * 1j):
        assert all((a - b).norm() > 0.1 * a.norm() for a, b in zip(full.rows, digest(other).rows, strict=True))
    assert [row.shape[0] for row in digest(x.sum()).rows] == [1]


def test_digest_sees_what_is_not_finite_and_is_not_rounded():
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    rows = [digest(y).rows for y in (x, *[x.index_fill(1, torch.tensor([7]), value) for value in (nan, inf, -inf)])]
    for a, b in combinations(rows, 2):
        assert all(relative_error([x], y, ()) > 0.1 for x, y in zip(a, b, strict=True))
    torch.set_float32_matmul_precision("medium")
    of_fast_products = digest(x).rows
    torch.set_float32_matmul_precision("highest")
    assert all(map(torch.equal, of_fast_products, rows[0]))


def test_one_tensor_as_two_arguments_is_sharded_for_the_named_one():
    assert dims_of_tokens(nn.PairwiseDistance(), ModelInputs((torch.ones(1, 4, 2),) * 2, {}), {"x1": 1}) == {0: 1}


def test_virtual_ranks_that_meet_in_different_collectives_end_at_once():
    def run(mesh):
        # Rank 2 returns without calling the collective in which the others wait.
        return None if mesh.rank == 2 else all_gather(torch.ones(1), [1, 1, 1], 0, mesh.ulysses)

    def mix(mesh):
        return all_to_all(torch.ones(2), [1, 1], [1, 1], mesh.ulysses) if mesh.rank else run(mesh)

    cpu = torch.device("cpu")
    outcomes = outcomes_on_virtual_ranks(run, ulysses=3, device=cpu)
    outcomes += outcomes_on_virtual_ranks(mix, ulysses=2, device=cpu)
    assert [isinstance(outcome.error, RanksDiffer) for outcome in outcomes] == [True, True, False, True, True]
    assert outcomes_on_virtual_ranks(lambda mesh: Fails(1, GeneratorExit)(torch.ones(1, 1)), device=cpu)[0].error
    with torch.device("meta"):  # New tensors of a rank are where those of the caller are.
        assert outcomes_on_virtual_ranks(lambda mesh: torch.empty(1).is_meta, device=cpu)[0].output


@pytest.mark.parametrize(
    ("segments", "of_ranks"),
    [
        ([Segment("text", 6), Segment("image", 4), Segment("reference", 4)], "abcghkl, defijmn"),
        ([Segment("image", 4)], "abef, cdgh"),  # It repeats.
        ([Segment("image", 4)], "abcde, abcfg"),  # Other entries come first.
        ([Segment("video", 8, balanced=True)], "abgh, cdef"),
    ],
)
def test_parts_of_a_tensor_are_found(segments, of_ranks):
    full = torch.tensor([*map(ord, sorted({*of_ranks} - {*", "}))]).float()
    parts = [torch.tensor([*map(ord, letters)]).float() for letters in of_ranks.split(", ")]
    assert relative_error(parts, full, segments) == 0


def test_records_of_other_lengths_do_not_agree():
    entries = [*[RecordEntry("call", name, ()) for name in ("", "0", "0")], *[RecordEntry("return", "0", ())] * 2]
    records = [CallRecord(entries[:4])] * 2
    difference = compare_records(nn.Sequential(nn.ReLU()), CallRecord(entries), records, (), tolerance=1e-3)
    assert (difference.module, "more or fewer calls" in difference.reason) == ("0", True)
