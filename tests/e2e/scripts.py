"""What the status says of each fault of a plain script, under ddprun and under torchrun: `make soak` prints the table.

    python -m tests.e2e.scripts
    python -m tests.e2e.scripts --launcher torchrun --fault exception --repetitions 50

Each job has two nodes of two ranks. Rank 2, the first of node 1, fails at step 5; the script contains nothing of this
project. The jobs run several at a time on one kind cluster, which is created if necessary. Exit code 1: a status says
something else than ``FAULTS``. ``test_scripts`` runs some of them in each `make test`.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

from ddpjob.api import names
from ddpjob.api.objects import Json
from tests.e2e.demo import say, set_up
from tests.e2e.jobs import JOB_KIND
from tests.e2e.kubectl import Kubectl
from tests.e2e.namespace import job_namespace, until_all_are_gone
from tests.e2e.trials import Act, Trial, Trials, apart, running
from tests.kind.cluster import DEFAULT_NAME
from tests.kind.images import TRAINER_TAG

Launcher = Literal["ddprun", "torchrun"]
LAUNCHERS: tuple[Launcher, ...] = ("ddprun", "torchrun")
NODE, RANK, STEP = 1, 2, 5
HANG_SECONDS = 15
AT_ONCE = 4
_SECONDS = 900.0

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


@dataclass(frozen=True)
class Finding:
    """The failure in the status of a job."""

    launcher: Launcher
    fault: str
    failure: Json

    @property
    def differences(self) -> list[str]:
        """What the failure says that it should not."""
        said: Said = getattr(FAULTS[self.fault], self.launcher)
        expected, found = said.fields.items(), self.failure
        wrong = [f"{key} is {found.get(key)}, not {value}" for key, value in expected if found.get(key) != value]
        return wrong if said.text in found["message"] else [*wrong, f"{found['message']!r} lacks {said.text!r}"]

    @property
    def row(self) -> str:
        """The row of the table."""
        shown = ("reason", "nodeRank", "rank", "step", "exitCode", "signal")
        message = self.failure["message"].replace(self.failure.get("pod", ""), "POD")
        cells = (self.fault, self.launcher, *(self.failure.get(key, "") for key in shown), message)
        return f"| {' | '.join(map(str, cells))} | {'**wrong**' if self.differences else ''} |"


def command(launcher: Launcher, fault: str) -> list[str]:
    """Return the command of the job."""
    flags = ["--hang-timeout", str(HANG_SECONDS)] if (launcher, fault) == ("ddprun", "hang") else []
    return [launcher, *flags, "/scripts/train.py"]


def objects(name: str, launcher: Launcher, fault: str) -> tuple[Json, Json]:
    """Return the ConfigMap with the script, and the job that runs it once."""
    script = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {"train.py": SCRIPT}}
    mounted = {"name": "trainer", "volumeMounts": [{"name": "scripts", "mountPath": "/scripts"}]}
    pod = {"containers": [mounted], "volumes": [{"name": "scripts", "configMap": {"name": name}}]}
    spec = {
        "image": TRAINER_TAG,
        "command": command(launcher, fault),
        "env": [{"name": "FAULT", "value": FAULTS[fault].statement}, {"name": "OMP_NUM_THREADS", "value": "1"}],
        "numNodes": 2,
        "nprocPerNode": 2,
        "resources": {"requests": {"memory": "512Mi"}, "limits": {"memory": "1536Mi"}},
        "restartPolicy": {"maxRestarts": 0},
        "template": {"spec": pod | {"affinity": apart(name)}},
    }
    return script, {"apiVersion": names.API_VERSION, "kind": "DDPJob", "metadata": {"name": name}, "spec": spec}


def finding(trial: Trial, launcher: Launcher, fault: str) -> Finding:
    """Apply a job, wait for its failure, and delete it."""
    trial.kubectl.apply(*objects(trial.name, launcher, fault))
    (failure,) = trial.until("a failure", lambda job: job.get("status", {}).get("failures"), seconds=_SECONDS)
    trial.kubectl("delete", JOB_KIND, trial.name, "--wait=false")
    return Finding(launcher, fault, failure)


def acts(cases: Iterable[tuple[Launcher, str]], repetitions: int = 1) -> dict[str, Act]:
    """Return the trials by name, for example torchrun_exception, and torchrun_exception_2 for a repetition."""
    return {
        f"{launcher}_{fault}{f'_{number}' if number > 1 else ''}": partial(finding, launcher=launcher, fault=fault)
        for launcher, fault in cases
        for number in range(1, repetitions + 1)
    }


def main() -> int:
    """Run the jobs and print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.scripts", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--fault", choices=FAULTS, nargs="+", default=list(FAULTS))
    parser.add_argument("--launcher", choices=LAUNCHERS, nargs="+", default=LAUNCHERS)
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=AT_ONCE)
    parser.add_argument("--name", default=DEFAULT_NAME, help="kind cluster to use or create (default: %(default)s)")
    options = parser.parse_args()
    cluster = set_up(options.name)
    cases = ((launcher, fault) for fault in options.fault for launcher in options.launcher)
    trials = Trials(acts(cases, options.repetitions), options.at_once, has_claim=False)
    findings: list[Finding] = []
    with job_namespace(cluster, "scripts") as namespace, running(cluster, namespace, trials) as outcomes:
        for outcome in outcomes.values():
            findings.append(outcome.result())
            say(f"{findings[-1].row}{'; '.join(findings[-1].differences)}")
    until_all_are_gone(Kubectl(cluster.kubeconfig))
    print("| fault | launcher | reason | node | rank | step | exit code | signal | message | |")
    rows = Counter(finding.row for finding in findings)
    counts = (f"{row}{f' {count} times' if count > 1 else ''}" for row, count in rows.items())
    print("|---|---|---|---|---|---|---|---|---|---|", *counts, sep="\n")
    return 1 if any(finding.differences for finding in findings) else 0


if __name__ == "__main__":
    sys.exit(main())
