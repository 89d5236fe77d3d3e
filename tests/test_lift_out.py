"""Each optional feature can be deleted: everything else imports, and README's main job runs."""

import subprocess
import sys

import pytest

from tests.lift_out import FEATURES, ROOT, Feature, remove

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


def lift_out(*arguments):
    """Run the program in a process of its own: a fork of this one would have imported para_core already."""
    return subprocess.run(
        [sys.executable, "-m", "tests.lift_out", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


NAMES = [*FEATURES]


@pytest.mark.parametrize("names", [NAMES[i : i + 15] for i in range(0, len(NAMES), 15)], ids=lambda names: names[0])
def test_main_job_runs_without_each_feature(names):
    run = lift_out(*names)
    assert run.stdout.splitlines() == [f"{name}: lifts out" for name in names], run.stderr[-2000:]
    assert run.returncode == 0


@pytest.mark.long
@pytest.mark.parametrize("name", FEATURES)
def test_quick_tests_pass_without_the_feature(name):
    run = lift_out(name, "--tests")
    assert run.returncode == 0, run.stdout


def test_what_others_need_does_not_lift_out():
    program = (
        "from tests.lift_out import *\n"
        "needed = Feature(('para_core/attention/merge.py',))\n"
        "print(failure_without(needed, load_pipe()))"
    )
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "No module named 'para_core.attention.merge'" in run.stdout


@pytest.mark.parametrize(
    ("feature", "message"),
    [
        (Feature(("adapters/absent.py",)), "adapters/absent.py does not exist"),
        (Feature((), ("api.py", "absent")), "0 lines 'absent'"),
        (Feature((), ("api.py", "twice")), "2 lines 'twice'"),
        (Feature((), names=("absent",)), "0 lines 'import absent as absent'"),
    ],
)
def test_table_that_is_wrong_is_an_error(tmp_path, feature, message):
    for folder in ("para_core", "adapters"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "api.py").write_text("from a import b as b\n")
    (tmp_path / "api.py").write_text("twice\n    twice\n")
    with pytest.raises(ValueError, match=message):
        remove(feature, tmp_path)


def test_files_lines_and_names_are_deleted(tmp_path):
    (tmp_path / "para_core" / "room").mkdir(parents=True)
    (tmp_path / "adapters").mkdir()
    (tmp_path / "para_core" / "api.py").write_text("from a import b as b\nfrom a import c as c\n")
    (tmp_path / "adapters" / "api.py").write_text("from a import d as d\n")
    (tmp_path / "table.py").write_text("x\n    y\nz\n")
    remove(Feature(("para_core/room",), ("table.py", "y"), names=("b", "d")), tmp_path)
    assert not (tmp_path / "para_core" / "room").exists()
    assert (tmp_path / "table.py").read_text() == "x\nz\n"
    assert (tmp_path / "para_core" / "api.py").read_text() == "from a import c as c\n"
    assert (tmp_path / "adapters" / "api.py").read_text().strip() == ""
