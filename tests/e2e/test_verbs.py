"""The commands of ``ddpjob`` on a real cluster with the operator as deployed, with the rights of edit and of view."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from ddpjob.api.objects import Json
from tests.e2e.installation import ROOT
from tests.e2e.kubectl import until
from tests.e2e.trials import Trial, Trials, Wait, small_job
from tests.json_schema import faults
from tests.processes import end, spawn

PYTORCHJOB = ROOT / "tests" / "convert" / "jobs" / "pytorchjob-torchrun.yaml"
SCHEMAS = {path.stem: path for path in (ROOT / "docs" / "reference" / "schemas").glob("*.json")}
PROGRAM = (sys.executable, "-m", "ddpjob.cli.main")
OF_VERB = {"why": "explanation"}
"""Schemas that are not named as the command."""

pytestmark = [pytest.mark.kind, pytest.mark.timeout(900, func_only=True)]


@dataclass
class User:
    """Runs commands with the rights of a role, and keeps what they said."""

    kubeconfig: Path
    folder: Path
    done: dict[str, subprocess.CompletedProcess[str]] = field(default_factory=dict)

    @property
    def env(self) -> dict[str, str]:
        return os.environ | {"KUBECONFIG": str(self.kubeconfig), "DDPJOB_STATE_DIR": str(self.folder / "state")}

    def __call__(self, *command: str, code: int = 0, seconds: float = 300) -> str:
        """Return the standard output of a command. Fails the trial if its exit code is another one."""
        done = subprocess.run(
            [*PROGRAM, *command],
            env=self.env,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        self.done[" ".join(command)] = done
        assert done.returncode == code, f"{command}: {done.returncode} instead of {code}: {done.stdout}{done.stderr}"
        return done.stdout

    def read(self, *command: str) -> Json:
        """Return what a command prints with ``-o json``, and check it against its schema."""
        found: Json = json.loads(self(*command, "-o", "json"))
        if (schema := SCHEMAS.get(OF_VERB.get(command[0], command[0]))) is not None:
            assert not list(faults(found, json.loads(schema.read_text()))), command
        return found

    @contextmanager
    def follows(self, name: str) -> Iterator[Path]:
        """Follow the logs of a job, and provide the file with an object for each line."""
        logs = self.folder / "follow.log"
        process = spawn([*PROGRAM, "logs", name, "-f", "-o", "json"], logs, self.env)
        try:
            yield logs
        finally:
            end(process)

    def is_refused(self, *command: str) -> None:
        """Check that a command is not allowed and says so in three lines."""
        self(*command, code=1)
        lines = self.done[" ".join(command)].stderr.splitlines()
        assert [line[:7] for line in lines[-3:]] == ["error: ", "hint:  ", "next:  "], lines
        assert "forbidden" in lines[-3], lines


def kubeconfig_of(trial: Trial, role: str, folder: Path) -> Path:
    """Return a kubeconfig with the rights of a role in the namespace."""
    space = trial.kubectl.namespace
    trial.kubectl("create", "serviceaccount", role)
    trial.kubectl("create", "rolebinding", role, f"--clusterrole={role}", f"--serviceaccount={space}:{role}")
    cluster = yaml.safe_load(trial.cluster.kubeconfig.read_text())["clusters"][0]["cluster"]
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "kind", "cluster": cluster}],
        "users": [{"name": role, "user": {"token": trial.kubectl("create", "token", role).strip()}}],
        "contexts": [{"name": role, "context": {"cluster": "kind", "user": role, "namespace": space}}],
        "current-context": role,
    }
    path = folder / f"{role}.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


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
        assert editor.read("get")["items"] == []
        editor("submit", "job.yaml")
        from_files(editor)  # while the job starts
        editor("wait", trial.name, "--for", "running", "--timeout", "300")
        viewer("wait", trial.name, "--timeout", "0", code=101)
        trial.until_trained()
        while_it_runs(trial.name, editor)
        with_the_volume(trial.name, editor)
        drawn(trial.name, editor)
        inside(trial.name, editor)
        viewer.is_refused("top", trial.name)
        viewer.is_refused("stacks", trial.name)
        with editor.follows(trial.name) as logs:
            stop_and_start(trial, editor, viewer, logs)
        editor("delete", trial.name)
        editor("get", trial.name, code=2)


def from_files(user: User) -> None:
    """Write and check jobs, and let the API server check what `convert` makes of a PyTorchJob."""
    (user.folder / "started.yaml").write_text(user("init"))
    checked = user.read("validate", "started.yaml", "job.yaml")
    assert checked["valid"] and len(checked["files"]) == 2, checked
    kinds = [made["kind"] for made in yaml.safe_load_all(user("render", "job.yaml")) if made]
    assert (kinds.count("Pod"), kinds.count("Service")) == (2, 1), kinds
    (user.folder / "converted.yaml").write_text(user("convert", str(PYTORCHJOB)))
    assert user("submit", "converted.yaml", "--dry-run", "server", "-o", "name").strip()


def stop_and_start(trial: Trial, editor: User, viewer: User, logs: Path) -> None:
    """Suspend, resume and restart the job. The restart is one attempt more. logs: where a command follows its logs."""
    name = trial.name
    until_followed(logs, attempt_of(name, editor))
    editor("suspend", name)
    editor("wait", name, "--timeout", "120", code=102)
    viewer.is_refused("resume", name)
    editor("resume", name)
    editor("wait", name, "--for", "running", "--timeout", "300")
    before = attempt_of(name, editor)
    until_followed(logs, before)
    editor("restart", name)
    trial.until("the next attempt", lambda job: job["status"]["attempt"] > before)
    editor("wait", name, "--for", "running", "--timeout", "300")
    assert attempt_of(name, editor) == before + 1
    until_followed(logs, before + 1)


def until_followed(logs: Path, attempt: int) -> None:
    """Wait for lines of an attempt. The log of a pod that ends before it is read goes with the pod."""
    until(f"lines of attempt {attempt}", lambda: f'"attempt": {attempt},' in logs.read_text(), seconds=300)


def attempt_of(name: str, user: User) -> int:
    (job,) = (job for job in user.read("get")["items"] if job["metadata"]["name"] == name)
    return int(job["status"]["attempt"])


def while_it_runs(name: str, user: User) -> None:
    """Read all that the role view may read."""
    assert [row["metadata"]["name"] for row in user.read("get")["items"]] == [name]
    assert f"{name} is Running" in user("get", name)
    verdict = user.read("why", name)
    assert (verdict["stage"], verdict["isAbnormal"]) == ("Running", False), verdict
    assert user("logs", name, "--tail", "3", "--all").strip()
    reasons = [event["reason"] for event in user.read("describe", name)["events"]]
    assert {"Started", "Running", "Scheduled"} <= set(reasons), reasons
    assert user("describe", name).strip()
    checks = user.read("doctor", "--context", context_of(user))["checks"]
    assert {"api-server", "operator"} <= {check["name"] for check in checks}
    assert [check for check in checks if check["status"] == "error"] == []
    bundle = f"{user.kubeconfig.stem}.zip"
    assert user.read("bundle", name, "-f", bundle)["redaction"]["hidden"]


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


def inside(name: str, user: User) -> None:
    """Look inside the ranks of both nodes through the API server."""
    stacks = user.read("stacks", name)
    assert [(row["rank"], row["answered"], bool(row["where"])) for row in stacks["ranks"]] == [
        (0, True, True), (1, True, True),
    ]  # fmt: skip
    profile = user.read("profile", name, "--steps", "3", "--to", "trace.json.gz")
    assert [(row["state"], row["steps"]) for row in profile["ranks"]] == [("done", 3)] * 2, profile
    assert (user.folder / "trace.json.gz").stat().st_size > 0 and profile["waits"]


def drawn(name: str, user: User) -> None:
    """Draw the curves of a copy of the metrics."""
    assert "loss" in user("plot", name, "--metrics", "copy")
    user("report", name, "--metrics", "copy", "-f", "page.html")
    assert "<svg" in (user.folder / "page.html").read_text()


TRIALS = Trials.of(1, commands)


def test_each_command_works_with_the_rights_that_it_needs(outcome: Wait) -> None:
    outcome(commands)
