"""The figures of the page about the server are those of its benchmark."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_has_the_figures_of_the_benchmark():
    page = (ROOT / "docs/serving.md").read_text()
    shown = page.partition("<!-- serve_load -->")[2].partition("<!-- end of serve_load -->")[0]
    results = json.loads((ROOT / "benchmarks/results/serve_load.json").read_text())
    expected = [
        [
            f"{row['load']} ×",
            f"{row['done']} of {row['requests']}",
            f"{row['requests_per_second']:.2f}",
            f"{row['p50_seconds']:.1f}",
            f"{row['p99_seconds']:.1f}",
        ]
        for name in ("plain", "replicas")
        for row in results[name]["rows"]
    ]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in shown.splitlines() if line[:1] == "|"]
    assert [row[1:] for row in rows[2:]] == expected
    overheads = [f"{results[name]['overhead_seconds'] * 1000:.0f}" for name in ("plain", "replicas")]
    assert re.findall(r"(\d+) ms", shown) == overheads
    assert all(row["failed"] == 0 for name in ("plain", "replicas") for row in results[name]["rows"])
