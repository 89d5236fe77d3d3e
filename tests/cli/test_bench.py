"""The figures of ``para_core bench`` are those of the counters, and its comparison detects a wrong result."""

import json
import re
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

import para_core.cli.measurement
from benchmarks.harness import counted_traffic
from para_core.adapters import AttentionSchedule, KeptKeys
from para_core.cli.app import run
from para_core.cli.comparison import Reference, compare, make_reference
from para_core.cli.measurement import count_run, time_run
from para_core.fleet.build import build
from para_core.fleet.recipe import Recipe, approximations
from para_core.fleet.request import Request
from para_core.fleet.work import call_pipe

pytestmark = pytest.mark.slow

TINY_FLUX = Path(__file__).parents[2] / "zoo/flux/pipeline"
FIELDS = {"prompt": "a", "width": 48, "height": 32, "num_inference_steps": 3, "max_sequence_length": 13}
SMALL = ["--size", "48x32", "--steps", "2", "--runs", "2", "--warmup-runs", "0"]


def bench(*options):
    return run(["bench", *SMALL, *options])


def test_one_rank_is_measured_and_compared(tmp_path, capsys):
    out, traces = tmp_path / "figures.json", tmp_path / "traces"
    assert bench("--check", "--verify", "--out", str(out), "--profile", str(traces)) == 0
    figures = json.loads(out.read_text())
    seconds = figures["seconds"]  # without those of the run that --verify compares
    assert (figures["warmup_runs"], len(seconds["per generation"]["each"])) == (1, 2)
    assert [len(steps) for steps in seconds["per step"]["steps of first rank"]] == [1, 1]
    # A generation has two steps, and the time of text and VAE.
    assert 0 < seconds["per step"]["median"] < seconds["per generation"]["median"]
    (rank,) = figures["ranks"]
    assert (rank["bytes sent"], rank["collectives"], rank["device memory"]) == (0, 0, None)
    # Text encoders and VAE launch as well.
    assert 0 < rank["launches per step"] < rank["launches"] / 2
    # The rank holds at least the weights, in float32.
    assert rank["host memory"] > sum(path.stat().st_size for path in TINY_FLUX.rglob("*.safetensors"))
    check = figures["check"]
    assert check["relative error"] == 0 and check["bound"] > 0
    assert check["runs equal"] and check["ranks equal"] and check["passed"]
    assert [path.name for path in traces.iterdir()] == ["rank-0.json.gz"]
    assert re.search(r"\| s per generation \| [0-9.]+ \| [0-9.]+ \| [0-9.]+ \|", capsys.readouterr().out)


def measure_with(monkeypatch, hook):
    """Let the command measure a pipeline with this forward hook of its transformer."""

    def build_hooked(recipe):
        pipe = build(recipe)
        pipe.transformer.register_forward_hook(hook)
        return pipe

    monkeypatch.setattr(para_core.cli.measurement, "build", build_hooked)


def test_warmup_runs_are_not_timed_and_a_signal_writes_no_figures(tmp_path, monkeypatch, capsys):
    calls, out = [], tmp_path / "figures.json"
    measure_with(monkeypatch, lambda module, args, output: calls.append(1))
    assert bench("--warmup-runs", "3", "--runs", "1", "--out", str(out)) == 0
    # Three warm-up runs, a timed one and a counted one, of two steps each.
    assert len(calls) == 2 * (3 + 1 + 1)
    assert len(json.loads(out.read_text())["seconds"]["per generation"]["each"]) == 1
    monkeypatch.setattr(para_core.cli.measurement, "build", lambda *_: signal.raise_signal(signal.SIGTERM))
    assert bench("--out", str(tmp_path / "none.json")) == 143
    assert "SIGTERM" in capsys.readouterr().err and not (tmp_path / "none.json").exists()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize(
    ("approximation", "factor", "passes"),
    [([], 1.01, False), (["--cache", "0.1"], 1.01, True), (["--cache", "0.1"], float("nan"), False)],
)
def test_wrong_result_fails_unless_it_is_an_approximation(tmp_path, monkeypatch, capsys, approximation, factor, passes):
    measure_with(monkeypatch, lambda module, args, output: (output[0] * factor, *output[1:]))
    out = tmp_path / "figures.json"
    assert bench("--check", "--runs", "1", "--out", str(out), *approximation) == int(not passes)
    check = json.loads(out.read_text())["check"]
    assert (check["relative error"] or 1.0) > 1e-4
    assert (check["passed"], check["bound"] is None) == (passes, bool(approximation))
    assert ("--cache" in capsys.readouterr().out) == bool(approximation)


def test_only_options_that_approximate_have_no_bound():
    assert approximations(Recipe("m", cache=0.0, backend="math", vae=True, compile="whole", weights="fsdp")) == ()
    options = {"cache": "default", "backend": "triton-int8", "cross_backend": "sage"}
    options |= {"comm_dtype": "int8", "quantize": "int8", "pipefusion": 2}
    assert set(approximations(Recipe("m", **options))) == set(options)


def measure_on_ranks(recipe, request, pixels):
    """Return this rank's counts, another counter's traffic, timed runs, and comparisons, the second with a fault."""
    pipe = build(recipe)
    with counted_traffic() as traffic:
        call_pipe(pipe, [request])
    counted, runs = count_run(pipe, request), time_run(pipe, request)
    rank, comparisons, decode = torch.distributed.get_rank(), [], pipe.vae.decode
    for wrong in (None, 1):
        if rank == wrong:
            pipe.vae.decode = lambda *args, **kwargs: (decode(*args, **kwargs)[0] * 1.01,)
        reference = Reference(pixels, 1e-6) if rank == 0 else None
        comparisons.append(compare(pipe, request, recipe, reference, lambda: None))
    return counted, traffic.bytes, traffic.collectives, runs, comparisons


@pytest.mark.sample(1)
@pytest.mark.parametrize("mesh", [(("ulysses", 2),), (("batch", 2),)])
def test_ranks_count_their_traffic_and_see_other_bits(rank_pool, mesh):
    batch = {"true_cfg_scale": 2.0, "negative_prompt": "b"} if dict(mesh).get("batch") else {}
    recipe, request = Recipe(str(TINY_FLUX), mesh=mesh), Request({**FIELDS, **batch})
    pixels = make_reference(Recipe(str(TINY_FLUX)), request).pixels
    results = rank_pool.run(measure_on_ranks, 2, recipe, request, pixels)
    for counted, sent, collectives, timed, _ in results:
        assert counted["bytes sent"] == sent > 0 and counted["collectives"] == collectives
        assert 0 < counted["bytes sent per step"] <= sent / 3
        assert len(timed["steps"]) == 2
    for same, first, second in zip((True, False), *(comparisons for *_, comparisons in results), strict=True):
        assert (first["ranks equal"], first["passed"]) == (same, same), first
        assert second["relative error"] in (None, first["relative error"])


def test_reference_is_made_beside_a_launcher_and_its_bound_is_none_or_finite(monkeypatch):
    # Ranks of a launcher compute the reference before their process group exists.
    monkeypatch.setenv("WORLD_SIZE", "2")
    for options in ({"backend": AttentionSchedule(KeptKeys(0.5), first=1, last=1)}, {"comm_dtype": "int8"}):
        reference = make_reference(Recipe(str(TINY_FLUX), mesh=(("ring", 2),), **options), Request(FIELDS))
        assert reference.bound is None
        assert np.isfinite(reference.pixels).all()
    monkeypatch.setattr("para_core.cli.comparison.build_unmodified", lambda recipe: None)
    monkeypatch.setattr("para_core.cli.comparison._generate", lambda *_: np.full(3, np.nan, np.float32))
    assert np.isfinite(make_reference(Recipe("m"), Request({})).bound)  # JSON has no infinity.
