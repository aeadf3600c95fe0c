"""The card of a job, of jobs whose status the engine has made; and the listing."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta

import pytest

from ddpjob.api.times import timestamp
from ddpjob.cli.card import card_lines, facts_of, headline, is_abnormal, moment_of
from ddpjob.cli.get import CELLS, WIDE
from ddpjob.cli.table import Cell
from ddpjob.client.base import INTERRUPTED
from ddpjob.client.crd import COLUMNS
from ddpjob.client.job import DDPJob
from tests.builders import NOW, World, a_job, a_running_world, failed
from tests.cli.program import Program, shell_job

REPORT = {"step": 30, "totalSteps": 90, "loss": 0.5, "phase": "train", "checkpoint": {"step": 20, "path": "20.pt"}}


def a_world(**spec: object) -> World:
    made = a_job(restartPolicy={}, **spec)
    made["metadata"]["creationTimestamp"] = timestamp(NOW)
    world = a_running_world(made)
    world.progress = (REPORT, "mnist-0a1b2-1-0")
    world.forward(60)
    world.reconcile()
    return world


def lines(world: World, width: int = 80, *, coloured: bool = False, state: str | None = None) -> list[str]:
    job = DDPJob.from_manifest(world.job, state=state)
    found = list(facts_of(job, world.now))
    return list(card_lines(headline(job, world.now), found, width=width, coloured=coloured))


def test_the_card_of_a_running_job_shows_all_that_is_known_of_it_without_colour() -> None:
    shown = lines(a_world(), coloured=True)
    text = " ".join(" ".join(shown).split())
    assert shown[0] == "mnist is Running for 1m00s: 2 of 2 nodes run"
    for part in ("2/2 run", "2 ranks, 1 per node", "step 30/90", "loss 0.5", "1: began 1m00s ago"):
        assert part in text
    assert "checkpoint step 20" in text
    assert "goodput" in text
    assert "\x1b" not in text


def test_a_pause_is_abnormal_in_the_card_and_in_the_list_until_a_step_is_made() -> None:
    world = a_world()
    world.forward(45)
    paused = REPORT | {"ageSeconds": 45.0, "pause": {"stepSeconds": 0.05}}
    world.progress = (paused, "mnist-0a1b2-1-0")
    world.settle()
    text = "no step for 45 s, 900 times the median step"
    assert f"\x1b[31m{text}\x1b[0m" in " ".join(lines(world, coloured=True))
    job = DDPJob.from_manifest(world.job)
    cell = CELLS["Progress"](job)
    assert isinstance(cell, Cell) and cell.is_abnormal
    assert str(cell.text).startswith("33% 30/90, no step for ")
    assert moment_of(DDPJob.from_manifest(world.job), []).training_facts()[-1].startswith("no step for ")
    assert "no step" not in " ".join(lines(world, state=INTERRUPTED))
    world.progress = (REPORT | {"step": 31}, "mnist-0a1b2-1-0")
    world.settle()
    assert "no step" not in " ".join(lines(world))
    assert CELLS["Progress"](DDPJob.from_manifest(world.job)) == Cell("34% 31/90")


def test_a_restart_is_a_line_of_the_attempts_with_the_failure_its_hint_and_what_to_do() -> None:
    world = a_world()
    report = {"kind": "ValueError", "exception": "ValueError", "message": "sample 17 \x1b[2J\nis bad", "rank": 1}
    world.set_pod(1, failed(1, at=world.now, **report))
    world.settle()
    text = " ".join(" ".join(shown := lines(world, coloured=True)).split())
    assert shown[0].startswith("\x1b[31mmnist is Restarting"), "this state does not last"
    assert "attempts 1: n1r1 ValueError, 0s ago after 1m00s → Restart 2: began 0s ago" in text
    assert "1 restart (1 of at most 12 counted)" in text
    assert "\x1b[2J" not in text
    world.run_all()
    world.forward(5)
    world.settle()
    after = lines(world, coloured=True)
    assert not [line for line in after if "\x1b" in line], "it runs again, so nothing is abnormal"
    last = next(number for number, line in enumerate(after) if "last failure" in line)
    assert "ValueError" in after[last] and any("next: " in line for line in after[last:])


@pytest.mark.parametrize("width", [40, 80, 120])
def test_no_line_of_a_card_is_wider_than_the_terminal(width: int) -> None:
    world = a_world()
    world.set_pod(1, failed(1, at=world.now, kind="ValueError", message="word " * 60))
    world.settle()
    assert max(map(len, lines(world, width))) <= width


def test_a_job_that_no_operator_has_seen_and_one_that_was_interrupted_have_a_card() -> None:
    world = World(a_job())
    assert lines(world)[0] == "mnist is Pending: the operator has not reported on it yet"
    world = a_world()
    world.forward(3600)
    shown = lines(world, state=INTERRUPTED)
    assert "ddpjob resume mnist" in " ".join(shown)
    assert "1h" not in shown[-1], "its time ends with its last sign of life"


def test_only_states_that_need_attention_are_abnormal() -> None:
    world = World(a_job())
    world.reconcile()
    assert not is_abnormal(DDPJob.from_manifest(world.job))
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
    world.settle()
    status = {"phase": "Pending", "containerStatuses": [{"name": "trainer", "state": waiting}]}
    for rank in (0, 1):
        world.set_pod(rank, status)
    world.forward(timedelta(seconds=20).total_seconds())
    world.settle()
    job = DDPJob.from_manifest(world.job)
    assert (job.state, is_abnormal(job)) == ("Pending", True)


def test_every_column_of_kubectl_has_a_value() -> None:
    assert [column["name"] for column in COLUMNS] == list(CELLS)
    assert [column["name"] for column in COLUMNS if column.get("priority")] == list(WIDE)


def test_get_lists_and_names_jobs(ddpjob: Program) -> None:
    for name in ("two", "one"):
        ddpjob("run", ddpjob.write(shell_job(name, "true")))
    header, *rows = ddpjob("get").out.splitlines()
    assert header.split() == ["NAME", "STATE", "NODES", "PROGRESS", "LOSS", "RESTARTS", "AGE"]
    assert [row.split()[:3] for row in rows] == [["one", "Succeeded", "1/1"], ["two", "Succeeded", "1/1"]]
    assert not [line for line in (header, *rows) if line.endswith(" ")]
    assert ddpjob("get", "-o", "name").out == "ddpjob.ddpjob.dev/one\nddpjob.ddpjob.dev/two\n"
    assert ddpjob("get", "one", "-o", "name").out == "ddpjob.ddpjob.dev/one\n"
    assert ddpjob("get", "one").out.splitlines()[0].endswith("s ago: all 1 node(s) of attempt 1 succeeded")


@pytest.mark.parametrize(
    ("verb", "unwanted"), [("get", {"jinja2", "ddprun", "ddpjob.engine"}), ("why", {"jinja2", "ddpjob.cli.describe"})]
)
def test_a_command_about_one_job_imports_only_what_it_shows(ddpjob: Program, verb: str, unwanted: set[str]) -> None:
    """Other modules would take CPU time at each start."""
    assert ddpjob("run", ddpjob.write(shell_job("one", "true"))).code == 0
    code = "import sys; from ddpjob.cli.main import main; main(); print(*sys.modules)"
    words = [sys.executable, "-c", code, verb, "one"]
    done = subprocess.run(words, env=ddpjob.environment, capture_output=True, text=True, timeout=300, check=True)
    assert not unwanted & set(done.stdout.splitlines()[-1].split())
