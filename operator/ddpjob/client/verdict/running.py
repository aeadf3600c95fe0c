"""The verdict on a job that starts, runs or is suspended: not seen yet, first step, slow, hanging, running."""

from pathlib import PurePosixPath
from typing import Any

from ddpjob.api import names
from ddpjob.api.objects import element
from ddpjob.api.status import RETURNED, Progress, SlowStatus
from ddpjob.api.times import parse_time, seconds_between
from ddpjob.client.verdict.explanation import Evidence, Explanation
from ddpjob.client.verdict.facts import NO_HEARTBEAT, OF_A_RUN, OVERDUE_SECONDS, Case
from ddpjob.engine.advice import BY_ADMINISTRATOR
from ddpjob.engine.attempt import DELETING
from ddpjob.engine.failures import DIVERGED, REPLICAS_DIVERGED
from ddpjob.engine.mistakes import trainer_command
from ddpjob.engine.obstacles import (
    LOSS_NOT_FINITE,
    NO_PROGRESS,
    NODE_NOT_RESPONDING,
    PROGRESS_UNKNOWN,
    SHARED,
    TRAINING_SLOW,
    TRAINING_STALLED,
    diverged_advice,
    for_silent_node,
    slow_advice,
)
from ddpjob.engine.scheduling.elastic import RUNNING_SMALLER
from ddpjob.engine.scheduling.kueue import QUEUE_UNAVAILABLE
from ddpjob.engine.suspects import PARTS_OF_NODES

_QUIET_SECONDS = 120.0
"""A trainer that makes steps reports one in this time; evaluations and saves take shorter, or have another phase."""
_QUIET_STEPS = 20
_SLOWER = 2.0
"""By which factor the steps are slower than in the attempt so far."""
_LONG_ENOUGH = 120.0  # seconds of steps before they can be compared
_FIRST_REPORT = 30.0  # seconds in which ddprun has answered the operator, which asks each 10 s
_SOON = 30.0  # seconds in which a process usually ends after that
_NOT_SERVED = (
    "the operator is not installed, is down, or serves other namespaces",
    f"{BY_ADMINISTRATOR}kubectl get deployments -A -l {names.OPERATOR_SELECTOR}; "
    "docs/start/install.md installs the operator",
)
_QUIET = "a rank, the data loader or the network stopped without an error"
_LOCKS = "a lock, a file system or a peer does not answer, or the ranks call different collectives"
_THREADS = "a thread that is no daemon, or an exit handler, keeps a process"


def foreign(case: Case) -> Explanation | None:
    """Explain a job that another controller manages."""
    manager = case.spec.get("managedBy")
    if manager in (None, names.CONTROLLER):
        return None
    sentence = f"{case.name} is managed by {manager}, so this operator leaves it alone"
    return case.verdict("Suspended", "ManagedBy", sentence, [case.of_job("spec.managedBy", manager)])


def unseen(case: Case) -> Explanation | None:
    """Explain a job that no operator has looked at."""
    if case.status.conditions:
        return None
    created = case.meta.get("creationTimestamp")
    age = int(case.seconds_since(created))
    quoted = [case.of_job("status.observedGeneration", "absent"), case.of_job("metadata.creationTimestamp", created)]
    who = "process of this machine" if case.is_local else "operator"
    if age < OVERDUE_SECONDS:
        sentence = f"{case.name} was created {age} s ago, and no {who} has looked at it yet"
        return case.verdict("Starting", "NotSeenYet", sentence, quoted)
    return case.verdict(
        "OperatorDown",
        "NeverSeen",
        f"no {who} has looked at {case.name} since it was created {age} s ago",
        quoted,
        confidence="Medium",
        needs=["operator"],
        advice=OF_A_RUN if case.is_local else _NOT_SERVED,
    )


def suspended(case: Case) -> Explanation | None:
    """Explain a job that is suspended, or is about to be."""
    found = case.condition("Suspended")
    is_suspended = found is not None and found.status == "True"
    if is_suspended and found is not None and found.reason == DELETING:
        todo = f"kubectl get ddp {case.name} -n {case.namespace} -o jsonpath='{{.metadata.finalizers}}'"
        sentence = f"{case.name} runs no pods: {found.message}"
        return case.verdict("Suspended", DELETING, sentence, [case.of_condition(found)], next=todo)
    wanted = bool(case.spec.get("suspend"))
    if not wanted:
        return None
    quoted = [case.of_job("spec.suspend", "true"), case.of_condition(found) if found is not None else None]
    what = "is suspended" if is_suspended else "is being suspended: its ranks save a checkpoint and end"
    reason = "Suspended" if is_suspended else "Suspending"
    resume = f"ddpjob resume {case.name}"
    return case.verdict("Suspended", reason, f"{case.name} {what}", quoted, next=resume)


def resumed(case: Case) -> Explanation | None:
    """Explain a job whose resumption the operator has not seen yet."""
    if not case.status.is_true("Suspended"):
        return None
    quoted = [case.of_job("spec.suspend", "false"), case.of_job("status.state", case.status.state)]
    return case.verdict("Starting", "Resuming", f"{case.name} was resumed and starts again", quoted)


def running(case: Case) -> Explanation:
    """Explain a job all of whose nodes run."""
    found = case.condition("Running")
    reason, message = (found.reason, found.message) if found is not None else ("Unknown", "")
    quoted = case.of_condition(found) if found is not None else None
    if reason == TRAINING_STALLED:
        return _stalled(case, message, quoted)
    if reason == NODE_NOT_RESPONDING:
        silent = sorted(pod.node_name or "NODE" for pod in case.current if pod.unready_since is not None)
        return _with_problem(case, reason, message, quoted, for_silent_node(silent[0] if silent else "NODE"))
    progress, has_stepped = _progress_of_attempt(case), case.attempt.first_step_time is not None
    if reason in (PROGRESS_UNKNOWN, NO_PROGRESS):
        return _with_problem(case, reason, message, quoted, case.logs_command())
    if progress is not None and progress.phase == RETURNED:
        return _returned(case, reason, progress, quoted)
    seen = _trouble(case, reason, message, quoted, progress if has_stepped else None)
    if seen is not None:
        return seen
    if reason in (LOSS_NOT_FINITE, QUEUE_UNAVAILABLE, SHARED):
        return _with_problem(case, reason, message, quoted, "what the message says")
    if not has_stepped:
        return _before_first_step(case, progress, quoted)
    done = f": {progress.display}" if progress is not None else ""
    if reason == RUNNING_SMALLER:
        done += f"; {message}"
    values = [case.of_job("status.progress.display", progress.display)] if progress is not None else []
    slow = [node for node in case.status.avoid_nodes or () if node.is_slow]
    done += "".join(f"; it prefers other Kubernetes nodes than {node.node_name}, which was {node.why}" for node in slow)
    values += [case.of_job(f"status.avoidNodes[{node.node_name}].attempts", node.attempts) for node in slow]
    sentence = f"{case.name} trains in attempt {case.attempt.number}{done}"
    step = progress.step if progress is not None else None
    return case.verdict("Running", reason, sentence, [quoted, *values], step=step)


def _trouble(
    case: Case, reason: str, message: str, quoted: Evidence | None, progress: Progress | None
) -> Explanation | None:
    """Explain what is wrong with a training; None if nothing is. progress: None before the first step."""
    if progress is not None and (quiet := _quiet(case, progress)) is not None:
        return quiet
    if reason == REPLICAS_DIVERGED:
        return _replicas(case, message, quoted)
    if progress is not None and (lost := _diverged(case, progress)) is not None:
        return lost
    if reason == TRAINING_SLOW:
        return _slow_rank(case, message, quoted)
    return _slow(case, progress) if progress is not None else None


def _with_problem(case: Case, reason: str, message: str, quoted: Evidence | None, todo: str) -> Explanation:
    return case.verdict("Running", reason, f"{case.name} runs: {message}", [quoted], is_abnormal=True, next=todo)


def _stalled(case: Case, message: str, quoted: Evidence | None) -> Explanation:
    stall = case.status.stall
    has_returned = stall is not None and stall.phase == RETURNED
    place: dict[str, Any] = {} if stall is None else {"rank": stall.rank, "step": stall.step, "where": stall.where}
    values = [case.of_job(f"status.stall.{name}", value) for name, value in place.items() if value is not None]
    stacks = f"{case.logs_command()} shows the stacks of all ranks"
    return case.verdict(
        "Hang",
        TRAINING_STALLED,
        f"{case.name} {'has not ended' if has_returned else 'hangs'}: {message}",
        [quoted, *values],
        hint=_THREADS if has_returned else _LOCKS,
        next=case.logs_command() if has_returned else f"{stacks}; ddpjob restart {case.name} starts it again",
        **place,
    )


def _returned(case: Case, reason: str, progress: Progress, quoted: Evidence | None) -> Explanation:
    """Explain a job whose script has ended on rank 0. Other nodes may still train, so no deadline follows from it."""
    age = case.seconds_since(progress.last_heartbeat_time) if progress.last_heartbeat_time else 0.0
    sentence = f"rank 0 of {case.name} ended its script {int(age)} s ago, and not all processes of the job have ended"
    return case.verdict(
        "Running",
        reason,
        sentence,
        [case.of_job("status.progress.phase", RETURNED), quoted],
        is_abnormal=age >= _SOON,
        hint=_THREADS,
        next=case.logs_command(),
        step=progress.step,
    )


def _progress_of_attempt(case: Case) -> Progress | None:
    """Return the progress of the current attempt; the status keeps that of the one before until there is a report."""
    progress, start = case.status.progress, case.attempt.start_time
    if progress is None or progress.last_heartbeat_time is None:
        return progress
    return progress if parse_time(progress.last_heartbeat_time) >= parse_time(start) else None


def _before_first_step(case: Case, progress: Progress | None, quoted: Evidence | None) -> Explanation:
    since = int(case.seconds_since(case.attempt.all_running_time))
    if progress is None:
        sentence = f"all nodes of {case.name} have run for {since} s, and this attempt has reported no progress"
        hint = "a program that neither ddprun nor ddptrain runs reports nothing unless it serves GET /progress"
        if _is_under_ddprun(case):
            hint = (
                "its launcher has not answered yet: the machine is slow, or the network keeps the operator from the pod"
            )
        is_expected = since < _FIRST_REPORT or case.status.progress is not None  # it reported in the attempt before
        return case.verdict(
            "FirstStep", "NotReported", sentence, [quoted], confidence="Medium",
            hint=None if is_expected else hint, next=case.logs_command(),
        )  # fmt: skip
    values = [case.of_job("status.progress.phase", progress.phase or ""), quoted]
    waits = progress.phase in ("rendezvous", "start")
    what = "waits for its ranks to meet" if progress.phase == "rendezvous" else f"is in phase {progress.phase}"
    return case.verdict(
        "Rendezvous" if progress.phase == "rendezvous" else "FirstStep",
        "NoStepYet",
        f"{case.name} {what}, {since} s after all nodes ran, and has made no step yet",
        values,
        is_abnormal=False,
        confidence="Medium" if waits else "High",
        next=case.logs_command(),
    )


def _is_under_ddprun(case: Case) -> bool:
    """Return whether the command or the injected launcher shows that the program reports."""
    if case.job is None:
        return False
    programs = {PurePosixPath(word).name for word in trainer_command(case.job)}
    return case.job.spec.launcher is not None or not programs.isdisjoint(("ddprun", "ddptrain"))


def _quiet(case: Case, progress: Progress) -> Explanation | None:
    """Explain a training that pauses, or whose last report is old. A pause that is not very long may be work."""
    rate, beat, pause = _number(progress.steps_per_second), progress.last_heartbeat_time, case.status.pause
    quiet = case.seconds_since(beat)
    is_long = quiet >= max(_QUIET_SECONDS, _QUIET_STEPS / rate if rate else 0.0)
    if beat is None or not (pause or (is_long and progress.phase in (None, "train"))):
        return None
    what = f"made {pause.text(case.facts.now)}" if pause else f"reported no work for {int(quiet)} s"
    return case.verdict(
        "Hang" if is_long else "Running",
        NO_HEARTBEAT,
        f"{case.name} has {what}, since step {progress.step}",
        [
            case.of_job("status.pause.since", pause.since) if pause else None,
            case.of_job("status.progress.lastHeartbeatTime", beat),
            case.of_job("status.progress.step", progress.step),
        ],
        is_abnormal=True,
        confidence="Medium",
        needs=["operator"],
        hint=_QUIET + ("" if case.is_local else ", or the operator is down")
        if is_long
        else "an evaluation or a save takes longer than all before, or a rank, the data loader or the network stopped",
        next=case.logs_command(),
        step=progress.step,
    )


def _diverged(case: Case, progress: Progress) -> Explanation | None:
    """Explain a training whose loss is no finite number: it goes on, and all that it computes from then on is lost."""
    if (loss := case.diverged_loss) is None:
        return None
    sentence = f"{case.name} trains, and its loss at step {progress.step} is {loss.value}"
    return case.verdict(
        "Running", LOSS_NOT_FINITE, sentence, [loss], is_abnormal=True, step=progress.step,
        hint=DIVERGED, next=f"ddpjob plot {case.name} shows from which step; create the job again from a checkpoint "
        "before it, with a lower learning rate",
    )  # fmt: skip


def _replicas(case: Case, message: str, quoted: Evidence | None) -> Explanation:
    """Explain a training whose ranks do not have the same parameters: each trains a model of its own."""
    found = case.status.diverged
    values = [case.of_job(f"status.diverged.{name}", value) for name, value in (found.wire() if found else {}).items()]
    return case.verdict(
        "Running",
        REPLICAS_DIVERGED,
        f"the ranks of {case.name} do not have the same parameters: {found.text() if found else message}",
        [*values, quoted],
        is_abnormal=True,
        rank=found.rank if found else None,
        step=found.step if found else None,
        hint=diverged_advice(found.cause if found else None),
        next=f"ddpjob pull {case.name} --step {good.agreed_step} copies the newest checkpoint at which all ranks "
        "agreed, if the training still keeps it"
        if (good := case.status.checkpoint) and good.agreed_step is not None
        else case.logs_command(),
    )


def _slow_rank(case: Case, message: str, quoted: Evidence | None) -> Explanation:
    """Explain a training whose ranks wait for the same rank in each step."""
    found = case.status.slow
    values = [case.of_job(f"status.slow.{name}", value) for name, value in (found.wire() if found else {}).items()]
    hint, todo, earlier = slow_advice(found.part if found else None), f"ddpjob top {case.name}", ""
    more: list[Evidence] = []
    if found is not None and found.part == "throttled":
        todo, more = _throttled(case, found.rank)
    elif found is not None and found.part in PARTS_OF_NODES:
        earlier, does, more = _of_slow_node(case, found)
        hint = "; ".join(filter(None, (hint, does)))
    return case.verdict(
        "Slow",
        TRAINING_SLOW,
        f"{case.name} is slow: {found.text() if found else message}{earlier}",
        [*values, *more, quoted],
        is_abnormal=True,
        rank=found.rank if found else None,
        node_name=found.node_name if found else None,
        hint=hint,
        next=todo,
    )


def _throttled(case: Case, rank: int | None) -> tuple[str, list[Evidence]]:
    """Return what to do about a rank that the CPU limit stops, and the limit of its container as evidence."""
    nproc = case.job.nproc_per_node if case.job is not None else 1
    pod = next((pod for pod in case.current if rank is not None and pod.node_rank == rank // nproc), None)
    spec = case.raw[pod.name].get("spec") or {} if pod is not None else {}
    limits = element(spec.get("containers"), "name", "trainer").get("resources") or {}
    limit = (limits.get("limits") or {}).get("cpu")
    todo = "create the job again with a higher spec.resources.limits.cpu, or with fewer workers of the DataLoader"
    if pod is None or limit is None:
        return todo, []
    path = "spec.containers[trainer].resources.limits.cpu"
    return f"{todo}: it is {limit}", [Evidence(kind="Pod", name=pod.name, field=path, value=str(limit))]


def _of_slow_node(case: Case, found: SlowStatus) -> tuple[str, str, list[Evidence]]:
    """Return what earlier attempts show of a slow node, what the job does about it, and the evidence."""
    asks = bool((case.spec.get("scheduling") or {}).get("avoidSlowNodes"))
    seen = [each for each in case.status.slow_nodes or () if each.attempt != case.attempt.number]
    elsewhere = sorted({each.node_name for each in seen if each.rank == found.rank} - {found.node_name})
    same = sorted({each.attempt for each in seen if each.node_name == found.node_name})
    text = does = ""
    if elsewhere:
        text = f"; it was slow on {', '.join(elsewhere)}, too"
        does = "its own work takes longer wherever it runs, so no Kubernetes node is avoided for it"
    elif same:
        text = f"; the node was slow in attempt{'s' * (len(same) > 1)} {', '.join(map(str, same))}, too"
        does = "after ten minutes of this, the next attempt prefers other Kubernetes nodes"
    elif not (asks or case.is_local):
        does = "with scheduling.avoidSlowNodes, attempts prefer other Kubernetes nodes than one slow in two attempts"
    known = "; ".join(f"{each.node_name}: attempt {each.attempt}, rank {each.rank}" for each in seen)
    return text, does, [case.of_job("status.slowNodes", known)] if known else []


def _slow(case: Case, progress: Progress) -> Explanation | None:
    """Explain a training whose steps take much longer than before in the same attempt."""
    rate, first, beat = _number(progress.steps_per_second), case.attempt.first_step_time, progress.last_heartbeat_time
    if not rate or first is None or beat is None or progress.step is None or progress.phase not in (None, "train"):
        return None
    resumed = case.status.checkpoint.resumed_from_step if case.status.checkpoint else None
    if resumed is None and case.attempt.number > 1:
        return None  # a script does not report the step from which it goes on, so the usual speed is unknown
    resumed = resumed or 0
    seconds = seconds_between(first, parse_time(beat))
    if seconds < _LONG_ENOUGH or (progress.step - resumed) / seconds < _SLOWER * rate:
        return None
    usual = (progress.step - resumed) / seconds
    return case.verdict(
        "Slow",
        "StepsSlower",
        f"{case.name} makes {rate:.3g} steps/s, {usual / rate:.1f} times slower than in this attempt so far",
        [
            case.of_job("status.progress.stepsPerSecond", progress.steps_per_second),
            case.of_job("status.progress.step", f"{progress.step} in {int(seconds)} s since the first: {usual:.3g}/s"),
        ],
        confidence="Medium",
        hint="another process uses the processors or GPUs of a node, the data come slower, or a node throttles",
        next=case.logs_command(),
        step=progress.step,
    )


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None
