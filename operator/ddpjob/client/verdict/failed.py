"""The verdict on an attempt or a job that failed: who failed, with which exception, and what follows."""

from collections.abc import Mapping
from typing import Any

from ddpjob.api.names import TRAINER_CONTAINER
from ddpjob.api.pod_view import PodView
from ddpjob.api.status import Failure
from ddpjob.api.times import timestamp
from ddpjob.client.verdict.explanation import Confidence, Evidence, Explanation, Stage
from ddpjob.client.verdict.facts import Case
from ddpjob.engine.attempt import SUSPENDED, waits
from ddpjob.engine.evidence import CONFIG_ERROR, INVALID_IMAGE, evidence_of, failed_pods, needs_log, root_cause
from ddpjob.engine.failures import COLLECTIVE_TIMEOUT, DIVERGED, PEER_LOST, Context
from ddpjob.engine.judgement import failure_record, judge
from ddpjob.engine.state import MAX_LOGS

_STAGES: Mapping[str, Stage] = {
    **dict.fromkeys(("NodeLost", "Preempted", "Drained", "NodeShutdown", "Evicted"), "Disruption"),
    **dict.fromkeys(("PodDeleted", "PodLost", "PodDeadlineExceeded", "Stopped", "Superseded"), "Disruption"),
    "ContainerStatusUnknown": "Disruption",
    **dict.fromkeys((CONFIG_ERROR, "StartError", "LauncherNotInjected", "UsageError"), "Configuration"),
    **dict.fromkeys(
        ("RanksImpossible", "Mismatch", "ConfigMismatch", "DataMismatch", "WeightsDiffer"), "Configuration"
    ),
    **dict.fromkeys(("RendezvousFailed", "DistStoreError", "DistNetworkError"), "Rendezvous"),
    **dict.fromkeys(("Hang", COLLECTIVE_TIMEOUT, "ProgressDeadlineExceeded", "CompletionDeadlineExceeded"), "Hang"),
    **dict.fromkeys(("DeadlineExceeded", "StartupDeadlineExceeded"), "Deadline"),
    INVALID_IMAGE: "Image",
    "VolumeUnwritable": "Volume",
}
"""By ``reason``; all others are crashes."""
_OF_DEADLINES: Mapping[str, tuple[str, str]] = {
    "DeadlineExceeded": (
        "the training takes longer than activeDeadlineSeconds allows, with all restarts",
        "increase activeDeadlineSeconds, or train fewer epochs, and create the job again; the checkpoints are kept",
    ),
    "StartupDeadlineExceeded": (
        "the obstacle in the message lasted longer than startupDeadlineSeconds allows",
        "remove the obstacle, or increase startupDeadlineSeconds, and create the job again",
    ),
}
"""Hint and next of the deadlines that end a job without a failure of a pod."""
_NO_REASON = "Error"
"""Reason of a failure of which only the exit code of the container is known."""


def logs_to_read(case: Case) -> list[str]:
    """Return the names of the failed pods whose logs say more than is known of them."""
    attempt, failure = _failed_attempt(case), case.last_failure
    pods = failed_pods(pod for pod in case.pods if pod.attempt == attempt)
    wanted = [pod.name for pod in pods if needs_log(pod)]
    if failure is not None and failure.attempt == attempt and failure.exception is not None:
        # With logTail: Omit, the text of the exception is in the log alone.
        is_omitted = case.spec.get("logTail") == "Omit"
        wanted = [pod.name for pod in pods if pod.name == failure.pod and pod.report is None and is_omitted]
    return wanted[:MAX_LOGS]


def _failed_attempt(case: Case) -> int:
    """Return the attempt whose failure is explained: the recorded one if it has failed, else the last that has."""
    if failed_pods(case.current) or case.last_failure is None:
        return case.attempt.number
    return case.last_failure.attempt


def finished(case: Case) -> Explanation | None:
    """Explain a job that has succeeded or failed."""
    found = case.condition("Finished")
    if found is None or found.status != "True":
        return None
    if case.status.is_true("Succeeded"):
        loss = case.diverged_loss
        return case.verdict(
            "Succeeded",
            found.reason,
            f"{case.name} succeeded: {found.message}{f'; its last loss is {loss.value}' if loss else ''}",
            [case.of_condition(found), loss],
            is_abnormal=loss is not None,
            hint=DIVERGED if loss else None,
        )
    failure = case.last_failure
    if failure is None or failure.action != "Fail":
        stage = _STAGES.get(found.reason, "Crash")
        return case.verdict(
            stage,
            found.reason,
            f"{case.name} failed: {found.message}",
            [case.of_condition(found), last_failure(case)],
            advice=_OF_DEADLINES.get(found.reason, ("", "correct the job, and create it again")),
        )
    return _failed(case, failure, f"{case.name} failed in attempt {failure.attempt}", case.of_condition(found))


def ending(case: Case) -> Explanation | None:
    """Explain an attempt that ends or has ended while the next one has not started."""
    attempt, failure = case.attempt, case.last_failure
    if attempt.is_settling:
        return _judged(case) or _settling(case)
    if not attempt.is_closed or not attempt.number or attempt.verdict == SUSPENDED:
        return None
    until = attempt.ending.until if attempt.ending and waits(attempt, case.facts.now) else None
    when = (
        f"attempt {attempt.number + 1} starts at {until}"
        if until
        else case.waits_for_pods or "the next attempt starts when all nodes have stopped"
    )
    if failure is None or failure.attempt != attempt.number:
        return case.verdict(
            "WaitingForRetry",
            attempt.verdict or "Ended",
            f"attempt {attempt.number} of {case.name} ended, and {when}: {attempt.message}",
            [case.of_job("status.currentAttempt.ending.verdict", attempt.verdict)],
            is_abnormal=False,
            until=until,
        )
    cause = _failed(case, failure, f"attempt {failure.attempt} of {case.name} failed", None)
    quoted = [] if until is None else [case.of_job("status.currentAttempt.ending.until", until)]
    return cause.model_copy(
        update={
            "stage": "WaitingForRetry",
            "sentence": f"{case.name} waits for a retry, and {when}: {cause.sentence}",
            "evidence": [*cause.evidence, *quoted],
            "until": until,
        }
    )


def _settling(case: Case) -> Explanation:
    """Explain a failure whose cause the operator looks for, without a pod that shows more."""
    quoted = case.of_job("status.currentAttempt.ending.message", case.attempt.message)
    return case.verdict(
        "Crash", "Failing", f"{case.name}: {case.attempt.message}", [quoted], confidence="Low", needs=["pods"],
        next=f"ddpjob why {case.name}, again in some seconds",
    )  # fmt: skip


def unrecorded(case: Case) -> Explanation | None:
    """Explain pods that failed, which the status does not say yet, or not at all while the operator is down."""
    return None if case.attempt.is_closed else _judged(case)


def _judged(case: Case) -> Explanation | None:
    """Explain the failed pods of the recorded attempt as the operator would, with what their logs say."""
    failed = [
        p for p in failed_pods(case.current) if p.ended and p.node_rank not in (case.status.succeeded_nodes or ())
    ]
    if not failed:
        return None
    failure = _record(case, root_cause(failed), case.status.failures or ())
    start = f"attempt {case.attempt.number} of {case.name} failed"
    return _failed(case, failure, start, None, is_recorded=False)


def _record(case: Case, pod: PodView, earlier: Any) -> Failure:
    logs = case.logs_command(pod.node_rank, pod.attempt)
    trained = case.status.has_trained
    is_proved = trained if case.state is None else case.state.is_proved
    context = Context(earlier, has_trained=trained, is_proved=is_proved, is_local=case.is_local)
    judgement = judge(evidence_of(pod), context, logs)
    now = timestamp(case.facts.now)
    return failure_record(pod.attempt, judgement, time=now, action=judgement.action, counted=True, with_log=True)


def _failed(case: Case, failure: Failure, start: str, end: Evidence | None, *, is_recorded: bool = True) -> Explanation:
    """Explain a failure, with what the logs of its pods say if the operator could not read them."""
    shown = _with_logs(case, failure) if is_recorded else failure
    source = _source(case, shown)
    stage = _stage(shown)
    needs = ["pods", "logs"] if shown.exception is None and stage == "Crash" else ()
    return case.verdict(
        stage,
        shown.reason,
        f"{start}: {_place_first(shown)}",
        [_recorded(case, failure) if is_recorded else None, *source, end],
        confidence=_confidence(shown),
        needs=needs,
        **shown.known,
    )


def _recorded(case: Case, failure: Failure) -> Evidence:
    last = len(case.status.failures or ()) - 1
    return case.of_job(f"status.failures[{last}].message", failure.message)


def _with_logs(case: Case, failure: Failure) -> Failure:
    """Return the failure as the logs show it; what the operator decided stays."""
    read = [pod for pod in case.pods if pod.attempt == failure.attempt and pod.name in case.facts.logs]
    failed = [pod for pod in failed_pods(case.pods) if pod.attempt == failure.attempt]
    if not read or not failed:
        return failure
    named = next((pod for pod in read if pod.name == failure.pod), None) if failure.exception is not None else None
    found = _record(case, named or root_cause(failed), (case.status.failures or ())[:-1])
    if found.exception is None and found.rank is None:
        return failure
    kept = {"action": failure.action, "counted": failure.counted, "time": failure.time}
    return found.changed(**kept)


def _source(case: Case, failure: Failure) -> list[Evidence]:
    """Return what of the pod that failed still shows it."""
    pod = next((pod for pod in case.pods if pod.name == failure.pod), None)
    if pod is None:
        return []
    field = f"status.containerStatuses[{TRAINER_CONTAINER}].state.terminated"
    quoted = []
    if pod.exit_code is not None:
        quoted.append(Evidence(kind="Pod", name=pod.name, field=f"{field}.exitCode", value=str(pod.exit_code)))
    if pod.disruption or (pod.evicted and pod.reason):
        quoted.append(Evidence(kind="Pod", name=pod.name, field="status.reason", value=pod.disruption or pod.reason))
    elif pod.reason not in ("", "Error", "Completed"):
        quoted.append(Evidence(kind="Pod", name=pod.name, field=f"{field}.reason", value=pod.reason))
    if pod.report is not None and pod.report.message:
        text = f"{pod.report.exception or pod.report.kind or 'Error'}: {pod.report.message}"
        quoted.append(Evidence(kind="Pod", name=pod.name, field=f"{field}.message", value=text))
    logged = pod.logged
    if logged is not None and (text := logged.exception or logged.last_line):
        message = f"{text}: {logged.message}" if logged.exception and logged.message else text
        quoted.append(Evidence(kind="Log", name=pod.name, field=logged.where or "", value=message))
    return quoted


def _stage(failure: Failure) -> Stage:
    known = _STAGES.get(failure.reason) or _STAGES.get(failure.exception or "")
    if known is None and failure.exit_code is None and failure.node_suspected:
        return "Placement"  # the kubelet refused the pod, for a reason that only it knows
    return known or "Crash"


def _confidence(failure: Failure) -> Confidence:
    """Return how sure a failure is: an exit code alone says who failed, but not why."""
    if failure.reason == PEER_LOST:
        return "Low"
    is_named = failure.exception is not None or failure.signal is not None or failure.reason != _NO_REASON
    return "High" if is_named else "Medium"


def last_failure(case: Case) -> Evidence | None:
    """Return the last failure as evidence, for an attempt that follows it."""
    failure = case.last_failure
    return _recorded(case, failure) if failure is not None else None


def _place_first(failure: Failure) -> str:
    """Return the message of a failure with the place in the user's code before the pod."""
    who, is_found, what = failure.message.partition(f", {failure.where}: ")
    return f"{failure.where}: {what} ({who})" if is_found else failure.message
