"""The sdist and the wheel of a copy of the checkout, and environments without a network to install them into."""

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = {"para_core": "para_core", **{name: f"para_core/{name}" for name in ("adapters", "kernels", "fleet", "cli")}}
INSTALL = ("install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation")


def run(*args: str | Path, cwd: Path) -> str:
    """Run a program that must succeed, and return its output."""
    # PYTHONPATH or a safe path from outside would decide which packages are found here.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    result = subprocess.run(args, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, f"{args}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def copy_checkout(target: Path) -> Path:
    """Copy the files that packaging reads, so that packaging leaves no build/lib or *.egg-info in the real checkout."""
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, target / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, target)
    return target


def build(folder: Path) -> tuple[Path, Path]:
    """Return an sdist of the checkout and the wheel built from it. The first process that calls this builds them in
    ``folder``.
    """
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "built").exists():
            checkout = copy_checkout(folder / "checkout")
            run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", checkout, cwd=folder)
            (folder / "built").touch()
    return next((folder / "dist").glob("*.tar.gz")), next((folder / "dist").glob("*.whl"))
