"""The operator's metrics. Every label has few values."""

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from ddpjob import __version__

_FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    """All metrics of one process; /metrics serves the output of ``render``."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.reconcile_seconds = Histogram(
            "ddpjob_reconcile_duration_seconds",
            "Duration of a reconcile in seconds, by result (done, retry, throttled, error).",
            ["result"],
            buckets=_FAST,
            registry=self.registry,
        )
        self.errors = Counter(
            "ddpjob_reconcile_errors",
            "Reconciles that ended with an unexpected error, by exception class.",
            ["error"],
            registry=self.registry,
        )
        self.api_seconds = Histogram(
            "ddpjob_api_request_duration_seconds",
            "Duration of a request to the API server in seconds, without watches, by verb, kind and HTTP status.",
            ["verb", "kind", "code"],
            buckets=_FAST,
            registry=self.registry,
        )
        self.loop_lag = Gauge(
            "ddpjob_event_loop_lag_seconds",
            "Seconds by which the last heartbeat of the event loop was late.",
            registry=self.registry,
        )
        self.watch_restarts = Counter(
            "ddpjob_watch_restarts", "Restarts of the watches after an error.", registry=self.registry
        )
        self.sweep_heals = Counter(
            "ddpjob_sweep_healed_objects",
            "Changed objects found by relisting that watch events missed.",
            ["kind"],
            registry=self.registry,
        )
        self.progress_polls = Counter(
            "ddpjob_progress_polls",
            "Progress requests to rank 0, by result (ok, unreachable, unusable).",
            ["result"],
            registry=self.registry,
        )
        Gauge(
            "ddpjob_build_info",
            "Version of the operator, as a label; the value is 1.",
            ["version"],
            registry=self.registry,
        ).labels(__version__).set(1)

    def observe_request(self, verb: str, kind: str, code: str, seconds: float) -> None:
        """Record a request; the API client calls this after each one."""
        self.api_seconds.labels(verb, kind, code).observe(seconds)

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Add a gauge; ``read`` returns its value at each scrape."""
        Gauge(name, text, registry=self.registry).set_function(read)

    def gauges_by(self, name: str, text: str, label: str, read: Callable[[], Mapping[str, float]]) -> None:
        """Add a gauge with one label; ``read`` returns its values by label value at each scrape."""
        self.registry.register(_LabelledReader(name, text, label, read))

    def render(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        return generate_latest(self.registry)


class _LabelledReader(Collector):
    def __init__(self, name: str, text: str, label: str, read: Callable[[], Mapping[str, float]]) -> None:
        self._name, self._text, self._label, self._read = name, text, label, read

    def collect(self) -> list[GaugeMetricFamily]:
        family = GaugeMetricFamily(self._name, self._text, labels=[self._label])
        for value, number in self._read().items():
            family.add_metric([value], number)
        return [family]
