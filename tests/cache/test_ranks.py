"""Ranks that hold parts of one sequence decide equally, and ranks with other sequences decide for themselves."""

import math
import re

import pytest
import torch
import torch.distributed as dist

from para_core import apply_cache, model_cache_report
from para_core.adapters import apply_cache_on_pipe, cache_report, parallelize_pipe
from tests.adapters.test_pipelines import build, generate
from tests.cache.scripted import BLOCKS, Scripted, verdicts
from tests.tiny import cpu_mesh, relative_error

TEXT = torch.zeros(1, 3, 8)


def run_steps(steps, mesh=None, threshold=0.1):
    """Run the scripted model. ``steps`` has the contribution of the first block on this rank at each step."""
    model = apply_cache(Scripted(), BLOCKS, residual_diff_threshold=threshold, mesh=mesh)
    with torch.no_grad():
        for first in steps:
            added = torch.stack([torch.as_tensor(first), torch.tensor(1.0).expand_as(torch.as_tensor(first))])
            model(torch.ones(1, 6, 8), TEXT, added)
    return model_cache_report(model)


def one_rank_is_not_finite(value):
    """Return the decisions if the third residual of the last rank is ``value``."""
    steps = [1.0, 1.0, value if dist.get_rank() == dist.get_world_size() - 1 else 1.0, 1.0, 1.0]
    return verdicts(run_steps(steps, cpu_mesh(1, dist.get_world_size())))


@pytest.mark.sample(2)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nonfinite_residual_on_one_rank_computes_on_all(rank_pool, ranks, value):
    for decisions in rank_pool.run(one_rank_is_not_finite, ranks, value=value):
        assert decisions[:3] == ["warmup", "hit", "not_finite"]
        # The fourth step is still compared with the nonfinite one, and the fifth is not.
        assert decisions[3:] in (["not_finite", "hit"], ["miss", "hit"])


def decide_at_the_edge(ring, ulysses):
    """Decide about changes that are near the threshold and differ in their last bits from rank to rank."""
    common, own = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2 + dist.get_rank())
    base = torch.rand(1, 6, 8, generator=own) + 1
    steps = [base]
    for _ in range(30):
        edge = 0.1 * (1 + 3e-7 * torch.randn(1, generator=common) + 1e-7 * torch.randn(1, 6, 8, generator=own))
        steps += [base * (1 + edge), base]
    report = run_steps(steps, cpu_mesh(ring, ulysses))
    return verdicts(report), [row.difference for row in report.rows]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("ring", "ulysses"), [(1, 2), (2, 2), (4, 1)])
def test_near_the_threshold_all_ranks_decide_equally(rank_pool, ring, ulysses):
    results = rank_pool.run(decide_at_the_edge, ring * ulysses, ring=ring, ulysses=ulysses)
    assert {"hit", "miss"} <= set(results[0][0])
    # Differences agree to the last bit. Otherwise some ranks would wait for others that skip.
    assert all(result == results[0] for result in results)


def generate_two_prompts():
    """Generate on two replicas of two ranks each."""
    mesh = torch.distributed.device_mesh.init_device_mesh(
        "cpu", (2, 1, 2), mesh_dim_names=("replica", "ring", "ulysses")
    )
    replica = dist.get_rank() // 2
    pipe = parallelize_pipe(build("wan"), mesh=mesh["ring", "ulysses"])
    # One replica skips whenever it may, so the two are never at the same step.
    apply_cache_on_pipe(pipe, residual_diff_threshold=[0.0, 0.3][replica], max_consecutive_hits=1)
    generated = generate(pipe, "wan", prompt=["a cat", "a dog on a hill"][replica], num_inference_steps=5)
    return generated, verdicts(cache_report(pipe))


def test_replicas_with_other_prompts_never_wait_for_each_other(rank_pool):
    results = rank_pool.run(generate_two_prompts, 4)
    for replica, (prompt, threshold) in enumerate((("a cat", 0.0), ("a dog on a hill", 0.3))):
        pipe = apply_cache_on_pipe(build("wan"), residual_diff_threshold=threshold, max_consecutive_hits=1)
        expected = generate(pipe, "wan", prompt=prompt, num_inference_steps=5)
        for generated, decided in results[2 * replica : 2 * replica + 2]:
            assert relative_error(generated, expected) < 1e-4
            assert decided == verdicts(cache_report(pipe))
    assert "hit" in results[2][1]
    assert "hit" not in results[0][1]


CACHES = {
    "residual_diff_threshold": [0.1, 0.2],
    "warmup_steps": [0, 1],
    "compute_steps": [[0], [1]],
    "forecast_order": [0, 1],
}


def cache_differently():
    pipe = parallelize_pipe(build("wan"), mesh=cpu_mesh(1, 2))
    messages = {}
    for name, values in CACHES.items():
        apply_cache_on_pipe(pipe, **{"residual_diff_threshold": 0.1, name: values[dist.get_rank()]})
        with pytest.raises(ValueError, match="WanPipeline") as caught:
            generate(pipe, "wan")
        messages[name] = str(caught.value)
    return messages


def test_different_caches_raise_with_option_and_values(rank_pool):
    for messages in rank_pool.run(cache_differently, 2):
        assert messages.keys() == CACHES.keys()
        for name, message in messages.items():
            assert re.search(rf"{name}[^;]* transformer: rank 0 .*\d.*, rank 1 .*\d", message), message


PLANNED = ({"compute_steps": [0, 1, 4]}, {"residual_diff_threshold": 1e9, "max_hits": 2, "warmup_steps": 2})


def generate_planned(compiled=False, mesh=None):
    runs = []
    for options in PLANNED:
        pipe = build("wan") if mesh is None else parallelize_pipe(build("wan"), mesh=cpu_mesh(*mesh))
        apply_cache_on_pipe(pipe, **options)
        if compiled:
            torch._dynamo.reset()
            pipe.transformer = torch.compile(pipe.transformer, fullgraph=True, backend="eager")
        generated = generate(pipe, "wan", num_inference_steps=5)
        rows = cache_report(pipe).rows
        runs.append(
            (generated, [(row.verdict.name, row.forecast_from) for row in rows if row.branch == rows[0].branch])
        )
    return runs


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.long)])
def test_planned_steps_and_forecast_hold_on_ranks_in_graph(rank_pool, compiled):
    expected = generate_planned()
    assert [name for name, _ in expected[0][1]] == ["WARMUP", "SCHEDULE", "MASKED", "MASKED", "SCHEDULE"]
    assert expected[1][1] == [("WARMUP", 0), ("WARMUP", 0), ("HIT", 2), ("HIT", 2), ("LIMIT", 0)]
    for runs in rank_pool.run(generate_planned, 2, compiled=compiled, mesh=(1, 2)):
        for (generated, rows), (wanted, wanted_rows) in zip(runs, expected, strict=True):
            assert rows == wanted_rows
            assert relative_error(generated, wanted) < 1e-4


def generate_on_four(shape):
    pipe = parallelize_pipe(build("wan"), mesh=cpu_mesh(*shape[:2], batch=shape[2]))
    apply_cache_on_pipe(pipe, residual_diff_threshold=0.45, max_consecutive_hits=2)
    return generate(pipe, "wan", num_inference_steps=5)


@pytest.mark.sample(1)
@pytest.mark.parametrize("shape", [(2, 2, 1), (1, 2, 2)])
def test_four_ranks_equal_one_device(rank_pool, shape):
    pipe = apply_cache_on_pipe(build("wan"), residual_diff_threshold=0.45, max_consecutive_hits=2)
    expected = generate(pipe, "wan", num_inference_steps=5)
    assert cache_report(pipe).hits > 0
    for generated in rank_pool.run(generate_on_four, 4, shape=shape):
        assert relative_error(generated, expected) < 1e-4


TWO_PROMPTS = {"prompt": ["a red circle", "a large blue square on black"], "num_inference_steps": 3}


def rows_of_two_prompts(batch=1):
    pipe = build("cogvideox", cpu_mesh(1, 1, batch=batch) if batch > 1 else None)
    apply_cache_on_pipe(pipe, residual_diff_threshold=0.0)
    generate(pipe, "cogvideox", **TWO_PROMPTS)
    return [(row.step, row.branch, row.samples) for row in cache_report(pipe).rows]


def test_ranks_sharing_samples_report_all_of_them(rank_pool):
    alone = rows_of_two_prompts()
    assert len(alone) == 6
    for rows in rank_pool.run(rows_of_two_prompts, 2, batch=2):
        for (step, branch, samples), (wanted_step, wanted_branch, wanted) in zip(rows, alone, strict=True):
            assert (step, branch) == (wanted_step, wanted_branch)
            assert samples == ((None, None) if step == 0 else pytest.approx(wanted, rel=1e-3))


BATCHES = {
    # Two prompts are two samples. One prompt with guidance has a sample for each branch.
    "prompts": ("cogvideox", {**TWO_PROMPTS, "num_inference_steps": 6, "guidance_scale": 1.0}),
    "guided": ("mochi", {"num_inference_steps": 6}),
}


def generate_batch(batch, threshold, compiled=False, mesh=None):
    """Return the latents, and the rows of the cache's report."""
    name, call = BATCHES[batch]
    pipe = build(name) if mesh is None else parallelize_pipe(build(name), mesh=cpu_mesh(*mesh[1:], batch=mesh[0]))
    apply_cache_on_pipe(pipe, residual_diff_threshold=threshold)
    if compiled:
        torch._dynamo.reset()
        pipe.transformer = torch.compile(pipe.transformer, fullgraph=True, backend="aot_eager")
    latents = generate(pipe, name, **call)
    return latents, [(row.step, row.branch, row.verdict.name, row.samples) for row in cache_report(pipe).rows]


def threshold_at_which_samples_differ(batch):
    """Return a threshold that is between the differences of two samples at some step."""
    _, rows = generate_batch(batch, 1e-9)
    samples = [[x for row in rows if row[0] == step for x in row[3]] for step in range(2, 5)]
    apart = max(samples, key=lambda values: max(values) / min(values))
    return (min(apart) * max(apart)) ** 0.5


@pytest.mark.filterwarnings("ignore:.*cache ")
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("batch", BATCHES)
def test_ranks_sharing_a_batch_skip_same_steps(rank_pool, batch, compiled):
    threshold = threshold_at_which_samples_differ(batch)
    expected, expected_rows = generate_batch(batch, threshold)
    assert {"HIT", "MISS"} <= {row[2] for row in expected_rows}
    for latents, rows in rank_pool.run(generate_batch, 2, batch, threshold, compiled, mesh=(2, 1, 1)):
        assert [row[:3] for row in rows] == [row[:3] for row in expected_rows]
        assert relative_error(latents, expected) < 1e-4


def branches_of_sequential_guidance(mesh=None):
    pipe = (
        build("lumina2")
        if mesh is None
        else parallelize_pipe(build("lumina2"), mesh=cpu_mesh(*mesh[1:], batch=mesh[0]))
    )
    apply_cache_on_pipe(pipe, residual_diff_threshold=0.0)
    generate(pipe, "lumina2", num_inference_steps=4)
    return [row.branch for row in cache_report(pipe).rows]


@pytest.mark.long
def test_second_branch_is_reported_by_its_name(rank_pool):
    alone = branches_of_sequential_guidance()
    assert alone == ["branch 0", "branch 1"] * 4
    for rank, branches in enumerate(rank_pool.run(branches_of_sequential_guidance, 2, mesh=(2, 1, 1))):
        # All ranks compute the first call, whose output shape they do not know.
        assert branches[-3:] == [f"branch {rank}"] * 3
