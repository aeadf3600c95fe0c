"""The reference run: the example trained without interruption, for other tests to compare with."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ddpjob.api.objects import Json
from tests.e2e.jobs import mnist_job
from tests.e2e.kubectl import Kubectl, until
from tests.e2e.namespace import JobNamespace
from tests.e2e.trials import Trial
from tests.kind.toolchain import binary
from tests.metrics import effective_rows
from tests.processes import end, spawn

NAME = "mnist-cpu"


@dataclass(frozen=True)
class ReferenceRun:
    """The finished job, and what kubectl showed while it ran."""

    namespace: JobNamespace
    folder: Path
    """The folder of the job's volume on this machine."""
    name: str
    job: Json
    pods: list[Json]
    """The job's pods when all of them ran or had run."""
    table: list[str]
    """The lines that `kubectl get ddp --watch` printed."""

    @property
    def status(self) -> Json:
        status: Json = self.job["status"]
        return status

    @property
    def losses(self) -> list[float]:
        """Return the loss of every step."""
        return [row["loss"] for row in effective_rows(self.folder, "train")]


def reference(trial: Trial) -> ReferenceRun:
    """Apply the example, watch it with kubectl, and wait until it finishes."""
    namespace = trial.namespace
    with _table(namespace.kubectl) as table:
        namespace.kubectl.apply(mnist_job(NAME))
        # The condition Running is True for 20 s, which a busy machine may let pass between two looks.
        until("all nodes run or ran", lambda: _all_ran(namespace.job(NAME)), seconds=300)
        pods = namespace.pods()
        namespace.until_finished(NAME)
        folder = namespace.folder_of(f"{NAME}-checkpoints")
        return ReferenceRun(namespace, folder, NAME, namespace.job(NAME), pods, table.read_text().splitlines())


def _all_ran(job: Json) -> bool:
    return "allRunningTime" in job.get("status", {}).get("currentAttempt", {})


@contextmanager
def _table(kubectl: Kubectl) -> Iterator[Path]:
    """Run `kubectl get ddp --watch` and provide the path of its output."""
    with tempfile.TemporaryDirectory(prefix="ddpjob-e2e-") as folder:
        output = Path(folder) / "table"
        head: list[str | Path] = [binary("kubectl"), "--kubeconfig", kubectl.kubeconfig]
        process = spawn([*head, "--namespace", kubectl.namespace, "get", "ddp", "--watch"], output)
        try:
            yield output
        finally:
            end(process)
