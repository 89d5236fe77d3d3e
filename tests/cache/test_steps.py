"""Each branch is called once in a time step. Two calls are told apart, or computed with a warning."""

import enum
import functools
import random
import warnings
import weakref
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist
from diffusers import FlowMatchHeunDiscreteScheduler
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from para_core import (
    BlockGroup,
    CachedBlocks,
    CacheWarning,
    UnifiedAttnMode,
    apply_cache,
    cache_context,
    model_cache_report,
)
from para_core.adapters import apply_cache_on_pipe, cache_report
from tests.adapters.test_pipelines import build, generate
from tests.cache.scripted import ADAPTER, Pipe, Scripted, verdicts
from tests.tiny import cpu_mesh, relative_error

BLOCKS = CachedBlocks((BlockGroup(("blocks",), ("x",), "x"),), conditions=("text",))
OPTIONS = {"residual_diff_threshold": 1e9, "max_consecutive_hits": 2}
NUM_STEPS = 9


class How(enum.Enum):
    WHOLE, SKIP = 0, 1


@dataclass
class Perturbation:
    layers: tuple = ()


class Settings:
    def __init__(self, layers):
        self.layers = layers


def is_on(perturb):
    if isinstance(perturb, How):
        return perturb is How.SKIP
    if isinstance(perturb, (Perturbation, Settings)):
        return bool(perturb.layers)
    if callable(perturb):
        return perturb()
    return bool(perturb.any()) if hasattr(perturb, "any") else bool(perturb)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.words = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x, time, text, perturb=None):
        shape = (*x.shape[:2], 3, 2, 8)
        q, k, v = self.qkv(nn.functional.layer_norm(x, (16,)) * (1 + time)).view(shape).permute(2, 0, 3, 1, 4)
        out = v if is_on(perturb) else nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.out(out.transpose(1, 2).flatten(2)) + self.words(text).mean(1, keepdim=True)


class Video(nn.Module):
    """A model that skips the attention of a block if ``perturb`` or ``self.perturb`` is set."""

    def __init__(self):
        super().__init__()
        self.clock = nn.Linear(1, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.perturb = False

    def forward(self, x, text, time, perturb=None, positions=None):
        time = self.clock(time[:, None])[:, None]
        x = x if positions is None else x + positions
        for i, block in enumerate(self.blocks):
            x = block(x, time, text, (self.perturb or perturb) if i == 2 else None)
        return x


def build_video():
    torch.manual_seed(0)
    return Video().eval().requires_grad_(False)


def noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


X, TEXT, NONE = noise(1, 7, 16), noise(1, 3, 16, seed=1), noise(1, 3, 16, seed=2)
SHARED = Settings([])


def mutated(layers):
    SHARED.layers = layers
    return SHARED


def closure(value):
    return lambda: value


# Each function returns the perturbation that is on, or off.
FLAGS = {
    "bool": lambda on: on,
    "list": lambda on: [2] if on else None,
    "tuple": lambda on: (2,) if on else (),
    "int": lambda on: 2 if on else None,
    "enum": lambda on: How.SKIP if on else How.WHOLE,
    "dict": lambda on: {"layers": [2]} if on else {},
    "dataclass": lambda on: Perturbation((2,) if on else ()),
    "object": lambda on: Settings([2] if on else []),
    "object, changed in place": lambda on: mutated([2] if on else []),
    "closure": closure,
    "partial": lambda on: functools.partial(bool, on),
    "float": lambda on: 0.5 if on else 0.0,
    "mask": lambda on: torch.full((1,), float(on)),
    "numpy": lambda on: np.full(2, on),
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
            on = name == "perturbed"
            model.perturb = on and flag is None
            perturb = None if flag is None else flag(on)
            with cache_context(model, name) if named else nullcontext():
                out[name] = model(x, NONE if name == "none" else TEXT, time, perturb=perturb)
        model.perturb = False
        guidance = out["prompt"] - out.get("perturbed", out["prompt"])
        x = x - 0.02 * (3 * out["prompt"] - 2 * out["none"] + guidance)
    return x


@pytest.mark.parametrize("perturbed_from", [0, 1, 3])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.filterwarnings("ignore:.*conditions=:para_core.CacheWarning")
def test_third_call_of_a_step_equals_named_one(flag, order, perturbed_from):
    settings = ORDERS[order], FLAGS[flag]
    runs = {}
    for named in (False, True):
        model = apply_cache(build_video(), BLOCKS, **OPTIONS)
        try:
            x = denoise(model, *settings, named=named, perturbed_from=perturbed_from)
        except RuntimeError as error:
            # The new mask tensor came too late, because its first call was skipped.
            assert "cache_context" in str(error)
            assert (flag, order, perturbed_from) in {("mask", "perturbed first", 1), ("mask", "any order", 1)}
            return
        runs[named] = x, model_cache_report(model).hits
    assert torch.equal(runs[False][0], runs[True][0])
    assert runs[False][1] == runs[True][1] > 0


@pytest.mark.parametrize("order", ORDERS)
def test_call_that_differs_in_an_attribute_is_computed(order):
    exact = denoise(build_video(), ORDERS[order], None)
    model = apply_cache(build_video(), BLOCKS, **OPTIONS)
    with pytest.warns(CacheWarning, match="cache_context"):
        x = denoise(model, ORDERS[order], None)
    rows = model_cache_report(model).rows
    assert {row.verdict.name for row in rows if row.hit} <= {"HIT"}
    # The calls without a prompt are skipped as before.
    assert len({row.branch for row in rows if row.hit}) == 1
    assert relative_error(x, exact) < 0.01


def test_attribute_that_is_set_later_raises():
    model = apply_cache(build_video(), BLOCKS, **OPTIONS)
    with pytest.raises(RuntimeError, match="cache_context"):
        denoise(model, ORDERS["perturbed first"], None, perturbed_from=2)


def denoise_tiles(model, tiles, texts=(TEXT,), named=False, positions=None):
    xs = list(tiles)
    for step in range(NUM_STEPS):
        time = torch.tensor([1 - step / NUM_STEPS])
        for k, x in enumerate(xs):
            out = []
            for j, text in enumerate(texts):
                with cache_context(model, f"{k} {j}") if named else nullcontext():
                    out.append(model(x, text, time, positions=None if positions is None else positions[k]))
            xs[k] = x - 0.02 * (3 * out[0] - 2 * out[-1])
    return xs


@pytest.mark.parametrize("texts", [(TEXT,), (TEXT, NONE)], ids=["alone", "guided"])
@pytest.mark.parametrize("spread", [1.0, 1e-3], ids=["other tiles", "tiles alike"])
@pytest.mark.parametrize("num_tiles", [2, 3, 11])
def test_tiles_in_turn_are_computed(num_tiles, spread, texts):
    tiles = [X + spread * noise(1, 7, 16, seed=seed) for seed in range(num_tiles)]
    exact = denoise_tiles(build_video(), tiles, texts)
    model = apply_cache(build_video(), BLOCKS, **OPTIONS)
    with pytest.warns(CacheWarning, match="cache_context"):
        for x, wanted in zip(denoise_tiles(model, tiles, texts), exact, strict=True):
            assert torch.equal(x, wanted)
    assert set(verdicts(model_cache_report(model))) == {"warmup", "repeated"}


@pytest.mark.parametrize("by_position", [False, True])
def test_tiles_that_are_told_apart_equal_loops_of_their_own(by_position):
    tiles = [noise(1, 7, 16, seed=seed) for seed in range(3)]
    positions = [noise(1, 7, 16, seed=10 + seed) for seed in range(3)] if by_position else None
    expected = []
    for k, tile in enumerate(tiles):
        alone = apply_cache(build_video(), BLOCKS, **OPTIONS)
        expected += denoise_tiles(alone, [tile], positions=None if positions is None else [positions[k]])
    model = apply_cache(build_video(), BLOCKS, **OPTIONS)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore" if by_position else "error", ".*positions")
        xs = denoise_tiles(model, tiles, named=not by_position, positions=positions)
    for x, wanted in zip(xs, expected, strict=True):
        assert torch.equal(x, wanted)
    assert model_cache_report(model).hits == 3 * 6


def denoise_alone(model, times=None, x=X):
    for time in times or [1 - step / NUM_STEPS for step in range(NUM_STEPS)]:
        x = x - 0.02 * model(x, TEXT, torch.tensor([time]))
    return x


def test_second_generation_without_reset_starts_empty():
    model = apply_cache(build_video(), BLOCKS, **OPTIONS)
    first = denoise_alone(model)
    assert torch.equal(denoise_alone(model), first)
    assert verdicts(model_cache_report(model)) == 2 * verdicts(model_cache_report(model))[:NUM_STEPS]
    assert verdicts(model_cache_report(model))[:3] == ["warmup", "hit", "hit"]


@pytest.mark.parametrize("kind", [float, int, torch.tensor])
def test_timestep_of_any_kind_is_no_branch(kind):
    class WithNumber(Video):
        def forward(self, x, text, t):
            return super().forward(x, text, torch.as_tensor([t]) / 64)

    torch.manual_seed(0)
    model = apply_cache(WithNumber().requires_grad_(False), BLOCKS, **OPTIONS)
    for time in range(NUM_STEPS, 0, -1):
        model(X, TEXT, kind(float(time)))
    assert verdicts(model_cache_report(model))[:4] == ["warmup", "hit", "hit", "limit"]


def test_number_that_changes_at_each_step_is_no_branch():
    class WithIndex(Video):
        def forward(self, x, text, time, index):
            return super().forward(x, text, time)

    torch.manual_seed(0)
    model = apply_cache(WithIndex().requires_grad_(False), BLOCKS, **OPTIONS)
    for step in range(NUM_STEPS):
        model(X, TEXT, torch.tensor([1 - step / NUM_STEPS]), step)
    # The first change may still be a setting of another branch.
    assert verdicts(model_cache_report(model))[:4] == ["warmup", "warmup", "hit", "hit"]


def test_solver_that_calls_twice_at_a_timestep_is_computed():
    times = [1.0, 0.9, 0.9, 0.8, 0.8, 0.7, 0.7, 0.6]
    exact = denoise_alone(build_video(), times)
    model = apply_cache(build_video(), BLOCKS, residual_diff_threshold=0.0)
    with pytest.warns(CacheWarning, match="cache_context"):
        assert torch.equal(denoise_alone(model, times), exact)
    model = apply_cache(build_video(), BLOCKS, **OPTIONS)
    with pytest.warns(CacheWarning, match="cache_context"):
        denoise_alone(model, times)
    assert verdicts(model_cache_report(model)) == ["warmup", "hit", *["repeated"] * 6]


def denoise_in_mode(named):
    """Run two prompts, whose parts on the second rank are equal, and a perturbed call on two ranks."""
    model, x = apply_cache(build_video(), BLOCKS, **OPTIONS), X
    texts = {name: torch.cat([text, text, 0 * text, 0 * text], 1) for name, text in (("text", TEXT), ("none", NONE))}
    with UnifiedAttnMode(cpu_mesh(1, 2)) as cp:
        for step in range(6):
            time, out = torch.tensor([1 - step / 6]), []
            for name, on in (("text", False), ("none", False), ("text", True)):
                with cache_context(model, f"{name} {on}") if named else nullcontext():
                    y = model(
                        cp.shard(x, dim=1), texts[name].chunk(2, 1)[dist.get_rank()], time, perturb=FLAGS["list"](on)
                    )
                out.append(cp.gather(y, dim=1))
            x = x - 0.02 * (3 * out[0] - 2 * out[1])
    return x, verdicts(model_cache_report(model))


def test_text_that_differs_on_one_rank_is_another_branch(rank_pool):
    expected = rank_pool.run(denoise_in_mode, 2, named=True)
    for (x, decisions), (wanted, named) in zip(rank_pool.run(denoise_in_mode, 2, named=False), expected, strict=True):
        assert decisions == named
        assert "hit" in decisions
        assert torch.equal(x, wanted)


@pytest.mark.parametrize("order", ["perturbed last", "perturbed first"])
def test_third_call_of_a_model_compiled_in_place(order):
    torch._dynamo.reset()
    expected = denoise(apply_cache(build_video(), BLOCKS, **OPTIONS), ORDERS[order], FLAGS["list"], named=True)
    model = apply_cache(build_video(), BLOCKS, **OPTIONS)
    model.compile(backend="eager", fullgraph=True)
    assert relative_error(denoise(model, ORDERS[order], FLAGS["list"]), expected) < 1e-6


class InTurn(Pipe):
    """A pipeline that calls its model in each step for two sets of latents, with one text."""

    def __call__(self, values):
        self.scheduler.set_timesteps(sigmas=[1 - i / len(values) for i in range(len(values))])
        outputs, text, latents = [], torch.zeros(1, 3, 8), torch.zeros(1, 6, 8)
        with torch.no_grad():
            for t, pair in zip(self.scheduler.timesteps, values, strict=True):
                for k, value in enumerate(pair):
                    x = torch.full((1, 6, 8), float(k))
                    with self.transformer.cache_context("cond") if self.named else nullcontext():
                        outputs.append(self.transformer(x, text, torch.tensor([value, 10 * value])))
                latents = self.scheduler.step(latents, t, latents, return_dict=False)[0]
        return outputs


@pytest.mark.parametrize("named", [False, True])
def test_tiles_in_a_pipeline_are_computed(named):
    values = [(1.0, 5.0), (1.01, 5.01), (1.02, 5.02)]
    exact = InTurn(Scripted())(values)
    pipe = apply_cache_on_pipe(InTurn(Scripted(), named=named), residual_diff_threshold=1e9, adapter=ADAPTER)
    with pytest.warns(CacheWarning, match="cache_context"):
        outputs = pipe(values)
    for out, wanted in zip(outputs, exact, strict=True):
        assert torch.equal(out, wanted)


class StepForEach(Pipe):
    """A pipeline that takes a scheduler step for each of two sets of latents, and resets the scheduler in between."""

    def __call__(self, values):
        self.scheduler.set_timesteps(sigmas=[1 - i / len(values) for i in range(len(values))])
        outputs, text, latents = [], torch.zeros(1, 3, 8), torch.zeros(1, 6, 8)
        with torch.no_grad():
            for i, (t, pair) in enumerate(zip(self.scheduler.timesteps, values, strict=True)):
                for k, value in enumerate(pair):
                    self.scheduler._step_index = i
                    x = torch.full((1, 6, 8), float(k))
                    outputs.append(
                        self.transformer(x, text, torch.tensor([value, 10 * value]), timestep=t[None] / 1000)
                    )
                    latents = self.scheduler.step(latents, t, latents, return_dict=False)[0]
        return outputs


class Timed(Scripted):
    def forward(self, hidden_states, encoder_hidden_states, added, timestep):
        return super().forward(hidden_states, encoder_hidden_states, added)


def test_scheduler_that_steps_for_each_tile_raises():
    values = [(1.0, 5.0), (1.01, 5.01), (1.02, 5.02)]
    adapter = type(ADAPTER)(transformer="Timed", pipelines="timed", blocks=ADAPTER.blocks)
    pipe = apply_cache_on_pipe(StepForEach(Timed(), named=False), residual_diff_threshold=1e9, adapter=adapter)
    with pytest.raises(RuntimeError, match="cache_context"):
        pipe(values)


def test_two_model_calls_per_timestep_of_a_scheduler_are_steps():
    pipe = Pipe(scheduler=FlowMatchHeunDiscreteScheduler())
    pipe.scheduler.set_timesteps(4)
    times = pipe.scheduler.timesteps
    assert len(times) == 7

    class Heun(Pipe):
        def __call__(self, values):
            self.scheduler.set_timesteps(4)
            latents, text = torch.zeros(1, 6, 8), torch.zeros(1, 3, 8)
            with torch.no_grad():
                for t, value in zip(self.scheduler.timesteps, values, strict=True):
                    self.transformer(torch.ones(1, 6, 8), text, torch.tensor([value, 10 * value]))
                    latents = self.scheduler.step(latents, t, latents, return_dict=False)[0]

    pipe = apply_cache_on_pipe(Heun(scheduler=pipe.scheduler), residual_diff_threshold=0.1, adapter=ADAPTER)
    pipe([1.0, 1.01, 1.02, 1.5, 1.51, 1.52, 1.53])
    assert verdicts(cache_report(pipe)) == ["warmup", "hit", "hit", "miss", *["hit"] * 3]


class Waits(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        waiting = (torch.ops.aten.equal.default, torch.ops.aten._local_scalar_dense.default)
        self.count += func in waiting and args[0].dtype != torch.float64
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["wan, video", "stable diffusion 3", "hunyuan, image"])
def test_cache_does_not_wait_to_identify_branches(name):
    counts = []
    for cached in (False, True):
        pipe = build(name)
        if cached:
            # Warm-up steps need no decision.
            apply_cache_on_pipe(pipe, residual_diff_threshold=0.1, warmup_steps=100)
        for _ in range(2):
            with Waits() as waits:
                generate(pipe, name, num_inference_steps=3)
            counts.append(waits.count)
    assert counts[:2] == counts[2:]


@pytest.mark.parametrize("flag", [None, FLAGS["list"]])
@pytest.mark.parametrize("named", [False, True])
def test_branches_of_a_model_compiled_after_the_cache(flag, named):
    torch._dynamo.reset()
    model = build_video()
    expected = denoise(model, ORDERS["perturbed last"], flag)
    if named:
        expected = denoise(apply_cache(build_video(), BLOCKS, **OPTIONS), ORDERS["perturbed last"], flag, named=True)
    apply_cache(model, BLOCKS, **OPTIONS)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert relative_error(denoise(compiled, ORDERS["perturbed last"], flag, named), expected) < 1e-6


def test_one_branch_of_a_model_compiled_after_the_cache_is_skipped():
    torch._dynamo.reset()
    expected = denoise_alone(apply_cache(build_video(), BLOCKS, **OPTIONS))
    compiled = torch.compile(apply_cache(build_video(), BLOCKS, **OPTIONS), backend="eager", fullgraph=True)
    assert relative_error(denoise_alone(compiled), expected) < 1e-6
    assert relative_error(denoise_alone(build_video()), expected) > 1e-4


def test_large_arguments_are_not_kept():
    model = apply_cache(build_video(), BLOCKS, **OPTIONS)
    latents = torch.randn(1 << 12, 7, 16)
    kept = weakref.ref(latents)
    model(latents, TEXT, torch.ones(1))
    del latents
    assert kept() is None
