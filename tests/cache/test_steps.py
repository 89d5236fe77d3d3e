"""Each branch is called once in a time step. Two calls are told apart, or computed with a warning."""

import functools
import random
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from para_core import (
    BlockGroup,
    CachedBlocks,
    CacheWarning,
    UnifiedAttnMode,
    apply_cache,
    cache_context,
    model_cache_report,
)
from tests.cache.scripted import verdicts
from tests.tiny import cpu_mesh, relative_error

OPTIONS = {"residual_diff_threshold": 1e9, "max_consecutive_hits": 2}
NUM_STEPS = 9


@dataclass
class Perturbation:
    layers: tuple = ()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.words = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x, time, text, perturb=False):
        shape = (*x.shape[:2], 3, 2, 8)
        q, k, v = self.qkv(nn.functional.layer_norm(x, (16,)) * (1 + time)).view(shape).permute(2, 0, 3, 1, 4)
        out = v if perturb else nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.out(out.transpose(1, 2).flatten(2)) + self.words(text).mean(1, keepdim=True)


class Video(nn.Module):
    """A model that skips the attention of a block if ``self.perturb`` is set, which ``setting`` may show."""

    def __init__(self):
        super().__init__()
        self.clock = nn.Linear(1, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.perturb, self.left_out = False, None

    def forward(self, x, text, time, setting=None, sigmas=None):
        time = self.clock(time[:, None])[:, None]
        for i, block in enumerate(self.blocks):
            if i != self.left_out:
                x = block(x, time, text, self.perturb and i == 2)
        return x


def build_video(cls=Video):
    torch.manual_seed(0)
    return cls().eval().requires_grad_(False)


def cached_video(cls=Video, conditions=("text",), **options):
    blocks = CachedBlocks((BlockGroup(("blocks",), ("x",), "x"),), conditions=conditions)
    return apply_cache(build_video(cls), blocks, **{**OPTIONS, **options})


def noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


X, TEXT, NONE = noise(1, 7, 16), noise(1, 3, 16, seed=1), noise(1, 3, 16, seed=2)
SHARED = SimpleNamespace(skipped=[])


def mutated(on, value=SHARED):
    value.skipped = [2] if on else []
    return value


# Each function returns a setting of the call that says whether the perturbation is on.
FLAGS = {
    "bool": lambda on: on,
    "list": lambda on: [2] if on else None,
    "dataclass": lambda on: Perturbation((2,) if on else ()),
    "attribute of a dataclass that is no field": lambda on: mutated(on, Perturbation()),
    "object in an array, changed in place": lambda on: np.array([mutated(on)]),
    "partial": lambda on: functools.partial(bool, on),
    "mask": lambda on: torch.full((1,), float(on)),
    "keyword default": lambda on: lambda *, perturb=on: perturb,
}
ORDERS = {
    "perturbed last": lambda step: ("prompt", "none", "perturbed"),
    "perturbed second": lambda step: ("prompt", "perturbed", "none"),
    "perturbed first": lambda step: ("perturbed", "prompt", "none"),
    "any order": lambda step: random.Random(step).sample(("prompt", "none", "perturbed"), 3),
}


def denoise(model, order, flag, named=False, perturbed_from=0):
    """Return the latents of a loop with three calls per step."""
    x = X
    for step in range(NUM_STEPS):
        time, out = torch.tensor([1 - step / NUM_STEPS]), {}
        for name in order(step):
            if name == "perturbed" and step < perturbed_from:
                continue
            model.perturb = name == "perturbed"
            setting = None if flag is None else flag(model.perturb)
            with cache_context(model, name) if named else nullcontext():
                out[name] = model(x, NONE if name == "none" else TEXT, time, setting)
        model.perturb = False
        guidance = out["prompt"] - out.get("perturbed", out["prompt"])
        x = x - 0.02 * (3 * out["prompt"] - 2 * out["none"] + guidance)
    return x


# Two kinds of settings with each order and beginning, and every other kind with some of them.
ALL = [*product(FLAGS, ORDERS, [0, 1, 3])]
CASES = [case for index, case in enumerate(ALL) if case[0] in ("list", "mask") or index % 7 == 0]


@pytest.mark.parametrize(("flag", "order", "perturbed_from"), CASES)
@pytest.mark.filterwarnings("ignore:.*conditions=:para_core.CacheWarning")
def test_third_call_of_a_step_equals_named_one(flag, order, perturbed_from):
    model, named = cached_video(), cached_video()
    run = functools.partial(denoise, order=ORDERS[order], flag=FLAGS[flag], perturbed_from=perturbed_from)
    if (flag, order, perturbed_from) == ("mask", "perturbed first", 1):
        # The new mask tensor came too late, because its first call was skipped.
        with pytest.raises(RuntimeError, match="cache_context"):
            run(model)
        return
    assert torch.equal(run(model), run(named, named=True))
    assert model_cache_report(model).hits == model_cache_report(named).hits > 0


@pytest.mark.parametrize("order", ["perturbed first", "any order"])
def test_call_that_differs_in_an_attribute_is_computed(order):
    exact = denoise(build_video(), ORDERS[order], None)
    model = cached_video()
    with pytest.warns(CacheWarning, match="cache_context"):
        x = denoise(model, ORDERS[order], None)
    rows = model_cache_report(model).rows
    assert {row.verdict.name for row in rows if row.hit} <= {"HIT"}
    # The calls without a prompt are skipped as before.
    assert len({row.branch for row in rows if row.hit}) == 1
    assert relative_error(x, exact) < 0.01
    # An attribute that is set later is found too late.
    with pytest.raises(RuntimeError, match="cache_context"):
        denoise(cached_video(), ORDERS["perturbed first"], None, perturbed_from=2)


def denoise_tiles(model, tiles, texts):
    xs = list(tiles)
    for step in range(NUM_STEPS):
        time = torch.tensor([1 - step / NUM_STEPS])
        for k, x in enumerate(xs):
            out = [model(x, text, time) for text in texts]
            xs[k] = x - 0.02 * (3 * out[0] - 2 * out[-1])
    return xs


@pytest.mark.parametrize(("count", "spread", "texts"), [(2, 1.0, (TEXT, NONE)), (3, 1e-3, (TEXT,)), (11, 1.0, (TEXT,))])
def test_tiles_in_turn_are_computed(count, spread, texts):
    tiles = [X + spread * noise(1, 7, 16, seed=seed) for seed in range(count)]
    exact = denoise_tiles(build_video(), tiles, texts)
    model = cached_video()
    with pytest.warns(CacheWarning, match="cache_context"):
        for x, wanted in zip(denoise_tiles(model, tiles, texts), exact, strict=True):
            assert torch.equal(x, wanted)
    assert set(verdicts(model_cache_report(model))) == {"warmup", "repeated"}


@pytest.mark.parametrize("named", [True, False])
def test_more_calls_in_a_step_than_branches_are_kept_warn(named):
    model = cached_video()
    with pytest.warns(CacheWarning, match=r"\b8 "):
        for time, number in product([1.0, 0.9], range(9)):
            with cache_context(model, str(number)) if named else nullcontext():
                model(X, TEXT, torch.tensor([time]), [number])
    assert model_cache_report(model).hits == 0


def denoise_alone(model, times=None, x=X):
    for time in times or [1 - step / NUM_STEPS for step in range(NUM_STEPS)]:
        x = x - 0.02 * model(x, TEXT, sigmas=None, time=torch.tensor([time]))
    return x


def test_second_generation_without_reset_starts_empty():
    model = cached_video()
    first = denoise_alone(model)
    assert torch.equal(denoise_alone(model), first)
    assert verdicts(model_cache_report(model)) == 2 * ["warmup", "hit", "hit", *2 * ["limit", "hit", "hit"]]


@pytest.mark.parametrize("index", [0, -1])
def test_replaced_block_begins_without_residuals(index):
    model = cached_video()
    denoise_alone(model, [1.0, 0.9])
    model.blocks[index] = build_video().blocks[index]
    denoise_alone(model, [0.8, 0.7, 0.6])
    assert verdicts(model_cache_report(model)) == ["warmup", "hit", "warmup", "hit", "hit"]
    model.blocks[index] = model.blocks[1]
    model.blocks = torch.compile(model.blocks)
    for _ in range(2):
        with pytest.raises(ValueError, match="runs one block several times"):
            denoise_alone(model, [0.5])


class OfNumbers(Video):
    def forward(self, x, text, num_timesteps, t, index=0):
        return super().forward(x, text, torch.as_tensor([t]) / 64)


@pytest.mark.parametrize("kind", [float, torch.tensor, np.float32])
def test_time_or_number_that_changes_at_each_step_is_no_branch(kind):
    # The first change of a number may still be a setting of another branch.
    # More tensors than are looked at in one argument are new at each step, too.
    indices = (lambda time: 0, "whhl"), (lambda time: time, "wwhh"), (lambda time: (noise(2),) * 600, "wwhh")
    for index, expected in indices:
        model = cached_video(OfNumbers)
        for time in 2 * [*range(NUM_STEPS, 0, -1)]:
            model(X, TEXT, NUM_STEPS, kind(float(time)), index(time))
        decisions = "".join(verdict[0] for verdict in verdicts(model_cache_report(model)))
        assert (decisions[:4], decisions[NUM_STEPS]) == (expected, "w")


def test_solver_that_calls_twice_at_a_timestep_is_computed():
    times = [1.0, 0.9, 0.9, 0.8, 0.8, 0.7, 0.7, 0.6]
    model = cached_video()
    with pytest.warns(CacheWarning, match="cache_context"):
        denoise_alone(model, times)
    assert verdicts(model_cache_report(model)) == ["warmup", "hit", *["repeated"] * 6]


def denoise_in_mode(named):
    """Run two prompts, whose parts on the second rank are equal, and a perturbed call on two ranks."""
    model, x = cached_video(), X
    texts = {name: torch.cat([text, text, 0 * text, 0 * text], 1) for name, text in (("text", TEXT), ("none", NONE))}
    with UnifiedAttnMode(cpu_mesh(1, 2)) as cp:
        for step in range(6):
            if step == 3:  # The parts of the first rank keep their sizes.
                x, texts["none"] = torch.cat([x, x[:, :1]], 1), texts["none"][:, :-1].clone()
            time, out, tokens = torch.tensor([1 - step / 6]), [], cp.sequence(x.shape[1])
            for name, on in (("text", False), ("none", False), ("text", True)):
                with cache_context(model, f"{name} {on}") if named else nullcontext(), cp.using(tokens):
                    model.perturb, text = on, texts[name].chunk(2, 1)[dist.get_rank()]
                    y = model(cp.shard(x, dim=1), text, time, FLAGS["list"](on))
                    out.append(cp.gather(y, dim=1, sequence=tokens))
            x = x - 0.02 * (3 * out[0] - 2 * out[1])
    return x, verdicts(model_cache_report(model))


def test_text_that_differs_on_one_rank_is_another_branch(rank_pool):
    expected = rank_pool.run(denoise_in_mode, 2, named=True)
    for (x, decisions), (wanted, named) in zip(rank_pool.run(denoise_in_mode, 2, named=False), expected, strict=True):
        assert decisions == named
        assert "hit" in decisions
        assert torch.equal(x, wanted)


@pytest.mark.parametrize("in_place", [True, False])
def test_third_call_of_a_compiled_model(in_place):
    torch._dynamo.reset()
    settings = ORDERS["perturbed first"], FLAGS["list"]
    model = cached_video()
    if in_place:
        model.compile(backend="eager", fullgraph=True)
        expected = denoise(cached_video(), *settings, named=True)
    else:
        model = torch.compile(model, backend="eager", fullgraph=True)
        # The branches of a graph share one state, so all calls are computed.
        expected = denoise(build_video(), *settings)
    assert relative_error(denoise(model, *settings), expected) < 1e-6


class OfAny(Video):
    """A model whose text is called ``y``, as in DiT: a tensor, a list, a dict or a number."""

    def forward(self, x, time, y):
        y = y["text"] if isinstance(y, dict) else y
        y = torch.stack(y) if isinstance(y, list) else torch.as_tensor(y)
        return super().forward(x, y.expand(1, 3, 16), time)


class WithKeywords(OfAny):
    def forward(self, x, time, **kwargs):
        return super().forward(x, time, kwargs["y"])


KINDS = [lambda text: text, lambda text: [*text], lambda text: {"text": text}, lambda text: text.sum().item()]
BUFFERS = torch.zeros_like(X), torch.zeros(1)


def filled(*values):
    """Return buffers with these values. A pipeline may write latents and time of each step into the same memory."""
    for buffer, value in zip(BUFFERS, values, strict=True):
        if not torch.equal(buffer, value):
            buffer.copy_(value)
    return BUFFERS


def denoise_texts(model, num_texts=2, kind=KINDS[0], prepare=lambda x, time: (x, time)):
    """Run a loop that calls the branches one after the other."""
    x = X
    for step in range(5):
        time = torch.tensor([1 - step / 5])
        predicted = [model(*prepare(x, time), y=kind(text.clone())) for text in (TEXT, NONE, -TEXT)[:num_texts]]
        x = x - 0.02 * (4 * predicted[0] - 3 * predicted[-1])


@pytest.mark.parametrize("kind", KINDS)
def test_branches_of_any_kind_warn_unless_they_are_named(kind):
    for conditions in (None, (), ("time",)):
        for prepare in (lambda x, time: (x, time), lambda x, time: (x.clone(), time.clone()), filled):
            with pytest.warns(CacheWarning, match="'y'"):
                denoise_texts(cached_video(OfAny, conditions), 2, kind, prepare)
    for cls in (OfAny, WithKeywords):
        model = cached_video(cls, ("y",))
        denoise_texts(model, 2, kind)
        assert len({row.branch for row in model_cache_report(model).rows}) == 2


@pytest.mark.parametrize("conditions", [("text",), ("y", "encoder_hidden_states")])
def test_unknown_condition_raises(conditions):
    with pytest.raises(ValueError, match=rf"{conditions[-1]}.*x, time, y"):
        cached_video(OfAny, conditions)
    for known in (conditions, None):
        assert cached_video(WithKeywords, known)


@pytest.mark.parametrize(("num_texts", "conditions"), [(1, None), (1, ("y",)), (3, ("y",))])
def test_named_or_single_branches_do_not_warn(num_texts, conditions):
    model = cached_video(OfAny, conditions)
    denoise_texts(model, num_texts)
    assert len({row.branch for row in model_cache_report(model).rows}) == num_texts


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_blocks_that_write_to_their_input_are_refused_but_in_a_graph(mode):
    torch._dynamo.reset()
    model, expected = cached_video(), denoise_alone(cached_video())
    for block in model.blocks[1:]:
        block.forward = lambda x, *args, forward=block.forward: x.copy_(forward(x, *args))
    with mode():
        with pytest.raises(ValueError, match=r"Block write in place .*\(x\)"):
            denoise_alone(model)
        out = denoise_alone(torch.compile(model, backend="eager", fullgraph=True))
    assert relative_error(out, expected) < 1e-6


@pytest.mark.parametrize("index", [0, 1, 4])
def test_call_without_a_block_that_the_cache_needs_raises(index):
    model = cached_video()
    denoise_alone(model, [1.0, 0.9])
    model.left_out = index
    with pytest.raises(RuntimeError, match=r"Video left out .*uncached="):
        denoise_alone(model, [0.8])
