"""Volumes as directories of this machine."""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ddpjob.api.objects import Json
from ddpjob.local import volumes
from tests.local.bench import Bench, running_kubelet
from tests.local.builders import POD, a_config_map, a_container, a_pod, a_secret

pytestmark = pytest.mark.timeout(180)

CLAIM = [{"name": "v", "persistentVolumeClaim": {"claimName": "data"}}]


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    documents = [a_secret(token="s3cret"), a_config_map(lr="0.1", seed="7")]
    async with running_kubelet(tmp_path / "state", documents, {"given": tmp_path / "given"}) as made:
        yield made


def mounted(script: str, path: str = "/mnt/v", **mount: str) -> Json:
    return a_container(script=script, volumeMounts=[{"name": "v", "mountPath": path} | mount])


async def refusal(bench: Bench, pod: Json) -> str:
    """Return why a pod's container is not started."""
    name = bench.create(pod)
    await bench.until("it waits", lambda: bench.state_of(name).get("waiting", {}).get("message"))
    waiting = bench.state_of(name)["waiting"]
    assert waiting["reason"] == "CreateContainerConfigError"
    return str(waiting["message"])


async def test_claim_is_a_directory_that_later_pods_share(bench: Bench) -> None:
    await bench.run(a_pod(mounted("echo kept > /mnt/v/file"), volumes=CLAIM))
    await bench.run(a_pod(mounted("cat /mnt/v/file"), name="mnist-0a1b2-2-0", volumes=CLAIM))
    assert bench.log("mnist-0a1b2-2-0") == "kept\n"
    assert (bench.state.volume("default", "data") / "file").read_text() == "kept\n"


async def test_claim_can_be_a_directory_of_the_user(bench: Bench, tmp_path: Path) -> None:
    claim = [{"name": "v", "persistentVolumeClaim": {"claimName": "given"}}]
    await bench.run(a_pod(mounted("echo mine > /mnt/v/file"), volumes=claim))
    assert (tmp_path / "given/file").read_text() == "mine\n"


async def test_sub_path_is_created_in_the_volume(bench: Bench) -> None:
    env = [{"name": "NAME", "value": "b"}]
    for number, key in enumerate(("subPath", "subPathExpr")):
        value = "a/b" if key == "subPath" else "a/$(NAME)"
        container = mounted(f"echo {key} >> /mnt/v/file", **{key: value}) | {"env": env}
        await bench.run(a_pod(container, name=f"mnist-0a1b2-{number + 1}-0", volumes=CLAIM))
    assert (bench.state.volume("default", "data") / "a/b/file").read_text() == "subPath\nsubPathExpr\n"


async def test_sub_path_cannot_leave_its_volume_through_a_link(bench: Bench, tmp_path: Path) -> None:
    claim = bench.state.volume("default", "data")
    claim.mkdir(parents=True)
    (claim / "link").symlink_to(tmp_path)
    message = await refusal(bench, a_pod(mounted("true", subPath="link/x"), volumes=CLAIM))
    assert message == 'failed to prepare subPath "link/x" of volume "v": it leads out of the volume'
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("medium", ["", "Memory"])
async def test_empty_dir_is_shared_by_containers_and_removed_with_the_pod(bench: Bench, medium: str) -> None:
    pod = a_pod(
        mounted("until [ -e /mnt/v/other ]; do sleep 0.01; done; ls /mnt/v; cd /mnt/v; pwd -P"),
        mounted("touch /mnt/v/other") | {"name": "second"},
        volumes=[{"name": "v", "emptyDir": {"medium": medium}}],
    )
    await bench.run(pod)
    listed, place = bench.log(POD).splitlines()
    assert listed == "other"
    assert place.startswith("/dev/shm/" if medium else str(bench.folder))
    assert not os.path.lexists(place)  # noqa: ASYNC240


async def test_shared_memory_is_that_of_the_machine(bench: Bench) -> None:
    pod = a_pod(mounted("cd /dev/shm; pwd -P", "/dev/shm"), volumes=[{"name": "v", "emptyDir": {"medium": "Memory"}}])
    await bench.run(pod)
    assert bench.log(POD) == "/dev/shm\n"


async def test_host_path_is_unchanged(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here")
    await bench.run(a_pod(mounted("cat /mnt/v/file"), volumes=[{"name": "v", "hostPath": {"path": str(tmp_path)}}]))
    assert bench.log(POD) == "here"


@pytest.mark.parametrize(
    ("volume", "listing"),
    [
        ({"configMap": {"name": "settings"}}, "lr:0.1:644\nseed:7:644\n"),
        ({"secret": {"secretName": "keys", "defaultMode": 0o400}}, "token:s3cret:400\n"),
        ({"configMap": {"name": "settings", "items": [{"key": "lr", "path": "a/b", "mode": 0o600}]}}, "a/b:0.1:600\n"),
        ({"configMap": {"name": "none", "optional": True}}, ""),
        ({"downwardAPI": {"items": [{"path": "n", "fieldRef": {"fieldPath": "metadata.name"}}]}}, f"n:{POD}:644\n"),
        (
            {"projected": {"sources": [{"secret": {"name": "keys"}}, {"configMap": {"name": "settings"}}]}},
            "lr:0.1:644\nseed:7:644\ntoken:s3cret:644\n",
        ),
    ],
)
async def test_secret_config_map_and_field_files_exist_while_the_pod_runs(
    bench: Bench, volume: Json, listing: str
) -> None:
    show = "printf '%s:%s:%s\\n' ${f#./} $(cat $f) $(stat -c %a $f)"
    script = f"cd /mnt/v; find . -type f | sort | while read f; do {show}; done"
    await bench.run(a_pod(mounted(script), volumes=[{"name": "v"} | volume]))
    assert bench.log(POD) == listing
    assert not list(bench.folder.glob("pods/*/volume-*"))


async def test_annotations_are_quoted_as_by_kubernetes(bench: Bench) -> None:
    items = [{"path": "a", "fieldRef": {"fieldPath": "metadata.annotations"}}]
    await bench.run(a_pod(mounted("cat /mnt/v/a"), volumes=[{"name": "v", "downwardAPI": {"items": items}}]))
    assert bench.log(POD) == 'note="a \\"b\\""'


@pytest.mark.parametrize(
    ("volume", "message"),
    [
        ({"secret": {"secretName": "none"}}, 'MountVolume.SetUp failed for volume "v" : secret "none" not found'),
        (
            {"configMap": {"name": "settings", "items": [{"key": "x", "path": "x"}]}},
            'MountVolume.SetUp failed for volume "v" : references non-existent config key: x',
        ),
        (
            {"nfs": {"server": "a", "path": "/"}},
            'volume "v": nfs is not supported in local mode: use a claim or hostPath',
        ),
    ],
)
async def test_unsupported_or_missing_volume_is_named(bench: Bench, volume: Json, message: str) -> None:
    assert await refusal(bench, a_pod(mounted("true"), volumes=[{"name": "v"} | volume])) == message


async def test_working_directory_is_translated(bench: Bench) -> None:
    await bench.run(a_pod(mounted("pwd -P") | {"workingDir": "/mnt/v"}, volumes=CLAIM))
    assert bench.log(POD) == f"{bench.state.volume('default', 'data')}\n"


def test_only_memory_volumes_of_ended_runs_are_removed() -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    left, used = (volumes.SHARED_MEMORY / f"{volumes.memory_prefix()}{pid}-uid-v" for pid in (dead.pid, os.getpid()))
    for path in (left, used):
        path.mkdir()
    try:
        volumes.sweep_shared_memory()
        assert (left.exists(), used.exists()) == (False, True)
    finally:
        used.rmdir()
