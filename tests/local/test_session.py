"""Whole jobs on this machine: the operator's own reconcile, processes as pods, a state folder that outlives the run."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest

from ddpjob.cluster.base import Json
from ddpjob.engine.clock import moment, timestamp
from ddpjob.local.errors import LocalError
from ddpjob.local.session import Options, Session, render
from ddpjob.local.state import StateFolder
from tests.local.bench import MARKER, marked
from tests.local.builders import a_config_map, a_local_job, a_secret
from tests.local.sessions import Run, Sessions, end

pytestmark = pytest.mark.timeout(300)

UNTIL_TOLD = "trap 'echo told; exit 75' TERM; echo up; until [ -e $DDPJOB_CHECKPOINT_DIR/go ]; do sleep 0.01; done"
"""Runs until a file `go` appears on the claim; answers SIGTERM with 75."""


class Place(Sessions):
    """Sessions that end with the test."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.runs: list[Run] = []

    def begin(self, job: Json, **options: object) -> Run:
        run = super().begin(job, **options)
        self.runs.append(run)
        return run

    def let_go(self, job: str = "tiny") -> None:
        claim = StateFolder(self.root).volume("default", f"{job}-checkpoints")
        claim.mkdir(parents=True, exist_ok=True)
        (claim / "go").touch()


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    made = Place(tmp_path / "state")
    yield made
    await end(made.runs)


async def test_a_job_runs_to_its_end_and_leaves_record_logs_and_volume(place: Place) -> None:
    script = 'echo "$NODE_RANK of $NNODES for $DDPJOB_NAME"; echo saved > /checkpoints/$NODE_RANK'
    run = await place.finish(a_local_job(script, checkpoint=True))

    assert run.status["state"] == "Succeeded"
    assert [run.log(1, rank) for rank in (0, 1)] == ["0 of 2 for tiny\n", "1 of 2 for tiny\n"]
    assert [path.read_text() for path in sorted((place.root / "volumes/default/tiny-checkpoints").iterdir())] == [
        "saved\n",
        "saved\n",
    ]
    recorded = StateFolder(place.root).job("default", "tiny")
    assert recorded.job() == run.task.result()
    assert [pod["status"]["phase"] for pod in recorded.pods()] == ["Succeeded", "Succeeded"]
    assert recorded.runner() is None
    assert [folder.name for folder in StateFolder(place.root).jobs()] == ["tiny"]


async def test_all_pods_of_an_attempt_meet_at_one_loopback_address_and_report_at_ports_of_their_own(
    place: Place,
) -> None:
    script = "echo $MASTER_ADDR:$MASTER_PORT $PET_MASTER_ADDR:$PET_MASTER_PORT; echo $DDPJOB_PROGRESS_PORT"
    run = await place.finish(a_local_job(script))
    (meeting, mine), (same, other) = (run.log(1, rank).splitlines() for rank in (0, 1))
    address, port = meeting.split()[0].split(":")
    assert address == "127.0.0.1"
    assert meeting == same == f"127.0.0.1:{port} 127.0.0.1:{port}"
    assert len({port, mine, other, "29500", "29501"}) == 5


async def test_the_line_at_the_start_says_what_is_not_enforced_and_what_runs_without_a_command(place: Place) -> None:
    job = a_local_job("true", data={"claimName": "pictures"})
    run = await place.finish(job)
    assert sum("not enforced" in line for line in run.said) == 1
    assert any("--volume pictures=DIR" in line for line in run.said)
    assert not any("ddptrain" in line for line in run.said)


async def test_config_maps_of_the_users_file_are_read(place: Place) -> None:
    place.others.append(a_config_map(word="hello"))
    run = await place.finish(a_local_job("echo $word", envFrom=[{"configMapRef": {"name": "settings"}}]))
    assert run.log(1) == "hello\n"


async def test_a_process_killed_in_mid_training_costs_a_restart_of_the_whole_group(place: Place) -> None:
    # Rank 1 kills itself in the first attempt; rank 0 would run for ever.
    script = (
        "[ $DDPJOB_ATTEMPT = 2 ] && exit 0; [ $NODE_RANK = 0 ] && touch /checkpoints/zero && exec sleep 600;"
        " until [ -e /checkpoints/zero ]; do sleep 0.01; done; kill -KILL $$$$"
    )
    run = await place.finish(a_local_job(script, checkpoint=True))
    status = run.status
    assert (status["state"], status["attempt"], status["restarts"]) == ("Succeeded", 2, 1)
    assert [(f["rank"], f["exitCode"], f["reason"]) for f in status["failures"]] == [(1, 137, "SIGKILL")]


async def test_a_command_that_is_not_there_fails_the_job_when_its_restarts_are_spent(place: Place) -> None:
    job = a_local_job("true", restartPolicy={"maxRestarts": 1})
    job["spec"]["command"] = ["no-such-program"]
    run = await place.finish(job)
    assert (run.status["state"], run.status["attempt"]) == ("Failed", 2)
    assert "executable file not found in $PATH" in run.status["failures"][-1]["message"]


async def test_stop_lets_the_trainers_save_and_the_next_run_resumes_the_very_job_at_no_cost(place: Place) -> None:
    job = a_local_job(UNTIL_TOLD, checkpoint=True)
    first = place.begin(job)
    await first.until("both nodes are up", lambda: first.log(1, 0) and first.log(1, 1))
    first.stop.set()
    suspended = await first.result()
    assert suspended["status"]["state"] == "Suspended"
    assert [first.log(1, rank) for rank in (0, 1)] == ["up\ntold\n"] * 2
    assert first.folder.pods() == []

    second = place.begin(job)
    await second.until("both nodes are up again", lambda: second.log(2, 0) and second.log(2, 1))
    assert "Resumed: attempt 2 begins" in second.said
    place.let_go()
    finished = await second.result()
    assert finished["metadata"]["uid"] == suspended["metadata"]["uid"]
    assert finished["status"]["state"] == "Succeeded"
    assert (finished["status"]["attempt"], finished["status"]["restarts"]) == (2, 0)
    assert "failures" not in finished["status"]


async def test_cancelling_a_run_kills_at_once_and_the_next_run_resumes(place: Place, tmp_path: Path) -> None:
    stubborn = "trap '' TERM; setsid sleep 600 & echo up; until [ -e /checkpoints/go ]; do sleep 0.01; done"
    job = a_local_job(stubborn, checkpoint=True, env=[{"name": MARKER, "value": str(tmp_path)}])
    first = place.begin(job)
    await first.until("both nodes are up", lambda: first.log(1, 0) and first.log(1, 1))
    first.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first.task
    assert marked(str(tmp_path)) == []

    place.let_go()
    second = await place.finish(job)
    assert second.task.result()["metadata"]["uid"] == first.shown[-1][0]["metadata"]["uid"]
    assert (second.status["state"], second.status["attempt"], second.status["restarts"]) == ("Succeeded", 2, 0)


async def test_time_without_a_runner_counts_against_no_deadline(place: Place) -> None:
    job = a_local_job(UNTIL_TOLD, checkpoint=True, activeDeadlineSeconds=1000)
    first = place.begin(job)
    await first.until("both nodes are up", lambda: first.status.get("state") == "Running")
    first.task.cancel()
    await asyncio.wait([first.task])
    # As if the run had been killed an hour ago.
    record = first.folder.path / "cluster.json"
    dumped = record.read_text()
    before = record.stat().st_mtime - 3600
    for text in {c["lastTransitionTime"] for c in first.status["conditions"]} | {first.status["startTime"]}:
        dumped = dumped.replace(text, timestamp(moment(text) - timedelta(hours=1)))
    record.write_text(dumped)
    os.utime(record, (before, before))

    place.let_go()
    second = await place.finish(job)
    assert (second.status["state"], second.status["attempt"]) == ("Succeeded", 2)
    assert second.status["activeSeconds"] < 600


async def test_a_second_run_of_the_same_job_is_refused_with_the_pid_of_the_first(place: Place) -> None:
    job = a_local_job(UNTIL_TOLD, checkpoint=True)
    first = place.begin(job)
    await first.until("it is up", lambda: first.log(1))
    assert first.folder.runner() == os.getpid()
    with pytest.raises(LocalError) as error:
        await place.begin(job).result()
    assert error.value.error == f"DDPJob tiny is running already, in process {os.getpid()}"
    place.let_go()
    assert (await first.result())["status"]["state"] == "Succeeded", "the first is not disturbed"


async def test_an_edited_spec_replaces_the_unfinished_job_and_keeps_its_volume(place: Place) -> None:
    first = place.begin(a_local_job(UNTIL_TOLD, checkpoint=True))
    await first.until("it is up", lambda: first.log(1))
    first.stop.set()
    old = await first.result()
    (place.root / "volumes/default/tiny-checkpoints/model").write_text("weights")

    second = await place.finish(a_local_job("cat /checkpoints/model", checkpoint=True))
    new = second.task.result()
    assert new["metadata"]["uid"] != old["metadata"]["uid"]
    assert (new["status"]["state"], new["status"]["attempt"]) == ("Succeeded", 1)
    assert second.log(1) == "weights"
    assert any("spec of tiny has changed" in line for line in second.said)


async def test_what_an_apply_may_change_is_changed_in_the_job_that_goes_on(place: Place) -> None:
    job = a_local_job(UNTIL_TOLD, checkpoint=True)
    first = place.begin(job)
    await first.until("it is up", lambda: first.log(1))
    first.stop.set()
    old = await first.result()

    place.let_go()
    second = await place.finish(a_local_job(UNTIL_TOLD, checkpoint=True, restartPolicy={"maxRestarts": 9}))
    new = second.task.result()
    assert new["metadata"]["uid"] == old["metadata"]["uid"]
    assert new["spec"]["restartPolicy"]["maxRestarts"] == 9


async def test_a_finished_job_is_run_anew_on_the_same_volume_unless_it_shall_be_fresh(place: Place) -> None:
    job = a_local_job("echo x >> /checkpoints/runs; wc -l < /checkpoints/runs", numNodes=1, checkpoint=True)
    uids, counts = set(), []
    for fresh in (False, False, True):
        run = await place.finish(job, fresh=fresh)
        uids.add(run.task.result()["metadata"]["uid"])
        counts.append(int(run.log(1)))
    assert counts == [1, 2, 1]
    assert len(uids) == 3


async def test_fresh_never_empties_a_directory_of_the_users(place: Place, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "model").write_text("weights")
    job = a_local_job("cat /checkpoints/model", checkpoint=True)
    run = await place.finish(job, fresh=True, volumes={"tiny-checkpoints": mine})
    assert run.log(1) == "weights"
    assert any(str(mine) in line and "--fresh" in line for line in run.said)


@pytest.mark.parametrize(
    ("claim", "directory", "error"),
    [
        ("tiny-checkpoint", ".", "the job has no claim tiny-checkpoint"),
        ("tiny-checkpoints", "none", "is no directory"),
    ],
)
async def test_a_volume_that_is_not_there_or_of_no_claim_is_refused(
    place: Place, tmp_path: Path, claim: str, directory: str, error: str
) -> None:
    with pytest.raises(LocalError, match=error):
        await place.finish(a_local_job("true", checkpoint=True), volumes={claim: tmp_path / directory})


async def test_secrets_that_a_killed_run_left_in_files_are_removed_by_the_next(place: Place) -> None:
    place.others.append(a_secret(token="s3cret"))
    volume = {"name": "v", "secret": {"secretName": "keys"}}
    trainer = {"name": "trainer", "volumeMounts": [{"name": "v", "mountPath": "/keys"}]}
    template = {"spec": {"containers": [trainer], "volumes": [volume]}}
    job = a_local_job(UNTIL_TOLD, checkpoint=True, template=template)
    first = place.begin(job)
    await first.until("both nodes are up", lambda: first.log(1, 0) and first.log(1, 1))
    left = next(first.folder.path.glob("pods/*-1-0")) / "volume-v"
    first.task.cancel()
    await asyncio.wait([first.task])
    left.mkdir(exist_ok=True)  # as after a SIGKILL
    record = (first.folder.path / "cluster.json").read_text().replace('"phase":"Failed"', '"phase":"Running"')
    (first.folder.path / "cluster.json").write_text(record)

    place.let_go()
    assert (await place.finish(job)).status["state"] == "Succeeded"
    assert not left.exists()
    assert not list(place.root.rglob("token"))


async def test_suspend_in_the_file_is_respected(place: Place) -> None:
    job = a_local_job("echo up", suspend=True)
    run = await place.finish(job)
    assert run.status["state"] == "Suspended"
    assert run.log(1) == ""
    del job["spec"]["suspend"]
    again = await place.finish(job)
    assert (again.status["state"], again.log(again.status["attempt"])) == ("Succeeded", "up\n")


async def test_a_finished_job_keeps_its_record_whatever_its_time_to_live(place: Place) -> None:
    run = await place.finish(a_local_job("true", ttlSecondsAfterFinished=0))
    recorded = run.folder.job()
    assert recorded is not None
    assert recorded["status"]["state"] == "Succeeded"


async def test_a_sidecar_of_a_finished_trainer_is_ended(place: Place, tmp_path: Path) -> None:
    sidecar = {"name": "side", "image": "x:1", "command": ["sleep", "600"]}
    sidecar["env"] = [{"name": MARKER, "value": str(tmp_path)}]  # type: ignore[assignment]
    run = await place.finish(a_local_job("true", template={"spec": {"containers": [sidecar]}}))
    assert run.status["state"] == "Succeeded"
    assert marked(str(tmp_path)) == []


async def test_jobs_in_another_namespace_are_jobs_of_their_own(place: Place) -> None:
    job = a_local_job("true")
    job["metadata"]["namespace"] = "team"
    await place.finish(job)
    assert [(f.namespace, f.name) for f in StateFolder(place.root).jobs()] == [("team", "tiny")]


def session(job: Json, root: Path) -> Session:
    return Session(job, [], StateFolder(root), Options(), on_change=lambda job, pods: None, say=print)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"numNodes": 0}, "spec.numNodes"),
        ({"numNode": 2}, "numNode"),
        ({"env": [{"name": "MASTER_ADDR", "value": "x"}]}, "MASTER_ADDR"),
        ({"image": None}, "image is required"),
    ],
)
def test_a_spec_that_an_api_server_would_refuse_is_refused_with_field_and_rule(
    tmp_path: Path, change: Json, words: str
) -> None:
    with pytest.raises(LocalError) as error:
        session(a_local_job("true", **change), tmp_path)
    assert words in error.value.error
    assert error.value.hint
    assert error.value.next_step
    assert list(tmp_path.iterdir()) == []


def test_render_shows_what_a_cluster_would_be_asked_for() -> None:
    rendered = render(a_local_job("true", checkpoint=True))
    kinds = [obj["kind"] for obj in rendered]
    assert kinds == ["DDPJob", "Service", "PersistentVolumeClaim", "Pod", "Pod"]
    assert rendered[0]["spec"]["restartPolicy"]["maxRestarts"] == 3
    assert "uid" not in rendered[0]["metadata"]
    assert rendered == render(a_local_job("true", checkpoint=True))


async def test_a_state_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LocalError) as error:
        await session(a_local_job("true"), tmp_path / "file").run(asyncio.Event())
    assert str(tmp_path / "file") in error.value.error
    assert "--state-dir" in error.value.next_step


async def test_other_systems_than_linux_are_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(LocalError, match="Linux only"):
        await session(a_local_job("true"), tmp_path).run(asyncio.Event())
