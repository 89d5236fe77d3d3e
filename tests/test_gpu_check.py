"""`make gpu-check`: its sections on the simulated GPU."""

import json
import os

import pytest

from benchmarks.gpu.runner import SECTIONS
from benchmarks.harness import read_results
from tests.simulated_gpu.__main__ import reports, run

pytestmark = pytest.mark.slow

# torch's functional collectives with gradients call gloo in C++, past the simulation, which has no streams there.
UNSEEN = {"nccl": ["functional collectives, and their backward"]}


@pytest.fixture(scope="module")
def check(tmp_path_factory):
    """Yield a function that runs sections without diffusers, and returns their JSON by name and the faults."""
    folder = tmp_path_factory.mktemp("gpu_check")
    for name in ("diffusers", "hypothesis", "pytest"):
        (folder / f"{name}.py").write_text("raise ImportError('the machine with the GPU has no such package')\n")
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}

    def run_sections(*sections):
        output, records = folder / "-".join(sections), folder / "-".join(["records", *sections])
        records.mkdir()
        arguments = ["-m", "benchmarks.gpu", "--tiny", "--output", str(output), "--sections", *sections]
        done = run(arguments, records, env=environment, capture_output=True, text=True)
        assert done.returncode in (0, 3), done.stdout + done.stderr
        results = {name: json.loads((output / f"{name}.json").read_text()) for name in sections}
        return results, [fault for report in reports(records) for fault in report["faults"]]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
        yield run_sections


def test_stored_counts_are_those_of_today(tmp_path):
    arguments = ["-m", "benchmarks.gpu.simulated_counts", "--output", str(tmp_path / "counts.json")]
    done = run(arguments, tmp_path, env={"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = json.loads((tmp_path / "counts.json").read_text())["calls"]
    assert counts == read_results("simulated_counts")["calls"]
    # A call on one rank launches what the model launches, and attention waits for nothing.
    assert counts["step, unmodified"] == counts["step, parallel, 1 rank"]
    assert {row["waits"] for name, row in counts.items() if "step" not in name} == {0}


@pytest.mark.long
@pytest.mark.parametrize("section", [section.name for section in SECTIONS])
def test_section_runs_to_its_end(check, section):
    results, found = check(section)
    content = results[section]
    assert (content["status"], content["out of time"]) == ("done", []), content["error"]
    assert content["verdicts"].keys() <= {"ok", "refused", "failed"}
    failed = [row.get("step", row) for row in content["rows"] if row.get("verdict") == "failed"]
    assert failed == UNSEEN.get(section, [])
    # Triton runs the kernels, by its interpreter.
    assert {row["form"] for row in content["rows"] if "form" in row} <= {"Triton"}
    assert found == []
