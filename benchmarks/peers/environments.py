"""Virtual environments with the peers in them, outside of this repository."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Their own requirements are torch alone, unpinned: what is installed first satisfies them.
PEERS = ("para-attn==0.3.38", "yunchang==0.6.4")
REQUIREMENTS = ("torch", "numpy", "packaging", "diffusers")
# The first pip that refuses para-attn for a direct URL in an extra that is not asked for is somewhere above.
PIP = "pip<24"


def python_with_peers(folder: Path) -> Path:
    """The interpreter of an environment under ``folder`` that has all peers; made once, then reused."""
    environment = folder / f"python{sys.version_info[0]}.{sys.version_info[1]}"
    python, stamp = environment / "bin" / "python", environment / "installed.txt"
    constraints = (ROOT / "constraints.txt").read_text()
    wanted = "\n".join([PIP, *REQUIREMENTS, *PEERS, constraints])
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"installing the peers into {environment} (once)", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(environment)], check=True)
    install = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*install, PIP], check=True)
    subprocess.run([*install, "-c", str(ROOT / "constraints.txt"), *REQUIREMENTS], check=True)
    subprocess.run([*install, "--no-deps", *PEERS], check=True)
    stamp.write_text(wanted)
    return python
