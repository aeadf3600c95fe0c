"""`ddpjob why` on jobs of this machine."""

import json
import re
import shutil

from ddpjob.api.objects import Json
from ddpjob.cli.why import verdict_lines
from ddpjob.client.snapshot import Snapshot
from ddpjob.client.verdict.explain import explain
from tests.builders import SETTINGS, a_job, a_running_world, failed
from tests.cli.program import ROOT, Program, shell_job
from tests.client.test_explain import pending, started, unschedulable, why
from tests.json_schema import faults
from tests.processes import eventually

SCHEMA = json.loads((ROOT / "docs" / "reference" / "schemas" / "explanation.json").read_text(encoding="utf-8"))
# As a launcher ends: with 1, and its own lines behind the traceback.
SCRIPT = "python3 train.py || { seq 1 100 | sed 's/^/cleaning up /'; exit 1; }"


def explained(ddpjob: Program, name: str) -> Json:
    done = ddpjob("why", name, "-o", "json")
    assert (done.code, done.err) == (0, "")
    found: Json = json.loads(done.out)
    assert not list(faults(found, SCHEMA))
    return found


def test_a_script_that_raises_is_quoted_also_when_its_log_is_gone(ddpjob: Program) -> None:
    (ddpjob.folder / "train.py").write_text("def train():\n    raise ValueError('sample 17 is bad')\n\ntrain()\n")
    job = shell_job("tiny", SCRIPT, restartPolicy={"maxRestarts": 0})
    assert ddpjob("run", ddpjob.write(job), "-o", "json").code == 1
    found = explained(ddpjob, "tiny")
    assert (found["stage"], found["exception"], found["nodeRank"], found["exitCode"]) == ("Crash", "ValueError", 0, 1)
    assert found["where"].endswith("train.py:2")
    lines = ddpjob("why", "tiny").out.splitlines()
    assert "ValueError: sample 17 is bad" in lines[0]
    assert lines[-3].startswith("stage: Crash (ValueError), confidence high")
    assert [line[:7] for line in lines[-2:]] == ["hint:  ", "next:  "]
    shutil.rmtree(ddpjob.state / "jobs" / "default" / "tiny" / "pods")
    assert explained(ddpjob, "tiny")["exception"] == "ValueError"


HUNG = """
import os, time, ddprun
rank = int(os.environ["RANK"])
for step in range(1, 21):
    time.sleep(0.02)
    if step == 20 and rank == 1:
        time.sleep(1000)
    ddprun.report(step=step)
time.sleep(1000)
"""


def test_a_hang_is_seen_at_once_located_before_its_deadline_and_is_no_training(ddpjob: Program) -> None:
    (ddpjob.folder / "train.py").write_text(HUNG)
    job = shell_job("tiny", "", numNodes=2, progressDeadlineSeconds=60, restartPolicy={"maxRestarts": 0})
    job["spec"]["command"] = ["ddprun", "train.py"]
    with ddpjob.started("run", ddpjob.write(job), "-o", "json") as run:

        def until(what: str, reason: str) -> Json:
            def found() -> Json | None:
                last = explained(ddpjob, "tiny") if ddpjob("get", "tiny").code == 0 else {}
                return last if last.get("reason") == reason else None

            return eventually(what, found, timeout=300)

        seen = until("the pause is shown", "NoHeartbeat")
        assert (seen["stage"], seen["isAbnormal"], seen["step"]) == ("Running", True, 20)
        assert re.search(r"tiny has made no step for \d\d s, \d+ times the median step", seen["sentence"])
        for command in (("get", "tiny"), ("get",), ("top", "tiny")):
            assert "no step for " in ddpjob(*command).out, command
        assert ddpjob.job("tiny")["status"]["time"]["current"] == "stalled"
        stall = until("the stall is reported", "TrainingStalled")
        assert (stall["rank"], stall["step"], stall["where"]) == (1, 19, "train.py:7")
        assert run.wait(300) == 1
    status = ddpjob.job("tiny")["status"]
    failure = status["failures"][0]
    assert (failure["reason"], failure["rank"]) == ("ProgressDeadlineExceeded", 1), failure
    assert (failure["step"], failure["where"]) == (19, "train.py:7")
    assert status["time"]["stalled"] >= 50 and status["time"]["training"] < 20
    found = explained(ddpjob, "tiny")
    assert (found["stage"], found["rank"], found["where"]) == ("Hang", 1, "train.py:7")


def test_the_verdict_is_said_once_and_the_line_of_the_user_first() -> None:
    """Seen: one sentence up to four times, as its own evidence."""
    world = a_running_world(a_job(restartPolicy={"maxRestarts": 0}))
    error = {"exception": "ValueError", "message": "sample 17 is bad", "rank": 1, "step": 7, "where": "train.py:92"}
    world.set_pod(1, failed(1, kind="ValueError", **error))
    world.settle()
    world.forward(130)
    world.settle()
    found = explain(Snapshot(job=world.job, now=world.now, settings=SETTINGS, pods=list(world.pods.values())))
    lines = list(verdict_lines(found, "here", coloured=False))
    pod = "node_rank 1 (mnist-0a1b2-1-1), rank 1, step 7"
    assert lines[0] == f"mnist failed in attempt 1: train.py:92: ValueError: sample 17 is bad ({pod})"
    used = "True ValueError: attempt 1 failed and maxRestarts allows no restart: …; next: …"
    assert lines[1] == f"  DDPJob mnist status.conditions[Finished]: {used}"
    assert [line[:7] for line in lines[2:]] == ["stage: ", "hint:  ", "next:  "]
    all_lines = list(verdict_lines(found, "here", coloured=False, verbose=True))
    assert len(all_lines) == len(lines) - 1 + len(found.evidence) and len(found.evidence) >= 4
    assert sum("sample 17 is bad" in line for line in all_lines) >= 4


def test_evidence_that_adds_something_is_shown_up_to_eight_lines() -> None:
    found = why(a_running_world(a_job()))
    more = [found.evidence[0].model_copy(update={"value": f"value-{number} new{number}"}) for number in range(9)]
    lines = list(verdict_lines(found.model_copy(update={"evidence": more, "hint": "h"}), "here", coloured=False))
    assert len(lines) == 8 and "value-0" in lines[1] and "value-2" in lines[3]
    assert lines[4] == "  … 6 more: ddpjob why mnist -v"
    world = started()
    pods = [pending(world, rank, **unschedulable("3 Insufficient nvidia.com/gpu.")) for rank in (0, 1)]
    pods[0]["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": "16"}}
    lines = list(verdict_lines(why(world, unread={"events": "events: not allowed"}), "here", coloured=False))
    assert [line for line in lines if line.startswith("  ")] == [
        "  Pod mnist-0a1b2-1-0 spec.containers[trainer].resources.requests: nvidia.com/gpu=16"
    ]


def test_only_what_is_abnormal_is_in_colour_and_no_line_has_escape_sequences_of_the_job() -> None:
    world = a_running_world(a_job())

    def lines() -> list[str]:
        found = explain(Snapshot(job=world.job, now=world.now, settings=SETTINGS, pods=list(world.pods.values())))
        return list(verdict_lines(found, "here", coloured=True))

    assert "\x1b" not in "".join(lines())
    world.set_pod(1, failed(1, kind="ValueError", exception="ValueError", message="bad \x1b[2J\nline"))
    first, *others = lines()
    assert first.startswith("\x1b[31m") and first.endswith("\x1b[0m")
    assert "\x1b" not in first[5:-4] + "".join(others)
