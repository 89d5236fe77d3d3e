"""Which inputs of attention para_core and its peers compute exactly on several ranks, refuse, or get wrong.

    python -m benchmarks.peers

Every cell is a run of its own on CPU ranks with gloo, compared with SDPA on one device. Installs the peers once, into an
environment outside of this repository. Writes benchmarks/results/peers.json (docs/peers.md).
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, parser_of, write_results
from benchmarks.peers.environments import python_with_peers
from benchmarks.peers.rows import ROWS

# The module that asks each peer, and what the table calls it.
COLUMNS = {
    "with_para_core": "para_core",
    "with_diffusers": "diffusers' context parallelism",
    "with_para_attn": "ParaAttention",
    "with_yunchang": "yunchang (USP)",
    "with_torch": "torch's `context_parallel`",
}


def ask(python: Path, peer: str, rows: list[str], *, stand_ins: bool, timeout: float) -> dict[str, Any]:
    """The cells of one peer, computed by the Python that has it."""
    print(COLUMNS[peer] + ("" if stand_ins else ", unpatched"), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        request, result = Path(folder) / "request.json", Path(folder) / "result.json"
        request.write_text(json.dumps({"peer": peer, "rows": rows, "stand_ins": stand_ins, "timeout": timeout}))
        command = [str(python), "-m", "benchmarks.peers.cells", str(request), str(result)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, cwd=ROOT, env=environment)
        return json.loads(result.read_text())


def main(arguments: list[str] | None = None) -> None:
    """Install, run, write."""
    parser = parser_of(__doc__)
    cache = Path.home() / ".cache" / "para_core" / "peers"
    parser.add_argument("--environments", type=Path, default=cache, help="where the peers are installed")
    parser.add_argument("--timeout", type=float, default=40, help="seconds without a result that are called a hang")
    parser.add_argument("--peers", nargs="+", choices=COLUMNS, default=list(COLUMNS), metavar="PEER")
    parser.add_argument("--rows", nargs="+", default=[row.name for row in ROWS], metavar="ROW")
    args = parser.parse_args(arguments)
    python = python_with_peers(args.environments)
    found = {peer: ask(python, peer, args.rows, stand_ins=True, timeout=args.timeout) for peer in args.peers}
    # Longer: DTensor alone takes most of a minute to derive how the CPU's own operator is sharded.
    patience = 5 * args.timeout
    unpatched = {peer: ask(python, peer, [ROWS[0].name], stand_ins=False, timeout=patience) for peer in args.peers}
    if (args.peers, args.rows) != (list(COLUMNS), [row.name for row in ROWS]):
        return  # a part of the table replaces nothing
    record(found, unpatched, args.timeout)


def record(found: dict[str, Any], unpatched: dict[str, Any], timeout: float) -> None:
    """Write the JSON."""
    cells = {peer: outcome["cells"] for peer, outcome in found.items()}
    patches = {peer: import_module(f"benchmarks.peers.{peer}").PATCHES for peer in found}
    versions: dict[str, str] = {}
    for outcome in found.values():
        versions |= outcome["versions"]
    results = {
        "backend": "gloo, 2 ranks (2 × 2: 4)",
        "timeout": timeout,
        "versions of the peers": versions,
        "patches": {COLUMNS[peer]: lines for peer, lines in patches.items() if lines},
        "unpatched": {COLUMNS[peer]: outcome["cells"] for peer, outcome in unpatched.items()},
        "cells": {COLUMNS[peer]: outcome for peer, outcome in cells.items()},
    }
    print(write_results("peers", results))


if __name__ == "__main__":
    main()
