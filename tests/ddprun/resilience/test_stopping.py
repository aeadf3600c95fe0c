"""SIGTERM ends a run within the grace with code 75, even if the main thread is blocked in C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddprun.heartbeat import Heartbeat
from ddprun.self_watchdog import SelfWatchdog
from ddprun.signals import StopFlag
from tests.ddptrain.builders import SMALL
from tests.ddptrain.runs import ForkServer, Run, wait_until
from tests.processes import free_port

pytestmark = pytest.mark.together

# Seconds. A rank blocked in training exits by itself 3 s before the launcher kills it, and the figure may be rounded.
GRACE = 12
GRADIENTS = "all_reduce of gradients"


def blocked(ddptrain: ForkServer, idx: Path, checkpoints: Path, chaos: str) -> Run:
    """Start two ranks, one of them blocked in C at the given place."""
    run = ddptrain.start(
        "launch", "--nproc-per-node", 2, "--stop-grace", GRACE, *SMALL, "--data-dir", idx, "--checkpoint-dir",
        checkpoints, "--checkpoint-every", 2, "--chaos", chaos,
    )  # fmt: skip
    wait_until(lambda: "chaos: hang" in run.output() or run.ended, "the rank to block")
    assert not run.ended, run.output()
    return run


@pytest.mark.parametrize(
    "place",
    [
        *("1:0:rendezvous", "0:0:data"),
        *(
            pytest.param(place, marks=pytest.mark.soak)
            for place in ("1:0:init_process_group", "1:0:setup", "0:0:resume")
        ),
    ],
)
def test_a_rank_blocked_before_training_exits_at_once(
    ddptrain: ForkServer, idx: Path, tmp_path: Path, place: str
) -> None:
    assert seconds_to_exit(blocked(ddptrain, idx, tmp_path, f"hang:{place}")) < GRACE - 4


@pytest.mark.parametrize(
    "place",
    [
        *(f"1:3:{GRADIENTS}", "0:2:save"),
        *(pytest.param(place, marks=pytest.mark.soak) for place in ("1:3:batch", "1:9:evaluate")),
    ],
)
def test_a_rank_blocked_in_training_exits_unsaved_before_the_grace_ends(
    ddptrain: ForkServer, idx: Path, tmp_path: Path, place: str
) -> None:
    assert seconds_to_exit(blocked(ddptrain, idx, tmp_path, f"hang:{place}")) > GRACE - 4


def seconds_to_exit(run: Run) -> float:
    """Return the seconds from SIGTERM to the end; every rank must exit by itself."""
    begun = time.monotonic()
    run.stop()
    assert run.wait() == 75, run.output()
    taken = time.monotonic() - begun
    assert_exited_by_itself(run)
    return taken


def assert_exited_by_itself(run: Run) -> None:
    message = run.message()
    assert (message["outcome"], message["code"], message["saved"]) == ("stopped", 75, False)
    assert "killed" not in message["message"]
    assert "stopped by a signal" in message["message"]


def test_a_blocked_rank_without_a_launcher_exits_too(ddptrain: ForkServer, idx: Path) -> None:
    run = ddptrain.start("train", "--stop-grace", 2, *SMALL, "--data-dir", idx, "--chaos", "hang:0:2")
    wait_until(lambda: "chaos: hang" in run.output(), "the rank to block")
    os.kill(run.pid, signal.SIGTERM)
    assert run.wait() == 75, run.output()
    assert_exited_by_itself(run)
    assert run.message()["phase"] == "train"


def test_end_is_reported_once() -> None:
    by_watchdog: list[Exception] = []
    heartbeat = Heartbeat()
    heartbeat.mark("train")
    watchdog = SelfWatchdog(StopFlag(), heartbeat, by_watchdog.append, grace=2.0, hang_timeout=0.0)
    watchdog._check_stop(1.0)
    assert by_watchdog == [], "the main thread has time left to save"
    assert watchdog.claim_report(), "the main thread reports"
    watchdog._check_stop(2.0)
    assert by_watchdog == []


@pytest.mark.parametrize("verb", [("train",), ("launch", "--nproc-per-node", 2)])
def test_closing_the_terminal_stops_a_run_and_saves(
    ddptrain: ForkServer, idx: Path, tmp_path: Path, verb: tuple[object, ...]
) -> None:
    argv = (*verb, *SMALL, "--data-dir", idx, "--checkpoint-dir", tmp_path, "--step-delay", 0.1)
    run = ddptrain.start(*argv, "--checkpoint-every", 0)
    run.at_step(3)
    os.kill(run.pid, signal.SIGHUP)
    assert run.wait() == 75, run.output()
    message = run.message()
    assert message["saved"]
    assert message["checkpoint"]["step"] == message["step"] >= 3


def test_a_run_under_nohup_continues_without_its_terminal(idx: Path, tmp_path: Path) -> None:
    argv = ["launch", "--nproc-per-node", 2, *SMALL, "--data-dir", idx, "--step-delay", 0.2]
    command = ["nohup", sys.executable, "-m", "ddptrain", *map(str, argv)]
    log, port = tmp_path / "log", free_port()
    env = {"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path), "DDPJOB_PROGRESS_PORT": str(port)}
    with log.open("wb") as stdout:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stdout, env=env)
    run = Run(process.pid, log, tmp_path / "termination", port)
    try:
        run.at_step(2)
        for pid in (process.pid, *run.ranks().values()):
            os.kill(pid, signal.SIGHUP)
        assert process.wait(120) == 0, run.output()
    finally:
        process.kill()
