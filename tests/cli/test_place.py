"""Where a command acts, and what it says about a place that it cannot reach."""

from __future__ import annotations

import pytest

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


@pytest.mark.parametrize(("path", "code"), [("~nosuch/config", 0), ("n" * 300, 1)], ids=["no-user", "unknown"])
def test_a_kubeconfig_that_cannot_be_looked_for_is_no_traceback(ddpjob: Program, path: str, code: int) -> None:
    done = ddpjob("ls", env={"KUBECONFIG": path})
    assert (done.code, "Traceback" in done.err) == (code, False), done.err
