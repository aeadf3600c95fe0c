"""The commands of ``ddpjob`` on a real cluster with the operator as deployed, with the rights of edit and of view."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from ddpjob.api.objects import Json
from tests.e2e.trials import Trial, Trials, Wait, small_job
from tests.e2e.users import kubeconfig_of

pytestmark = [pytest.mark.kind, pytest.mark.timeout(900, func_only=True)]


@dataclass
class User:
    """Runs commands with the rights of a role, and keeps what they said."""

    kubeconfig: Path
    folder: Path
    done: dict[str, subprocess.CompletedProcess[str]] = field(default_factory=dict)

    def __call__(self, *command: str, code: int = 0, seconds: float = 300) -> str:
        """Return the standard output of a command. Fails the trial if its exit code is another one."""
        words = [sys.executable, "-m", "ddpjob.cli.main", *command]
        env = os.environ | {"KUBECONFIG": str(self.kubeconfig), "DDPJOB_STATE_DIR": str(self.folder / "state")}
        done = subprocess.run(
            words, env=env, cwd=self.folder, capture_output=True, text=True, timeout=seconds, check=False
        )
        self.done[" ".join(command)] = done
        assert done.returncode == code, f"{command}: {done.returncode} instead of {code}: {done.stdout}{done.stderr}"
        return done.stdout

    def read(self, *command: str) -> Json:
        """Return what a command prints with ``-o json``."""
        found: Json = json.loads(self(*command, "-o", "json"))
        return found

    def is_refused(self, *command: str) -> None:
        """Check that a command is not allowed and says so in three lines."""
        self(*command, code=1)
        lines = self.done[" ".join(command)].stderr.splitlines()
        assert [line[:7] for line in lines[-3:]] == ["error: ", "hint:  ", "next:  "], lines
        assert "forbidden" in lines[-3], lines


def commands(trial: Trial) -> None:
    """Use each command on one job, which takes longer than they do, from its submission to its deletion."""
    trial.folder.mkdir()
    trial.folder.chmod(0o777)
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        (here / "job.yaml").write_text(
            yaml.safe_dump(small_job(trial.name, "--epochs", "100", "--checkpoint-every", "1000"))
        )
        editor = User(kubeconfig_of(trial, "edit", here), here)
        viewer = User(kubeconfig_of(trial, "view", here), here)
        viewer.is_refused("submit", "job.yaml")
        editor("submit", "job.yaml")
        editor("wait", trial.name, "--for", "running", "--timeout", "300")
        trial.until_trained()
        while_it_runs(trial.name, viewer)
        while_it_runs(trial.name, editor)
        with_the_volume(trial.name, editor)
        for command in (["top"], ["suspend"], ["restart"], ["delete"], ["pull"], ["checkpoints"]):
            viewer.is_refused(*command, trial.name)
        editor("suspend", trial.name)
        assert editor("wait", trial.name, "--timeout", "120", code=102)
        editor("resume", trial.name)
        editor("wait", trial.name, "--for", "running", "--timeout", "300")
        editor("restart", trial.name)
        editor("delete", trial.name)
        editor("get", trial.name, code=2)


def while_it_runs(name: str, user: User) -> None:
    """Read all that the role view may read."""
    assert [row["metadata"]["name"] for row in user.read("ls")["items"]] == [name]
    assert f"{name} is Running" in user("get", name)
    verdict = user.read("why", name)
    assert (verdict["stage"], verdict["isAbnormal"]) == ("Running", False), verdict
    assert user("logs", name, "--tail", "3", "--all").strip()
    reasons = [event["reason"] for event in user.read("events", name)["events"]]
    assert {"Started", "Running", "Scheduled"} <= set(reasons), reasons
    assert user("describe", name).strip()
    checks = user.read("doctor", "--context", context_of(user))["checks"]
    assert {"crd", "rights", "operator"} <= {check["name"] for check in checks}
    assert [check for check in checks if check["status"] == "error"] == []
    bundle = f"{user.kubeconfig.stem}.zip"
    assert user.read("bundle", name, "-f", bundle)["redaction"]["samePlan"]
    assert user.read("replay", bundle)["job"]


def context_of(user: User) -> str:
    return str(yaml.safe_load(user.kubeconfig.read_text())["current-context"])


def with_the_volume(name: str, user: User) -> None:
    """Read the table of ranks, and copy and draw what the volume holds."""
    ranks = user.read("top", name)["ranks"]
    assert [row["rank"] for row in ranks] == [0, 1]
    assert all(row["step"] > 0 for row in ranks)
    saved = user.read("checkpoints", name)["checkpoints"]
    assert {checkpoint["state"] for checkpoint in saved} == {"Intact"}
    file = user.read("pull", name, "--to", "copy")["files"][0]
    assert (user.folder / "copy" / file["path"]).stat().st_size == file["bytes"]
    user("pull", name, "--to", "copy", "--metrics")
    assert user.read("plot", name, "--metrics", "copy")["steps"]
    user("report", name, "--metrics", "copy", "-o", "page.html")
    assert "<svg" in (user.folder / "page.html").read_text()


TRIALS = Trials.of(1, commands)


def test_each_command_works_with_the_rights_that_it_needs(outcome: Wait) -> None:
    outcome(commands)
