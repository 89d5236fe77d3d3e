"""With each extra alone, installed from a wheel, its commands run, and other commands name the missing package.

An environment sees the packages that the extra requires, and their requirements, as links to the packages of the
environment that runs the tests. Nothing is downloaded. A required package that is not installed here is left out.
"""

import json
import os
import re
import subprocess
import sys
import sysconfig
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest

from tests.distributions import INSTALL, ROOT, run

pytestmark = pytest.mark.slow
requirements = pytest.importorskip("packaging.requirements")

TINY_FLUX = str(ROOT / "zoo/flux/pipeline")
GENERATE = ["generate", "--model", TINY_FLUX, "--prompt", "a", "--steps", "1", "--size", "32x32", "--out", "out"]


# Run command lines in one process, because importing torch in a process for each would take most of the time.
COMMANDS = """
import contextlib, io, json, sys
from para_core.__main__ import main

results = []
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["para_core", *arguments]
    printed, said = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(said):
        try:
            main()
        except SystemExit as end:
            code = end.code
    if isinstance(code, str):  # The interpreter prints such a reason.
        code, said = 1, io.StringIO(code + "\\n")
    results.append((code, printed.getvalue(), said.getvalue()))
print(json.dumps(results))
"""


def required(wheel: Path, extra: str) -> dict[str, metadata.Distribution]:
    """Return the installed distributions that the wheel requires with this extra, and all their requirements."""
    own = next(iter(metadata.distributions(path=[str(wheel)])))
    distributions: dict[str, metadata.Distribution] = {}
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
        distributions[name] = distribution
        for text in distribution.requires or ():
            requirement = requirements.Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                left += [(requirement.name, more) for more in ("", *requirement.extras)]
    del distributions["para_core"]
    return distributions


class Environment:
    """A virtual environment with para_core and the packages of one extra."""

    def __init__(self, folder: Path, wheel: Path, extra: str) -> None:
        self.folder = folder
        run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
        self.python = folder / "venv/bin/python"
        here = Path(sysconfig.get_path("purelib"))
        there = folder / f"venv/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
        self.distributions = required(wheel, extra)
        for distribution in self.distributions.values():
            for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "bin")}:
                if not (there / top).exists() and (here / top).exists():
                    (there / top).symlink_to(here / top)
        run(sys.executable, "-m", "pip", "--python", self.python, *INSTALL, wheel, cwd=folder)

    def __call__(self, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        return subprocess.run(
            [self.python, *arguments],
            cwd=cwd or self.folder,
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

    def commands(self, *commands: list[str], cwd: Path | None = None) -> list[tuple[int, str, str]]:
        """Return exit code, stdout and stderr of each command line."""
        result = self("-c", COMMANDS, json.dumps(commands), cwd=cwd)
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout.splitlines()[-1])


def require_misses(result: tuple[int, str, str], package: str, extra: str) -> None:
    """Assert that a command ended with one sentence that names the package and the extra."""
    code, _, stderr = result
    assert code == 1
    assert re.fullmatch(rf"error: {package} .*'\.\[{extra}\]'.*\n", stderr), stderr


@pytest.fixture(scope="module")
def environment(tmp_path_factory, distributions):
    """Return a function that creates the environment of an extra once."""
    return cache(lambda extra: Environment(tmp_path_factory.mktemp(extra or "none"), distributions[1], extra))


@pytest.mark.long
def test_without_extra_command_names_the_missing_package(environment):
    code = "import para_core, sys; para_core.UnifiedAttnMode; sys.argv = ['para_core', '--help']"
    # torch itself warns that there is no NumPy.
    result = environment("")("-W", "ignore", "-c", f"{code}; from para_core.__main__ import main; main()")
    require_misses((result.returncode, result.stdout, result.stderr), "typer", "cli")


@pytest.mark.long
def test_diffusers_alone_brings_pipelines_and_loras(environment):
    python = environment("diffusers")
    code = "import para_core.adapters.api, peft, diffusers; assert diffusers.utils.is_peft_available()"
    python.runs("-c", f"{code}; diffusers.DiffusionPipeline.from_pretrained({TINY_FLUX!r})")


@pytest.mark.long
def test_cli_alone_brings_all_that_its_commands_need(environment):
    python = environment("cli")
    version, generated, planned, quantized, packed, served = python.commands(
        ["--version"],
        GENERATE,
        ["plan", "--ranks", "1"],
        [*GENERATE, "--quantize", "int8"],
        [*GENERATE, "--model", "absent.gguf"],
        ["serve", "--model", TINY_FLUX],
    )
    assert [result[0] for result in (version, generated, planned)] == [0, 0, 0], (generated, planned)
    assert "para_core" in version[1]
    assert (python.folder / "out/00001.png").is_file()
    require_misses(quantized, "torchao", "quantize")
    require_misses(packed, "gguf", "quantize")
    require_misses(served, "(fastapi|uvicorn|starlette|prometheus_client)", "fleet")
    python.runs("-m", "para_core", *GENERATE, "--replicas", "2", "--seed", "1")
    assert "peft" in python.distributions


@pytest.mark.long
def test_commands_without_diffusers_say_so(environment, tmp_path):
    (tmp_path / "diffusers").mkdir()
    (tmp_path / "diffusers/__init__.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'diffusers'\", name='diffusers')"
    )
    helped, *missing = environment("cli").commands(["generate", "--help"], GENERATE, ["plan"], cwd=tmp_path)
    assert (helped[0], "generate" in helped[1]) == (0, True)
    for result in missing:
        require_misses(result, "diffusers", "cli")


@pytest.mark.long
def test_fleet_alone_brings_all_that_the_server_needs(environment):
    python = environment("fleet")
    python.runs("-c", "import para_core.fleet.http.host_server, para_core.fleet.http.pool")
    assert "ray" not in python.distributions
    (on_ray,) = python.commands(["serve", "--model", TINY_FLUX, "--spread"])
    require_misses(on_ray, "ray", "ray")


@pytest.mark.long
def test_ray_alone_brings_all_that_several_hosts_need(environment):
    python = environment("ray")
    python.runs("-c", "import para_core.fleet.http.host_server, para_core.fleet.group")


@pytest.mark.long
def test_quantize_brings_torchao_and_gguf(environment):
    environment("quantize").runs("-c", "import torchao, gguf")
