"""manifests/examples/train.py, the script that people copy: it runs under every launcher, stops on request, resumes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tests.install.chart import ROOT
from tests.processes import free_port
from tests.trainer.runs import ForkServer

EXAMPLE = ROOT / "manifests" / "examples" / "train.py"
ALONE = f"import runpy, sys; sys.modules['ddprun'] = None; runpy.run_path({str(EXAMPLE)!r}, run_name='__main__')"


def accuracy(output: str) -> float:
    found = re.search(r"finished after \d+ steps: accuracy (0\.\d+)", output)
    assert found, output
    return float(found[1])


def python(folder: Path, *command: object) -> str:
    """Run the command in a new interpreter and return its output."""
    done = subprocess.run(
        [sys.executable, *map(str, command)], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=180,
        check=False, env={"PATH": os.environ["PATH"], "DDPJOB_CHECKPOINT_DIR": str(folder), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def saved(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(folder / "digits.pt", weights_only=True)
    return state


def test_example_is_short_and_its_two_calls_of_ddprun_are_optional(tmp_path: Path) -> None:
    text = EXAMPLE.read_text()
    assert len(text.splitlines()) <= 125
    assert sorted(re.findall(r"ddprun\.(\w+)\(", text)) == ["report", "should_stop"]
    assert accuracy(python(tmp_path, "-c", ALONE)) > 0.85


def test_example_stops_resumes_and_gives_the_weights_of_torchrun(ddptrain: ForkServer, tmp_path: Path) -> None:
    under_torchrun, under_ddprun = tmp_path / "torchrun", tmp_path / "ddprun"
    for folder in (under_torchrun, under_ddprun):
        folder.mkdir()
    flags = ("--nproc-per-node", 2, "--master-port", free_port())
    output = python(under_torchrun, "-m", "torch.distributed.run", *flags, EXAMPLE)
    assert accuracy(output) > 0.85
    env = {"DDPJOB_CHECKPOINT_DIR": under_ddprun}
    command = ("--nproc-per-node", 2, EXAMPLE)
    # Each step takes longer than in the other runs, so that the signal comes before the last.
    slow = ddptrain.start("--chaos", "slow:1:1:train", *command, module="ddprun", env=env)
    assert slow.at_step(2)["totalSteps"] is None  # counted by the optimizer; the script reports every 20 steps
    os.kill(slow.pid, signal.SIGTERM)
    assert slow.wait() == 75, slow.output()
    message = slow.message()
    assert (message["saved"], message["checkpoint"]) == (True, {"step": message["step"], "path": "digits.pt"})
    assert 2 <= saved(under_ddprun)["step"] == message["step"] < saved(under_torchrun)["step"]
    resumed = ddptrain.run(*command, module="ddprun", env=env)
    assert f"rank 1 resumes after step {message['step']}" in resumed.output()
    assert resumed.message()["progress"]["step"] == saved(under_torchrun)["step"]
    ours, theirs = saved(under_ddprun)["model"], saved(under_torchrun)["model"]
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
