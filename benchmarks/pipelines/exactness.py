"""Errors of everything that runs on several ranks, relative to one device. Writes the JSON of the tables:

    python -m benchmarks.pipelines.exactness                      # every check, every row: hours on two cores
    python -m benchmarks.pipelines.exactness models --only flux   # some rows of one check; the others stay as they are

All models are tiny, have random weights, and compute in float32 unless a check says otherwise. Each number is that of
the worst rank.

- pipelines: relative error of the latents after three steps with an odd number of tokens, against the unmodified
  pipeline in the same process, on every kind of mesh; and the bytes that each rank sends, which must equal the formula
  of `benchmarks.pipelines.traffic`.
- bfloat16: the same pipelines in bfloat16, compared with the unmodified pipeline in float32. A parallel error should be
  no larger than that of the unmodified pipeline in bfloat16.
- models: every transformer on two ranks, and cached: a second call with other inputs that takes the stored residuals.
- modular: every modular pipeline on two ranks, cached with threshold 0, and undone: the latter two bit by bit.
- weights: sharded weights, against the same mesh on replicated weights (fsdp) or one device (tensor).
- vaes: every autoencoder: error, bfloat16, and memory.
- stages: pipeline stages, against the same mesh without stages, bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import measure_on_ranks, parser_of, read_results, write_results
from benchmarks.pipelines import autoencoders, latents, modular_pipelines, stages, supported, weights

Rows = dict[str, dict[str, Any]]
# Ranks take many seconds to start, and are started again after this number of rows: what a row leaves in their memory
# goes then, and a run that is stopped has written all earlier ones.
ROWS_AT_ONCE = 12


@dataclass(frozen=True)
class Check:
    """One JSON of rows.

    Args:
        results: name of the JSON. ``key`` says where its rows are.
        names: all rows, in the order of the tables.
        measure: a function that ranks call, from names to rows.
        ranks: numbers of ranks to measure on.
        by_ranks: whether rows are grouped by their number of ranks. Otherwise the cells of all numbers of ranks are in
            one row.
        problems: a function that returns the results that are not as exact as the pages say, one line each.
    """

    results: str
    key: str
    names: Iterable[str]
    measure: Callable[[list[str]], Rows]
    ranks: tuple[int, ...] = (2,)
    by_ranks: bool = False
    problems: Callable[[Any], list[str]] = lambda _: []

    def run(self, names: list[str], ranks: tuple[int, ...]) -> list[str]:
        """Measure these rows, write those of each start of ranks, and return the problems of all rows."""
        for count in ranks:
            for first in range(0, len(names), ROWS_AT_ONCE):
                self._write(measure_on_ranks(self.measure, count, names[first : first + ROWS_AT_ONCE]), count)
        return self.problems(read_results(self.results)[self.key])

    def _write(self, measured: Rows, count: int) -> None:
        # Read the file again each time, because another process may have written other rows.
        results = read_results(self.results)
        rows = results[self.key].setdefault(str(count), {}) if self.by_ranks else results[self.key]
        for name, row in measured.items():
            rows[name] = row if self.by_ranks else {**rows.get(name, {}), **row}
            print(f"{self.results}, {count} ranks, {name}: {row}", flush=True)
        ordered = {name: rows[name] for name in self.names if name in rows}
        rows.clear()
        rows.update(ordered)
        write_results(self.results, results, "diffusers")


CHECKS = {
    "pipelines": Check(
        "pipelines", "pipelines", latents.PIPELINES, latents.measure, (2, 3, 4), problems=latents.problems
    ),
    "bfloat16": Check("pipelines_bfloat16", "pipelines", latents.IN_BFLOAT16, latents.measure_bfloat16),
    "models": Check("model_errors", "models", supported.MODELS, supported.measure),
    "modular": Check(
        "modular",
        "pipelines",
        modular_pipelines.MODULAR,
        modular_pipelines.measure,
        problems=modular_pipelines.problems,
    ),
    "weights": Check(
        "weights_table", "by ranks", weights.NAMES, weights.measure, (2, 4), by_ranks=True, problems=weights.problems
    ),
    "vaes": Check("vae_table", "by ranks", autoencoders.TINY_VAES, autoencoders.measure, (2, 3, 4), by_ranks=True),
    "stages": Check(
        "stages", "by ranks", weights.NAMES, stages.measure, (2, 4), by_ranks=True, problems=stages.problems
    ),
}


def main() -> None:
    """Run the named checks."""
    parser = parser_of(__doc__)
    parser.add_argument("checks", nargs="*", metavar="CHECK", help=f"of {', '.join(CHECKS)}; default: all")
    parser.add_argument("--only", nargs="+", metavar="ROW", help="measure these rows; the others stay as they are")
    parser.add_argument("--ranks", type=int, nargs="+", help="on these numbers of ranks")
    options = parser.parse_args()
    unknown = {*options.checks} - {*CHECKS}
    if unknown:
        parser.error(f"unknown checks {sorted(unknown)}; expected some of {[*CHECKS]}")
    problems = []
    for name in options.checks or CHECKS:
        check = CHECKS[name]
        names = [row for row in check.names if options.only is None or row in options.only]
        problems += check.run(names, tuple(x for x in check.ranks if options.ranks is None or x in options.ranks))
    if problems:
        raise SystemExit("\n".join(problems))


if __name__ == "__main__":
    main()
