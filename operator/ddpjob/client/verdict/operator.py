"""Whether the operator of a job works: its Deployment where the user may read it, else what is overdue in the job."""

from collections.abc import Iterator
from typing import Any, Literal

from ddpjob.api import names
from ddpjob.api.objects import Json
from ddpjob.api.times import parse_time
from ddpjob.client.verdict.explanation import Evidence, Explanation
from ddpjob.client.verdict.facts import LOWER_CONFIDENCE, NO_HEARTBEAT, OF_A_RUN, OVERDUE_SECONDS, Case
from ddpjob.engine.advice import BY_ADMINISTRATOR
from ddpjob.engine.attempt import SUSPENDED

_NAMESPACES = "DDPJOB_OPERATOR_NAMESPACES"
_CONCLUDED = frozenset(
    {"Crash", "Hang", "Disruption", "Image", "Volume", "Placement", "Quota", "Configuration", "Refused", "Suspended"}
)
"""Stages that the pods show by themselves; a start of the operator does not change them."""
_REPORTED = frozenset({"Rendezvous", "FirstStep", "Running", "Slow", "Hang"})
"""Stages that rest on the report of the training in the status."""
_REPORT_SECONDS = 30.0
"""An operator that works asks each 10 s. A report has the same time until one of its values changes."""
_OF_AN_OPERATOR = "pods that run train on; the operator continues from the recorded status when it runs again"


def operator_of(case: Case) -> tuple[Literal["Alive", "Down", "Unknown"], Evidence | None]:
    """Return whether a process acts on the job, and the Deployment that shows it."""
    if case.facts.is_run is not None:
        return "Alive" if case.facts.is_run else "Down", None
    serving = [found for found in case.facts.operators or () if serves(found, case.namespace)]
    if ready := next((found for found in serving if (found.get("status") or {}).get("readyReplicas")), None):
        return "Alive", _deployment(ready)
    return ("Down", _deployment(serving[0])) if serving else ("Unknown", None)


def serves(deployment: Json, namespace: str) -> bool:
    """Return whether an operator is configured to serve a namespace."""
    containers = deployment["spec"]["template"]["spec"].get("containers") or ()
    given = [env.get("value") or "" for c in containers for env in c.get("env") or () if env.get("name") == _NAMESPACES]
    return not any(given) or any(namespace in value.split(",") for value in given)


def _deployment(found: Json) -> Evidence:
    meta = found["metadata"]
    ready, wanted = (found.get("status") or {}).get("readyReplicas", 0), found["spec"].get("replicas", 1)
    value = f"{ready} of {wanted} replicas"
    return Evidence(
        kind="Deployment", name=f"{meta['namespace']}/{meta['name']}", field="status.readyReplicas", value=value
    )


def with_operator(case: Case, found: Explanation) -> Explanation:
    """Return the verdict on an unfinished job with the state of its operator.

    The sentence says that the operator is down. It is the verdict itself, unless the pods show another one.
    """
    seen, deployment = operator_of(case)
    is_down = seen == "Down"
    overdue = [] if is_down else list(_overdue(case))
    if not (is_down or overdue or found.stage == "OperatorDown"):
        return _with_age(case, found.model_copy(update={"operator": seen}))
    quoted = [*overdue, *([deployment] if deployment is not None else [])]
    state = "Alive" if seen == "Alive" else "Down"
    known: dict[str, Any] = {"operator": state, "is_abnormal": True}
    if found.stage == "OperatorDown" and not is_down:
        return found.model_copy(update=known)
    who = f"the process that runs {case.name}" if case.is_local else "the operator"
    what = f"{who} is down" if state == "Down" else f"{who} has not acted on the job for some time"
    text = f"{what}, so nothing is started, stopped or restarted"
    hint, todo = OF_A_RUN if case.is_local else (_OF_AN_OPERATOR, _next(deployment))
    if found.stage in _CONCLUDED and found.reason != NO_HEARTBEAT:  # else the operator only has not asked
        quotes = [*found.evidence, *quoted]
        return found.model_copy(update=known | {"sentence": f"{found.sentence}; {text}", "evidence": quotes})
    unread = [case.facts.unread["operator"]] if overdue and "operator" in case.facts.unread else []
    known |= {
        "stage": "OperatorDown",
        "reason": "NotReady" if is_down else "NotReconciled",
        "sentence": f"{text}; {found.sentence}",
        "evidence": [*quoted, *found.evidence],
        "confidence": "High" if is_down else "Low" if unread else "Medium",
        "unread": [*found.unread, *unread],
        "hint": hint,
        "next": todo,
    }
    return found.model_copy(update=known)


def _with_age(case: Case, found: Explanation) -> Explanation:
    """Return a verdict that rests on the last report, with its age if no operator is known to ask for the next one."""
    progress = case.status.progress
    beat = progress.last_heartbeat_time if progress is not None else None
    if found.operator == "Alive" or found.stage not in _REPORTED or found.reason == NO_HEARTBEAT or beat is None:
        return found
    age = case.seconds_since(beat)
    if age < _REPORT_SECONDS or parse_time(beat) < parse_time(case.attempt.start_time):
        return found
    text = f"the last report is {int(age)} s old, and no operator is known to ask for the next one"
    return found.model_copy(
        update={"sentence": f"{found.sentence}; {text}", "confidence": LOWER_CONFIDENCE[found.confidence]}
    )


def _next(deployment: Evidence | None) -> str:
    if deployment is None:
        return f"{BY_ADMINISTRATOR}kubectl get deployments -A -l {names.OPERATOR_SELECTOR}"
    namespace, _, name = deployment.name.partition("/")
    return f"{BY_ADMINISTRATOR}kubectl logs deployment/{name} -n {namespace}, and kubectl describe deployment {name}"


def _overdue(case: Case) -> Iterator[Evidence]:
    """Yield what an operator that works would have changed long ago."""
    meta, status = case.meta, case.status
    generation = int(meta.get("generation") or 0)
    if status.observed_generation is not None and status.observed_generation < generation:
        changed = _spec_changed(case)
        if changed and case.seconds_since(changed) > OVERDUE_SECONDS:
            text = f"{status.observed_generation}, but metadata.generation is {generation} since {changed}"
            yield case.of_job("status.observedGeneration", text)
    attempt = case.attempt
    end = attempt.ending if not status.is_true("Stalled") else None  # then the job waits for its user
    if end is not None and attempt.verdict != SUSPENDED and not case.spec.get("suspend"):
        until = max(filter(None, (end.until, end.drain_until)), default=None)
        if until is not None and not case.waits_for_pods and case.seconds_since(until) > OVERDUE_SECONDS:
            yield case.of_job("status.currentAttempt.ending.until", f"{until} has passed")
    if attempt.ending is None and not attempt.is_closed:
        for pod in case.current:
            if pod.state == "failed" and pod.finished_at and case.seconds_since(pod.finished_at) > OVERDUE_SECONDS:
                field = "status.containerStatuses[trainer].state.terminated.finishedAt"
                text = f"{pod.finished_at}, and the job's status does not say so"
                yield Evidence(kind="Pod", name=pod.name, field=field, value=text)
                return


def _spec_changed(case: Case) -> str | None:
    """Return when the spec was last written, which the API server records by manager."""
    fields = case.meta.get("managedFields") or ()
    times = [str(f.get("time")) for f in fields if not f.get("subresource") and "f:spec" in (f.get("fieldsV1") or {})]
    return max(times, default=None)
