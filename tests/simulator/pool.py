"""Nodes of a simulated run that come and go, each with room for one pod, and stories of jobs with minNodes on them."""

import asyncio
import random
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from ddpjob.api import names
from ddpjob.api.objects import Json
from ddpjob.engine.scheduling.elastic import NODES_AVAILABLE, NODES_UNAVAILABLE, RESIZE_SECONDS
from tests.builders import ended, running
from tests.simulator.kubelets import UNSCHEDULABLE, Kubelets
from tests.simulator.simulation import KEY, Simulation
from tests.worlds.memory.store import Change

SLACK_SECONDS = 60.0
"""By how much later than it decides the operator may write a decision, after faults."""
STORY_SECONDS = 4_000.0
CHANGE_SECONDS = (20.0, 1_500.0)
"""Time from one change of the nodes to the next."""


class Pool(Kubelets):
    """Places each pod that has no node on a free one, if there is any. ``up``: the nodes that are there."""

    def __init__(self, *arguments: Any, nodes: int, **options: Any) -> None:
        super().__init__(*arguments, eager=False, **options)
        self.up = {f"worker-{number}" for number in range(nodes)}

    def on_change(self, change: Change) -> None:
        super().on_change(change)
        if change.resource is names.PODS:
            asyncio.get_running_loop().call_later(self._chance(change.obj).uniform(0.1, 2.0), self.place)

    def place(self) -> None:
        """Place the pods that wait, the oldest first."""
        free = sorted(self.up - self.used_nodes())
        for pod in sorted(self.waiting_pods(), key=lambda pod: int(pod["metadata"]["resourceVersion"])):
            if free:
                self._bind(pod, free.pop(0))
            elif not pod["status"].get("conditions"):
                self.report(pod, {"phase": "Pending", "conditions": [UNSCHEDULABLE]})

    def lose(self, node: str) -> None:
        """Remove a node with its pod."""
        self.up.discard(node)
        for pod in list(self._server.store.all(names.PODS)):
            if pod["spec"].get("nodeName") == node:
                self.remove(pod)

    def add(self, node: str) -> None:
        self.up.add(node)
        self.place()

    def _bind(self, pod: Json, node: str) -> None:
        if self.place_on(node, pod):
            is_probe = names.LABEL_PROBE in pod["metadata"]["labels"]
            self.report(pod, ended(0, at=self._now()) if is_probe else running(podIP="192.0.2.1"))


def an_elastic_simulation(seed: int, choose: Any, **world: Any) -> Simulation:
    """Return a job with minNodes on nodes that come and go."""
    chance = random.Random(f"elastic {seed}")
    nodes = chance.randint(2, 5)
    spec = {"image": "trainer:1", "numNodes": nodes, "minNodes": chance.randint(1, nodes - 1)}
    spec["scheduling"] = {"partialGangSeconds": chance.choice((30, 60, 300))}
    simulation = Simulation(spec, choose, seed=seed, **world)
    kubelets = simulation.kubelets
    simulation.kubelets = Pool(kubelets._server, str(seed), kubelets._now, nodes=nodes)
    return simulation


async def elastic_story(sim: Simulation) -> None:
    """Take nodes away and bring them back; when all are there again, the job has all of them, and succeeds."""
    pool, chance = sim.kubelets, sim.chance
    assert isinstance(pool, Pool)
    every, time = sorted(pool.up), 0.0
    sim.create_job()
    while time < STORY_SECONDS:
        node = chance.choice(every)
        (pool.lose if node in pool.up else pool.add)(node)
        sim.log.append(f"{asyncio.get_running_loop().time():.0f} {node} is {'up' if node in pool.up else 'gone'}")
        seconds = chance.uniform(*CHANGE_SECONDS)
        await sim.pause(seconds)
        time += seconds
    for node in every:
        pool.add(node)
    await sim.until("all nodes run again", lambda: _runs_with(sim, len(every)))
    for pod in sim.pods().values():
        pool.report(pod, ended(0, at=pool._now()))
    await sim.until("the job is finished", sim.is_finished)


def _runs_with(sim: Simulation, nodes: int) -> bool:
    return sim.is_running() and (sim.status().get("world") or {}).get("numNodes") == nodes


def check_sizes(changes: Sequence[tuple[float, Change]]) -> None:
    """Check the sizes of a job's attempts.

    Never below minNodes or above numNodes; each pod is one of its attempt's nodes; a size is that of a whole
    attempt; at most one change in ten minutes for each reason, and none that costs a restart.
    """
    sizes: dict[int, int] = {}
    decided: dict[str, list[float]] = defaultdict(list)
    recorded: dict[int, str] = {}
    for time, change in changes:
        meta, labels = change.obj["metadata"], change.obj["metadata"].get("labels") or {}
        if change.resource is names.DDPJOBS and meta["name"] == KEY.name:
            status, spec = change.obj.get("status") or {}, change.obj["spec"]
            number = int(status.get("attempt") or 0)
            if number and (world := status.get("world")):
                size = sizes.setdefault(number, world["numNodes"])
                assert size == world["numNodes"], f"attempt {number} had {size} nodes, then {world['numNodes']}"
                assert spec["minNodes"] <= size <= spec["numNodes"], f"attempt {number} has {size} nodes: {spec}"
            verdict = ((status.get("currentAttempt") or {}).get("ending") or {}).get("verdict")
            if verdict in (NODES_AVAILABLE, NODES_UNAVAILABLE) and number not in recorded:
                recorded[number] = verdict
                decided[verdict].append(time)
            assert not status.get("restartsCountedTowardsLimit"), "the loss of a node costs no restart"
        is_node = change.resource is names.PODS and change.type == "ADDED" and names.LABEL_NODE_RANK in labels
        if is_node and (number := int(labels[names.LABEL_ATTEMPT])) in sizes:
            rank = int(labels[names.LABEL_NODE_RANK])
            assert rank < sizes[number], f"{meta['name']} of an attempt of {sizes[number]} nodes"
    for verdict, times in decided.items():
        for first, second in pairwise(times):
            gap = second - first
            assert gap > RESIZE_SECONDS - SLACK_SECONDS, f"{verdict} twice in {gap:.0f} s"
    _check_each_change_has_a_reason(sizes, recorded)


def _check_each_change_has_a_reason(sizes: dict[int, int], recorded: dict[int, str]) -> None:
    for before, after in pairwise(sorted(sizes)):
        old, new, verdict = sizes[before], sizes[after], recorded.get(before)
        wanted = NODES_AVAILABLE if new > old else NODES_UNAVAILABLE if new < old else None
        assert verdict == wanted, f"attempt {before} of {old} nodes ended with {verdict}, the next has {new}"
