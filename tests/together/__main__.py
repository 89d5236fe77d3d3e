"""Run cases of combined options, and print the outcome of each.

python -m tests.together flux+ring2+cfg+fsdp       one case, or several, by their ids
python -m tests.together --all --out FILE          all that FILE does not hold yet; FILE is JSON lines
python -m tests.together --summary FILE            write benchmarks/results/together.json from FILE
python -m tests.together --write-cases             add cases for values that are new
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from tests.rank_pool import RankPool
from tests.together.covering import CASES, read_cases, refused_cases, write_cases
from tests.together.options import parse
from tests.together.run import run
from tests.together.summary import write_summary


def read_rows(path: Path) -> dict[str, dict[str, Any]]:
    """Return the latest outcome of each case in ``path``."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {row["case"]: row for row in rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="*")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--refused", action="store_true", help="also cases that must be refused")
    parser.add_argument("--write-cases", action="store_true")
    parser.add_argument("--summary", type=Path, metavar="FILE")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    torch.set_num_threads(1)
    ids = list(options.case)
    if options.write_cases:
        print(f"{len(write_cases())} cases in {CASES}")
    if options.summary:
        print(write_summary(read_rows(options.summary)))
    if options.all:
        ids += [case.id for case in read_cases()]
    if options.refused:
        ids += [case.id for case, _ in refused_cases()]
    done = {} if options.out is None or not options.out.exists() else read_rows(options.out)
    left = [case for case in dict.fromkeys(ids) if case not in done]
    # Run cheap cases first, and cases with the same number of ranks one after the other, so that ranks are reused.
    left.sort(key=lambda case: (parse(case)["compile"] != "eager", parse(case).ranks))
    counts: collections.Counter[str] = collections.Counter()
    pool = RankPool()
    try:
        for number, case in enumerate(left):
            start = time.monotonic()
            outcome = run(parse(case), pool)
            seconds = time.monotonic() - start
            counts[outcome.status] += 1
            shown = outcome.detail if len(left) < 4 else outcome.detail.split("\n")[0][:200]
            place = f"{number + 1}/{len(left)}"
            print(f"{place} {outcome.status} {seconds:.1f} s {outcome.error:.1g} {case} {shown}", flush=True)
            if options.out is not None:
                row = {**dataclasses.asdict(outcome), "seconds": round(seconds, 1)}
                with options.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    finally:
        pool.close()
    print(dict(counts))
    return 1 if counts["wrong"] + counts["obscure"] + counts["hang"] else 0


if __name__ == "__main__":
    sys.exit(main())
