"""Small jobs that fail in different ways at the same time: together they take as long as the slowest.

A *trial* applies one job, causes one fault and waits for the outcome, in a thread of its own. A module of tests lists
its trials as ``TRIALS``; those of all selected modules start when the operator is installed. The tests assert on the
outcomes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest

from ddpjob.api import names
from ddpjob.api.objects import Json, is_true
from ddprun.reporting.metrics import read_rows
from tests.e2e.jobs import JOB_KIND
from tests.e2e.kubectl import INTERVAL, Kubectl
from tests.e2e.namespace import CLAIM, JobNamespace, shared_claim
from tests.kind.cluster import Cluster
from tests.metrics import effective_rows
from tests.soak import ALL

T = TypeVar("T")
MOUNT = "/checkpoints"
STEPS = 90
CHECKPOINT_EVERY = 20
SAVES = (*range(CHECKPOINT_EVERY, STEPS, CHECKPOINT_EVERY), STEPS // 2)  # also at the end of the first epoch of two
TRAINING = ("train", "--data", "digits", "--epochs", "2", "--checkpoint-every", str(CHECKPOINT_EVERY))
# Slow enough that a fault at step 25 comes before the end, also when each call of kubectl takes seconds.
PACE = ("--step-delay", "0.6")
WITH_RESTARTS_IN_PLACE = [{"name": "DDPTRAIN_THREADS", "value": "1"}]
"""Environment of a job whose ranks may restart in place. In other jobs each failure ends the attempt."""
NOT_IN_PLACE = [{"name": "DDPJOB_INPLACE_RESTARTS", "value": "0"}]
_PLACES = threading.BoundedSemaphore(8)
"""One for each trial that runs: more of them, of all modules, wait for the two CPUs in place of for their jobs."""
PATIENT = {"terminationGracePeriodSeconds": 150}
"""Part of the pods that save before they end: on a busy disk each sync of a file may take many seconds."""
# PID 1 of a container cannot be killed from inside; the ranks, children of the launcher, can.
_KILL_A_RANK = """
import os, pathlib, signal
ranks = sorted(int(p.name) for p in pathlib.Path("/proc").iterdir() if p.name.isdigit()
               and (p / "stat").read_text().rpartition(")")[2].split()[1] == "1" and int(p.name) != os.getpid())
os.kill(ranks[0], signal.SIGKILL)
"""


def finished(job: Json) -> Json | None:
    """Return the job if it has finished."""
    return job if is_true(job.get("status"), "Finished") else None


class Watcher:
    """The jobs of one namespace, watched by one kubectl for all trials."""

    def __init__(self, kubectl: Kubectl) -> None:
        self._kubectl = kubectl
        self._jobs: dict[str, Json] = {}
        self._changed = threading.Condition()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def until(self, what: str, name: str, look: Callable[[Json], T | None], seconds: float) -> T:
        """Return the first true value of ``look`` for the job, which sees its newest state."""
        end = time.monotonic() + seconds
        with self._changed:
            while True:
                job = self._jobs.get(name)
                if job is not None and (value := look(job)):
                    return value
                if time.monotonic() > end:
                    raise AssertionError(f"{name}: not within {seconds:g} s: {what}. {_story(job)}")
                self._changed.wait(1.0)

    def _run(self) -> None:
        while not self._ended.wait(INTERVAL):
            for event in self._kubectl.watch(JOB_KIND, self._ended):
                job = event["object"]
                with self._changed:
                    if event["type"] == "DELETED":
                        self._jobs.pop(job["metadata"]["name"], None)
                    else:
                        self._jobs[job["metadata"]["name"]] = job
                    self._changed.notify_all()


def _story(job: Json | None) -> str:
    """Tell how far a job came in the first words, which the report shows, and then all that is known of it."""
    if job is None:
        return "No such job was seen"
    status = job.get("status", {})
    failures = [f"{f['attempt']} {f['reason']} {f.get('nodeName', '')}".rstrip() for f in status.get("failures", ())]
    step = status.get("progress", {}).get("step")
    return f"{status.get('state')}, attempt {status.get('attempt')}, step {step}, failures {failures}. Last seen: {job}"


@dataclass(frozen=True)
class Trial:
    """One job, and what a trial does with it."""

    name: str
    cluster: Cluster
    namespace: JobNamespace
    watcher: Watcher

    @property
    def kubectl(self) -> Kubectl:
        return self.namespace.kubectl

    @property
    def folder(self) -> Path:
        """The job's part of the volume, on this machine."""
        return self.namespace.volume / self.name

    def apply(self, *arguments: str, **spec: Any) -> None:
        """Apply a job of two nodes with one process each, on two Kubernetes nodes if both can run it.

        arguments: additional flags of the trainer. spec: fields that replace those of the job.
        """
        # The kubelet would create the folder without write permission for the trainer's user.
        self.folder.mkdir()
        self.folder.chmod(0o777)
        self.kubectl.apply(small_job(self.name, *arguments, **spec))

    def pods(self) -> dict[int, Json]:
        """Return the pods of the newest attempt by node_rank."""
        pods = self.kubectl.objects("pods", "--selector", f"{names.LABEL_JOB_NAME}={self.name}")
        pods.sort(key=lambda pod: int(pod["metadata"]["labels"][names.LABEL_ATTEMPT]))
        return {int(pod["metadata"]["labels"][names.LABEL_NODE_RANK]): pod for pod in pods}

    def kill_rank(self, node_rank: int) -> None:
        """Send SIGKILL to the first rank of a node."""
        pod = self.pods()[node_rank]["metadata"]["name"]
        self.kubectl("exec", pod, "--", "python3", "-c", _KILL_A_RANK)

    def until_trained(self) -> None:
        """Wait until the status shows a checkpoint and five steps after it."""
        least = CHECKPOINT_EVERY + 5

        def look(job: Json) -> bool:
            status = job.get("status", {})
            saved = status.get("checkpoint", {}).get("step", 0)
            return bool(status.get("progress", {}).get("step", 0) >= least and saved >= CHECKPOINT_EVERY)

        self.watcher.until(f"step {least} and a checkpoint", self.name, look, 600)

    def until(self, what: str, look: Callable[[Json], T | None], seconds: float = 300) -> T:
        """Return the first true value of ``look`` for the job."""
        return self.watcher.until(what, self.name, look, seconds)

    def until_finished(self, seconds: float = 600) -> Outcome:
        """Wait for the end of the job."""
        return Outcome(self.until("the end", finished, seconds), self.folder)


@dataclass(frozen=True)
class Outcome:
    """A finished job, and the rows of its metrics."""

    job: Json
    folder: Path

    @property
    def status(self) -> Json:
        status: Json = self.job["status"]
        return status

    @property
    def restarts(self) -> tuple[int, int]:
        """All restarts, and those that count."""
        return self.status.get("restarts", 0), self.status.get("restartsCountedTowardsLimit", 0)

    @property
    def failure(self) -> Json:
        """The only failure."""
        (failure,) = self.status["failures"]
        return dict(failure)

    @property
    def losses(self) -> list[float]:
        """The loss of every step, without those that a later run trained again."""
        rows = effective_rows(self.folder, "train")
        assert [row["step"] for row in rows] == list(range(1, STEPS + 1)), "a step is missing, or there twice"
        return [row["loss"] for row in rows]

    def steps_of_run(self, run: int) -> list[int]:
        """Return every step that this run trained."""
        return [row["step"] for row in read_rows(self.folder) if row["event"] == "train" and row["run"] == run]


Act = Callable[[Trial], Any]
Wait = Callable[[Act], Any]
"""Waits for the outcome of a trial: what the act returns."""


class Trials(NamedTuple):
    """The trials of one module, which share a namespace and a claim, and how many of them run at the same time."""

    acts: Mapping[str, Act]
    at_once: int

    @staticmethod
    def of(at_once: int, *acts: Callable[[Trial], Any], soak: Iterable[Callable[[Trial], Any]] = ()) -> Trials:
        """Return trials that are named as their functions. soak: those of tests with this marker."""
        return Trials({act.__name__: act for act in (*acts, *(soak if ALL else ()))}, at_once)


@contextmanager
def running(cluster: Cluster, namespace: JobNamespace, trials: Trials) -> Iterator[Mapping[str, Future[Any]]]:
    """Start the trials in their order, and provide their outcomes by name."""
    namespace.kubectl.apply(shared_claim())
    with Watcher(namespace.kubectl) as watcher:
        pool = ThreadPoolExecutor(trials.at_once, thread_name_prefix="trial")
        try:
            yield {
                name: pool.submit(_run, act, Trial(name.replace("_", "-"), cluster, namespace, watcher))
                for name, act in trials.acts.items()
            }
        finally:
            pool.shutdown(cancel_futures=True)


def _run(act: Act, trial: Trial) -> Any:
    with _PLACES:
        return act(trial)


def undisturbed(trial: Trial) -> Outcome:
    """Train the job of the trials to its end without a fault."""
    trial.apply()
    return trial.until_finished()


def apart(name: str) -> Json:
    """Return the affinity of pods that run on different Kubernetes nodes if both can run them."""
    term = {
        "weight": 100,
        "podAffinityTerm": {
            "topologyKey": "kubernetes.io/hostname",
            "labelSelector": {"matchLabels": {names.LABEL_JOB_NAME: name}},
        },
    }
    return {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [term]}}


def small_job(name: str, *arguments: str, **spec: Any) -> Json:
    """Return a job of two nodes with one process and one thread each."""
    return {
        "apiVersion": f"{names.GROUP}/v1alpha1",
        "kind": "DDPJob",
        "metadata": {"name": name},
        "spec": {
            "image": "ddpjob/trainer:0.1.0",
            "args": [*TRAINING, *PACE, *arguments],
            "env": [*WITH_RESTARTS_IN_PLACE, *NOT_IN_PLACE],
            "numNodes": 2,
            "nprocPerNode": 1,
            "checkpoint": {"mountPath": MOUNT, "claimName": CLAIM, "subPath": name},
            "template": {"spec": {"affinity": apart(name)}},
            **spec,
        },
    }


def assert_resumed_from_the_newest_checkpoint(done: Outcome) -> None:
    """Check where the second run began. The checkpoint of a run's last step may not have been complete."""
    last = done.steps_of_run(1)[-1]
    newest = {max(step for step in SAVES if step <= seen) for seen in (last, last - 1)}
    assert done.status["checkpoint"]["resumedFromStep"] in newest


def assert_recovered(done: Outcome, reference: Outcome) -> None:
    """Check that every step has a row in the metrics, with the loss of the undisturbed job."""
    assert done.losses == pytest.approx(reference.losses, abs=1e-6)
    accuracy = float(reference.status["progress"]["accuracy"])
    assert float(done.status["progress"]["accuracy"]) == pytest.approx(accuracy, abs=1e-6)


def assert_no_step_was_lost(done: Outcome, reference: Outcome) -> None:
    """Check the same, and that no step was trained twice."""
    rows = [row for row in read_rows(done.folder) if row["event"] in ("train", "stopped")]
    steps = [row["step"] for row in rows if row["event"] == "train"]
    story = [(row["run"], row["event"], row["step"], row["time"]) for row in rows]
    failures = done.status.get("failures")
    assert steps == list(range(1, STEPS + 1)), f"a step was trained twice, or not: {failures}, {story}"
    last = max(row["run"] for row in rows if row["event"] == "train")
    assert done.status["checkpoint"]["resumedFromStep"] == done.steps_of_run(last)[0] - 1
    assert_recovered(done, reference)
