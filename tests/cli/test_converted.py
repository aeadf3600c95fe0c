"""``ddpjob convert`` as a program, and converted jobs that run on this machine."""

from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from tests.cli.program import Program
from tests.convert.test_jobs import EXPECTED, JOBS

SCRIPT = """\
import os, sys
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], *sys.argv[1:])
"""


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
    first, *notes = [line for line in done.err.splitlines() if not line.startswith("warning: ")]
    expected = (EXPECTED / "pytorchjob-elastic.yaml").read_text().splitlines()
    fields = [line.removeprefix("# ") for line in expected if line.startswith("# ")]
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


class Run(NamedTuple):
    """How a converted job runs here. script: the file that its command names; options: what no image provides."""

    script: str
    options: tuple[str, ...]
    lines: list[str]


def ranks(count: int) -> list[str]:
    return [f"rank {rank} of {count}" for rank in range(count)]


PLAIN = ("--set", "command=[python3, plain.py]")
# tests/convert has what each job becomes. These run: torchrun, a command of one process, and no world.
RUNS = {
    "pytorchjob-torchrun": Run("demo.py", (), ranks(4)),
    "pytorchjob-entrypoint": Run("plain.py", PLAIN, ranks(4)),
    "trainjob-queue": Run("", ("--set", "suspend=false"), ["trained"] * 3),
}


@pytest.mark.parametrize("name", RUNS)
def test_converted_job_runs_as_one_world(ddpjob: Program, name: str) -> None:
    run = RUNS[name]
    file = converted(ddpjob, name)
    job = yaml.safe_load(text := file.read_text().replace("/app/", f"{ddpjob.folder}/"))
    scripts = {"kind": "ConfigMap", "metadata": {"name": "scripts"}, "data": {"tune.py": SCRIPT}}
    file.write_text(f"{text}---\n{yaml.safe_dump(scripts)}")
    (ddpjob.folder / (run.script or "unused.py")).write_text(SCRIPT)
    done = ddpjob("run", str(file), *run.options)
    assert done.code == 0, done
    logs = ddpjob("logs", job["metadata"]["name"], "--all").out
    printed = [line.partition(" ")[2] for line in logs.splitlines()]
    assert sorted(line for line in printed if line.startswith(("rank ", "node ", "trained"))) == run.lines
