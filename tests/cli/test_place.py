"""Where a command acts, and what it says about a place that it cannot reach."""

from __future__ import annotations

import pytest
import yaml

from tests.cli.program import Program


def test_a_cluster_that_cannot_be_reached_is_no_mistake_of_the_command_line(ddpjob: Program) -> None:
    done = ddpjob("get", "mnist", "--context", "nowhere", env={"KUBECONFIG": str(ddpjob.folder / "missing")})
    assert (done.code, done.out) == (1, "")
    assert [line[:7] for line in done.err.splitlines()] == ["error: ", "hint:  ", "next:  "]


@pytest.mark.parametrize("content", ["a: [", "a: \t'b", "text", "- a"], ids=["open", "tab", "text", "list"])
def test_a_kubeconfig_that_is_none_is_named(ddpjob: Program, content: str) -> None:
    file = ddpjob.folder / "kubeconfig"
    file.write_text(content)
    line = ddpjob("get", "mnist", env={"KUBECONFIG": str(file)}).is_refused(1)[0]
    assert line.startswith(f"error: no cluster to connect to: {file}: ")


@pytest.mark.parametrize(("plugin", "said"), [("no-such-plugin", "No such file"), ("false", "process returned 1")])
def test_a_credential_plugin_that_fails_is_named(ddpjob: Program, plugin: str, said: str) -> None:
    run = {"apiVersion": "client.authentication.k8s.io/v1", "command": plugin, "interactiveMode": "Never"}
    config = {
        "clusters": [{"name": "x", "cluster": {"server": "https://127.0.0.1:1"}}],
        "users": [{"name": "x", "user": {"exec": run}}],
        "contexts": [{"name": "x", "context": {"cluster": "x", "user": "x"}}],
        "current-context": "x",
    }
    file = ddpjob.folder / "kubeconfig"
    file.write_text(yaml.safe_dump(config))
    lines = ddpjob("get", "mnist", env={"KUBECONFIG": str(file)}).is_refused(1)
    assert lines[0].startswith("error: no credentials for the cluster: ") and said in lines[0]


@pytest.mark.parametrize(("path", "code"), [("~nosuch/config", 0), ("n" * 300, 1)], ids=["no-user", "unknown"])
def test_a_kubeconfig_that_cannot_be_looked_for_is_no_traceback(ddpjob: Program, path: str, code: int) -> None:
    done = ddpjob("get", env={"KUBECONFIG": path})
    assert (done.code, "Traceback" in done.err) == (code, False), done.err
