"""Where a command acts, and what it says about a place that it cannot reach."""

from __future__ import annotations

from tests.cli.program import Program


def test_a_cluster_that_cannot_be_reached_is_no_mistake_of_the_command_line(ddpjob: Program) -> None:
    done = ddpjob("get", "mnist", "--context", "nowhere", env={"KUBECONFIG": str(ddpjob.folder / "missing")})
    assert (done.code, done.out) == (1, "")
    assert [line[:7] for line in done.err.splitlines()] == ["error: ", "hint:  ", "next:  "]
