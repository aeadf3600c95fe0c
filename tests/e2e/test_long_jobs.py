"""What a long job meets: a program that saves for some time after SIGTERM, and a volume that is away for minutes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.e2e import nodes
from tests.e2e.jobs import shell_job
from tests.e2e.namespace import local_volume
from tests.e2e.trials import (
    MOUNT,
    Outcome,
    Trial,
    Trials,
    Wait,
    apart,
)

pytestmark = [pytest.mark.kind, pytest.mark.timeout(900, func_only=True)]

AWAY_SECONDS = 180.0
VOLUME = "/var/lib/ddpjob-away"
"""A file system on one worker."""
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


def volume_away(trial: Trial) -> Outcome:
    """For three minutes each new pod finds the empty folder that a network file system is to be mounted on."""
    node = nodes.staying(trial.cluster)[1]
    with _volume(trial, node) as claim:
        spec = {"nodeName": node}
        trial.apply(template={"spec": spec}, checkpoint={"mountPath": MOUNT, "claimName": claim, "subPath": trial.name})
        trial.until_trained()
        nodes.run_on(node, f"umount --lazy {VOLUME}")  # pods that run keep it
        trial.kill_rank(1)
        time.sleep(AWAY_SECONDS)
        nodes.run_on(node, f"mount --bind {VOLUME}.real {VOLUME}")
        return trial.until_finished()


@contextmanager
def _volume(trial: Trial, node: str) -> Iterator[str]:
    """Provide the name of a claim for a file system on this node."""
    nodes.run_on(node, f"mkdir -p {VOLUME} {VOLUME}.real")
    nodes.run_on(node, f"mount -t tmpfs -o size=64m,mode=0777 ddpjob-away {VOLUME}.real")
    nodes.run_on(node, f"mkdir -m 0777 {VOLUME}.real/{trial.name} && mount --bind {VOLUME}.real {VOLUME}")
    kind = f"{trial.kubectl.namespace}-away"
    try:
        trial.kubectl.apply(*local_volume(kind, "away", VOLUME, "64Mi"))
        yield "away"
    finally:
        trial.kubectl("delete", "persistentvolume", kind, "--ignore-not-found", "--wait=false")
        nodes.run_on(node, f"umount --lazy {VOLUME} {VOLUME}.real || umount --lazy {VOLUME}.real")


TRIALS = Trials.of(2, saves_after_sigterm, soak=(volume_away,))


def test_attempt_begins_when_the_pods_of_the_one_before_have_saved(outcome: Wait) -> None:
    writes: list[list[str]]
    done: Outcome
    writes, done = outcome(saves_after_sigterm)
    assert done.status["state"] == "Succeeded", done.status
    attempts = [attempt for attempt, _, _ in writes]
    assert attempts == sorted(attempts), f"attempt 1 wrote beside attempt 2: {writes}"
    assert writes[attempts.index("2") - 1] == ["1", "0", "ends"], "attempt 1 was stopped before it had saved"


@pytest.mark.soak
def test_job_outlives_a_volume_that_is_away_for_three_minutes(outcome: Wait) -> None:
    done: Outcome = outcome(volume_away)
    assert done.status["state"] == "Succeeded", done.status
    assert len(done.status["failures"]) >= 2, "no attempt failed while the volume was away"
