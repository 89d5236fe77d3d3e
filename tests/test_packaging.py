"""The sdist and the wheel hold para_core alone, its parts are found wherever it is installed, and extras suffice.

Environments see the packages of the one that runs the tests, so nothing is downloaded.
"""

import fcntl
import importlib.metadata
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from functools import cache
from pathlib import Path

import pytest

import para_core
from para_core.version import version_and_sources
from tests.lift_out import ROOT

pytestmark = pytest.mark.slow
requirements = pytest.importorskip("packaging.requirements")

FOLDERS = {"para_core": "para_core", **{name: f"para_core/{name}" for name in ("adapters", "kernels", "fleet", "cli")}}
INSTALL = ("install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation")
HERE = Path(sysconfig.get_path("purelib"))


def run(*command, cwd, returncode=0):
    """Run a program that must end with ``returncode``, and return the process."""
    # PYTHONPATH or a safe path from outside would decide which packages are found here.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == returncode, f"{command}\n{result.stdout}\n{result.stderr}"
    return result


def copy_checkout(target):
    """Copy the files that packaging reads, so that packaging leaves no build/lib or *.egg-info in the real checkout."""
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, target / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, target)
    return target


@pytest.fixture(scope="session")
def distributions(tmp_path_factory):
    """Return (sdist, the wheel built from it), built once for all processes of pytest-xdist."""
    folder = tmp_path_factory.getbasetemp()
    # pytest-xdist gives each of its processes a folder inside a shared one.
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "distributions"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "built").exists():
            checkout = copy_checkout(folder / "checkout")
            run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", checkout, cwd=folder)
            (folder / "built").touch()
    return next((folder / "dist").glob("*.tar.gz")), next((folder / "dist").glob("*.whl"))


def make_environment(folder, installed, *, shared):
    """Return the interpreter and the folder of packages of a new environment, which may see those of this one."""
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    python = folder / "venv/bin/python"
    packages = folder / f"venv/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    if shared:
        # A directory named in a .pth file joins sys.path, but the .pth files in it (of the editable install) do not.
        (packages / "shared.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    # --ignore-installed: pip also sees the para_core of the environment that runs the tests.
    run(sys.executable, "-m", "pip", "--python", python, *INSTALL, "--ignore-installed", *installed, cwd=folder)
    return python, packages


def files_of(folder):
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*.py")]


def test_distributions_hold_every_file_and_only_para_core(distributions, tmp_path):
    sdist, wheel = distributions
    with tarfile.open(sdist) as archive:
        sources = {name.partition("/")[2] for name in archive.getnames()}
    assert {"setup.py", "pyproject.toml", "LICENSE", "README.md", "para_core/py.typed"} <= sources
    assert {f"{folder}/{name}" for folder in FOLDERS for name in files_of(ROOT / folder)} <= sources
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        archive.extractall(tmp_path)
    modules = [f"{target}/{name}" for folder, target in FOLDERS.items() for name in files_of(ROOT / folder)]
    assert sorted(name for name in names if name.endswith(".py")) == sorted(modules)
    data = {"py.typed", "fleet/http/page.html", "fleet/http/docs.html", "adapters/planner/counts.json"}
    assert {f"para_core/{name}" for name in data} <= set(names)
    assert any(name.endswith("LICENSE") for name in names)
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"para_core"}
    # Installed sources have the digest of the checkout.
    installed = runpy.run_path(str(tmp_path / "para_core" / "version.py"))["version_and_sources"]
    assert installed() == version_and_sources()
    (tmp_path / "para_core" / "fleet" / "other.py").write_text("changed = True")
    installed.cache_clear()
    assert installed() != version_and_sources()


def test_metadata_is_what_an_index_shows(distributions):
    metadata = next(iter(importlib.metadata.distributions(path=[str(distributions[1])]))).metadata
    assert (metadata["Name"], metadata["Version"]) == ("para_core", para_core.__version__)
    assert (metadata["License-Expression"], metadata["Requires-Python"]) == ("Apache-2.0", ">=3.11")
    assert str(metadata.json["description"]).strip() == (ROOT / "README.md").read_text().strip()
    assert {"diffusers", "cli", "fleet"} <= set(metadata.get_all("Provides-Extra"))


# The probe runs where the test says, and in a process spawned from there.
PROBE = """
import importlib.util, multiprocessing, sys
from pathlib import Path

def probe():
    import para_core, para_core.adapters
    from para_core.kernels.merge_reference import merge

    for file in (para_core.__file__, para_core.adapters.__file__, merge.__code__.co_filename):
        assert Path(file).is_relative_to(sys.argv[2]), file
    import kernels

    assert kernels.WHOSE == "PyPI's", kernels.__path__
    if sys.argv[1] == "elsewhere":
        # In the root of the checkout ours hides theirs: it has an __init__.py, and Python looks there first.
        import adapters

        assert adapters.WHOSE == "PyPI's", adapters.__path__

if __name__ == "__main__":
    assert Path(importlib.util.find_spec("para_core").origin).is_relative_to(sys.argv[2])
    process = multiprocessing.get_context("spawn").Process(target=probe)
    process.start()
    process.join()
    assert process.exitcode == 0
    print("found")
"""


@pytest.mark.parametrize("form", ["wheel", pytest.param("editable", marks=pytest.mark.long)])
def test_installed_parts_are_found_and_hide_no_package(form, tmp_path, distributions):
    checkout = copy_checkout(tmp_path / "checkout")
    what = ["-e", checkout] if form == "editable" else [distributions[1]]
    python, packages = make_environment(tmp_path, what, shared=True)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    # Installing adds no package beside para_core.
    code = "import importlib.util as u; print([n for n in ('kernels', 'adapters') if u.find_spec(n) is not None])"
    assert run(python, "-c", code, cwd=elsewhere).stdout.strip() == "[]"
    for name in ("kernels", "adapters"):
        (packages / name).mkdir()
        (packages / name / "__init__.py").write_text('WHOSE = "PyPI\'s"\n')
    places = {"elsewhere": (elsewhere, checkout if form == "editable" else packages), "root": (checkout, checkout)}
    starts = [[]] if form == "wheel" else [[], ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1"]]
    for place, (folder, installed) in places.items():
        (folder / "probe.py").write_text(PROBE)
        for start in starts:
            assert "found" in run(python, *start, "probe.py", place, installed, cwd=folder).stdout


def required(wheel, extra):
    """Return the installed distributions that the wheel requires with this extra, and all their requirements."""
    own = next(iter(importlib.metadata.distributions(path=[str(wheel)])))
    distributions, left, done = {}, [("para_core", extra)], set()
    while left:
        name, extra = left.pop()
        if (name, extra) in done:
            continue
        done.add((name, extra))
        try:
            distributions[name] = own if name == "para_core" else importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        for text in distributions[name].requires or ():
            requirement = requirements.Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                left += [(requirement.name, more) for more in ("", *requirement.extras)]
    del distributions["para_core"]
    return distributions


@pytest.fixture(scope="module")
def python_with(tmp_path_factory, distributions):
    """Return a function that makes the environment of an extra once, and returns its interpreter."""

    @cache
    def make(extra):
        python, packages = make_environment(tmp_path_factory.mktemp(extra or "none"), [distributions[1]], shared=False)
        for distribution in required(distributions[1], extra).values():
            for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "bin")}:
                if not (packages / top).exists() and (HERE / top).exists():
                    (packages / top).symlink_to(HERE / top)
        return python

    return make


TINY_FLUX = str(ROOT / "zoo/flux/pipeline")
GENERATE = ["-m", "para_core", "generate", "--model", TINY_FLUX, "--prompt", "a", "--steps", "1", "--size", "32x32"]
SERVE = ["-m", "para_core", "serve", "--model", TINY_FLUX]
LOAD = f"import para_core.adapters.api, peft, diffusers as d; d.DiffusionPipeline.from_pretrained({TINY_FLUX!r})"


@pytest.mark.long
@pytest.mark.parametrize(
    ("extra", "command", "missing"),
    [
        ("", ["-c", "import para_core; para_core.UnifiedAttnMode"], None),
        ("", ["-m", "para_core", "--help"], r"typer .*\[cli\]"),
        ("diffusers", ["-c", LOAD], None),
        ("cli", [*GENERATE, "--out", "out"], None),
        ("cli", ["-m", "para_core", "plan", "--ranks", "1"], None),
        ("cli", [*GENERATE, "--out", "out", "--quantize", "int8"], r"torchao .*\[quantize\]"),
        ("cli", SERVE, r"(fastapi|uvicorn|starlette|prometheus_client) .*\[fleet\]"),
        ("fleet", ["-c", "import para_core.fleet.http.host_server, para_core.fleet.http.pool"], None),
        ("fleet", [*SERVE, "--spread"], r"ray .*\[ray\]"),
        ("ray", ["-c", "import para_core.fleet.http.host_server, para_core.fleet.group"], None),
        ("quantize", ["-c", "import torchao, gguf"], None),
    ],
)
def test_each_extra_alone_suffices_and_others_are_named(python_with, tmp_path, extra, command, missing):
    # torch itself warns if there is no NumPy.
    done = run(python_with(extra), "-W", "ignore", *command, cwd=tmp_path, returncode=int(missing is not None))
    assert missing is None or re.fullmatch(rf"error: {missing}.*\n", done.stderr), done.stderr
