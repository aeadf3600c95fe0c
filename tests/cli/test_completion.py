"""Completion in the shells themselves: what a user gets who types a line and presses Tab."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.cli.program import Program, shell_job
from tests.kind.command import CommandError
from tests.kind.packages import require
from tests.prepared import skip_unless_ci
from tests.processes import die_with_parent, eventually

# An address of no machine: a connection to it is never answered.
NOWHERE = "https://198.18.0.1:6443"
STARTS = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], "bind 'set enable-bracketed-paste off'; eval \"$(ddpjob)\""),
    "zsh": (["zsh", "-f", "-i"], 'bindkey -e; autoload -Uz compinit; compinit -D -u; eval "$(ddpjob)"'),
}


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


def needs(shell: str) -> None:
    try:
        require(shell, install=False)
    except CommandError as error:
        skip_unless_ci(error)


def typed(ddpjob: Program, shell: str, *lines: str) -> list[str]:
    """Return what each line is after Tab. The shell prints it: the test puts ``echo`` before it."""
    command, setup = STARTS[shell]
    setup = setup.replace("$(ddpjob)", f"$(_DDPJOB_COMPLETE=source_{shell} ddpjob)")
    master, terminal = pty.openpty()
    os.set_blocking(master, False)
    written = bytearray()

    def said() -> list[str]:
        with contextlib.suppress(OSError):  # nothing new
            while data := os.read(master, 65536):
                written.extend(data)
        output = written.decode(errors="replace").splitlines()
        return [line.removeprefix("SAID ").rstrip() for line in output if line.startswith("SAID ")]

    process = subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, cwd=ddpjob.folder, env=ddpjob.environment,
        preexec_fn=die_with_parent, start_new_session=True,  # noqa: PLW1509 - one call into the kernel, no locks taken
    )  # fmt: skip
    os.close(terminal)
    try:
        os.write(master, f"PS1=; {setup}\n echo SAID ready\n".encode())
        eventually(f"{shell} is ready", lambda: "ready" in said(), timeout=60)
        for number, line in enumerate(lines):
            os.write(master, f"{line}\t\x01echo SAID \x05\n".encode())
            eventually(f"{shell} completes {line!r}", lambda number=number: len(said()) > number + 1, timeout=60)
        return said()[1:]
    finally:
        process.kill()
        process.wait()
        os.close(master)


def test_the_script_for_a_shell_is_printed_for_the_shell_that_is_named(ddpjob: Program) -> None:
    for shell, text in (("zsh", "#compdef ddpjob"), ("fish", "complete --command ddpjob"), ("bash", "complete -o")):
        done = ddpjob("--show-completion", shell, env={"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": ""})
        assert (done.code, done.err) == (0, "") and text in done.out, done


@pytest.mark.parametrize("shell", ["bash", pytest.param("zsh", marks=pytest.mark.soak)])
def test_a_shell_completes_commands_and_jobs(ddpjob: Program, shell: str) -> None:
    needs(shell)
    lines = {
        "ddpjob lo": "ddpjob logs",
        "ddpjob logs --local ti": "ddpjob logs --local tiny",
        "ddpjob wait ti": "ddpjob wait tiny",
        "ddpjob get --local nothing": "ddpjob get --local nothing",
    }
    assert typed(ddpjob, shell, *lines) == list(lines.values())


@pytest.mark.soak
def test_fish_completes_commands_and_jobs(ddpjob: Program) -> None:
    needs("fish")

    def completed(line: str) -> list[str]:
        script = f'_DDPJOB_COMPLETE=source_fish ddpjob | source; complete -C "{line}"'
        done = subprocess.run(
            ["fish", "--no-config", "-c", script],
            cwd=ddpjob.folder, env=ddpjob.environment, capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        assert done.stderr == ""
        return [found.partition("\t")[0] for found in done.stdout.splitlines()]

    assert completed("ddpjob lo") == ["logs"]
    assert completed("ddpjob logs --local ") == ["one", "tiny"]
    assert completed("ddpjob wait ti") == ["tiny"]
    assert "job.yaml" not in completed("ddpjob get --local nothing")


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


def test_the_plugin_of_kubectl_calls_itself_so(ddpjob: Program) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        plugin = Path(sys.executable).with_name("kubectl-ddpjob")
        return subprocess.run(
            [plugin, *arguments], env=ddpjob.environment, capture_output=True, text=True, timeout=60, check=False
        )

    shown = run("logs", "--help").stdout
    assert "Usage: kubectl ddpjob logs " in shown
    assert "  kubectl ddpjob logs mnist-cpu" in shown
    assert "completion" not in run("--help").stdout
    refused = run("logs")
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[2].startswith("next:  kubectl ddpjob logs --help")
