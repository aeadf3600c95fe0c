"""Local mode and a cluster make the same pods and the same final status, field by field.

A pod of local mode has the fields that the engine rendered; an API server adds defaults to them.
"""

from __future__ import annotations

import asyncio
import copy
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from ddpjob.api.names import ANNOTATION_PROGRESS_PORT, ENV_TOKEN
from ddpjob.api.objects import Json
from ddpjob.local.admission import admit
from ddpjob.local.pod_process import Machine
from ddpjob.local.session import Session
from ddpjob.local.state import HostPaths, StateFolder
from tests.e2e.installation import Installation
from tests.e2e.namespace import CLAIM, JobNamespace, shared_claim
from tests.e2e.trials import small_job

pytestmark = [pytest.mark.kind, pytest.mark.timeout(900, func_only=True)]

LOCAL_SECONDS = 600.0
# Durations and speeds differ in every run, and so does whether the nodes' ends are seen one after the other.
MEASURED = frozenset(
    {
        *("activeSeconds", "time", "firstStepTime", "firstSuccessTime", "savingSeconds"),
        *("samplesPerSecond", "stepsPerSecond", "etaSeconds", "nodeName"),
        "tokenHash",  # each operator draws its own tokens
        "fenced",  # a launcher that succeeds says it only while it trains: a short training may end before it is asked
    }
)
# The command that shows a log is another one in local mode.
COMMANDS = frozenset({"next"})
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z")
_TOKEN = re.compile(rf'({{"name": "{ENV_TOKEN}", "value": ")[0-9a-f]{{64}}')
# Fields that the API server adds to every object.
_METADATA = frozenset({"uid", "resourceVersion", "creationTimestamp", "managedFields"})
TRAINING = ("train", "--data", "digits", "--epochs", "1", "--checkpoint-every", "10")


def job(name: str, *args: str, **spec: Any) -> Json:
    """Return a job of two nodes, whose failure ends the attempt, without what local mode has not: affinity, subPath."""
    return small_job(name, args=[*TRAINING, *args], checkpoint={"claimName": CLAIM}, template={}, **spec)


SUCCESS = job("success")
# One node: if two nodes fail at nearly the same time, either may be reported first and the other not at all.
KILLED_RANK = job("killed-rank", "--chaos", "kill:1:25", numNodes=1, nprocPerNode=2)


def status_of(job: Json) -> Json:
    """Return the status of a finished job without times, names and measurements of one run."""
    status: Json = _plain(job["status"], job)
    return status


def pods_of(pods: Iterable[Json], job: Json) -> list[Json]:
    """Return specs, labels, annotations and owners of the stored pods, sorted by name."""
    return [_rendered(pod, job) for pod in sorted(pods, key=lambda pod: str(pod["metadata"]["name"]))]


def missing(here: Any, there: Any, path: str = "") -> list[str]:
    """Return one line for each value here that is another one there; there may be more."""
    if isinstance(here, dict) and isinstance(there, dict):
        return [line for key, value in here.items() for line in missing(value, there.get(key), f"{path}.{key}")]
    if isinstance(here, list) and isinstance(there, list) and len(here) == len(there):
        pairs = enumerate(zip(here, there, strict=True))
        return [line for index, (a, b) in pairs for line in missing(a, b, f"{path}[{index}]")]
    is_same = here == there or (here == [] and there is None)  # an API server leaves out an empty list
    return [] if is_same else [f"{path}: here {json.dumps(here)}, there {json.dumps(there)}"]


def _rendered(pod: Json, job: Json) -> Json:
    metadata = {key: value for key, value in pod["metadata"].items() if key not in _METADATA}
    # Where the port is on this machine; on a cluster it is the same in each pod.
    given = {
        key: value for key, value in (metadata.get("annotations") or {}).items() if key != ANNOTATION_PROGRESS_PORT
    }
    metadata = {key: value for key, value in metadata.items() if key != "annotations"} | {"annotations": given}
    rendered: Json = _plain({"metadata": metadata, "spec": pod["spec"]}, job)
    return rendered


def _plain(value: Any, job: Json) -> Any:
    uid = job["metadata"]["uid"]
    text = json.dumps(value).replace(uid, "<uid>").replace(f"-{uid[:5]}", "-<uid5>")
    text = _TOKEN.sub(r"\1<token>", text)
    return _without_measures(json.loads(_TIME.sub("<time>", text)))


def _without_measures(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_measures(inner) for key, inner in value.items() if key not in MEASURED | COMMANDS}
    if isinstance(value, list):
        return [_without_measures(inner) for inner in value]
    return value


def run_locally(manifest: Json, namespace: str, root: Path) -> tuple[Json, list[Json]]:
    """Run the job in local mode and return the finished job and its pods."""
    manifest = copy.deepcopy(manifest)
    manifest["metadata"]["namespace"] = namespace
    admitted = admit(manifest)
    paths = HostPaths(admitted.job, StateFolder(root))
    session = Session(
        admitted=admitted, machine=Machine(paths), on_change=lambda job, pods: None, say=print, progress_seconds=1.0
    )

    async def run() -> Json:
        return await asyncio.wait_for(session.run(), LOCAL_SECONDS)

    return asyncio.run(run()), paths.record.pods()


@pytest.mark.parametrize(
    "manifest",
    [SUCCESS, pytest.param(KILLED_RANK, marks=pytest.mark.soak)],
    ids=lambda m: m["metadata"]["name"],
)
def test_local_mode_makes_the_same_pods_and_status_as_the_cluster(
    namespace: JobNamespace, operator: Installation, tmp_path: Path, manifest: Json
) -> None:
    name = manifest["metadata"]["name"]
    namespace.kubectl.apply(shared_claim(), manifest)
    namespace.until_finished(name)
    there, there_pods = namespace.job(name), namespace.pods()
    here, here_pods = run_locally(manifest, namespace.kubectl.namespace, tmp_path)
    found = missing(pods_of(here_pods, here), pods_of(there_pods, there), "pods")
    found += missing(status_of(here), status_of(there), "status")
    found += missing(status_of(there), status_of(here), "status there")
    assert not found, "\n".join(found)
