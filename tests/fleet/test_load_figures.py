"""No request failed in the measurement of the page about the server."""

from benchmarks.harness import read_results


def test_no_request_failed_under_load():
    results = read_results("serve_load")
    assert all(row["failed"] == 0 for name in ("plain", "replicas") for row in results[name]["rows"])
