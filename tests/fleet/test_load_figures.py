"""The figures of the page about the server are those of its benchmark."""

import json
from pathlib import Path

from benchmarks.page_parts import fill
from benchmarks.serving import load as serve_load

ROOT = Path(__file__).parents[2]


def test_the_page_is_what_the_benchmark_writes_of_its_results():
    results = json.loads((ROOT / "benchmarks/results/serve_load.json").read_text())
    page = (ROOT / "docs/serving.md").read_text()
    assert fill(page, {"serve_load": serve_load.table(results)}) == page
    assert all(row["failed"] == 0 for name in ("plain", "replicas") for row in results[name]["rows"])
