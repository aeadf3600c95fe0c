"""Which commands start one process per node where the job wants several, and where the job says so."""

from typing import Any

import pytest

from ddpjob.engine.desired import Job
from ddpjob.engine.mistakes import launch_warning, trainer_command
from tests.builders import a_job, a_started_world

LAUNCHED = [
    ["torchrun", "train.py"],
    ["/opt/conda/bin/torchrun", "train.py"],
    ["python", "-m", "torch.distributed.run", "train.py"],
    ["python3.11", "-u", "-X", "dev", "-m", "torch.distributed.launch", "train.py"],
    ["python", "/opt/conda/bin/torchrun", "train.py"],
    ["mpirun", "-np", "2", "python", "train.py"],
    ["numactl", "--interleave=all", "torchrun", "train.py"],
    ["env", "OMP_NUM_THREADS=1", "torchrun", "train.py"],
    ["uv", "run", "torchrun", "train.py"],
]
NOT_JUDGED = [
    [],
    ["sh", "-c", "python train.py"],
    ["/bin/bash", "start.sh"],
    ["./start.sh"],
    ["python", "-c", "import train"],
    ["$(PROGRAM)", "train.py"],
    ["python"],
    ["env"],
]
ALONE = [
    ["python", "train.py"],
    ["/usr/bin/python3", "-u", "train.py", "--launcher", "torchrun"],
    ["python", "-m", "my.training"],
    ["python", "-W", "ignore", "train.py"],
    ["nice", "-n", "5", "python", "train.py"],
    ["python", "-m", "my.training", "-c", "config.yaml"],
    ["python", "-m", "my.training", "--config", "-"],
    ["nsys", "profile", "-c", "cudaProfilerApi", "python", "train.py"],
    ["taskset", "-c", "0-3", "python", "train.py"],
    ["./train"],
    ["train.py"],
]


def job_of(command: list[str], **spec: Any) -> Job:
    return Job.of(a_job(**({"command": command} if command else {}) | {"nprocPerNode": 4} | spec))


@pytest.mark.parametrize("command", [*LAUNCHED, *NOT_JUDGED], ids=" ".join)
def test_launcher_or_unknown_command_gets_no_warning(command: list[str]) -> None:
    assert launch_warning(job_of(command)) is None


@pytest.mark.parametrize("command", ALONE, ids=" ".join)
def test_other_command_is_named_with_what_to_do(command: list[str]) -> None:
    warning = launch_warning(job_of(command))
    assert warning is not None
    assert f"nprocPerNode is 4, but the command {' '.join(command[:3])} is not a known launcher" in warning
    assert "torchrun" in warning


def test_command_may_come_from_the_template_and_its_arguments_from_the_spec() -> None:
    trainer = {"name": "trainer", "command": ["python"], "args": ["ignored.py"]}
    template = {"spec": {"containers": [{"name": "side", "command": ["torchrun"]}, trainer]}}
    job = job_of([], args=["train.py"], template=template)
    assert trainer_command(job) == ["python", "train.py"]
    assert launch_warning(job) is not None
    assert trainer_command(job_of([], args=["train.py"])) == []


@pytest.mark.parametrize("nproc", [1, 2])
def test_start_of_the_job_has_the_warning_as_an_event(nproc: int) -> None:
    world = a_started_world(a_job(command=["python", "train.py"], nprocPerNode=nproc))
    notes = [note for plan in world.plans for note in plan.events if note.reason == "NoLauncher"]
    assert [note.type for note in notes] == ["Warning"] * (nproc - 1)
