"""``explain``: the rules that explain a job, in their order, and what has to be read for them."""

from collections.abc import Callable
from dataclasses import dataclass

from ddpjob.client.snapshot import Snapshot
from ddpjob.client.verdict.explanation import Explanation
from ddpjob.client.verdict.facts import Case
from ddpjob.client.verdict.failed import ending, finished, last_failure, logs_to_read, unrecorded
from ddpjob.client.verdict.operator import with_operator
from ddpjob.client.verdict.placement import gave_back
from ddpjob.client.verdict.refused import queued, refused
from ddpjob.client.verdict.running import foreign, resumed, running, suspended, unseen
from ddpjob.client.verdict.waiting import waiting

_MOST = 8
"""Claims, and pods with events, that are read."""

_RULES: tuple[Callable[[Case], Explanation | None], ...] = (
    foreign,
    unseen,
    queued,
    refused,
    suspended,
    resumed,
    gave_back,
    ending,
    unrecorded,
    waiting,
)


@dataclass(frozen=True)
class Needed:
    """What to read besides the job and its pods. about: (kind, name) of the objects whose events are needed."""

    claims: tuple[str, ...] = ()
    about: tuple[tuple[str, str], ...] = ()
    logs: tuple[str, ...] = ()


def explain(facts: Snapshot) -> Explanation:
    """Return why the job is in its state."""
    case = Case(facts)
    if (found := finished(case)) is not None:
        return found
    if facts.is_run is False:
        is_suspended = case.status.is_true("Suspended")  # not yet, if its process was killed meanwhile
        return _after_failure(case, (suspended(case) if is_suspended else None) or _interrupted(case))
    found = next((found for rule in _RULES if (found := rule(case)) is not None), None) or running(case)
    return with_operator(case, _after_failure(case, found))


def _after_failure(case: Case, found: Explanation) -> Explanation:
    """Return the verdict with the failure that precedes the attempt, in every stage of it."""
    last = last_failure(case)
    if last is None or last in found.evidence:
        return found
    return found.model_copy(update={"evidence": [*found.evidence, last]})


def needed(facts: Snapshot) -> Needed:
    """Return what else has to be read, after the job and its pods."""
    case = Case(facts)
    pending = [p for p in case.current if p.state == "pending"]
    waits = [p for p in pending if not p.waiting][:_MOST]
    claims = dict.fromkeys(name for pod in waits for name in _claims(case, pod.name))
    about = [("Pod", pod.name) for pod in [p for p in pending if p.waiting][:1]]
    about += [("Pod", pod.name) for pod in waits if pod.unschedulable is not None or pod.node_name]
    about += [("PersistentVolumeClaim", name) for name in claims]
    if case.attempt.refusals:
        about.append(("DDPJob", case.name))
    return Needed(tuple(claims)[:_MOST], tuple(about)[: 2 * _MOST], tuple(logs_to_read(case)))


def _claims(case: Case, pod: str) -> list[str]:
    volumes = (case.raw[pod].get("spec") or {}).get("volumes") or ()
    return [v["persistentVolumeClaim"]["claimName"] for v in volumes if v.get("persistentVolumeClaim")]


def _interrupted(case: Case) -> Explanation:
    """Explain a job of this machine that nothing runs."""
    is_saved = case.status.checkpoint is not None
    goes_on = "it continues from its last checkpoint" if is_saved else "no checkpoint is known, so it may begin again"
    ended, cause, advice = case.facts.ended or ("", "its process was killed, or the machine was restarted", "")
    found = case.verdict(
        "Interrupted",
        "NoProcess",
        f"no process of this machine runs {case.name}, which has not finished" + (f": {ended}" if ended else ""),
        [case.of_job("status.state", case.status.state)],
        hint="; ".join(filter(None, (cause, goes_on))),
        next=f"{advice}, then ddpjob resume {case.name}" if advice else f"ddpjob resume {case.name}",
    )
    return found.model_copy(update={"state": "Interrupted", "operator": "Down"})
