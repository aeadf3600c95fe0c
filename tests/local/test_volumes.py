"""Volumes as directories of this machine."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from ddpjob.api.objects import Json
from ddpjob.local import LocalError
from ddpjob.local.references import References
from ddpjob.local.volumes import Volumes
from tests.local.bench import Bench, a_bench
from tests.local.builders import POD, a_config_map, a_container, a_pod, a_secret

pytestmark = pytest.mark.timeout(180)

CLAIM = [{"name": "v", "persistentVolumeClaim": {"claimName": "data"}}]


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    documents = [a_secret(token="s3cret"), a_config_map(lr="0.1", seed="7")]
    async with a_bench(tmp_path / "state", documents, {"given": tmp_path / "given"}) as made:
        yield made


def mounted(script: str, path: str = "/mnt/v", **mount: str) -> Json:
    return a_container(script=script, volumeMounts=[{"name": "v", "mountPath": path} | mount])


def refusal(bench: Bench, pod: Json) -> str:
    """Return why a pod is not started."""
    with pytest.raises(LocalError) as error:
        bench.create(pod)
    assert error.value.hint
    assert error.value.next_step
    return error.value.error


def test_files_for_their_owner_only_can_be_mounted_twice() -> None:
    mounts = [{"name": "v", "mountPath": f"/etc/{key}", "subPath": key} for key in ("token", "user")]
    secret = {"name": "v", "secret": {"secretName": "keys", "defaultMode": 0o400}}
    spec = {"containers": [{"volumeMounts": mounts}], "volumes": [secret]}
    references = References([a_secret(token="s3cret", user="me")], "default")
    with tempfile.TemporaryDirectory() as folder, as_ordinary_user(folder):
        volumes = Volumes(spec, Path(folder) / "volumes", references, Path)
        volumes.prepare()
        assert [Path(path).read_text() for path in volumes.paths.values()] == ["s3cret", "me"]


@contextlib.contextmanager
def as_ordinary_user(folder: str) -> Iterator[None]:
    """Give the folder to a user whom file modes bind, unlike root."""
    before, ordinary = os.geteuid(), os.geteuid() or 65_534
    os.chown(folder, ordinary, -1)
    os.seteuid(ordinary)
    try:
        yield
    finally:
        os.seteuid(before)


async def test_claim_is_a_directory_that_later_pods_share_with_its_sub_paths(bench: Bench) -> None:
    await bench.run(a_pod(mounted("echo kept > /mnt/v/file", subPath="a/b"), volumes=CLAIM))
    await bench.run(a_pod(mounted("cat /mnt/v/a/b/file"), name="mnist-0a1b2-2-0", volumes=CLAIM))
    assert bench.log("mnist-0a1b2-2-0") == "kept\n"
    assert (bench.state.volume("default", "data") / "a/b/file").read_text() == "kept\n"


@pytest.mark.parametrize(
    ("mount", "message"),
    [
        *(({"subPath": path}, f"the path {path} leads out of its volume") for path in ("../x", "/x", "a/../../x")),
        ({"subPathExpr": "$(A)"}, "the mount of the volume v has a subPathExpr, not a subPath"),
        ({"name": "w"}, "the volume w does not exist"),
    ],
)
def test_mount_that_local_mode_has_not_is_refused(bench: Bench, mount: dict[str, str], message: str) -> None:
    assert refusal(bench, a_pod(mounted("true", **mount), volumes=CLAIM)) == message


async def test_empty_dir_is_removed_with_the_pod_and_shared_memory_is_that_of_the_machine(bench: Bench) -> None:
    volume = {"name": "v", "emptyDir": {"medium": "Memory"}}
    await bench.run(a_pod(mounted("touch /mnt/v/x; ls; pwd -P") | {"workingDir": "/mnt/v"}, volumes=[volume]))
    listed, place = bench.log(POD).splitlines()
    assert listed == "x"
    assert place.startswith(str(bench.folder))
    assert not os.path.lexists(place)  # noqa: ASYNC240
    shared = a_pod(mounted("cd /dev/shm; pwd -P", "/dev/shm"), name="mnist-0a1b2-2-0", volumes=[volume])
    await bench.run(shared)
    assert bench.log("mnist-0a1b2-2-0") == "/dev/shm\n"


@pytest.mark.parametrize("kind", ["", "DirectoryOrCreate"])
async def test_host_path_is_created_only_on_request(bench: Bench, tmp_path: Path, kind: str) -> None:
    volume = {"name": "v", "hostPath": {"path": str(tmp_path / "missing"), "type": kind}}
    await bench.run(a_pod(mounted("true"), volumes=[volume]))
    assert (tmp_path / "missing").exists() == bool(kind)


async def test_one_file_of_a_config_map_can_be_mounted(bench: Bench) -> None:
    volume = {"name": "v", "configMap": {"name": "settings"}}
    await bench.run(a_pod(mounted("cat /mnt/v", subPath="lr"), volumes=[volume]))
    assert bench.log(POD) == "0.1"


@pytest.mark.parametrize(
    ("volume", "listing"),
    [
        ({"configMap": {"name": "settings"}}, "lr:0.1:644\nseed:7:644\n"),
        ({"secret": {"secretName": "keys", "defaultMode": 0o400}}, "token:s3cret:400\n"),
        ({"secret": {"secretName": "keys"}}, "token:s3cret:600\n"),
        ({"configMap": {"name": "settings", "items": [{"key": "lr", "path": "a/b", "mode": 0o600}]}}, "a/b:0.1:600\n"),
        ({"configMap": {"name": "none", "optional": True}}, ""),
    ],
)
async def test_files_of_secrets_and_config_maps_exist_while_the_pod_runs(
    bench: Bench, volume: Json, listing: str
) -> None:
    show = "printf '%s:%s:%s\\n' ${f#./} $(cat $f) $(stat -c %a $f)"
    script = f"cd /mnt/v; find . -type f | sort | while read f; do {show}; done"
    await bench.run(a_pod(mounted(script), volumes=[{"name": "v"} | volume]))
    assert bench.log(POD) == listing
    assert not list(bench.folder.glob("pods/*/volumes"))


@pytest.mark.parametrize(
    ("volume", "message"),
    [
        ({"secret": {"secretName": "none"}}, "the job refers to the Secret none, which its file does not contain"),
        (
            {"configMap": {"name": "settings", "items": [{"key": "x", "path": "x"}]}},
            "the job refers to the key x of the ConfigMap settings, which has no such key",
        ),
        ({"nfs": {"server": "a", "path": "/"}}, "the volume v is of a kind that needs a cluster: nfs"),
        ({"downwardAPI": {"items": []}}, "the volume v is of a kind that needs a cluster: downwardAPI"),
        ({"projected": {"sources": []}}, "the volume v is of a kind that needs a cluster: projected"),
        ({"configMap": 5}, "the volume v is of a kind that needs a cluster: configMap"),
        ({"configMap": {"name": "settings", "items": 5}}, "the volumes of spec.template cannot be read"),
        ({"configMap": {"name": "settings", "defaultMode": "x"}}, "the volumes of spec.template cannot be read"),
    ],
)
def test_unsupported_or_missing_volume_is_named(bench: Bench, volume: Json, message: str) -> None:
    assert message in refusal(bench, a_pod(mounted("true"), volumes=[{"name": "v"} | volume]))
