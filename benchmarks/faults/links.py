"""Seconds of a generation over links of several speeds, beside what latency and bandwidth predict:  python -m benchmarks.faults.links

Two hosts of two ranks (network namespaces: Linux, root), ring between the hosts and Ulysses inside. Of each shape of the link are measured
alpha, the seconds of an exchange of one byte between the hosts, and beta, the seconds of each further byte that a rank sends. A call
makes n exchanges over the link and sends m bytes per rank, both counted. Predicted is

    seconds over the unshaped link + n × (alpha − alpha unshaped) + m × (beta − beta unshaped)

which takes no exchange for hidden behind computing. The unshaped link is measured before each shape, for others may use the machine, too. Writes benchmarks/results/nodes.json (docs/several_nodes.md).
"""

from __future__ import annotations

import json
import tempfile
import threading
from pathlib import Path
from typing import Any

from benchmarks.faults.hosts import Hosts, open_hosts
from benchmarks.faults.torchrun import torchrun
from benchmarks.harness import markdown_table, parser_of, read_results, write_results

# Megabits per second of each link, one-way delay in seconds of the second host's.
SHAPES: dict[str, tuple[float | None, float]] = {
    "200 Mbit/s": (200.0, 0.0),
    "50 Mbit/s": (50.0, 0.0),
    "2 ms": (None, 0.002),
    "10 ms": (None, 0.010),
    "50 Mbit/s, 10 ms": (50.0, 0.010),
}
UNSHAPED = (None, 0.0)


def shape(hosts: Hosts, megabits: float | None, delay: float) -> None:
    for host in range(hosts.num_hosts):
        hosts.heal(host)
    hosts.limit(megabits)
    if delay > 0:
        hosts.disturb(1, delay=delay)


def _shape_when_asked(hosts: Hosts, folder: Path, stop: threading.Event) -> None:
    for number, how in enumerate(how for shaped in SHAPES.values() for how in (UNSHAPED, shaped)):
        while not (folder / f"ask{number}").exists():
            if stop.wait(0.01):
                return
        shape(hosts, *how)
        (folder / f"done{number}").touch()


def predicted(plain: dict[str, Any], shaped: dict[str, Any], counted: dict[str, int], name: str) -> float:
    """Seconds of a call of pipeline ``name``."""
    latency = counted["exchanges"] * (shaped["alpha"] - plain["alpha"])
    return float(plain["seconds"][name] + latency + counted["bytes"] * (shaped["beta"] - plain["beta"]))


def rows_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    measured = found["measured"]
    return [
        {
            "link": label,
            "alpha": shaped["alpha"],
            "beta": shaped["beta"],
            "pipeline": name,
            **counted,
            "seconds unshaped": plain["seconds"][name],
            "seconds": shaped["seconds"][name],
            "predicted": predicted(plain, shaped, counted, name),
        }
        for label, plain, shaped in zip(SHAPES, measured[::2], measured[1::2], strict=True)
        for name, counted in found["counted"].items()
    ]


def parts() -> dict[str, list[str]]:
    """Return the table of docs/several_nodes.md."""
    heads = ["link", "exchange, ms", "MB/s per rank", "pipeline", "exchanges", "MB sent per rank"]
    cells = []
    for row in read_results("nodes")["rows"]:
        speed = 1e-6 / row["beta"] if row["beta"] > 0 else float("inf")
        link = [row["link"], f"{1e3 * row['alpha']:.2f}", f"{speed:.1f}"]
        sent = [row["pipeline"], row["exchanges"], f"{1e-6 * row['bytes']:.2f}"]
        cells.append([*link, *sent, *(f"{row[x]:.2f}" for x in ("seconds unshaped", "seconds", "predicted"))])
    return {"links": markdown_table([*heads, "seconds, unshaped", "shaped", "predicted"], cells)}


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--no-record", action="store_true", help="write no file")
    args = parser.parse_args(arguments)
    stop = threading.Event()
    with open_hosts(2, namespaces=True) as hosts, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shaping = threading.Thread(target=_shape_when_asked, args=(hosts, folder, stop))
        shaping.start()
        try:
            torchrun(
                hosts, "benchmarks.faults.link_ranks", "--folder", name, "--shapes", str(2 * len(SHAPES)), seconds=1200
            )
        finally:
            stop.set()
            shaping.join()
        found = json.loads((folder / "found.json").read_text())
    rows = rows_of(found)
    print(json.dumps(rows, indent=2))
    if not args.no_record:
        print(write_results("nodes", {"rows": rows}, "diffusers"))


if __name__ == "__main__":
    main()
