"""Bundles: that no value of a user is in one, what is, and how the file is written."""

from __future__ import annotations

import copy
import json
import resource
import signal
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddpjob.api import names
from ddpjob.api.objects import Json
from ddpjob.api.times import timestamp
from ddpjob.client.bundle import archive
from ddpjob.client.bundle.redaction import Redactor, redacted
from ddpjob.client.snapshot import Snapshot
from ddpjob.errors import DDPJobError
from tests.builders import NOW, a_job, a_running_world, failed
from tests.json_schema import faults

SCHEMA = Path(__file__).parents[2] / "docs" / "reference" / "schemas" / "bundle.json"
KEY, OTHER_KEY = b"k" * 32, b"l" * 32
NO_GPU = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."


def snapshot(**more: Any) -> Snapshot:
    """Return a failed job with all kinds of objects, each with the fields in which users give values."""
    job = a_job(
        env=[{"name": "WANDB_API_KEY", "value": "env"}, {"name": "LEVEL", "value": "INFO"}],
        command=["torchrun", "train.py", "--token", "flag"],
        args=["--lr", "0.1", "-p", "password"],
        networkPolicy="Isolated",
        checkpoint={
            "claimTemplate": {"spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}}
        },
        template={"metadata": {"labels": {"team": "a"}, "annotations": {"contact": "alice"}}, "spec": _pod_spec()},
    )
    applied = json.dumps({"spec": job["spec"]})
    job["metadata"] |= {
        "labels": {"owner": "alice", "app.kubernetes.io/part-of": "vision", "ddpjob.dev/owner": "alice"},
        "annotations": {"ddpjob.dev/contact": "alice", "kubectl.kubernetes.io/last-applied-configuration": applied},
        "managedFields": [{"manager": "kubectl", "fieldsV1": {"f:spec": {}}}],
    }
    world = a_running_world(job)
    world.set_pod(1, failed(1, kind="HTTPError", exception="HTTPError", message="401", hint="h", where="train.py:9"))
    world.settle()
    for pod in world.pods.values():
        pod["spec"] |= _pod_spec() | {"containers": pod["spec"]["containers"]}
        pod["status"] |= {"conditions": [_condition("Unschedulable", NO_GPU)]}
    about = {"kind": "Pod", "name": "mnist-0a1b2-1-0", "namespace": "default"}
    event = {
        "kind": "Event",
        "metadata": {"name": "e"},
        "involvedObject": about,
        "lastTimestamp": timestamp(NOW),
        "type": "Warning",
    }
    meta = {"name": "op", "namespace": "ops", "labels": {"app.kubernetes.io/version": "1"}}
    setting = [{"name": "DDPJOB_OPERATOR_LOG", "value": "debug"}, {"name": "PROXY", "value": "http://u:p@proxy"}]
    operator = {
        "kind": "Deployment",
        "metadata": meta,
        "spec": {"template": {"spec": {"containers": [{"name": "operator", "env": setting}]}}},
    }
    given: Json = {
        "job": world.job,
        "now": world.now,
        "settings": world.settings,
        "pods": list(world.pods.values()),
        "claims": {"mnist-checkpoints": world.claim, "other": None},
        "events": [
            event | {"reason": "FailedScheduling", "message": NO_GPU, "source": {"component": "default-scheduler"}},
            event
            | {
                "reason": "Unhealthy",
                "message": "Readiness probe failed: key",
                "source": {"component": "kubelet", "host": "node-a"},
            },
        ],
        "others": [one for one in (world.service, world.policy) if one],
        "operators": [operator],
        "logs": {"mnist-0a1b2-1-0": "loss 0.5\n"},
        "operator_log": "started\n",
        "versions": {"ddpjob": "1"},
        "unread": {"quotas": "you may not read this"},
    }
    return Snapshot(**given | more)


def _pod_spec() -> Json:
    header = {"name": "Authorization", "value": "Basic dTpw"}
    match = {"key": "team", "operator": "In", "values": ["vision"]}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [match]}]}
    return {
        "nodeSelector": {"pool": "a100", "topology.kubernetes.io/zone": "zone-a"},
        "tolerations": [{"key": "dedicated", "operator": "Equal", "value": "vision", "effect": "NoSchedule"}],
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}},
        "volumes": [
            {"name": "c", "csi": {"driver": "csi.example.com", "volumeAttributes": {"accountkey": "S", "share": "s"}}},
            {"name": "n", "nfs": {"server": "nfs.example.com", "path": "/export"}},
            {"name": "f", "flexVolume": {"driver": "x/y", "options": {"password": "S"}}},
        ],
        "containers": [
            {
                "name": "trainer",
                "env": [{"name": "PROXY", "value": "http://u:p@proxy"}, {"name": "DDPJOB_OPERATOR_X", "value": "mine"}],
                "readinessProbe": {
                    "httpGet": {"path": "/x?token=S", "host": "hub.acme.io", "port": 80, "httpHeaders": [header]}
                },
                "lifecycle": {"preStop": {"exec": {"command": ["sh", "-c", "curl -u me:pw https://hub"]}}},
                "resources": {"limits": {"nvidia.com/gpu": "1"}},
            }
        ],
    }


def _condition(reason: str, message: str) -> Json:
    return {"type": "PodScheduled", "status": "False", "reason": reason, "message": message}


# What may arrive in a bundle although a user could give it as a value, and why.
NAMES = "the API server accepts only names here, and an incident is described by them"
WORDS = "the API server, a kubelet or the operator accepts only its own words here"
ARRIVES = {
    **dict.fromkeys(("name", "namespace", "uid", "hostname", "subdomain", "nodeName", "key", "driver"), NAMES),
    **dict.fromkeys(("resourceVersion", "apiVersion", "pod"), NAMES),
    "host": "says which Kubernetes node wrote an event; a probe has it, too, and there it is hidden",
    **dict.fromkeys(("kind", "type", "status", "reason", "state", "action", "effect", "operator"), WORDS),
    **dict.fromkeys(("phase", "current", "policyTypes", "accessModes", "restartPolicy", "clusterIP"), WORDS),
    **dict.fromkeys(
        ("networkPolicy", "component", "terminationMessagePolicy", "masterAddress", "nodesReady", "fromProgram"), WORDS
    ),
    "image": "says which program ran; a registry takes credentials from a Secret, not from the name",
    "mountPath": "says where a volume is; it is a path",
    "message": "the scheduler or the kubelet wrote it about objects: only with a reason of theirs",
    "exception": "is the name of a class, from the report of the trainer",
    "ddpjob.dev": "labels and annotations that the operator writes",
    "kubernetes.io": "labels of Kubernetes and its extensions, whose values are names",
    "command": "its first word is the program",
    "DDPJOB": "variables that the operator sets, which the API server refuses in a job",
}
SECRET = "planted-0f3a"
"""It has the form of a name, so no form alone keeps it out."""


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each string."""
    if isinstance(value, str):
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _leaves(item, (*path, key))


def _planted(document: Json, path: tuple[Any, ...], secret: str) -> Json:
    made = copy.deepcopy(document)
    around: Any = made
    for key in path[:-1]:
        around = around[key]
    around[path[-1]] = secret
    return made


def _why(document: Json, path: tuple[Any, ...]) -> str:
    """Return the entry of ``ARRIVES`` for a string."""
    around: Any = document
    for key in path[:-1]:
        around = around[key]
    if path[-1] == "value":
        name = str(around.get("name"))
        return "DDPJOB" if name in names.OWNED_ENV and name != names.ENV_TOKEN else name
    domain = str(path[-1]).partition("/")[0]
    if domain.endswith((".io", ".dev")):
        return "ddpjob.dev" if domain == "ddpjob.dev" else "kubernetes.io"
    return next(str(key) for key in reversed(path) if isinstance(key, str))


def _documents(made: Snapshot) -> Iterator[Json]:
    for objects in ([made.job], made.pods or (), made.events, made.others, made.operators or ()):
        yield from objects
    yield from filter(None, made.claims.values())


def _shows(document: Json, path: tuple[Any, ...], secret: str) -> bool:
    """Return whether a secret in one string of an object arrives in a bundle."""
    planted = _planted(document, path, secret)
    made = Redactor(KEY, programs=False).redacted(planted, of_kubernetes=document["kind"] != names.DDPJOBS.kind)
    return secret in json.dumps(made)


def test_a_secret_in_any_string_of_any_object_arrives_only_where_the_table_says_why() -> None:
    arrived: dict[str, tuple[Any, ...]] = {}
    count = 0
    for document in _documents(snapshot()):
        for path in _leaves(document):
            count += 1
            if _shows(document, path, SECRET):
                arrived.setdefault(_why(document, path), path)
            if _shows(document, path, f"Authorization: Basic {SECRET}"):
                assert path[-1] == "message" and document["kind"] != names.DDPJOBS.kind, path
                arrived.setdefault("message", path)
    assert count > 300
    assert {key: path for key, path in arrived.items() if key not in ARRIVES} == {}
    assert ARRIVES.keys() - arrived.keys() == set(), "the table has what no object shows"


PRINTED = (
    *("token:    S", "password  =  S", "PASSWORD : S", "password: |\n  S", "token => S", "api_key=SecretStr('S')"),
    *("https://me:p@S@hub", "https://S@host/x", "https://hooks.slack.com/services/S", "?sv=1&sig=S", "AccountKey=S"),
    *("Pwd=S;", "X-Auth-Key: S", "machine hub login me password S", "sk_live_S", "ya29.S", "glrt-S", "SG.S", "hvs.S"),
    *("pypi-S", "dapiS", "S==\n-----END RSA PRIVATE KEY-----", "-----BEGIN PGP MESSAGE-----\nS", "WANDB_API_KEY=S"),
    *("Authorization: Bearer S", "train.py --hf-auth=S", "--token -S", "-p S", "Cookie: session=S", "s3://me:S@b/x"),
    *('{"key": "S", "name": "S", "kind": {"key": "S"}}', '{"cause": "own", "name": "S", "where": "S"}'),
)
"""Forms in which programs print secrets, most of which no pattern of a scanner knows."""


@pytest.mark.parametrize("text", PRINTED)
def test_what_a_program_printed_is_in_no_bundle_without_logs(text: str, tmp_path: Path) -> None:
    text = text.replace("S", SECRET)
    world = a_running_world(a_job())
    world.set_pod(
        1, failed(1, kind="Evicted", exception="HTTPError", message=text, hint=text, next=text, where=text, step=3)
    )
    world.settle()
    probe = {"reason": "Unhealthy", "message": f"Readiness probe failed: {text}", "metadata": {"name": "e"}}
    mount = f"MountVolume.SetUp failed for volume c\nMounting arguments: -o password={text}"
    volume = {"reason": "FailedMount", "message": mount, "metadata": {"name": "f"}}
    made = snapshot(
        job=world.job, pods=list(world.pods.values()), events=[probe, volume],
        logs={"mnist-0a1b2-1-0": text}, operator_log=text,
    )  # fmt: skip
    archive.write(tmp_path / "b.zip", *redacted(made, KEY, logs=False))
    assert SECRET not in everything(tmp_path / "b.zip")
    assert "MountVolume.SetUp failed for volume c" in everything(tmp_path / "b.zip")
    archive.write(tmp_path / "with.zip", *redacted(made, KEY, logs=True))
    assert everything(tmp_path / "with.zip").count(SECRET) > 3, "the user asked for what the program printed"


@pytest.mark.parametrize(
    ("reason", "text", "stays"),
    [
        ("FailedMount", "mount failed for volume c: mount.cifs //nas/x -o username=me,password=PW", "volume c"),
        ("FailedMount", "mount failed for volume c: mount -t cifs -osec=ntlm,password=PW //nas/x", "volume c"),
        ("ErrImagePull", 'Get "https://r2.acme.io/x?X-Amz-Signature=PW&b=1": TLS handshake timeout', "TLS handshake"),
        ("ErrImagePull", 'Head "https://me:PW@hub.acme.io/v2/x": no such host', "hub.acme.io/v2/x"),
    ],
)
def test_options_of_a_mount_and_secrets_in_a_url_are_in_no_text_of_a_kubelet(
    reason: str, text: str, stays: str
) -> None:
    event = {"kind": "Event", "reason": reason, "message": text.replace("PW", SECRET)}
    made = Redactor(KEY, programs=False).redacted(event)["message"]
    assert SECRET in event["message"] and SECRET not in made and stays in made


def everything(path: Path) -> str:
    with zipfile.ZipFile(path) as zipped:
        return "".join(f"{name}\n{zipped.read(name).decode()}" for name in zipped.namelist())


def test_values_that_are_hidden_in_objects_are_removed_from_logs_too() -> None:
    env = [{"name": "KEY", "value": "correct-horse-battery"}]
    world = a_running_world(a_job(env=env, args=["sh", "-c", "run --token hunter2hunter2"]))
    text = "my key is correct-horse-battery\nI am hunter2hunter2\nlevel INFO\n"
    made, redaction = redacted(snapshot(job=world.job, pods=[], logs={"a": text}), KEY, logs=True)
    lines = made.logs["a"].splitlines()
    assert lines[0].startswith("my key is hidden-") and lines[1].startswith("I am hidden-") and lines[2] == "level INFO"
    assert redaction.logs


def test_numbers_that_a_user_gives_are_hidden_too() -> None:
    pin, pod = 87_654_321, _pod_spec()
    pod["containers"][0] |= {"env": [{"name": "PIN", "value": pin}], "args": ["--pin", pin]}
    pod["volumes"][0]["csi"]["volumeAttributes"]["pin"] = pin
    job = a_job(template={"spec": pod, "metadata": {"annotations": {"pin": pin}, "labels": {"pin": pin}}})
    made, _ = redacted(snapshot(job=job, pods=[], logs={"a": f"pin {pin}"}), KEY, logs=True)
    assert str(pin) not in json.dumps([made.job, made.logs])


def test_the_phase_that_a_program_reports_is_a_plain_word() -> None:
    job = snapshot().job
    job["status"] |= {"progress": {"phase": SECRET}, "stall": {"phase": "close"}}
    status = Redactor(KEY, programs=False).redacted(job, of_kubernetes=False)["status"]
    assert status["progress"]["phase"].startswith("hidden-"), "a program may report any text as its phase"
    assert (status["stall"]["phase"], status["currentAttempt"]["phase"]) == ("close", "Running")


def test_equal_values_have_equal_marks_within_one_bundle_only() -> None:
    world = a_running_world(a_job(env=[{"name": "A", "value": "1234"}, {"name": "B", "value": "1234"}]))
    made = [redacted(snapshot(job=world.job), key, logs=False)[0].job["spec"]["env"] for key in (KEY, OTHER_KEY)]
    assert made[0][0]["value"] == made[0][1]["value"] != made[1][0]["value"]


def test_what_explains_an_incident_stays() -> None:
    made, redaction = redacted(snapshot(), KEY, logs=False)
    failure = made.job["status"]["failures"][0]
    assert (failure["exception"], failure["exitCode"], failure["nodeRank"]) == ("HTTPError", 1, 1)
    assert made.job["spec"]["command"][0] == "torchrun" and made.job["spec"]["command"][1] == "train.py"
    assert [variable["name"] for variable in made.job["spec"]["env"]] == ["WANDB_API_KEY", "LEVEL"]
    assert made.events[0]["message"] == NO_GPU and made.events[1]["source"]["host"] == "node-a"
    assert made.pods is not None and made.pods[1]["status"]["conditions"][0]["message"] == NO_GPU
    (ended,) = [pod["status"]["containerStatuses"][0] for pod in made.pods if "terminated" in json.dumps(pod["status"])]
    report = json.loads(ended["state"]["terminated"]["message"])
    assert report == {"schema": 2, "cause": "own", "code": 1, "kind": "HTTPError", "exception": "HTTPError"}
    container = made.pods[0]["spec"]["containers"][0]
    assert {"name": "MASTER_PORT", "value": "29500"} in container["env"]
    assert made.pods[0]["spec"]["nodeSelector"] == {"topology.kubernetes.io/zone": "zone-a"}
    assert made.job["metadata"]["labels"] == {"app.kubernetes.io/part-of": "vision"}
    assert not made.job["metadata"]["annotations"], "the operator writes none of that name"
    assert {pod["metadata"]["labels"]["ddpjob.dev/node-rank"] for pod in made.pods} == {"0", "1"}
    assert made.operators is not None
    env = made.operators[0]["spec"]["template"]["spec"]["containers"][0]["env"]
    assert env[0]["value"] == "debug" and env[1]["value"].startswith("hidden-")
    (own,) = [each["value"] for each in container["env"] if each["name"] == "DDPJOB_OPERATOR_X"]
    assert own.startswith("hidden-"), "a setting of the operator is one in its own pods only"
    assert redaction.hidden and redaction.left_out and not redaction.logs
    assert not made.logs and not made.operator_log


def test_the_manifest_lists_the_files_and_what_is_missing(tmp_path: Path) -> None:
    manifest = archive.write(tmp_path / "b.zip", *redacted(snapshot(), KEY, logs=True))
    with zipfile.ZipFile(tmp_path / "b.zip") as zipped:
        sizes = {info.filename: info.file_size for info in zipped.infolist()}
        assert json.loads(zipped.read("manifest.json")) == manifest.wire()
    assert manifest.files == {path: size for path, size in sizes.items() if path != "manifest.json"}
    assert {"operator.log", "logs/mnist-0a1b2-1-0.log", "others.json", "claims.json"} <= sizes.keys()
    assert manifest.unread == {"quotas": "you may not read this"}
    assert not list(faults(manifest.wire(), json.loads(SCHEMA.read_text(encoding="utf-8"))))
    of_machine = archive.write(tmp_path / "c.zip", *redacted(replace(snapshot(), is_run=True), KEY, logs=False))
    assert (manifest.place, of_machine.place) == ("cluster", "machine")


def test_a_bundle_is_written_over_nothing_and_through_no_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = redacted(snapshot(), KEY, logs=False)
    other = tmp_path / "other"
    other.write_text("mine")
    for link in (".b.zip.tmp", "link.zip"):
        Path(link).symlink_to(other)
    Path("dangling.zip").symlink_to(tmp_path / "absent")
    archive.write("b.zip", *made)
    assert Path("b.zip").stat().st_mode & 0o777 == 0o600
    for path in ("b.zip", "link.zip", "dangling.zip", "."):
        with pytest.raises(DDPJobError, match="exists"):
            archive.write(path, *made)
    for path in ("b.zip/x.zip", "absent/x.zip", "~nosuch-user/x.zip"):
        with pytest.raises(DDPJobError, match="cannot be written"):
            archive.write(path, *made)
    assert other.read_text() == "mine"
    assert {one.name for one in tmp_path.iterdir()} == {"b.zip", "other", ".b.zip.tmp", "link.zip", "dangling.zip"}


def test_a_bundle_that_does_not_fit_leaves_no_file(tmp_path: Path) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
    try:
        with pytest.raises(DDPJobError, match="cannot be written: File too large"):
            archive.write(tmp_path / "b.zip", *redacted(snapshot(), KEY, logs=False))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert not list(tmp_path.iterdir())
