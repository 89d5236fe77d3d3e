"""The doctor on two CPU ranks: its table and JSON if all checks pass, and its message for each kind of fault."""

import json
import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from para_core import doctor
from para_core.doctor import exactness, examine, versions
from para_core.doctor_report import BROKEN, CHANGE, OK, DoctorReport, Ranks
from tests.gpus import gpu_named
from tests.tiny import cpu_mesh


def this_rank():
    return Ranks(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), torch.float32)


def in_short():
    """Measure once instead of taking the median of many."""
    return mock.patch.object(doctor.seconds_of, "__kwdefaults__", {"repeats": 1, "rounds": 1})


def finding_of(check, *args):
    """Return the one finding that ``check(this_rank(), report, *args)`` adds to a report."""
    report = DoctorReport()
    check(this_rank(), report, *args)
    (finding,) = report.findings
    return finding


def examine_all():
    with in_short():
        report = examine(this_rank())
    return report.table(), report.broken, report.figures, [finding.name for finding in report.findings]


def examine_with_wrong_attention():
    """Examine the mesh while the attention of one rank is slightly wrong."""
    mesh = cpu_mesh(1, 2)
    attend = doctor._attend

    def wrong(qkv):
        return attend(qkv) * (1.001 if qkv[0].dtype == torch.float32 and dist.get_rank() == 1 else 1.0)

    with mock.patch.object(doctor, "_attend", wrong):
        return finding_of(exactness, mesh)


def examine_with_other_versions():
    def version(name):
        return f"2.{11 + dist.get_rank()}.0"

    with mock.patch("importlib.metadata.version", version):
        return finding_of(versions)


def examine_without_a_mesh():
    def refuse(*_, **__):
        raise RuntimeError("ranks [0, 1] on host a all have the current device 0, and NCCL takes one rank per GPU")

    with in_short(), mock.patch.object(doctor, "init_context_parallel_mesh", refuse):
        return examine(this_rank())


def test_all_is_well_on_two_ranks(rank_pool):
    results = rank_pool.run(examine_all, 2)
    table, broken, figures, names = results[0]
    assert not broken, table
    for name in ("versions", "device", "backends", "host", "attention over the mesh", "host per attention call"):
        assert name in names
    assert "mesh dim ulysses" in names and "mesh dim ring" not in names
    (dim,) = figures["mesh dims"]
    assert dim["size"] == 2 and dim["latency"] > 0 and dim["bytes per second"] > 0
    # The report describes the slowest rank, on all ranks.
    assert results[1][2] == figures


def test_wrong_attention_is_found_on_every_rank(rank_pool):
    for finding in rank_pool.run(examine_with_wrong_attention, 2):
        assert finding.verdict == BROKEN
        assert "NCCL" in finding.advice


def test_other_versions_on_other_ranks_are_named(rank_pool):
    first, _ = rank_pool.run(examine_with_other_versions, 2)
    assert first.verdict == BROKEN
    assert "rank 1: " in first.result and "torch 2.12.0" in first.result
    assert "torch" in first.advice


def test_raising_check_is_broken_and_others_run(rank_pool):
    report = rank_pool.run(examine_without_a_mesh, 2)[0]
    assert report.broken
    broken = [finding for finding in report.findings if finding.verdict == BROKEN]
    assert [finding.name for finding in broken] == ["mesh"]
    assert "--nproc_per_node" in broken[0].advice
    assert any(finding.name == "host" for finding in report.findings)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("Timed out waiting 60000ms for recv operation", "NCCL_DEBUG"),
        ("CUDA out of memory. Tried to allocate", "nvidia-smi"),
        ("no such thing", "no such thing"),
    ],
)
def test_what_was_raised_has_a_way_out(error, words):
    report = DoctorReport()

    def check():
        raise RuntimeError(error)

    doctor._try(report, "links", check)
    assert words in report.findings[0].advice and error in report.findings[0].result


def test_one_process_is_examined_without_ranks(tmp_path, capsys):
    with in_short():
        assert doctor.main(["--cpu", "--output", str(tmp_path / "doctor.json")]) == 0
    assert "torchrun" in capsys.readouterr().out
    report = json.loads((tmp_path / "doctor.json").read_text())
    assert report["doctor"]["products"] > 0 and report["findings"][0]["name"] == "versions"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--output", "/no/such/folder/doctor.json"], "/no/such/folder"),
        (["--ring", "0"], "--ring is 0"),
    ],
)
def test_bad_doctor_options_are_refused_at_once(arguments, words, capsys):
    with pytest.raises(SystemExit):
        doctor.main(["--cpu", *arguments])
    assert words in capsys.readouterr().err


def test_a_slow_link_says_what_is_usual():
    ranks = Ranks(0, 2, torch.device("cuda", 0), torch.bfloat16)
    report = DoctorReport()
    with gpu_named("NVIDIA H100 80GB HBM3"):
        for bandwidth in (5e9, 300e9):
            report.add("mesh dim ring", "", doctor.advice_on_bandwidth(bandwidth, ranks.known_device()))
    slow, usual = report.findings
    assert slow.verdict == CHANGE and re.search(r"nvlink4 .*370 GB/s", slow.advice)
    assert usual.verdict == OK
