"""The doctor on two CPU ranks: its table and JSON if all checks pass, and its message for each kind of fault."""

import json
import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from para_core import doctor
from para_core.doctor import check_exactness, check_versions, examine
from para_core.doctor_report import BROKEN, CHANGE, OK, DoctorReport, ExaminedRanks
from para_core.modes.unified import UnifiedAttnMode
from tests.gpus import gpu_named
from tests.tiny import cpu_mesh


def this_rank():
    return ExaminedRanks(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), torch.float32)


def in_short():
    """Measure once instead of taking the median of many."""
    return mock.patch.object(doctor.seconds_of, "__kwdefaults__", {"repeats": 1, "rounds": 1})


def finding_of(check, *args):
    """Return the one finding that ``check(this_rank(), report, *args)`` adds to a report."""
    report = DoctorReport()
    check(this_rank(), report, *args)
    (finding,) = report.findings
    return finding


def examine_with_faults():
    """Return the report of healthy ranks, and findings or the report with a fault on one rank."""
    mesh, attend, gather = cpu_mesh(1, 2), doctor._attend, UnifiedAttnMode.gather

    def wrong(qkv):
        return attend(qkv) * (1.001 if qkv[0].dtype == torch.float32 and dist.get_rank() == 1 else 1.0)

    def lose(cp, out, dim):
        return gather(cp, out, dim=dim) * (torch.nan if dist.get_rank() == 1 else 1.0)

    refuse = mock.Mock(side_effect=RuntimeError(f"ranks [0, 1] {doctor.SHARED_GPU}"))
    count_cores = mock.Mock(return_value=1, side_effect=OSError("no cores") if dist.get_rank() == 1 else None)
    with in_short():
        healthy = examine(this_rank())
        with mock.patch.object(doctor, "init_context_parallel_mesh", refuse), mock.patch("os.cpu_count", count_cores):
            without_mesh = examine(this_rank())
    with mock.patch.object(doctor, "_attend", wrong):
        attention = [finding_of(check_exactness, mesh)]
    with mock.patch.object(UnifiedAttnMode, "gather", lose):
        attention.append(finding_of(check_exactness, mesh))
    with mock.patch("importlib.metadata.version", lambda name: f"2.{11 + dist.get_rank()}.0"):
        return healthy, without_mesh, attention, finding_of(check_versions)


def test_faults_of_a_rank_are_found_on_all(rank_pool):
    (healthy, *_, other_versions), (second, *_) = results = rank_pool.run(examine_with_faults, 2)
    assert not healthy.broken, healthy.table()
    names = {finding.name for finding in healthy.findings}
    assert {"versions", "device", "backends", "host", "attention over the mesh", "mesh dim ulysses"} <= names
    assert "mesh dim ring" not in names
    (dim,) = healthy.figures["mesh dims"]
    assert dim["size"] == 2 and dim["latency"] > 0 and dim["bytes per second"] > 0
    # The report describes the slowest rank, on all ranks.
    assert second.figures == healthy.figures
    for finding in results[0][2] + results[1][2]:
        assert finding.verdict == BROKEN and "NCCL" in finding.advice
    assert other_versions.verdict == BROKEN
    assert "rank 1: " in other_versions.result and "torch 2.12.0" in other_versions.result
    assert "torch" in other_versions.advice
    # A check that raises, also on one rank only, is broken on all, and the others run.
    for (_, without_mesh, *_), prefix in zip(results, ("rank 1: ", ""), strict=True):
        device, mesh = [finding for finding in without_mesh.findings if finding.verdict == BROKEN]
        assert (device.name, device.result) == ("device", f"{prefix}OSError: no cores")
        assert mesh.name == "mesh" and "--nproc_per_node" in mesh.advice
        assert any(finding.name == "host" for finding in without_mesh.findings)


def test_one_process_is_examined_without_ranks(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")  # as a cluster may: without WORLD_SIZE it is no rank
    # macOS does not know how much memory is free.
    with in_short(), mock.patch("os.sysconf_names", {}), mock.patch("os.sysconf", side_effect=ValueError):
        assert doctor.main(["--cpu", "--output", str(tmp_path / "doctor.json")]) == 0
    assert "torchrun" in capsys.readouterr().out
    report = json.loads((tmp_path / "doctor.json").read_text())
    assert report["doctor"]["products"] > 0 and report["findings"][0]["name"] == "versions"
    for arguments in (["--output", "/no/such/folder/doctor.json"], ["--output", str(tmp_path)], ["--ring", "0"]):
        with pytest.raises(SystemExit):
            doctor.main(["--cpu", *arguments])
        assert " ".join(arguments[1:]).removesuffix("/doctor.json") in capsys.readouterr().err


def test_each_speed_is_that_of_the_rank_that_is_slowest_in_it():
    report = DoctorReport()
    with in_short(), mock.patch.object(ExaminedRanks, "gather", return_value=[(1.0, 4.0), (2.0, 3.0)]):
        doctor.measure_speed(ExaminedRanks(0, 2, torch.device("cpu"), torch.float32), report)
    assert report.figures == {"products": 1.0, "attention": 3.0}


@pytest.mark.parametrize(("size", "ring"), [(2, 1), (3, 1), (4, 2), (6, 2)])
def test_an_even_number_of_ranks_is_examined_with_a_ring_of_two(size, ring):
    with in_short(), mock.patch.object(doctor, "init_context_parallel_mesh", side_effect=RuntimeError) as make_mesh:
        examine(ExaminedRanks(0, size, torch.device("cpu"), torch.float32))
    make_mesh.assert_called_once_with("cpu", max_ring_dim_size=ring)


def test_a_slow_link_says_what_is_usual():
    ranks = ExaminedRanks(0, 2, torch.device("cuda", 0), torch.bfloat16)
    report = DoctorReport()
    with gpu_named("NVIDIA H100 80GB HBM3"):
        for bandwidth in (5e9, 300e9):
            report.add("mesh dim ring", "", doctor.advice_on_bandwidth(bandwidth, ranks.known_device()))
    slow, usual = report.findings
    assert slow.verdict == CHANGE and re.search(r"nvlink4 .*370 GB/s", slow.advice)
    assert usual.verdict == OK
