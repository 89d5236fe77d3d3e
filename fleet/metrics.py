"""Prometheus metrics of a server."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest


class Metrics:
    """Prometheus metrics of one server. Their names begin with ``para_core_``."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        names = {"namespace": "para_core", "registry": self.registry}
        self.accepted = Gauge("requests_accepted", "Requests that wait or run.", **names)
        self.waiting = Gauge("requests_waiting", "Requests that wait for a replica.", **names)
        self.requests = Counter("requests", "Ended requests by outcome.", ["outcome"], **names)
        self.steps = Counter("steps", "Denoising steps; its rate is steps per second.", **names)
        buckets = (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
        self.seconds = Histogram("request_seconds", "Seconds from accepting to answering.", buckets=buckets, **names)
        self.deaths = Counter("replica_deaths", "Requests whose replica died.", **names)

    def mean_seconds(self) -> float:
        """Return the mean duration in seconds of the requests that ended, 1 if none has."""
        samples = {sample.name: sample.value for sample in next(iter(self.seconds.collect())).samples}
        count = samples.get("para_core_request_seconds_count", 0)
        return samples["para_core_request_seconds_sum"] / count if count else 1.0

    def page(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return bytes(generate_latest(self.registry))
