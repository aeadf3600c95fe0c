"""Generate docs/reference/failures.md from the engine's table of failures."""

from collections.abc import Iterator

from ddpjob.api.restarts import Backoff, RestartPolicy
from ddpjob.api.status import LONG_RUN_SECONDS
from ddpjob.engine.advice import ROWS
from ddpjob.engine.attempt import LATE_SECONDS, PROVISIONAL_SECONDS, SETTLE_SECONDS
from ddpjob.engine.failures import TABLE, Judgement
from ddpjob.engine.state import RUN_SECONDS, TRAINED_SECONDS
from ddpjob.engine.suspects import AVOID_SECONDS, UNSCHEDULABLE_SECONDS
from tests.install import verdicts

UNTRAINED, TRAINED = (RestartPolicy().limit(has_trained=has_trained) for has_trained in (False, True))
BACKOFF = Backoff().first_and_longest

HEAD = f"""\
# Failures and what follows from them

<!-- Generated from operator/ddpjob/engine/failures.py by `make generate`; do not edit. -->

When a pod of an attempt fails or is lost, the attempt ends: the operator waits until the cause is known, at most
{SETTLE_SECONDS} s ({LATE_SECONDS} s while pods only report that they lost a peer), finds the node
that failed first, and compares what it knows about it with this table from top to bottom. The first row that matches
applies. `restartPolicy.rules` precede the table. If the pod of that node has not
ended by then, the operator uses what another pod's report says of it (`root`, see [reports](reports.md)).

- **Restart**: a new attempt starts, from the last checkpoint. *Counts* means: towards `restartPolicy.maxRestarts`
  ([limits](#limits-and-delays)).
- **Restart once**: the job fails if a failure since the last progress had the same reason.
- **Fail**: the job fails, because a restart would end in the same way.
- **Fail at start**: the job fails if it has never trained. With *suspects the node* it restarts on other Kubernetes
  nodes, up to the {UNTRAINED} times of `maxRestarts`, unless pods of two nodes show the same in one attempt, the same
  node shows it twice within an hour, or the image does not contain the command: a node without a driver ends pods at
  once, so each new job of the cluster would fail there. A job has trained when an attempt made a step or saved a
  checkpoint, or if the program reports no steps, when all pods of an attempt ran for {TRAINED_SECONDS} s. Afterwards a
  restart follows that counts, and the Kubernetes node is suspected unless pods of another Kubernetes node show the
  same. This also follows before, where a container that did not start started on another node.
- **Saves first**: the trainers still run. All pods get SIGTERM, save a checkpoint together, and the next attempt starts
  when all have stopped, at the latest after their `terminationGracePeriodSeconds`. After any other end of an attempt
  the next one waits in the same way if both could
  [write the same volume](../tasks/write-a-job.md#two-attempts-never-write-at-the-same-time).
- **Provisional**: the restart no longer counts if a Kubernetes node of the attempt is found lost within
  {PROVISIONAL_SECONDS} s, because peers of a lost node report first. If no restart is left, the job waits for that time
  before it fails.
- **Suspects the node**: after two such failures on one Kubernetes node within {AVOID_SECONDS // 60} minutes, or one
  that fails at start, new attempts do not run on it for {AVOID_SECONDS // 60} minutes (`status.avoidNodes`), unless no
  other node fits for {UNSCHEDULABLE_SECONDS} s in which no pod of an earlier attempt uses one. If the scheduler says
  that other nodes are only full ("No preemption victims found"; before Kubernetes 1.32 also of nodes that are too
  small), the job waits until the time has passed. Then the same failure to start, or of a GPU, on the same node does
  not count. With `scheduling.avoidSlowNodes`, other nodes are preferred to
  [slow ones](../tasks/scripts.md#slow-ranks).

A reason in *italics* comes from the trainer's report (its `kind`), from the exception, or from the kubelet. The usual
cause and the next step are in `status.failures` and in `ddpjob why`. For an exception, a signal or a start that failed
they depend on the text of the error where it is known: a library that the image lacks, a full volume, credentials, a
driver that is too old and {len(ROWS) - 4} others.

## Limits and delays

Progress is a step or checkpoint that is later than all before, as the trainer reports them. For a program that reports
neither, and for a script that reports no step itself, it is an attempt that ran with all pods for {RUN_SECONDS} s, or
for *restart once* and `maxTotalRestarts` for {LONG_RUN_SECONDS} s.

- `maxRestarts`: failures that count by the table, since the last progress. Default: {TRAINED}, but {UNTRAINED} until
  the job has trained, unless the error names a storage, network or service, which may be away when a job begins. In
  [local mode](../tasks/local.md) {UNTRAINED}.
- `maxTotalRestarts`: all restarts since the last progress, also those in place, but none after a planned loss (*does
  not count; saves first*). Default: 100. 0 allows no restart of any kind.

The first restart after progress starts at once, and the next ones after {BACKOFF[0]}, 20, 40, … {BACKOFF[1]} s
(`restartPolicy.backoff`), less up to a quarter. With these defaults, a job that has trained survives an outage of 30
minutes in which each attempt fails 20 s after its start, and each further outage after progress. A job that has never
trained fails within 2 minutes.

## Scripts under torchrun

A plain script writes no report, and torchrun ends with 1 for each failure of a rank. The operator therefore reads the
end of the log: the part that the kubelet puts into the pod's status (2 KB), and if the exception is not in it, the last
500 lines, for at most 8 s, as far as [its rights](../concepts/security.md#logs) allow. It takes rank, exit code and
signal from torchrun's block *Root Cause (first observed failure)*, and the last exception of a traceback, with
file and line of the innermost frame outside of installed packages; a line with the prefix `[rank2]:` belongs to
that rank.

`RuntimeError` and `DistBackendError` of gloo and NCCL because the connection to a peer was closed (`Connection closed
by peer`, `ncclRemoteError`) show a lost peer, so the node is not to blame. Without the right to read logs, the message
names rank and exit code from torchrun's block; with `@record` the traceback is in that block
([decision 28](../develop/decisions/0028-read-the-logs-of-failed-pods.md)).
With `logTail: Omit`, only the type of the exception and its place are in the status.
A [table](../tasks/scripts.md#what-the-status-says-also-under-torchrun) compares six faults with those under `ddprun`.

## Table

"""

CONTEXTS = """
## Fault and context

A fact of one Kubernetes node or of a service must not end a job that has trained. The table has the decisions in a job
of two nodes with the default policy: if one node shows the fault or all do; in the first attempt, before any step;
after progress; or in two attempts in a row without progress. *suspects*: it suspects the node. *avoids*: the next
attempt does not run there. Only an error of the program, memory and a loss that is not finite end a job that has
trained before its restarts are used, and only when they repeat.

"""


def reference() -> str:
    """Return the whole page."""
    head = "| reason | what is seen | reaction |\n|---|---|---|"
    deadlines = """
## Deadlines

| reason | what is seen | reaction |
|---|---|---|
| `DeadlineExceeded` | the job was active for `activeDeadlineSeconds` | Fail |
| `StartupDeadlineExceeded` | not all nodes ran within `startupDeadlineSeconds` | Fail, with the obstacle |
| `StartupDeadlineExceeded` | all nodes ran, but the trainer reported no step in that time | Restart; counts |
| `ProgressDeadlineExceeded` | no new step for `progressDeadlineSeconds` | Restart; counts |
| `CompletionDeadlineExceeded` | a node ran on `completionGraceSeconds` after the first success | Restart; counts |

If the launcher reports a [stall](../tasks/scripts.md#stalls-and-hangs) when a deadline ends an attempt, the failure has
its rank, step, file and line.
`completionGraceSeconds` does not pass while rank 0 still runs and reports new work, for example an export of the model,
and is doubled after each failure in a row for this reason.
One request without an answer changes nothing; after a minute of silence the time since the first success counts again.
Only time in which the operator reached the trainer counts towards `progressDeadlineSeconds`. While it does not reach
rank 0, the condition `Running` has the reason `ProgressUnknown`.

## Waiting

These are no failures. The condition `Running` shows them, and `startupDeadlineSeconds` limits the wait:

- an image that cannot be pulled, a pod that no Kubernetes node fits, a volume that cannot be mounted.
- a container that the kubelet refuses to start (`CreateContainerConfigError`, `InvalidImageName`). The job fails when
  the operator has seen it for 60 s or 10 s in the trainer's container, or in an init container that precedes it. If the
  job has trained, the attempt ends after 60 s if another of its pods starts, and after 30 min if none does. Other
  containers, and the message `failed to sync …` of the kubelet, never fail the job.
- a create that fails: a timeout, an error of the API server or of an admission webhook, too many requests
  (`CreateFailed`). The missing pods are created again after 1 s, then 2 s, up to 10 minutes.
- Kubernetes nodes for only some of the pods (`PartiallyScheduled`):
  [partial gangs](../concepts/scheduling.md#partial-gangs). A pod that ends because it waited for the others costs no
  restart (`PeersNotPlaced`).
- a create that quota, LimitRange or Pod Security refuses. What was created is deleted, and created again after 1 s,
  then 2 s, up to 10 minutes, at once if the job is changed. Each try is a new attempt; the deadline counts from the
  first, and begins again when all pods exist, and after a suspension or an edit of the spec.
"""
    return f"{HEAD}{head}\n" + "\n".join(_lines()) + "\n" + CONTEXTS + "\n".join(verdicts.lines()) + "\n" + deadlines


def _lines() -> Iterator[str]:
    for row in TABLE:
        reason = f"`{row.reason}`" if row.reason else "*its own*"
        yield f"| {reason} | {row.when} | {_reaction(row)} |"


def _reaction(row: Judgement) -> str:
    if row.action in ("Fail", "FailAtStart"):
        return {"Fail": "Fail", "FailAtStart": "Fail at start"}[row.action] + "; suspects the node" * row.node_suspected
    parts = ["Restart once" if row.action == "RestartOnce" else "Restart"]
    parts.append("counts" if row.counted else "does not count")
    marks = {"saves first": row.planned, "provisional": row.provisional, "suspects the node": row.node_suspected}
    return "; ".join([*parts, *(text for text, holds in marks.items() if holds)])
