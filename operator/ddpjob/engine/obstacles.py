"""What keeps an attempt from running, or its progress from being known: reasons and messages for conditions and events.

An obstacle that has to last before it is shown has a wait; ``waits`` returns those that are left.
"""

from collections.abc import Iterable, Iterator
from math import isfinite

from ddpjob.api import names
from ddpjob.api.pod_view import PodView
from ddpjob.api.status import RUNNING, Furthest
from ddpjob.api.times import seconds_between
from ddpjob.engine.actions import Obstacle
from ddpjob.engine.advice import BY_ADMINISTRATOR, DESCRIBE_NODE
from ddpjob.engine.attempt import seconds_running, whole_second_after
from ddpjob.engine.failures import REPLICAS_DIVERGED
from ddpjob.engine.progress import LOSSES_TO_REPORT, loss_status
from ddpjob.engine.scheduling import adapters as scheduling
from ddpjob.engine.scheduling import gangs, guard
from ddpjob.engine.state import JobState

PROGRESS_UNKNOWN = "ProgressUnknown"
"""All nodes run, and rank 0 cannot be asked for its progress."""
TRAINING_STALLED = "TrainingStalled"
"""All nodes run, and the launcher reports that their ranks make no steps; nothing follows from it."""
TRAINING_SLOW = "TrainingSlow"
"""All nodes run, and the launcher reports for which rank the others wait in each step; also of an avoided node."""
"""All nodes run, and their launchers report that the ranks do not have the same parameters; nothing follows from it."""
LOSS_NOT_FINITE = "LossNotFinite"
"""All nodes run, and the loss in several reports is NaN or infinite; nothing follows from it."""
NODE_NOT_RESPONDING = "NodeNotResponding"
"""All nodes run as far as is known, and the Kubernetes node of some of them sends no heartbeats; nothing follows."""
NO_PROGRESS = "RestartsWithoutProgress"
"""All nodes run, and the last restarts got the job no further; nothing follows from it."""
RESTARTS_WITHOUT_PROGRESS = 3
GATED = "AdmissionGated"
"""Kueue keeps pods of the job from the scheduler, because it manages all pods of their namespace."""
FORMER_PODS = "FormerPodsRun"
EARLIER_PODS = "EarlierPodsRun"
"""The next attempt waits for pods of an earlier one, which may still write."""
_NOT_DELETED = "and nothing has deleted it"
SHARED = "VolumeShared"
"""All nodes run, and another job that saves in the same directory runs, too; nothing follows from it."""
CONTAINER_CREATING = "ContainerCreating"
_SLOWER_DEVICE = "compare its node with the others: another program, a GPU that is hot or limited, a slower processor"
SLOW_ADVICE = {
    "data": "use more workers of the DataLoader, or faster storage; look whether its samples are larger",
    "forward": _SLOWER_DEVICE,
    "backward": _SLOWER_DEVICE,
    "optimizer": _SLOWER_DEVICE,
    "communication": "look at the communication hook of the script",
    "collection": "call gc.freeze() after the start, or keep fewer objects",
    "throttled": "raise the CPU limit of the container (spec.resources)",
    "queue": "request as many CPUs as the rank uses, so that other pods do not take them",
    "script": "look at what only this rank does between steps, such as logs, evaluation and saves",
}
_DIVERGED_ADVICE = {
    "noSync": "leave no_sync before the last backward pass of each step",
    "gradients": "call the DistributedDataParallel object, not the module that it wraps",
    "settings": "set learning rate and other settings from the same values on all ranks, also after a resume",
    "outside": "put the parameter into the module that DistributedDataParallel wraps, or exchange its gradient",
    "seed": "change parameters, or load them, on all ranks in the same way, or before DistributedDataParallel is made",
    "optimizer": "load weights and the optimizer's state on all ranks alike; draw random numbers from one seed",
    "memory": "look whether only this rank's code writes to the tensor; else test the memory of its machine",
}
NOT_FINITE_NEXT = "continue from a checkpoint before it, with a lower learning rate"
DIVERGED_NEXT = "the model of each rank is another from that step on: continue from a checkpoint before it"
UNKNOWN_SECONDS = 60.0
"""How long rank 0 may be silent: a trainer opens its port some time after its container has started."""
_PREPARATION_SECONDS = 10.0
_LAUNCHER_ADVICE = (
    "launcher: Injected needs the operator's launcher image: the administrator of the operator sets it (chart value "
    "operator.launcherImage), and spec.imagePullSecrets names the Secret with which to pull it"
)


def obstacles(s: JobState) -> Iterator[Obstacle]:
    """Yield everything that keeps the attempt from running, the most important first."""
    pods = s.current.values()
    if (found := earlier_pods(s)) is not None:
        yield found
    if (wait := admission_obstacle(s)) is not None:
        yield wait
    yield from ((problem.reason, problem.message) for problem in s.observed.problems)
    for pod in pods:
        if pod.waiting:
            todo = f"; {_LAUNCHER_ADVICE}" if pod.waiting_init == names.LAUNCHER else ""
            yield pod.waiting[0], f"{pod.where}: {pod.waiting_text}{todo}"
    yield from _not_placed(s, pods)
    for pod in pods:
        if (left := _seconds_to_prepare(s, pod)) is not None and left <= 0:
            what = "its volumes or its network are" if pod.prepared is False else "its containers are"
            reason = "PodNotPrepared" if pod.prepared is False else CONTAINER_CREATING
            yield reason, f"{pod.where}: {what} not ready: kubectl describe pod {pod.name} -n {s.job.namespace}"


def earlier_pods(s: JobState) -> Obstacle | None:
    """Return which pod the next attempt waits for, where it is and until when; None if it waits for none, or not long.

    Most pods end within a second, and their end needs no status of its own.
    """
    if not s.stopping or _seconds_to_earlier_pods(s) > 0:
        return None
    left, pod = s.stopping[0]
    more = f" and {len(s.stopping) - 1} more" if len(s.stopping) > 1 else ""
    until = f"at the latest at {whole_second_after(s.now, left)}" if isfinite(left) else _NOT_DELETED
    if s.attempt.number:
        text = f"pod {pod.name} of attempt {pod.attempt} on Kubernetes node {pod.node_name}{more} may still write"
        return EARLIER_PODS, f"{text}: the next attempt waits for its end, {until}"
    text = f"pod {pod.name} of another job on Kubernetes node {pod.node_name}{more} may still save where this job reads"
    todo = "" if pod.deleting else f": kubectl delete pod -n {s.job.namespace} -l {names.LABEL_JOB_UID}={pod.job_uid}"
    return FORMER_PODS, f"{text}: the first attempt waits for its end, {until}{todo}"


def ending_command(message: str) -> str | None:
    """Return the command that ends the pods in a message of ``earlier_pods``, perhaps ""; None if they have a limit."""
    _, is_found, command = message.partition(_NOT_DELETED)
    return command.removeprefix(": ") if is_found else None


def _seconds_to_earlier_pods(s: JobState) -> float:
    ending = s.attempt.ending
    return _PREPARATION_SECONDS - seconds_between(ending.since, s.now) if ending is not None else 0.0


def shared_volume(s: JobState) -> Obstacle | None:
    """Return that another job saves in the same directory; None if none does."""
    if not s.observed.sharing:
        return None
    text = f"the job {s.observed.sharing[0]} saves in the same directory of the claim {s.job.claim}, and the two may"
    return SHARED, f"{text} overwrite each other's checkpoints: give each its own checkpoint.subPath"


def admission_obstacle(s: JobState) -> Obstacle | None:
    """Return why no attempt starts although its time has come; None if it may start, or if one runs."""
    if not s.attempt.is_closed or s.job.spec.suspend:
        return None
    return scheduling.wait(s)


def scheduling_obstacle(s: JobState) -> Obstacle | None:
    """Return why not all pods of the attempt have a Kubernetes node; None if they have."""
    ranks = [node_rank for node_rank in s.job.node_ranks if node_rank not in s.succeeded_nodes]
    without = [r for r in ranks if not (r in s.current and s.current[r].node_name)]
    if not without:
        return None
    text = f"{len(without)} of {s.job.nodes} pods have no Kubernetes node yet"
    return next(iter(_not_placed(s, (s.current[r] for r in without if r in s.current))), ("WaitingForScheduler", text))


def silence(s: JobState) -> Obstacle | None:
    """Return why rank 0's progress is unknown while all nodes run; None if it is known, or not expected."""
    if (wait := _seconds_to_silence(s)) is None or wait > 0:
        return None
    refuses = s.observed.progress.problem == "unreachable"
    what = "does not answer" if refuses else "answers, but this is no progress report"
    effect = "progress is unknown"
    if s.job.spec.progress_deadline_seconds is not None:
        effect += " and progressDeadlineSeconds does not pass"
    port = f"port {s.job.spec.rendezvous.progress_port} of {s.current[0].name}"
    todo = f"allow connections from the operator in NetworkPolicies, and look at the log: {s.logs_command()}"
    return PROGRESS_UNKNOWN, f"{effect}, because {port} {what}: {todo}"


def unresponsive(s: JobState) -> Obstacle | None:
    """Return which Kubernetes node of the attempt sends no heartbeats, and since when; None if all do.

    The control plane deletes its pods after some minutes, which restarts the job: but not pods that tolerate it, and
    none while most nodes of a zone are silent. Such a job may train, or hang without end.
    """
    silent = sorted((pod.unready_since, pod.node_rank) for pod in s.current.values() if pod.unready_since is not None)
    if not silent:
        return None
    since, pod = silent[0][0] or "an unknown time", s.current[silent[0][1]]
    more = f", like those of {len(silent) - 1} other pods" if len(silent) > 1 else ""
    node = f"Kubernetes node {pod.node_name} of {pod.where}"
    todo = for_silent_node(pod.node_name or "NODE")
    return NODE_NOT_RESPONDING, f"{node} has not responded since {since}{more}: {todo}"


def for_silent_node(name: str) -> str:
    """Return what to do about a Kubernetes node that sends no heartbeats."""
    text = f"{DESCRIBE_NODE}; if the machine is off, {BY_ADMINISTRATOR}kubectl delete node {{node}}"
    return f"{text.format(node=name)}, and the job restarts without it"


def stall(s: JobState) -> Obstacle | None:
    """Return the stall that the launcher of node 0 reports in its last answer; None if it reports none."""
    reported = s.answer.stall if s.answer is not None else None
    if reported is None:
        return None
    return TRAINING_STALLED, f"{reported.message or 'stalled'}; the stacks of all ranks: {s.logs_command()}"


def slow(s: JobState) -> Obstacle | None:
    """Return the slow rank that the launcher of node 0 reports in its last answer; None if it reports none."""
    if (reported := s.slow) is None:
        return None
    return TRAINING_SLOW, f"{reported.message or 'slow'}: {slow_advice(reported.part)}"


def slow_advice(part: str | None) -> str:
    """Return what to do about a rank that takes longer in this part of its steps."""
    return SLOW_ADVICE.get(part or "", "compare its node with the others")


def diverged(s: JobState) -> Obstacle | None:
    """Return which parameters differ between the ranks, by the last answer of node 0's launcher; None if none do."""
    if (reported := s.diverged) is None:
        return None
    return REPLICAS_DIVERGED, f"{reported.message or 'replicas diverged'}: {diverged_advice(reported.cause)}"


def diverged_advice(cause: str | None) -> str:
    """Return what to do about parameters that differ for this reason."""
    return "; ".join(filter(None, (_DIVERGED_ADVICE.get(cause or ""), DIVERGED_NEXT)))


def loss_not_finite(s: JobState) -> Obstacle | None:
    """Return that the loss is not finite in several reports; None if it is, or is not known to be."""
    found = loss_status(s.report, s.before, s.now)
    if found is None or found.reports < LOSSES_TO_REPORT:
        return None
    return LOSS_NOT_FINITE, f"the reported loss is not finite since step {found.step}: {NOT_FINITE_NEXT}"


def fruitless(reached: Furthest | None, logs_command: str) -> Obstacle | None:
    """Return that the last restarts got the job no further; None if they did, or there were few.

    Args:
        reached: ``status.furthest``.
    """
    restarts = (reached.restarts_since if reached else None) or 0
    if reached is None or restarts < RESTARTS_WITHOUT_PROGRESS:
        return None
    if reached.checkpoint_step is not None:
        what = f"and no checkpoint after step {reached.checkpoint_step}"
        todo = "save checkpoints more often than the job fails"
    else:
        what = f"and no step after {reached.step or 0}, and the trainer reports no checkpoints"
        todo = "save and load checkpoints, and report them"
    return NO_PROGRESS, f"{restarts} restarts {what}: {todo}, and look for the cause of the failures: {logs_command}"


def waits(s: JobState) -> list[float | None]:
    """Return the seconds after which further obstacles are shown; None for never."""
    earlier = _seconds_to_earlier_pods(s) if s.stopping else None
    return [*(_seconds_to_prepare(s, pod) for pod in s.current.values()), _seconds_to_silence(s), earlier]


def _not_placed(s: JobState, pods: Iterable[PodView]) -> list[Obstacle]:
    """Return why pods have no Kubernetes node, first what follows if only some of the attempt have one."""
    found = [] if (of_gang := gangs.obstacle(s)) is None else [of_gang]
    if gated := next((pod for pod in s.current.values() if pod.gated and not (pod.ended or pod.deleting)), None):
        text = (
            f"{gated.where} has the scheduling gate {names.QUEUE_GATE}: Kueue manages the pods of this namespace. "
            "The administrator of Kueue adds DDPJob.v1alpha1.ddpjob.dev to integrations.externalFrameworks, and "
            f"the job gets its queue by the label {names.LABEL_QUEUE}"
        )
        found.append((GATED, text))
    found += [("Unschedulable", f"{pod.where}: {pod.unschedulable}") for pod in pods if pod.unschedulable is not None]
    partial = guard.obstacle(s, found[0][1] if found else "")
    return found if partial is None else [partial, *found]


def _seconds_to_prepare(s: JobState, pod: PodView) -> float | None:
    """Return after how many seconds a pod that does not start is an obstacle; None unless it is starting."""
    if pod.state != "pending" or pod.start_time is None or pod.waiting or pod.deleting:
        return None
    return _PREPARATION_SECONDS - seconds_between(pod.start_time, s.now)


def _seconds_to_silence(s: JobState) -> float | None:
    """Return after how many seconds rank 0's silence is shown; None if it reports, or is not expected to.

    Many programs do not report. A report is expected if a deadline of the progress is set, and from a trainer that has
    reported before.
    """
    attempt, limit = s.attempt, s.job.spec.progress_deadline_seconds
    is_expected = limit is not None or s.answer is not None or attempt.first_step_time is not None
    pod = s.current.get(0)
    is_asked = attempt.phase == RUNNING and pod is not None and pod.state == "running"
    if s.observed.progress.problem is None or attempt.all_running_time is None or not (is_expected and is_asked):
        return None
    return UNKNOWN_SECONDS - seconds_running(attempt, s.now)
