"""Each extra alone, from a wheel: its commands run, and others say what is missing.

An environment sees the packages that the extra requires, and theirs, as links to those of the environment that runs the
tests. Nothing is downloaded; a required package that is not installed here is left out.
"""

import os
import re
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

import pytest

from tests.test_packaging import INSTALL, ROOT, copy_checkout, run

pytestmark = pytest.mark.slow
requirements = pytest.importorskip("packaging.requirements")

TINY_FLUX = str(ROOT / "zoo/flux/pipeline")
GENERATE = ["generate", "--model", TINY_FLUX, "--prompt", "a", "--steps", "1", "--size", "32x32", "--out", "out"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    tmp = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp, copy_checkout(tmp / "c"), cwd=tmp)
    return next(tmp.glob("*.whl"))


def required(wheel: Path, extra: str) -> dict[str, metadata.Distribution]:
    """Return the installed distributions that the wheel requires with this extra, and all that they require."""
    own = next(iter(metadata.distributions(path=[str(wheel)])))
    found: dict[str, metadata.Distribution] = {}
    left, done = [("para_core", extra)], set()
    while left:
        name, extra = left.pop()
        if (name, extra) in done:
            continue
        done.add((name, extra))
        try:
            distribution = own if name == "para_core" else metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        found[name] = distribution
        for text in distribution.requires or ():
            requirement = requirements.Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                left += [(requirement.name, more) for more in ("", *requirement.extras)]
    del found["para_core"]
    return found


class Environment:
    """A virtual environment with para_core and with what one extra brings."""

    def __init__(self, folder: Path, wheel: Path, extra: str) -> None:
        self.folder = folder
        run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
        self.python = folder / "venv/bin/python"
        here = Path(sysconfig.get_path("purelib"))
        there = folder / f"venv/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
        for distribution in required(wheel, extra).values():
            for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "bin")}:
                if not (there / top).exists() and (here / top).exists():
                    (there / top).symlink_to(here / top)
        run(sys.executable, "-m", "pip", "--python", self.python, *INSTALL, wheel, cwd=folder)

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        return subprocess.run(
            [self.python, *arguments],
            cwd=self.folder,
            env={**environment, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    def runs(self, *arguments: str) -> str:
        result = self(*arguments)
        assert result.returncode == 0, f"{arguments}\n{result.stdout}\n{result.stderr}"
        return result.stdout

    def command_misses(self, package: str, extra: str, *arguments: str) -> None:
        """Assert that the command ends with one sentence that names the package and the extra."""
        result = self("-m", "para_core", *arguments)
        assert result.returncode == 1
        assert re.fullmatch(rf"error: {package} .*'\.\[{extra}\]'.*\n", result.stderr), result.stderr


@pytest.fixture
def environment(tmp_path, wheel):
    return lambda extra: Environment(tmp_path, wheel, extra)


def test_without_extra_library_runs_and_command_says_what_is_missing(environment):
    python = environment("")
    python.runs("-c", "import para_core; para_core.UnifiedAttnMode")
    python.command_misses("typer", "cli", "--help")


def test_diffusers_alone_brings_pipelines_and_loras(environment):
    python = environment("diffusers")
    code = "import para_core.adapters, peft, diffusers; assert diffusers.utils.is_peft_available()"
    python.runs("-c", f"{code}; diffusers.DiffusionPipeline.from_pretrained({TINY_FLUX!r})")


def test_cli_alone_brings_all_that_its_commands_need(environment):
    python = environment("cli")
    assert "para_core" in python.runs("-m", "para_core", "--version")
    python.runs("-m", "para_core", *GENERATE)
    assert (python.folder / "out/00001.png").is_file()
    python.runs("-m", "para_core", "plan", "--ranks", "1", "--out", "plan.png")
    python.runs("-c", "import peft")
    python.command_misses("ray", "fleet", *GENERATE, "--replicas", "2", "--seed", "1")
    python.command_misses("ray", "fleet", "serve", "--model", TINY_FLUX)


def test_commands_without_diffusers_say_so(environment):
    python = environment("cli")
    (python.folder / "diffusers").mkdir()
    (python.folder / "diffusers/__init__.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'diffusers'\", name='diffusers')"
    )
    assert "generate" in python.runs("-m", "para_core", "generate", "--help")
    python.command_misses("diffusers", "cli", *GENERATE)
    python.command_misses("diffusers", "cli", "plan")


@pytest.mark.long
def test_fleet_alone_brings_all_that_the_server_needs(environment):
    python = environment("fleet")
    python.runs("-c", "import para_core.fleet.serving, para_core.fleet.batch, para_core.fleet.server")
    python.runs("-m", "para_core", *GENERATE, "--replicas", "2")


@pytest.mark.long
def test_calibrate_brings_its_metrics(environment):
    environment("calibrate").runs("-c", "import skimage, matplotlib, tqdm")
