"""The figures of ``para_core bench`` are those of the counters, and its comparison detects a wrong result."""

import gzip
import json
import re
import signal
import sys
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils._python_dispatch import TorchDispatchMode

import para_core.cli.measurement
from benchmarks.harness import counted_traffic
from para_core.adapters import AttentionSchedule, KeptKeys
from para_core.cli.app import run
from para_core.cli.comparison import Reference, compare, make_reference, relative_error
from para_core.cli.measurement import MeasuredRank, MeasurementJob, _summarize_seconds, count_run, time_run
from para_core.fleet.build import build
from para_core.fleet.recipe import Recipe, approximations
from para_core.fleet.request import Request
from para_core.fleet.work import call_pipe
from para_core.launcher.link import NO_CALLER

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TINY_FLUX, TINY_WAN = ROOT / "zoo/flux/pipeline", ROOT / "zoo/video/pipeline"
FIELDS = {"prompt": "a", "width": 48, "height": 32, "num_inference_steps": 3, "max_sequence_length": 13}
SMALL = ["--size", "48x32", "--steps", "2", "--runs", "2", "--warmup-runs", "0"]


def bench(*options):
    return run(["bench", *SMALL, *options])


class Operators(TorchDispatchMode):
    """A counter of the operators that a generation on one rank dispatches, except views and allocations."""

    def __init__(self):
        super().__init__()
        self.launches = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_view = any(x.alias_info is not None and not x.alias_info.is_write for x in func._schema.returns)
        name = func.overloadpacket.__name__
        self.launches += not (is_view or "empty" in name or name in ("_unsafe_view", "_fused_sdp_choice"))
        return func(*args, **(kwargs or {}))


def test_one_rank_is_measured_and_compared(tmp_path, capsys):
    out, traces = tmp_path / "figures.json", tmp_path / "traces"
    assert bench("--check", "--out", str(out), "--profile", str(traces)) == 0
    figures = json.loads(out.read_text())
    seconds = figures["seconds"]
    assert len(seconds["per generation"]["each"]) == 2
    assert [len(steps) for steps in seconds["per step"]["steps of first rank"]] == [1, 1]
    # A generation has two steps, and the time of text and VAE.
    assert 0 < seconds["per step"]["median"] < seconds["per generation"]["median"]
    (rank,) = figures["ranks"]
    assert (rank["bytes sent"], rank["collectives"], rank["device memory"]) == (0, 0, None)
    # The rank holds at least the weights, in float32.
    assert rank["host memory"] > sum(path.stat().st_size for path in TINY_FLUX.rglob("*.safetensors"))
    check = figures["check"]
    assert check["relative error"] == 0 and check["bound"] > 0
    assert check["runs equal"] and check["ranks equal"] and check["passed"]
    assert [path.name for path in traces.iterdir()] == ["rank-0.json.gz"]
    shown = capsys.readouterr().out
    assert re.search(r"\| s per generation \| [0-9.]+ \| [0-9.]+ \| [0-9.]+ \|", shown)
    # Neither existing file is overwritten.
    for options in (["--out", str(out)], ["--profile", str(traces)]):
        assert bench(*options) == 1
        assert re.search(r"^error: .*(figures.json|rank-0.json.gz)", capsys.readouterr().err, re.M)


def test_launches_are_those_dispatched():
    pipe = build(Recipe(str(TINY_FLUX)))
    at_steps = []

    def note(pipe, step, time, tensors):
        at_steps.append(operators.launches)
        return {}

    with Operators() as operators:
        call_pipe(pipe, [Request(FIELDS)], callback_on_step_end=note)
    counted = count_run(pipe, Request(FIELDS))
    assert counted["launches"] == operators.launches
    assert counted["launches per step"] == (at_steps[2] - at_steps[0]) / 2


def test_warmup_runs_are_not_timed(tmp_path, monkeypatch):
    calls = []

    def build_recorded(recipe):
        pipe = build(recipe)
        pipe.transformer.register_forward_hook(lambda module, args, output: calls.append(time.perf_counter()))
        return pipe

    monkeypatch.setattr(para_core.cli.measurement, "build", build_recorded)
    out = tmp_path / "figures.json"
    assert bench("--warmup-runs", "3", "--runs", "1", "--out", str(out)) == 0
    # Three warm-up runs, a timed one and a counted one, of two steps each.
    assert len(calls) == 2 * (3 + 1 + 1)
    assert len(json.loads(out.read_text())["seconds"]["per generation"]["each"]) == 1


def test_the_slowest_rank_counts():
    fast = [{"seconds": 1.0, "steps": [0.25, 0.75]}, {"seconds": 4.0, "steps": [1.0, 2.0]}]
    slow = [{"seconds": 2.0, "steps": [0.5, 1.0]}, {"seconds": 3.0, "steps": [1.0, 1.5]}]
    seconds = _summarize_seconds([fast, slow])
    assert seconds["per generation"] == {"median": 3.0, "min": 2.0, "max": 4.0, "each": [2.0, 4.0]}
    assert seconds["per step"]["each"] == [0.75, 1.5]


@pytest.mark.parametrize(("approximation", "passes"), [([], False), (["--cache", "0.1"], True)])
def test_wrong_result_fails_unless_it_is_an_approximation(tmp_path, monkeypatch, capsys, approximation, passes):
    def build_wrong(recipe):
        pipe = build(recipe)
        pipe.transformer.register_forward_hook(lambda module, args, output: (output[0] * 1.01, *output[1:]))
        return pipe

    monkeypatch.setattr(para_core.cli.measurement, "build", build_wrong)
    out = tmp_path / "figures.json"
    assert bench("--check", "--runs", "1", "--out", str(out), *approximation) == int(not passes)
    check = json.loads(out.read_text())["check"]
    assert check["relative error"] > 1e-4
    assert check["passed"] == passes
    assert (check["bound"] is None) == passes
    assert ("--cache" in capsys.readouterr().out) == passes


@pytest.mark.long
def test_bound_follows_the_dtype():
    references = [
        make_reference(Recipe(str(TINY_FLUX), dtype=dtype), Request(FIELDS)) for dtype in ("float32", "bfloat16")
    ]
    in_32_bits, in_16_bits = (reference.rounding for reference in references)
    assert in_32_bits < 1e-5 < 1e-4 < in_16_bits < 0.1


def test_missing_and_infinite_pixels_are_no_result():
    pixels = np.ones((2, 3, 3), np.float32)
    assert relative_error(pixels, pixels[:1]) == float("inf")
    assert relative_error(np.full_like(pixels, np.nan), pixels) == float("inf")
    assert relative_error(pixels * 1.5, pixels) == 0.5


def test_only_options_that_approximate_have_no_bound():
    assert approximations(Recipe("m", cache=0.0, backend="math", vae=True, compile="whole", weights="fsdp")) == ()
    options = {
        "cache": "default",
        "backend": "triton-int8",
        "comm_dtype": "int8",
        "quantize": "int8",
        "cross_backend": "sage",
    }
    assert set(approximations(Recipe("m", **options))) == set(options)
    assert approximations(Recipe("m", pipefusion=2)) == ("pipefusion",)
    for middle, names in (("sage", ("attention_schedule",)), ("math", ())):
        assert approximations(Recipe("m", backend=AttentionSchedule(middle))) == names


def count_on_ranks(mesh):
    recipe = Recipe(str(TINY_FLUX), mesh=mesh)
    request = Request({**FIELDS, "true_cfg_scale": 2.0, "negative_prompt": "b"} if dict(mesh).get("batch") else FIELDS)
    with counted_traffic() as traffic:
        call_pipe(build(recipe), [request])
    counted = count_run(build(recipe), request)
    runs = time_run(build(recipe), request)
    return counted, traffic.bytes, traffic.collectives, runs


@pytest.mark.sample(1)
@pytest.mark.parametrize("mesh", [(("ring", 2),), (("batch", 2),)])
def test_bytes_are_those_of_the_traffic_counter(rank_pool, mesh):
    for counted, sent, collectives, timed in rank_pool.run(count_on_ranks, 2, mesh):
        assert counted["bytes sent"] == sent > 0
        assert counted["collectives"] == collectives
        assert 0 < counted["bytes sent per step"] <= sent / 3
        assert len(timed["steps"]) == 2


def compare_on_ranks(pixels, wrong):
    recipe = Recipe(str(TINY_FLUX), mesh=(("ulysses", 2),))
    pipe = build(recipe)
    rank = torch.distributed.get_rank()
    if rank == wrong:
        decode = pipe.vae.decode
        pipe.vae.decode = lambda *args, **kwargs: (decode(*args, **kwargs)[0] * 1.01,)
    reference = Reference(pixels, 1e-6) if rank == 0 else None
    return compare(pipe, Request(FIELDS), recipe, reference, lambda: None)


@pytest.mark.sample(1)
@pytest.mark.parametrize("wrong", [None, 1])
def test_a_rank_with_other_bits_is_seen_by_all(rank_pool, wrong):
    reference = make_reference(Recipe(str(TINY_FLUX)), Request(FIELDS))
    first, second = rank_pool.run(compare_on_ranks, 2, reference.pixels, wrong)
    assert first["ranks equal"] == (wrong is None)
    assert first["passed"] == (wrong is None), first
    assert second["relative error"] in (None, first["relative error"])


def measure_wrong(wrong):
    """Measure with ``--check`` on this rank, with a transformer that treats its own tokens alone if ``wrong``."""

    def build_wrong(recipe):
        pipe = build(recipe)
        if wrong:
            pipe.transformer.transformer_blocks[0].ff.register_forward_hook(
                lambda module, args, output: output - output.mean(1, keepdim=True)
            )
        return pipe

    job = MeasurementJob(Recipe(str(TINY_FLUX), mesh=(("ulysses", 2),)), Request(FIELDS), 0, 1, check=True)
    reference = Reference(np.zeros((1, 32, 48, 3), np.float32), 1.0) if torch.distributed.get_rank() == 0 else None
    with mock.patch("para_core.cli.measurement.build", build_wrong):
        return MeasuredRank(job, verifies=True).measure(reference, NO_CALLER)


@pytest.mark.filterwarnings("ignore::para_core.ForeignCodeWarning")
def test_check_names_the_module_that_differs_on_ranks(rank_pool):
    for error in rank_pool.run_expecting_errors(measure_wrong, 2, True):
        assert re.search(r"transformer_blocks\.0\.ff", str(error))
    figures, nothing = rank_pool.run(measure_wrong, 2, False)
    assert nothing is None and figures["warmup_runs"] == 0


@pytest.mark.parametrize("options", [{"comm_dtype": "int8"}, {"backend": "sage"}, {"mesh": (("pipe", 2),)}])
def test_recipe_that_cannot_be_verified_is_refused(options):
    Recipe("m", verify=True, cache=0.1, quantize="int8")
    with pytest.raises(ValueError, match=r"verify .*(comm_dtype|backend|pipe)"):
        Recipe("m", verify=True, **options)


def test_reference_of_an_approximation_is_made_beside_a_launcher(monkeypatch):
    # Ranks of a launcher compute the reference before their process group exists.
    monkeypatch.setenv("WORLD_SIZE", "2")
    schedule = AttentionSchedule(KeptKeys(0.5), first=1, last=1)
    for options in ({"cache": 0.1}, {"backend": schedule}, {"comm_dtype": "int8"}):
        recipe = Recipe(str(TINY_FLUX), mesh=(("ring", 2),), **options)
        reference = make_reference(recipe, Request(FIELDS))
        assert reference.bound is None
        assert np.isfinite(reference.pixels).all()


@pytest.mark.long
def test_two_ranks_are_compared_and_profiled(tmp_path):
    out, traces = tmp_path / "figures.json", tmp_path / "traces"
    assert bench("--runs", "1", "--ranks", "2", "--check", "--out", str(out), "--profile", str(traces)) == 0
    figures = json.loads(out.read_text())
    assert figures["mesh"]["ring"] * figures["mesh"]["ulysses"] == 2
    assert 0 < figures["check"]["relative error"] < figures["check"]["bound"] < 1e-3
    assert figures["check"]["ranks equal"]
    assert all(rank["bytes sent"] > 0 for rank in figures["ranks"])
    for rank in range(2):
        with gzip.open(traces / f"rank-{rank}.json.gz") as file:
            events = {event.get("name") for event in json.load(file)["traceEvents"]}
        assert "c10d::alltoall_base_" in events
        assert "para_core: one generation" in events


@pytest.mark.long
def test_a_video_is_measured(tmp_path):
    out = tmp_path / "figures.json"
    options = ["--model", str(TINY_WAN), "--size", "32x32", "--frames", "5", "--steps", "2", "--warmup-runs", "0"]
    assert run(["bench", *options, "--runs", "1", "--check", "--out", str(out)]) == 0
    assert json.loads(out.read_text())["check"]["relative error"] == 0


@pytest.fixture
def image_to_image(tmp_path):
    """Return the folder of a pipeline that starts from an image, with the weights of the tiny FLUX."""
    folder = tmp_path / "model"
    folder.mkdir()
    for part in TINY_FLUX.iterdir():
        (folder / part.name).symlink_to(part)
    index = json.loads((TINY_FLUX / "model_index.json").read_text())
    (folder / "model_index.json").unlink()
    (folder / "model_index.json").write_text(json.dumps({**index, "_class_name": "FluxImg2ImgPipeline"}))
    return str(folder)


@pytest.mark.long
def test_an_image_is_an_input(tmp_path, image_to_image):
    Image.new("RGB", (48, 32), "red").save(tmp_path / "red.png")
    out = tmp_path / "figures.json"
    options = ["--model", image_to_image, "--image", str(tmp_path / "red.png"), "--set", "max_sequence_length=13"]
    assert bench(*options, "--runs", "1", "--set", "strength=0.9", "--out", str(out)) == 0
    assert json.loads(out.read_text())["pipeline"] == "FluxImg2ImgPipeline"


def test_sigterm_ends_with_a_sentence_and_no_figures(tmp_path, monkeypatch, capsys):
    def end(*_):
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(para_core.cli.measurement, "build", end)
    out = tmp_path / "figures.json"
    assert bench("--out", str(out)) == 143
    assert "SIGTERM" in capsys.readouterr().err
    assert not out.exists()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.skipif(sys.platform != "linux", reason="the peak can be reset on Linux only")
def test_host_memory_counts_from_the_reset():
    large = torch.ones(60_000_000)
    before = para_core.cli.measurement._read_peak_memory()["host memory"]
    del large
    para_core.cli.measurement._reset_memory()
    assert para_core.cli.measurement._read_peak_memory()["host memory"] < before - 200e6
