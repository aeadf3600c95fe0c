"""The operator's metrics. Labels have few values, apart from the namespace and, with ``metrics_per_job``, the job."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from ddpjob.api.objects import Json
from ddpjob.api.status import CREATING
from ddpjob.engine.failures import TABLE
from ddpjob_operator.controller.job_facts import JobFacts, creation, seconds_by_category

_REASONS = {row.reason for row in TABLE if row.reason} | {
    f"{kind}DeadlineExceeded" for kind in ("Startup", "Progress", "Completion")
}
"""Of failures. Any other reason is the name of a trainer's exception, or of the kubelet."""
Labels = tuple[str, ...]
Values = Mapping[str, float] | Mapping[Labels, float]
Jobs = Iterable[tuple[str, str, JobFacts]]
"""Namespace, name and facts of jobs."""
_OF_NAMESPACES: Mapping[str, tuple[str, Labels]] = {
    "ddpjob_jobs": ("Number of jobs, by state.", ("state",)),
    "ddpjob_slow_jobs": ("Number of jobs with a slow rank, by the part of its steps (status.slow).", ("part",)),
    "ddpjob_stalled_jobs": ("Number of jobs that make no steps (training), or need their users (job).", ("kind",)),
    "ddpjob_longest_wait_seconds": ("How long a job has waited for its pods, quota or queue.", ("waits_for",)),
    "ddpjob_checkpoint_age_seconds": ("How long a running job has trained since its last checkpoint.", ()),
    "ddpjob_restarts_without_progress": ("Most restarts of a job since its last progress.", ()),
}
"""Gauges about the jobs, with their labels besides the namespace: sums of jobs, and the largest value of a job."""
_OF_EACH_JOB: Mapping[str, tuple[str, Labels]] = {  # Prometheus itself has a label `job`
    "ddpjob_job_state": ("1 for the state of a job.", ("job_name", "state")),
    "ddpjob_job_step": ("Last step that a job reported.", ("job_name",)),
    "ddpjob_job_goodput": ("Share of a job's time with pods that was progress.", ("job_name",)),
    "ddpjob_job_checkpoint_age_seconds": ("As ddpjob_checkpoint_age_seconds.", ("job_name",)),
}
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
            "Seconds of all jobs by namespace and category (status.time), added when the operator writes a status.",
            ["namespace", "category"],
        )
        self._taken_back: dict[tuple[str, str], int] = {}

    def observe_request(self, verb: str, kind: str, code: str, seconds: float) -> None:
        """Record a request; the API client calls this after each one."""
        self.api_seconds.labels(verb, kind, code).observe(seconds)

    def observe_status(self, job: Json, before: Json, after: Json) -> None:
        """Count what a recorded status of a job adds to the one before it."""
        old, new = (status.get("currentAttempt") or {} for status in (before, after))
        if new.get("phase") == CREATING and new.get("number") != old.get("number"):
            self.attempts.inc()
        failure, known = (([{}] + (status.get("failures") or []))[-1] for status in (after, before))
        if failure and (failure["attempt"], failure["time"]) != (known.get("attempt"), known.get("time")):
            self.failures.labels(failure["reason"] if failure["reason"] in _REASONS else "Other").inc()
            if failure["action"] == "Restart":
                self.restarts.labels(str(failure["counted"]).lower()).inc()
        self.restarts_in_place.inc(max((after.get("restartsInPlace") or 0) - (before.get("restartsInPlace") or 0), 0))
        self._observe_time(job, before, after)

    def _observe_time(self, job: Json, before: Json, after: Json) -> None:
        created, namespace = creation(job), job["metadata"]["namespace"]
        spent, known = (seconds_by_category(status, created) for status in (after, before))
        if spent is None or (known is None and before):
            return  # a spoiled ledger is replaced by one that begins at the job's creation, which is counted already
        for category, seconds in spent.items():
            # What moves to another category is first taken off later seconds.
            added = seconds - (known or {}).get(category, 0) - self._taken_back.pop((namespace, category), 0)
            if added < 0:
                self._taken_back[namespace, category] = -added
            self.time_spent.labels(namespace, category).inc(max(added, 0))

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Add a gauge; ``read`` returns its value at each scrape."""
        Gauge(name, text, registry=self.registry).set_function(read)

    def gauges_by(self, name: str, text: str, labels: Sequence[str], read: Callable[[], Values]) -> None:
        """Add a gauge with labels; ``read`` returns its values at each scrape, by the value of one label or all."""
        self.registry.register(_LabelledReader(name, text, labels, read))

    def jobs(self, read: Callable[[], Jobs], *, per_job: bool = False, now: Callable[[], float] = time.time) -> None:
        """Add the gauges about the jobs, which ``read`` returns at each scrape. per_job: also those of each job."""
        self.registry.register(_JobGauges(read, per_job, now))

    def render(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        return generate_latest(self.registry)


class _LabelledReader(Collector):
    def __init__(self, name: str, text: str, labels: Sequence[str], read: Callable[[], Values]) -> None:
        self._name, self._text, self._labels, self._read = name, text, labels, read

    def collect(self) -> list[GaugeMetricFamily]:
        return [_family(self._name, self._text, self._labels, self._read())]


class _JobGauges(Collector):
    """All gauges about the jobs, from one pass over them."""

    def __init__(self, read: Callable[[], Jobs], per_job: bool, now: Callable[[], float]) -> None:
        self._read, self._now = read, now
        self._metrics = {**_OF_NAMESPACES, **(_OF_EACH_JOB if per_job else {})}

    def collect(self) -> Iterator[GaugeMetricFamily]:
        now = self._now()
        values: dict[str, dict[Labels, float]] = {metric: {} for metric in self._metrics}
        for namespace, name, facts in self._read():
            for metric, labels, number in _numbers(name, facts, now):
                if number is not None and (found := values.get(metric)) is not None:
                    place = namespace, *labels
                    known = found.get(place, 0)
                    found[place] = known + number if metric.endswith("_jobs") else max(known, number)
        for metric, (text, labels) in self._metrics.items():
            yield _family(metric, text, ["namespace", *labels], values[metric])


def _numbers(name: str, facts: JobFacts, now: float) -> Iterator[tuple[str, Labels, float | None]]:
    age = now - facts.saved if facts.saved is not None else None
    yield "ddpjob_jobs", (facts.state,), 1
    yield "ddpjob_slow_jobs", (facts.slow,), 1 if facts.slow else None
    yield "ddpjob_stalled_jobs", (facts.stalled,), 1 if facts.stalled else None
    yield "ddpjob_longest_wait_seconds", (facts.waits_for,), now - facts.waits_since if facts.waits_for else None
    yield "ddpjob_checkpoint_age_seconds", (), age
    yield "ddpjob_restarts_without_progress", (), facts.restarts or None
    yield "ddpjob_job_state", (name, facts.state), 1
    yield "ddpjob_job_step", (name,), facts.step
    yield "ddpjob_job_goodput", (name,), facts.goodput(now)
    yield "ddpjob_job_checkpoint_age_seconds", (name,), age


def _family(name: str, text: str, labels: Sequence[str], values: Values) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=labels)
    for value, number in values.items():
        family.add_metric([value] if isinstance(value, str) else value, number)
    return family
