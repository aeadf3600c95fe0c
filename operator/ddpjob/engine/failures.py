"""What follows from a failure: one ordered table, from the facts of a failed node to a reason, a reaction and a hint.

The first row that matches applies. ``make generate`` prints the table as docs/reference/failures.md.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ddpjob.api import exit_codes, names
from ddpjob.api.report import Stall
from ddpjob.api.status import Failure
from ddpjob.engine.advice import (
    DESCRIBE_NODE,
    GPU_MEMORY,
    LESS_GPU_MEMORY,
    LESS_MEMORY,
    LESS_MEMORY_HERE,
    OF_CONTAINERS,
    ROWS,
    Row,
)
from ddpjob.engine.evidence import (
    CONFIG_ERROR,
    EXITED_EARLY,
    GPU_OUT_OF_MEMORY,
    INVALID_IMAGE,
    OOM_KILLED,
    START_SECONDS,
    PodEvidence,
)
from ddpjob.engine.raised import DEVICE_FAILED, has_failed_device, is_of_program, text_of

NOT_FINITE = "NotFinite"
"""Reason of a failure, and of a training that goes on, whose loss is NaN or infinite; also the trainer's."""
REPLICAS_DIVERGED = "ReplicasDiverged"
"""Reason of a failure, and of a training that goes on, whose ranks have different parameters; also the trainer's."""
DIVERGED = "the training diverged, or a device computed wrong values"
PEER_LOST = "PeerLost"  # also the trainer's
COMPLETION_EXCEEDED = "CompletionDeadlineExceeded"
COLLECTIVE_TIMEOUT = "CollectiveTimeout"
_OF_A_TIMEOUT = re.compile(r"Watchdog caught collective|Timed out waiting \d+ms for|failed to pass monitoredBarrier")

Before = Literal["lately", "long ago"] | None
"""Whether earlier failures suspect a Kubernetes node; long ago: the job has avoided it for an hour since the last."""
Action = Literal["Restart", "RestartOnce", "FailAtStart", "Fail"]
"""RestartOnce: a restart, but the job fails if an earlier failure since the last progress had the same reason.
FailAtStart: the job fails if it has never trained; if the row suspects the node, only if another pod of the attempt
shows the same, or the same node twice within an hour. Later a broken node or an absent Secret looks the same."""


@dataclass(frozen=True)
class Context:
    """What the job shows beside the facts of the failed node.

    earlier: ``status.failures``, newest last.
    repeated: reasons of earlier failures, with which RestartOnce is Fail.
    has_trained, is_proved: see ``JobState``.
    starts_elsewhere: a container that this Kubernetes node could not start, started on another one.
    fails_elsewhere: a pod of another Kubernetes node shows the same failure.
    node_failed_before: an earlier failure suspects the same Kubernetes node; see ``Before``.
    is_local: whether the advice is for local mode.
    """

    earlier: Sequence[Failure] = ()
    repeated: Collection[str] = frozenset()
    has_trained: bool = False
    is_proved: bool = False
    starts_elsewhere: bool = False
    fails_elsewhere: bool = False
    node_failed_before: Before = None
    is_local: bool = False


@dataclass(frozen=True)
class Judgement:
    """What follows from a failure: a row of the table, or that row with the facts of one failure.

    reason: for ``status.failures``. Empty in a row: the ``kind`` of the trainer's report, its exception, or the
        kubelet's reason.
    when: what is seen, for docs/reference/failures.md.
    counted: whether the restart counts towards restartPolicy.maxRestarts.
    planned: the trainers still run, so they save a checkpoint together before the attempt ends.
    provisional: the restart no longer counts if a Kubernetes node of the attempt is found lost within 120 s.
    node_suspected: the Kubernetes node may be the cause; after two such failures new attempts avoid it.
    hint, next: the usual cause and what to do, by default to look at the log, unless the trainer's report says more
        (``from_program``). In a row {logs} is the command that shows the log, {pod} and {node} are names.
    local: next in local mode, which has neither Kubernetes nodes nor images; empty if it is the same.
    texts: of errors, with their own hint and next, which go before those of the row; not where ``local`` applies.
    message, evidence, stall: of one failure; stall if a deadline of the operator ended the attempt, else evidence.
    """

    reason: str
    when: str = ""
    matches: Callable[[PodEvidence, Context], bool] = lambda evidence, context: False
    action: Action = "Restart"
    counted: bool = True
    planned: bool = False
    provisional: bool = False
    node_suspected: bool = False
    hint: str = ""
    next: str = "{logs}"
    from_program: tuple[str, ...] = ()
    local: str = ""
    texts: Sequence[Row] = ()
    message: str = ""
    evidence: PodEvidence | None = None
    stall: Stall | None = None

    @property
    def advice(self) -> dict[str, Any]:
        """Hint, next and whose words they are, as fields of ``FailureFacts``."""
        return {"hint": self.hint or None, "next": self.next or None, "from_program": list(self.from_program) or None}

    @property
    def is_free(self) -> bool:
        """Whether a restart counts towards no limit."""
        return self.planned and not self.counted


def _reports(code: int) -> Callable[[PodEvidence, Context], bool]:
    """Match an exit code in a report. In a container's status it means nothing: other programs use it otherwise."""
    return lambda e, _: e.report.code == code


def _repeats(e: PodEvidence, context: Context) -> bool:
    """Whether the program failed at the same place in the attempt before.

    Of a program that is proved, also at the same step. The last report of a program that reports each 100th step says
    nothing about that, and neither does step 0: before its first step a program only reads volumes and services.
    """
    before = context.earlier[-1] if context.earlier else None
    if before is None or not e.facts.where or not is_of_program(e):
        return False
    if (before.exception, before.where) != (e.facts.exception, e.facts.where):
        return False
    return not context.is_proved or (e.report.exact and bool(e.report.step) and e.report.step == before.step)


def _is_deterministic(e: PodEvidence, context: Context) -> bool:
    if not _repeats(e, context):
        return False
    nodes = {e.pod.node_name if e.pod else None, context.earlier[-1].node_name}
    return context.is_local or not context.is_proved or (None not in nodes and len(nodes) == 2)


DESCRIBE_POD = "kubectl describe pod {pod}"
_INSTALL_HERE = "local mode uses the programs of this machine: install it, or correct command and args"

TABLE: tuple[Judgement, ...] = (
    Judgement(
        "NodeLost",
        "the Kubernetes node does not respond or was removed (taint manager, pod garbage collection)",
        lambda e, _: e.node_lost,
        counted=False,
        node_suspected=True,
        hint="the Kubernetes node is down, unreachable or deleted",
        next=DESCRIBE_NODE,
    ),
    Judgement(
        "Preempted",
        "the scheduler preempted the pod for one of higher priority",
        lambda e, _: e.disruption == "PreemptionByScheduler",
        counted=False,
        planned=True,
        hint="pods with a higher priority needed the node",
        next="set template.spec.priorityClassName to a higher priority if the job must not be preempted",
    ),
    Judgement(
        "Drained",
        "the pod was evicted by the eviction API, for example by `kubectl drain`",
        lambda e, _: e.disruption == "EvictionByEvictionAPI",
        counted=False,
        planned=True,
        hint="a person or the cluster autoscaler drained the Kubernetes node",
        next="nothing; training continues from the checkpoint",
    ),
    Judgement(
        "NodeShutdown",
        "the kubelet ended the pod because its node shut down",
        lambda e, _: e.evicted and e.reason in ("Terminated", "NodeShutdown", "Shutdown"),
        counted=False,
        planned=True,
        hint="the Kubernetes node was shut down or rebooted",
        next="nothing; training continues from the checkpoint",
    ),
    Judgement(
        "Evicted",
        "the kubelet evicted the pod because its node ran out of memory, disk or process ids",
        lambda e, _: e.evicted and bool(e.disruption),
        counted=False,
        hint="other pods on the node use more than they request, or this job requests too little",
        next="set resources.requests to what the trainer uses",
    ),
    Judgement(
        "LimitExceeded",
        "the kubelet evicted the pod because it exceeded its own limit of ephemeral storage or of an emptyDir",
        lambda e, _: e.evicted and e.reason == "Evicted",
        action="RestartOnce",
        hint="the pod wrote more to its local disk than its limits allow",
        next="increase resources.limits.ephemeral-storage or the sizeLimit of the emptyDir, or write to a volume",
    ),
    Judgement(
        "PodDeadlineExceeded",
        "the kubelet ended the pod because `template.spec.activeDeadlineSeconds` has passed",
        lambda e, _: e.evicted and e.reason == "DeadlineExceeded",
        planned=True,
        hint="the deadline in the pod template applies to each attempt, and is shorter than the training",
        next="remove activeDeadlineSeconds from spec.template; spec.activeDeadlineSeconds limits the whole job",
    ),
    Judgement(
        "",
        "the kubelet refused the pod (UnexpectedAdmissionError, OutOfcpu, NodeAffinity, ...)",
        lambda e, _: e.evicted and e.exit_code is None,
        counted=False,
        node_suspected=True,
        hint="the Kubernetes node cannot run the pod although the scheduler chose it, for example a device is missing",
        next=DESCRIBE_NODE,
    ),
    Judgement(
        "PodDeleted",
        "a user or a controller deleted the pod before its trainer ended",
        lambda e, _: e.deleted,
        counted=False,
        planned=True,
        hint="a person or a controller deleted the pod",
        next="nothing; training continues from the checkpoint",
    ),
    Judgement(
        "PodLost",
        "the pod no longer exists",
        lambda e, _: e.pod is None,
        counted=False,
        hint="the pod was deleted with --force, or together with its Kubernetes node",
        next="nothing; training continues from the checkpoint",
    ),
    Judgement(
        "ContainerStatusUnknown",
        "the kubelet no longer found the container, for example after a restart of the container runtime",
        lambda e, _: e.reason == "ContainerStatusUnknown",
        counted=False,
        node_suspected=True,
        hint="the container runtime or the kubelet of the Kubernetes node was restarted",
        next=DESCRIBE_NODE,
    ),
    Judgement(
        OOM_KILLED,
        "a container or a rank exceeded the memory limit",
        lambda e, _: e.oom,
        action="RestartOnce",
        hint="the ranks need more memory than they may use, or they leak",
        next=LESS_MEMORY,
        local=LESS_MEMORY_HERE,
    ),
    Judgement(
        GPU_OUT_OF_MEMORY,
        "the trainer's report, or a traceback at the end of its log, says that a GPU had too little memory",
        lambda e, _: e.gpu_oom,
        action="RestartOnce",
        hint=GPU_MEMORY,
        next=f"{LESS_GPU_MEMORY}; ask an administrator to run nvidia-smi on node {{node}}, which shows other "
        "processes on the GPU",
        local=f"{LESS_GPU_MEMORY}; nvidia-smi shows other processes on the GPU",
    ),
    Judgement(
        INVALID_IMAGE,
        "the name of the trainer's image, or of an init container's, has not been valid for 10 s",
        lambda e, _: e.exit_code is None and e.reason == INVALID_IMAGE,
        action="FailAtStart",
        hint="the kubelet cannot parse the name of the image",
        next="correct spec.image (or the image in spec.template) and create the job again",
    ),
    Judgement(
        CONFIG_ERROR,
        "the trainer's container, or an init container, could not be configured for 60 s, for example because a Secret "
        "or ConfigMap does not exist",
        lambda e, _: e.exit_code is None and e.reason == CONFIG_ERROR,
        action="FailAtStart",
        texts=OF_CONTAINERS,
        hint="the kubelet cannot configure the container, for the reason in the message",
        next="correct env, envFrom, volumes or template, and create the job again; kubectl describe pod {pod}",
    ),
    Judgement(
        "LauncherNotInjected",
        "the init container of `launcher: Injected` failed",
        lambda e, _: e.pod is not None and e.exit_code is None and e.pod.failed_init == names.LAUNCHER,
        hint="the operator's launcher image is not the trainer image of its release, is for another architecture, or "
        "the node's disk is full",
        next=f"kubectl logs {{pod}} -c {names.LAUNCHER}; the operator's administrator sets the image (chart value "
        "operator.launcherImage)",
    ),
    Judgement(
        "StartError",
        "the runtime's error `exec format error`, also in the log after exit code 255 or 1",
        lambda e, _: e.report.code is None and e.is_wrong_format,
        action="FailAtStart",
        hint="the command is for another architecture than the machine, or is a script without #!",
        next="build the image for the architecture of the nodes, or select nodes with kubernetes.io/arch in "
        "template.spec.nodeSelector",
        local=_INSTALL_HERE,
    ),
    Judgement(
        "StartError",
        f"the runtime cannot start the command, or exit code 126 or 127 in the first {START_SECONDS} s and without a "
        "report: the command does not exist or cannot be executed",
        lambda e, _: e.report.code is None and e.not_started,
        action="FailAtStart",
        node_suspected=True,
        texts=ROWS,
        hint="the command is not installed, is not executable, or is for another architecture",
        next="correct command, args or image and create the job again; a shell in the image shows what it contains",
        local=_INSTALL_HERE,
    ),
    Judgement(
        "",
        "the trainer reports wrong settings (exit code 2)",
        _reports(exit_codes.USAGE),
        action="FailAtStart",
        hint="an argument, a DDPTRAIN_* variable or the configuration file is not valid",
        next="correct args or env and create the job again",
    ),
    Judgement(
        "",
        "the trainer reports that this machine cannot run the ranks or the backend (exit code 71)",
        _reports(exit_codes.RANKS),
        action="FailAtStart",
        node_suspected=True,
        hint="the node has fewer devices than processes, or its PyTorch lacks the backend",
        next="correct nprocPerNode, resources or image and create the job again",
        local="correct nprocPerNode or the installation of PyTorch, and run the job again",
    ),
    Judgement(
        "",
        "the trainer reports a checkpoint or data that do not match this run (exit code 78)",
        _reports(exit_codes.MISMATCH),
        action="FailAtStart",
        hint="the checkpoints were written with other settings or other data",
        next="use another checkpoint.subPath, or the settings of the run that wrote the checkpoints",
        local="--fresh removes the checkpoints, another --name keeps them",
    ),
    Judgement(
        "",
        "the trainer reports a loss that is not finite (exit code 79)",
        _reports(exit_codes.NOT_FINITE),
        action="RestartOnce",
        hint=DIVERGED,
        next="if it repeats, create the job again with a lower learning rate",
    ),
    Judgement(
        "",
        "the trainer reports that it obeyed SIGTERM (exit code 75)",
        _reports(exit_codes.STOPPED),
        counted=False,
        planned=True,
        hint="something sent SIGTERM to the trainer, for example a machine that shuts down",
        next="nothing; training continues from the checkpoint",
        local="run the job again to resume it",
    ),
    Judgement(
        "",
        "the trainer reports that a newer run writes to its checkpoint directory (exit code 80)",
        _reports(exit_codes.SUPERSEDED),
        counted=False,
        hint="two jobs use the same claim and subPath for their checkpoints",
        next="give each job its own checkpoint.subPath",
    ),
    Judgement(
        "",
        "the trainer reports that the parameters of one rank differ from those of the others, and that no mistake in "
        "the script explains it (`ReplicasDiverged`, with `onDivergence: Restart`)",
        lambda e, _: e.report.kind == REPLICAS_DIVERGED and e.report.rank is not None,
        node_suspected=True,
        hint="a bit of this rank's memory has changed, or only this rank's code differs",
        next="look for code that writes to the tensor on one rank; else ask an administrator to test the memory of "
        "node {node}",
        local="look for code that writes to the tensor on one rank; else test the memory of this machine",
    ),
    Judgement(
        "",
        "the same without a rank: a mistake in the script explains it, or no value has a majority",
        lambda e, _: e.report.kind == REPLICAS_DIVERGED,
        action="RestartOnce",
        hint="the likely cause in the message",
        next="correct the script, if it is the cause, and create the job again",
    ),
    Judgement(
        DEVICE_FAILED,
        "the trainer's report or its log says that a GPU or its driver failed, for example `CUDA error: uncorrectable "
        "ECC error`",
        lambda e, _: has_failed_device(e),
        node_suspected=True,
        hint="the GPU or its driver failed, or a kernel used memory that is not its own",
        next="{logs}; ask an administrator to look for Xid in dmesg of node {node}",
        local="look for Xid in dmesg; {logs}",
    ),
    Judgement(
        "DeterministicError",
        "the program raised the same exception at the same place as in the attempt before (`ValueError`, `KeyError`, "
        "`RuntimeError` and others of Python, whose text names no device, network or file). If the job has trained, "
        "also at the same step after 0, which the trainer has counted itself, and on another Kubernetes node",
        _is_deterministic,
        action="Fail",
        texts=ROWS,
        hint="the error follows from the code or the data, so another restart would end in the same way",
        next="{logs}; correct the code, and create the job again",
    ),
    Judgement(
        "",
        "the same, on the same Kubernetes node as before",
        _repeats,
        node_suspected=True,
        texts=ROWS,
        hint="the error follows from the code or the data, or the Kubernetes node computes wrong values",
    ),
    Judgement(
        EXITED_EARLY,
        "the trainer reports a rank that ended with exit code 0 before the training was finished, or a node lost a "
        "peer after another one had succeeded",
        lambda e, _: e.report.kind == EXITED_EARLY,
        provisional=True,
        hint="its script makes fewer steps than the others, or the program or a library called exit",
    ),
    Judgement(
        "",
        "the trainer reports a hang (exit code 76)",
        _reports(exit_codes.HANG),
        node_suspected=True,
        hint="a rank or the network stopped; the report names the collective and the ranks that are missing",
    ),
    Judgement(
        "",
        "the trainer reports data that are absent or damaged (exit code 66)",
        _reports(exit_codes.DATA),
        hint="the data are not where the program looks for them, or a download failed",
        next="look at spec.data and at --data-dir",
        local="look at --volume and at --data-dir",
    ),
    Judgement(
        "",
        "the trainer reports that ranks are missing at the rendezvous (exit code 69)",
        _reports(exit_codes.RENDEZVOUS),
        hint="a node started late or ended without a report, or the network does not connect it",
        next="look at NetworkPolicies and DNS, or increase rendezvous.timeoutSeconds",
        local="{logs}; or increase rendezvous.timeoutSeconds",
    ),
    Judgement(
        "",
        "the trainer reports a volume that it cannot write (exit code 73)",
        _reports(exit_codes.VOLUME),
        hint="the volume or the disk is full, read-only, or belongs to another user",
        next="increase the claim's size, or set podSecurity.fsGroup to the group that owns the volume",
        local="make room, or use another directory with --volume",
    ),
    Judgement(
        "",
        "the trainer reports a lost peer, or its log shows one, and no other pod shows a failure of its own",
        lambda e, _: e.whose == "peer",
        provisional=True,
        hint="another node, or the network to it, failed without a report",
    ),
    Judgement(
        COLLECTIVE_TIMEOUT,
        "the log says that a collective of NCCL or gloo timed out",
        lambda e, _: _OF_A_TIMEOUT.search(text_of(e)) is not None,
        provisional=True,
        hint="a rank did not take part in the collective: it hangs, ended without a message, or called another one",
        next="{logs}, and of the other nodes: look for the rank that did not wait; ddprun names it, with its stack",
    ),
    Judgement(
        "",
        "a signal ended the trainer (exit code 128 + n), or by torchrun's report one of its ranks",
        lambda e, _: e.signal is not None,
        provisional=True,
        node_suspected=True,
        texts=ROWS,
        hint="native code or another process ended the program with this signal",
    ),
    Judgement(
        "",
        "any other exit code",
        lambda e, _: e.exit_code is not None,
        texts=ROWS,
        hint="the program ended with an error",
    ),
    Judgement(
        "",
        "the pod failed without an exit code",
        lambda e, _: True,
        hint="the kubelet gave no exit code",
        next=DESCRIBE_POD,
    ),
)

OF_DEADLINES: Mapping[str, Judgement] = {
    row.reason: row
    for row in (
        Judgement(
            "StartupDeadlineExceeded",
            hint="loading data or the rendezvous takes longer than expected, or a rank hangs",
        ),
        Judgement(
            "ProgressDeadlineExceeded",
            hint="a rank, the data loader or the network stopped without an error",
        ),
        Judgement(
            COMPLETION_EXCEEDED,
            hint="a rank waits for peers that have ended, for example in a collective after the last step",
            next="end with torch.distributed.destroy_process_group() on every rank, or increase completionGraceSeconds",
        ),
    )
}
"""What follows from a deadline of the operator that ended an attempt, by its reason."""
