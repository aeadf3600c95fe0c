"""A plain script on a kind cluster that fails under torchrun: the operator reads its log.

It contains nothing of this project. How scripts may end is tested without a cluster: tests/cli/test_training.py,
tests/ddprun/resilience/test_scripts.py, tests/engine/test_plain_scripts.py.
"""

from __future__ import annotations

import pytest

from ddpjob.api import names
from ddpjob.api.objects import Json
from tests.e2e.trials import Trial, Trials, Wait, apart
from tests.kind.images import TRAINER_TAG
from tests.torchrun import FAULT_LINE, SCRIPT, VALUE_ERROR

pytestmark = [pytest.mark.kind, pytest.mark.timeout(900, func_only=True)]

NODE, RANK = 1, 2


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


TRIALS = Trials.of(1, failed_script)


def test_failure_under_torchrun_is_read_in_the_part_of_a_log_that_the_status_of_the_pod_lacks(outcome: Wait) -> None:
    failure: Json = outcome(failed_script)
    found = {key: failure.get(key) for key in ("nodeRank", "rank", "reason", "exception")}
    assert found == {"nodeRank": NODE, "rank": RANK, "reason": "ValueError", "exception": "ValueError"}
    assert f"train.py:{FAULT_LINE}: ValueError: sample 17 has 3 channels, expected 1" in failure["message"]
    assert "sample 17" not in failure["logTail"]
