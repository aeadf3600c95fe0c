"""`--profile` leaves a trace of each rank with the phases of the steps, and changes nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddprun.heartbeat import Heartbeat
from ddptrain.config import Config
from ddptrain.training import optim
from ddptrain.training.profiling import StepProfiler
from tests.ddptrain.builders import SMALL
from tests.ddptrain.runs import ForkServer, assert_same_end


def ranges(trace: Path) -> dict[str, list[tuple[float, float]]]:
    """Return name to the (begin, end) of each range of a Chrome trace, in microseconds."""
    found: dict[str, list[tuple[float, float]]] = {}
    events: list[dict[str, Any]] = json.loads(trace.read_text())["traceEvents"]
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in ("user_annotation", "cpu_op"):
            found.setdefault(event["name"], []).append((event["ts"], event["ts"] + event["dur"]))
    return found


def inside(outer: tuple[float, float], spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    return [span for span in spans if outer[0] <= span[0] and span[1] <= outer[1]]


def test_each_rank_traces_the_phases_of_its_steps_without_changing_the_weights(
    ddptrain: ForkServer, idx: Path, tmp_path: Path
) -> None:
    command = ("launch", "--nproc-per-node", 2, *SMALL, "--data-dir", idx)
    profiled, plain = tmp_path / "profiled", tmp_path / "plain"
    run = ddptrain.run(*command, "--checkpoint-dir", profiled, "--profile", 3)
    assert "profile: steps 8 to 10 are in" in run.output()
    for rank in range(2):
        found = ranges(profiled / "run-000001" / f"profile-rank-{rank}.json")
        steps = {name: spans for name, spans in found.items() if name.startswith("ProfilerStep#")}
        assert sorted(steps) == ["ProfilerStep#10", "ProfilerStep#8", "ProfilerStep#9"]
        for [span] in steps.values():
            [batch], [step] = inside(span, found["batch"]), inside(span, found["step"])
            [forward], [exchange], [optimizer] = (
                inside(step, found[name]) for name in ("forward", "all_reduce of gradients", "optimizer")
            )
            assert batch[1] <= step[0] <= forward[1] <= exchange[1] <= optimizer[0]
            assert inside(forward, found["aten::convolution"])
            assert inside(step, found["c10d::allreduce_"])
    # Step 9 ends an epoch, so the trace also has an evaluation and a save.
    assert (len(found["evaluate"]), found.get("save")) == (1, None), "rank 1 does not save"

    ddptrain.run(*command, "--checkpoint-dir", plain)
    assert_same_end(profiled, plain)
    assert not list(plain.glob("run-*/profile*"))


def test_a_run_with_few_steps_left_traces_these(ddptrain: ForkServer, idx: Path, tmp_path: Path) -> None:
    command = ("train", *SMALL, "--data-dir", idx, "--checkpoint-dir", tmp_path, "--profile", 5)
    ddptrain.run(*command, "--stop-after", 15, code=75)
    ddptrain.run(*command)
    first, second = (ranges(tmp_path / f"run-00000{run}" / "profile-rank-0.json") for run in (1, 2))
    traced = [sorted(name for name in found if name.startswith("ProfilerStep#")) for found in (first, second)]
    assert traced == [[f"ProfilerStep#{step}" for step in steps] for steps in ((10, 11, 12, 8, 9), (16, 17, 18))]
    assert second["save"]


def test_a_run_that_is_stopped_says_which_steps_it_has_traced(ddptrain: ForkServer, idx: Path, tmp_path: Path) -> None:
    command = ("train", *SMALL, "--data-dir", idx, "--profile", 5)
    for last, said in (
        (9, "profile: steps 8 to 9 are in"),
        (6, "no profile: the run ended after step 6, before step 8"),
    ):
        folder = tmp_path / str(last)
        run = ddptrain.run(*command, "--checkpoint-dir", folder, "--stop-after", last, code=75)
        assert said in run.output()
        assert (folder / "run-000001" / "profile-rank-0.json").exists() is ("no profile" not in said)


def test_a_run_that_fails_leaves_the_trace_of_its_steps_so_far(ddptrain: ForkServer, idx: Path, tmp_path: Path) -> None:
    command = ("launch", "--nproc-per-node", 2, *SMALL, "--data-dir", idx, "--profile", 5)
    run = ddptrain.run(*command, "--checkpoint-dir", tmp_path, "--chaos", "crash:1:10", code=1)
    assert (run.message()["rank"], run.message()["kind"]) == (1, "RuntimeError")
    for rank in range(2):
        found = ranges(tmp_path / "run-000001" / f"profile-rank-{rank}.json")
        assert {"ProfilerStep#8", "ProfilerStep#9"} <= found.keys()
    assert "profile: steps 8 to 10 are in" in run.output()


@pytest.mark.filterwarnings("ignore:Profiler")
@pytest.mark.parametrize("fault", [None, "step", "accum", "volume"])
def test_a_trace_that_ends_in_a_forward_pass_is_written_or_else_only_reported(
    tmp_path: Path, fault: str | None, capfd: pytest.CaptureFixture[str]
) -> None:
    path, said, heartbeat, model = tmp_path / "trace.json", list[str](), Heartbeat(), nn.Linear(2, 2)
    profiler = StepProfiler(
        path,
        steps=100, accum=20 if fault == "accum" else 1, first=1, left=100, device=torch.device("cpu"),
        heartbeat=heartbeat, log=said.append,
    )  # fmt: skip
    profiler.watch(model, optim.build(Config(optimizer="sgd"), model))
    for step in range(1, 50 if fault == "step" else 4):
        heartbeat.mark("batch", step)
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.zeros(3))
    if fault == "volume":
        path.mkdir()
    profiler.failed()
    assert path.is_file() is (fault is None)
    if fault is None:
        assert {"ProfilerStep#3", "aten::linear"} <= ranges(path).keys()
    elif fault != "volume":
        assert said == ["no profile: the run failed before the last step to trace"]
    else:
        assert "warning: no profile in" in capfd.readouterr().err
    profiler.close()


@pytest.mark.filterwarnings("ignore:Profiler")
def test_every_rank_says_that_its_trace_cannot_be_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    heartbeat = Heartbeat()
    profiler = StepProfiler(
        tmp_path / "file" / "profile-rank-1.json",
        steps=1, accum=1, first=1, left=1, device=torch.device("cpu"), heartbeat=heartbeat,
        log=lambda text: None,  # as of every rank but 0
    )  # fmt: skip
    heartbeat.mark("batch", 1)
    profiler.close()
    assert "warning: no profile in" in capfd.readouterr().err
