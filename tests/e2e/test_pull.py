"""``pull`` on a real cluster: a checkpoint of 200 MB through a pod that reads the volume."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest

from ddpjob import Client, DDPJob
from ddpjob.api.objects import Json
from ddpjob.client.volume.contents import Pulled, PullProgress, VolumeContents
from ddpjob.client.volume.reader_pod import LABEL_READER_OF
from ddpjob.errors import NotAllowedError
from tests.e2e.jobs import shell_job
from tests.e2e.trials import Trial, Trials
from tests.e2e.users import cluster_of, kubeconfig_of
from tests.worlds.cutting_proxy import CuttingProxy

pytestmark = [pytest.mark.soak, pytest.mark.kind, pytest.mark.timeout(600, func_only=True)]

SIZE, CUTS = 200_000_000, (60_000_000, 70_000_000)
SAVE = f"""
import os, pathlib, time
from ddprun.checkpoint_files import Checkpoints
store = Checkpoints(pathlib.Path(os.environ["DDPJOB_CHECKPOINT_DIR"]), keep=2)
store.claim({{}})
store.save(7, os.urandom({SIZE}), {{"time": time.time()}})
print("saved", flush=True)
time.sleep(1000)
"""


class Copied(NamedTuple):
    listed: VolumeContents
    pulled: Pulled
    again: Pulled
    digests: dict[str, str]
    cuts_left: list[int]
    nodes: dict[str, str]
    left: list[Json]
    refusal: NotAllowedError


def copied_checkpoint(trial: Trial) -> Copied:
    """Pull a checkpoint with the rights of an editor, over connections that are cut, from a job that runs."""
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    spec = {"command": ["python3", "-c", SAVE], "checkpoint": {"claimTemplate": {"spec": claim}, "subPath": "a"}}
    job = DDPJob.from_manifest(shell_job(trial.name, "", **spec))
    nodes: dict[str, str] = {}

    def look(progress: PullProgress) -> None:
        if progress.done and not nodes:
            pods = trial.kubectl.objects("pods")
            nodes.update({LABEL_READER_OF if is_reader(pod) else "job": pod["spec"]["nodeName"] for pod in pods})

    def is_reader(pod: Json) -> bool:
        return LABEL_READER_OF in pod["metadata"]["labels"]

    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        with Client.cluster(kubeconfig=trial.cluster.kubeconfig, namespace=trial.kubectl.namespace) as client:
            made = client.submit(job)
            assert any(line.text == "saved" for line in client.logs(made, follow=True))
        server = urlsplit(cluster_of(trial)["server"])
        with CuttingProxy((str(server.hostname), int(server.port or 443)), CUTS) as proxy:
            with Client.cluster(kubeconfig=kubeconfig_of(trial, "edit", here, proxy.port)) as editor:
                listed = editor.checkpoints(made)
                pulled = editor.pull(made, here / "files", on_progress=look)
                again = editor.pull(made, here / "files")
            digests = {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in pulled.paths}
        viewer = Client.cluster(kubeconfig=kubeconfig_of(trial, "view", here))
        with viewer, pytest.raises(NotAllowedError) as refused:
            viewer.pull(made, here / "none")
        left = [
            pod
            for pod in trial.kubectl.objects("pods")
            if is_reader(pod) and "deletionTimestamp" not in pod["metadata"]
        ]
    trial.kubectl("delete", "ddp", trial.name, "--wait=false")
    return Copied(listed, pulled, again, digests, proxy.cuts, nodes, left, refused.value)


TRIALS = Trials.of(1, copied_checkpoint)._replace(has_claim=False)


def test_a_large_checkpoint_is_pulled_over_connections_that_are_cut(trials: Mapping[str, Future[Any]]) -> None:
    copied: Copied = trials["copied_checkpoint"].result()
    (checkpoint,) = copied.listed.checkpoints
    assert (checkpoint.step, checkpoint.bytes, checkpoint.state) == (7, SIZE, "Intact")
    assert copied.cuts_left == [], "both connections were cut"
    file, manifest = copied.pulled.files
    assert (file.path, file.sha256) == (checkpoint.path, checkpoint.sha256)
    assert [*copied.digests.values()] == [file.sha256, manifest.sha256]
    assert copied.again == copied.pulled
    assert len(set(copied.nodes.values())) == 1, "the claim is read on the node that has it mounted"
    assert set(copied.nodes) == {"job", LABEL_READER_OF}
    assert copied.left == [], "the pods are deleted"
    assert "cannot create resource" in copied.refusal.error
