"""Each section of `make gpu-check` runs to its end on the simulated GPU, without diffusers."""

import json
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.gpu.runner import SECTIONS
from benchmarks.harness import read_results
from tests.simulated_gpu.__main__ import reports, run

pytestmark = pytest.mark.slow

# Two calls run at the same time, for two cores.
FIRST_ROUND = (("blocks", "vae", "speed"), ("kernels", "host"))
OTHERS = [section.name for section in SECTIONS if section.round > 1]
# torch's functional collectives with gradients call gloo in C++, past the simulation, which has no streams there.
UNSEEN = {"nccl": ["functional collectives, and their backward"]}


@pytest.fixture(scope="module")
def check(tmp_path_factory):
    """Return a function that runs sections, and returns their JSON by name and the faults of the device."""
    folder = tmp_path_factory.mktemp("gpu_check")
    for name in ("diffusers", "hypothesis", "pytest"):
        (folder / f"{name}.py").write_text(
            "raise ImportError('there is no such package on the machine with the GPU')\n"
        )
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}

    def run_sections(*sections):
        output, records = folder / "-".join(sections), folder / "-".join(["records", *sections])
        records.mkdir()
        arguments = ["-m", "benchmarks.gpu", "--tiny", "--output", str(output), "--sections", *sections]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", path)
            done = run(arguments, records, env=environment, capture_output=True, text=True)
        assert done.returncode in (0, 3), done.stdout + done.stderr
        results = {name: json.loads((output / f"{name}.json").read_text()) for name in sections}
        return results, [fault for report in reports(records) for fault in report["faults"]]

    return run_sections


def test_first_round_runs_to_its_end(check):
    with ThreadPoolExecutor() as pool:
        calls = list(pool.map(lambda sections: check(*sections), FIRST_ROUND))
    results = {name: content for sections, _ in calls for name, content in sections.items()}
    assert {
        name: (content["status"], content["out of time"], content["left out"]) for name, content in results.items()
    } == {section.name: ("done", [], []) for section in SECTIONS if section.round == 1}
    assert {verdict for content in results.values() for verdict in content["verdicts"]} == {"ok"}
    assert [fault for _, faults in calls for fault in faults] == []
    # Triton ran the kernels, by its interpreter.
    assert {row["form"] for row in results["kernels"]["rows"] if "form" in row} == {"Triton"}
    check_counted_calls(results["host"]["rows"])


def check_counted_calls(rows):
    """Check that each call has the counts of the simulation next to its own."""
    simulated = read_results("simulated_counts")["calls"]
    assert [row["call"] for row in rows] == [*simulated]
    for row in rows:
        assert {name: row[f"simulated {name}"] for name in ("launches", "copies", "waits")} == simulated[row["call"]]
        # This torch has no CUPTI, so its profiler sees no kernel.
        assert row["launches"] is None
        assert ("GPU idle" in row) == ("step" in row["call"])


def test_stored_counts_are_those_of_today(tmp_path):
    arguments = ["-m", "benchmarks.gpu.simulated_counts", "--output", str(tmp_path / "counts.json")]
    done = run(arguments, tmp_path, env={"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = json.loads((tmp_path / "counts.json").read_text())["calls"]
    assert counts == read_results("simulated_counts")["calls"]
    steps = {name: row for name, row in counts.items() if "step" in name}
    # A call on one rank launches what the model launches, and attention waits for nothing.
    assert steps["step, unmodified"] == steps["step, parallel, 1 rank"]
    assert {row["waits"] for name, row in counts.items() if name not in steps} == {0}
    assert counts["attention, ring 4, even"]["launches"] > counts["attention, Ulysses 4, even"]["launches"]
    assert steps["step, parallel, a rank of ring 4"] != steps["step, parallel, a rank of Ulysses 4"]


@pytest.mark.long
@pytest.mark.parametrize("section", OTHERS)
def test_section_runs_to_its_end(check, section):
    results, found = check(section)
    content = results[section]
    assert (content["status"], content["out of time"]) == ("done", []), content["error"]
    assert content["verdicts"].keys() <= {"ok", "refused", "failed"}
    assert [row.get("step", row) for row in content["rows"] if row.get("verdict") == "failed"] == UNSEEN.get(
        section, []
    )
    assert found == []
