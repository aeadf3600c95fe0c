"""All jobs on one page: who needs a person first, and what the GPUs do. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from ddpjob.api.times import parse_time, seconds_between
from ddpjob.cli.card import is_abnormal, sentence, troubles
from ddpjob.cli.page import shortened
from ddpjob.cli.text import one_line
from ddpjob.client.base import INTERRUPTED
from ddpjob.client.job import DDPJob

NEEDS, WAITS, RUNS, ENDED = "needs a person", "waits", "runs", "ended"
GROUPS = (NEEDS, WAITS, RUNS, ENDED)
_RECENT = 86_400.0  # seconds for which a failed job needs a person
_LATE = 1800.0  # seconds for which a job may wait until it needs a person
_HELD = ("scheduling", "starting", "training", "stalled", "saving", "lost", "recovering")  # of the ledger: pods exist
_LOST = ("scheduling", "starting", "stalled", "lost", "recovering")
_GPU = "/gpu"
_LONGEST = 40  # characters of a state
_SPOILED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)  # by a field of another form


@dataclass(frozen=True)
class Row:
    """One job. gpus: that it holds now; 0 without pods. share: of its steps. seconds: since it was created."""

    job: DDPJob
    group: str
    state: str
    text: str
    trouble: str
    gpus: int
    is_idle: bool
    share: float | None
    goodput: float | None
    seconds: float | None

    @property
    def place(self) -> str:
        return f"{self.job.namespace}/{self.job.name}"


@dataclass(frozen=True)
class Lost:
    """GPU-hours of a namespace that were no training, by cause; jobs without GPUs count as one GPU per node."""

    namespace: str
    goodput: float | None
    hours: Mapping[str, float]
    total: float


@dataclass(frozen=True)
class Fleet:
    """What the page shows. counts: jobs by group, before the filter. held, idle: GPUs."""

    rows: Sequence[Row]
    counts: Mapping[str, int]
    held: int
    idle: int
    lost: Sequence[Lost]


def fleet(jobs: Iterable[DDPJob], now: datetime, *, group: str = "", text: str = "") -> Fleet:
    """Return the jobs, sorted by who needs a person. group, text: the filter; text is in a name, namespace or state."""
    every, spoiled = list[Row](), list[Row]()
    for job in jobs:
        try:
            every.append(row_of(job, now))
        except _SPOILED as error:  # one job must not hide the others
            spoiled.append(_spoiled_row(job, error))
    wanted = text.lower()
    rows = [
        row
        for row in every + spoiled
        if (not group or row.group == group) and wanted in f"{row.place} {row.state} {row.text}".lower()
    ]
    rows.sort(key=lambda row: (GROUPS.index(row.group), not row.is_idle, row.seconds or 0.0, row.place))
    held, idle = sum(row.gpus for row in every), sum(row.gpus for row in every if row.is_idle)
    return Fleet(
        rows, Counter(row.group for row in every + spoiled), held, idle, lost_of([row.job for row in every], now)
    )


def row_of(job: DDPJob, now: datetime) -> Row:
    """Return what one line says of a job."""
    status, spent = job.status, job.status.time
    if spent is not None and job.state != INTERRUPTED:
        spent = spent.at(now)
    created = job.manifest["metadata"].get("creationTimestamp")
    seconds = seconds_between(created, now) if created else None
    found, progress = troubles(job, now), status.progress
    current = spent.current if spent is not None and not job.finished else None
    gpus = gpus_of(job) if current in _HELD else 0
    share = progress.percent / 100 if progress is not None and progress.percent is not None else None
    group = _group(job, found, current, seconds or 0.0, now)
    goodput = spent.goodput if spent is not None else None
    text, trouble, is_idle = shortened(sentence(job, now)), ", ".join(found), bool(gpus) and current in _LOST
    return Row(job, group, one_line(job.state[:_LONGEST]), text, trouble, gpus, is_idle, share, goodput, seconds)


def _spoiled_row(job: DDPJob, error: Exception) -> Row:
    text = one_line(f"a field has a form that this release does not know: {type(error).__name__}: {error}"[:500])
    return Row(job, NEEDS, "unknown", text, "", 0, False, None, None, None)


def _group(job: DDPJob, found: Sequence[str], current: str | None, seconds: float, now: datetime) -> str:
    if job.finished:
        ended = job.status.completion_time
        is_recent = ended is None or (now - parse_time(ended)).total_seconds() < _RECENT
        return NEEDS if not job.succeeded and is_recent else ENDED
    if found or job.state in (INTERRUPTED, "Invalid"):
        return NEEDS
    if job.state == "Suspended":
        return WAITS
    if current in (None, "queued", "scheduling"):
        return NEEDS if seconds > _LATE else WAITS
    return NEEDS if is_abnormal(job) and job.state not in ("Restarting", "Ending") else RUNS


def gpus_of(job: DDPJob) -> int:
    """Return the GPUs of the pods that the job has, by the limits of its spec."""
    limits = ((job.manifest.get("spec") or {}).get("resources") or {}).get("limits") or {}
    each = sum(int(number) for name, number in limits.items() if name.endswith(_GPU) and str(number).isdecimal())
    return each * _nodes(job)


def _nodes(job: DDPJob) -> int:
    world = job.status.world
    nodes = world.num_nodes if world is not None else (job.manifest.get("spec") or {}).get("numNodes")
    return nodes if isinstance(nodes, int) else 1


def lost_of(jobs: Iterable[DDPJob], now: datetime) -> list[Lost]:
    """Return by namespace where the time of GPUs went that was no training, the largest first."""
    used, hours = Counter[str](), dict[str, Counter[str]]()
    trained = Counter[str]()
    for job in jobs:
        if (spent := job.status.time) is None:
            continue
        namespace, spent = str(job.namespace), spent.at(now)
        gpus = gpus_of(job) or _nodes(job)
        by_cause = hours.setdefault(namespace, Counter())
        for cause, seconds in spent.by_category.items():
            if cause in _HELD:
                used[namespace] += gpus * seconds
            if cause in _LOST:
                by_cause[cause] += gpus * seconds
        trained[namespace] += gpus * spent.training
    found = [
        Lost(
            namespace,
            trained[namespace] / used[namespace] if used[namespace] else None,
            {cause: seconds / 3600 for cause, seconds in by_cause.most_common() if seconds},
            by_cause.total() / 3600,
        )
        for namespace, by_cause in hours.items()
    ]
    return sorted(found, key=lambda lost: -lost.total)
