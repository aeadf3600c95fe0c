"""Whole jobs on this machine: the operator's own reconcile, processes as pods, a state folder that outlives the run."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from ddpjob.cluster.base import Json
from ddpjob.local.errors import LocalError
from ddpjob.local.session import Options, Session, render
from ddpjob.local.state import StateFolder
from tests.local.bench import MARKER, marked
from tests.local.builders import a_config_map, a_local_job
from tests.local.sessions import Place

pytestmark = pytest.mark.timeout(300)


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


async def test_the_controller_logs_into_the_jobs_folder_and_not_to_the_terminal(
    place: Place, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    run = place.begin(a_local_job("sleep 600"))
    await run.until("it has begun", lambda: run.shown)
    logging.getLogger("ddpjob.controller").warning("something odd")
    await run.until("the controller has begun", lambda: run.status.get("state") == "Running")
    log = (run.folder.path / "controller.log").read_text()
    assert "WARNING ddpjob.controller: something odd\n" in log
    assert "event Started\n" in log
    assert capfd.readouterr() == ("", "")
    assert not [record for record in caplog.records if record.name.startswith("ddpjob")]


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
