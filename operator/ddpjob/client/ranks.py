"""What the ranks of a job do now, as the launcher of node 0 answers ``GET /ranks`` (docs/reference/reports.md)."""

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pydantic import ConfigDict, Field

from ddpjob.api.model import WireModel
from ddpjob.api.objects import Json
from ddpjob.api.status import SlowStatus, StallStatus
from ddpjob.client.job import DDPJob
from ddpjob.errors import DDPJobError, UnavailableError

SECONDS = 5.0
"""Time limit of a request."""
LONGEST = 4 * 2**20  # bytes of an answer
_AGAIN_SECONDS, _SOON_SECONDS = 0.7, 0.2  # until node 0 has heard from the other nodes, for the first time or again
_OF_TORCH = ("torchrun", "torch.distributed.run", "torch.distributed.launch")


class StepParts(WireModel):
    """Seconds of a step, over the last seconds, of one rank of DistributedDataParallel."""

    model_config = ConfigDict(allow_inf_nan=False)

    data: float
    """Wait for batches of a DataLoader in the main thread."""
    forward: float
    """In the call of the module."""
    backward: float
    """The rank's own work from the end of that call, so with the loss, to the end of the backward pass."""
    communication: float
    """In the communication hook of the script."""
    optimizer: float
    """Steps of optimizers."""
    script: float
    """All other work of the script."""
    wait: float
    """For gradients of the other ranks, after the own work."""
    collection: float
    """Collection of garbage, within the other parts."""
    throttled: float
    """Stopped by the CPU limit of the container, within the other parts."""
    queue: float
    """The thread could run and the kernel did not run it, within the other parts."""


class RankState(WireModel):
    """One process of the training."""

    model_config = ConfigDict(allow_inf_nan=False)  # Python's JSON has them

    rank: int
    """Global rank."""
    node: int
    """node_rank of its node."""
    step: int
    """Optimizer steps since this rank began, or as the program numbers them."""
    phase: str
    """What it does: start, train, save, ..."""
    collective: str
    """The collective in which it waits for the others; empty while it works by itself, or if that is not known."""
    age_seconds: float
    """Time since its last heartbeat."""
    step_seconds: float | None = None
    """Time of a step: the mean over the last 10 to 20 s, or of the last step if that took longer."""
    data_wait_seconds: float | None = None
    """Of that, the wait for batches of a DataLoader in the main thread; absent if there is none."""
    parts: StepParts | None = None
    """Where the time of its steps goes; absent unless it is a script under ddprun with DistributedDataParallel."""
    memory_bytes: int | None = Field(None, le=2**63)
    """Resident memory of the process and of all that it has started; memory that they share counts in each."""


class OfAllRanks(WireModel):
    """What is read of all ranks of a job."""

    job: str
    """Name of the job."""
    namespace: str
    """Namespace of the job."""
    place: str
    """Where the job is: this machine, or cluster and namespace."""
    attempt: int
    """Number of the attempt."""
    world_size: int
    """Number of ranks of the job."""


class RankTable(OfAllRanks):
    """The ranks of a job."""

    missing_nodes: list[int] = Field(default_factory=list)
    """node_ranks of which nothing is known: their launcher is not connected, or is of an earlier release."""
    omitted_ranks: int = 0
    """Ranks that are left out because there are too many."""
    stall: StallStatus | None = None
    """`status.stall` of the job: while the ranks make no steps, the rank that the others wait for."""
    slow: SlowStatus | None = None
    """`status.slow` of the job: the rank for which the others wait in each step."""
    ranks: list[RankState]
    """By rank."""


def rank_table(job: DDPJob, place: str, answer: bytes) -> RankTable:
    """Return the table in an answer of the launcher. Raises ``UnavailableError`` if it is none."""
    head: Json = {"job": job.name, "namespace": job.namespace, "place": place, "attempt": job.status.attempt}
    head |= {"stall": job.status.stall, "slow": job.status.slow}
    with expected(job.name, "GET /ranks"):
        return RankTable.model_validate({**json.loads(answer), **head})


def parsed_answer(job: str, answer: bytes) -> Json:
    """Return the JSON object that a launcher has answered.

    Raises:
        UnavailableError: it is none, or the launcher refuses the request.
    """
    with expected(job):
        found = dict(json.loads(answer))
        refused = tuple(map(str, found.get("refused", ())))
    if refused:
        raise UnavailableError(f"the launcher of {job} refuses: {refused[0]}", *refused[1:3])
    return found


@contextmanager
def expected(job: str, request: str = "a look inside") -> Iterator[None]:
    """Turn the errors of an answer that another program has sent into ``UnavailableError``."""
    try:
        yield
    except (ValueError, TypeError, KeyError, RecursionError) as error:  # ValidationError is a ValueError
        raise UnavailableError(
            f"node 0 of {job} answers {request} with something else than ranks",
            "another program listens on the job's progress port",
            f"ddpjob logs {job} --node 0",
        ) from error


def require_running(job: DDPJob) -> int:
    """Return the number of the attempt. Raises ``UnavailableError`` if no rank runs."""
    current = job.status.current_attempt
    if job.finished or current is None or not current.number or current.verdict is not None:
        raise UnavailableError(
            f"no rank of {job.name} runs: it is {job.state}",
            "the job has no attempt that runs",
            f"ddpjob get {job.name} shows what it has done",
        )
    return current.number


def no_ranks(job: DDPJob, why: str, request: str = "GET /ranks") -> DDPJobError:
    """Return the error of a job whose node 0 has no launcher that knows the ranks."""
    from ddpjob.engine.desired import Job
    from ddpjob.engine.mistakes import trainer_command

    words = trainer_command(Job.of(job.manifest))
    if job.spec.launcher is None and any(word.rpartition("/")[2] in _OF_TORCH for word in words):
        return UnavailableError(
            f"{job.name} runs under torchrun, which does not know what its ranks do",
            "ddprun measures them, without a change of the script",
            "set launcher: Injected in the spec, or command: [ddprun, train.py] (docs/tasks/scripts.md)",
        )
    return UnavailableError(
        f"node 0 of {job.name} does not answer {re.sub('/jobs/[^/]+', '', request)}: {why}",  # the uid is a right
        "it starts or ends, or its program is started by another launcher or another release than ddprun of this one",
        f"ddpjob why {job.name}; or set launcher: Injected in the spec (docs/tasks/scripts.md)",
    )


def asked_twice(ask: Callable[[], RankTable]) -> RankTable:
    """Return an answer with the ranks of all nodes as they are now: node 0 asks the others when it is asked."""
    first = ask()
    if not first.missing_nodes and all(rank.node == 0 for rank in first.ranks):
        return first
    time.sleep(_AGAIN_SECONDS if first.missing_nodes else _SOON_SECONDS)
    return ask()
