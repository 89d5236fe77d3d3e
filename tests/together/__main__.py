"""Run cases of combined options, and print the outcome of each.

python -m tests.together flux+ring2+cfg+fsdp       one case, or several, by their ids
python -m tests.together --list                    the ids of all
python -m tests.together --all --out FILE          all that FILE does not hold yet; FILE is JSON lines
python -m tests.together --summary FILE            write benchmarks/results/together.json from FILE
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
from tests.together.covering import CASES, NUM_CASES, SEED, choose_short, read_cases, refused_cases, write_cases
from tests.together.options import parse
from tests.together.run import largest, reason_of, run
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
    parser.add_argument("--choose-short", type=Path, metavar="FILE")
    parser.add_argument("--summary", type=Path, metavar="FILE")
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--again", nargs="*", default=(), help="statuses in FILE that are run again: wrong obscure hang"
    )
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--num-cases", type=int, default=NUM_CASES)
    parser.add_argument("--max-ranks", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=180.0, help="of a case without progress")
    options = parser.parse_args()

    torch.set_num_threads(1)
    ids = list(options.case)
    if options.write_cases:
        print(f"seed {options.seed}: {len(write_cases(options.seed, options.num_cases))} cases in {CASES}")
    if options.choose_short:
        exact = [case for case, row in read_rows(options.choose_short).items() if row["status"] == "exact"]
        print("\n".join(case.id for case in choose_short(exact, options.seed)))
    if options.summary:
        print(write_summary(read_rows(options.summary), options.seed))
    if options.all:
        ids += [case.id for case in read_cases()]
    if options.refused:
        ids += [case.id for case, _ in refused_cases(options.seed)]
    done = {} if options.out is None or not options.out.exists() else read_rows(options.out)
    left = [case for case in dict.fromkeys(ids) if case not in done or done[case]["status"] in options.again]
    left = [case for case in left if parse(case).ranks <= options.max_ranks]
    # Run cheap cases first, and cases with the same number of ranks one after the other, so that ranks are reused.
    left.sort(key=lambda case: (parse(case)["compile"] != "eager", parse(case).ranks))
    counts: collections.Counter[str] = collections.Counter()
    pool = RankPool()
    try:
        for number, case in enumerate(left):
            start = time.monotonic()
            outcome = run(parse(case), pool, options.seconds)
            seconds = time.monotonic() - start
            counts[outcome.status] += 1
            shown = outcome.detail if len(left) < 4 else outcome.detail.split("\n")[0][:200]
            print(
                f"{number + 1}/{len(left)} {outcome.status} {seconds:.1f} s {largest(outcome):.1g} {case} {shown}",
                flush=True,
            )
            if options.out is not None:
                row = {**dataclasses.asdict(outcome), "errors": [largest(outcome)], "seconds": round(seconds, 1)}
                if outcome.status == "refused":
                    row["reason"] = reason_of(outcome.detail)
                with options.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    finally:
        pool.close()
    print(dict(counts))
    return 1 if counts["wrong"] + counts["obscure"] + counts["hang"] else 0


if __name__ == "__main__":
    sys.exit(main())
