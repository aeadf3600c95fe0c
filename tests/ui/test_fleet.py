"""All jobs on one page: who needs a person first."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from ddpjob import Client
from ddpjob.api.objects import Json
from ddpjob.api.times import timestamp
from ddpjob.client.job import DDPJob
from ddpjob.ui.fleet import ENDED, NEEDS, RUNS, WAITS, Fleet, fleet, gpus_of
from ddpjob.ui.jobs import WatchedJobs
from ddpjob.ui.log import FollowedLogs
from ddpjob.ui.server import Pages
from tests.builders import NOW, a_job

GPUS = {"limits": {"nvidia.com/gpu": 4, "cpu": 8}}


def at(hours: float) -> str:
    return timestamp(NOW - timedelta(hours=hours))


def condition(kind: str, reason: str = "AllNodesRunning", hours: float = 1.0) -> Json:
    head = {"type": kind, "status": "True", "reason": reason, "message": f"{kind} message"}
    return head | {"lastTransitionTime": at(hours)}


def a_found(name: str, state: str, *conditions: Json, age: float = 1.0, **status: Any) -> DDPJob:
    body = a_job(name, status={"state": state, "conditions": list(conditions), **status}, resources=GPUS)
    body["metadata"] |= {"creationTimestamp": at(age)}
    return DDPJob.from_manifest(body)


def spent(current: str | None, **seconds: int) -> Json:
    return {"asOf": timestamp(NOW), "current": current, **seconds}


JOBS = (
    a_found("runs", "Running", condition("Running"), time=spent("training", training=3000, starting=600)),
    a_found(
        "stalled", "Running", condition("Running"), time=spent("stalled", training=1800, stalled=1800),
        stall={"rank": 3, "step": 7}, pause={"since": at(0.5)},
    ),
    a_found("new", "Pending", age=0.1, time=spent("queued", queued=360)),
    a_found("late", "Pending", age=2.0, time=spent("scheduling", scheduling=7200)),
    a_found(
        "failed", "Failed", condition("Failed", "ValueError"), condition("Finished"), completionTime=at(2),
    ),
    a_found("old", "Failed", condition("Failed", "ValueError"), condition("Finished"), completionTime=at(30)),
    a_found("done", "Succeeded", condition("Succeeded"), condition("Finished"), completionTime=at(1)),
    a_found("paused", "Suspended", condition("Suspended"), time=spent("stopped", stopped=100)),
)  # fmt: skip


def shown(**options: str) -> Fleet:
    return fleet(JOBS, NOW, **options)


def test_who_needs_a_person_is_first() -> None:
    groups: dict[str, list[str]] = {}
    for row in shown().rows:
        groups.setdefault(row.group, []).append(row.job.name)
    assert list(groups) == [NEEDS, WAITS, RUNS, ENDED]
    assert groups == {
        NEEDS: ["stalled", "late", "failed"], WAITS: ["new", "paused"], RUNS: ["runs"], ENDED: ["done", "old"],
    }  # fmt: skip
    assert shown().counts == {NEEDS: 3, WAITS: 2, RUNS: 1, ENDED: 2}


def test_the_filter_is_by_group_and_text_and_does_not_change_the_numbers() -> None:
    assert [row.job.name for row in shown(text="DEFAULT/old").rows] == ["old"]
    assert [row.job.name for row in shown(group=WAITS, text="PENDING").rows] == ["new"]
    assert shown(group=WAITS).counts == shown().counts


def test_gpus_that_are_held_without_training_are_idle() -> None:
    assert gpus_of(JOBS[0]) == 8
    found = shown()
    assert (found.held, found.idle) == (24, 16), "those of the queued and of the finished jobs are free"
    [lost] = found.lost
    assert lost.namespace == "default"
    assert lost.hours == {"scheduling": 16.0, "stalled": 4.0, "starting": 600 * 8 / 3600}
    assert lost.goodput is not None and round(lost.goodput, 3) == round(4800 / (3600 * 2 + 7200), 3)


@pytest.mark.parametrize(
    "spoiled",
    [
        {"metadata": {"creationTimestamp": "yesterday"}}, {"metadata": {"creationTimestamp": "2026-01-01"}},
        {"spec": None}, {"spec": {"numNodes": "x"}}, {"spec": {"resources": [1]}}, {"status": "x"},
        {"spec": {"resources": {"limits": {"nvidia.com/gpu": "\u00b2"}}}},
    ],
)  # fmt: skip
def test_a_job_of_another_form_does_not_hide_the_others(spoiled: Json) -> None:
    body = a_found("odd", "Running", condition("Running"), time=spent("training", training=10)).manifest
    for part, value in spoiled.items():
        body[part] = body[part] | value if isinstance(value, dict) else value
    found = fleet([*JOBS, DDPJob.from_manifest(body)], NOW)
    assert len(found.rows) == len(JOBS) + 1
    [row] = fleet([*JOBS, DDPJob.from_manifest(body)], NOW, text="default/odd").rows
    assert row.job.name == "odd"


def test_hostile_text_of_a_status_is_cut_and_shown_as_text() -> None:
    [row] = fleet([a_found("odd", "\u202e\x1b" + "S" * 100_000, condition("Running"))], NOW).rows
    assert len(row.state) <= 50 and len(row.text) < 3000
    assert not {"\u202e", "\x1b"} & set(row.state + row.text)


def test_a_thousand_jobs_are_sorted_in_time() -> None:
    many = [job for job in JOBS for _ in range(125)]
    began = time.process_time()
    assert len(fleet(many, NOW).rows) == 1000
    assert time.process_time() - began < 2.0


def test_a_page_of_many_jobs_stays_small_and_says_so(tmp_path: Path) -> None:
    client = Client.local(tmp_path)
    jobs = WatchedJobs(client, jobs=[a_found(f"job-{number}", "Pending", age=0.1) for number in range(1000)])
    pages = Pages(client, "/token", jobs, FollowedLogs(lambda: client, lambda: True))
    page = pages._fleet_html(Request({"type": "http", "query_string": b"q=job-", "headers": []}))
    assert "The first 300 of 1,000 jobs" in page and len(page) < 200_000
