"""``--chaos``: each fault occurs once, at its rank, step and phase, and the next attempt finishes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddprun.errors import UsageError
from ddprun.fault_injection import InjectedFault, check_rank, planned
from ddptrain.config import Config
from tests.ddptrain.builders import SAVING, SMALL, command
from tests.ddptrain.runs import ForkServer, Whole, assert_same_end, wait_until

pytestmark = pytest.mark.together


def test_the_attempt_after_a_crash_ends_with_the_weights_of_an_undisturbed_run(
    ddptrain: ForkServer, idx: Path, tmp_path: Path, whole: Whole
) -> None:
    cut = tmp_path / "cut"
    run = ddptrain.run(*command(2, idx, cut, "--chaos", "crash:1:7"), code=1)
    message = run.message()
    assert (message["rank"], message["exception"], message["cause"]) == (1, "RuntimeError", "own")
    assert "chaos: crash in phase batch of step 7" in run.output()
    again = {"DDPJOB_ATTEMPT": 2}  # the operator restarts the same command
    ddptrain.run(*command(2, idx, cut, "--chaos", "crash:1:7"), env=again)
    assert_same_end(whole(2, *SAVING).folder, cut)


@pytest.fixture
def limited_memory() -> Iterator[Path]:
    """A cgroup with a memory limit just large enough for two ranks."""
    base = Path("/sys/fs/cgroup")
    v1 = (base / "memory").is_dir()
    folder = (base / "memory" if v1 else base) / f"ddptrain-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / ("memory.limit_in_bytes" if v1 else "memory.max")).write_text(str(1500 * 2**20))
    except OSError as error:
        with contextlib.suppress(OSError):
            folder.rmdir()
        pytest.skip(f"cannot make a cgroup with a memory limit here: {error}")
    try:
        yield folder
    finally:
        wait_until(lambda: not (folder / "cgroup.procs").read_text(), "the cgroup to be empty")
        folder.rmdir()


def test_a_rank_killed_for_memory_is_reported_with_the_memory_limit(ddptrain: ForkServer, limited_memory: Path) -> None:
    enter = f"import os; open('{limited_memory}/cgroup.procs', 'w').write(str(os.getpid()))"
    argv = ("launch", "--nproc-per-node", 2, "--data", "digits", "--epochs", 1, "--chaos", "oom:1:3")
    message = ddptrain.run(*argv, first=enter, code=137).message()
    assert (message["rank"], message["signal"]) == (1, 9)
    assert "the memory limit was reached" in message["message"]


@pytest.mark.parametrize("text", ["kill", "kill:1", "melt:1:7", "kill:one:7", "kill:1:seven", "kill:-1:7"])
def test_an_invalid_plan_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match=f"--chaos {text} is not") as caught:
        InjectedFault.parse(text)
    assert "kill:1:7" in caught.value.next_step


@pytest.mark.parametrize(
    ("chaos", "said"),
    [
        ("crash:1:900", "--chaos did not occur: no phase batch from step 900 on was reached on rank 1"),
        ("crash:1:1:bach", "--chaos did not occur: no phase bach"),
        ("crash:2:1", "--chaos crash:2:1 names rank 2, but there are 2 rank(s)"),
    ],
)
def test_a_fault_that_cannot_occur_fails_the_run(ddptrain: ForkServer, idx: Path, chaos: str, said: str) -> None:
    argv = ("launch", "--nproc-per-node", 2, *SMALL, "--data-dir", idx, "--epochs", 1, "--chaos", chaos)
    assert said in ddptrain.run(*argv, code=2).message()["message"]


@pytest.mark.parametrize(
    ("rank", "env", "planned_here"),
    [
        (1, {}, True), (0, {}, False), (1, {"DDPJOB_ATTEMPT": "1"}, True), (1, {"DDPJOB_ATTEMPT": "2"}, False),
        (1, {"TORCHELASTIC_RESTART_COUNT": "0"}, True), (1, {"TORCHELASTIC_RESTART_COUNT": "1"}, False),
    ],
)  # fmt: skip
def test_a_fault_is_planned_for_its_rank_in_the_first_attempt_only(
    rank: int, env: dict[str, str], planned_here: bool
) -> None:
    assert (planned(Config(chaos="kill:1:7"), rank, env) is not None) is planned_here


def test_a_later_attempt_may_have_fewer_ranks_than_the_fault_names() -> None:
    with pytest.raises(UsageError, match="names rank 3, but there are 2"):
        check_rank(Config(chaos="kill:3:7"), 2, {})
    check_rank(Config(chaos="kill:3:7"), 2, {"DDPJOB_ATTEMPT": "2"})


def test_a_full_disk_of_a_rank_that_writes_nothing_does_not_fail_a_finished_training(
    ddptrain: ForkServer, idx: Path, tmp_path: Path
) -> None:
    run = ddptrain.run(*command(2, idx, tmp_path, "--chaos", "diskfull:1:7"))
    assert "chaos: diskfull in phase batch of step 7" in run.output()


def test_a_fault_occurs_once_in_the_first_matching_phase_from_its_step() -> None:
    fault: Any = planned(Config(chaos="crash:1:7:evaluate"), 1, {})
    for phase, step in (("batch", 7), ("evaluate", 6)):
        fault(phase, step)
    with pytest.raises(RuntimeError, match="crash injected"):
        fault("evaluate", 9)
    fault("evaluate", 9)
