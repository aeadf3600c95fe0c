"""Jobs that compete for too few nodes, without a gang scheduler: all finish, and none gives its nodes back needlessly.

The scheduler places each pod by itself. Operators are killed, requests fail, and watches are late, as in other runs.
"""

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest

from ddpjob.api import names
from ddpjob.api.names import Key
from ddpjob.api.objects import Json
from tests.builders import ended
from tests.controller.faketime import run
from tests.simulator.faults import at_writes, now_and_then
from tests.simulator.oracle import check_history
from tests.simulator.simulation import KEY, Simulation, now
from tests.simulator.watches import LOSSLESS

RIVALS = (KEY, Key("default", "rival"), Key("default", "third"))
PARTIAL_SECONDS = 60
TRAINING_SECONDS = 30.0
SEEDS = 16


def a_spec(nodes: int, partial_seconds: int = PARTIAL_SECONDS) -> Json:
    scheduling = {"partialGangSeconds": partial_seconds}
    return {"image": "trainer:1", "numNodes": nodes, "restartPolicy": {"maxRestarts": 0}, "scheduling": scheduling}


class Rivals:
    """Jobs of a simulation, whose trainings succeed some time after all their pods run."""

    def __init__(self, sim: Simulation, keys: Sequence[Key]) -> None:
        self.sim, self.keys = sim, keys
        self._end_at: dict[Key, float] = {}

    def are_finished(self) -> bool:
        for key in self.keys:
            self._go_on(key)
        return all(self._state(key) in ("Succeeded", "Failed") for key in self.keys)

    def _state(self, key: Key) -> str:
        return str(((self.sim.job(key) or {}).get("status") or {}).get("state"))

    def _go_on(self, key: Key) -> None:
        if self._state(key) != "Running":
            self._end_at.pop(key, None)
            return
        time = asyncio.get_running_loop().time()
        if time < self._end_at.setdefault(key, time + TRAINING_SECONDS):
            return
        for pod in self.sim.store.all(names.PODS):
            if (pod["metadata"].get("labels") or {}).get(names.LABEL_JOB_NAME) == key.name:
                self.sim.kubelets.report(pod, ended(0, at=now()))


async def compete(seed: int, *, calm: bool = False, partial_seconds: int = PARTIAL_SECONDS) -> Simulation:
    """Let two or three jobs compete for nodes that suffice for each of them, and not for two."""
    chance = random.Random(f"rivals {seed}")
    keys = RIVALS[: chance.choice((2, 2, 3))]
    sizes = [chance.randint(3, 4) for _ in keys]
    world: dict[str, Any] = (
        {}
        if calm
        else {
            "watch": chance.choice((*LOSSLESS, "dropped")),
            "operators": chance.choice((1, 1, 2)),
            "downtime": chance.choice((0.0, 10.0, 100.0)),
        }
    )
    choose = at_writes(()) if calm or chance.random() < 0.3 else now_and_then(f"rivals {seed}")
    sim = Simulation(a_spec(sizes[0], partial_seconds), choose, seed=seed, eager=True, **world)
    sim.kubelets.nodes = max(sizes) + chance.randint(0, 1)
    await sim.begin()
    for key, size in zip(keys, sizes, strict=True):
        sim.create_job(key, a_spec(size, partial_seconds))
        await sim.pause(chance.uniform(0.0, 0.5))
    await sim.until("all jobs are finished", Rivals(sim, keys).are_finished)
    await sim.rest()
    await sim.end()
    return sim


def jobs_of(sim: Simulation) -> list[tuple[float, Json]]:
    return [(time, c.obj) for time, c in sim.changes if c.resource is names.DDPJOBS and c.type != "DELETED"]


def yields(sim: Simulation) -> list[tuple[float, Json]]:
    """Return each job at the time when it gave its nodes back."""
    found, seen = [], set()
    for time, job in jobs_of(sim):
        current = (job.get("status") or {}).get("currentAttempt") or {}
        verdict = (current.get("ending") or {}).get("verdict")
        mark = job["metadata"]["uid"], current.get("number")
        if verdict in ("YieldedTo", "PartiallyScheduled") and mark not in seen:
            seen.add(mark)
            found.append((time, job))
    return found


def rank(job: Json) -> tuple[str, str]:
    return job["metadata"]["creationTimestamp"], job["metadata"]["uid"]


def check_rivals(sim: Simulation) -> None:
    check_history(sim.changes, late_creates=sim.late_creates, operators=sim.operators)
    last = {job["metadata"]["name"]: job for _, job in jobs_of(sim)}
    for key in RIVALS:
        if key.name in last:
            status = last[key.name]["status"]
            assert (status["state"], status["restarts"], status.get("failures")) == ("Succeeded", 0, None), status
            assert "partialSince" not in status["currentAttempt"] and "yields" not in status["currentAttempt"]
    for _, job in yields(sim):
        ending = job["status"]["currentAttempt"]["ending"]
        if ending["verdict"] == "YieldedTo":
            (elder,) = (other for name, other in last.items() if f"job {name} waits" in ending["message"])
            assert rank(elder) < rank(job), f"{job['metadata']['name']} yielded to a younger job"


@pytest.mark.parametrize("seed", range(SEEDS))
def test_rivals_all_finish_and_only_the_younger_yields(seed: int) -> None:
    check_rivals(run(compete(seed)))


def test_without_faults_a_deadlock_ends_at_the_limit() -> None:
    """Without the guard, each of these runs is one; with it, the younger job yields once, in time."""
    deadlocks: list[int] = []
    for seed in range(12):
        if len(deadlocks) == 3:
            break
        sim = run(compete(seed, calm=True))
        check_rivals(sim)
        if given := yields(sim):
            deadlocks.append(seed)
            waited = given[0][0] - jobs_of(sim)[0][0]
            assert waited <= 2 * PARTIAL_SECONDS + 10, f"seed {seed}: the first yield came after {waited:.0f} s"
    assert len(deadlocks) == 3
    with pytest.raises(AssertionError, match="not in time: all jobs are finished"):
        run(compete(deadlocks[0], calm=True, partial_seconds=0))
