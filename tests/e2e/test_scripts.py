"""Plain scripts on a kind cluster: they end, and the status says how they failed, from reports and from logs.

Each job has two nodes of two ranks. Rank 2, the first of node 1, fails at step 5; the script contains nothing of this
project. `make soak` runs all faults.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import pytest

from ddpjob.api import names
from ddpjob.api.objects import Json
from tests.e2e.kubectl import condition_of
from tests.e2e.trials import Trial, Trials, apart
from tests.kind.images import TRAINER_TAG
from tests.soak import ALL

pytestmark = [pytest.mark.kind, pytest.mark.timeout(900, func_only=True)]

Launcher = Literal["ddprun", "torchrun"]
NODE, RANK, STEP = 1, 2, 5
HANG_SECONDS = 15
_SECONDS = 900.0
ENDS = Path(__file__).with_name("ends.py")

SCRIPT = """\
import ctypes
import datetime
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1, 9):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    if step == 5 and rank == 2:
        exec(os.environ["FAULT"])
dist.destroy_process_group()
"""
LINE = SCRIPT.splitlines().index('        exec(os.environ["FAULT"])') + 1


@dataclass(frozen=True)
class Said:
    """Fields of the failure in the status, and a part of its message."""

    fields: Mapping[str, object]
    text: str = ""


@dataclass(frozen=True)
class Fault:
    """A statement that rank 2 executes, and what the status must say."""

    statement: str
    ddprun: Said
    torchrun: Said


def _said(text: str = "", **fields: object) -> Said:
    return Said({"nodeRank": NODE, "rank": RANK} | fields, text)


_EXCEPTION = {"reason": "ValueError", "exception": "ValueError"}
_TEXT = f"train.py:{LINE}: ValueError: sample 17 has 3 channels, expected 1"
FAULTS = {
    "exception": Fault(
        "raise ValueError('sample 17 has 3 channels, expected 1')",
        ddprun=_said(_TEXT, step=STEP, **_EXCEPTION),
        torchrun=_said(_TEXT, **_EXCEPTION),
    ),
    "exit": Fault(
        "sys.exit(3)",
        ddprun=_said(f"train.py:{LINE}: ", step=STEP, reason="SystemExit", exitCode=3),
        torchrun=_said("rank 2 ended with exit code 3", reason="Error"),
    ),
    "kill": Fault(
        "os.kill(os.getpid(), signal.SIGKILL)",
        ddprun=_said(step=STEP, reason="Killed", signal=9),
        torchrun=_said(reason="SIGKILL", signal=9),
    ),
    # With cgroup v2 the kubelet lets the kernel end the whole container: then no launcher is left to name the rank.
    "oom": Fault(
        "[b'x' * (32 << 20) for _ in range(1000)]",
        ddprun=Said({"nodeRank": NODE, "reason": "OOMKilled", "signal": 9}),
        torchrun=Said({"nodeRank": NODE, "reason": "OOMKilled", "signal": 9}, "memory limit"),
    ),
    # Under torchrun nothing is noticed before the process group's timeout, and then by a rank that waits.
    "hang": Fault(
        "time.sleep(600)",
        ddprun=_said(f"at train.py:{LINE}", step=STEP, reason="Hang", exitCode=76),
        torchrun=Said({"reason": "RuntimeError"}, "Timed out waiting"),
    ),
    "segfault": Fault(
        "ctypes.string_at(0)",
        ddprun=_said(f"train.py:{LINE}: Killed: rank 2 was killed by SIGSEGV", step=STEP, reason="Killed", signal=11),
        torchrun=_said(reason="SIGSEGV", signal=11),
    ),
}


def objects(name: str, launcher: Launcher, fault: str) -> tuple[Json, Json]:
    """Return the ConfigMap with the script, and the job that runs it once."""
    script = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {"train.py": SCRIPT}}
    mounted = {"name": "trainer", "volumeMounts": [{"name": "scripts", "mountPath": "/scripts"}]}
    flags = ["--hang-timeout", str(HANG_SECONDS)] if (launcher, fault) == ("ddprun", "hang") else []
    pod = {"containers": [mounted], "volumes": [{"name": "scripts", "configMap": {"name": name}}]}
    spec = {
        "image": TRAINER_TAG,
        "command": [launcher, *flags, "/scripts/train.py"],
        "env": [{"name": "FAULT", "value": FAULTS[fault].statement}, {"name": "OMP_NUM_THREADS", "value": "1"}],
        "numNodes": 2,
        "nprocPerNode": 2,
        "resources": {"requests": {"memory": "512Mi"}, "limits": {"memory": "1536Mi"}},
        "restartPolicy": {"maxRestarts": 0},
        "template": {"spec": pod | {"affinity": apart(name)}},
    }
    return script, {"apiVersion": names.API_VERSION, "kind": "DDPJob", "metadata": {"name": name}, "spec": spec}


def failed(trial: Trial, launcher: Launcher, fault: str) -> Json:
    """Apply a job, and return its failure."""
    trial.kubectl.apply(*objects(trial.name, launcher, fault))
    (failure,) = trial.until("a failure", lambda job: job.get("status", {}).get("failures"), seconds=_SECONDS)
    return dict(failure)


def ended(trial: Trial) -> dict[str, Any]:
    """Run an ordinary script to its end, where it may restart in place, and return the status."""
    script, job = objects(trial.name, "ddprun", "exit")
    script["data"] = {"train.py": ENDS.read_text()}
    del job["spec"]["restartPolicy"]
    trial.kubectl.apply(script, job)
    job = trial.until("the end", lambda job: job if condition_of(job, "Finished").get("status") == "True" else None)
    return dict(job["status"])


# The exception under torchrun is outside of what the kubelet puts into the status, so a log is read.
_CASES = (
    [(launcher, fault) for fault in FAULTS for launcher in get_args(Launcher)] if ALL else [("torchrun", "exception")]
)
FAILING = {f"{launcher}_{fault}": (launcher, fault) for launcher, fault in _CASES}
ENDING = {f"ends_{number}": ended for number in range(20 if ALL else 1)}
_ACTS = {name: partial(failed, launcher=launcher, fault=fault) for name, (launcher, fault) in FAILING.items()}
TRIALS = Trials(_ACTS | ENDING, 4 if ALL else 2, has_claim=False)


@pytest.mark.parametrize("name", ENDING)
def test_ordinary_script_ends_in_its_first_life(trials: Mapping[str, Future[Any]], name: str) -> None:
    status = trials[name].result()
    assert (status["state"], status["attempt"], status.get("restarts", 0)) == ("Succeeded", 1, 0), status


@pytest.mark.parametrize("name", FAILING)
def test_status_names_node_rank_and_cause(trials: Mapping[str, Future[Any]], name: str) -> None:
    launcher, fault = FAILING[name]
    said: Said = getattr(FAULTS[fault], launcher)
    failure: Json = trials[name].result()
    assert {key: failure.get(key) for key in said.fields} == said.fields
    assert said.text in failure["message"]


def test_operator_reads_the_part_of_a_log_that_the_status_of_the_pod_lacks(trials: Mapping[str, Future[Any]]) -> None:
    failure: Json = trials["torchrun_exception"].result()
    assert "sample 17" not in failure["logTail"] and "sample 17" in failure["message"]
