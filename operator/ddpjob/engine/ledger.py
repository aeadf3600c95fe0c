"""Where the time of a job went: ``status.time`` after a decision. Each second since the creation is in one category.

The recorded ledger has the seconds of each category until ``asOf``, and the category of the time since then. What
happened since divides this time. The total is the difference of two times of the operator's clock, so no second is
counted twice: neither by two operators nor after a crash, a conflict or a repeated patch. Times of other clocks only
divide a span that the operator did not see, and only within this span.
"""

from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from typing import Literal

from ddpjob.api.pod_view import PodView
from ddpjob.api.status import RUNNING, DDPJobStatus, Progress
from ddpjob.api.time_spent import TIME_CATEGORIES, TimeSpent
from ddpjob.api.times import parse_time, timestamp
from ddpjob.engine.attempt import EVICTED
from ddpjob.engine.decision import Decision
from ddpjob.engine.progress import reports_itself, saved_for
from ddpjob.engine.state import JobState

Happening = Literal["queued", "started", "ran", "stepped", "ended", "abandoned", "suspended", "succeeded"]
"""What ends one category and begins the next; see ``_next``."""
_TRAINS = ("training", "lost")
_USUAL_STEPS = 3  # a pause is training for the time of so many steps


def time_spent(s: JobState, decision: Decision, after: DDPJobStatus) -> TimeSpent:
    """Return the ledger after ``decision``.

    Args:
        after: the status after the decision, still with the ledger before.
    """
    new = TimeSpent(as_of=s.job.created or timestamp(s.now), current="stopped" if s.job.spec.suspend else "queued")
    before = s.before.time or new
    if decision.kind == "created" and any(pod.ended for pod in s.current.values()):
        return before  # the next plan judges these pods, and then it is known until when they trained
    begin = _second(before.as_of)
    end = max(begin, int(s.now.timestamp()))  # a clock that was set back adds nothing until it has caught up
    # Another release may have written a category that is not known here.
    known = before.current if before.current in TIME_CATEGORIES else None
    current = known or ("training" if s.attempt.phase == RUNNING else "recovering")
    happenings = [*_seen_now(s, decision, after, end), *_decided(s, decision, end)]
    spans, current = _divided(begin, end, current, happenings, reports=_has_steps(after.progress))
    totals = before.by_category
    if s.before.pause is None and after.pause is not None and current in _TRAINS:
        paused = int(end - _second(after.pause.since) - _USUAL_STEPS * (after.pause.median or 0))
        _take_out(spans, totals, "stalled", max(paused, 0))
        current = "stalled"
    elif after.pause is None and current == "stalled":
        current = "training"
    _take_out(spans, totals, "saving", _newly_saved(s))
    _take_out(spans, totals, "recovering", _newly_recovered(s))
    for category, seconds in spans.items():
        totals[category] += seconds
    if (untrained := _seconds_before_first_report(s, after, end)) is not None:
        moved = min(untrained, totals["training"])
        totals["training"] -= moved
        totals["starting"] += moved
        if current in _TRAINS and _stepped(s, end) is None:
            current = "starting"
    step = _reported_step(s)
    furthest = before.furthest_step if step is None else max(step, before.furthest_step or 0)
    if current in _TRAINS and step is not None:
        current = "lost" if step < (furthest or 0) else "training"
    return before.changed(
        as_of=timestamp(datetime.fromtimestamp(end, UTC)),
        current=None if decision.kind in ("succeed", "fail") else current,
        furthest_step=furthest,
        **totals,
    )


def _divided(
    begin: int, end: int, current: str, happenings: Iterable[tuple[int, Happening]], *, reports: bool
) -> tuple[dict[str, int], str]:
    """Return the seconds from ``begin`` to ``end`` by category, and the category that follows.

    Each happening is moved into this span, and not before the one before it: the clocks of the nodes may differ.
    """
    spans, at = dict.fromkeys(TIME_CATEGORIES, 0), begin
    for time, happening in happenings:
        moment = min(max(time, at), end)
        spans[current] += moment - at
        at, current = moment, _next(current, happening, reports=reports)
    spans[current] += end - at
    return spans, current


def _next(current: str, happening: Happening, *, reports: bool) -> str:
    """Return the category that follows. From a failure until the next step, all is recovery.

    Args:
        reports: the program reports its steps. Otherwise it trains as soon as all its pods run.
    """
    match happening:
        case "started":
            return "scheduling" if current in ("queued", "stopped", "scheduling", "starting") else "recovering"
        case "ran" if not reports:
            return "training"
        case "ran":
            return "starting" if current == "scheduling" else current
        case "stepped":
            return current if current in _TRAINS else "training"
        case "ended":
            return "recovering"
        case "abandoned":
            return current if current == "recovering" else "queued"
        case "suspended" | "succeeded":
            return "stopped"
    return "queued"


def _seen_now(s: JobState, decision: Decision, after: DDPJobStatus, end: int) -> Iterator[tuple[int, Happening]]:
    attempt, ended = s.attempt, end
    if not attempt.number and not decision.begins_attempt:
        yield end, "suspended" if s.job.spec.suspend else "queued"
    if not attempt.number or attempt.ending is not None:
        return
    if decision.kind == "succeed":
        ended = _end_of(s, s.current.values(), max, end)
    elif decision.kind == "settle" or decision.failure is not None:
        ended = _end_of(s, (pod for pod in s.current.values() if pod.state == "failed"), min, end)
    ran = None if attempt.all_running_time else _ran(s, after, end)
    if ran is not None:
        yield ran, "ran"
    if attempt.first_step_time is None and (stepped := _stepped(s, ended)) is not None:
        yield stepped, "stepped"
    if decision.kind == "succeed":
        yield ended, "succeeded"
    elif decision.kind == "settle" or decision.failure is not None:
        yield ended, "ended"


def _decided(s: JobState, decision: Decision, end: int) -> Iterator[tuple[int, Happening]]:
    match decision.kind:
        case "created" if s.attempt.ending is not None:  # the failure proved to be none
            yield end, "stepped" if s.attempt.first_step_time else "ran"
        case "close" if decision.reason == EVICTED:
            yield end, "queued"
        case "close" if decision.failure is None:
            yield end, "abandoned" if s.attempt.all_running_time is None else "ended"
        case "suspend":
            yield end, "suspended"
        case "start" | "restart":
            yield end, "started"


def _ran(s: JobState, after: DDPJobStatus, end: int) -> int | None:
    """Return when all pods of the attempt ran, if this plan sees it first; None if they did not all run.

    A process that created the pods sees their start at once. Another one takes the times of the kubelets.
    """
    current = after.current_attempt
    is_seen = current is not None and current.number == s.attempt.number and current.all_running_time is not None
    if s.observed.round != "unknown":
        return end if is_seen else None
    started = [pod.started_at for pod in s.current.values() if pod.started_at is not None]
    if len(started) == s.job.nodes:
        return max(map(_second, started))
    return end if is_seen else None


def _stepped(s: JobState, end: int) -> int | None:
    """Return when the attempt made its first step by ``end``, from the number and the speed of its steps; or None."""
    report = s.report
    if report is None or not report.step:
        return None
    resumed = (report.resumed_from.step or 0) if report.resumed_from else 0
    if report.step <= resumed:
        return None
    rate = report.steps_per_second
    if rate is not None and rate > 0 and (report.resumed_from or s.attempt.number == 1):
        seconds = (report.step - resumed) / rate + (saved_for(report) or 0)
        if seconds < end:
            return end - int(seconds)
    return end if s.current[0].state == "running" else 0  # 0: as soon as the pods ran


def _end_of(s: JobState, pods: Iterable[PodView], choose: Callable[[Iterable[int]], int], end: int) -> int:
    """Return when the first or the last of these pods ended, not later than the operator saw it.

    How long a container ran is the difference of two times of one kubelet, so a wrong clock does not matter.
    """
    times = []
    for pod in pods:
        if pod.finished_at is not None and pod.started_at is not None and s.attempt.all_running_time is not None:
            ran_for = _second(pod.finished_at) - _second(pod.started_at)
            times.append(_second(s.attempt.all_running_time) + ran_for)
        elif pod.finished_at is not None and s.observed.round == "unknown":
            times.append(_second(pod.finished_at))
    return min(choose(times), end) if times else end


def _take_out(spans: dict[str, int], totals: dict[str, int], category: str, seconds: int) -> None:
    """Move seconds from the training to a category: from that since the last write, and if necessary before."""
    sources = ((spans, "stalled"), (spans, "training"), (spans, "lost"), (totals, "training"))
    for counts, source in sources if seconds else ():
        moved = min(seconds, counts[source])
        counts[source] -= moved
        totals[category] += moved
        seconds -= moved


def _reported_step(s: JobState) -> int | None:
    """Return the last step of the training that rank 0 reports; steps that begin at 0 in each life are none."""
    report = s.report
    if report is None:
        return None
    is_known = reports_itself(report) or report.checkpoint or report.resumed_from or s.before.checkpoint
    return report.step if is_known else None


def _newly_saved(s: JobState) -> int:
    saved = saved_for(s.report) if s.report is not None else None
    known = s.before.progress.saving_seconds if s.before.progress else None
    return max((saved or 0) - (known or 0), 0)


def _newly_recovered(s: JobState) -> int:
    """Return the seconds of the recoveries in place that the status does not have yet."""
    before, now = ((each.failures if each else None) or () for each in (s.attempt.in_place, s.in_place))
    known = {failure.life for failure in before if failure.recovery_milliseconds is not None}
    return round(sum(failure.recovery_milliseconds or 0 for failure in now if failure.life not in known) / 1000)


def _seconds_before_first_report(s: JobState, after: DDPJobStatus, end: int) -> int | None:
    """Return how long the training had not begun, at the first report of steps ever; None at any other time.

    Until then, all time since the pods run was taken for training.
    """
    ran = s.attempt.all_running_time
    if ran is None or s.attempt.ending is not None or _has_steps(s.before.progress) or not _has_steps(after.progress):
        return None
    stepped = _stepped(s, end)
    return max((end if stepped is None else stepped) - _second(ran), 0)


def _has_steps(progress: Progress | None) -> bool:
    return progress is not None and progress.step is not None


def _second(time: str) -> int:
    return int(parse_time(time).timestamp())
