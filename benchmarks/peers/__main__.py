"""Inputs of attention on several ranks: which of them para_core and its peers compute exactly, refuse, or get wrong.

    python -m benchmarks.peers

Every cell is its own run on CPU ranks with gloo, compared with SDPA on one device. The peers are installed once, into
an environment outside this repository. Writes benchmarks/results/peers.json (docs/measured/peers.md).
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, parser_of, read_results, write_results
from benchmarks.peers.rows import ROWS

# These are installed without their requirements, because the versions of those are free. REQUIREMENTS has the packages
# that they import.
PEERS = (
    "para-attn==0.3.38",
    "yunchang==0.6.4",
    "cache-dit==1.5.3",
    "xfuser==0.7.0",
    "distvae==0.1.0",
    "einops==0.8.2",
    "sglang==0.5.23",
    "vllm-omni==0.30.0",
)
REQUIREMENTS = (
    "torch",
    "numpy",
    "packaging",
    "diffusers",
    "transformers",
    "accelerate",
    "sentencepiece",
    "peft",
    "pyyaml",
    "triton",
    # SGLang and vLLM-Omni import these without their servers.
    "addict",
    "aenum",
    "dill",
    "gguf",
    "imageio",
    "msgspec",
    "orjson",
    "pybase64",
    "pydantic",
    "python-multipart",
    "pyzmq",
    "requests",
    "scipy",
    "starlette",
)
# A later pip refuses para-attn because of a direct URL in an extra that is not requested.
PIP = "pip<24"
TIMEOUT = 40  # After these seconds without a result, a cell counts as a hang.


def python_with_peers() -> Path:
    """Return the interpreter of an environment in the user's cache that has all peers. It is created once and then
    reused.
    """
    environment = Path.home() / ".cache/para_core/peers" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
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


# Each column has the module that calls the peer, and the peer's name in the table.
COLUMNS = {
    "with_para_core": "para_core",
    "with_diffusers": "diffusers' context parallelism",
    "with_para_attn": "ParaAttention",
    "with_yunchang": "yunchang (USP)",
    "with_xdit": "xDiT",
    "with_cache_dit": "cache-dit's context parallelism",
    "with_sglang": "SGLang",
    "with_vllm_omni": "vLLM-Omni",
    "with_torch": "torch's `context_parallel`",
}


def ask(python: Path, peer: str, rows: list[str], *, stand_ins: bool, timeout: float) -> dict[str, Any]:
    """Return the cells of one peer, computed by the Python that has it."""
    print(COLUMNS[peer] + ("" if stand_ins else ", unpatched"), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        request, result = Path(folder) / "request.json", Path(folder) / "result.json"
        request.write_text(json.dumps({"peer": peer, "rows": rows, "stand_ins": stand_ins, "timeout": timeout}))
        command = [str(python), "-m", "benchmarks.peers.cells", str(request), str(result)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, cwd=ROOT, env=environment)
        return json.loads(result.read_text())


def main() -> None:
    """Install the peers, run the cells, and write the results."""
    parser = parser_of(__doc__)
    parser.add_argument("--peers", nargs="+", choices=COLUMNS, default=list(COLUMNS), metavar="PEER")
    peers = parser.parse_args().peers
    python, rows = python_with_peers(), [row.name for row in ROWS]
    outcomes = {peer: ask(python, peer, rows, stand_ins=True, timeout=TIMEOUT) for peer in peers}
    # The time-out is longer, because DTensor alone takes most of a minute to derive how the CPU's own operator is
    # sharded.
    unpatched = {peer: ask(python, peer, rows[:1], stand_ins=False, timeout=5 * TIMEOUT) for peer in peers}
    record(outcomes, unpatched)


def record(outcomes: dict[str, Any], unpatched: dict[str, Any]) -> None:
    """Write the JSON. Columns that were not run stay, with their date."""
    earlier = read_results("peers")
    versions, dates = earlier["versions of the peers"], earlier["dates"]
    cells, bare = earlier["cells"], earlier["unpatched"]
    own_rows, facts = earlier["own rows"], earlier["facts"]
    for peer, outcome in outcomes.items():
        versions |= outcome["versions"]
        dates[COLUMNS[peer]] = datetime.date.today().isoformat()
        cells[COLUMNS[peer]], bare[COLUMNS[peer]] = outcome["cells"], unpatched[peer]["cells"]
        own_rows[COLUMNS[peer]], facts[COLUMNS[peer]] = outcome["own rows"], outcome["facts"]
    names = [name for name in COLUMNS.values() if name in cells]
    results = {
        "backend": "gloo, 2 ranks (2 × 2: 4)",
        "timeout": TIMEOUT,
        "dates": dates,
        "versions of the peers": versions,
        "unpatched": {name: bare[name] for name in names},
        "own rows": {name: rows for name, rows in own_rows.items() if rows},
        "facts": {name: fact for name, fact in facts.items() if fact},
        "cells": {name: cells[name] for name in names},
    }
    print(write_results("peers", results))


if __name__ == "__main__":
    main()
