"""Failures on order: each strikes where and when it was told to, once, and the run after it goes through."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddptrain.chaos import Plan, planned
from ddptrain.config import Config
from ddptrain.errors import UsageError
from tests.trainer.runs import ForkServer, assert_same_end
from tests.trainer.test_resume import command


def test_a_crash_ends_with_the_exception_and_the_next_life_with_the_undisturbed_weights(
    ddptrain: ForkServer, idx: Path, tmp_path: Path
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    ddptrain.run(*command(2, idx, whole, "--model", "mlp"))
    run = ddptrain.run(*command(2, idx, cut, "--model", "mlp", "--chaos", "crash:1:7"), code=1)
    message = run.message()
    assert (message["rank"], message["exception"], message["cause"]) == (1, "RuntimeError", "own")
    assert "chaos: crash in phase batch of step 7" in run.output()
    again = {"DDPJOB_ATTEMPT": 2}  # the operator starts the same command again
    ddptrain.run(*command(2, idx, cut, "--model", "mlp", "--chaos", "crash:1:7"), env=again)
    assert_same_end(whole, cut)


def test_a_slow_rank_only_costs_time(
    ddptrain: ForkServer, idx: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, slow = tmp_path / "whole", tmp_path / "slow"
    ddptrain.run(*command(2, idx, whole, "--model", "mlp"))
    run = ddptrain.run(*command(2, idx, slow, "--model", "mlp", "--chaos", "slow:1:25"))
    assert "chaos: slow in phase batch of step 25" in run.output()
    assert_same_end(whole, slow)


@pytest.mark.parametrize("text", ["kill", "kill:1", "melt:1:7", "kill:one:7", "kill:1:seven", "kill:-1:7"])
def test_a_plan_that_cannot_be_is_refused_with_an_example(ddptrain: ForkServer, text: str) -> None:
    with pytest.raises(UsageError, match=f"--chaos {text} is not") as caught:
        Plan.parse(text)
    assert "kill:1:7" in caught.value.next_step


def test_a_plan_is_refused_before_any_rank_starts(ddptrain: ForkServer) -> None:
    assert "[rank" not in ddptrain.run("launch", "--nproc-per-node", 2, "--chaos", "melt:1:7", code=2).output()


@pytest.mark.parametrize(
    ("rank", "env", "strikes"),
    [
        (1, {}, True), (0, {}, False), (1, {"DDPJOB_ATTEMPT": "1"}, True), (1, {"DDPJOB_ATTEMPT": "2"}, False),
        (1, {"TORCHELASTIC_RESTART_COUNT": "0"}, True), (1, {"TORCHELASTIC_RESTART_COUNT": "1"}, False),
    ],
)  # fmt: skip
def test_it_strikes_the_rank_named_in_the_first_life_only(rank: int, env: dict[str, str], strikes: bool) -> None:
    assert (planned(Config(chaos="kill:1:7"), rank, env) is not None) is strikes


def test_it_strikes_once_at_the_first_such_phase_from_the_step_on(monkeypatch: pytest.MonkeyPatch) -> None:
    strike: Any = planned(Config(chaos="crash:1:7:evaluate"), 1, {})
    for phase, step in (("batch", 7), ("evaluate", 6)):
        strike(phase, step)
    with pytest.raises(RuntimeError, match="a crash was ordered"):
        strike("evaluate", 9)
    strike("evaluate", 9)
