"""A run that ends before its job: the next run resumes it, replaces it or is refused."""

from __future__ import annotations

import asyncio
import os
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from ddpjob.api.times import timestamp
from tests.local.builders import UNTIL_SIGTERM, a_local_job, a_secret
from tests.local.sessions import Place

pytestmark = pytest.mark.timeout(300)


async def test_stop_while_a_killed_run_is_recorded_starts_no_attempt(place: Place) -> None:
    job = a_local_job(UNTIL_SIGTERM, checkpoint=True)
    first = place.begin(job)
    await first.until("both nodes are up", lambda: first.status.get("state") == "Running")
    first.task.cancel()
    await asyncio.wait([first.task])

    second = place.begin(job)
    second.session.stop()
    suspended = await second.result()
    assert (suspended["status"]["state"], suspended["status"]["attempt"]) == ("Suspended", 1)
    assert not any("Resumed" in line for line in second.said)


async def test_time_without_a_run_does_not_count_towards_the_deadline(place: Place) -> None:
    job = a_local_job(UNTIL_SIGTERM, checkpoint=True, activeDeadlineSeconds=1000)
    first = place.begin(job)
    await first.until("both nodes are up", lambda: first.status.get("state") == "Running")
    first.task.cancel()
    await asyncio.wait([first.task])
    # As if the run had been killed an hour ago.
    record = first.folder.path / "job.json"
    dumped = record.read_text()
    before = record.stat().st_mtime - 3600
    times = {first.status["startTime"], first.status["time"]["asOf"]}
    for text in times | {c["lastTransitionTime"] for c in first.status["conditions"]}:
        dumped = dumped.replace(text, timestamp(datetime.fromisoformat(text) - timedelta(hours=1)))
    record.write_text(dumped)
    os.utime(record, (before, before))

    place.let_go()
    second = await place.finish(job)
    assert (second.status["state"], second.status["attempt"]) == ("Succeeded", 2)
    assert second.status["activeSeconds"] < 600
    spent = second.status["time"]
    assert 3590 < spent["stopped"] < 4200 and spent["training"] < 600


async def test_changed_spec_replaces_the_unfinished_job_and_keeps_its_volume(place: Place) -> None:
    first = place.begin(a_local_job(UNTIL_SIGTERM, checkpoint=True))
    await first.until("it is up", lambda: first.log(1))
    first.session.stop()
    old = await first.result()
    (place.root / "volumes/default/tiny-checkpoints/model").write_text("weights")

    second = await place.finish(a_local_job("cat /checkpoints/model", checkpoint=True))
    new = second.task.result()
    assert new["metadata"]["uid"] != old["metadata"]["uid"]
    assert (new["status"]["state"], new["status"]["attempt"]) == ("Succeeded", 1)
    assert second.log(1) == "weights"
    assert any("spec of tiny has changed" in line for line in second.said)


async def test_mutable_fields_are_changed_in_the_resumed_job(place: Place) -> None:
    job = a_local_job(UNTIL_SIGTERM, checkpoint=True)
    first = place.begin(job)
    await first.until("it is up", lambda: first.log(1))
    first.session.stop()
    old = await first.result()

    place.let_go()
    second = await place.finish(a_local_job(UNTIL_SIGTERM, checkpoint=True, restartPolicy={"maxRestarts": 9}))
    new = second.task.result()
    assert new["metadata"]["uid"] == old["metadata"]["uid"]
    assert new["spec"]["restartPolicy"]["maxRestarts"] == 9


async def test_finished_job_runs_again_on_its_volume_unless_fresh(place: Place) -> None:
    job = a_local_job("echo x >> /checkpoints/runs; wc -l < /checkpoints/runs", numNodes=1, checkpoint=True)
    uids, counts = set(), []
    for fresh in (False, False, True):
        run = await place.finish(job, fresh=fresh)
        uids.add(run.task.result()["metadata"]["uid"])
        counts.append(int(run.log(1)))
    assert counts == [1, 2, 1]
    assert len(uids) == 3


async def test_fresh_does_not_empty_a_directory_of_the_user(place: Place, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "model").write_text("weights")
    job = a_local_job("cat /checkpoints/model", checkpoint=True)
    run = await place.finish(job, fresh=True, volumes={"tiny-checkpoints": mine})
    assert run.log(1) == "weights"
    assert any(str(mine) in line and "--fresh" in line for line in run.said)


async def test_secret_files_of_a_killed_run_are_removed_by_the_next(place: Place) -> None:
    place.others.append(a_secret(token="s3cret"))
    volume = {"name": "v", "secret": {"secretName": "keys"}}
    trainer = {"name": "trainer", "volumeMounts": [{"name": "v", "mountPath": "/keys"}]}
    template = {"spec": {"containers": [trainer], "volumes": [volume]}}
    job = a_local_job(UNTIL_SIGTERM, checkpoint=True, template=template)
    first = place.begin(job)
    await first.until("both nodes are up", lambda: first.log(1, 0) and first.log(1, 1))
    (left,) = first.folder.path.glob("pods/*-1-0/volumes/v/token")
    first.task.cancel()
    await asyncio.wait([first.task])
    left.parent.mkdir(parents=True)  # as after a SIGKILL
    left.write_text("s3cret")
    place.let_go()
    assert (await place.finish(job)).status["state"] == "Succeeded"
    assert not list(place.root.rglob("token"))


async def test_job_that_its_file_suspends_does_not_start(place: Place) -> None:
    job = a_local_job("echo up", suspend=True)
    run = await place.finish(job)
    assert run.status["state"] == "Suspended"
    assert run.log(1) == ""
    del job["spec"]["suspend"]
    again = await place.finish(job)
    assert (again.status["state"], again.log(again.status["attempt"])) == ("Succeeded", "up\n")
