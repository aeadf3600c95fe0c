"""The scripts of manifests/examples train and resume: those to copy (train.py, train_plain.py), and that for torchrun.

ddprun gives its ranks the variables of torchrun's workers (test_script_starts.py), and has imported what takes the
longest.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import ddprun
from tests.ddptrain.runs import ForkServer, Run, losses
from tests.install.chart import ROOT

pytestmark = pytest.mark.together

EXAMPLES = ROOT / "manifests" / "examples"
EXAMPLE, PLAIN = EXAMPLES / "train.py", EXAMPLES / "train_plain.py"
STEPS = 48  # of two epochs


def start(server: ForkServer, *argv: object, module: str | Path, folder: Path, first: str = "") -> Run:
    env = {"DDPJOB_CHECKPOINT_DIR": folder}
    return server.start(*argv, module=module, env=env, first=first, preload=["sklearn.datasets"])


def done(server: ForkServer, *argv: object, module: str | Path, folder: Path, first: str = "") -> str:
    """Run an example until it succeeds, and return what it prints."""
    run = start(server, *argv, module=module, folder=folder, first=first)
    assert run.wait() == 0, run.output()
    return run.output()


def accuracy(output: str) -> float:
    found = re.search(r"finished after \d+ steps: accuracy (0\.\d+)", output)
    assert found, output
    return float(found[1])


def test_examples_are_short_and_the_calls_of_ddprun_are_optional(ddptrain: ForkServer, tmp_path: Path) -> None:
    text = EXAMPLE.read_text()
    assert max(len(text.splitlines()), len(PLAIN.read_text().splitlines())) <= 120
    assert sorted(re.findall(r"ddprun\.(\w+)\(", text)) == ["checkpoints", "report", "should_stop"]
    assert "import ddprun" not in PLAIN.read_text()
    absent = "import sys; sys.modules['ddprun'] = None"
    assert accuracy(done(ddptrain, module=EXAMPLE, folder=tmp_path, first=absent)) > 0.85
    assert list(tmp_path.iterdir()) == []


def test_example_stops_resumes_and_gives_the_weights_of_the_plain_one(ddptrain: ForkServer, tmp_path: Path) -> None:
    of_plain, of_example = tmp_path / "plain", tmp_path / "example"
    ranks, epochs = ("--nproc-per-node", "2"), ("--epochs", "2")
    # Each step takes longer, so that the signal comes before the last.
    slow = ("--chaos", "slow:1:1:train", *ranks, EXAMPLE, *epochs)
    stopped = start(ddptrain, *slow, module="ddprun", folder=of_example)
    plain = start(ddptrain, *ranks, PLAIN, *epochs, module="ddprun", folder=of_plain)
    stopped.at_step(2)
    os.kill(stopped.pid, signal.SIGTERM)
    assert stopped.wait() == 75, stopped.output()
    message = stopped.message()
    step = message["step"]
    path = f"run-000001/step-{step:09d}.pt"
    assert (message["saved"], message["checkpoint"]) == (True, {"run": 1, "step": step, "path": path})
    assert 2 <= step < STEPS
    resumed = done(ddptrain, *ranks, EXAMPLE, *epochs, module="ddprun", folder=of_example)
    assert f"[n0r1] rank 1 resumes after step {step}" in resumed
    assert plain.wait() == 0, plain.output()
    assert accuracy(plain.output()) > 0.7
    theirs: dict[str, Any] = torch.load(of_plain / "digits.pt", weights_only=True)
    ours = ddprun.checkpoints(of_example).load_newest()
    assert ours is not None
    assert ours.step == theirs["step"] == STEPS
    assert all(torch.equal(ours.state["model"][name], value) for name, value in theirs["model"].items())
    assert [step for step, _ in losses(of_example)] == [10, 20, 30, 40, 48], "each once, over both runs"


# In place of a dropout layer of the user: prints which of 64 units it keeps in each step.
DROPOUT = """
class Dropout(nn.Dropout):
    def forward(self, x):
        kept = super().forward(torch.ones(64))
        if self.training:
            print("kept", "".join("1" if value else "0" for value in kept.tolist()), flush=True)
        return x


def main"""


@pytest.mark.parametrize("example", [EXAMPLE, PLAIN], ids=lambda path: path.stem)
def test_ranks_drop_units_of_their_own_and_a_resumed_run_drops_what_an_undisturbed_one_does(
    ddptrain: ForkServer, tmp_path: Path, example: Path
) -> None:
    script, epochs = tmp_path / "train.py", ("--epochs", 2)
    text = example.read_text().replace("nn.ReLU(),", "nn.ReLU(), Dropout(0.5),").replace("def main", DROPOUT, 1)
    script.write_text(text)

    def masks(output: str) -> list[list[str]]:
        return [re.findall(rf"^\[n0r{rank}\] kept ([01]{{64}})$", output, re.MULTILINE) for rank in (0, 1)]

    def started(folder: str, *flags: object) -> Run:
        argv = ("--nproc-per-node", 2, *flags, script, *epochs)
        return start(ddptrain, *argv, module="ddprun", folder=tmp_path / folder)

    undisturbed, broken = started("undisturbed"), started("broken", "--chaos", "crash:1:30")
    assert (undisturbed.wait(), broken.wait()) == (0, 1), undisturbed.output() + broken.output()
    resumed = started("broken")
    assert resumed.wait() == 0, resumed.output()
    assert "rank 0 resumes after step 20" in resumed.output(), "within an epoch"
    whole = masks(undisturbed.output())
    assert [len(of_rank) for of_rank in whole] == [STEPS, STEPS]
    assert len({*whole[0], *whole[1]}) == 2 * STEPS, "no rank and no step repeats a mask"
    assert masks(resumed.output()) == [of_rank[20:] for of_rank in whole]


def test_example_for_torchrun_trains_and_resumes(ddptrain: ForkServer, tmp_path: Path) -> None:
    config_map, _ = yaml.safe_load_all((EXAMPLES / "torchrun-script.yaml").read_text(encoding="utf-8"))
    text, script = config_map["data"]["train.py"], tmp_path / "train.py"
    said = []
    for steps in (100, 200):
        script.write_text(text.replace("STEPS = 200", f"STEPS = {steps}"), encoding="utf-8")
        said.append(done(ddptrain, "--nproc-per-node", "2", script, module="ddprun", folder=tmp_path))
    first, second = said
    assert "step 100/100" in first and "world 2" in first
    assert "resumed from step 100" in second and "step 150/200" in second
    loss = float(second.split("step 200/200 loss ")[1].split()[0])
    assert loss < float(first.split("step 50/100 loss ")[1].split()[0])
