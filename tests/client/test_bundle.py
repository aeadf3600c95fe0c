"""Bundles in memory: what is removed, what stays, and that the operator would do the same about a redacted job."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import resource
import signal
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddpjob.api import names
from ddpjob.api.log_failure import log_failure
from ddpjob.api.objects import Json
from ddpjob.api.pod_view import pod_view
from ddpjob.client.bundle import archive, replay
from ddpjob.client.bundle.manifest import Manifest
from ddpjob.client.bundle.pseudonyms import pseudonyms
from ddpjob.client.bundle.recording import Recording, Unread, needs_logs
from ddpjob.client.bundle.redaction import redacted
from ddpjob.client.bundle.redactor import MARK, Redactor
from ddpjob.client.bundle.replay import decisions
from ddpjob.engine.actions import Problem
from ddpjob.errors import DDPJobError, InvalidJobError
from tests.builders import SETTINGS, World, a_job, a_running_world, ended, failed, running
from tests.engine.test_plain_scripts import VALUE_ERROR, log
from tests.json_schema import faults

SCHEMAS = Path(__file__).parents[2] / "docs" / "schemas"
PASSWORD = "correct-horse-battery"
TOKEN = "hf_" + "a1B2" * 8


def recording(world: World, **more: Any) -> Recording:
    given: Json = {
        "job": world.job,
        "now": world.now,
        "place": "cluster",
        "settings": world.settings,
        "pods": list(world.pods.values()),
        "service": world.service,
        "policy": world.policy,
        "claims": {world.claim["metadata"]["name"]: world.claim} if world.claim else {},
        "logs": {uid: log_failure(text) for uid, text in world.logs.items()},
    }
    return Recording(**given | more)


def secretive(name: str = "mnist", **spec: Any) -> Json:
    """Return a job that has secrets wherever a spec can have them."""
    job = a_job(
        name,
        env=[
            {"name": "WANDB_API_KEY", "value": PASSWORD},
            {"name": "LEVEL", "value": "INFO"},
            {"name": "FROM", "valueFrom": {"secretKeyRef": {"name": "wandb", "key": "token"}}},
        ],
        command=["torchrun", "train.py"],
        args=["--hub-token", TOKEN, "--password=opensesame", "--epochs", "3"],
        template={
            "metadata": {
                "annotations": {"team.example.com/contact": "alice@example.com"},
                "labels": {"team": "vision"},
            },
            "spec": {
                "nodeSelector": {"pool": "a100"},
                "containers": [{"name": "trainer", "env": [{"name": "PROXY", "value": f"http://u:{PASSWORD}@proxy"}]}],
            },
        },
        checkpoint={"claimTemplate": {"spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {}}}}},
        **spec,
    )
    applied = json.dumps({"spec": job["spec"]})
    job["metadata"] |= {
        "annotations": {"kubectl.kubernetes.io/last-applied-configuration": applied},
        "managedFields": [{"manager": "kubectl", "fieldsV1": {"f:spec": {}}}],
    }
    return job


def crashed(job: Json, **report: Any) -> World:
    world = a_running_world(job)
    text = {"message": f"401 for https://me:{PASSWORD}@hub/x with token={TOKEN}"}
    world.set_pod(1, failed(1, kind="HTTPError", exception="HTTPError", step=3, **text | report), node="gpu-7")
    return world


def _refused() -> World:
    world = World(secretive())
    world.reconcile(crash_after=1)
    world.problems = (Problem("CreateRefused", names.PODS, "mnist-0a1b2-1-0", "exceeded quota"),)
    world.reconcile()
    world.problems = ()
    return world


def _worlds() -> Iterator[tuple[str, World]]:
    """Yield a job at each of its decisions."""
    yield "new", World(secretive())
    yield "runs", a_running_world(secretive())
    yield "crashed", crashed(secretive())
    again = crashed(secretive())
    again.settle_after_backoff()
    again.run_all()
    again.settle()
    again.set_pod(0, failed(1, kind="HTTPError", exception="HTTPError", message=f"token={TOKEN}", step=3), node="gpu-7")
    yield "the same failure again", again
    silent = a_running_world(secretive())
    silent.settings = dataclasses.replace(SETTINGS, reads_logs=True)
    silent.set_pod(1, ended(1, message=f"password: {PASSWORD}\nlast line"))
    yield "needs a log", silent
    read = a_running_world(secretive())
    read.settings = dataclasses.replace(SETTINGS, reads_logs=True)
    pod = read.set_pod(1, ended(1))
    read.settle()
    read.logs = {pod["metadata"]["uid"]: log(1, VALUE_ERROR).replace("sample 17", f"token={TOKEN}")}
    yield "has read a log", read
    suspended = a_running_world(secretive())
    suspended.job["spec"] = suspended.job["spec"] | {"suspend": True}
    suspended.job["metadata"]["generation"] += 1
    yield "is to be suspended", suspended
    edited = a_running_world(secretive())
    changed = {**edited.job["spec"]["template"], "spec": {"hostNetwork": True}}
    edited.job["spec"] = edited.job["spec"] | {"template": changed}
    edited.job["metadata"]["generation"] += 1
    yield "has a template that was edited", edited
    lost = a_running_world(secretive())
    del lost.pods[next(iter(lost.pods))]
    yield "lost a pod", lost
    yield "refused", _refused()
    partly = World(secretive(numNodes=4))
    partly.reconcile(crash_after=4)  # the status, the claim and two pods
    yield "was begun by a process that ended", partly
    invalid = World(secretive() | {})
    invalid.job["spec"] = invalid.job["spec"] | {"numNodes": 0}
    yield "invalid", invalid
    done = a_running_world(secretive(ttlSecondsAfterFinished=10))
    for rank in (0, 1):
        done.set_pod(rank, ended(0))
    done.settle()
    done.forward(11)
    yield "finished", done
    for name in ("trainer", "pod", "torchrun", "running"):
        world = a_running_world(secretive(name))
        world.set_pod(1, failed(1, kind="ValueError", exception="ValueError", message="bad"), node="gpu-7")
        yield f"is called {name}", world


WORLDS = dict(_worlds())


@pytest.mark.parametrize("hide_names", [False, True])
@pytest.mark.parametrize("name", WORLDS)
def test_the_operator_does_the_same_about_a_redacted_job(name: str, hide_names: bool) -> None:
    world = WORLDS[name]
    before = recording(world)
    after, redaction = redacted(before, hide_names=hide_names)
    assert redaction.same_plan
    assert redaction.env_values and redaction.annotations and redaction.secrets
    if not hide_names:
        assert decisions(before.plan()) == decisions(after.plan())
    text = json.dumps([after.job, after.pods, after.service, [str(log) for log in after.logs.values()]])
    tokens = {pod_view(pod).token for pod in world.pods.values()}
    for secret in (PASSWORD, TOKEN, "opensesame", "alice", "managedFields", *tokens):
        assert secret not in text, secret
    assert "WANDB_API_KEY" in text and "--epochs" in text
    if hide_names:
        assert "gpu-7" not in text and '"mnist' not in text
    once, _ = redacted(after)
    assert (once.job, once.pods) == (after.job, after.pods), "what is redacted stays as it is"


def test_a_plan_that_pseudonyms_change_is_told_in_the_manifest() -> None:
    """torchrun's block has a field of the job's name, and is none with a pseudonym in its place."""
    world = a_running_world(secretive("rank"))
    for rank in (0, 1):
        world.set_pod(rank, ended(1, message=log(rank, code=-11)))
    assert redacted(recording(world))[1].same_plan
    assert not redacted(recording(world), hide_names=True)[1].same_plan


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("WANDB_API_KEY=abc123", f"WANDB_API_KEY={MARK}"),
        ("export HF_TOKEN='a b'; run", f"export HF_TOKEN={MARK}; run"),
        ("Authorization: Bearer abc.def", f"Authorization: Bearer {MARK}"),
        ("train.py --api-key k-1 --lr 0.1", f"train.py --api-key {MARK} --lr 0.1"),
        ("s3://me:pw@bucket/x", f"s3://{MARK}@bucket/x"),
        ("got eyJhbGciOiJI.eyJzdWIi.c2ln", f"got {MARK}"),
        ("https://b/x?X-Amz-Signature=ab12&y=1", f"https://b/x?X-Amz-Signature={MARK}&y=1"),
        ('{"password": "x", "step": 3}', f'{{"password": "{MARK}", "step": 3}}'),
        ("-----BEGIN RSA PRIVATE KEY-----\nMII\n-----END RSA PRIVATE KEY-----\nafter", f"{MARK}\nafter"),
        ('{"event": "login password=hunter2"}', f'{{"event": "login password={MARK}"}}'),
        ('{"name": "x --token abc"}', f'{{"name": "x --token {MARK}"}}'),
        ('{"path": "/x?token=abc"}', f'{{"path": "/x?token={MARK}"}}'),
        ('{"password": 12345678, "tokens": 9}', f'{{"password": "{MARK}", "tokens": 9}}'),
        ("PASSWORD=12345678", f"PASSWORD={MARK}"),
        ("PASSWORD=$ecretpw", f"PASSWORD={MARK}"),
        ("--password 123456", f"--password {MARK}"),
        ("WANDB_API_KEY=1234567890", f"WANDB_API_KEY={MARK}"),
        ("DB_PASS=hunter2 dbPass: hunter3", f"DB_PASS={MARK} dbPass: {MARK}"),
        ("train.py --db-pass hunter2", f"train.py --db-pass {MARK}"),
        ("PASSWORD=abc,def,user=me", f"PASSWORD={MARK},user=me"),
        ("curl -u me:pw https://hub", f"curl -u {MARK} https://hub"),
        ("Cookie: session=1f; id=2", f"Cookie: {MARK}"),
        # What only sounds like a secret stays.
        ("InvalidTokenError: sample 17 is bad", "InvalidTokenError: sample 17 is bad"),
        ('secret "wandb" not found', 'secret "wandb" not found'),
        ("tokens_per_second=1234.5, max_tokens: 512", "tokens_per_second=1234.5, max_tokens: 512"),
        ("tokenizer: bert-base", "tokenizer: bert-base"),
        ("--token ${HF_TOKEN} --key $(KEY)", "--token ${HF_TOKEN} --key $(KEY)"),
        ("num_tokens=12 token_count: 3 forward_pass=0.1", "num_tokens=12 token_count: 3 forward_pass=0.1"),
        ('{"token_ids": 5, "step": 8}', '{"token_ids": 5, "step": 8}'),
        ("run -u 1000:1000 bypass=on compass: n", "run -u 1000:1000 bypass=on compass: n"),
        ('{"loss": 0.25, "step": 7}', '{"loss": 0.25, "step": 7}'),
    ],
)
def test_what_looks_like_a_secret_is_removed_from_texts(text: str, wanted: str) -> None:
    redactor = Redactor()
    assert redactor.text(text) == wanted
    assert redactor.text(wanted) == wanted
    assert bool(redactor.removed["secrets"]) == (text != wanted)


def test_a_long_line_takes_no_long_time() -> None:
    for line in ("a" * 200_000, "token" * 40_000, "x-" * 100_000, "://" * 60_000, "eyJ" * 60_000):
        assert len(Redactor().text(line)) <= len(line) + len(MARK)


def test_a_variable_that_the_program_prints_is_removed_there_too() -> None:
    world = a_running_world(secretive())
    token = pod_view(world.pod(0)).token
    assert len(token) == 64
    text = f"my key is {PASSWORD}\nlevel INFO\nhere is {token}\n"
    after, _ = redacted(recording(world, texts={"logs/a.log": text}))
    assert after.texts == {"logs/a.log": f"my key is {MARK}\nlevel INFO\nhere is {MARK}\n"}


def test_a_number_is_removed_as_a_whole_word_if_it_is_a_secret() -> None:
    env = [{"name": "MY_PASSWORD", "value": "87654321"}, {"name": "MAX_TOKENS", "value": "1000000"}]
    text = 'I am 87654321, at 0.87654321 of 1000000\n{"pin": 87654321}\n'
    after, redaction = redacted(recording(a_running_world(a_job(env=env)), texts={"logs/a.log": text}))
    assert after.texts == {"logs/a.log": f'I am {MARK}, at 0.87654321 of 1000000\n{{"pin": "{MARK}"}}\n'}
    assert redaction.same_plan


def test_passwords_are_removed_from_arguments() -> None:
    args = ["--db-pass", "hunter2", "--password", "123456", "--max-tokens", "512", "-u", "me:pw", "-u", "train.py"]
    made = Redactor().object({"args": args})
    assert made["args"] == ["--db-pass", MARK, "--password", MARK, "--max-tokens", "512", "-u", MARK, "-u", "train.py"]


def test_a_value_that_a_plan_needs_stays_although_a_variable_has_it() -> None:
    """A variable with such a name may hold the name of a Secret, a claim or a path."""
    env = [
        {"name": "SECRET_NAME", "value": "sk-resnet-imagenet-2012"},
        {"name": "TOKEN_FILE", "value": "/checkpoints"},
        {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "sk-resnet-imagenet-2012", "key": "token"}}},
    ]
    checkpoint = {"claimName": "sk-resnet-imagenet-2012", "mountPath": "/checkpoints"}
    world = a_running_world(a_job("sk-resnet-imagenet-2012", env=env, checkpoint=checkpoint, image="hub/token:v-1"))
    after, redaction = redacted(recording(world))
    assert redaction.same_plan and redaction.env_values
    assert after.job["metadata"] == world.job["metadata"]
    assert after.job["spec"] | {"env": env} == world.job["spec"]
    assert [one["value"] for one in after.job["spec"]["env"][:2]] == [MARK, MARK]


def test_names_get_the_same_pseudonym_everywhere_and_keep_their_order() -> None:
    world = a_running_world(secretive("team-job"))
    for rank, node in enumerate(("b-node", "a-node")):
        world.set_pod(rank, running(), node=node)
    world.job["metadata"]["namespace"] = "vision"
    hidden = pseudonyms(world.job, list(world.pods.values()), ["alice"])
    assert {key: hidden[key] for key in ("team-job", "vision", "a-node", "b-node", "wandb", "alice", "trainer")} == {
        "team-job": "job-1",
        "vision": "namespace-1",
        "a-node": "node-1",
        "b-node": "node-2",
        "wandb": "secret-1",
        "alice": "host-1",
        "trainer": "image-1",
    }
    event = {"metadata": {"name": "e"}, "message": "Pod team-job-0a1b2-1-0 on a-node; team-jobs stay"}
    texts = {"logs/team-job-0a1b2-1-0.log": "hello from alice on b-node\n"}
    after, _ = redacted(recording(world, events=[event], texts=texts, names=["alice"]), hide_names=True)
    assert after.events[0]["message"] == "Pod job-1-0a1b2-1-0 on node-1; team-jobs stay"
    assert after.texts == {"logs/job-1-0a1b2-1-0.log": "hello from host-1 on node-2\n"}
    assert after.pods is not None
    pod = after.pods[0]
    assert pod["metadata"]["name"] == "job-1-0a1b2-1-0"
    assert [container["name"] for container in pod["spec"]["containers"]] == ["trainer"]
    assert pod["metadata"]["labels"][names.LABEL_JOB_NAME] == "job-1"


def written(path: Path, made: Recording) -> tuple[Path, Manifest]:
    content, manifest = archive.encode(*redacted(made))
    path.write_bytes(content)
    return path, manifest


def test_a_bundle_is_read_as_it_was_written_and_lists_its_files(tmp_path: Path) -> None:
    world = WORLDS["has read a log"]
    unread = [Unread(what="operator.log", reason="you may not read this")]
    made = recording(world, texts={"metrics/run-1.jsonl": '{"loss": 1}\n'}, unread=unread, versions={"ddpjob": "1"})
    path, manifest = written(tmp_path / "b.zip", made)
    read = archive.read(path)
    assert read.manifest == manifest
    assert dataclasses.replace(read.recording, assumed=()) == redacted(dataclasses.replace(made, assumed=()))[0]
    with zipfile.ZipFile(path) as zipped:
        sizes = {info.filename: info.file_size for info in zipped.infolist()}
    assert {one.path: one.bytes for one in manifest.files} == {k: v for k, v in sizes.items() if k != "manifest.json"}
    schema = json.loads((SCHEMAS / "bundle.json").read_text(encoding="utf-8"))
    assert not list(faults(manifest.wire(), schema))


def test_a_bundle_is_written_over_nothing_and_through_no_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = redacted(recording(WORLDS["runs"]))
    other = tmp_path / "other"
    other.write_text("mine")
    for link in (".b.zip.tmp", "link.zip"):
        Path(link).symlink_to(other)
    Path("dangling.zip").symlink_to(tmp_path / "absent")
    archive.write("b.zip", *made)
    assert archive.read("b.zip").recording.name == "mnist"
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
            archive.write(tmp_path / "b.zip", *redacted(recording(WORLDS["runs"])))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert not list(tmp_path.iterdir())


def test_an_incident_can_be_asserted_on(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "b.zip", recording(crashed(secretive(), fenced=True)))
    made = replay(path)
    assert (made.urgent, made.is_idle, made.starts_attempt) == (True, False, 2)
    assert made.status is not None and made.status["failures"][0]["nodeRank"] == 1
    assert {one.kind for phase in made.creates for one in phase} == {"Pod"}
    for after in (math.inf, math.nan, 1e15, -1):
        with pytest.raises(InvalidJobError, match="after is"):
            replay(path, after=after)
    later = replay(path, after=3600)
    assert later.now > made.now
    schema = json.loads((SCHEMAS / "replay.json").read_text(encoding="utf-8"))
    for one in (made, later):
        assert not list(faults(json.loads(json.dumps(one.wire())), schema))


def test_what_could_not_be_read_is_taken_to_exist(tmp_path: Path) -> None:
    world = a_running_world(secretive(networkPolicy="Isolated"))
    assumed = ("service", "networkPolicy", "claim")
    made = recording(world, service=None, policy=None, claims={}, assumed=assumed)
    path, _ = written(tmp_path / "b.zip", made)
    assert replay(path).is_idle
    assert replay(path).assumed == ["claim", "networkPolicy", "service"]
    assert not replay(written(tmp_path / "c.zip", dataclasses.replace(made, assumed=()))[0]).is_idle
    without, _ = written(tmp_path / "d.zip", dataclasses.replace(made, pods=None))
    with pytest.raises(InvalidJobError, match="has no pods"):
        replay(without)


def test_the_logs_that_the_operator_would_read_are_known() -> None:
    made = recording(WORLDS["needs a log"])
    while not needs_logs(made):
        status = made.plan().status
        assert status is not None
        made = dataclasses.replace(made, job=made.job | {"status": status})
    assert [name for name, _ in needs_logs(made)] == ["mnist-0a1b2-1-1"]


@pytest.mark.parametrize(
    ("limit", "added", "message"),
    [
        ("_MOST_BYTES", {"logs/a.log": b"x" * 600_000, "logs/b.log": b"x" * 600_000}, r"it holds 1,2\d\d,\d{3} bytes"),
        ("_MOST_FILES", {f"logs/{number}.log": b"" for number in range(20)}, "at most .* bytes in 20 files"),
        ("_MOST_OF_DOCUMENT", {"events.json": b'{"items": [%s]}' % (b" " * 1_000_000)}, "events.json in it is larger"),
    ],
)
def test_a_bundle_that_unpacks_to_too_much_is_not_unpacked(
    limit: str, added: dict[str, bytes], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = written(tmp_path / "b.zip", recording(WORLDS["runs"]))
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as zipped:
        for name, content in added.items():
            zipped.writestr(name, content)
    assert archive.read(path)
    monkeypatch.setattr(archive, limit, 20 if limit == "_MOST_FILES" else 1_000_000)
    with pytest.raises(InvalidJobError, match=message):
        archive.read(path)


def test_a_file_that_is_no_bundle(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "b.zip", recording(WORLDS["runs"]))
    with zipfile.ZipFile(path) as zipped:
        files = {name: zipped.read(name) for name in zipped.namelist()}
    spoiled = [
        {},
        files | {"manifest.json": b"[]"},
        files | {"manifest.json": files["manifest.json"].replace(b'"format": 1', b'"format": 99')},
        files | {"job.json": b'{"metadata": 1}'},
        files | {"pods.json": b"[" * 100_000},
        files | {"pods.json": b'{"items": [{}]}'},
        files | {"pods.json": b'{"items": ["x"]}'},
        files | {"pods.json": files["pods.json"].replace(b'"status": {', b'"status": "x", "was": {')},
        files | {"job.json": json.dumps(WORLDS["runs"].job | {"status": "x"}).encode()},
        files | {"service.json": b'"x"'},
        files | {"claims.json": b'{"c": 1}'},
        files | {"plan-inputs.json": re.sub(rb'("now": ".*)Z"', rb'\1"', files["plan-inputs.json"])},
        {name: content for name, content in files.items() if name != "plan-inputs.json"},
    ]
    for number, content in enumerate(spoiled):
        other = tmp_path / f"{number}.zip"
        with zipfile.ZipFile(other, "w") as zipped:
            for name, data in content.items():
                zipped.writestr(name, data)
        with pytest.raises(InvalidJobError, match="cannot be read as a bundle"):
            archive.read(other)
    (tmp_path / "text.zip").write_text("no zip")
    with zipfile.ZipFile(path) as zipped:
        start = zipped.getinfo("job.json").header_offset + 30 + len("job.json")
    content = bytearray(path.read_bytes())
    content[start] = 0xFF  # a kind of block that deflate does not have
    (tmp_path / "damaged.zip").write_bytes(content)
    for missing in ("text.zip", "absent.zip", "damaged.zip"):
        with pytest.raises(InvalidJobError, match="cannot be read as a bundle"):
            archive.read(tmp_path / missing)
