"""Seconds that the planner predicts, compared with published ones:  python -m benchmarks.planner.published

Each table is fitted on its row of one device only, with one factor: the time of its software relative to the planner's
table of devices. All other rows are predicted with this factor, as if the software exchanged what para_core does.
Writes benchmarks/results/planner_check.json (docs/planner.md).
"""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.harness import markdown_table, parser_of, read_results, write_results
from benchmarks.planner.published_tables import NOT_PREDICTED, TABLES, Published
from para_core.adapters.planner.mesh import MeshShape
from para_core.adapters.planner.plan_mesh import plan_mesh, workload_of
from para_core.adapters.planner.predict import Machine, predict
from para_core.adapters.planner.work import Workload
from para_core.devices import DEVICES, LINKS, Link


@dataclass(frozen=True)
class Checked:
    """A row with published seconds, and seconds predicted with the fit on one device and without it."""

    table: Published
    shape: MeshShape
    published: float
    predicted: float
    unfitted: float = 0.0

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


def machine_of(table: Published, slowdown: float = 1.0) -> Machine:
    """Return the machine of a table, whose devices compute and copy ``slowdown`` times as slowly as in the library."""
    device = DEVICES[table.device]
    device = replace(device, products=device.products / slowdown, bandwidth=device.bandwidth / slowdown)
    per_host = 72 if table.device == "GB200" else 8
    return Machine(device, LINKS[table.link or device.link], Link("", 0, 1), per_host, table.compiled)


def seconds(table: Published, work: Workload, shape: MeshShape, machine: Machine) -> float:
    row = predict(shape, work, machine)
    if table.denoising_alone:
        return row.step * work.steps + table.vae / min(shape.ranks, 8) + table.tail
    return row.seconds


def fitted(table: Published, work: Workload) -> float:
    """Return the slowdown for which one device takes its published time; 1 if that is not published."""
    if table.alone is None:
        return 1.0
    low, high = 0.05, 20.0
    for _ in range(60):
        middle = (low + high) / 2
        if seconds(table, work, MeshShape(), machine_of(table, middle)) < table.alone:
            low = middle
        else:
            high = middle
    return high


def check(table: Published, work: Workload) -> tuple[float, list[Checked]]:
    slowdown = fitted(table, work)
    machine, plain = machine_of(table, slowdown), machine_of(table)
    checked = [
        Checked(table, shape, published, seconds(table, work, shape, machine), seconds(table, work, shape, plain))
        for shape, published in table.rows
    ]
    return slowdown, checked


def ratios_of(rows: Sequence[Checked], alone: Sequence[tuple[float, float]]) -> dict[str, list[float]]:
    """Return the smallest and largest ratio of published to predicted seconds without a fit, of all rows of a kind.

    ``alone`` are the published and predicted seconds of eager software on one device.
    """
    ratios = {
        kind: [row.published / row.unfitted for row in rows if row.table.compiled == (kind == "compiled")]
        for kind in ("compiled", "eager")
    }
    ratios["eager, one device"] = [published / predicted for published, predicted in alone]
    return {kind: [round(min(values), 2), round(max(values), 2)] for kind, values in ratios.items()}


def errors_of(rows: Sequence[Checked]) -> dict[str, float]:
    errors = [abs(row.error) for row in rows]
    return {"rows": len(errors), "median": statistics.median(errors), "worst": max(errors)}


def summary(checked: Sequence[Checked]) -> list[str]:
    """Return the errors of all rows, and of those published after the constants had been set."""
    lines, later = [], [row for row in checked if row.table.later]
    for rows, which in ((checked, "rows"), (later, "of them added after the planner's constants were set")):
        errors, hit = errors_of(rows), sum(abs(row.error) <= 0.2 for row in rows)
        lines.append(
            f"{errors['rows']:.0f} {which}: median error {errors['median']:.0%}, {hit} within 20 %, worst "
            f"{errors['worst']:.0%}."
        )
    return lines


def published_table(tables: Sequence[tuple[Published, float, list[Checked]]]) -> list[str]:
    """Return a row for each mesh of each table, after one for one device with the factor. Bold errors exceed 20 %."""
    rows = []
    for table, slowdown, checked in tables:
        alone = ["–", "–"] if table.alone is None else [f"{table.alone:,.2f}", f"× {slowdown:.2f}"]
        rows.append([table.name, table.device, "one device", *alone])
        for row in checked:
            error = f"{row.error:+.0%}" if abs(row.error) <= 0.2 else f"**{row.error:+.0%}**"
            rows.append(["", "", str(row.shape), f"{row.published:,.2f}", error])
    return markdown_table(["table", "device", "mesh", "published, s", "error"], rows, right=(3, 4))


def table_sources() -> list[str]:
    """Return a list with the source of each table, and with what is assumed for it."""
    lines = []
    for table in TABLES:
        source = f"<{table.source}>" if table.source else "passed on without an address"
        lines.append(f"- {table.name}: {source}" + f"; assumed: {table.assumed}" * bool(table.assumed))
    return lines


def sources() -> list[str]:
    """Return the planner's tables of devices and links."""
    devices = [
        [
            device.name,
            f"{device.products / 1e12:,.4g}",
            f"{device.of_products:.0%}, {device.of_attention:.0%}",
            f"{device.memory / 1e9:.0f}",
            f"{device.bandwidth / 1e9:,.0f}",
            device.link,
        ]
        for device in DEVICES.values()
    ]
    links = [
        [
            link.name,
            f"{1e6 * link.latency:.0f}",
            f"{link.bandwidth / 1e9:.4g}",
            f"{(link.all_to_all or link.bandwidth) / 1e9:.4g}",
        ]
        for link in LINKS.values()
    ]
    heads = ["", "TFLOP/s", "reached: products, attention", "GB", "GB/s", "usual link"]
    return [
        *markdown_table(heads, devices, right=(1, 3, 4)),
        "",
        *markdown_table(["link", "latency, µs", "GB/s", "all-to-all, GB/s"], links, right=(1, 2, 3)),
    ]


def plans() -> list[str]:
    """Return a plan for cards on which two ranks are slower than one."""
    plan = plan_mesh("FLUX.1-dev", ranks=2, device="L20", link=Link("pcie3 via host", 3e-5, 2e9), weights="replicate")
    lines: list[str] = []
    for line in str(plan).splitlines():
        lines += [line] if line.startswith("|") or not line else textwrap.wrap(line, 110)
    return ["```text", *lines, "```"]


def parts() -> dict[str, list[str]]:
    """Return the parts of docs/planner.md."""
    results = read_results("planner_check")
    tables = []
    for table in TABLES:
        rows = [row for row in results["rows"] if row["table"] == table.name]
        checked = [
            Checked(table, shape, row["published"], row["predicted"])
            for (shape, _), row in zip(table.rows, rows, strict=True)
        ]
        tables.append((table, results["fits"][table.name]["slowdown"], checked))
    return {
        "summary": summary([row for *_, checked in tables for row in checked]),
        "published": published_table(tables),
        "sources of tables": table_sources(),
        "not predicted": [f"- {name}: {reason}" for name, reason in NOT_PREDICTED.items()],
        "sources": sources(),
        "plans": plans(),
    }


def main() -> None:
    """Predict every row, compare it with the published one, and write both."""
    parser_of(__doc__).parse_args()
    fits, rows, alone = {}, [], []
    for table in TABLES:
        work = workload_of(table.model, **dict(table.sizes))
        slowdown, checked = check(table, work)
        if table.alone is not None and not table.compiled:
            alone.append((table.alone, seconds(table, work, MeshShape(), machine_of(table))))
        fits[table.name] = {"one device": table.alone, "fitted on": table.fitted_on, "slowdown": slowdown}
        rows += checked
    written = [
        {
            "table": row.table.name,
            "source": row.table.source,
            "mesh": str(row.shape),
            "published": row.published,
            "predicted": row.predicted,
            "unfitted": row.unfitted,
            "error": row.error,
        }
        for row in rows
    ]
    print(*summary(rows))
    later = [row for row in rows if row.table.later]
    results = {"errors": errors_of(rows), "later": errors_of(later), "ratios": ratios_of(rows, alone), "fits": fits}
    print(write_results("planner_check", {**results, "rows": written}, "diffusers"))


if __name__ == "__main__":
    main()
