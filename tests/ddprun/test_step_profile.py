"""The profiler of a rank: a trace of the steps that were asked for, and never an error of the script."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg

from ddpjob.client.trace import has_subgroups
from ddprun.diagnostics import Diagnostics
from ddprun.step_profile import ProfileRequest, StepProfiler
from tests.processes import eventually

ANY_STEP = {"latest": 0.0, "until": 1e12}


@pytest.fixture
def files() -> Iterator[Diagnostics]:
    files = Diagnostics.create(0)
    yield files
    files.close()


def work() -> None:
    torch.ones(8, 8) @ torch.ones(8, 8)


def train(profiler: StepProfiler, steps: int, first: int = 1, step: Callable[[], None] = work) -> list[bool]:
    told = []
    for number in range(first, first + steps):
        step()
        told.append(profiler.turn(lambda number=number: number))  # type: ignore[misc]
    return told


def ended(files: Diagnostics) -> dict[str, Any]:
    return eventually("it has ended", lambda: (r := files.profile_report()).get("state") in ("done", "failed") and r)


def trace(files: Diagnostics) -> dict[str, Any]:
    said = ended(files)
    assert said["state"] == "done", said
    half = said["bytes"] // 2
    return dict(json.loads(gzip.decompress(files.profile_part(0, half) + files.profile_part(half, said["bytes"]))))


def test_exactly_the_steps_that_were_asked_for_are_profiled_once_for_each_request(files: Diagnostics) -> None:
    profiler = StepProfiler(files.profile, int)
    assert not any(train(profiler, 3))
    assert files.profile_report() == {}
    files.ask_for_profile(ProfileRequest(1, begin=10, steps=3, latest=1e12, until=1e12))
    assert all(train(profiler, 6, first=4)), "the steps until the begin are told"
    assert files.profile_report()["state"] == "waits"
    assert train(profiler, 6, first=10) == [True] * 4 + [False] * 2
    found = trace(files)
    assert (files.profile_report()["first"], files.profile_report()["steps"]) == (12, 3)
    names = [event["name"] for event in found["traceEvents"]]
    assert names.count("aten::mm") == 3 and sum(name.startswith("ProfilerStep#") for name in names) == 3
    files.ask_for_profile(ProfileRequest(2, begin=5, steps=1, **ANY_STEP))
    train(profiler, 3, first=100)
    assert trace(files)["traceEvents"] and files.profile_report()["number"] == 2


def test_a_trace_says_whether_its_rank_is_in_groups_of_some_ranks(files: Diagnostics) -> None:
    profiler = StepProfiler(files.profile, int)
    dist.init_process_group("fake", rank=0, world_size=4, store=fake_pg.FakeStore())
    try:
        for number, groups in enumerate(([[0, 1, 2, 3], [0]], [[0, 1]]), 1):
            for group in groups:
                dist.new_group(group)
            files.ask_for_profile(ProfileRequest(number, begin=0, steps=1, **ANY_STEP))
            train(profiler, 3)
            assert has_subgroups(trace(files)) == (number == 2)
    finally:
        dist.destroy_process_group()


def test_a_rank_that_numbers_its_steps_in_another_way_begins_later(files: Diagnostics) -> None:
    profiler, now = StepProfiler(files.profile, int), time.monotonic()
    files.ask_for_profile(ProfileRequest(1, begin=10**6, steps=1, latest=now - 1, until=now + 100))
    train(profiler, 3)
    assert trace(files)["traceEvents"]


def test_a_profile_ends_at_the_end_of_its_time_with_the_steps_that_it_has(files: Diagnostics) -> None:
    profiler, now = StepProfiler(files.profile, int), time.monotonic()
    files.ask_for_profile(ProfileRequest(1, begin=0, steps=90, latest=now, until=now + 0.2))
    while train(profiler, 1, step=lambda: time.sleep(0.01))[0]:
        assert time.monotonic() < now + 30
    assert trace(files)["traceEvents"] and 0 < files.profile_report()["steps"] < 90
    files.ask_for_profile(ProfileRequest(2, begin=0, steps=1, latest=now, until=now))
    assert train(profiler, 2) == [False, False]
    assert ended(files)["error"] == "TimeoutError: no step ended in time"


def test_an_evaluation_or_a_hang_after_a_step_ends_the_profile_without_a_hook(
    files: Diagnostics, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    touched: list[float] = []
    profiler = StepProfiler(files.profile, lambda: touched.append(time.monotonic()))
    monkeypatch.setattr("ddprun.step_profile._SHORTEST", 0.2)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    files.ask_for_profile(ProfileRequest(1, begin=2, steps=90, latest=1e12, until=1e12))
    train(profiler, 5, step=lambda: time.sleep(0.01))
    assert files.profile_report()["state"] == "profiles" and not touched
    while torch._C._autograd._profiler_enabled():  # an evaluation has no step of the optimizer
        time.sleep(0.001)
    said = ended(files)
    assert said["state"] == "failed" and "bytes" not in said
    assert "test its model?" in said["error"] and len(touched) == 1 and not list(tmp_path.iterdir())
    files.ask_for_profile(ProfileRequest(2, begin=0, steps=1, **ANY_STEP))
    train(profiler, 3)
    assert trace(files)["traceEvents"], "the next profile"


def test_a_profile_has_a_limit_of_memory_within_a_step_and_fewer_steps_at_its_end(
    files: Diagnostics, monkeypatch: pytest.MonkeyPatch
) -> None:
    profiler = StepProfiler(files.profile, int)
    monkeypatch.setattr("ddprun.step_profile._MOST_MEMORY", -(2**40))
    files.ask_for_profile(ProfileRequest(1, begin=0, steps=90, **ANY_STEP))
    assert train(profiler, 3) == [True, True, False]
    assert trace(files)["traceEvents"] and files.profile_report()["steps"] == 1
    monkeypatch.setattr("ddprun.step_profile._MOST_PEAK", -(2**40))
    files.ask_for_profile(ProfileRequest(2, begin=0, steps=90, **ANY_STEP))
    train(profiler, 1)
    while torch._C._autograd._profiler_enabled():
        work()
    assert "too many operations" in ended(files)["error"]


def test_steps_of_another_thread_are_not_profiled(files: Diagnostics) -> None:
    profiler = StepProfiler(files.profile, int)
    files.ask_for_profile(ProfileRequest(1, begin=0, steps=1, **ANY_STEP))
    with ThreadPoolExecutor() as threads:
        assert threads.submit(train, profiler, 2).result() == [False, False]
    assert "another thread than the main one" in ended(files)["error"]


def test_a_script_that_profiles_itself_keeps_its_profile(files: Diagnostics) -> None:
    profiler, numbers = StepProfiler(files.profile, int), itertools.count(1)
    for is_first in (True, False):
        files.ask_for_profile(ProfileRequest(next(numbers), begin=0, steps=5, **ANY_STEP))
        own = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        if not is_first:
            train(profiler, 3)
        with own:
            train(profiler, 9)
        assert "aten::mm" in {event.name for event in own.events()}
        said = ended(files)
        assert (said["state"], said["error"].partition(" a ")[0]) == (
            "failed", "RuntimeError: the script runs" if is_first else "RuntimeError: the script has begun",
        )  # fmt: skip
    files.ask_for_profile(ProfileRequest(next(numbers), begin=0, steps=1, **ANY_STEP))
    train(profiler, 3)
    assert trace(files)["traceEvents"], "what the script did is undone"


def test_errors_of_the_profiler_are_reported_and_not_raised(
    files: Diagnostics, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    profiler = StepProfiler(files.profile, int)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    files.ask_for_profile(ProfileRequest(1, begin=0, steps=1, **ANY_STEP))
    train(profiler, 3)
    assert "FileNotFoundError" in ended(files)["error"]
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    copy = os.dup(files.profile)
    os.dup2(os.open(os.devnull, os.O_WRONLY), files.profile)  # the script closes all and opens another file
    files.__dict__["profile"] = copy
    files.ask_for_profile(ProfileRequest(2, begin=0, steps=1, **ANY_STEP))
    train(profiler, 3)
    assert "closed the descriptors" in ended(files)["error"]
