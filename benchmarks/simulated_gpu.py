"""Count waits, copies, launches and collectives on simulated GPUs, per attention call, step and generation.

    python -m benchmarks.simulated_gpu [CASE ...]  # benchmarks/results/simulated_gpu.json: the budgets of the tests

The counts are what para_core adds to the unmodified model on one GPU, for an attention call all of them. They are the
largest of all ranks (tests/simulated_gpu).
"""

from __future__ import annotations

from typing import Any

from benchmarks.harness import parser_of, read_results, write_results

NAME = "simulated_gpu"
# The counts of a step are the difference of two generations, of which one has these more.
MORE_STEPS = 2
KINDS = ("waits", "copies to the device", "copies to the host", "launches", "collectives")


def measure(names: list[str]) -> dict[str, dict[str, dict[str, float]]]:
    """Return the counts of each case by name: of attention calls, steps and generations.

    Args:
        names: the cases to count; the others keep their counts. Defaults to all.
    """
    from tests.rank_pool import RankPool
    from tests.simulated_gpu.calls import attend, generate
    from tests.simulated_gpu.cases import ATTENTION, PIPELINES
    from tests.simulated_gpu.ranks import SimulatedRanks

    pool = RankPool()
    gpus = SimulatedRanks(pool)
    kept = read_results(NAME) if names else {}
    attention, steps, generations = (kept.get(kind, {}) for kind in ("attention", "steps", "generations"))
    try:
        for name in [name for name in ATTENTION if not names or name in names]:
            ranks, case = ATTENTION[name]
            attention[name] = _largest([call.added for call in gpus.run(attend, ranks, case, nccl_alone=True)])
        for name in [name for name in PIPELINES if not names or name in names]:
            ranks, pipeline, options = PIPELINES[name]
            calls = gpus.run(generate, ranks, pipeline, **options, longer_by=MORE_STEPS)
            steps[name] = _largest([_of_a_step(whole.added, longer.added) for whole, longer in calls])
            generations[name] = _largest([whole.added for whole, _ in calls])
            print(name, generations[name], flush=True)
    finally:
        pool.close()
    # The order of the tables is that of the cases, also if only some were counted.
    return {
        "attention": {name: attention[name] for name in ATTENTION},
        "steps": {name: steps[name] for name in PIPELINES},
        "generations": {name: generations[name] for name in PIPELINES},
    }


def _of_a_step(whole: dict[str, float], longer: dict[str, float]) -> dict[str, float]:
    return {kind: (longer[kind] - whole[kind]) / MORE_STEPS for kind in KINDS}


def _largest(counts: list[dict[str, float]]) -> dict[str, float]:
    return {kind: max(of_rank[kind] for of_rank in counts) for kind in KINDS}


def parts() -> dict[str, list[str]]:
    """Return the tables of docs/measured/simulated_gpu.md."""
    results = read_results(NAME)
    header = ["| | waits | copies to the GPU | copies to the host | launches | collectives |"]
    header += ["| --- | --- | --- | --- | --- | --- |"]
    return {
        name: header + [_row(*item) for item in results[name].items()] for name in ("attention", "steps", "generations")
    }


def _row(name: str, counts: dict[str, Any]) -> str:
    return f"| {name} | " + " | ".join(f"{counts[kind]:g}" for kind in KINDS) + " |"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="names of cases; default: all")
    print(write_results(NAME, measure(parser.parse_args().cases), "diffusers", "torchao"))


if __name__ == "__main__":
    main()
