"""Completion: what the script that Typer writes for a shell gets when a user presses Tab."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.cli.program import Program, shell_job

# An address of no machine: a connection to it is never answered.
NOWHERE = "https://198.18.0.1:6443"


@pytest.fixture(scope="module")
def ddpjob(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """Provide a program that knows two local jobs, and a kubeconfig whose cluster is silent."""
    made = Program(tmp_path_factory.mktemp("completion"))
    assert made("run", made.write(shell_job("tiny", "true", numNodes=2, nprocPerNode=1))).code == 0
    assert made("run", made.write(shell_job("one", "true", numNodes=1, nprocPerNode=1))).code == 0
    context = {"cluster": "c", "user": "u"}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "clusters": [{"name": "c", "cluster": {"server": NOWHERE}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "here", "context": context}],
    }
    path = made.folder / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = made.environment | {"KUBECONFIG": str(path), "PATH": programs, "HOME": str(made.folder)}
    return Program(made.folder, environment)


def test_the_script_for_a_shell_is_printed_for_the_shell_that_is_named(ddpjob: Program) -> None:
    for shell, text in (("zsh", "#compdef ddpjob"), ("fish", "complete --command ddpjob"), ("bash", "complete -o")):
        done = ddpjob("--show-completion", shell, env={"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": ""})
        assert (done.code, done.err) == (0, "") and text in done.out, done


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize(
    ("line", "candidates"),
    [
        ("ddpjob logs --local ", ["one", "tiny"]),
        ("ddpjob wait ti", ["tiny"]),
        ("ddpjob lo", ["logs"]),
        ("ddpjob get --local nothing", []),
        ("ddpjob run --name ti", []),
    ],
)
def test_commands_and_jobs_are_completed(ddpjob: Program, shell: str, line: str, candidates: list[str]) -> None:
    words = {"COMP_WORDS": "\n".join(line.split(" ")), "COMP_CWORD": str(line.count(" "))}
    asked = {"_DDPJOB_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": line} | words
    done = ddpjob(env=asked | {"_TYPER_COMPLETE_FISH_ACTION": "get-args"})
    assert (done.code, done.err) == (0, ""), done
    printed = done.out.replace("_arguments '*: :((", "")  # for zsh; without candidates it is _files
    assert re.findall(r'^"?([a-z]+)', printed, re.MULTILINE) == candidates


def test_a_completion_is_silent_and_waits_for_no_cluster_and_no_login(ddpjob: Program) -> None:
    asked = {"_DDPJOB_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "ddpjob logs "}
    login = {
        "command": "sh",
        "args": ["-c", "echo log in >&2; exec sleep 60"],
        "apiVersion": "client.authentication.k8s.io/v1",
    }
    config = yaml.safe_load(Path(ddpjob.environment["KUBECONFIG"]).read_text())
    config["users"][0]["user"] = {"exec": login}
    for name, text in (("login", yaml.safe_dump(config)), ("broken", "{[")):
        path = ddpjob.folder / f"kubeconfig-{name}"
        path.write_text(text)
        begin = time.monotonic()
        done = ddpjob(env=asked | {"KUBECONFIG": str(path)})
        assert time.monotonic() - begin < 30, "it waited for the program that logs in"
        assert (done.code, done.err) == (0, "")
        assert "tiny" in done.out
