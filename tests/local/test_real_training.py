"""The project's own trainer in local mode: trained, and killed and resumed with the same result."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from ddpjob import Client, DDPJob
from ddpjob.api.objects import Json
from ddpjob.local.state import StateFolder
from tests.local.bench import MARKER, marked
from tests.local.builders import a_local_job
from tests.local.sessions import apart
from tests.metrics import effective_rows
from tests.processes import eventually, listening, tail

pytestmark = pytest.mark.timeout(600, func_only=True)

PATIENCE = 240.0
EPOCHS = 2


def training(mark: Path, *args: str) -> Json:
    """Return a job of two ranks on one node, on scikit-learn's digits, with one thread per rank."""
    job = a_local_job("", checkpoint=True, numNodes=1, nprocPerNode=2)
    del job["spec"]["command"]
    job["spec"]["args"] = ["train", "--data", "digits", "--epochs", str(EPOCHS), "--checkpoint-every", "10", *args]
    job["spec"]["env"] = [{"name": "DDPTRAIN_THREADS", "value": "1"}, {"name": MARKER, "value": str(mark)}]
    return job


# The all_reduce proves that both ranks are connected; torchrun starts its workers in new sessions.
SCRIPT = """
import pathlib, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
met = torch.ones(1)
dist.all_reduce(met)
pathlib.Path(sys.argv[1], str(dist.get_rank())).write_text(str(int(met.item())))
time.sleep(600)
"""


@dataclass(frozen=True)
class Place:
    """A state folder, and runs in separate processes, as with `ddpjob run`."""

    root: Path

    def finish(self, job: Json) -> None:
        with apart(self.root, job, self.root) as process:
            assert process.wait(PATIENCE) == 0, tail(self.root.parent / "session.log")

    @property
    def job(self) -> Json:
        return StateFolder(self.root).job("default", "tiny").job() or {}

    @property
    def status(self) -> Json:
        status: Json = self.job.get("status") or {}
        return status

    @property
    def volume(self) -> Path:
        return StateFolder(self.root).volume("default", "tiny-checkpoints")

    @property
    def rows(self) -> list[Json]:
        """Return one row for each step; steps that a resumed run repeated are dropped."""
        rows: list[Json] = effective_rows(self.volume, "train")
        return rows

    @property
    def losses(self) -> list[float]:
        return [row["loss"] for row in self.rows]


def under_ddprun(folder: Path) -> Json:
    (folder / "train.py").write_text(SCRIPT)
    return a_local_job(f"exec ddprun {folder}/train.py {folder}", env=[{"name": MARKER, "value": str(folder)}])


def test_run_of_two_nodes_listens_on_loopback_only(tmp_path: Path) -> None:
    place = Place(tmp_path / "state")
    with apart(place.root, under_ddprun(tmp_path), tmp_path) as process:
        eventually(
            "both ranks have met",
            lambda: process.poll() is not None or (tmp_path / "1").exists(),
            timeout=PATIENCE,
        )
        found = listening(process.pid)
    assert len(found) > 2, tail(tmp_path / "session.log")  # the store, node 0's launcher, gloo
    assert set.union(*found.values()) <= {"127.0.0.1", "::1"}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Place:
    place = Place(tmp_path_factory.mktemp("undisturbed") / "state")
    place.finish(training(place.root))
    return place


def test_killed_training_resumes_with_the_same_result(tmp_path: Path, undisturbed: Place) -> None:
    place = Place(tmp_path / "state")
    job = training(tmp_path, "--step-delay", "0.05")
    with apart(place.root, job, tmp_path) as process:
        eventually(
            "a checkpoint exists and training continues",
            lambda: process.poll() is not None or place.status.get("progress", {}).get("step", 0) >= 25,
            timeout=PATIENCE,
        )
        process.kill()
        code = process.wait(PATIENCE)
        eventually("every process is gone", lambda: not marked(str(tmp_path)), timeout=60)
    assert code == -signal.SIGKILL, tail(tmp_path / "session.log")
    assert len(place.rows) < len(undisturbed.rows), "it was interrupted before its end"
    before = place.job
    assert before["status"]["state"] == "Running"

    place.finish(job)

    status = place.status
    assert place.job["metadata"]["uid"] == before["metadata"]["uid"]
    assert (status["state"], status["attempt"], status["restarts"]) == ("Succeeded", 2, 0)
    assert status["checkpoint"]["resumedFromStep"] >= 20
    assert [row["step"] for row in place.rows] == list(range(1, len(undisturbed.rows) + 1))
    assert place.losses == pytest.approx(undisturbed.losses, abs=1e-6)
    assert len({row["run"] for row in place.rows}) == 2, "both attempts trained"


def fit(learning_rate: float, steps: int, fail_at: int = -1) -> float:
    """Train a layer on random data; the ranks must agree on its weights."""
    import torch  # noqa: PLC0415 - the function is sent alone
    import torch.distributed as dist  # noqa: PLC0415
    from torch import nn  # noqa: PLC0415

    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    for step in range(steps):
        loss = model(torch.randn(8, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == fail_at and dist.get_rank() == 1:
            raise ValueError(f"broken at step {step}")
    weights = [torch.zeros(1, 4) for _ in range(2)]
    dist.all_gather(weights, model.module.weight.data)
    print(f"""trained
{steps} steps with {learning_rate}, ranks agree: {torch.equal(*weights)}""")
    dist.destroy_process_group()
    return 1.0


def test_a_function_trains_on_two_ranks_and_its_failure_has_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DDPJOB_STATE_DIR", str(tmp_path))
    client = Client.local()
    job = DDPJob.from_function(fit, {"learning_rate": 0.1, "steps": 5}, nproc_per_node=2, max_restarts=0)
    assert job.name == "fit"
    client.submit(job)
    assert client.wait("fit", timeout=PATIENCE).succeeded, list(client.logs("fit"))
    assert "5 steps with 0.1, ranks agree: True" in "".join(line.text for line in client.logs("fit"))
    arguments = {"learning_rate": 0.1, "steps": 5, "fail_at": 3}
    client.submit(DDPJob.from_function(fit, arguments, name="bad", nproc_per_node=2, max_restarts=0))
    assert not client.wait("bad", timeout=PATIENCE).succeeded
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "raise ValueError(f" in text)
    found = client.explain("bad")
    assert (found.exception, found.rank, found.where) == ("ValueError", 1, f"fit-.py:{line}")
    client.delete("fit")
    client.delete("bad")
