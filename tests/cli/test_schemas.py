"""Each command that prints JSON has a committed schema, and what it prints fits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from typer.main import get_command

from ddpjob.cli.main import application
from tests.cli.program import Program, shell_job, with_volume
from tests.install.generate import schema_file
from tests.json_schema import faults
from tests.processes import eventually

SCRIPT = """
import os, time
import ddprun
checkpoints = ddprun.checkpoints(os.environ["DDPJOB_CHECKPOINT_DIR"])
for step in range(1, 9):
    ddprun.report(step=step, total_steps=8, loss=1 / step)
checkpoints.save(8, {})
print("saved", flush=True)
while not os.path.exists("go"):
    ddprun.report(step=8)
    time.sleep(0.05)
"""
OF_A_JOB = ("get", "why", "logs", "describe", "checkpoints")
COMMANDS = {
    **{verb: [verb, "tiny"] for verb in OF_A_JOB},
    "doctor": ["doctor", "--local"],
    "pull": ["pull", "tiny", "--to", "copy"],
    "bundle": ["bundle", "tiny", "-f", "tiny.zip"],
    "validate": ["validate", "tiny.yaml", "train.py"],
    "render": ["render", "tiny.yaml"],
}
WITH_FILES = ("train.py", "--image", "torch:1", "--dry-run", "client")
SUBMISSIONS = (("tiny.yaml", "--name", "other", "--local"), ("tiny.yaml", "--dry-run", "client"), WITH_FILES)
WHILE_IT_RUNS = ("run", "top", "stacks", "profile")


def misfits(verb: str, text: str) -> list[str]:
    """Return where the output of a command does not fit its schema; each line of some is an object."""
    schema = json.loads(schema_file(verb).read_text(encoding="utf-8"))
    values = [json.loads(line) for line in text.splitlines()] if verb in ("run", "logs") else [json.loads(text)]
    assert values
    return [f"{verb}: {fault}" for value in values for fault in faults(value, schema)]


def verbs_with_json() -> Iterator[str]:
    group: Any = get_command(application())
    for verb, command in group.commands.items():
        if any("--output" in option.opts and "json" in (option.help or "") for option in command.params):
            yield verb


def test_no_command_that_prints_json_is_left_out() -> None:
    assert set(verbs_with_json()) == {*COMMANDS, *WHILE_IT_RUNS, "submit"}


def test_what_each_command_prints_has_its_schema(ddpjob: Program) -> None:
    (ddpjob.folder / "train.py").write_text(SCRIPT)
    job = shell_job("tiny", "exec ddprun train.py", numNodes=1, nprocPerNode=2, **with_volume())
    with ddpjob.started("run", ddpjob.write(job), "-o", "json") as run:
        ddpjob.until_log("tiny", "saved")
        ranks = eventually("the ranks are shown", lambda: ddpjob("top", "tiny", "-o", "json").out)
        found = misfits("top", ranks) + misfits("stacks", ddpjob("stacks", "tiny", "-o", "json").out)
        waited = ddpjob("wait", "tiny", "--for", "running", "--timeout", "300")
        assert (waited.code, waited.out) == (0, "tiny is Running (this machine)\n")
        (ddpjob.folder / "go").touch()
        found += misfits("run", run.communicate(timeout=120)[0])
    for verb, command in COMMANDS.items():
        done = ddpjob(*command, "-o", "json")
        assert done.code == (1 if verb == "validate" else 0), done
        found += misfits(verb, done.out)
    for command in SUBMISSIONS:
        found += misfits("submit", ddpjob("submit", *command, "-o", "json").out)
    assert found == []
    lines = ddpjob("logs", "tiny", "-o", "json").objects
    saved = {(line["node"], line["rank"], line["attempt"]) for line in lines if line["line"] == "saved"}
    assert saved == {(0, 0, 1), (0, 1, 1)}
    assert misfits("get", ddpjob("get", "--local", "-o", "json").out) == []
