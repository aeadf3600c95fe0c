"""``ddpjob convert`` as a program, and converted jobs that run on this machine."""

from pathlib import Path

import pytest
import yaml

from tests.cli.program import Program
from tests.convert.test_jobs import EXPECTED, JOBS

SCRIPT = 'import os; print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"])\n'


def converted(ddpjob: Program, name: str, *options: str) -> Path:
    done = ddpjob("convert", str(JOBS / f"{name}.yaml"), *options)
    assert done.code == 0, done
    path = ddpjob.folder / f"{name}.yaml"
    path.write_text(done.out)
    return path


def test_job_is_printed_and_what_does_not_carry_over_is_listed_beside_it(ddpjob: Program) -> None:
    done = ddpjob("convert", "-", stdin=(JOBS / "pytorchjob-elastic.yaml").read_text())
    assert done.code == 0
    assert yaml.safe_load(done.out)["kind"] == "DDPJob"
    first, *notes = done.err.splitlines()
    fields = EXPECTED["pytorchjob-elastic"][1]
    assert first == f"{len(fields)} fields did not carry over unchanged:"
    assert [note.partition(": ")[0] for note in notes] == [f"- {field}" for field in fields]


def test_run_and_validate_lead_to_convert(ddpjob: Program) -> None:
    file = str(JOBS / "trainjob-queue.yaml")
    assert "ddpjob convert" in ddpjob("run", file).is_refused()[2]
    assert "ddpjob convert" in ddpjob("validate", file).out


def test_warnings_about_the_ddpjob_are_printed_too(ddpjob: Program) -> None:
    text = (JOBS / "pytorchjob-torchrun.yaml").read_text().replace("torchrun, demo.py", "python, demo.py")
    assert "warning: spec.command: nprocPerNode is 2" in ddpjob("convert", "-", stdin=text).err


def test_job_of_which_none_can_be_made_is_refused_in_three_lines(ddpjob: Program) -> None:
    text = (JOBS / "pytorchjob-torchrun.yaml").read_text()
    (ddpjob.folder / "job.yaml").write_text(text.replace("template: *pods", "template: {spec: {containers: []}}"))
    assert "job.yaml: spec.pytorchReplicaSpecs.Worker" in ddpjob("convert", "job.yaml").is_refused()[0]
    too_long = text.replace("demo-cpu", "d" * 60)
    assert "metadata.name" in ddpjob("convert", "-", stdin=too_long).is_refused()[0]


@pytest.mark.parametrize(
    ("name", "script", "lines"),
    [
        ("pytorchjob-torchrun", "demo.py", [f"rank {rank} of 4" for rank in range(4)]),
        ("pytorchjob-python", "plain.py", [f"rank {rank} of 3" for rank in range(3)]),
        ("trainjob-torchrun", "", [f"rank {rank} of 4 hello" for rank in range(4)]),
        ("trainjob-own-runtime", "", [f"node {rank} of 4 1" for rank in range(4)]),
    ],
)
def test_converted_job_runs_as_one_world(ddpjob: Program, name: str, script: str, lines: list[str]) -> None:
    job = converted(ddpjob, name)
    if script:
        (ddpjob.folder / script).write_text(SCRIPT)
    done = ddpjob("run", str(job))
    assert done.code == 0, done
    logs = ddpjob("logs", yaml.safe_load(job.read_text())["metadata"]["name"], "--all").out
    assert sorted(line.partition(" ")[2] for line in logs.splitlines() if " of " in line) == lines
