"""Steps of processes that a script starts itself are steps of its rank: progress, hangs, and the place of a hang."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ddprun import script_interface
from ddprun.diagnostics import Diagnostics
from ddprun.heartbeat import Heartbeat
from ddprun.reporting.progress import ProgressRecord
from ddprun.settings import Settings
from ddprun.started_processes import _ATTACH, _count_steps, _notice_replays
from tests.ddptrain.runs import ForkServer

pytestmark = pytest.mark.together

TRAINS = """
import sys, time
import torch
def work(index):
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters())
    for step in range(5):
        optimizer.step()
    time.sleep(30)
if __name__ == "__main__":
    torch.multiprocessing.spawn(work, nprocs=1)
"""
REPORTS = """
import multiprocessing, os
import ddprun
def work(step):
    ddprun.report(step=step, total_steps=90)
def started_by_it(method):
    process = multiprocessing.get_context(method).Process(target=work, args=(30,))
    process.start()
    process.join()
if __name__ == "__main__":
    for method in ("fork", "forkserver", "spawn"):
        process = multiprocessing.get_context(method).Process(target=started_by_it, args=(method,))
        process.start()
        process.join()
        print(method, ddprun.script_interface._state.progress.snapshot()["seq"], process.exitcode, flush=True)
"""


def test_hang_in_a_process_that_the_script_has_started_is_located(ddptrain: ForkServer, tmp_path: Path) -> None:
    script, logs = tmp_path / "train.py", tmp_path / "logs"
    script.write_text(TRAINS)
    done = ddptrain.run("--hang-timeout", 3, "--log-dir", logs, script, module="ddprun", code=76)
    message = done.message()
    assert (message["kind"], message["step"], message["where"]) == ("Hang", 5, "train.py:8")
    assert "in work" in (logs / "reports" / "local-0" / "rank-0.stacks.txt").read_text()


def test_reports_of_processes_by_each_start_method_are_the_ranks(ddptrain: ForkServer, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(REPORTS)
    done = ddptrain.run(script, module="ddprun")
    assert done.output() == "fork 1 0\nforkserver 2 0\nspawn 3 0\n"
    progress = done.message()["progress"]
    assert (progress["step"], progress["totalSteps"]) == (30, 90)


def test_interpreter_that_does_not_find_the_launcher_runs() -> None:
    subprocess.run([sys.executable, "-I", "-S", "-c", _ATTACH], check=True, timeout=60)


def test_a_step_that_a_script_compiles_gives_no_warning() -> None:
    hooks: list[Callable[..., None]] = []
    _count_steps(SimpleNamespace(register_optimizer_step_post_hook=hooks.append))  # type: ignore[arg-type]

    @torch.compile(backend="eager")
    def step() -> torch.Tensor:
        hooks[0](hooks)
        return torch.ones(1) + 1

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert step() == 2


def test_replays_of_a_recorded_step_are_signs_of_life_and_no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    class CUDAGraph:
        replays = 0

        def replay(self) -> None:
            self.replays += 1

    files = Diagnostics.create(0)
    heartbeat = Heartbeat(files.memory())
    monkeypatch.setattr(script_interface, "_state", script_interface._State())
    script_interface.begin(ProgressRecord(1), heartbeat, Settings())
    heartbeat.mark("train", 3)
    before = files.last_heartbeat()
    _notice_replays(SimpleNamespace(CUDAGraph=CUDAGraph))  # type: ignore[arg-type]
    graph = CUDAGraph()
    for _ in range(5):
        graph.replay()
    after = files.last_heartbeat()
    files.close()
    assert (graph.replays, after.step, after.changes) == (5, 3, before.changes + 1)
