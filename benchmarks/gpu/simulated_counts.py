"""Launches, copies and waits of the calls of ``calls`` on the simulated device:

python -m tests.simulated_gpu -m benchmarks.gpu.simulated_counts

Writes benchmarks/results/simulated_counts.json, which the section ``host`` shows next to the counts of a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import torch

from benchmarks.gpu.calls import WARM_UP, attention_calls, step_calls
from benchmarks.harness import RESULTS, environment, parser_of


def counts() -> dict[str, dict[str, int]]:
    """Return the counts of each call by its name."""
    from tests.simulated_gpu.record import measured

    counts_by_call = {}
    device = torch.device("cuda", 0)
    for call in chain(step_calls(device, tiny=True), attention_calls(device, tiny=True)):
        for _ in range(WARM_UP):
            call.run()
        with measured() as seen:
            call.run()
        counts_by_call[call.name] = {
            "launches": seen.counts["launches"],
            "copies": seen.counts["copies to the device"] + seen.counts["copies to the host"],
            "waits": seen.counts["waits"],
        }
    return counts_by_call


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--output", type=Path, default=RESULTS / "simulated_counts.json")
    args = parser.parse_args(arguments)
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in counts().items())
    args.output.write_text(f'{{"environment": {json.dumps(environment())},\n"calls": {{\n{lines}\n}}}}\n')


if __name__ == "__main__":
    main()
