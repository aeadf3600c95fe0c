"""Advice about failures in local mode: it names nothing that only a cluster has."""

from __future__ import annotations

import re

from ddpjob.api.objects import Json
from ddpjob.api.pod_view import pod_view
from ddpjob.api.status import Failure
from ddpjob.engine.advice import ROWS
from ddpjob.engine.evidence import evidence_of
from ddpjob.engine.failures import TABLE, Context, Judgement
from ddpjob.engine.judgement import judge
from tests.builders import failed
from tests.engine.test_failures import CASES, REPEATED, REPEATS
from tests.local.builders import OF_A_CLUSTER_ALONE, a_local_job
from tests.local.sessions import Place


def is_of_a_process(status: Json, metadata: Json) -> bool:
    """Return whether local mode can show this: of a process it is known how it ended, and nothing else."""
    states = [container["state"] for container in status.get("containerStatuses") or ()]
    reasons = {(state.get("terminated") or {}).get("reason") for state in states}
    return not metadata and status.keys() <= {"phase", "containerStatuses"} and reasons <= {"Error"} and bool(reasons)


def judged(status: Json, *earlier: Failure) -> tuple[Judgement, Judgement]:
    """Return what follows in local mode from the end of a process, and its row."""
    evidence = evidence_of(pod_view({"metadata": {"name": "p", "uid": "u", "labels": {}}, "status": status}))
    context = Context(earlier, is_local=True)
    row = next(row for row in TABLE if row.matches(evidence, context))
    return judge(evidence, context, "ddpjob logs mnist --node 0 --attempt 1"), row


def test_advice_about_each_end_of_a_process_names_nothing_of_a_cluster() -> None:
    """Each row of the table has a case. In local mode only how the program ended leads to a row."""
    ends = [status for status, metadata, *_ in CASES.values() if is_of_a_process(status, metadata)]
    found = [judged(status) for status in ends]
    found.append(judged(REPEATS, REPEATED))
    for made, row in found:
        assert made.hint and made.next, row.when
        words = OF_A_CLUSTER_ALONE.findall(f"{made.message} {made.hint} {made.next}")
        assert not words, (row.when, words)
    reached = [row for _, row in found]
    assert [row.when for row in TABLE if row.local and row not in reached] == []


def test_advice_by_the_text_of_an_error_holds_on_this_machine() -> None:
    """Seen: for a missing module only "correct the code"."""
    made, _ = judged(failed(1, exception="ModuleNotFoundError", message="No module named 'transformers'"))
    assert "a module" in made.hint and "pip install" in made.next
    for row in ROWS:
        text = f"{row.hint} {row.local or row.next}" if row.local is not None else ""
        assert not OF_A_CLUSTER_ALONE.findall(text.replace("{logs}", "")), row.pattern
        assert not re.search(r"\{(?!logs\})|spec\.|serviceAccount|Secret|limits\.", text), row.pattern


def test_advice_about_a_cluster_by_the_text_of_an_error_does_not_reach_this_machine() -> None:
    made, _ = judged(failed(1, exception="RuntimeError", message="Mismatched NCCL version detected"))
    assert made.hint == "the program ended with an error"


def test_advice_about_other_checkpoints_names_options_of_run_and_not_of_the_trainer() -> None:
    made, _ = judged(failed(78, kind="ConfigMismatch", message="m", hint="h", next="a new --checkpoint-dir"))
    assert "--fresh" in made.next and "--name" in made.next
    made, _ = judged(failed(66, kind="DataMissing", message="m", hint="the trainer's hint", next="fetch it"))
    assert (made.hint, made.next) == ("the trainer's hint", "fetch it")


async def test_failure_of_a_job_of_this_machine_has_this_advice(place: Place) -> None:
    run = await place.finish(a_local_job("exit 127", numNodes=1))
    (failure,) = run.status["failures"]
    assert failure["reason"] == "StartError" and "is not installed" in failure["hint"]
    assert not OF_A_CLUSTER_ALONE.search(f"{failure['hint']} {failure['next']}")
