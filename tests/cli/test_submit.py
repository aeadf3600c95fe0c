"""``ddpjob submit``: real jobs in the background of this machine, dry runs, and a real API server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from ddpjob import Client
from tests.cli.program import Program, shell_job
from tests.worlds.control_plane import ControlPlane

TRAIN = """
import sys
from pkg import word
print(f"{word.WORD} {sys.argv[1:]}")
open("wrote", "a").close()
"""
NEVER = {"restartPolicy": {"maxRestarts": 0}}


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """Provide a package of two files, and a file that is ignored."""
    folder = tmp_path / "work"
    (folder / "pkg").mkdir(parents=True)
    (folder / "train.py").write_text(TRAIN)
    (folder / "pkg" / "word.py").write_text("WORD = 'sent'")
    (folder / "notes.txt").touch()
    (folder / ".gitignore").write_text("*.txt")
    return folder


def without_cluster(program: Program) -> dict[str, str]:
    return {"KUBECONFIG": str(program.folder / "missing")}


def test_a_package_runs_in_its_directory_in_the_background(ddpjob: Program, work: Path) -> None:
    options = ("--local", "--workdir", "work", "--nodes", "2", "--nproc", "1", "--name", "mine", "--wait")
    done = ddpjob("submit", "work/train.py", *options, "--", "--lr", "0.1")
    assert (done.code, done.err) == (0, "")
    first, *_ = done.out.partition("\nmine is Succeeded (this machine)\n")[0].splitlines()
    assert first == "mine is submitted (this machine)"
    assert (work / "wrote").exists(), "the directory itself, not a copy"
    lines = ddpjob("logs", "mine", "--all").out.splitlines()
    assert sorted(line.split("sent")[1] for line in lines if "sent" in line) == [" ['--lr', '0.1']"] * 2
    again = ddpjob("submit", "work/train.py", *options).is_refused()
    assert again[0].startswith("error: there is a job mine already")
    assert again[2] == "next:  ddpjob delete mine deletes it and keeps its checkpoints; or use another name"


def test_a_wait_shows_each_change_and_ends_with_what_why_says(ddpjob: Program) -> None:
    file = ddpjob.write(shell_job("tiny", "until [ -e go ]; do sleep 0.02; done; exit 3", **NEVER))
    with ddpjob.started("submit", file, "--local", "--wait") as submit:
        assert submit.stdout is not None
        lines = iter(submit.stdout.readline, "")
        assert next(lines) == "tiny is submitted (this machine)\n"
        assert next(line for line in lines if "  Running, nodes 1/1" in line), "while it runs"
        (ddpjob.folder / "go").touch()
        changes = [line.rstrip("\n") for line in lines]
        assert submit.wait(100) == 100
    assert any("  Failed, nodes 0/1" in line for line in changes), changes
    end = changes.index("tiny is Failed (this machine)")
    assert changes[end + 1 :] == ddpjob("why", "tiny").out.splitlines()


def test_a_wait_on_a_terminal_shows_the_card_of_run(ddpjob: Program) -> None:
    file = ddpjob.write(shell_job("tiny", "exit 0", **NEVER))
    with ddpjob.on_terminal("submit", file, "--local", "--wait") as terminal:
        assert terminal.ends() == 0
        shown = terminal()
    for text in ("NODE", "ATTEMPT", "tiny is Succeeded", "stage: "):
        assert text in shown, shown


def test_a_dry_run_of_the_client_prints_what_would_be_created_and_needs_no_cluster(ddpjob: Program, work: Path) -> None:
    command = ("submit", "work/train.py", "--image", "torch:1", "--workdir", "work", "--launcher", "torchrun")
    done = ddpjob(*command, "--dry-run", "client", "--output", "yaml", env=without_cluster(ddpjob))
    assert (done.code, done.err.startswith("· sends ")) == (0, True)
    secret, job = yaml.safe_load_all(done.out)
    assert (secret["kind"], job["spec"]["command"], "launcher" in job["spec"]) == (
        "Secret",
        ["torchrun", "train.py"],
        False,
    )
    assert ddpjob("validate", "-", stdin=done.out).code == 0
    listed = ddpjob(*command, "--dry-run", "client", "--output", "json", env=without_cluster(ddpjob))
    assert [item["kind"] for item in json.loads(listed.out)["items"]] == ["Secret", "DDPJob"]
    text = ddpjob(*command, "--dry-run", "client", env=without_cluster(ddpjob))
    assert text.out == "train is valid (nothing was sent)\n"
    (work / ".env.local").write_text("TOKEN=x")
    assert ddpjob(*command, "--dry-run", "client", env=without_cluster(ddpjob)).err == (
        f"· sends 3 files of work, {len(TRAIN) + 18} B: .gitignore, pkg/word.py, train.py\n"
        "· leaves out .env.local: such names often hold passwords or keys\n"
    )
    local = ddpjob(*command, "--local", "--dry-run", "server", "--output", "name")
    assert (local.code, local.out) == (0, "ddpjob.ddpjob.dev/train\n")
    assert Client.local(ddpjob.state).list() == []


def test_words_change_what_a_file_has_and_set_comes_last(ddpjob: Program) -> None:
    known = {"env": [{"name": "LR", "value": "1"}, {"name": "B", "value": "2"}], "restartPolicy": {"maxRestarts": 9}}
    known |= {"checkpoint": {"claimName": "old", "mountPath": "/mine"}, "resources": {"limits": {"cpu": 1}}}
    file = ddpjob.write(shell_job("tiny", "true", **known))
    words = ("--env", "LR=3", "--checkpoint", "new", "--gpus", "2", "--memory", "8Gi", "--max-restarts", "1")
    done = ddpjob("submit", file, *words, "--set", "restartPolicy.maxRestarts=2", "--dry-run", "client", "-o", "yaml")
    spec = yaml.safe_load(done.out)["spec"]
    assert spec["env"] == [{"name": "LR", "value": "3"}, {"name": "B", "value": "2"}]
    assert spec["checkpoint"] == {"claimName": "new", "mountPath": "/mine"}
    limits, requests = {"cpu": 1, "nvidia.com/gpu": 2, "memory": "8Gi"}, {"memory": "8Gi"}
    assert spec["resources"] == {"limits": limits, "requests": requests}
    assert spec["restartPolicy"] == {"maxRestarts": 2}
    refused = ddpjob("submit", file, "--checkpoint", "1Gi", "--set", "numNodes=2", "--dry-run", "client").is_refused()
    assert "--set numNodes=… beside --checkpoint" in refused[0]
    assert "env LR: it is not NAME=VALUE" in ddpjob("submit", file, "--env", "LR").is_refused()[0]
    wrong = ddpjob.write(shell_job("wrong", "true", env=5, resources=[], restartPolicy="x"))
    assert "spec.env" in ddpjob("submit", wrong, *words, "--dry-run", "client").is_refused()[0]


def test_mistakes_are_three_lines_and_send_nothing(ddpjob: Program, work: Path) -> None:
    nowhere = without_cluster(ddpjob)
    wrong = ddpjob.write(shell_job("wrong", "true", numNodes=0))
    assert "spec.numNodes" in ddpjob("submit", wrong, "--local").is_refused()[0]
    assert 'no field "numNods"' in ddpjob("submit", wrong, "--set", "numNods=1", env=nowhere).is_refused()[0]
    lines = ddpjob(
        "submit", "work/train.py", "--image", "x", "--workdir", "nowhere", "--dry-run", "client"
    ).is_refused()
    assert "there is no such directory" in lines[0]
    both = ddpjob("submit", "work/train.py", "--local", "--context", "x").is_refused()
    assert "--context is for the jobs of a cluster" in both[0]
    assert "--wait shows" in ddpjob("submit", "work/train.py", "--wait", "--output", "json").is_refused()[0]
    done = ddpjob("submit", "work/train.py", "--image", "x", env=nowhere)
    assert (done.code, done.out) == (1, "")
    assert done.err.splitlines()[0] == "error: there is no cluster to submit to: no kubeconfig"
    assert f"{nowhere['KUBECONFIG']}, which does not exist" in done.err.splitlines()[1]
    assert "--local" in done.err.splitlines()[2]


@pytest.mark.apiserver
def test_a_script_is_submitted_to_the_cluster_with_its_directory(
    ddpjob: Program, work: Path, control_plane: ControlPlane, namespace: str
) -> None:
    env = {"KUBECONFIG": str(control_plane.kubeconfig(name=namespace, namespace=namespace))}
    command = ("submit", "work/train.py", "--nodes", "2", "--nproc", "1", "--image", "torch:1", "--workdir", "work")
    with Client.cluster(kubeconfig=env["KUBECONFIG"]) as client:
        done = ddpjob(*command, "--dry-run", "server", env=env)
        assert (done.code, done.err.startswith("· sends "), client.list()) == (0, True, [])
        assert done.out.startswith("train is valid (cluster ")
        done = ddpjob(*command, "--", "--lr", "1", env=env)
        assert (done.code, done.err.startswith("· sends ")) == (0, True), done
        assert f"namespace {namespace}" in done.out
        (made,) = client.list()
        shown = ddpjob(*command, "--name", "c", "--dry-run", "client", "-o", "yaml", env=env)
        control_plane.request("POST", f"/api/v1/namespaces/{namespace}/secrets", next(yaml.safe_load_all(shown.out)))
        assert (made.spec.command, made.spec.num_nodes) == (["ddprun", "train.py", "--lr", "1"], 2)
        assert (made.spec.launcher, made.spec.working_dir) == ("Injected", "/workdir")
        assert "there is a job train already" in ddpjob(*command[:-2], env=env).is_refused()[0]
        assert "has no image" in ddpjob("submit", "work/train.py", "--name", "b", env=env).is_refused()[0]
        waited = ddpjob(*command, "--name", "b", "--wait", "--timeout", "0.1", env=env)
        assert (waited.code, waited.out.startswith("b is submitted (cluster ")) == (101, True)
