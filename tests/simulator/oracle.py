"""What must hold in every run of a job, and the outcome that faults must not change.

``tests/injection`` applies it to the changes of a real API server.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from ddpjob.api import names
from ddpjob.api.objects import Json, element, owner_uid
from ddpjob.api.pod_view import pod_view
from ddpjob.api.status import ENDING, RUNNING
from ddpjob.api.time_spent import TIME_CATEGORIES
from ddpjob.api.times import parse_time, seconds_between, seconds_since, timestamp
from ddpjob.engine import claims
from ddpjob.engine.state import RUN_SECONDS
from ddpjob_operator.controller.pod_logs import RETRY_SECONDS, SECONDS
from tests.simulator.faults import HARMLESS_FOR_LOGS
from tests.simulator.kubelets import CULPRIT, GRACE_SECONDS, SECRET
from tests.simulator.scenarios import NOTICE_SECONDS
from tests.simulator.simulation import KEY, START, LogRead, Simulation
from tests.worlds.memory.store import Change

Outcome = dict[str, Any]
OF_LOGS = ("Error", "ValueError", "PeerLost")
"""Reasons of failures without a report, depending on which logs could be read."""
MAX_READS = int(SECONDS / RETRY_SECONDS) + 1
SAMPLE = "sample 17"
"""A part of the exception's text in the logs."""
History = Sequence[tuple[float, Change]]
"""All changes of a run with their times in seconds, in the order of the API server."""


def check(sim: Simulation) -> None:
    """Check the invariants of a simulated run. Raises ``AssertionError``."""
    check_history(
        sim.changes,
        late_creates=sim.late_creates,
        unreachable=sim.kubelets.were_unreachable,
        operators=sim.operators,
    )
    _check_log_reads(sim)
    _check_logged_failures(sim)
    _check_secrecy(sim.changes)


def check_history(
    changes: History, *, late_creates: Collection[str] = (), unreachable: Collection[str] = (), operators: int = 1
) -> None:
    """Check the invariants of a run's whole history. Raises ``AssertionError``.

    late_creates: names of objects whose create was carried out later. unreachable: uids of pods whose node did not
    respond. operators: how many worked at the same time.
    """
    _check_status(changes)
    _check_time(changes)
    _check_pods(changes, late_creates, operators)
    _check_overlap(changes, unreachable)
    _check_namesakes(changes, unreachable)
    _check_events(changes)
    _check_isolation(changes)
    _check_tokens(changes)


def check_undisturbed(sim: Simulation, refused: int) -> None:
    """Check that no request of a run without faults was without effect, apart from ``refused`` ones.

    Also that the time is in the categories that the pods and the spec show: the operator then sees each change at once.
    """
    assert len(sim.cluster.useless) <= refused, f"requests without effect: {sim.cluster.useless}"
    _check_categories(sim.changes)


def outcome(sim: Simulation) -> Outcome:
    """Return how the job ended, and how often each object was created and deleted; without times."""
    changes = [(time, change) for time, change in sim.changes if sim.is_of_job(change)]
    found = outcome_of(sim.last_status, changes, lambda change: str(change.obj["metadata"]["name"]))
    return found | {"world": sim.last_status.get("world")}


def outcome_of(status: Json, changes: History, name: Callable[[Change], str]) -> Outcome:
    """Return the outcome of a job with this last status. name: of an object, the same in each run."""
    made = Counter(
        f"{change.type} {change.resource.kind} {name(change)}"
        for _, change in changes
        if change.resource is not names.EVENTS and change.type != "MODIFIED"
    )
    messages = [failure.get("message") for failure in map(_without_timing, status.get("failures", ()))]
    return story_of(status, changes) | {"attempt": status.get("attempt"), "messages": messages, "made": made}


def story(sim: Simulation) -> Outcome:
    """Return the part of the outcome that also faults on creates leave unchanged.

    An attempt whose pods could not all be created is abandoned. It costs no restart, but its number is used up.
    Attempts are therefore numbered here by those that ran.
    """
    return story_of(sim.last_status, sim.changes)


def without_logs(found: Outcome) -> Outcome:
    """Return an outcome or a story without what depends on whether the logs of failed pods were read."""
    kept = ("attempt", "action", "counted")
    failures = [
        {key: failure[key] for key in kept} | {"reason": "OfLog"} if failure["reason"] in OF_LOGS else failure
        for failure in found["failures"]
    ]
    conditions = {
        name: (status, "OfLog" if reason in OF_LOGS else reason)
        for name, (status, reason) in found["conditions"].items()
    }
    kept_keys = {key: value for key, value in found.items() if key != "messages"}
    return kept_keys | {"failures": failures, "conditions": conditions}


def story_of(status: Json, changes: History) -> Outcome:
    """Return the story of a job with this last status."""
    numbers = _ordinals(changes)
    kept = ("state", "restarts", "restartsCountedTowardsLimit", "succeededNodes")
    fields = ("nodeRank", "reason", "exitCode", "signal", "nodeName", "action", "counted")
    failures = [
        {"attempt": numbers.get(failure["attempt"])} | {field: failure.get(field) for field in fields}
        for failure in map(_without_timing, status.get("failures", ()))
    ]
    conditions = {c["type"]: (c["status"], c["reason"]) for c in status.get("conditions", ())}
    # At a failed end it depends on the time which peers had ended.
    nodes = status.get("nodes") if status.get("state") == "Succeeded" else None
    avoided = [(entry["nodeName"], entry["reason"]) for entry in status.get("avoidNodes") or ()]
    also = {"failures": failures, "conditions": conditions, "nodes": nodes, "avoided": avoided}
    return {key: status.get(key) for key in kept} | also


def _check_log_reads(sim: Simulation) -> None:
    """Check that each process reads a log once, not for long, and only after the ending of its attempt is recorded."""
    endings: dict[str, int] = {}
    metas = [change.obj["metadata"] for _, change in sim.changes if change.resource is names.PODS]
    labels_of = {meta["name"]: meta.get("labels") or {} for meta in metas}
    for number, (_, change) in enumerate(sim.changes, start=1):
        current = (change.obj.get("status") or {}).get("currentAttempt") or {}
        if change.resource is names.DDPJOBS and current.get("phase") == ENDING:
            endings.setdefault(f"{change.obj['metadata']['uid']} {current['number']}", number)
    reads: dict[tuple[int, str], list[LogRead]] = defaultdict(list)
    for read in sim.log_reads:
        reads[read.start, read.pod].append(read)
        labels = labels_of[read.pod]
        since = endings.get(f"{labels[names.LABEL_JOB_UID]} {labels[names.LABEL_ATTEMPT]}", math.inf)
        assert since <= read.changes, f"the log of {read.pod} was read before the ending of its attempt was recorded"
    for (_, pod), times in reads.items():
        answers = [read for read in times if read.kind in (None, "slow")]
        assert len(answers) <= sim.operators, f"the log of {pod} was read {len(answers)} times"
        assert len(times) <= sim.operators * MAX_READS, f"the log of {pod} was asked for {len(times)} times"


def _check_logged_failures(sim: Simulation) -> None:
    """Check that a failure that only logs show names the culprit, unless the logs of that attempt could not be read."""
    if not sim.reads_logs:
        return
    spoiled = sim.kubelets.spoiled_logs | {
        read.pod for read in sim.log_reads if read.kind not in (None, *HARMLESS_FOR_LOGS)
    }
    for pods in sim.kubelets.failed_together:
        for failure in _failures_of(sim.changes, pods):
            is_known = failure["reason"] in OF_LOGS and not spoiled.intersection(pods)
            found = (failure["pod"], failure["reason"], failure.get("exception"), failure.get("rank"))
            expected = (pods[CULPRIT], "ValueError", "ValueError", CULPRIT)
            assert not is_known or found == expected, f"the logs show {expected}, the status {found}"


def _failures_of(changes: History, pods: Sequence[str]) -> Iterator[Json]:
    """Yield each record of a failure of one of these pods."""
    for change in _job_changes(changes):
        yield from (f for f in (change.obj.get("status") or {}).get("failures") or () if f.get("pod") in pods)


def _check_secrecy(changes: History) -> None:
    """Check that of a log only the exception gets into status and events, and with ``logTail: Omit`` not its text."""
    omits = False
    for _, change in changes:
        if change.resource is names.DDPJOBS:
            omits = change.obj["spec"].get("logTail") == "Omit"
        if change.resource in (names.DDPJOBS, names.EVENTS):
            text = repr(change.obj)
            assert SECRET not in text, f"a part of a log is in {change.obj['metadata']['name']}"
            assert not (omits and SAMPLE in text), f"the text of an exception is in {change.obj['metadata']['name']}"


def _check_tokens(changes: History) -> None:
    """Check that the pods of an attempt that runs have one token: else its launchers refuse each other."""
    tokens: dict[tuple[str, int], set[str]] = defaultdict(set)
    for _, change in changes:
        if change.resource is names.PODS and change.type == "ADDED":
            pod = pod_view(change.obj)
            tokens[pod.job_uid, pod.attempt].add(pod.token)
        elif change.resource is names.DDPJOBS:
            current = (change.obj.get("status") or {}).get("currentAttempt") or {}
            if current.get("phase") == RUNNING:
                found = tokens[change.obj["metadata"]["uid"], current["number"]]
                assert len(found) < 2, f"attempt {current['number']} runs with {len(found)} tokens"


def _check_isolation(changes: History) -> None:
    """Check that no pod of an isolated job was created before the NetworkPolicy that isolates it.

    Jobs that are deleted are left out: garbage collection may delete the policy before a late request for a pod is
    carried out. ``_check_pods`` checks such a pod.
    """
    isolated: set[str] = set()
    protected: set[str] = set()
    for _, change in changes:
        meta = change.obj["metadata"]
        uid = owner_uid(change.obj)
        if change.resource is names.DDPJOBS and change.obj["spec"].get("networkPolicy"):
            (isolated.discard if change.type == "DELETED" else isolated.add)(meta["uid"])
        elif change.resource is names.NETWORK_POLICIES and uid is not None:
            (protected.discard if change.type == "DELETED" else protected.add)(uid)
        elif change.resource is names.PODS and change.type == "ADDED" and uid in isolated:
            assert uid in protected, f"{meta['name']} was created before its NetworkPolicy"


def _without_timing(failure: Json) -> Json:
    """Return a failure without what depends on when the operator saw it: a deleted pod may be gone already."""
    if failure["reason"] not in ("PodDeleted", "PodLost"):
        return failure
    return {key: failure[key] for key in ("attempt", "nodeRank", "action", "counted")} | {"reason": "PodLost"}


def _job_changes(changes: History) -> Iterator[Change]:
    return (
        change
        for _, change in changes
        if change.resource is names.DDPJOBS and change.obj["metadata"]["name"] == KEY.name
    )


def _ordinals(changes: History) -> dict[int, int]:
    """Return the attempts of the last job of the name that ran, or failed by themselves, numbered from 1."""
    ran: set[int] = set()
    uid = None
    for change in _job_changes(changes):
        if change.obj["metadata"]["uid"] != uid:
            uid, ran = change.obj["metadata"]["uid"], set()
        status = change.obj.get("status") or {}
        if (status.get("currentAttempt") or {}).get("phase") == "Running":
            ran.add(status["attempt"])
        ran.update(failure["attempt"] for failure in status.get("failures", ()))
    return {attempt: number for number, attempt in enumerate(sorted(ran), start=1)}


def _check_status(changes: History) -> None:
    """Check that attempt and budget only grow, and that no attempt starts while the job is to be suspended."""
    before: Json = {}
    uid = final = None
    for change in _job_changes(changes):
        status = change.obj.get("status") or {}
        if change.obj["metadata"]["uid"] != uid:
            uid, before, final = change.obj["metadata"]["uid"], {}, None
        old, new = before.get("attempt") or 0, status.get("attempt") or 0
        assert new >= old, f"attempt {new} after {old}"
        starts = new > old and (status.get("currentAttempt") or {}).get("phase") == "Creating"
        assert not (starts and change.obj["spec"].get("suspend")), f"attempt {new} started while spec.suspend is true"
        _check_failures(before, status)
        for counter in ("restarts", "restartsCountedTowardsLimit"):
            was, now = before.get(counter) or 0, status.get(counter) or 0
            is_allowed = now in (was, was + 1) or (counter != "restarts" and _is_recorded(change, before, was, now))
            assert is_allowed, f"{counter} changed from {was} to {now}"
        limit = (change.obj["spec"].get("restartPolicy") or {}).get("maxRestarts", 12)
        counted = status.get("restartsCountedTowardsLimit") or 0
        assert counted <= limit, f"{counted} restarts were counted, the limit is {limit}"
        if final is not None:
            assert status.get("state") == final, f"{status.get('state')} after {final}"
        final = status["state"] if "completionTime" in status else None
        before = status


def _check_time(changes: History) -> None:
    """Check that the ledger of each status adds up to the time since the job's creation, and at the end to all of it.

    Only the training may become less: the operator learns later of saves, and of the start of a trainer that reports.
    """
    before: Json = {}
    uid = None
    for change in _job_changes(changes):
        meta, status = change.obj["metadata"], change.obj.get("status") or {}
        if meta["uid"] != uid:
            uid, before = meta["uid"], {}
        if (ledger := status.get("time")) is None:
            continue
        spent = {category: ledger[category] for category in TIME_CATEGORIES}
        elapsed = seconds_since(meta["creationTimestamp"], parse_time(ledger["asOf"]))
        assert sum(spent.values()) == elapsed, f"{spent} is not {elapsed:.0f} s"
        less = [name for name in spent if not (0 if name == "training" else before.get(name, 0)) <= spent[name]]
        assert not less, f"{less} became less: {before}, then {spent}"
        before = spent
        if "completionTime" in status:
            completed = seconds_since(meta["creationTimestamp"], parse_time(status["completionTime"]))
            assert abs(elapsed - completed) <= max(1, 0.01 * completed), f"{spent} of a job of {completed:.0f} s"


def _check_categories(changes: History) -> None:
    """Check how long the last job trained and was stopped by what its pods and its spec were at each time."""
    jobs = [change.obj for change in _job_changes(changes) if (change.obj.get("status") or {}).get("time")]
    if not jobs:  # deleted before its first status
        return
    last = jobs[-1]
    uid, status, ledger = last["metadata"]["uid"], last["status"], last["status"]["time"]
    end = seconds_since(timestamp(START), parse_time(ledger["asOf"]))
    at, suspended, pods = 0.0, False, dict[str, tuple[str, bool]]()
    seconds: dict[str, float] = dict.fromkeys(("some run", "all run", "suspended"), 0.0)
    for time, change in changes:
        moment = min(max(time, at), end)
        attempts = Counter(attempt for attempt, runs in pods.values() if runs)
        seconds["some run"] += moment - at if attempts else 0.0
        seconds["all run"] += moment - at if last["spec"]["numNodes"] in attempts.values() else 0.0
        seconds["suspended"] += moment - at if suspended else 0.0
        at, meta = moment, change.obj["metadata"]
        if meta["uid"] == uid:
            suspended = bool(change.obj["spec"].get("suspend")) and "completionTime" not in (change.obj["status"] or {})
        elif change.resource is names.PODS and (meta.get("labels") or {}).get(names.LABEL_JOB_UID) == uid:
            runs = _trains(change) and "deletionTimestamp" not in meta
            pods[meta["name"]] = meta["labels"][names.LABEL_ATTEMPT], runs
    slack = 3.0 * (1 + status["attempt"])  # for each attempt, until its pods are seen to run, and to end
    trained = sum(ledger[name] for name in ("starting", "training", "stalled", "saving", "lost"))
    seen = f"{ledger}, but {seconds}"
    assert seconds["all run"] - slack <= trained <= seconds["some run"] + slack, seen
    assert abs(ledger["stopped"] - seconds["suspended"]) <= slack, seen


def _trains(change: Change) -> bool:
    """Return whether the trainer of this pod runs."""
    trainer = element(change.obj["status"].get("containerStatuses"), "name", names.TRAINER_CONTAINER)
    is_running = "running" in (trainer.get("state") or {}) and change.type != "DELETED"
    return is_running and bool(change.obj["status"].get("phase") == "Running")


def _check_failures(before: Json, status: Json) -> None:
    """Check that a recorded failure is never changed, unless its restart is refunded."""
    known = {failure["attempt"]: failure for failure in before.get("failures") or ()}
    for failure in status.get("failures") or ():
        was = known.get(failure["attempt"], failure)
        is_refund = was["counted"] and not failure["counted"]
        assert was == failure or is_refund, f"the recorded failure {was} was changed to {failure}"


def _is_recorded(change: Change, before: Json, was: int, now: int) -> bool:
    """Return whether the status that lowers the counter says why: a refund, or a reset by the user's policy."""
    status = change.obj["status"]
    counted = sum(failure["counted"] for failure in status.get("failures", ()))
    refunded = sum(failure["counted"] for failure in before.get("failures", ())) - counted
    is_reset = now <= 1 and _has_progressed(change.obj, before)
    return is_reset or now == was - refunded < was


def _has_progressed(job: Json, before: Json) -> bool:
    """Return whether the job got further since its last failure, or ran long enough."""
    reached, ran = before.get("furthest") or {}, (before.get("currentAttempt") or {}).get("allRunningTime")
    if reached.keys() & {"step", "checkpointStep"} and not reached.get("restartsSince"):
        return True
    if (job["status"].get("furthest") or {}).keys() & {"step", "checkpointStep"} and reached != job["status"][
        "furthest"
    ]:
        return True
    return ran is not None and seconds_between(ran, parse_time(job["status"]["time"]["asOf"])) >= RUN_SECONDS


def _check_pods(changes: History, late_creates: Collection[str], operators: int) -> None:
    """Check that each pod was created once, for the recorded attempt, and by the operator.

    Of two operators, one may see the new job late, and create the pods of its first attempt, which needs no record
    (``Controller._begin``), after the other has abandoned that attempt. It must delete them soon. Each operator may
    also create a pod again before it hears that the job is deleted; garbage collection must delete it soon.
    """
    gone: dict[str, float] = {}
    late: Counter[tuple[str, ...]] = Counter()
    made: set[tuple[str, ...]] = set()
    attempts: dict[str, int] = defaultdict(int)
    closed: dict[str, int] = {}
    again: dict[str, float] = {}
    for time, change in changes:
        meta = change.obj["metadata"]
        if change.resource is names.DDPJOBS:
            gone |= {meta["uid"]: time} if change.type == "DELETED" else {}
            status = change.obj.get("status") or {}
            attempts[meta["uid"]] = int(status.get("attempt") or 0)
            is_closed = "verdict" in ((status.get("currentAttempt") or {}).get("ending") or {})
            closed[meta["uid"]] = attempts[meta["uid"]] - (not is_closed)
        labels = meta.get("labels") or {}
        is_node = names.LABEL_JOB_UID in labels and names.LABEL_PROBE not in labels
        if change.resource is not names.PODS or change.type != "ADDED" or not is_node:
            continue
        node = (labels[names.LABEL_JOB_UID], labels[names.LABEL_ATTEMPT], labels[names.LABEL_NODE_RANK])
        if node[0] in gone:
            late[node] += 1
            again[meta["uid"]] = time
        has_heard = late[node] > operators or time - gone.get(node[0], time) > NOTICE_SECONDS
        if node in made and meta["name"] not in late_creates:
            # Another operator abandoned the attempt and deleted the pod; this operator has not seen that yet.
            may_be_twice = operators > 1 and int(node[1]) <= closed.get(node[0], 0)
            assert may_be_twice or (node[0] in gone and not has_heard), f"{meta['name']} was created twice"
            again[meta["uid"]] = time
        made.add(node)
        recorded, attempt = attempts[node[0]], int(node[1])
        # The pods of the first attempt may be created beside its record. A late request may be of an older attempt.
        known = max(recorded, 1)
        assert attempt <= known, f"{meta['name']} was created while attempt {recorded} was recorded"
    _check_deleted_soon(changes, again)


def _check_deleted_soon(changes: History, created: Mapping[str, float]) -> None:
    """Check that the pods with these uids are gone within the grace period after their creation."""
    deleted = {change.obj["metadata"]["uid"]: (time, change) for time, change in changes if change.type == "DELETED"}
    for uid, since in created.items():
        assert uid in deleted, f"the pod {uid} was created twice, and not deleted"
        time, change = deleted[uid]
        lasted, name = time - since, change.obj["metadata"]["name"]
        assert lasted <= GRACE_SECONDS, f"{name} was created twice, and deleted {lasted:.0f} s later"


def _check_overlap(changes: History, unreachable: Collection[str]) -> None:
    """Check that pods of two attempts never run together for longer than the kubelet takes to stop one.

    A kubelet that does not respond may stop a pod after its deadline. The operator cannot wait for that.
    """
    spans: dict[str, list[tuple[int, float, float, float]]] = defaultdict(list)
    began: dict[str, float] = {}
    for time, change in changes:
        meta, labels = change.obj["metadata"], change.obj["metadata"].get("labels") or {}
        if change.resource is not names.PODS or meta["uid"] in unreachable or names.LABEL_ATTEMPT not in labels:
            continue
        is_running = change.obj["status"].get("phase") == "Running" and change.type != "DELETED"
        if is_running:
            began.setdefault(meta["uid"], time)
        elif (start := began.pop(meta["uid"], None)) is not None:
            grace = max(GRACE_SECONDS, meta.get("deletionGracePeriodSeconds") or 0)
            span = int(labels[names.LABEL_ATTEMPT]), start, min(time, _deadline(meta)), grace
            spans[labels[names.LABEL_JOB_UID]].append(span)
    for pods in spans.values():
        for attempt, start, end, grace in pods:
            for other, other_start, other_end, other_grace in pods:
                shared = min(end, other_end) - max(start, other_start)
                assert attempt == other or shared <= (grace if attempt < other else other_grace), (
                    f"pods of attempts {attempt} and {other} ran together for {shared:.0f} s"
                )


def _deadline(meta: Json) -> float:
    """Return when a pod that is being deleted is to have ended, as a time of the run."""
    given = meta.get("deletionTimestamp")
    return seconds_since(timestamp(START), parse_time(given)) if given else math.inf


def _check_namesakes(changes: History, unreachable: Collection[str]) -> None:
    """Check that no pod of a job is created while a trainer of a deleted job of the same name may save checkpoints."""
    training: dict[str, Json] = {}
    for _, change in changes:
        meta, labels = change.obj["metadata"], change.obj["metadata"].get("labels") or {}
        if change.resource is not names.PODS or names.LABEL_JOB_UID not in labels or meta["uid"] in unreachable:
            continue
        if change.type == "ADDED":
            others = [pod for pod in training.values() if _is_namesake(pod, labels)]
            assert not others, f"{meta['name']} was created while {others[0]['metadata']['name']} trained"
        if _trains(change):
            training[meta["uid"]] = change.obj
        else:
            training.pop(meta["uid"], None)


def _is_namesake(pod: Json, labels: Mapping[str, str]) -> bool:
    other = pod["metadata"]["labels"]
    is_same_name = other.get(names.LABEL_JOB_NAME) == labels.get(names.LABEL_JOB_NAME)
    return is_same_name and other[names.LABEL_JOB_UID] != labels[names.LABEL_JOB_UID]


def _check_events(changes: History) -> None:
    """Check that each Event names a version of the job whose status records the decision.

    That a claim was adopted is no decision but the answer to a create, which may be sent beside the first record.
    """
    statuses: dict[tuple[str, str], Json] = {}
    for _, change in changes:
        meta = change.obj["metadata"]
        if change.resource is names.DDPJOBS:
            statuses[meta["uid"], meta["resourceVersion"]] = change.obj.get("status") or {}
        if change.resource is names.EVENTS and change.type == "ADDED" and change.obj["reason"] != claims.ADOPTED:
            about = change.obj["involvedObject"]
            recorded = statuses.get((about["uid"], about["resourceVersion"]))
            assert recorded, f"event {change.obj['reason']} was sent before its decision was recorded"
