"""How often ``ddpjob why`` is right in the labelled situations; ``python -m tests.client.accuracy --wrong`` shows where
it is not."""

from __future__ import annotations

import pytest

from ddpjob.client.verdict.kubelet import OF_KUBELETS
from ddpjob.client.verdict.refused import OF_QUEUES, OF_REFUSALS
from ddpjob.client.verdict.scheduler import ROWS as OF_SCHEDULERS
from ddpjob.engine.advice import ROWS
from tests.client.accuracy import HELD_BACK, PAGE, Judged, judge, table
from tests.client.situations import answer, situations

_FAMILIES = {name: found for name, found in situations().items() if name != HELD_BACK}


@pytest.fixture(scope="module")
def judged() -> list[Judged]:
    return [judge(each) for found in _FAMILIES.values() for each in found]


def _wrong(judged: list[Judged], *parts: str) -> str:
    return "\n".join(str(each) for each in judged if not all(getattr(each, part) is not False for part in parts))


def test_stage_and_next_are_right_and_nothing_is_confidently_wrong(judged: list[Judged]) -> None:
    assert len(judged) >= 300 and len({each.situation["name"] for each in judged}) == len(judged)
    right = sum(each.stage and each.next for each in judged)
    assert right >= 0.97 * len(judged), _wrong(judged, "stage", "next")
    assert not [str(each) for each in judged if each.is_confidently_wrong]


def test_culprit_is_right(judged: list[Judged]) -> None:
    named = [each for each in judged if each.culprit is not None]
    assert len(named) >= 200
    assert sum(bool(each.culprit) for each in named) >= 0.98 * len(named), _wrong(judged, "culprit")


def test_the_page_has_these_figures(judged: list[Judged]) -> None:
    """``python -m tests.client.accuracy --write`` writes them."""
    found = {family: [e for e in judged if e.situation in each] for family, each in _FAMILIES.items()}
    assert table(found | {HELD_BACK: [judge(each) for each in situations()[HELD_BACK]]}) in PAGE.read_text()


def test_answers_about_failed_jobs_are_the_same_after_their_pods_are_gone(judged: list[Judged]) -> None:
    failed = [e for e in judged if {"failed", "report"} & e.situation.keys() and e.found.state == "Failed"]
    assert len(failed) >= 150
    for each in failed:
        gone = answer(each.situation, pods_are_gone=True)
        named = ("stage", "reason", "hint", "next", "confidence", "node_rank", "rank", "where", "exception")
        assert [getattr(gone, name) for name in named] == [getattr(each.found, name) for name in named]


def test_each_advice_is_given_in_a_situation(judged: list[Judged]) -> None:
    given = {each.found.hint for each in judged}
    rows = [*ROWS, *OF_QUEUES, *OF_REFUSALS, *OF_SCHEDULERS]
    rows += [row for *_, of_reason in OF_KUBELETS for row in of_reason]
    assert [row.hint for row in rows if row.hint not in given] == []
