"""The sections of `make gpu-check` at tiny sizes on the CPU, and the handling of a section that fails or hangs."""

import importlib
import importlib.metadata
import json
import multiprocessing
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import (
    exact,
    gradients_16_bit,
    local_attention,
    ranks,
    runner,
    small_kernels,
    sync,
    timing,
    vae_ranks,
)
from benchmarks.gpu.job import SectionJob, SectionSkipped
from benchmarks.gpu.runner import SECTIONS, Section, run_all
from benchmarks.gpu.timing import Kernel
from para_core.attention.pack_ops import as_numbers
from para_core.kernels import tune

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_machine(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # This works even if the host's name does not resolve.


@pytest.fixture
def run_here(tmp_path):
    """Return a function that runs a section in this process and returns its JSON."""

    def run(name, *, part=""):
        job = SectionJob(name, CPU, True, tmp_path / f"{name}.json", time.monotonic() + 600, part)
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


def test_refusal_has_failed_if_sdpa_computes(run_here, monkeypatch):
    def refuse(*args, **options):
        raise RuntimeError("no")

    monkeypatch.setattr(local_attention, "local_attention", refuse)
    assert verdicts(run_here("local", part="math")) == {"failed"}


def test_gradients_of_both_layouts_are_compared(run_here, monkeypatch):
    results = run_here("gradients_16_bit")
    assert {row["gradients"] for row in results["rows"] if row["kernel"] == "flash"} == {"right"}
    assert all("refused" in row for row in results["rows"] if row["kernel"] == "efficient")

    # The kernel reads out in another layout, which the finding reports for one kernel.
    def misreads(inputs, lay_out):
        def as_it_reads(out):
            laid = lay_out(out)
            batch, heads, tokens, head_dim = out.shape
            if not laid.is_contiguous():
                return laid
            return laid.view(batch, tokens, heads, head_dim).transpose(1, 2)

        return gradients_16_bit._flash_cpu(inputs, as_it_reads)

    monkeypatch.setitem(gradients_16_bit.CPU_KERNELS, "flash", misreads)
    results = run_here("gradients_16_bit")
    rows = [row for row in results["rows"] if row["kernel"] == "flash"]
    assert {row["gradients"] for row in rows if row["out"] == "[B, S, H, D]"} == {"right"}
    assert {row["gradients"] for row in rows if row["out"] == "[B, H, S, D]"} == {"wrong: dq, dk"}


@pytest.mark.parametrize("kernel", list(gradients_16_bit.CUDA_KERNELS))
def test_arguments_of_cuda_backward_operators_are_accepted(kernel):
    """Check the arguments of CUDA's backward operators on meta tensors, which compute no results."""
    inputs = exact.make_inputs((2, 4, 32, 64), torch.float16, torch.device("meta"))
    for lay_out in gradients_16_bit.LAYOUTS.values():
        result = gradients_16_bit.CUDA_KERNELS[kernel](inputs, lay_out)
        assert {x.shape for x in (result.out, result.dq, result.dk, result.dv)} == {(2, 4, 32, 64)}


@pytest.mark.long
def test_four_ranks_on_one_device_equal_one(run_here):
    results = run_here("ranks")
    assert verdicts(results) == {"ok"}
    assert results["left out"] == []
    meshes, cases = ({row[name] for row in results["rows"]} for name in ("mesh", "case"))
    assert meshes == {"ring", "Ulysses", "ring 2 × Ulysses 2"}
    assert len(results["rows"]) == 3 * len(cases) == 3 * len(ranks.cases(15))


def decode_tiny():
    return list(vae_ranks.decode_on_ranks(CPU, 0.0, True))


@pytest.mark.long
def test_autoencoders_on_two_ranks_of_one_device_equal_one(rank_pool):
    rows, others = rank_pool.run(decode_tiny, 2)
    assert others == [] and {row["verdict"] for row in rows} == {"ok"}
    assert [(row["autoencoder"], row["dtype"]) for row in rows] == [
        (name, dtype) for name in ("FLUX", "Wan 2.1") for dtype in ("float32", "bfloat16")
    ]
    assert all(row["error"] < 1e-5 for row in rows if row["dtype"] == "float32")


@pytest.mark.long
def test_autoencoders_run_in_own_processes(run_here):
    assert verdicts(run_here("vae")) == {"ok"}


def test_small_kernels_are_exact_and_timed(run_here):
    results = run_here("small_kernels")
    assert verdicts(results) == {"ok"}
    assert {row["form"] for row in results["rows"]} == {"plain PyTorch"}
    exchanges = {"pack query, key, value", "unpack out"}
    for eight_bits in ("int8", "float8_e4m3fn"):
        exchanges |= {f"pack query, key, value as {eight_bits}", f"unpack out of {eight_bits}"}
    names = {"merge", "merge in place", "change", "forecast of 2", *exchanges}
    assert {row["kernel"] for row in results["rows"]} == names
    assert len(results["rows"]) == len(names) * len(small_kernels.TINY)
    assert all(row["GB/s"] > 0 and row["ms of a copy"] > 0 for row in results["rows"])
    # Query, key and value of 9 tokens and 8 heads × 16 have 2 bytes per element, and are read and written.
    numbers = {row["kernel"]: row["bytes"] for row in results["rows"] if row["heads"] == 8}
    assert numbers["pack query, key, value"] == 2 * 3 * 9 * 8 * 16 * 2
    assert numbers["pack query, key, value as int8"] == 3 * 9 * 8 * (16 * 2 + 16 + 4)


@pytest.mark.long
def test_small_kernels_register_operators_in_own_process(tmp_path):
    (results,) = run_all((Section("small_kernels", 200),), tmp_path, device="cpu", tiny=True, seconds=300).values()
    assert verdicts(results) == {"ok"}, results["error"]


def test_a_kernel_that_copies_something_else_is_called_wrong(run_here, monkeypatch):
    monkeypatch.setattr(small_kernels, "as_numbers", lambda regions: as_numbers([regions[0]] * len(regions)))
    wrong = {row["kernel"] for row in run_here("small_kernels")["rows"] if row["verdict"] == "wrong"}
    assert len(wrong) == 6
    assert all("pack" in name for name in wrong)


def test_small_kernels_are_skipped_without_triton(tmp_path, monkeypatch):
    monkeypatch.setattr(small_kernels, "load_kernel", lambda *_: None)
    job = SectionJob("small_kernels", torch.device("cuda"), True, tmp_path / "found.json", time.monotonic() + 60)
    with pytest.raises(SectionSkipped, match="needs Triton"):
        small_kernels.run(job)


def test_calls_for_wait_check_run_on_fake_group(run_here):
    results = run_here("sync")
    assert verdicts(results) == {"ok"}
    assert {row["group"] for row in results["rows"]} == {"fake, 1 rank(s)", "fake, 8 rank(s)"}


def test_a_call_that_waits_has_failed(monkeypatch):
    allowed = []

    def wait():
        if not allowed:
            return
        raise RuntimeError("called a synchronizing CUDA operation")

    monkeypatch.setattr(sync, "WARM_UP", 0)
    assert sync.checked(wait, CPU) == {"verdict": "ok"}
    allowed.append(True)
    assert sync.checked(wait, CPU)["raised"] == "RuntimeError: called a synchronizing CUDA operation"


def test_one_rank_with_the_backend_of_the_device(run_here):
    results = run_here("nccl")
    assert verdicts(results) == {"ok"}
    assert len(results["rows"]) == 6


def test_share_of_one_rank_has_phases(run_here):
    rows = run_here("share")["rows"]
    assert {row["mesh"] for row in rows} == {"Ulysses 8", "ring 8", "ring 2 × Ulysses 4", "none: SDPA alone"}
    phases = {row["mesh"]: set(row["ms of"]) for row in rows if row["size"] == "tiny" and "ms of" in row}
    assert phases["Ulysses 8"] >= {"pack", "attention", "unpack"}
    assert phases["ring 8"] >= {"pack", "attention", "merge"}


# -- The references of sections.


def test_exact_attention_is_sdpa_in_float64():
    for mask in exact.MASKS:
        inputs = exact.make_inputs((2, 4, 7, 8), torch.float64, CPU, mask=mask, key_heads=2)
        errors = exact.sdpa(inputs).errors(exact.exact(inputs))
        assert max(errors.values()) < 1e-6, (mask, errors)


@pytest.mark.parametrize("memory", local_attention.MEMORY)
def test_memory_is_laid_out_as_it_is_called(memory):
    query = exact.make_inputs((2, 3, 5, 4), torch.float32, CPU, memory=memory).query
    strides = {"contiguous": (60, 20, 4, 1), "transposed": (60, 4, 12, 1), "packed": (180, 4, 36, 1)}
    assert query.stride() == strides[memory]
    assert torch.equal(query, exact.make_inputs((2, 3, 5, 4), torch.float32, CPU).query)


def test_error_of_sdpa_excuses_no_larger_one():
    assert exact.judge({"dq": 0.3}, {"dq": 0.4}, torch.bfloat16) == "wrong"
    assert exact.judge({"dq": float("inf")}, {"dq": float("inf")}, torch.bfloat16) == "wrong"
    assert exact.judge({"dq": 0.003}, {"dq": 0.002}, torch.bfloat16) == "ok"
    assert exact.judge({"lse": 0.001}, {}, torch.bfloat16) == "wrong"


def test_kernels_are_told_apart_by_name_and_place():
    names = ["direct_copy_kernel", "cudnn_generated_fort_native_sdpa", "direct_copy_kernel", "logaddexp_kernel"]
    names += ["flash_fwd_kernel", "mul_kernel", "CatArrayBatchedCopy"]
    kernels = [Kernel(name, index, 1000.0 * 2**index) for index, name in enumerate(names)]
    assert timing.phases(kernels) == {
        "pack": 1, "attention": 2 + 16, "copies between": 4, "merge": 8 + 32, "unpack": 64,
    }  # fmt: skip
    assert timing.phases(kernels[:1]) == {}
    assert timing.largest(kernels, 1) == [{"kernel": "CatArrayBatchedCopy", "calls": 1, "ms": 64.0}]


# -- The runner.


def section_that_does(tmp_path, monkeypatch, name, body):
    """Return a section whose module is in ``tmp_path``."""
    (tmp_path / f"{name}_section.py").write_text(
        f"import os, subprocess, time\ndef run(job):\n    job.add(found=1)\n    {body}\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    return Section(name, 60, module=f"{name}_section")


@pytest.mark.long
def test_failing_section_stops_no_other(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runner, "_LEAST", 0.0)
    bodies = {
        "raises": "raise ValueError('as it was told')",
        "dies": "os._exit(3)",
        "hangs": "job.add(pid=subprocess.Popen(['sleep', '600']).pid); time.sleep(600)",
    }
    sections = [section_that_does(tmp_path, monkeypatch, name, body) for name, body in bodies.items()]
    results = run_all(tuple(sections[:2]), tmp_path / "out", device="cpu", tiny=True, seconds=200)
    # A process takes longer to start on a busy machine.
    hangs = replace(sections[2], seconds=3 + 2 * max(report["seconds"] for report in results.values()))
    results |= run_all((hangs,), tmp_path / "out", device="cpu", tiny=True, seconds=200)
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


def test_make_runs_sections_with_named_python(tmp_path):
    options = f"--device cpu --tiny --output {tmp_path} --sections gradients_16_bit"
    command = ["make", "gpu-check", f"PYTHON={sys.executable}", f"GPU_CHECK={options}", "STAMP=/nowhere"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "/nowhere" not in done.stdout + done.stderr
    assert "gradients_16_bit: done" in done.stdout
    assert "flux: skipped" in done.stdout
    results = json.loads((tmp_path / "gradients_16_bit.json").read_text())
    assert results["environment"].keys() >= {"device", "date", "versions"}
    assert runner.exit_code({"gradients_16_bit": results}) == 0


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


@pytest.mark.long
def test_hopper_tier_has_its_own_section(run_here):
    results = run_here("attention_hopper")
    judged = [row for row in results["rows"] if "verdict" in row]
    assert {row["verdict"] for row in judged} == {"ok"}
    assert {row["way"] for row in judged} == {"triton, Hopper tier", "triton, Hopper tier, warps with roles"}
    ways = {row["way"] for row in results["rows"] if "way" in row}
    assert ways - {row["way"] for row in judged} == {"triton", "PyTorch"}
    assert {row["is_causal"] for row in judged} == {False, True}


@pytest.mark.long
def test_a_hopper_tier_that_computes_something_else_is_wrong(run_here, monkeypatch):
    attend = tune.attend

    def off(*args):
        out, lse = attend(*args)
        return out * 1.01, lse

    monkeypatch.setattr(tune, "attend", off)
    results = run_here("attention_hopper")
    assert {row["verdict"] for row in results["rows"] if "verdict" in row} == {"wrong"}
