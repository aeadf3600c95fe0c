"""The stories of a job whose program trains by itself on nodes that fail, by name (``site``).

Each ends when the job has ended. The oracle then asks whether attempts wrote beside each other, and whether a job whose
program is good was lost.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddpjob.api import names
from ddpjob.api.names import Key
from ddpjob.api.objects import Json
from ddpjob.engine.state import RUN_SECONDS
from tests.builders import ended
from tests.simulator.faults import Choose
from tests.simulator.programs import Program
from tests.simulator.simulation import KEY, Simulation, now
from tests.simulator.site import Defect, Machine, Site, Webhook, a_site, machines

Tell = Callable[[Simulation, Site], Awaitable[None]]
STORIES: dict[str, "Story"] = {}
SITE = "site"
"""A random story of this kind: all follows from the seed."""
STORY_PATIENCE = 200_000.0
NEXT = Key(KEY.namespace, "next")
"""A job that comes after, with the same claim."""
CLAIM = "trainings"
MAX_LOSSES = 2
"""How often a job may meet the same broken device: after two such failures the node is avoided."""
LONG_GRACE: Json = {"template": {"spec": {"terminationGracePeriodSeconds": 120}}}
MAX_DELAY_SECONDS = 400.0
"""The longest delay before a restart, with the start of its pods."""
BUG_SECONDS = 120.0
"""A job whose program fails before its first step each time has failed after this time, from the first failure on."""


@dataclass(frozen=True)
class Story:
    """A program, nodes, and what happens. fails: the program has an error, so the job must fail."""

    tell: Tell
    program: Program
    machines: Callable[[], Sequence[Machine]]
    spec: Json = field(default_factory=dict)
    fails: bool = False

    def simulation(self, seed: int, choose: Choose, **world: Any) -> Simulation:
        """Return the simulation, before its start."""
        spec = {"image": "trainer:1", "numNodes": 2, "checkpoint": {"claimName": CLAIM, "mountPath": "/ckpt"}}
        simulation = Simulation(spec | self.spec, choose, seed=seed, **world)
        simulation.patience = STORY_PATIENCE
        a_site(simulation, self.machines(), {key.name: self.program for key in (KEY, NEXT)}, seed)
        return simulation

    async def script(self, simulation: Simulation) -> None:
        """Carry the story out, and wait for the end of the job."""
        site = simulation.kubelets
        assert isinstance(site, Site)
        simulation.server.create(names.CLAIMS, KEY.namespace, _claim())
        await self.tell(simulation, site)
        await simulation.until("the job has ended", simulation.is_finished)
        await simulation.until("all nodes respond", lambda: not any(each.is_away for each in site.machines.values()))


def _story(
    name: str,
    program: Program | None = None,
    *,
    nodes: int = 4,
    defects: Mapping[str, Any] | None = None,
    fails: bool = False,
    **spec: Any,
) -> Callable[[Tell], Tell]:
    def register(tell: Tell) -> Tell:
        made = lambda: machines(nodes, **(defects or {}))  # noqa: E731
        STORIES[name] = Story(tell, program or Program(), made, spec, fails)
        return tell

    return register


SAVES = Program(startup_seconds=2.0, end_seconds=25.0)
"""Loads soon after its start, and saves for up to 25 s after SIGTERM, without a fence."""
LINGERS = Program(startup_seconds=2.0, end_seconds=25.0, notices=False)
"""The same, and a rank that has lost its peers hangs until SIGTERM."""
HANGS = Program(startup_seconds=2.0, end_seconds=25.0, notices=False, reports="none")
"""The same under torchrun, which reports nothing."""


async def train(sim: Simulation, site: Site, seconds: float = 200.0) -> None:
    """Wait until the job has trained for some time."""
    await sim.until("the job trains", lambda: _trains(sim, site) or sim.is_finished())
    await sim.pause(seconds)


def _trains(sim: Simulation, site: Site) -> bool:
    uid = (sim.job() or {"metadata": {"uid": ""}})["metadata"]["uid"]
    return any(training.trains for (job, _), training in site.trainings.items() if job == uid)


def node_of(sim: Simulation, node_rank: int) -> str | None:
    """Return the node of a pod of the recorded attempt, if it has one."""
    name = (sim.pods().get(node_rank) or {"spec": {}})["spec"].get("nodeName")
    return None if name is None else str(name)


@_story("trains-without-trouble", SAVES)
async def _trains_without_trouble(sim: Simulation, site: Site) -> None:
    sim.create_job()


# Broken hardware. The node that is drained is replaced by one that is broken; others are free.


async def _drained_to_a_broken_node(sim: Simulation, site: Site) -> None:
    """After a drain, the only free nodes are broken; good ones are free soon."""
    for name in ("worker-3", "worker-4"):
        site.machines[name].is_cordoned = True
    sim.create_job()
    await train(sim, site)
    if (node := node_of(sim, 1)) is not None:
        site.drain(node)
    await sim.pause(100.0)
    for name in ("worker-3", "worker-4"):
        site.machines[name].is_cordoned = False
    site.place()


for _defect in ("hook", "mount", "devices"):
    _story(f"broken-{_defect}", nodes=5, defects={"worker_2": _defect})(_drained_to_a_broken_node)


@_story("dying-device", Program(steps=3000), nodes=3, defects={"worker_1": "dying"})
async def _dying_device(sim: Simulation, site: Site) -> None:
    """A device of one node fails again and again at other steps; after the second time another node is free."""
    site.machines["worker-2"].is_cordoned = True
    sim.create_job()
    await sim.until("two losses", lambda: len(_device_losses(sim)) >= MAX_LOSSES or sim.is_finished())
    site.machines["worker-2"].is_cordoned = False
    site.place()
    await sim.until("the job has ended", sim.is_finished)
    losses = len(_device_losses(sim))
    assert losses <= MAX_LOSSES, f"{losses} attempts ended on the broken node"


# A shared dependency is away. Each attempt fails within 20 s, with errors of connections and of I/O.


def _outage(name: str, program: Program, seconds: float) -> None:
    @_story(name, program)
    async def tell(sim: Simulation, site: Site) -> None:
        sim.create_job()
        await train(sim, site)
        site.lose_dependency(seconds)
        await sim.pause(seconds + 1.0)


_outage("outage-of-5-minutes-under-torchrun", Program(reports="none", notices=False), 300.0)
_outage("outage-of-20-minutes-under-torchrun", Program(reports="none"), 1200.0)


# Slow ends.


async def _a_rank_crashes(sim: Simulation, site: Site) -> None:
    """A rank crashes; the others save for some time after SIGTERM."""
    sim.create_job()
    for _ in range(2):
        await train(sim, site)
        if (node := node_of(sim, 1)) is not None:
            site.crash(node)
        await sim.pause(5.0)


_story("slow-end", SAVES)(_a_rank_crashes)
_story("slow-end-of-hanging-ranks", LINGERS)(_a_rank_crashes)
_story("slow-end-under-torchrun", HANGS)(_a_rank_crashes)
_story("slow-end-with-a-fence", Program(startup_seconds=2.0, end_seconds=25.0, notices=False, fenced=True))(
    _a_rank_crashes
)


@_story("many-drains", Program(steps=12_000, end_seconds=5.0))
async def _many_drains(sim: Simulation, site: Site) -> None:
    """101 drains while the job trains on."""
    sim.create_job()
    for number in range(101):
        await train(sim, site, 70.0)
        if (node := node_of(sim, number % 2)) is None:
            return
        site.drain(node)
        await sim.pause(10.0)
        site.machines[node].is_cordoned = False
        site.place()


def _with_webhook(webhook: Webhook, seconds: float, then: Tell) -> Tell:
    async def tell(sim: Simulation, site: Site) -> None:
        site.webhook = webhook
        asyncio.get_running_loop().call_later(seconds, setattr, site, "webhook", "none")
        asyncio.get_running_loop().call_later(seconds + 0.1, site.place)
        await then(sim, site)

    return tell


_story("grace-raised-by-a-webhook", Program(end_seconds=300.0, notices=False))(
    _with_webhook("grace", 1e6, _a_rank_crashes)
)


@_story("resumed-below-a-raised-grace", Program(end_seconds=300.0))
async def _resumed(sim: Simulation, site: Site) -> None:
    """The user suspends and resumes the job while its pods save for minutes."""
    site.webhook = "grace"
    sim.create_job()
    await train(sim, site)
    sim.patch_job(suspend=True)
    await sim.pause(60.0)
    sim.patch_job(suspend=False)


# Foreign webhooks.

_story("labels-stripped-by-a-webhook", nodes=8)(_with_webhook("labels", 600.0, _trains_without_trouble))
_story("owner-stripped-by-a-webhook", nodes=8)(_with_webhook("owner", 600.0, _trains_without_trouble))


# Kubelets that are away, while their pods run on.


@_story("flap-longer-than-the-grace", LINGERS, **LONG_GRACE)
async def _flap(sim: Simulation, site: Site) -> None:
    """The user requests a restart while both kubelets are away."""
    sim.create_job()
    await train(sim, site)
    for node_rank in sim.pods():
        if (node := node_of(sim, node_rank)) is not None:
            site.flap(node, 280.0)
    await sim.pause(50.0)
    sim.patch_job(restartedAt="2026-03-01T12:30:00Z")
    await sim.pause(280.0)


@_story("pod-shown-as-pending")
async def _shown_as_pending(sim: Simulation, site: Site) -> None:
    """A kubelet shows a running pod as Pending once: that is one observation, and no restart follows."""
    sim.create_job()
    await train(sim, site)
    if (node := node_of(sim, 1)) is not None:
        site.show_pending(node, 1.0)
    await sim.until("the job has ended", sim.is_finished)
    is_disturbed = bool(sim.log) or sim.watch != "prompt"
    assert is_disturbed or sim.attempt() == 1, "a running pod was taken for a lost one"


@_story("upload-of-20-minutes", Program(upload_seconds=1200.0))
async def _upload(sim: Simulation, site: Site) -> None:
    """Rank 0 uploads the model long after the others have ended."""
    sim.create_job()


@_story("secret-absent-for-20-minutes")
async def _absent_secret(sim: Simulation, site: Site) -> None:
    sim.create_job()
    await train(sim, site)
    site.no_secret_until = asyncio.get_running_loop().time() + 1200.0
    if (node := node_of(sim, 1)) is not None:
        site.drain(node)
    await sim.pause(1200.0)


@_story("avoided-node-while-old-pods-end", Program(end_seconds=60.0, notices=False, fenced=True), nodes=3, **LONG_GRACE)
async def _avoided_while_old_pods_end(sim: Simulation, site: Site) -> None:
    """Two crashes on one node; the pods beside it hold their node for a minute, and a spare one is free."""
    site.machines["worker-2"].is_cordoned = True
    sim.create_job()
    for _ in range(2):
        await train(sim, site, 100.0)
        attempt = sim.attempt()
        site.crash("worker-1")
        await sim.next_attempt(attempt)
        site.machines["worker-2"].is_cordoned = sim.attempt() < 3
        site.place()
    await sim.until("attempt 3 runs", lambda: sim.is_finished() or (sim.is_running() and sim.attempt() >= 3))
    is_disturbed = bool(sim.log) or sim.watch != "prompt"
    assert is_disturbed or "worker-1" not in map(_node_name, sim.pods().values()), "the broken node is used again"


# Other jobs on the volume.


@_story("next-job-on-the-claim", SAVES)
async def _next_job(sim: Simulation, site: Site) -> None:
    """The user deletes the job, and creates another on the same claim while its pods save."""
    sim.create_job()
    await train(sim, site)
    sim.delete_job()
    sim.create_job(NEXT)
    await sim.until("the next job has ended", lambda: _state(sim, NEXT) in ("Succeeded", "Failed"))
    sim.server.delete(names.DDPJOBS, *NEXT)


@_story("orphans", SAVES)
async def _orphans(sim: Simulation, site: Site) -> None:
    """The user deletes the job with ``--cascade=orphan``, applies it again, and deletes the old pods an hour later."""
    sim.create_job()
    await train(sim, site, 100.0)
    old = list(sim.pods().values())
    for pod in old:
        body: Json = {"metadata": {"ownerReferences": []}}
        sim.server.patch(names.PODS, KEY.namespace, pod["metadata"]["name"], body)
    sim.delete_job()
    sim.create_job()
    await sim.pause(600.0)
    for pod in old:
        site._delete(pod)
    await sim.pause(60.0)


# Programs with an error.


@_story("bug-before-the-first-step", Program(bug_at=0), fails=True)
async def _bug_at_start(sim: Simulation, site: Site) -> None:
    sim.create_job()
    await sim.until("a first failure", lambda: bool(sim.status().get("failures")))
    first = asyncio.get_running_loop().time()
    await sim.until("the job has failed", sim.is_finished)
    took = asyncio.get_running_loop().time() - first
    is_disturbed = bool(sim.log) or sim.watch != "prompt"
    assert is_disturbed or took <= BUG_SECONDS, f"a program that cannot start ended its job only after {took:.0f} s"


_story("bug-at-a-step", Program(bug_at=150), fails=True)(_trains_without_trouble)
_story("bug-at-a-step-under-torchrun", Program(bug_at=150, reports="none"), fails=True)(_trains_without_trouble)


# Random stories.


async def _several(sim: Simulation, site: Site) -> None:
    """Let several of the above happen, each after some progress; one node may break after the first."""
    chance = random.Random(f"several {sim.seed}")
    site.webhook = chance.choice(("none", "none", "none", "grace", "adds"))
    defect: Defect | None = chance.choice((None, None, "hook", "mount", "devices", "dying"))
    if defect == "dying" and site.programs[KEY.name].reports == "none":
        defect = None  # nothing shows that a device failed: each such failure counts
    sim.create_job()
    for _ in range(chance.randint(2, 6)):
        await train(sim, site, chance.uniform(80.0, 400.0))
        if sim.is_finished():
            return
        site.machines["worker-1"].defect = defect
        await _one(sim, site, chance)
        for machine in site.machines.values():
            machine.is_cordoned = False
        site.place()


async def _one(sim: Simulation, site: Site, chance: random.Random) -> None:
    what = chance.choice(("crash", "drain", "flap", "outage", "power", "restart", "suspend", "runtime"))
    node = node_of(sim, chance.choice((0, 1)))
    sim.log.append(f"{now():%H:%M:%S} {what} on {node}")
    if what == "outage":
        site.lose_dependency(seconds := chance.uniform(60.0, 1200.0))
        await sim.pause(seconds)
        if site.programs[KEY.name].reports == "none":  # to make progress, an attempt has to run for so long
            await sim.pause(MAX_DELAY_SECONDS + RUN_SECONDS)
    elif what == "restart":
        sim.patch_job(restartedAt=now().isoformat().replace("+00:00", "Z"))
    elif what == "suspend":
        sim.patch_job(suspend=True)
        await sim.pause(chance.uniform(1.0, 100.0))
        sim.patch_job(suspend=False)
    elif node is not None:
        seconds = chance.uniform(5.0, 280.0)
        acts: dict[str, Callable[[], None]] = {
            "crash": lambda: site.crash(node),
            "runtime": lambda: site.crash(node, ended(137, at=now(), reason="ContainerStatusUnknown")),
            "drain": lambda: site.drain(node),
            "flap": lambda: site.flap(node, seconds),
            "power": lambda: site.switch_off(node, seconds + 300.0),
        }
        acts[what]()
        if what == "flap" and chance.random() < 0.5:  # at the same time
            await sim.pause(chance.uniform(0.0, seconds))
            await _one(sim, site, chance)


def a_random_story(seed: int) -> Story:
    """Return a random story with a random program; one of eight programs has an error."""
    chance = random.Random(f"story {seed}")
    has_bug = chance.random() < 0.125
    program = Program(
        steps=chance.randint(600, 3000),
        end_seconds=chance.choice((0.0, 5.0, 20.0, 28.0, 100.0)),
        fenced=chance.random() < 0.3,
        reports=chance.choice(("exact", "exact", "coarse", "none")),
        notices=chance.random() < 0.6,
        bug_at=chance.choice((0, 150, 500)) if has_bug else None,
    )
    nodes = chance.randint(4, 6)
    tell = _trains_without_trouble if has_bug else _several
    return Story(tell, program, lambda: machines(nodes), fails=has_bug)


def _device_losses(sim: Simulation) -> set[int]:
    """Return the attempts that ended because a device failed."""
    jobs = (change.obj for _, change in sim.changes if change.resource is names.DDPJOBS)
    failures = [failure for job in jobs for failure in (job.get("status") or {}).get("failures", ())]
    return {failure["attempt"] for failure in failures if failure["reason"] == "DeviceFailed"}


def _node_name(pod: Json) -> str:
    return str(pod["spec"].get("nodeName"))


def _state(sim: Simulation, key: Key) -> str:
    return str(((sim.job(key) or {}).get("status") or {}).get("state"))


def _claim() -> Json:
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": CLAIM, "namespace": KEY.namespace},
        "spec": spec,
    }
