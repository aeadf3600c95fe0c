"""The scripts to copy of manifests/examples, train.py and train_plain.py: they run under every launcher and resume."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ddprun
from tests.install.chart import ROOT
from tests.processes import free_port
from tests.trainer.runs import ForkServer, losses

pytestmark = pytest.mark.together

EXAMPLE, PLAIN = (ROOT / "manifests" / "examples" / name for name in ("train.py", "train_plain.py"))
STEPS = 48  # of two epochs


def accuracy(output: str) -> float:
    found = re.search(r"finished after \d+ steps: accuracy (0\.\d+)", output)
    assert found, output
    return float(found[1])


def test_examples_are_short_and_the_calls_of_ddprun_are_optional(ddptrain: ForkServer, tmp_path: Path) -> None:
    text = EXAMPLE.read_text()
    assert max(len(text.splitlines()), len(PLAIN.read_text().splitlines())) <= 120
    assert sorted(re.findall(r"ddprun\.(\w+)\(", text)) == ["checkpoints", "report", "should_stop"]
    assert "import ddprun" not in PLAIN.read_text()
    absent, env = "import sys; sys.modules['ddprun'] = None", {"DDPJOB_CHECKPOINT_DIR": tmp_path}
    assert accuracy(ddptrain.run(module=EXAMPLE, first=absent, env=env).output()) > 0.85
    assert list(tmp_path.iterdir()) == []


def test_example_stops_resumes_and_gives_the_weights_of_the_plain_one(ddptrain: ForkServer, tmp_path: Path) -> None:
    under_torchrun, under_ddprun = tmp_path / "torchrun", tmp_path / "ddprun"
    flags = ("--nproc-per-node", "2", "--epochs", "2")
    torchrun = ("torch.distributed.run", *flags[:2], "--master-port", str(free_port()))
    with subprocess.Popen(
        [sys.executable, "-m", *torchrun, PLAIN, *flags[2:]],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={"PATH": os.environ["PATH"], "DDPJOB_CHECKPOINT_DIR": str(under_torchrun), "OMP_NUM_THREADS": "1"},
    ) as plain:  # fmt: skip
        env = {"DDPJOB_CHECKPOINT_DIR": under_ddprun}
        command = (*flags[:2], EXAMPLE, *flags[2:])
        # Each step takes longer, so that the signal comes before the last.
        slow = ddptrain.start("--chaos", "slow:1:1:train", *command, module="ddprun", env=env)
        slow.at_step(2)
        os.kill(slow.pid, signal.SIGTERM)
        assert slow.wait() == 75, slow.output()
        message = slow.message()
        step = message["step"]
        path = f"run-000001/step-{step:09d}.pt"
        assert (message["saved"], message["checkpoint"]) == (True, {"run": 1, "step": step, "path": path})
        assert 2 <= step < STEPS
        resumed = ddptrain.run(*command, module="ddprun", env=env)
        assert f"[n0r1] rank 1 resumes after step {step}" in resumed.output()
        output = plain.communicate(timeout=180)[0]
    assert plain.returncode == 0, output
    assert accuracy(output) > 0.7
    theirs: dict[str, Any] = torch.load(under_torchrun / "digits.pt", weights_only=True)
    ours = ddprun.checkpoints(under_ddprun).load_newest()
    assert ours is not None
    assert ours.step == theirs["step"] == STEPS
    assert all(torch.equal(ours.state["model"][name], value) for name, value in theirs["model"].items())
    assert [step for step, _ in losses(under_ddprun)] == [10, 20, 30, 40, 48], "each once, over both runs"


def test_plain_example_resumes(ddptrain: ForkServer, tmp_path: Path) -> None:
    env = {"DDPJOB_CHECKPOINT_DIR": tmp_path}
    ddptrain.run("--epochs", 1, module=PLAIN, env=env)
    assert "rank 0 resumes after step 24\n" in ddptrain.run("--epochs", 2, module=PLAIN, env=env).output()
