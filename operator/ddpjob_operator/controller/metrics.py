"""The operator's metrics. Every label but the namespace has few values, and that of a job with ``metrics_per_job``."""

import time
from collections import Counter as Counts
from collections import defaultdict
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
        self._read, self._per_job, self._now = read, per_job, now

    def collect(self) -> Iterator[GaugeMetricFamily]:
        now, jobs = self._now(), list(self._read())
        yield from _by_namespace(jobs, now)
        if self._per_job:
            yield from _by_job(jobs, now)


def _by_namespace(jobs: Jobs, now: float) -> Iterator[GaugeMetricFamily]:
    states, slow, stalled = Counts[Labels](), Counts[Labels](), Counts[Labels]()
    waits, ages, restarts = defaultdict[Labels, float](float), defaultdict[Labels, float](float), Counts[Labels]()
    for namespace, _, facts in jobs:
        states[namespace, facts.state] += 1
        if facts.slow:
            slow[namespace, facts.slow] += 1
        if facts.stalled:
            stalled[namespace, facts.stalled] += 1
        if facts.waits_for:
            place = namespace, facts.waits_for
            waits[place] = max(waits[place], now - facts.waits_since)
        if facts.saved is not None:
            ages[namespace,] = max(ages[namespace,], now - facts.saved)
        if facts.restarts:
            restarts[namespace,] = max(restarts[namespace,], facts.restarts)
    yield _family("ddpjob_jobs", "Number of jobs, by state.", ["namespace", "state"], states)
    yield _family(
        "ddpjob_slow_jobs",
        "Number of jobs whose ranks wait for a slow one in each step, by the part of the step (status.slow).",
        ["namespace", "part"],
        slow,
    )
    yield _family(
        "ddpjob_stalled_jobs",
        "Number of jobs whose ranks make no steps (training), or that need a change by their user (job).",
        ["namespace", "kind"],
        stalled,
    )
    yield _family(
        "ddpjob_longest_wait_seconds",
        "For how long a job has waited: for its pods, for quota, or for a queue that cannot admit it.",
        ["namespace", "waits_for"],
        waits,
    )
    yield _family(
        "ddpjob_checkpoint_age_seconds",
        "For how long a running job has trained since its last checkpoint; of jobs that report checkpoints.",
        ["namespace"],
        ages,
    )
    yield _family(
        "ddpjob_restarts_without_progress",
        "Most restarts of a job after failures since its last progress (status.furthest).",
        ["namespace"],
        restarts,
    )


def _by_job(jobs: Jobs, now: float) -> Iterator[GaugeMetricFamily]:
    labels = ["namespace", "job_name"]  # Prometheus itself has a label `job`
    state = GaugeMetricFamily("ddpjob_job_state", "1 for the state of a job.", labels=[*labels, "state"])
    step = GaugeMetricFamily("ddpjob_job_step", "Last step that a job reported.", labels=labels)
    goodput = GaugeMetricFamily("ddpjob_job_goodput", "Share of the time with pods that was progress.", labels=labels)
    age = GaugeMetricFamily("ddpjob_job_checkpoint_age_seconds", "As ddpjob_checkpoint_age_seconds.", labels=labels)
    for namespace, name, facts in jobs:
        place = namespace, name
        state.add_metric([*place, facts.state], 1)
        if facts.step is not None:
            step.add_metric(place, facts.step)
        if (share := facts.goodput(now)) is not None:
            goodput.add_metric(place, share)
        if facts.saved is not None:
            age.add_metric(place, max(now - facts.saved, 0.0))
    yield from (state, step, goodput, age)


def _family(name: str, text: str, labels: Sequence[str], values: Values) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=labels)
    for value, number in values.items():
        family.add_metric([value] if isinstance(value, str) else value, number)
    return family
