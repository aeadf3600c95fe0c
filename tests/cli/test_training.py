"""With PyTorch: users' own scripts, and the commands that --help shows."""

import json
import re
import shlex
import signal
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
from typer.main import get_command

from ddpjob.cli.main import application
from ddpjob.local.state import StateFolder
from tests.cli.program import ROOT, Done, Program, shell_job
from tests.local.builders import OF_A_CLUSTER_ALONE
from tests.processes import eventually
from tests.soak import ALL


@pytest.mark.parametrize("number", range(100 if ALL else 2))
def test_ordinary_script_ends_in_its_first_life(ddpjob: Program, number: int) -> None:
    """Where its ranks may restart in place, every second one hung when DistributedDataParallel was freed."""
    done = ddpjob("run", "tests/e2e/ends.py", "--nodes", "2", "--nproc", "2", cwd=ROOT)
    assert done.code == 0, done
    status = ddpjob.job("ends")["status"]
    assert (status["attempt"], status.get("restarts", 0)) == (1, 0), status


FAILING = """
import os
import ddprun
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
for step in range(1, 9):
    dist.all_reduce(torch.ones(1))
    ddprun.report(step=step)
    if step == 5 and dist.get_rank() == 1:
        {failure}
"""


@pytest.mark.parametrize(
    ("failure", "restarts", "named"),
    [
        ('raise ValueError("sample 17")', 3, ("DeterministicError", "ValueError", "failing.py:12", 2)),
        ("os._exit(0)", 0, ("ExitedEarly", "ExitedEarly", None, 1)),
    ],
)
def test_failure_of_a_script_is_named_with_rank_and_step(
    ddpjob: Program, tmp_path: Path, failure: str, restarts: int, named: tuple[object, ...]
) -> None:
    """In an environment that is not active, ddprun is found beside ddpjob. The same error twice ends the job."""
    (tmp_path / "failing.py").write_text(FAILING.format(failure=failure))
    options = ("--nproc", "2", "--set", f"restartPolicy.maxRestarts={restarts}", "-o", "json")
    done = ddpjob("run", "failing.py", *options, env={"PATH": "/usr/bin:/bin"})
    assert done.code == 1, done
    last = done.result["status"]["failures"][-1]
    assert (last["rank"], last["step"]) == (1, 5), last
    assert (last["reason"], last["exception"], last.get("where"), last["attempt"]) == named
    why = json.loads(ddpjob("why", "failing", "-o", "json").out)
    assert (why["rank"], why["step"], why["hint"], why["next"]) == (1, 5, last["hint"], last["next"])
    assert not OF_A_CLUSTER_ALONE.search(f"{last['hint']} {last['next']}")


EXAMPLE = ROOT / "manifests" / "examples" / "ddprun-script.yaml"
STEP = "            done += 1\n"
# In the first attempt rank 1 fails, and in the second all ranks are slow enough for a signal to come before the end.
FAULT = """\
            if os.environ["DDPJOB_ATTEMPT"] == "1" and done == 30 and rank == 1:
                raise ValueError("sample 17 has 3 channels, expected 1")
            if os.environ["DDPJOB_ATTEMPT"] == "2":
                __import__("time").sleep(0.2)
"""


def test_job_of_the_script_to_copy_names_its_error_stops_and_resumes(ddpjob: Program, tmp_path: Path) -> None:
    text = EXAMPLE.read_text()
    assert text.count(f"    {STEP}") == 1
    file = tmp_path / "job.yaml"
    text = text.replace(f"    {STEP}", indent(STEP + FAULT, "    ")).replace('--epochs, "20"', '--epochs, "5"')
    text = text.replace("  numNodes: 2", '  numNodes: 2\n  env: [{name: DDPJOB_INPLACE_RESTARTS, value: "0"}]')
    file.write_text(text)
    run = ("run", str(file), "--nodes", "1", "--nproc", "2", "--output", "json")
    with ddpjob.started(*run) as process:
        ddpjob.until_log("ddprun-script", "rank 1 resumes after step 20")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 130
    status = ddpjob.job("ddprun-script")["status"]
    assert (status["state"], status["attempt"], status["restarts"]) == ("Suspended", 2, 1)
    (failure,) = status["failures"]
    raised = EXAMPLE.with_name("train.py").read_text().splitlines().index(STEP[:-1]) + 3
    named = (failure["nodeRank"], failure["rank"], failure["reason"], failure["exception"])
    assert named == (0, 1, "ValueError", "ValueError")
    assert f"train.py:{raised}: ValueError: sample 17 has 3 channels, expected 1" in failure["message"]

    done = ddpjob(*run)

    assert done.code == 0, done
    assert "rank 0 resumes after step" in ddpjob("logs", "ddprun-script", "--all").out
    status = ddpjob.job("ddprun-script")["status"]
    assert (status["state"], status["attempt"]) == ("Succeeded", 3)
    step = status["progress"]["step"]
    assert (status["progress"]["totalSteps"], failure["step"]) == (step, 20), "it reported step 20 last"
    volume = StateFolder(ddpjob.state).volume("default", "ddprun-script-checkpoints")
    assert status["checkpoint"]["step"] == step and (volume / status["checkpoint"]["path"]).is_file()


def example(ddpjob: Program, *verb: str) -> list[str]:
    """Return the example command of a help page."""
    page = ddpjob(*verb, "--help").out
    found = re.search(r"Example:\n +ddpjob (.+)", page)
    assert found, page
    return shlex.split(found[1])


OF_FILES = ("init", "validate", "render", "convert", "doctor")
OF_A_FINISHED_JOB = (
    *("get", "why", "logs", "describe", "wait", "checkpoints", "pull", "plot", "report", "bundle"),
    "delete",
)
OF_A_RUNNING_JOB = ("top", "stacks", "profile", "restart", "suspend", "resume")
OF_A_CLUSTER = ("submit",)  # run here with --dry-run=client
OF_A_BROWSER = ("ui",)  # tests/ui

STEPS = """
import time
import torch
weight = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([weight], 0.1)
while True:
    weight.grad = torch.ones(1)
    optimizer.step()
    time.sleep(0.05)
"""


@pytest.fixture
def reader(ddpjob: Program) -> Program:
    """Provide a program in a directory with the files that the examples name."""
    for name in ("manifests", "tests"):
        (ddpjob.folder / name).symlink_to(ROOT / name)
    return ddpjob


def works(ddpjob: Program, *verb: str) -> Done:
    """Run the example of a help page."""
    done = ddpjob(*example(ddpjob, *verb))
    assert done.code == 0, (verb, done)
    return done


def test_the_example_of_every_command_is_run() -> None:
    group: Any = get_command(application())
    assert set(group.commands) == {
        "run",
        *OF_FILES,
        *OF_A_FINISHED_JOB,
        *OF_A_RUNNING_JOB,
        *OF_A_CLUSTER,
        *OF_A_BROWSER,
    }


def test_examples_of_the_help_about_files_and_for_a_cluster_work(reader: Program) -> None:
    for verb in OF_FILES:
        assert works(reader, verb).out, verb
    (reader.folder / "work").mkdir()
    (reader.folder / "work" / "train.py").write_text(STEPS)
    for verb in OF_A_CLUSTER:
        _, *arguments = example(reader, verb)
        assert "valid" in reader(verb, "--dry-run=client", *arguments, cwd=reader.folder / "work").out


def test_examples_of_the_help_about_a_training_work(reader: Program) -> None:
    assert example(reader) == example(reader, "run")
    trained = works(reader, "run")
    world = reader.job("mnist-cpu")["status"]["world"]
    assert (world["numNodes"], world["worldSize"]) == (2, 4)
    assert "accuracy" in trained.out
    assert "training loss by step" in trained.out
    assert "┤" in trained.out
    checkpoint = re.search(r"^  checkpoint +(\S+)", trained.out, re.MULTILINE)
    assert checkpoint and Path(checkpoint[1]).is_file()
    done = {verb: works(reader, verb) for verb in OF_A_FINISHED_JOB}
    assert "mnist-cpu" in done["get"].out
    assert "n0 " in done["logs"].out
    assert (reader.folder / "report.html").is_file() and list((reader.folder / "trained").rglob("*.pt"))
    assert "mnist-cpu deleted" in done["delete"].out
    assert Path(checkpoint[1]).is_file()


@pytest.mark.soak
def test_examples_of_the_help_about_a_running_job_work(reader: Program) -> None:
    (reader.folder / "train.py").write_text(STEPS)
    job = shell_job("mnist-cpu", "exec ddprun train.py", numNodes=1, nprocPerNode=1)
    assert reader("submit", reader.write(job), "--local").code == 0
    top, stacks, profile, *others = OF_A_RUNNING_JOB
    for verb in (top, stacks, profile):
        command = example(reader, verb)
        eventually(f"{verb} shows a rank", lambda words=command: reader(*words).code == 0, timeout=120)  # type: ignore[misc]
    for verb in others:
        assert works(reader, verb).out, verb
        if verb == "suspend":
            assert reader("wait", "mnist-cpu", "--timeout", "120").code == 102
    assert works(reader, "delete").code == 0
