"""Local mode runs what a cluster runs: the same pods, and in the end the same status, field by field."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path

import pytest

from ddpjob.local.session import Options, Session
from ddpjob.local.state import StateFolder
from tests.e2e.installation import Installation
from tests.e2e.kubectl import Json
from tests.e2e.parity import differences, pods_of, status_of
from tests.e2e.scene import CLAIM, Scene, claim_of

pytestmark = [pytest.mark.kind, pytest.mark.timeout(400, func_only=True)]

LOCAL_SECONDS = 240.0
TRAINING = ("train", "--data", "digits", "--epochs", "1", "--checkpoint-every", "10")


def job(name: str, *args: str, **spec: object) -> Json:
    """Two nodes of one process each; one thread per rank, so that both paths compute the very same numbers."""
    return {
        "apiVersion": "ddpjob.dev/v1alpha1",
        "kind": "DDPJob",
        "metadata": {"name": name},
        "spec": {
            "image": "ddpjob/trainer:dev",
            "args": list(args),
            "env": [{"name": "DDPTRAIN_THREADS", "value": "1"}],
            "numNodes": 2,
            "nprocPerNode": 1,
            "checkpoint": {"claimName": CLAIM},
            **spec,
        },
    }


SUCCESS = job("success", *TRAINING)
# On one node: of two that fail within a moment, either may be seen first, and the other is then no longer waited for.
KILLED_RANK = job("killed-rank", *TRAINING, "--chaos", "kill:1:25", numNodes=1, nprocPerNode=2)
BAD_COMMAND = job("bad-command", command=["no-such-program"], numNodes=1, restartPolicy={"maxRestarts": 1})


def run_locally(manifest: Json, namespace: str, root: Path) -> tuple[Json, list[Json]]:
    """The finished job and its pods as local mode leaves them."""
    manifest = copy.deepcopy(manifest)
    manifest["metadata"]["namespace"] = namespace
    folder = StateFolder(root)
    options = Options(progress_seconds=1.0)
    session = Session(manifest, [], folder, options, on_change=lambda job, pods: None, say=print)

    async def run() -> Json:
        return await asyncio.wait_for(session.run(asyncio.Event()), LOCAL_SECONDS)

    finished = asyncio.run(run())
    return finished, folder.job(namespace, manifest["metadata"]["name"]).pods()


@pytest.mark.parametrize("manifest", [SUCCESS, KILLED_RANK, BAD_COMMAND], ids=lambda m: m["metadata"]["name"])
def test_local_mode_renders_and_reports_what_the_cluster_does(
    own: Scene, operator: Installation, tmp_path: Path, manifest: Json
) -> None:
    name = manifest["metadata"]["name"]
    own.kubectl.apply(claim_of(own), manifest)
    own.until_finished(name)
    there, there_pods = own.job(name), own.pods()

    here, here_pods = run_locally(manifest, own.kubectl.namespace, tmp_path)

    found = differences(pods_of(here_pods, here), pods_of(there_pods, there), "pods")
    found += differences(status_of(here), status_of(there), "status")
    assert not found, "\n".join(found)
