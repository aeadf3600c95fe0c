"""Each reason word of the operator is in the documentation, and ``why`` explains it."""

from __future__ import annotations

import ast
import builtins
import re
import tomllib
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from ddpjob.api.times import timestamp
from ddpjob.client.snapshot import Snapshot
from ddpjob.client.verdict.explain import explain
from ddpjob.engine.failures import TABLE
from tests.builders import SETTINGS, World, a_job, a_running_world

ROOT = Path(__file__).parents[2]
MESSAGE = "the message of the operator"
WORDS = tomllib.loads(Path(__file__).with_name("reasons.toml").read_text())


def texts() -> set[str]:
    """Return all texts in the rules of the operator."""
    packages = [ROOT / "operator/ddpjob/engine", ROOT / "operator/ddpjob_operator/controller"]
    nodes = chain.from_iterable(
        ast.walk(ast.parse(file.read_text())) for package in packages for file in package.rglob("*.py")
    )
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def test_every_reason_is_in_the_documentation() -> None:
    pages = (page for page in (ROOT / "docs").rglob("*.md") if "decisions" not in page.parts)
    documented = set(re.findall(r"\w+", " ".join(page.read_text(encoding="utf-8") for page in pages)))
    camel_case = {text for text in texts() if re.fullmatch(r"(?:[A-Z]+[a-z]+){2,}", text)}
    reasons = camel_case | {row.reason for row in TABLE if row.reason} | {*WORDS["starting"]}
    assert sorted(word for word in reasons - {*WORDS["other"]} - documented if not hasattr(builtins, word)) == []
    assert sorted({word for each in WORDS.values() for word in each} - texts()) == [], "words of no code"


def test_every_failure_has_a_hint_and_says_what_to_do() -> None:
    assert [row.reason for row in TABLE if not (row.hint and row.next)] == []


def answer(world: World, condition: str, status: str, reason: str, **facts: Any) -> Any:
    """Return the verdict on a job with this condition; its message must be in it."""
    kept = [each for each in world.job["status"]["conditions"] if each["type"] != condition]
    new = {"type": condition, "status": status, "reason": reason, "message": MESSAGE}
    world.job["status"]["conditions"] = [*kept, new | {"lastTransitionTime": timestamp(world.now)}]
    given = {"job": world.job, "now": world.now, "settings": SETTINGS, "pods": list(world.pods.values())}
    found = explain(Snapshot(**given | facts))
    assert MESSAGE in f"{found.sentence} {found.evidence}"
    assert found.next or not found.is_abnormal, "it says what to do"
    return found


@pytest.mark.parametrize("reason", WORDS["starting"])
@pytest.mark.parametrize("is_readable", [True, False])
def test_why_explains_each_reason_of_a_job_that_does_not_run(reason: str, is_readable: bool) -> None:
    world = World(a_job())
    world.settle()
    found = answer(world, "Running", "False", reason, **({} if is_readable else {"pods": None}))
    assert found.reason == reason
    waits_for_a_person = {"GangSchedulerUnavailable", "GangNotEnforced", "CreateRefused", "NameConflict"}
    assert found.is_abnormal or reason not in waits_for_a_person


@pytest.mark.parametrize("reason", WORDS["running"])
def test_why_explains_each_problem_of_a_job_that_runs(reason: str) -> None:
    found = answer(a_running_world(a_job()), "Running", "True", reason)
    assert (found.reason, found.is_abnormal) == (reason, True)


@pytest.mark.parametrize("reason", WORDS["stalled"])
def test_why_explains_each_reason_of_a_job_that_is_stalled(reason: str) -> None:
    found = answer(a_running_world(a_job()), "Stalled", "True", reason)
    expected = (reason, True, reason == "CreateRefused")
    assert (found.reason, found.is_abnormal, "describe namespace" in found.next) == expected
