"""A simulated month: 200 jobs on 64 nodes of 8 GPUs, and what goes wrong with them.

    python -m tests.benchmarks.month                   # table on standard output
    python -m tests.benchmarks.month --write           # and into docs/develop/benchmarks.md
    python -m tests.benchmarks.month --days 3 --jobs 20

The real controller on the in-memory cluster, in simulated time; programs of several kinds train by themselves
(``tests.simulator.site``). Hardware fails with an MTBF of 7.9 h for 1,024 GPUs, scaled to these nodes; a third of the
failures leave a node broken until a person repairs it. Nodes are drained, kubelets are away for up to five minutes, a
shared dependency is away for 1 to 20 minutes, and webhooks of other people act for a time.

*Lost*: a job that failed although its program is good. *Overlapping writes*: saves of an attempt after a newer one
began. *Goodput*: the training time of a job that succeeded, as a share of the time from its first step to its end.
*Of what the faults leave*: the same without the steps since the last save, the start of the program after each fault,
the outages, and the time in which no node was free. The exit code is 0 if no job is lost, no writes overlap, each
program with an error made its job fail, and the aim is reached.
"""

from __future__ import annotations

import asyncio
import logging
import random
import resource
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from functools import cached_property
from itertools import pairwise
from typing import Any

from ddpjob.api import names
from ddpjob.api.names import Key
from ddpjob.api.objects import Json
from tests.benchmarks.report import describe_machine, parser_of, print_table, table_of
from tests.builders import ended
from tests.controller.faketime import run as run_in_simulated_time
from tests.simulator.faults import at_writes
from tests.simulator.programs import DEVICE_ERROR, Program, Training
from tests.simulator.scenarios import CHECKPOINT
from tests.simulator.simulation import KEY, Simulation, now
from tests.simulator.site import Machine, Site, Webhook, a_site, machines
from tests.simulator.site_oracle import overlaps

DAY = 86_400.0
HOUR = 3_600.0
NODES, GPUS = 64, 8
MTBF_HOURS = 7.9 * 1024 / (NODES * GPUS)
"""Mean time between failures of all nodes: 7.9 h was measured for 1,024 GPUs in Meta's research clusters."""
SIZES = (1, 1, 2, 2, 2, 4, 4, 8)
"""Nodes of a job."""
BUG_SHARE = 0.05
BROKEN_SHARE = 1 / 3
"""Share of the failures after which the node is broken until it is repaired."""
REPAIR_HOURS = (2.0, 24.0)
START_SECONDS = 4.0
"""From the place of a pod until its container runs, on the average."""
AIM = 0.97
PATIENCE_DAYS = 30.0
"""How long after the last job was created all must have ended."""


class Month:
    """The jobs, the nodes and the faults of one simulated month."""

    def __init__(self, seed: int, days: float, jobs: int) -> None:
        self.chance = random.Random(f"month {seed}")
        self.days, self.jobs = days, jobs
        self.sim = Simulation({}, at_writes(()), seed=seed)
        self.programs = {f"job-{number:03}": self._program(number) for number in range(jobs)}
        self.sim.sweep_seconds = HOUR  # a sweep copies all objects, which would take half of the CPU time
        self.site: Site = a_site(self.sim, machines(NODES), self.programs, seed)
        self.hits = 0
        self.ended_days = 0.0
        self.outages: list[tuple[float, float]] = []

    def _program(self, number: int) -> Program:
        chance, days = random.Random(f"{number} {self.chance.random()}"), self.days
        steps = int(DAY * min(chance.uniform(0.2, 4.0), days / 4))
        has_bug = chance.random() < BUG_SHARE
        return Program(
            steps=steps,
            startup_seconds=chance.uniform(10.0, 90.0),
            save_every=int(chance.uniform(600, 1800)),
            end_seconds=chance.choice((0.0, 10.0, 20.0, 28.0)),
            fenced=chance.random() < 0.4,
            reports=chance.choice(("exact", "exact", "coarse", "none")),
            notices=chance.random() < 0.7,
            bug_at=chance.choice((0, chance.randint(1, steps))) if has_bug else None,
        )

    async def run(self) -> None:
        """Let the month pass, and wait until all jobs have ended."""
        await self.sim.begin()
        acts = (self._hardware, self._drains, self._flaps, self._outages, self._users, self._webhooks, self._expire)
        tasks = [asyncio.create_task(act()) for act in (self._arrivals, *acts)]
        await tasks[0]
        last = _time() + PATIENCE_DAYS * DAY
        while not self._are_finished() and _time() < last:
            await self.sim.pause(HOUR)
        self.ended_days = _time() / DAY
        for task in tasks:
            if task.done():
                task.result()  # an error of this benchmark would otherwise only leave faults out
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.sim.end()

    async def _arrivals(self) -> None:
        """Create jobs in the first two thirds of the month."""
        for name in self.programs:
            spec = {"image": "trainer:1", "numNodes": self.chance.choice(SIZES), **CHECKPOINT}
            self.sim.create_job(Key(KEY.namespace, name), spec)
            await self.sim.pause(self.chance.expovariate(self.jobs / (self.days * 2 / 3 * DAY)))

    async def _hardware(self) -> None:
        kinds = ("device", "device", "device", "crash", "crash", "power", "runtime")
        async for name in self._each(MTBF_HOURS):
            kind, machine = self.chance.choice(kinds), self.site.machines[name]
            if machine.is_away:
                continue
            self._hit(name)
            if kind == "device":
                for training, node_rank in self._trainings_on(name):
                    training.fail(node_rank, DEVICE_ERROR)
            elif kind == "power":
                self.site.switch_off(name, self.chance.uniform(300.0, HOUR))
            else:
                unknown = ended(137, at=now(), reason="ContainerStatusUnknown")
                self.site.crash(name, unknown if kind == "runtime" else None)
            if self.chance.random() < BROKEN_SHARE:
                machine.defect = self.chance.choice(("hook", "mount", "devices", "dying"))
                self._soon(self.chance.uniform(*REPAIR_HOURS) * HOUR, setattr, machine, "defect", None)

    async def _drains(self) -> None:
        async for name in self._each(24.0):
            self._hit(name)
            self.site.drain(name)
            self._soon(self.chance.uniform(600.0, HOUR), self._uncordon, self.site.machines[name])

    async def _flaps(self) -> None:
        async for name in self._each(12.0):
            if not self.site.machines[name].is_away:
                self.site.flap(name, self.chance.uniform(5.0, 290.0))

    async def _outages(self) -> None:
        async for _ in self._each(72.0):
            seconds = self.chance.uniform(60.0, 1200.0)
            self.outages.append((_time(), _time() + seconds))
            self.site.lose_dependency(seconds)

    async def _users(self) -> None:
        """Users suspend a job for some minutes, or request a restart."""
        async for name in self._each(24.0):
            for training, _ in self._trainings_on(name):
                pod = training.pods[0]
                key = Key(KEY.namespace, pod["metadata"]["labels"][names.LABEL_JOB_NAME])
                if self.chance.random() < 0.5:
                    self._hit(name)
                    self._patch(key, restartedAt=now().isoformat().replace("+00:00", "Z"))
                else:
                    self._hit(name)
                    self._patch(key, suspend=True)
                    self._soon(self.chance.uniform(1.0, 60.0), lambda key=key: self._patch(key, suspend=False))

    async def _webhooks(self) -> None:
        """A webhook raises the grace period on some days; another one takes labels or owners for ten minutes."""
        async for _ in self._each(72.0):
            kinds: tuple[Webhook, ...] = ("grace", "adds", "labels", "owner")
            webhook = self.chance.choice(kinds)
            self.site.webhook = webhook
            await asyncio.sleep(600.0 if webhook in ("labels", "owner") else DAY)
            self.site.webhook = "none"

    async def _expire(self) -> None:
        """Remove events after an hour or two, as the API server does."""
        old: list[Json] = []
        while True:
            for event in old:
                meta = event["metadata"]
                if self.sim.store.get(names.EVENTS, meta["namespace"], meta["name"]) is event:
                    self.sim.store.remove(names.EVENTS, event)
            old = list(self.sim.store.all(names.EVENTS))
            await asyncio.sleep(HOUR)

    async def _each(self, hours: float) -> AsyncIterator[str]:
        """Yield a random node after random times, until the month is over."""
        while True:
            await asyncio.sleep(self.chance.expovariate(1 / (hours * HOUR)))
            if _time() > self.days * DAY:
                return
            yield f"worker-{self.chance.randrange(NODES)}"

    def _hit(self, name: str) -> None:
        self.hits += len(self._trainings_on(name))

    def _trainings_on(self, name: str) -> list[tuple[Training, int]]:
        found = []
        for pod in self.site.pods_on(name):
            training = self.site.training_of(pod)
            if training is not None and training.trains:
                found.append((training, int(pod["metadata"]["labels"][names.LABEL_NODE_RANK])))
        return found

    def _uncordon(self, machine: Machine) -> None:
        machine.is_cordoned = False
        self.site.place()

    def _patch(self, key: Key, **spec: Any) -> None:
        if self.sim.job(key) is not None:
            self.sim.server.patch(names.DDPJOBS, *key, {"spec": spec})

    def _soon(self, seconds: float, act: Callable[..., Any], *arguments: object) -> None:
        asyncio.get_running_loop().call_later(seconds, act, *arguments)

    def last_jobs(self) -> list[Json]:
        """Return the jobs at the end."""
        return [job for name in self.programs if (job := self.sim.job(Key(KEY.namespace, name))) is not None]

    @cached_property
    def placements(self) -> dict[str, list[tuple[float, int, bool]]]:
        """When the pods of each job and attempt were created, and when they got their nodes."""
        found: dict[str, list[tuple[float, int, bool]]] = defaultdict(list)
        for moment, change in self.sim.changes:
            labels = change.obj["metadata"].get("labels") or {}
            if change.resource is not names.PODS or names.LABEL_JOB_UID not in labels:
                continue
            is_bound = bool(change.obj["spec"].get("nodeName"))
            had_node = bool((change.before or {"spec": {}})["spec"].get("nodeName"))
            if change.type == "ADDED" or (is_bound and not had_node):
                number = int(labels[names.LABEL_ATTEMPT])
                found[labels[names.LABEL_JOB_UID]].append((moment, number, change.type != "ADDED"))
        return found

    def _are_finished(self) -> bool:
        return all((job.get("status") or {}).get("state") in ("Succeeded", "Failed") for job in self.last_jobs())


def judge(month: Month) -> Json:
    """Return the result of a month."""
    jobs = month.last_jobs()
    state = {job["metadata"]["name"]: (job.get("status") or {}).get("state") for job in jobs}
    is_good = {name: program.bug_at is None for name, program in month.programs.items()}
    bad = [name for name, good in is_good.items() if not good]
    ends = {
        job["metadata"]["name"]: [c["reason"] for c in job["status"]["conditions"] if c["type"] == "Failed"][:1]
        for job in jobs
    }
    lost = {
        name: ends[name]
        + [
            f"{failure['attempt']} {failure['reason']} on {failure.get('nodeName')}: {failure['message'][:60]}"
            for failure in job["status"]["failures"]
        ]
        for job in jobs
        if is_good[name := job["metadata"]["name"]] and state[name] == "Failed"
    }
    made = [_goodput(month, job) for job in jobs if state[job["metadata"]["name"]] == "Succeeded"]
    weight = sum(each["nodes"] * each["useful"] for each in made)
    return {
        "jobs": len(jobs),
        "days": round(month.ended_days, 1),
        "lost": lost,
        "unfinished": [name for name, each in state.items() if each not in ("Succeeded", "Failed")],
        "errors": [len(bad), sum(state[name] == "Failed" for name in bad)],
        "overlaps": len(overlaps(month.sim.changes, month.site.volumes.values())),
        "hits": month.hits,
        "restarts": sum(int((job.get("status") or {}).get("restarts") or 0) for job in jobs),
        "goodput": weight / max(1.0, sum(each["nodes"] * each["span"] for each in made)),
        "of_what_is_left": weight / max(1.0, sum(each["nodes"] * each["left"] for each in made)),
        "worst": sorted((round(each["useful"] / each["left"], 3), each["name"]) for each in made)[:5],
    }


def _goodput(month: Month, job: Json) -> Json:
    """Return the training time of a job that succeeded, the time that it took, and what of that the faults left."""
    uid, name = job["metadata"]["uid"], job["metadata"]["name"]
    program = month.programs[name]
    trainings = [training for (owner, _), training in sorted(month.site.trainings.items()) if owner == uid]
    trained = [training for training in trainings if training.first_step_time is not None]
    useful = program.steps * program.step_seconds
    span = (trained[-1].over_time or 0.0) - (trained[0].first_step_time or 0.0)
    again, costs = 0.0, 0.0
    for before, after in pairwise(trained):
        began, over = before.over_time or 0.0, after.first_step_time or 0.0
        away = max((end - began for start, end in month.outages if start <= began <= end), default=0.0)
        cost = program.startup_seconds + START_SECONDS + min(away, over - began) + _waited(month, uid, began, over)
        again += max(0, before.step - after.from_step) * program.step_seconds
        costs += min(cost, over - began)
    left = max(useful, span - again - costs)
    nodes = job["spec"]["numNodes"]
    return {"name": name, "nodes": nodes, "useful": useful, "span": span, "left": left}


def _waited(month: Month, uid: str, start: float, end: float) -> float:
    """Return for how long the pods of the attempts that began in this time waited for free nodes."""
    created: dict[int, list[float]] = defaultdict(list)
    bound: dict[int, list[float]] = defaultdict(list)
    for moment, number, is_bound in month.placements[uid]:
        if start < moment < end:
            (bound if is_bound else created)[number].append(moment)
    first = {number: min(moments) for number, moments in created.items()}
    over = dict(pairwise([*sorted(first), -1]))
    waited = 0.0
    for number, since in first.items():
        # An attempt of which some pods got no node ended before the next one.
        is_placed = len(bound[number]) >= len(created[number])
        waited += max(bound[number]) - since if is_placed else first.get(over[number], end) - since
    return waited


def table(result: Json) -> str:
    """Return the result as a Markdown table."""
    errors, failed = result["errors"]
    rows = [
        ("jobs with a good program that were lost", f"**{len(result['lost'])}** of {result['jobs'] - errors}"),
        ("jobs with an error in the program that failed", f"{failed} of {errors}"),
        ("overlapping writes", f"**{result['overlaps']}**"),
        ("faults that hit a training", f"{result['hits']}"),
        ("restarts", f"{result['restarts']}"),
        ("goodput", f"{100 * result['goodput']:.2f} %"),
        ("of what the faults leave", f"**{100 * result['of_what_is_left']:.2f} %**"),
    ]
    return f"{table_of(('', ''), rows)}\n\n{result['note']}"


def main() -> int:
    """Simulate and print."""
    parser = parser_of("tests.benchmarks.month", __doc__)
    parser.add_argument("--days", type=float, default=30.0)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)  # thousands of expected warnings
    began = time.process_time()
    month = Month(options.seed, options.days, options.jobs)
    run_in_simulated_time(month.run())
    result = judge(month)
    seconds, memory = time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    result["note"] = (
        f"{result['days']:g} days with seed {options.seed}, simulated in {seconds:.0f} s of CPU and {memory:.0f} MiB, "
        f"on {describe_machine(kubernetes=False)}."
    )
    print_table(options, "month", table(result))
    if result["lost"] or result["unfinished"]:
        for name, failures in result["lost"].items():
            print(f"lost: {name}", *failures, sep="\n  ", file=sys.stderr)
        print(f"unfinished: {result['unfinished']}\nworst: {result['worst']}", file=sys.stderr)
    errors, failed = result["errors"]
    is_good = not (result["lost"] or result["unfinished"] or result["overlaps"]) and errors == failed
    return 0 if is_good and result["of_what_is_left"] >= AIM else 1


def _time() -> float:
    return asyncio.get_running_loop().time()


if __name__ == "__main__":
    sys.exit(main())
