"""A run of the simulator: which story with which faults. Its text form is the argument of the replaying command."""

import asyncio
import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tests.controller.faketime import run as run_in_simulated_time
from tests.simulator.faults import CRASHES, At, OperatorKilledError, also_for_logs, at_writes, now_and_then
from tests.simulator.oracle import Outcome, check, check_undisturbed, outcome, story, without_logs
from tests.simulator.pool import an_elastic_simulation, check_sizes, elastic_story
from tests.simulator.scenarios import CHECKPOINT, SCENARIOS, Scenario, random_story
from tests.simulator.simulation import Simulation
from tests.simulator.site import Site
from tests.simulator.site_oracle import check_site
from tests.simulator.stories import SITE, STORIES, Story, a_random_story
from tests.simulator.watches import LOSSLESS, MODES

MORE_RECONCILES = 10
"""Reconciles that one fault may add to those of the same run without it."""
RANDOM = "random"
ELASTIC = "elastic"
"""A job with minNodes on nodes that come and go (``pool``); all else follows from the seed."""
ALONE = (ELASTIC, SITE)
"""Random runs that are not compared with one without faults: their oracle knows how each must end."""
_DOWNTIMES = (0.0, 0.0, 1.0, 10.0)
"""Even an operator that is killed five times in a row is back within ``NOTICE_SECONDS`` of the scenarios."""
_NUMBERS = ("order", "seed", "variant", "operators", "logs", "downtime")
_OPERATORS = (1, 1, 1, 1, 1, 1, 1, 2)


class ViolationError(AssertionError):
    """A run violates an invariant. The message has the command that replays it."""


@dataclass(frozen=True)
class Run:
    """Everything that determines a run.

    scenario: a name of ``SCENARIOS`` or ``STORIES``, or "random", "elastic" or "site": all else then follows from
    ``seed``. order: of the reports of pods. variant: other faults for the random story of a seed; all its variants are
    compared with the same run without faults. operators: how many work at the same time. logs: they read the logs of
    failed pods, in random runs with faults. downtime: seconds until a killed operator starts again.
    """

    scenario: str
    faults: tuple[At, ...] = ()
    watch: str = "prompt"
    order: int = 0
    seed: int = 0
    variant: int = 0
    operators: int = 1
    logs: int = 0
    downtime: int = 0

    def __str__(self) -> str:
        options = {key: getattr(self, key) for key in ("watch", *_NUMBERS)}
        unusual = [f"{key}={value}" for key, value in options.items() if value != getattr(Run, key)]
        return " ".join([self.scenario, *map(str, self.faults), *unusual])

    @property
    def is_alone(self) -> bool:
        """Whether it is not compared with a run without faults."""
        return self.scenario in ALONE or self.scenario in STORIES

    @property
    def command(self) -> str:
        return f"python -m tests.simulator replay {self}"

    @classmethod
    def parse(cls, words: Sequence[str]) -> "Run":
        """Return the run in words such as ``node-loss lost@7 watch=late order=1``. Raises ``ValueError``."""
        scenario, *rest = words
        if scenario not in (*SCENARIOS, *STORIES, RANDOM, *ALONE):
            raise ValueError(f"{scenario} is not one of {', '.join([*SCENARIOS, *STORIES, RANDOM, *ALONE])}")
        options: dict[str, Any] = dict(word.split("=") for word in rest if "=" in word)
        faults = tuple(At.parse(word) for word in rest if "=" not in word)
        numbers = {key: int(options[key]) for key in _NUMBERS if key in options}
        return cls(scenario, faults, options.get("watch", "prompt"), **numbers)


@dataclass(frozen=True)
class Result:
    """What a run did. ``writes``: the operator's writes in order, as "verb Kind name"."""

    outcome: Outcome
    story: Outcome
    writes: tuple[str, ...]
    simulation: Simulation

    @property
    def is_checked(self) -> bool:
        """Whether the API server refused each patch that was decided on an old state, as all clients rely on.

        After etcd was restored, a version may stand for another state: no client can tell, and any may overwrite.
        """
        return not self.simulation.server.ambiguous_patches


def execute(run: Run, *, is_calm: bool = False) -> Result:
    """Carry out a run; ``is_calm``: a random one without what disturbs it. Raises ``ViolationError``."""
    try:
        simulation = run_in_simulated_time(_live(run, is_calm=is_calm))
        if not simulation.server.ambiguous_patches:
            check(simulation)
        if run.scenario == ELASTIC and not simulation.server.ambiguous_patches:
            check_sizes(simulation.changes)
        if isinstance(simulation.kubelets, Site) and not simulation.server.ambiguous_patches:
            check_site(simulation.changes, simulation.kubelets, fails=story_of_run(run).fails)
        is_undisturbed = not run.is_alone and not run.faults and run.watch == "prompt" and run.operators == 1
        if is_calm or (run.scenario != RANDOM and is_undisturbed):
            check_undisturbed(simulation, 0 if is_calm else SCENARIOS[run.scenario].refused)
    except AssertionError as error:
        raise ViolationError(f"{error}\n  replay: {run.command}") from error
    writes = tuple(f"{call.verb} {call.resource.kind} {call.name}" for call in simulation.calls if call.is_write)
    return Result(outcome(simulation), story(simulation), writes, simulation)


def calm(run: Run) -> Result:
    """Carry out a random run without what disturbs it; the result is the same for all its variants."""
    return execute(replace(run, logs=0, variant=0), is_calm=True)


def compare(run: Run, calm_result: Result | None = None) -> Result:
    """Carry out a run, and compare its outcome with that without faults. Raises ``ViolationError``.

    calm_result: what ``calm`` returned for another variant of this run.
    """
    if run.is_alone:
        return execute(run)
    if run.scenario == RANDOM:
        expected, result = calm_result or calm(run), execute(run)
        pairs = [(expected.story, result.story)] if result.is_checked else []
    else:
        expected, result = undisturbed(run.scenario), execute(run)
        compares, world = SCENARIOS[run.scenario].compares, SCENARIOS[run.scenario].world
        more = result.simulation.reconciles() - expected.simulation.reconciles()
        is_bounded = len(run.faults) == 1 and run.watch == "prompt" and run.operators == 1 and not run.downtime
        if is_bounded and "create_errors" not in world and more > MORE_RECONCILES:
            raise ViolationError(f"{more:.0f} more reconciles than without the fault\n  replay: {run.command}")
        pairs = [(expected.story, result.story)] if compares != "nothing" else []
        if compares == "outcome" and run.operators == 1 and not _makes_other_objects(expected, run):
            pairs.append((expected.outcome, result.outcome))
    if run.logs:  # they show more than is known without them, and change nothing else
        pairs = [(without_logs(want), without_logs(got)) for want, got in pairs]
    for want, got in pairs:
        if differences := {key: (want[key], got[key]) for key in want if want[key] != got[key]}:
            text = "\n".join(f"  {key}: {a}\n    with faults: {b}" for key, (a, b) in differences.items())
            raise ViolationError(f"the outcome differs:\n{text}\n  replay: {run.command}")
    return result


@functools.cache
def undisturbed(scenario: str) -> Result:
    """Return the result of a scenario without faults."""
    return execute(Run(scenario))


def _makes_other_objects(expected: Result, run: Run) -> bool:
    """Whether a fault changes the number of objects: a create that is late is carried out twice.

    A create that fails beside a refused one is not sent again, because the refusal ends the attempt.
    """
    creates = [
        fault.kind
        for fault in run.faults
        if fault.write <= len(expected.writes) and expected.writes[fault.write - 1].startswith("create")
    ]
    has_refusal = SCENARIOS[run.scenario].refused > 0
    return any(kind == "late" or (has_refusal and kind not in CRASHES) for kind in creates)


async def _live(run: Run, *, is_calm: bool) -> Simulation:
    asyncio.get_running_loop().set_exception_handler(_report_but_for_killings)
    if run.scenario == RANDOM:
        scenario, simulation = _random_simulation(run, is_calm=is_calm)
    elif run.scenario == ELASTIC:
        scenario, simulation = _elastic_simulation(run.seed)
    elif run.is_alone:
        scenario, simulation = _site_simulation(run)
    else:
        scenario = SCENARIOS[run.scenario]
        simulation = Simulation(
            scenario.full_spec,
            at_writes(run.faults),
            seed=run.seed,
            watch=run.watch,
            order=run.order,
            operators=run.operators,
            reads_logs=bool(run.logs),
            downtime=run.downtime,
            **scenario.world,
        )
    await simulation.begin()
    await scenario.script(simulation)
    await simulation.rest()
    if simulation.job() is not None:
        simulation.delete_job()
    await simulation.until("nothing is left", lambda: not simulation.owned_objects())
    await simulation.rest()
    await simulation.end()
    return simulation


def _random_simulation(run: Run, *, is_calm: bool) -> tuple[Scenario, Simulation]:
    """Return a random story, and a simulation with random faults in three of four cases.

    A run in which logs are read differs from that with the same seed only by their faults, and by ``logTail``.
    """
    seed = run.seed
    chance = random.Random(f"run {seed}")
    nodes, restarts = chance.randint(2, 3), chance.randint(0, 3)
    spec = {"image": "trainer:1", "numNodes": nodes, "restartPolicy": {"maxRestarts": restarts}}
    spec |= chance.choice([{}, {}, {"ttlSecondsAfterFinished": 30}]) | chance.choice([{}, {}, CHECKPOINT])
    spec |= chance.choice([{}, {}, {"podRetention": "All"}, {"podRetention": "None"}])
    spec |= {"networkPolicy": "Isolated"} if random.Random(f"policy {seed}").random() < 0.25 else {}
    world: dict[str, Any] = {
        "sidecar": chance.choice(("none", "none", "ordinary", "native")),
        "skewed": chance.random() < 0.3,
    }
    faults: int | str = f"{seed} {run.variant}" if run.variant else seed
    chance = random.Random(f"run {faults}") if run.variant else chance
    choose = now_and_then(f"faults {faults}") if chance.random() < 0.75 else at_writes(())
    disturbances: dict[str, Any] = {
        "watch": chance.choice((*LOSSLESS, "dropped"))
        if (seed + run.variant) % 4
        else random.Random(faults).choice(MODES),
        "order": chance.randrange(6),
        "eager": chance.random() < 0.5,
        "downtime": chance.choice(_DOWNTIMES),
        "operators": chance.choice(_OPERATORS),
        "create_errors": chance.choice((0.0, 0.0, 0.0, 0.3)),
    }
    if run.logs:
        spec |= random.Random(f"tail {faults}").choice([{}, {"logTail": "Omit"}])
        choose = also_for_logs(choose, f"logs {faults}")
        disturbances |= {"reads_logs": True, "spoils_logs": random.Random(f"spoilt {faults}").random() < 0.5}
    if is_calm:
        choose, disturbances = at_writes(()), {}
    return Scenario(random_story), Simulation(spec, choose, seed=seed, **world, **disturbances)


def _elastic_simulation(seed: int) -> tuple[Scenario, Simulation]:
    """Return a story of nodes that come and go, with random faults in half of the cases."""
    chance = random.Random(f"elastic run {seed}")
    choose = now_and_then(f"faults {seed}") if chance.random() < 0.5 else at_writes(())
    watch, downtime = chance.choice(("prompt", *LOSSLESS)), chance.choice(_DOWNTIMES)
    operators = chance.choice(_OPERATORS)
    simulation = an_elastic_simulation(seed, choose, watch=watch, downtime=downtime, operators=operators)
    return Scenario(elastic_story), simulation


def story_of_run(run: Run) -> Story:
    """Return the story of a run on a ``Site``."""
    return a_random_story(run.seed) if run.scenario == SITE else STORIES[run.scenario]


def _site_simulation(run: Run) -> tuple[Scenario, Simulation]:
    """Return a story of nodes that fail; a random one with random faults of the operator in half of the cases."""
    story, chance = story_of_run(run), random.Random(f"site run {run.seed}")
    choose, world = at_writes(run.faults), {"watch": run.watch, "downtime": run.downtime, "operators": run.operators}
    if run.scenario == SITE:
        choose = now_and_then(f"faults {run.seed}") if chance.random() < 0.5 else choose
        world = {"watch": chance.choice(("prompt", *LOSSLESS)), "downtime": chance.choice(_DOWNTIMES)}
        world["operators"] = chance.choice(_OPERATORS)
    return Scenario(story.script), story.simulation(run.seed, choose, **world)


def _report_but_for_killings(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    if not isinstance(context.get("exception"), OperatorKilledError):
        loop.default_exception_handler(context)
