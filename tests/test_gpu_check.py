"""The sections of `make gpu-check` at tiny sizes on the CPU, and the handling of a section that fails or hangs."""

import importlib
import importlib.metadata
import json
import multiprocessing
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from benchmarks.gpu import (
    exact,
    host,
    kernels,
    local_attention,
    ranks,
    runner,
    small_kernels,
    timing,
    vae,
)
from benchmarks.gpu.job import SectionJob, SectionSkipped
from benchmarks.gpu.runner import SECTIONS, Options, Section, run_all
from benchmarks.gpu.timing import Kernel, Profile

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
ON_CPU = Options("cpu")


@pytest.fixture(autouse=True)
def one_machine(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # This works even if the host's name does not resolve.


@pytest.fixture
def run_here(tmp_path):
    """Return a function that runs a section in this process and returns its JSON."""

    def run(name, *, part=""):
        file, end = tmp_path / f"{name}.json", time.monotonic() + 600
        job = SectionJob(name, CPU, True, file, end, part, compile_backend="eager")
        section = importlib.import_module(next(section.path for section in SECTIONS if section.name == name))
        section.run(job)
        job.write("done")
        # The limits of sections are checked against NEEDS, so a section must not ask for anything else.
        assert job.asked.items() <= section.NEEDS.items()
        return json.loads(job.file.read_text())

    return run


def verdicts(results):
    return {row["verdict"] for row in results["rows"] if "verdict" in row}


# -- Sections.


@pytest.mark.parametrize("part", ["math", "flash"])
def test_local_attention_is_as_exact_as_sdpa(run_here, part):
    results = run_here("local", part=part)
    assert verdicts(results) == {"ok"}
    # There are dtypes × head dims × masks × layouts. In float32 two masks are the same.
    assert len(results["rows"]) == (2 * 6 + 5) * 2 * 3


def test_missing_backend_is_refused_with_reason(run_here):
    results = run_here("local", part="cudnn")
    assert verdicts(results) == {"refused"}
    assert all("backend" in row["SDPA refused"] for row in results["rows"])


def test_wrong_gradients_are_called_wrong(run_here, monkeypatch):
    right = local_attention.local_attention_backward

    def wrong(*args, **options):
        dq, dk, dv, grad_mask = right(*args, **options)
        return dq, dk, dv * 1.05, grad_mask

    monkeypatch.setattr(local_attention, "local_attention_backward", wrong)
    assert verdicts(run_here("local", part="math")) == {"wrong"}


@pytest.mark.long
def test_four_ranks_on_one_device_equal_one(run_here):
    results = run_here("ranks")
    assert verdicts(results) == {"ok"}
    assert results["left out"] == []
    meshes, cases = ({row[name] for row in results["rows"]} for name in ("mesh", "case"))
    assert meshes == {"ring", "Ulysses", "ring 2 × Ulysses 2"}
    assert len(results["rows"]) == 3 * len(cases) == 3 * len(ranks.cases(15))


def decode_tiny():
    return list(vae.decode_on_ranks(CPU, 0.0, True))


def test_autoencoder_on_two_ranks_of_one_device_equals_one(rank_pool):
    for rows in rank_pool.run(decode_tiny, 2):
        assert [(row["dtype"], row["verdict"]) for row in rows] == [("float32", "ok"), ("bfloat16", "ok")]
        assert rows[0]["error"] < 1e-5 < rows[1]["error of one rank"]


def test_small_kernels_are_exact_and_timed(run_here):
    results = run_here("kernels")
    assert verdicts(results) == {"ok"}
    rows = [row for row in results["rows"] if "form" in row]
    assert {row["form"] for row in rows} == {"plain PyTorch"}
    exchanges = {"pack query, key, value", "unpack out"}
    for eight_bits in ("int8", "float8_e4m3fn"):
        exchanges |= {f"pack query, key, value as {eight_bits}", f"unpack out of {eight_bits}"}
    names = {"merge", "merge in place", "change", "forecast of 2", "group moments", "group norm", *exchanges}
    assert {row["kernel"] for row in rows} == names
    assert len(rows) == len(names) * len(small_kernels.TINY)
    assert all(row["GB/s"] > 0 and row["ms of a copy"] > 0 for row in rows)
    # Query, key and value of 9 tokens and 8 heads × 16 have 2 bytes per element, and are read and written.
    numbers = {row["kernel"]: row["bytes"] for row in rows if row["heads"] == 8}
    assert numbers["pack query, key, value"] == 2 * 3 * 9 * 8 * 16 * 2
    assert numbers["pack query, key, value as int8"] == 3 * 9 * 8 * (16 * 2 + 16 + 4)


def test_wrong_attention_kernel_is_called_wrong(run_here, monkeypatch):
    right = kernels.local_attention_with_lse

    def wrong(*args, **options):
        out, lse = right(*args, **options)
        return out * 1.1, lse

    monkeypatch.setattr(kernels, "local_attention_with_lse", wrong)
    rows = [row for row in run_here("kernels")["rows"] if row.get("kernel", "").startswith("attention")]
    assert {row["verdict"] for row in rows} == {"wrong"}
    assert {row["kernel"] for row in rows} == {"attention, triton", "attention, triton-int8"}


def test_kernels_are_skipped_without_triton(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "load_kernel", lambda *_: None)
    job = SectionJob("kernels", torch.device("cuda"), True, tmp_path / "found.json", time.monotonic() + 60)
    with pytest.raises(SectionSkipped, match="needs Triton"):
        kernels.run(job)


def test_each_counted_call_has_times_and_counts(run_here):
    results = run_here("host")
    assert verdicts(results) == {"ok"}
    assert all(row["launches"] > 0 and row["waits"] == row["copies"] == 0 for row in results["rows"])
    assert [row["call"].partition(",")[0] for row in results["rows"][:5]] == ["step"] * 4 + [
        "a computed and a skipped step"
    ]
    assert len(results["rows"]) == 5 + 3 * 8


def test_call_that_waits_more_often_than_simulated_fails(run_here, monkeypatch):
    monkeypatch.setattr(host, "profiled", lambda call, device: Profile([Kernel("gemm", 0.0, 1.0)], waits=2))
    monkeypatch.setattr(host, "places_of_waits", lambda call: ["model.py:7"])
    monkeypatch.setattr(host, "read_results", lambda name: {"calls": {"step, unmodified": {"waits": 2}}})
    first, *others = run_here("host")["rows"]
    assert (first["verdict"], first["simulated waits"]) == ("ok", 2)
    assert {row["verdict"] for row in others} == {"failed"}
    assert others[0]["waits at"] == ["model.py:7"]


def test_events_of_a_gpu_are_read_as_kernels_and_waits(monkeypatch):
    """Replace the profiler, because no GPU is here. The names are those of CUPTI."""
    annotated = {"profiled call": True, "nccl:all_reduce": True}

    def event(name, device_type, start, end):
        span = SimpleNamespace(start=start, end=end)
        annotation = annotated.get(name, False)
        return SimpleNamespace(name=name, device_type=device_type, time_range=span, is_user_annotation=annotation)

    cpu, cuda = DeviceType.CPU, DeviceType.CUDA
    events = [
        event("profiled call", cpu, 0.0, 100.0),
        event("profiled call", cuda, 10.0, 160.0),
        event("nccl:all_reduce", cuda, 10.0, 20.0),
        event("aten::mm", cpu, 1.0, 5.0),
        event("cudaLaunchKernel", cpu, 2.0, 3.0),
        event("ampere_bf16_gemm", cuda, 20.0, 60.0),
        event("Memcpy DtoH (Device -> Pageable)", cuda, 60.0, 70.0),
        event("cudaStreamSynchronize", cpu, 50.0, 71.0),
        event("cudaDeviceSynchronize", cpu, 150.0, 151.0),  # The profiler's own, after the call.
    ]
    asked = []

    @contextmanager
    def profile(activities, acc_events):
        asked.extend(activities)
        yield SimpleNamespace(events=lambda: events)

    monkeypatch.setattr(timing, "profile", profile)
    monkeypatch.setattr(timing, "synchronize", lambda device: None)
    monkeypatch.setattr(timing, "supported_activities", lambda: set(ProfilerActivity.__members__.values()))
    profiled = timing.profiled(lambda: None, torch.device("cuda"))
    assert set(asked) == {ProfilerActivity.CPU, ProfilerActivity.CUDA}
    assert (profiled.launches, profiled.copies, profiled.waits) == (1, 1, 1)
    assert profiled.busy_ms == 0.05


def test_one_rank_with_the_backend_of_the_device(run_here):
    results = run_here("nccl")
    assert verdicts(results) == {"ok"}
    assert len(results["rows"]) == 6


def test_speed_is_measured_next_to_pytorch(run_here):
    rows = run_here("speed")["rows"]
    attention = {row["way"]: row for row in rows if "what" in row}
    shares = [name for name in attention if name.startswith("ours, share of a rank")]
    assert len(shares) == 3 and len(attention) == 3 + 2 + 1 + 3
    for name in shares:
        assert {f"of {sdpa}'s time" for sdpa in ("SDPA flash", "SDPA cuDNN", "SDPA efficient")} <= attention[
            name
        ].keys()
    assert attention[shares[0]]["ms of"].keys() >= {"pack", "attention", "unpack"}
    assert attention[shares[1]]["ms of"].keys() >= {"pack", "attention", "merge"}
    steps = {row["way"]: row for row in rows if "model" in row}
    assert [*steps] == ["plain, eager", "parallel, eager", "cached, eager", "plain, blocks", "parallel, blocks"]
    assert steps["parallel, blocks"]["of plain, blocks's time"] > 0


# -- The references of sections.


def test_exact_attention_is_sdpa_in_float64():
    for mask in exact.MASKS:
        inputs = exact.make_inputs((2, 4, 7, 8), torch.float64, CPU, mask=mask, key_heads=2)
        errors = exact.sdpa(inputs).errors(exact.exact(inputs))
        assert max(errors.values()) < 1e-6, (mask, errors)


@pytest.mark.parametrize(
    ("mask", "rounds"), [("none", False), ("bool full", False), ("float", False), ("float32", True)]
)
def test_only_a_mask_that_may_be_rounded_excuses_lse(mask, rounds):
    def bound(dtype):
        return exact.make_inputs((1, 2, 7, 8), dtype, CPU, mask=mask).lse_bound

    assert bound(torch.float32) == exact.LSE_BOUND
    assert (bound(torch.bfloat16) > 4 * exact.LSE_BOUND) == rounds


def test_kernels_are_told_apart_by_name_and_place():
    names = ["direct_copy_kernel", "cudnn_generated_fort_native_sdpa", "direct_copy_kernel", "logaddexp_kernel"]
    names += ["flash_fwd_kernel", "mul_kernel", "CatArrayBatchedCopy"]
    kernels = [Kernel(name, index, 1000.0 * 2**index) for index, name in enumerate(names)]
    assert timing.phases(kernels) == {
        "pack": 1, "attention": 2 + 16, "copies between": 4, "merge": 8 + 32, "unpack": 64,
    }  # fmt: skip
    assert timing.phases(kernels[:1]) == {}


# -- The runner.


def section_that_does(tmp_path, monkeypatch, name, body):
    """Return a section whose module is in ``tmp_path``."""
    (tmp_path / f"{name}_section.py").write_text(
        f"import os, subprocess, time\ndef run(job):\n    job.add(found=1)\n    {body}\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    return Section(name, 60, 0, 1, module=f"{name}_section")


@pytest.mark.long
def test_failing_section_stops_no_other(tmp_path, monkeypatch, capsys):
    bodies = {
        "raises": "raise ValueError('as it was told')",
        "dies": "os._exit(3)",
        "hangs": "job.add(pid=subprocess.Popen(['sleep', '600']).pid); time.sleep(600)",
    }
    sections = [section_that_does(tmp_path, monkeypatch, name, body) for name, body in bodies.items()]
    results = run_all(tuple(sections[:2]), tmp_path / "out", ON_CPU, seconds=200)
    # A process takes longer to start on a busy machine.
    hangs = replace(sections[2], seconds=3 + 2 * max(report["seconds"] for report in results.values()))
    results |= run_all((hangs,), tmp_path / "out", ON_CPU, seconds=200)
    assert {name: report["status"] for name, report in results.items()} == {
        "raises": "failed", "dies": "failed", "hangs": "killed",
    }  # fmt: skip
    assert "ValueError: as it was told" in results["raises"]["error"]
    assert "ended with 3" in results["dies"]["error"]
    assert "hangs_section.py" in results["hangs"]["error"]  # The stack shows where it hung.
    # The processes that it had started are gone too, as soon as the system has ended them.
    deadline = time.monotonic() + 60
    while lives(results["hangs"]["rows"][1]["pid"]):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    for name, report in results.items():
        assert report["rows"][0] == {"found": 1}
        assert json.loads((tmp_path / f"out/{name}.json").read_text()) == report
        assert report["environment"]["versions"]["torch"] == importlib.metadata.version("torch")
    assert runner.exit_code(results) == 3
    assert "failed: ValueError: as it was told" in capsys.readouterr().out


def lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


def test_missing_gpu_exits_with_2(capsys):
    from benchmarks.gpu.__main__ import main

    assert main([]) == 2
    assert "CUDA" in capsys.readouterr().out


@pytest.mark.long
def test_raising_rank_is_reported_and_results_kept():
    from benchmarks.gpu.processes import run_ranks

    before = set(multiprocessing.active_children())  # The ranks of other tests stay.
    rows, errors = run_ranks(raise_on_rank_1, 2, device=CPU, backend="gloo", seconds=100)
    assert rows == [[{"found": 0}], [{"found": 1}]]
    assert "ZeroDivisionError" in errors[1]
    assert 0 in errors  # It waited in a barrier.
    assert set(multiprocessing.active_children()) <= before


def raise_on_rank_1(device):
    rank = torch.distributed.get_rank()
    yield {"found": rank}
    if rank == 1:
        raise ZeroDivisionError


@pytest.mark.long
def test_triton_kernel_is_compiled_in_a_pool_and_interpreted(run_here):
    results = run_here("attention")
    assert verdicts(results) == {"ok"}
    first = results["rows"][0]
    assert (first["compiled"], first["processes"], first["missing"]) == (1, 1, {})
    ways = {row["way"] for row in results["rows"] if "way" in row}
    assert ways == {
        "triton",
        "triton, four continuing calls",
        "triton, half of the keys padded",
        "triton-int8, not exact",
        "PyTorch",
    }
    assert not any("refused" in row for row in results["rows"])
    # In float16 the results are exact except for rounding, in one call and in four.
    errors = {row["way"]: row["error"] for row in results["rows"] if "way" in row and not row["is_causal"]}
    assert (
        max(errors["triton"], errors["triton, four continuing calls"])
        < 1e-3
        < errors["triton, half of the keys padded"]
    )
