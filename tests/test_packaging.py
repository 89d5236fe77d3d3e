"""However and from whatever folder para_core is installed, its parts are found, and packages of other people are not
hidden.

The environments see the packages of the one that runs the tests through a .pth line, so nothing is downloaded.
"""

import importlib.metadata
import importlib.util
import runpy
import sys
import sysconfig
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest

import para_core
from para_core.version import version_and_sources
from tests.distributions import FOLDERS, INSTALL, ROOT, copy_checkout, run

pytestmark = pytest.mark.slow

# The probe runs where the test says, and in a process spawned from there.
PROBE = """
import multiprocessing, sys
from pathlib import Path

def probe():
    import torch
    import para_core, para_core.adapters
    from para_core.kernels.merge_reference import merge

    for file in (para_core.__file__, para_core.adapters.__file__, merge.__code__.co_filename):
        assert Path(file).is_relative_to(sys.argv[2]), file
    zero = torch.zeros(1, 1, 1)
    assert merge(zero[..., None], zero, zero[..., None] + 1, zero)[0] == 0.5

    import kernels

    assert kernels.WHOSE == "PyPI's", kernels.__path__
    if sys.argv[1] == "elsewhere":
        # In the root of the checkout ours hides theirs: it has an __init__.py, and Python looks there first.
        import adapters

        assert adapters.WHOSE == "PyPI's", adapters.__path__

if __name__ == "__main__":
    # Here only where modules are found: importing them, in the process that is spawned, takes seconds.
    import importlib.util
    import kernels

    assert kernels.WHOSE == "PyPI's", kernels.__path__
    assert Path(importlib.util.find_spec("para_core").origin).is_relative_to(sys.argv[2])
    process = multiprocessing.get_context("spawn").Process(target=probe)
    process.start()
    process.join()
    assert process.exitcode == 0
    print("found")
"""


@dataclass(frozen=True)
class Environment:
    """A virtual environment with para_core and with packages named kernels and adapters."""

    python: Path
    site_packages: Path
    checkout: Path
    elsewhere: Path
    para_core: Path  # para_core and its parts were installed into this folder.

    def run(self, *args: str | Path, cwd: Path) -> str:
        return run(self.python, *args, cwd=cwd)


def files_of(folder: Path) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*.py")]


@pytest.fixture(scope="module", params=["wheel", pytest.param("editable", marks=pytest.mark.long)])
def environment(request, tmp_path_factory):
    tmp = tmp_path_factory.mktemp(request.param)
    elsewhere = tmp / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "probe.py").write_text(PROBE)
    checkout = copy_checkout(tmp / "checkout")
    (checkout / "probe.py").write_text(PROBE)

    run(sys.executable, "-m", "venv", "--without-pip", tmp / "venv", cwd=tmp)
    python = tmp / "venv" / "bin" / "python"
    site_packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp).strip())
    # A directory named in a .pth file joins sys.path, but the .pth files in it (of the editable install) stay unread.
    (site_packages / "shared.pth").write_text(sysconfig.get_path("purelib"))
    for name in ("kernels", "adapters"):
        (site_packages / name).mkdir()
        (site_packages / name / "__init__.py").write_text('WHOSE = "PyPI\'s"\n')
        info = site_packages / f"{name}-0.1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")

    what = ["-e", checkout] if request.param == "editable" else [request.getfixturevalue("distributions")[1]]
    # --ignore-installed: pip also sees the para_core of the environment that runs the tests.
    run(sys.executable, "-m", "pip", "--python", python, *INSTALL, "--ignore-installed", *what, cwd=elsewhere)
    installed = checkout if request.param == "editable" else site_packages
    return Environment(python, site_packages, checkout, elsewhere, installed)


def test_wheel_holds_every_file_and_only_para_core(distributions):
    _, wheel = distributions
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
    modules = [f"{target}/{name}" for folder, target in FOLDERS.items() for name in files_of(ROOT / folder)]
    assert sorted(name for name in names if name.endswith(".py")) == sorted(modules)
    data = {"py.typed", "fleet/http/page.html", "fleet/http/docs.html", "adapters/planner/counts.json"}
    assert {f"para_core/{name}" for name in data} <= set(names)
    assert any(name.endswith("LICENSE") for name in names)
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"para_core"}


def test_installed_sources_have_the_digest_of_the_checkout(distributions, tmp_path):
    with zipfile.ZipFile(distributions[1]) as archive:
        archive.extractall(tmp_path)
    installed = runpy.run_path(str(tmp_path / "para_core" / "version.py"))["version_and_sources"]
    assert installed() == version_and_sources()
    (tmp_path / "para_core" / "fleet" / "other.py").write_text("changed = True")
    installed.cache_clear()
    assert installed() != version_and_sources()


def test_metadata_is_what_an_index_shows(distributions):
    metadata = next(iter(importlib.metadata.distributions(path=[str(distributions[1])]))).metadata
    assert metadata["Name"] == "para_core"
    assert metadata["Version"] == "0.1.0" == para_core.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata["Summary"] and str(metadata.json["description"]).strip() == (ROOT / "README.md").read_text().strip()
    assert {"diffusers", "cli", "fleet"} <= set(metadata.get_all("Provides-Extra"))


def test_links_of_a_published_repository(tmp_path):
    setup = copy_checkout(tmp_path / "checkout") / "setup.py"
    text = setup.read_text()
    assert "REPOSITORY: str | None = None" in text
    setup.write_text(text.replace("str | None = None", 'str | None = "https://example.org/para_core"'))
    with mock.patch("setuptools.setup") as call:
        runpy.run_path(str(setup))
    urls = call.call_args.kwargs["project_urls"]
    assert urls["Source"] == "https://example.org/para_core"
    assert all(url.startswith("https://example.org/para_core") for url in urls.values())
    # Each address names a file of the repository, or one of its pages.
    for url in urls.values():
        file = url.partition("/blob/main/")[2]
        assert not file or (ROOT / file).is_file()


def test_sdist_has_the_sources_of_the_wheel(distributions):
    sdist, _ = distributions
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"setup.py", "pyproject.toml", "LICENSE", "README.md", "para_core/py.typed"} <= names
    assert {f"{folder}/{name}" for folder in FOLDERS for name in files_of(ROOT / folder)} <= names


@pytest.mark.long
def test_installed_folder_has_the_files_of_the_wheel(distributions, tmp_path):
    checkout = copy_checkout(tmp_path / "checkout")
    run(sys.executable, "-m", "pip", *INSTALL, "--target", tmp_path / "target", ".", cwd=checkout)
    with zipfile.ZipFile(distributions[1]) as archive:
        modules = [name for name in archive.namelist() if name.endswith(".py")]
    assert sorted(files_of(tmp_path / "target")) == sorted(modules)


def test_installed_parts_are_found_and_hide_no_package(environment):
    assert "found" in environment.run("probe.py", "elsewhere", environment.para_core, cwd=environment.elsewhere)
    assert "found" in environment.run("probe.py", "root", environment.checkout, cwd=environment.checkout)


@pytest.mark.long
def test_the_parts_are_found_with_c_and_m(environment):
    code = "import para_core.adapters, para_core.kernels.merge_reference as m; print(m.__name__)"
    for cwd in (environment.elsewhere, environment.checkout):
        assert environment.run("-c", code, cwd=cwd).strip() == "para_core.kernels.merge_reference"
    environment.run("-m", "para_core.kernels.merge_reference", cwd=environment.elsewhere)


@pytest.mark.long
def test_the_parts_are_found_under_torchrun(environment):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1", "probe.py"]
    assert "found" in environment.run(*torchrun, "elsewhere", environment.para_core, cwd=environment.elsewhere)
    assert "found" in environment.run(*torchrun, "root", environment.checkout, cwd=environment.checkout)


def test_installing_adds_no_top_level_packages(environment):
    # PyPI's packages are absent, so these names are not found, except as the folder in which Python was started.
    code = "import importlib.util as u; print([n for n in ('kernels', 'adapters') if u.find_spec(n) is not None])"
    hidden = [environment.site_packages / name for name in ("kernels", "adapters")]
    for path in hidden:
        path.rename(path.with_name(f"{path.name}_away"))
    try:
        assert environment.run("-c", code, cwd=environment.elsewhere).strip() == "[]"
    finally:
        for path in hidden:
            path.with_name(f"{path.name}_away").rename(path)


# mypy does not follow the import hook of an editable install.
@pytest.mark.long
@pytest.mark.parametrize("environment", ["wheel"], indirect=True)
def test_mypy_sees_the_types_of_an_installed_para_core(environment, tmp_path):
    (tmp_path / "user.py").write_text("from para_core.kernels.merge_reference import merge\n\nreveal_type(merge)\n")
    # Skip torch: reading it takes most of a minute, and the test is not about it.
    (tmp_path / "mypy.ini").write_text(
        "[mypy-torch.*]\nfollow_imports = skip\n[mypy-diffusers.*]\nfollow_imports = skip\n"
    )
    mypy = [sys.executable, "-m", "mypy", "--python-executable", environment.python, "user.py"]
    output = run(*mypy, cwd=tmp_path)
    assert "def (out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, *, into: tuple[Any, Any] | None =) -> tuple" in output


def test_tests_use_parts_of_the_checkout():
    import para_core
    import para_core.adapters
    import para_core.kernels.merge_reference

    assert Path(para_core.__file__) == ROOT / "para_core" / "__init__.py"
    assert Path(para_core.adapters.__file__) == ROOT / "adapters" / "__init__.py"
    assert Path(para_core.kernels.merge_reference.__file__) == ROOT / "kernels" / "merge_reference.py"


def test_kernels_is_a_folder_and_no_package():
    # With an __init__.py, the folder would hide PyPI's kernels from everything that is started in the root.
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_diffusers_sees_no_kernels_package_in_checkout():
    import_utils = pytest.importorskip("diffusers.utils.import_utils")
    assert importlib.util.find_spec("kernels") is not None  # It is this folder, or that of PyPI.
    try:
        importlib.metadata.version("kernels")
        installed = True
    except importlib.metadata.PackageNotFoundError:
        installed = False
    assert import_utils.is_kernels_available() == installed


def test_importing_needs_and_tries_no_optional_package():
    code = """
import builtins, sys

OPTIONAL = {"diffusers", "transformers", "accelerate", "triton", "typer", "ray"}
# What the import system and find_spec() take for a package that is not installed.
sys.modules.update(dict.fromkeys(OPTIONAL))
import torch

tried, real_import = [], builtins.__import__

def record(name, globals=None, *args):
    if name.partition(".")[0] in OPTIONAL and globals and globals["__name__"].startswith("para_core"):
        tried.append(name)
    return real_import(name, globals, *args)

builtins.__import__ = record
import para_core
for name in para_core.__all__:
    getattr(para_core, name)
print(sorted({*tried} - {"triton"}))
"""
    assert run(sys.executable, "-c", code, cwd=ROOT).strip() == "[]"
