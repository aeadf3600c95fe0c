"""A volume that does not answer never blocks the launcher. A named pipe without a writer serves as the volume."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ddprun.diagnostics import Diagnostics
from ddprun.distributed.topology import Ranks
from ddprun.launcher import node_reports
from ddprun.launcher.node_reports import NodeReports, read
from ddprun.launcher.processes import WorkerProcess, run_with_timeout
from ddprun.reporting.console import Console
from ddprun.reporting.progress import ProgressRecord
from ddptrain.training.metrics import MetricsLogger
from tests.ddptrain.builders import SMALL, node
from tests.ddptrain.runs import ForkServer, wait_until
from tests.processes import free_port

pytestmark = pytest.mark.together


def test_run_with_timeout_returns_the_result_and_none_for_an_error() -> None:
    assert run_with_timeout(60, lambda: {"run": 3, "paths": ["é"] * 50_000}) == {"run": 3, "paths": ["é"] * 50_000}
    assert run_with_timeout(60, lambda: Path("/absent").read_text()) is None


def test_run_with_timeout_kills_work_that_blocks(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    pid_file = tmp_path / "pid"

    def work() -> str:
        pid_file.write_text(str(os.getpid()))
        return (tmp_path / "pipe").read_text()

    begun = time.monotonic()
    assert run_with_timeout(1, work) is None
    assert time.monotonic() - begun < 30
    wait_until(lambda: _is_gone(int(pid_file.read_text())), "its process to end")


def test_run_with_timeout_returns_none_when_cancelled(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    asked = iter([False, False, True])
    begun = time.monotonic()
    assert run_with_timeout(600, (tmp_path / "pipe").read_text, lambda: next(asked)) is None
    assert time.monotonic() - begun < 60


def _is_gone(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def test_a_launcher_exits_although_the_reports_cannot_be_read(ddptrain: ForkServer, idx: Path, tmp_path: Path) -> None:
    port = free_port()
    command = ("train", *SMALL, "--data-dir", idx, "--checkpoint-dir", tmp_path, "--step-delay", 0.3)
    zero, one = (ddptrain.start(*command, env=node(rank, port)) for rank in (0, 1))
    zero.at_step(2)
    folder = tmp_path / "reports" / "u-0"
    folder.mkdir(parents=True)
    os.mkfifo(folder / "node-x.json")
    os.killpg(one.pid, signal.SIGKILL)
    assert zero.wait() == 77, zero.output()
    assert zero.message()["cause"] == "peer"


def test_start_deletes_reports_of_an_earlier_one_and_leaves_those_of_other_nodes(tmp_path: Path) -> None:
    ranks = Ranks(nnodes=2, nproc_per_node=2, world_size=4)
    folder, report = tmp_path / "reports" / "local-0", {"code": 1, "cause": "own"}
    lives = [folder, folder.with_name("local-0.life-2")]
    for life in lives:
        for number in (0, 1, 2):  # the third is of a start with more nodes
            NodeReports(life, replace(ranks, node_rank=number, nnodes=3)).write(report, [], [])
        for name in ("rank-1.stacks.txt", "rank-2.stacks.txt", "trace-9"):
            (life / name).touch()
    NodeReports(folder, ranks).clear()
    left = ["node-1.json", "rank-2.stacks.txt"]
    assert [sorted(path.name for path in life.iterdir()) for life in lives] == [left, left]


def test_a_report_is_written_before_the_dumps_which_the_volume_may_refuse(tmp_path: Path) -> None:
    diagnostics = Diagnostics.create(0)
    os.write(diagnostics.stacks, b"where rank 0 was")
    (tmp_path / "reports" / "u-1" / "rank-0.stacks.txt" / "in the way").mkdir(parents=True)
    NodeReports(tmp_path / "reports" / "u-1", Ranks()).write(
        {"code": 76}, [], [WorkerProcess(0, 0, -1, -1, diagnostics)]
    )
    diagnostics.close()
    assert [found["report"] for found in read(tmp_path / "reports" / "u-1")] == [{"code": 76}]


def test_old_attempts_keep_their_reports_longer_than_their_dumps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_reports, "_KEPT_DUMPS", 1)
    monkeypatch.setattr(node_reports, "_KEPT_ATTEMPTS", 3)
    for attempt in range(5):
        folder = tmp_path / "reports" / f"u-{attempt}"
        folder.mkdir(parents=True)
        for dump in ("rank-0.stacks.txt", "trace-0"):
            (folder / dump).touch()
        NodeReports(folder, Ranks()).write({"code": 1}, [], [])
        os.utime(folder / "node-0.json", (attempt, attempt))
    left = {path.name: sorted(file.name for file in path.iterdir()) for path in (tmp_path / "reports").iterdir()}
    assert left == {
        "u-2": ["node-0.json"], "u-3": ["node-0.json"], "u-4": ["node-0.json", "rank-0.stacks.txt", "trace-0"],
    }  # fmt: skip


def test_refused_metrics_are_a_checkpoint_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    progress = ProgressRecord(1)
    metrics = MetricsLogger(progress, Console(0), epochs=2, steps_per_epoch=9)
    assert metrics.open(tmp_path, None) == 1
    replace_by_full_device(tmp_path / "metrics" / "run-000001.jsonl")
    metrics.log("train", 1, loss=1.0)
    assert not metrics.flush()
    [said] = capsys.readouterr().out.splitlines()
    assert "No space left" in said
    assert "training continues without saving" in said
    problem = progress.snapshot()["checkpointProblem"]
    assert problem.endswith("(1 in a row)")


INTO_A_PIPE = """
import os
from ddprun import script_metrics
class Rows(script_metrics.RowsFile):
    def __init__(self, folder, run):
        super().__init__(folder, run)
        os.dup2(os.open({path!r}, os.O_WRONLY), self._file)
script_metrics.RowsFile = Rows
"""


def test_a_volume_that_stalls_while_rows_are_written_is_no_hang(
    ddptrain: ForkServer, idx: Path, tmp_path: Path
) -> None:
    rows = tmp_path / "rows"
    os.mkfifo(rows)
    reader = os.open(rows, os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 4096)  # takes some 30 rows, of 60 steps
    run = ddptrain.start(
        "launch", "--nproc-per-node", 2, "--data", "idx", "--data-dir", idx, "--batch-size", 5, "--epochs", 1,
        "--step-delay", 0.25, "--checkpoint-dir", tmp_path, "--checkpoint-every", 0, "--hang-timeout", 5,
        first=INTO_A_PIPE.format(path=str(rows)),
    )  # fmt: skip
    run.at_step(60)

    def answers() -> bool:
        with contextlib.suppress(BlockingIOError):
            os.read(reader, 65536)
        return run.ended

    wait_until(answers, "the end, now that the volume answers again")
    os.close(reader)
    assert run.wait() == 0, run.output()


def replace_by_full_device(path: Path) -> None:
    """Make every later write to this process's open file fail as on a full volume."""
    [descriptor] = [int(fd.name) for fd in Path("/proc/self/fd").iterdir() if os.path.realpath(fd) == str(path)]
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, descriptor)
    os.close(full)
