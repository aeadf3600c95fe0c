"""The default StorageClass of the cluster gives each claim a ReadWriteMany volume."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from ddpjob.api.objects import Json
from tests.e2e.jobs import shell_job, strictly_apart
from tests.e2e.kubectl import until
from tests.e2e.trials import MOUNT, Trial, Trials, Wait
from tests.kind.cluster_config import STORAGE_CLASS

pytestmark = [pytest.mark.kind, pytest.mark.timeout(900, func_only=True)]

WRITE_AND_READ = f"""
cd {MOUNT}
[ $NODE_RANK != 0 ] || echo "$DDPJOB_NAME, written by $HOSTNAME" > checkpoint
until [ -s checkpoint ]; do sleep 0.1; done
cat checkpoint > read-by-$NODE_RANK
"""


@dataclass(frozen=True)
class Used:
    """A job and its volume."""

    pods: dict[int, Json]
    read: dict[int, str]
    folder: Path
    content: set[str]


def two_at_once(trial: Trial) -> dict[str, Used]:
    """Run two jobs with a volume each. Then delete the job and the claim of the first, and wait for its folder."""
    trial.kubectl.apply(job("first"), job("second", storageClassName=STORAGE_CLASS))
    used = {}
    for name in ("first", "second"):
        trial.namespace.until_finished(name)
        pods = trial.pods(name)
        folder = trial.namespace.folder_of(f"{name}-checkpoints")
        # Not the logs: the last lines of a container that lives for milliseconds are sometimes lost.
        read = {node_rank: (folder / f"read-by-{node_rank}").read_text() for node_rank in pods}
        used[name] = Used(pods, read, folder, {file.name for file in folder.iterdir()})
    trial.kubectl("delete", "ddp/first", "pvc/first-checkpoints", "--timeout=60s", timeout=90)
    until("the folder of the deleted claim is gone", lambda: not used["first"].folder.exists(), seconds=60)
    return used


TRIALS = Trials.of(1, two_at_once)._replace(has_claim=False)


def job(name: str, **claim: str) -> Json:
    requested = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Mi"}}}
    checkpoint = {"mountPath": MOUNT, "claimTemplate": {"spec": requested | claim}}
    return shell_job(
        name, WRITE_AND_READ, numNodes=2, checkpoint=checkpoint, template={"spec": {"affinity": strictly_apart(name)}}
    )


def test_two_jobs_at_once_share_a_volume_of_their_own_between_two_nodes(outcome: Wait) -> None:
    used: dict[str, Used] = outcome(two_at_once)
    for name, job in used.items():
        assert len({pod["spec"]["nodeName"] for pod in job.pods.values()}) == 2
        written = f"{name}, written by {job.pods[0]['metadata']['name']}\n"
        assert job.read == {0: written, 1: written}
        assert {"checkpoint", "data"} <= job.content, "a new volume begins with a copy of the initial folder"


def test_deleting_a_claim_deletes_its_folder_and_no_other(outcome: Wait) -> None:
    used: dict[str, Used] = outcome(two_at_once)
    assert not used["first"].folder.exists()
    assert (used["second"].folder / "checkpoint").is_file()
