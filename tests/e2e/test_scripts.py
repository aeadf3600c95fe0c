"""Plain scripts on a kind cluster: one is looked into and ends, and of one that fails under torchrun a log is read.

Each job has two nodes of two ranks, and its script contains nothing of this project. How a script may fail is tested
without a cluster: tests/ddprun/resilience/test_scripts.py, tests/engine/test_plain_scripts.py.
"""

from __future__ import annotations

import gzip
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest

from ddpjob import Client
from ddpjob.api import names
from ddpjob.api.objects import Json
from tests.e2e.kubectl import until
from tests.e2e.test_verbs import User, kubeconfig_of
from tests.e2e.trials import Trial, Trials, Wait, apart, finished
from tests.kind.images import TORCH_TAG, TRAINER_TAG
from tests.torchrun import FAULT_LINE, SCRIPT, VALUE_ERROR

pytestmark = [pytest.mark.kind, pytest.mark.timeout(900, func_only=True)]

NODE, RANK = 1, 2
TRAINS = """
import torch, torch.distributed as dist
from torch import nn

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Sequential(*[nn.Linear(512, 512) for _ in range(6)]))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
while True:
    optimizer.zero_grad()
    model(torch.randn(256, 512)).square().mean().backward()
    optimizer.step()
"""
ENDS = Path(__file__).with_name("ends.py")
# Three ranks wait for the gradients of the slow one.
STACKS = r"4 of 4 ranks: 3 ranks: waits in backward at train\.py:{}; rank 3: works in phase train at train\.py:{} "


def objects(name: str, launcher: str, script: str) -> tuple[Json, Json]:
    """Return the ConfigMap with the script, and the job that runs it; the first rank of node 1 fails if any does."""
    source = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {"train.py": script}}
    mounted = {"name": "trainer", "volumeMounts": [{"name": "scripts", "mountPath": "/scripts"}]}
    pod = {"containers": [mounted], "volumes": [{"name": "scripts", "configMap": {"name": name}}]}
    env = {"FAULT": VALUE_ERROR, "VICTIMS": str(RANK), "OMP_NUM_THREADS": "1"}
    spec = {
        "image": TRAINER_TAG,
        "command": [launcher, "/scripts/train.py"],
        "env": [{"name": key, "value": value} for key, value in env.items()],
        "numNodes": 2,
        "nprocPerNode": 2,
        "template": {"spec": pod | {"affinity": apart(name)}},
    }
    return source, {"apiVersion": names.API_VERSION, "kind": "DDPJob", "metadata": {"name": name}, "spec": spec}


def failed_script(trial: Trial) -> Json:
    """Run a script under torchrun that fails, once, and return its failure."""
    source, job = objects(trial.name, "torchrun", SCRIPT)
    job["spec"]["restartPolicy"] = {"maxRestarts": 0}
    trial.kubectl.apply(source, job)
    (failure,) = trial.until("a failure", lambda job: job.get("status", {}).get("failures"), seconds=900)
    return dict(failure)


def ended_script(trial: Trial) -> tuple[Json, list[int], str, list[Json]]:
    """Look inside an ordinary script in an image with PyTorch alone, and let it end. It may restart in place.

    Return the status, how many steps each rank has counted, and table and trace of the profile.
    """
    script = ENDS.read_text()
    source, job = objects(trial.name, "torchrun", script)
    job["spec"] |= {"image": TORCH_TAG, "launcher": "Injected"}
    job["spec"]["env"] += [{"name": "UNTIL", "value": "/tmp/end"}, {"name": "SLOW", "value": "0.2"}]
    trial.kubectl.apply(source, job)
    trial.until("steps", lambda job: job.get("status", {}).get("progress", {}).get("step"))
    lines = [script[: script.index(text)].count("\n") + 1 for text in ("loss.backward()", "time.sleep")]
    with tempfile.TemporaryDirectory() as folder:
        user = User(kubeconfig_of(trial, "edit", Path(folder)), Path(folder))
        until("the groups", lambda: re.search(STACKS.format(*lines), user("stacks", trial.name)), seconds=120)
        profile = user("profile", trial.name, "--steps", "5")
        trace = json.loads(gzip.decompress((user.folder / f"{trial.name}-profile.json.gz").read_bytes()))
        trial.kubectl("exec", trial.pods()[0]["metadata"]["name"], "--", "touch", "/tmp/end")
        status = trial.until("the end", finished)["status"]
        steps = [int(count) for count in re.findall(r"has made (\d+) steps", user("logs", trial.name, "--all"))]
    return status, steps, profile, trace["traceEvents"]


def throttled(slow: Json | None) -> Json | None:
    """Return ``status.slow`` if it names the CPU limit."""
    return slow if slow and slow["part"] == "throttled" else None


def throttled_script(trial: Trial) -> tuple[Json, Any]:
    """Lower the CPU limit of one pod of a script; return what the status and ``ddpjob why`` say of the slow rank."""
    source, job = objects(trial.name, "ddprun", TRAINS)
    cpu = {"requests": {"cpu": "200m"}, "limits": {"cpu": "1"}}
    job["spec"] |= {"nprocPerNode": 1, "resources": cpu}
    trial.kubectl.apply(source, job)
    trial.until("steps", lambda job: job.get("status", {}).get("progress", {}).get("step", 0) > 50)
    pod = next(pod for pod in trial.namespace.pods() if pod["metadata"]["name"].startswith(f"{trial.name}-")
               and pod["metadata"]["labels"][names.LABEL_NODE_RANK] == str(NODE))  # fmt: skip
    less = {"spec": {"containers": [{"name": "trainer", "resources": {"limits": {"cpu": "250m"}}}]}}
    trial.kubectl("patch", "pod", pod["metadata"]["name"], "--subresource", "resize", "--patch", json.dumps(less))
    # Before, other programs of this machine may have kept the rank from its core.
    slow = trial.until("a throttled rank", lambda job: throttled(job["status"].get("slow")), seconds=60)
    with Client.cluster(kubeconfig=trial.cluster.kubeconfig, namespace=trial.kubectl.namespace) as client:
        return slow, client.explain(trial.name)


TRIALS = Trials.of(2, failed_script, ended_script, soak=(throttled_script,))


def test_ordinary_script_is_looked_into_and_ends_in_its_first_life(outcome: Wait) -> None:
    status, steps, profile, events = outcome(ended_script)
    assert (status["state"], status["attempt"], status.get("restarts", 0)) == ("Succeeded", 1, 0), status
    assert steps == [status["progress"]["step"]] * 4, "a step is lost"
    profiled = [(event["pid"], event["name"]) for event in events if event["name"].startswith("ProfilerStep#")]
    assert sorted(profiled) == [(rank, f"ProfilerStep#{step}") for rank in range(4) for step in range(1, 6)]
    assert re.search(r"longest waits:\n(?:.*\n)+?[012] +\S+ m?s +gloo:all_?reduce +\d+ +3\n", profile), profile


def test_failure_under_torchrun_is_read_in_the_part_of_a_log_that_the_status_of_the_pod_lacks(outcome: Wait) -> None:
    failure: Json = outcome(failed_script)
    found = {key: failure.get(key) for key in ("nodeRank", "rank", "reason", "exception")}
    assert found == {"nodeRank": NODE, "rank": RANK, "reason": "ValueError", "exception": "ValueError"}
    assert f"train.py:{FAULT_LINE}: ValueError: sample 17 has 3 channels, expected 1" in failure["message"]
    assert "sample 17" not in failure["logTail"]


@pytest.mark.soak
def test_rank_that_the_cpu_limit_stops_is_named_within_a_minute(outcome: Wait) -> None:
    slow, why = outcome(throttled_script)
    assert slow["rank"] == NODE
    assert 0 < float(slow["throttled"]) <= 2
    assert (why.stage, why.rank) == ("Slow", NODE)
    assert "it is 250m" in why.next
