"""The judgement of one failure by the table of ``failures`` and the user's rules, and its record in the status."""

from collections.abc import Sequence
from dataclasses import replace
from signal import SIGKILL

from ddpjob.api import exit_codes
from ddpjob.api.failure import FailureFacts
from ddpjob.api.limits import MAX_LOG_TAIL, MAX_REASON
from ddpjob.api.log_failure import LogFailure
from ddpjob.api.report import EndReport, Stall
from ddpjob.api.restarts import RestartRule
from ddpjob.api.status import Failure
from ddpjob.api.text import attributed, shorten
from ddpjob.engine.advice import DESCRIBE_NODE, advice
from ddpjob.engine.evidence import OOM_KILLED, PodEvidence, signal_name
from ddpjob.engine.failures import (
    DESCRIBE_POD,
    OF_DEADLINES,
    PEER_LOST,
    TABLE,
    Context,
    Judgement,
)
from ddpjob.engine.raised import DEVICE_FAILED, text_of

_NO_REPORT = EndReport()
_MAX_MESSAGE = 2000
_MAX_LAST_LINE = 300


def judge(evidence: PodEvidence, context: Context, logs: str) -> Judgement:
    """Return what follows from these facts. logs: the command that shows the log of the node."""
    row = next(row for row in TABLE if row.matches(evidence, context))
    hint, todo = row.hint, (row.local if context.is_local else "") or row.next
    if row.texts and not (context.is_local and row.local):
        signal = signal_name(evidence.signal) if evidence.signal is not None else ""
        texts = (_error(evidence), signal)
        known = next((found for text in texts if (found := advice(text, row.texts, is_local=context.is_local))), None)
        hint, todo = known or (hint, todo)
    # The trainer names --checkpoint-dir, which is not the user's in local mode.
    reported = _NO_REPORT if context.is_local and evidence.report.code == exit_codes.MISMATCH else evidence.report
    reason, message = _reason_and_message(evidence, row)
    action, is_suspected, counted = row.action, row.node_suspected, row.counted
    if row.action == "FailAtStart" or row.reason == DEVICE_FAILED:
        # After an hour in which the job found no other node, this one says nothing new about the job.
        counted = not (context.node_failed_before == "long ago" and _may_be_of_node(row, evidence, context))
    if action == "RestartOnce" and reason in context.repeated:
        action = "Fail"
    elif action == "FailAtStart":
        is_first = context.node_failed_before != "lately" and _may_be_of_node(row, evidence, context)
        action = "Restart" if context.has_trained or context.starts_elsewhere or is_first else "Fail"
        is_suspected = action == "Restart" and not context.fails_elsewhere
        if action == "Restart" and not context.is_local:
            # The spec has worked before, or works on another node.
            cause, look = "a volume or service of all its nodes", DESCRIBE_POD
            if is_suspected:
                cause, look = "its Kubernetes node", DESCRIBE_NODE
            hint = f"{hint}; or a fault of {cause}"
            if context.has_trained or context.starts_elsewhere:  # else a wrong spec is more probable
                todo, reported = look, _NO_REPORT
    return replace(
        row,
        reason=reason,
        message=message,
        action=action,
        counted=counted,
        node_suspected=is_suspected,
        hint=reported.hint or hint,
        next=reported.next or _command(todo, logs, evidence),
        from_program=tuple(name for name in ("hint", "next") if getattr(reported, name)),
        evidence=evidence,
    )


def judge_deadline(reason: str, message: str, logs: str, stall: Stall | None) -> Judgement:
    """Return what follows from a deadline of the operator that ended an attempt. stall: what the launcher reported."""
    row = OF_DEADLINES[reason]
    text = f"{message}; {stall.message}" if stall is not None and stall.message else message
    return replace(row, message=text, next=row.next.format(logs=logs), stall=stall)


def overrule(judgement: Judgement, rules: Sequence[RestartRule]) -> Judgement:
    """Return the judgement with the action of the first rule that matches it, or unchanged if none does.

    A rule does not change how pods are stopped: after a planned loss they still save a checkpoint.
    """
    rule = next((rule for rule in rules if _matches(rule, judgement)), None)
    if rule is None:
        return judgement
    if rule.action == "Fail":
        return replace(judgement, action="Fail")
    counted = rule.action == "Restart"
    return replace(judgement, action="Restart", counted=counted, provisional=judgement.provisional and counted)


def _matches(rule: RestartRule, judgement: Judgement) -> bool:
    if rule.on_exit_codes is None:
        return judgement.reason in (rule.on_reasons or ())
    code = judgement.evidence.exit_code if judgement.evidence else None
    if not code:
        return False  # no exit code, for example of a deleted pod, or 0 after SIGTERM
    return (code in rule.on_exit_codes.values) == (rule.on_exit_codes.operator == "In")


def _error(e: PodEvidence) -> str:
    if e.facts.exception is not None:
        return f"{e.facts.exception}: {text_of(e)}"
    return text_of(e) or e.message or (e.logged.last_line if e.logged is not None else "")


def _may_be_of_node(row: Judgement, evidence: PodEvidence, context: Context) -> bool:
    """Return whether another Kubernetes node may start the job.

    A node without a driver ends pods at once, so it always has room: each new job of the cluster would fail there.
    """
    return row.node_suspected and not (context.is_local or context.fails_elsewhere or evidence.is_of_image)


def suspects_at_start(failure: Failure) -> bool:
    """Return whether the row of a failure suspects the Kubernetes node of a job that has never trained."""
    reported = PodEvidence(0, report=EndReport(code=failure.exit_code))
    rows = [row for row in TABLE if row.action == "FailAtStart" and row.node_suspected]
    return any(failure.reason == row.reason or row.matches(reported, Context()) for row in rows)


def failure_record(
    attempt: int, judgement: Judgement, *, time: str, action: str, counted: bool, with_log: bool
) -> Failure:
    """Return one entry of ``status.failures``.

    action: the reaction, Restart or Fail. counted: whether it is a restart that counts. with_log: see ``spec.logTail``.
    """
    evidence = judgement.evidence
    pod = evidence.pod if evidence else None
    facts = evidence.facts if evidence else FailureFacts.of(judgement.stall)
    return Failure(
        **facts.known | judgement.advice | {"attempt": attempt},
        reason=judgement.reason,
        message=shorten(_with_log_text(judgement) if with_log else judgement.message, _MAX_MESSAGE),
        log_tail=shorten(pod.log.strip(), MAX_LOG_TAIL) or None if pod and with_log else None,
        action=action,
        counted=counted,
        provisional=(judgement.provisional and counted) or None,
        node_suspected=(judgement.node_suspected and bool(pod and pod.node_name)) or None,
        time=time,
    )


def failure_text(failure: Failure) -> str:
    """Return the message of a failure followed by what to do next."""
    if failure.next is None:
        return failure.message
    return f"{failure.message}; next: {attributed('next', failure.next, failure.from_program)}"


def _with_log_text(judgement: Judgement) -> str:
    """Return the message with the text of the exception in the log, or else with the log's last line.

    Of the log of torchrun, the last line is the frame of its report: then with the last line of the program.
    """
    evidence = judgement.evidence
    pod = evidence.pod if evidence else None
    logged = evidence.logged if evidence else None
    if logged is not None and (logged.exception or logged.rank is not None):
        text = logged.message if logged.exception else logged.last_line
    else:
        lines = pod.log.split("\n") if pod else []
        text = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"{judgement.message}: {shorten(text, _MAX_LAST_LINE)}" if text else judgement.message


def _reason_and_message(e: PodEvidence, row: Judgement) -> tuple[str, str]:
    if e.pod is None:
        return "PodLost", f"the pod of node_rank {e.node_rank} is gone: it was deleted, or its node was removed"
    if e.deleted or e.node_lost:
        how = {
            "NodeLost": f"was on Kubernetes node {e.pod.node_name or '(unknown)'}, which is lost or does not respond",
            "Preempted": "was preempted by the scheduler",
            "Drained": "was evicted through the eviction API",
        }
        return row.reason or "PodDeleted", f"{e.where} {how.get(row.reason, 'was deleted while it trained')}"
    if e.report.message:
        return _reported(e, row)
    if e.oom:
        place = _place(rank=e.facts.rank if e.signal == SIGKILL else None)  # else perhaps another process was killed
        return OOM_KILLED, f"{e.where}{place} was killed because it exceeded its memory limit{_kubelet_message(e)}"
    if e.logged is not None and (e.logged.exception or e.logged.rank is not None):
        return _logged(e, e.logged, row)
    if e.signal is not None and not row.reason:
        why = f" ({e.reason})" if e.reason not in ("", "Error") else ""
        reason = e.reason if e.reason not in ("", "Error") else signal_name(e.signal)
        return camel_case(reason), f"{e.where} was ended by {signal_name(e.signal)}{why}{_kubelet_message(e)}"
    if e.exit_code is None:
        return row.reason or camel_case(e.reason or "PodFailed"), f"{e.where} failed{_kubelet_message(e)}"
    reason = row.reason or camel_case(e.reason or "Error")
    return reason, f"{e.where} ended with exit code {e.exit_code}{_kubelet_message(e)}"


def _reported(e: PodEvidence, row: Judgement) -> tuple[str, str]:
    exception = e.report.exception or e.report.kind or "Error"
    place = _place(rank=e.report.rank, step=e.report.step, where=e.report.where)
    reason = row.reason or e.report.kind or exception
    text = f"{exception}: {e.report.message}"
    if row.reason == "DeterministicError":
        text = f"{text.rstrip('.')}; the attempt before failed in the same way"
    return camel_case(reason), f"{e.where}{place}: {text}"


def _logged(e: PodEvidence, logged: LogFailure, row: Judgement) -> tuple[str, str]:
    """Return reason and message of a failure that only the log shows; the text of the log is added where it may be."""
    place = f"{e.where}{_place(rank=logged.rank, where=logged.where)}"
    if e.signal is not None and e.whose != "peer":
        raised = f": {logged.exception}" if logged.exception else ""
        return row.reason or signal_name(e.signal), f"{place} was ended by {signal_name(e.signal)}{raised}"
    if logged.exception is not None:
        reason = row.reason or (PEER_LOST if e.whose == "peer" else logged.exception)
        return camel_case(reason), f"{place}: {logged.exception}"
    code = e.exit_code if logged.exit_code is None else logged.exit_code
    return row.reason or camel_case(e.reason or "Error"), f"{place} ended with exit code {code}"


def _place(**details: object) -> str:
    return "".join(
        f", {value}" if key == "where" else f", {key} {value}" for key, value in details.items() if value is not None
    )


def _kubelet_message(e: PodEvidence) -> str:
    return f": {e.message.strip()}" if e.message.strip() else ""


def _command(text: str, logs: str, e: PodEvidence) -> str:
    pod, node = (e.pod.name, e.pod.node_name) if e.pod else (None, None)
    return text.format(logs=logs, pod=pod or "POD", node=node or "NODE", namespace="NAMESPACE")


def camel_case(reason: str) -> str:
    """Return ``reason`` as one CamelCase word, the format that the Kubernetes API conventions require."""
    parts = "".join(c if c.isalnum() else " " for c in reason).split()
    return "".join(part[:1].upper() + part[1:] for part in parts)[:MAX_REASON] or "Error"
