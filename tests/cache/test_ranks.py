"""Ranks that hold parts of one sequence decide equally, and ranks with other sequences decide for themselves."""

import math

import pytest
import torch
import torch.distributed as dist

from para_core import apply_cache, model_cache_report
from para_core.adapters import apply_cache_on_pipe, cache_report, parallelize_pipe
from tests.adapters.test_pipelines import build, generate
from tests.cache.scripted import BLOCKS, Scripted, verdicts
from tests.tiny import cpu_mesh, relative_error


def decide(steps, mesh):
    """Return decisions and differences. ``steps`` has what the first block adds on this rank at each step."""
    model = apply_cache(Scripted(), BLOCKS, residual_diff_threshold=0.1, mesh=mesh)
    with torch.no_grad():
        for first in map(torch.as_tensor, steps):
            added = torch.stack([first, torch.tensor(1.0).expand_as(first)])
            model(torch.ones(1, 6, 8), torch.zeros(1, 3, 8), added)
    report = model_cache_report(model)
    return verdicts(report), [row.difference for row in report.rows]


def decide_on_ranks(ring, ulysses):
    """Decide about residuals not finite on the last rank, and about changes near the threshold that differ in bits."""
    mesh, is_last = cpu_mesh(ring, ulysses), dist.get_rank() == dist.get_world_size() - 1
    decisions = [decide([1.0, 1.0, x if is_last else 1.0, 1.0, 1.0], mesh)[0] for x in (math.nan, math.inf)]
    common, own = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2 + dist.get_rank())
    base = torch.rand(1, 6, 8, generator=own) + 1
    steps = [base]
    for _ in range(30):
        edge = 0.1 * (1 + 3e-7 * torch.randn(1, generator=common) + 1e-7 * torch.randn(1, 6, 8, generator=own))
        steps += [base * (1 + edge), base]
    return decisions, decide(steps, mesh)


@pytest.mark.parametrize(("ring", "ulysses"), [(1, 2), (2, 2)])
def test_ranks_of_a_sequence_decide_equally(rank_pool, ring, ulysses):
    results = rank_pool.run(decide_on_ranks, ring * ulysses, ring=ring, ulysses=ulysses)
    (after_nan, after_inf), (at_the_edge, _) = results[0]
    # The fourth step is still compared with the one that is not finite, and the fifth is not.
    assert after_nan == ["warmup", "hit", "not_finite", "not_finite", "hit"]
    assert after_inf[:3] == ["warmup", "hit", "not_finite"]
    assert {"hit", "miss"} <= set(at_the_edge)
    # Differences agree to the last bit. Otherwise some ranks would wait for others that skip.
    assert all(result == results[0] for result in results)


def generate_cached(name="wan", shape=None, **options):
    pipe = build(name)
    call = {"num_inference_steps": 5, **options.pop("call", {})}
    if shape is not None:
        parallelize_pipe(pipe, mesh=cpu_mesh(*shape[1:], batch=shape[0]))
    apply_cache_on_pipe(pipe, **options)
    rows = []
    latents = generate(pipe, name, **call)
    for row in cache_report(pipe).rows:
        rows.append((row.step, row.branch, row.verdict.name, row.forecast_from, row.samples))
    return latents, rows


# The prompt and threshold of each replica. One skips whenever it may, so the two are never at the same step.
PROMPTS = [("a cat", 0.0), ("a dog on a hill", 0.3)]


def generate_two_prompts():
    """Generate on two replicas of two ranks each."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replica", "ring", "ulysses"))
    prompt, threshold = PROMPTS[dist.get_rank() // 2]
    pipe = parallelize_pipe(build("wan"), mesh=mesh["ring", "ulysses"])
    apply_cache_on_pipe(pipe, residual_diff_threshold=threshold, max_consecutive_hits=1)
    return generate(pipe, "wan", prompt=prompt, num_inference_steps=5), verdicts(cache_report(pipe))


def test_replicas_with_other_prompts_never_wait_for_each_other(rank_pool):
    results = rank_pool.run(generate_two_prompts, 4)
    for replica, (prompt, threshold) in enumerate(PROMPTS):
        options = {"residual_diff_threshold": threshold, "max_consecutive_hits": 1}
        expected, rows = generate_cached(**options, call={"prompt": prompt})
        for generated, decided in results[2 * replica : 2 * replica + 2]:
            assert relative_error(generated, expected) < 1e-4
            assert decided == [row[2].lower() for row in rows]
    assert "hit" in results[2][1]
    assert "hit" not in results[0][1]


CACHES = {"residual_diff_threshold": [0.1, 0.2], "compute_steps": [[0], [1]]}
CACHES |= {name: [0, 1] for name in ("warmup_steps", "forecast_order")}


def cache_differently():
    pipe = parallelize_pipe(build("wan"), mesh=cpu_mesh(1, 2))
    for name, values in CACHES.items():
        apply_cache_on_pipe(pipe, **{"residual_diff_threshold": 0.1, name: values[dist.get_rank()]})
        with pytest.raises(ValueError, match=rf"WanPipeline.*{name}[^;]* transformer: rank 0 .*\d.*, rank 1 .*\d"):
            generate(pipe, "wan")


def test_different_caches_raise_with_option_and_values(rank_pool):
    rank_pool.run(cache_differently, 2)


TWO_PROMPTS = {"prompt": ["a red circle", "a large blue square on black"], "guidance_scale": 1.0}
SHARED = {
    # The mesh (batch, ring, Ulysses), the pipeline, and the options.
    "planned": ((1, 1, 2), "wan", {"compute_steps": [0, 1, 4]}),
    "two ranks per branch": ((2, 1, 2), "wan", {"residual_diff_threshold": 0.45, "max_consecutive_hits": 2}),
    # Two prompts are two samples. One prompt with guidance has a sample for each branch.
    "prompts": ((2, 1, 1), "cogvideox", {"call": TWO_PROMPTS}),
    "guided": ((2, 1, 1), "mochi", {}),
}


@pytest.mark.filterwarnings("ignore:.*cache ")
@pytest.mark.parametrize("name", SHARED)
def test_ranks_skip_the_steps_of_one_device(rank_pool, name):
    shape, pipe, options = SHARED[name]
    if name in ("prompts", "guided"):
        # The threshold is between the differences of two samples at some step, so one of them holds the other back.
        _, rows = generate_cached(pipe, residual_diff_threshold=1e-9, **options)
        samples = [[x for row in rows if row[0] == step for x in row[4]] for step in range(2, 5)]
        apart = max(samples, key=lambda values: max(values) / min(values))
        options = {**options, "residual_diff_threshold": (min(apart) * max(apart)) ** 0.5}
    expected, rows = generate_cached(pipe, **options)
    assert {row[2] for row in rows} & {"HIT", "MASKED"} and {row[2] for row in rows} & {"MISS", "SCHEDULE", "LIMIT"}
    for generated, rows_of_rank in rank_pool.run(generate_cached, math.prod(shape), pipe, shape, **options):
        assert relative_error(generated, expected) < 1e-4
        if name == "two ranks per branch":
            continue  # Each half of the ranks reports its own branch of guidance.
        for row, wanted in zip(rows_of_rank, rows, strict=True):
            assert row[:4] == wanted[:4]
            assert row[4] == (wanted[4] if wanted[4][0] is None else pytest.approx(wanted[4], rel=1e-3))
