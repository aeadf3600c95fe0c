"""The operator's metrics. Every label but the namespace has few values."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from ddpjob.api.objects import Json
from ddpjob.api.status import CREATING
from ddpjob.api.time_spent import TIME_CATEGORIES
from ddpjob.engine.failures import TABLE

_REASONS = {row.reason for row in TABLE if row.reason} | {
    f"{kind}DeadlineExceeded" for kind in ("Startup", "Progress", "Completion")
}
"""Of failures. Any other reason is the name of a trainer's exception, or of the kubelet."""
Values = Mapping[str, float] | Mapping[tuple[str, ...], float]
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    """All metrics of one process; /metrics serves the output of ``render``."""

    def __init__(self) -> None:
        # They were a tenth of all series, and Prometheus takes each for a gauge.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        self.reconcile_seconds = histogram(
            "ddpjob_reconcile_duration_seconds",
            "Duration of a reconcile in seconds, by result (done, retry, throttled, error).",
            ["result"],
            buckets=_SECONDS,
        )
        self.errors = counter(
            "ddpjob_reconcile_errors",
            "Reconciles that ended with an unexpected error, by exception class.",
            ["error"],
        )
        self.api_seconds = histogram(
            "ddpjob_api_request_duration_seconds",
            "Duration of a request to the API server in seconds, without watches, by verb, kind and HTTP status.",
            ["verb", "kind", "code"],
            buckets=_SECONDS,
        )
        self.loop_lag = Gauge(
            "ddpjob_event_loop_lag_seconds",
            "Seconds by which the last heartbeat of the event loop was late.",
            registry=self.registry,
        )
        self.watch_restarts = counter(
            "ddpjob_watch_restarts",
            "Failures of the watches: refused requests, and streams that ended with an error or gave no data.",
        )
        self.progress_polls = counter(
            "ddpjob_progress_polls",
            "Progress requests to rank 0, by result (ok, unreachable, unusable).",
            ["result"],
        )
        self.attempts = counter("ddpjob_attempts", "Attempts that started.")
        self.failures = counter(
            "ddpjob_failures",
            "Failures of attempts, by reason. A reason that the trainer made up is counted as Other.",
            ["reason"],
        )
        self.restarts = counter(
            "ddpjob_restarts",
            "Restarts after a failure, by whether they count towards maxRestarts.",
            ["counted"],
        )
        self.restarts_in_place = counter("ddpjob_restarts_in_place", "Restarts of an attempt's processes in its pods.")
        self.time_spent = counter(
            "ddpjob_time_spent_seconds",
            "Seconds of all jobs by category (status.time), added when the operator writes a job's status.",
            ["category"],
        )
        self._taken_back: dict[str, int] = {}

    def observe_request(self, verb: str, kind: str, code: str, seconds: float) -> None:
        """Record a request; the API client calls this after each one."""
        self.api_seconds.labels(verb, kind, code).observe(seconds)

    def observe_status(self, before: Json, after: Json) -> None:
        """Count what a recorded status adds to the one before it."""
        old, new = (status.get("currentAttempt") or {} for status in (before, after))
        if new.get("phase") == CREATING and new.get("number") != old.get("number"):
            self.attempts.inc()
        failure, known = (([{}] + (status.get("failures") or []))[-1] for status in (after, before))
        if failure and (failure["attempt"], failure["time"]) != (known.get("attempt"), known.get("time")):
            self.failures.labels(failure["reason"] if failure["reason"] in _REASONS else "Other").inc()
            if failure["action"] == "Restart":
                self.restarts.labels(str(failure["counted"]).lower()).inc()
        self.restarts_in_place.inc(max((after.get("restartsInPlace") or 0) - (before.get("restartsInPlace") or 0), 0))
        spent, known_spent = (status.get("time") or {} for status in (after, before))
        for category in TIME_CATEGORIES if spent else ():
            # What moves to another category is first taken off later seconds.
            added = spent.get(category, 0) - known_spent.get(category, 0) - self._taken_back.pop(category, 0)
            if added < 0:
                self._taken_back[category] = -added
            self.time_spent.labels(category).inc(max(added, 0))

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Add a gauge; ``read`` returns its value at each scrape."""
        Gauge(name, text, registry=self.registry).set_function(read)

    def gauges_by(self, name: str, text: str, labels: Sequence[str], read: Callable[[], Values]) -> None:
        """Add a gauge with labels; ``read`` returns its values at each scrape, by the value of one label or all."""
        self.registry.register(_LabelledReader(name, text, labels, read))

    def render(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        return generate_latest(self.registry)


class _LabelledReader(Collector):
    def __init__(self, name: str, text: str, labels: Sequence[str], read: Callable[[], Values]) -> None:
        self._name, self._text, self._labels, self._read = name, text, labels, read

    def collect(self) -> list[GaugeMetricFamily]:
        family = GaugeMetricFamily(self._name, self._text, labels=self._labels)
        for value, number in self._read().items():
            family.add_metric([value] if isinstance(value, str) else value, number)
        return [family]
