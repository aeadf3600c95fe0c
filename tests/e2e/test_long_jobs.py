"""A program that saves for some time after SIGTERM: no attempt begins before it has ended."""

from __future__ import annotations

import pytest

from tests.e2e.jobs import shell_job
from tests.e2e.trials import MOUNT, Outcome, Trial, Trials, Wait, apart

pytestmark = [pytest.mark.kind, pytest.mark.timeout(900, func_only=True)]

# Each line is one append, so the lines have the order of the writes, whichever node made them.
_SAVES_AT_THE_END = """
import os, pathlib, signal, sys, time

attempt, rank = os.environ["DDPJOB_ATTEMPT"], os.environ["NODE_RANK"]
log = pathlib.Path(os.environ["DDPJOB_CHECKPOINT_DIR"], "log")

def write(what):
    with log.open("a") as file:
        file.write(f"{attempt} {rank} {what}\\n")

def save(*_):
    for step in range(40):
        write("saves")
        time.sleep(0.5)
    write("ends")
    os._exit(143)

signal.signal(signal.SIGTERM, save)
write("loads")
if attempt == "1" and rank == "1":
    while "1 0 loads" not in log.read_text():
        time.sleep(0.1)
    sys.exit(1)
for step in range(600 if attempt == "1" else 10):
    write("steps")
    time.sleep(0.5)
"""


def saves_after_sigterm(trial: Trial) -> tuple[list[list[str]], Outcome]:
    """Node 1 fails; node 0 gets SIGTERM, and saves for 20 s. Return the words of each write, and the outcome."""
    trial.folder.mkdir()
    trial.folder.chmod(0o777)
    checkpoint = {"mountPath": MOUNT, "claimName": "trainings", "subPath": trial.name}
    # Of the default grace period, 30 s.
    template = {"spec": {"affinity": apart(trial.name)}}
    program = ["python3", "-c", _SAVES_AT_THE_END]
    job = shell_job(trial.name, "", command=program, numNodes=2, checkpoint=checkpoint, template=template)
    trial.kubectl.apply(job)
    done = trial.until_finished(120)
    return [line.split() for line in (trial.folder / "log").read_text().splitlines()], done


TRIALS = Trials.of(1, saves_after_sigterm)


def test_attempt_begins_when_the_pods_of_the_one_before_have_saved(outcome: Wait) -> None:
    writes: list[list[str]]
    done: Outcome
    writes, done = outcome(saves_after_sigterm)
    assert done.status["state"] == "Succeeded", done.status
    attempts = [attempt for attempt, _, _ in writes]
    assert attempts == sorted(attempts), f"attempt 1 wrote beside attempt 2: {writes}"
    assert writes[attempts.index("2") - 1] == ["1", "0", "ends"], "attempt 1 was stopped before it had saved"
