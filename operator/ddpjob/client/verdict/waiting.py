"""The verdict on an attempt whose pods do not all run: the first of what its pods show, or that it starts."""

from ddpjob.api.status import Condition
from ddpjob.client.verdict.explanation import Explanation, Stage
from ddpjob.client.verdict.facts import Case
from ddpjob.client.verdict.images import image_advice
from ddpjob.client.verdict.kubelet import not_prepared, not_started
from ddpjob.client.verdict.placement import gated, gates, is_unseen, no_scheduler, partly_placed, unschedulable
from ddpjob.client.verdict.scheduler import meaning
from ddpjob.engine.advice import OF_CONTAINERS, advice
from ddpjob.engine.evidence import NO_IMAGE, NO_START
from ddpjob.engine.obstacles import CONTAINER_CREATING, EARLIER_PODS, FORMER_PODS, ending_command, obstacles
from ddpjob.engine.scheduling import guard

_NOT_PREPARED = frozenset({"PodNotPrepared", CONTAINER_CREATING})


def waiting(case: Case) -> Explanation | None:
    """Explain why not all nodes run; None if they do, or have ended."""
    if not _waits(case):
        return None
    running = case.condition("Running")
    if running is not None and running.reason in (FORMER_PODS, EARLIER_PODS):
        return _held(case, running)
    if case.attempt.is_closed:
        return _starting(case, "")
    if running is not None and running.reason == guard.PARTIAL:
        return partly_placed(case, running)
    pods = [pod for pod in case.current if pod.state == "pending"]
    found = next(obstacles(case.state), None) if case.state is not None and case.facts.pods is not None else None
    # In the order of the engine's obstacles, so that the condition and the verdict name the same pod.
    for applies, explained in (
        (lambda pod: pod.waiting is not None, not_started),
        (lambda pod: pod.unschedulable is not None, unschedulable),
        (lambda pod: bool(gates(case, pod)), gated),
        (lambda pod: is_unseen(case, pod), no_scheduler),
    ):
        if (pod := next(filter(applies, pods), None)) is not None:
            return explained(case, pod)
    if found is not None and found[0] in _NOT_PREPARED:
        return not_prepared(case, pods, *found)
    return _starting(case, found[1] if found else "")


def _held(case: Case, running: Condition) -> Explanation:
    """Explain a job that waits for pods that may still write where its next attempt reads."""
    command = ending_command(running.message)
    return case.verdict(
        "Starting",
        running.reason,
        f"{case.name} waits: {running.message}",
        [case.of_condition(running)],
        is_abnormal=command is not None,
        next=f"ddpjob why {case.name}, again later" if command is None else command,
    )


def _waits(case: Case) -> bool:
    if any(pod.state == "pending" for pod in case.current):
        return True
    running = case.condition("Running")
    return running is None or running.status != "True"


def _starting(case: Case, message: str) -> Explanation:
    """Explain pods that start without an obstacle, or of which nothing but the condition is known."""
    running = case.condition("Running")
    quoted = case.of_condition(running) if running is not None else None
    if case.facts.pods is None and running is not None:
        return _from_condition(case, running.reason, running.message)
    if case.running_nodes and case.missing_nodes:
        ranks = ", ".join(map(str, case.missing_nodes[:8]))
        sentence = f"{case.running_nodes} of {case.num_nodes} nodes of {case.name} run and wait for node_rank {ranks}"
        return case.verdict(
            "Rendezvous", "NodesMissing", sentence, [quoted], is_abnormal=False,
            missing_nodes=case.missing_nodes, confidence="Medium",
            next=f"ddpjob why {case.name}, again in a minute",
        )  # fmt: skip
    reason = running.reason if running is not None and running.status != "True" else "Starting"
    text = message or (running.message if running is not None else "") or "its nodes are starting"
    return case.verdict("Starting", reason, f"{case.name} starts: {text}", [quoted])


def _from_condition(case: Case, reason: str, message: str) -> Explanation:
    """Explain with the operator's own words, without the pods."""
    stage: Stage = "Starting"
    found: tuple[str, str] | None = None
    if reason == "Unschedulable":
        meant = meaning(message)
        stage, reason = ("Volume" if meant.reason == "Volume" else "Placement"), meant.reason
        found = meant.advice(case.namespace)
    elif reason in NO_IMAGE:
        stage = "Image"
        found = image_advice(message, str(case.spec.get("image") or ""))[:2]
    elif reason in NO_START:
        stage = "Configuration"
        found = (advice(f"{reason}: {message}", OF_CONTAINERS) or ("", ""))[0], ""
    running, (hint, todo) = case.condition("Running"), found or ("", "")
    return case.verdict(
        stage,
        reason,
        f"{case.name} waits: {message}",
        [case.of_condition(running) if running is not None else None],
        advice=(hint, todo or f"kubectl describe ddp {case.name} -n {case.namespace}"),
        needs=["pods"],
    )
