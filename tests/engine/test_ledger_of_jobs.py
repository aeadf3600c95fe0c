"""The ledgers of many simulated jobs, each compared with what the simulated job did in each second.

A job waits, is scheduled, starts, trains, pauses, saves, loses its pods or only its processes, repeats steps, is
suspended and resumed, while the operator looks every few seconds, or not for minutes. `make soak` simulates 1,000 jobs.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from ddpjob.api import names
from ddpjob.api.status import TIME_CATEGORIES, recorded_status
from ddpjob.api.times import timestamp
from tests.builders import NOW, World, a_job, ended, failed, running
from tests.soak import ALL

# The operator sees nothing of jobs 441 and 760 before their ranks are in a second life, 760 nothing before its end.
BATCHES = [range(first, first + 100) for first in range(0, 1000, 100)] if ALL else [[*range(7), 441, 760]]
STEPS = 120
SPEC = {"restartPolicy": {"maxRestarts": 99, "maxTotalRestarts": 99}}


class SimulatedJob:
    """One job, one second after the other.

    did: the seconds that the job spent in each category.
    unseen: the seconds between what happened and when the operator looked next: so much of a category may be in its
        neighbours. exact: the same for what the launchers measure of restarts in place. missed: the seconds
        of pauses, and of steps that were trained again, while no operator looked.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.world = World(a_job(**SPEC))
        self.world.job["metadata"]["creationTimestamp"] = timestamp(NOW)
        self.did: Counter[str] = Counter(dict.fromkeys(TIME_CATEGORIES, 0))
        self.unseen = self.exact = self.missed = 0.0
        self.every = self.random.randint(1, 8)
        self.away_until = self.clock = 0
        self.is_new = True  # no attempt has failed since the job was created or resumed
        self.step = self.furthest = self.saved = 0
        self.attempt = 0
        self.pace = self.random.randint(1, 3)  # seconds for a step

    # Time and the operator

    def spend(self, seconds: int, category: str) -> None:
        for _ in range(seconds):
            self.world.forward(1)
            self.clock += 1
            self.did[category] += 1
            self.missed += category in ("lost", "stalled") and self.clock < self.away_until
            if self.clock >= self.away_until and self.clock % self.every == 0:
                self.look()

    def look(self) -> None:
        if self.clock >= self.away_until:
            self.world.settle()
            if self.random.random() < 0.004:
                self.away_until = self.clock + self.random.randint(60, 300)
                self.world.round = None  # another process of the operator comes back

    def happened(self) -> None:
        """Note how much later the operator looks at the earliest."""
        left = -self.clock % self.every
        self.unseen += max(left, self.away_until - self.clock + self.every) + 1
        self.missed += self.every

    def until_attempt(self, category: str) -> None:
        while self.world.status.get("attempt", 0) == self.attempt or not self.pods:
            self.spend(1, category)
            assert self.clock < 100_000, self.world.status
        self.attempt = self.world.status["attempt"]

    @property
    def pods(self) -> list[dict[str, Any]]:
        of = str(self.world.status.get("attempt", 0))
        return [pod for pod in self.world.pods.values() if pod["metadata"]["labels"][names.LABEL_ATTEMPT] == of]

    # The job

    def run(self) -> World:
        self.away_until = self.random.randint(0, 30)
        self.until_attempt("queued")
        self.happened()
        while not self.attempt_succeeds():
            pass
        while not self.world.status.get("completionTime"):
            self.away_until = self.clock
            self.look()
        return self.world

    def attempt_succeeds(self) -> bool:
        """Run one attempt until it succeeds, fails or is suspended."""
        first = "scheduling" if self.is_new else "recovering"
        self.spend(self.random.randint(1, 40), first)
        self.started = self.world.now
        state = {"running": {"startedAt": timestamp(self.started)}}
        self.world.run_all()
        for rank in range(2):
            self.world.set_pod(rank, running(containerStatuses=[{"name": "trainer", "state": state}]))
        self.happened()
        self.life, self.lives, self.saving = 1, list[dict[str, Any]](), 0
        self.resumed = self.step = self.saved
        self.report()
        self.spend(self.random.randint(1, 40), "starting" if self.is_new else "recovering")
        self.happened()
        self.is_new = False
        while self.step < STEPS:
            self.train()
            event = self.random.random()
            if event < 0.02:
                self.lose_a_process()
            elif event > 0.99:
                self.pause()
            elif event < 0.03:
                self.fail()
                return False
            elif event < 0.035 and self.clock >= self.away_until:
                self.suspend()
                return False
        message = json.dumps({"schema": 2, "outcome": "succeeded", "code": 0, "progress": self.last_report})
        for rank in range(2):
            self.world.set_pod(rank, ended(0, at=self.world.now, started=self.started, message=message))
        self.happened()
        return True

    def train(self, *, recovering: bool = False) -> None:
        """Make one step, and after each tenth one save."""
        category = "recovering" if recovering else "training" if self.step >= self.furthest else "lost"
        self.spend(self.pace, category)
        self.step += 1
        self.furthest = max(self.furthest, self.step)
        self.report()
        if self.step % 10 == 0:
            seconds = self.random.randint(0, 6)
            self.spend(seconds, "saving")
            self.saving, self.saved = self.saving + seconds, self.step
            self.report()

    def pause(self) -> None:
        """Make no step for long. The launcher reports that after ten seconds."""
        usual = 3 * self.pace
        self.spend(usual, "training" if self.step >= self.furthest else "lost")
        self.spend(max(10, 10 * self.pace) - usual, "stalled")
        self.report(ageSeconds=float(max(10, 10 * self.pace)), pause={"stepSeconds": self.pace})
        self.spend(self.random.randint(20, 60), "stalled")
        self.exact += self.every
        self.happened()

    def report(self, **more: Any) -> None:
        sent: dict[str, Any] = {"step": self.step, "totalSteps": STEPS, "stepsPerSecond": 1 / self.pace}
        sent |= {"savingSeconds": float(self.saving), "life": self.life, "lives": list(self.lives)}
        if self.resumed:
            sent["resumedFrom"] = {"step": self.resumed, "path": f"{self.resumed}.pt"}
        if self.saved:
            sent["checkpoint"] = {"step": self.saved, "path": f"{self.saved}.pt"}
        sent |= more
        self.last_report = sent
        self.world.progress = sent, self.pods[0]["metadata"]["name"]

    def lose_a_process(self) -> None:
        """Restart all processes in place. The launchers measure until the first step of the next life."""
        failure = {"life": self.life, "node": 1, "kind": "Killed", "message": "killed", "progressed": True}
        self.life += 1
        self.lives = [*self.lives, failure][-5:]
        seconds = self.random.randint(1, 10)
        self.report()
        self.spend(seconds, "recovering")
        self.resumed = self.step = self.saved
        self.spend(self.pace, "recovering")
        self.step += 1
        self.furthest = max(self.furthest, self.step)
        self.lives[-1] = failure | {"recoveryMilliseconds": (seconds + self.pace) * 1000}
        self.exact += self.pace
        self.missed += self.every
        self.report()

    def fail(self) -> None:
        self.world.set_pod(0, failed(1, at=self.world.now, progress=self.last_report))
        self.world.set_pod(1, failed(1, cause="peer", at=self.world.now))
        self.world.progress = None
        self.happened()
        self.until_attempt("recovering")
        self.happened()

    def suspend(self) -> None:
        self.look()
        self.world.job["spec"]["suspend"] = True
        self.world.settle()
        self.world.progress = None
        self.spend(self.random.randint(1, 200), "stopped")
        self.away_until = self.clock
        self.world.job["spec"]["suspend"] = False
        self.is_new = True
        self.until_attempt("stopped")
        self.happened()


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("seeds", BATCHES, ids=lambda seeds: str(seeds[0]))
def test_each_second_of_a_job_is_in_the_category_of_what_the_job_did(seeds: Sequence[int]) -> None:
    did: Counter[str] = Counter()
    said: Counter[str] = Counter()
    for seed in seeds:
        job = SimulatedJob(seed)
        ledger = recorded_status(job.run().status).time
        assert ledger is not None
        shown = f"job {seed}: {ledger.by_category}, but {dict(job.did)}"
        assert ledger.total == job.clock, shown
        for category in TIME_CATEGORIES:
            slack = {"saving": 1, "lost": job.exact + job.missed}.get(category, job.exact + job.missed + job.unseen)
            assert abs(ledger.by_category[category] - job.did[category]) <= slack, f"{category} of {shown}"
        did += job.did
        said += Counter(ledger.by_category)
    assert all(did[category] for category in TIME_CATEGORIES), did
    for category in TIME_CATEGORIES:  # an operator that looks each few seconds adds some to each
        assert said[category] == pytest.approx(did[category], rel=0.3), f"{category}: {said}, but {did}"
