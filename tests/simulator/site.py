"""Nodes of a simulated run on which programs train by themselves, and what goes wrong with them.

Nodes with broken hardware, pods that end slowly, kubelets that are away for a while, drains, a shared dependency that
is away for all, and webhooks of other people.
"""

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any, Literal

from ddpjob.api import names
from ddpjob.api.exit_codes import RANKS
from ddpjob.api.names import Key, Resource
from ddpjob.api.objects import Json, element
from ddpjob.api.report import training_report
from ddpjob.engine.observed import Polled
from ddpjob_operator.cluster.base import NotFound
from tests.builders import ended, failed, running
from tests.simulator.kubelets import UNSCHEDULABLE, Kubelets, avoided, has_ended
from tests.simulator.programs import Program, Training
from tests.simulator.simulation import Simulation
from tests.simulator.volume import Volume
from tests.worlds.memory.store import Change

Defect = Literal["hook", "mount", "devices", "dying"]
"""What is wrong with a node.

hook: the runtime's hook fails, so no container starts. mount: a volume is stale, and the command is not found. devices:
one of its devices is missing. dying: a device fails after a minute or two of training, each time.
"""
HOOK_ERROR = (
    "failed to create containerd task: failed to create shim task: OCI runtime create failed: runc create failed: "
    "unable to start container process: error during container init: error running prestart hook #0: exit status 1, "
    "stderr: nvidia-container-cli: initialization error: nvml error: driver not loaded: unknown"
)
DYING_SECONDS = 100.0
"""Mean time until the device of a dying node fails."""
MARKED_SECONDS = 40.0
"""Time after which the control plane marks the pods of a node that does not respond."""
EVICTED_SECONDS = MARKED_SECONDS + 300.0
"""Time after which it deletes them."""
WEBHOOK_GRACE_SECONDS = 600
_READY = {"status": "True"}
_COMPLETED = {"status": "False", "reason": "PodCompleted"}
Webhook = Literal["none", "grace", "labels", "owner", "adds"]
"""What a webhook of another team does to new pods: a longer grace period, no labels, no owner, or one more label."""


@dataclass
class Machine:
    """A Kubernetes node with room for one pod.

    is_cordoned: no pod is placed on it. is_away: its kubelet does not respond; its containers run on, unless is_down.
    late: what its kubelet reports and does when it responds again.
    """

    name: str
    defect: Defect | None = None
    is_cordoned: bool = False
    is_away: bool = False
    is_down: bool = False
    late: list[Callable[[], None]] = field(default_factory=list)


class Site(Kubelets):
    """Places pods, lets their programs train, and stops them. programs: by the name of the job."""

    def __init__(self, *arguments: Any, machines: Iterable[Machine], **options: Any) -> None:
        super().__init__(*arguments, eager=False, **options)
        self.machines = {machine.name: machine for machine in machines}
        self.programs: dict[str, Program] = {}
        self.webhook: Webhook = "none"
        self.away_until = self.no_secret_until = 0.0
        self.volumes: dict[tuple[str, str], Volume] = defaultdict(Volume)
        self.trainings: dict[tuple[str, int], Training] = {}
        self.on_news: Callable[[Key], None] = lambda key: None
        self._luck = random.Random(f"site {self._seed}")
        self._is_placing = False
        self._jobs: dict[str, int] = {}

    # What the nodes do.

    def on_change(self, change: Change) -> None:
        """Schedule what the scheduler and the nodes do about a change of a pod."""
        if change.resource is not names.PODS:
            return
        if (change.type in ("ADDED", "DELETED") or has_ended(change.obj)) and not self._is_placing:
            self._is_placing = True
            self._later(self._luck.uniform(0.1, 1.0), self.place)
        was_deleted = change.before is not None and "deletionTimestamp" in change.before["metadata"]
        if change.type == "MODIFIED" and "deletionTimestamp" in change.obj["metadata"] and not was_deleted:
            act = partial(self._on_node, change.obj, partial(self._terminate, change.obj))
            self._later(self._luck.uniform(0.1, 1.0), act)

    def place(self) -> None:
        """Place the pods that wait, those of the oldest job first, each on any free node that its affinity allows."""
        self._is_placing = False
        used = self.used_nodes()
        free = [each for each in self.machines.values() if each.name not in used | {None} and _takes_pods(each)]
        for pod in sorted(self.waiting_pods(), key=self._age):
            fits = [machine for machine in free if machine.name not in avoided(pod)]
            if fits:
                free.remove(chosen := self._luck.choice(fits))
                self._bind(pod, chosen)
            elif not pod["status"].get("conditions"):
                super().report(pod, {"phase": "Pending", "conditions": [self._no_node(pod, used)]})

    def _no_node(self, pod: Json, used: Collection[str | None]) -> Json:
        """Return what the scheduler says: which nodes hold other pods, and which do not suit this one."""
        full = sum(machine.name in used and machine.name not in avoided(pod) for machine in self.machines.values())
        text = f"0/{len(self.machines)} nodes are available: {full} Insufficient nvidia.com/gpu. preemption: "
        text += f"0/{len(self.machines)} nodes are available: {full} No preemption victims found for incoming pod."
        return UNSCHEDULABLE | {"message": text}

    def _age(self, pod: Json) -> tuple[int, int]:
        """Order the pods of an older job before those of a younger, whichever its attempt is."""
        job = (pod["metadata"].get("labels") or {}).get(names.LABEL_JOB_UID, "")
        return self._jobs.setdefault(job, len(self._jobs)), int(pod["metadata"]["resourceVersion"])

    def _bind(self, pod: Json, machine: Machine) -> None:
        if self.place_on(machine.name, pod):
            start = partial(self._on_node, pod, partial(self._start, pod, machine))
            self._later(self._luck.uniform(1.0, 5.0), start)

    def _start(self, pod: Json, machine: Machine) -> None:
        known = self._known(pod)
        if known is None or "deletionTimestamp" in known["metadata"]:
            return
        if asyncio.get_running_loop().time() < self.no_secret_until:
            self.refuse(known, "CreateContainerConfigError")
            self._later(5.0, partial(self._on_node, pod, partial(self._start, pod, machine)))
        elif machine.defect == "hook":
            at = self._now()
            self.report(known, ended(128, message=HOOK_ERROR, at=at, reason="StartError"))
        else:
            self.report(known, running(podIP="192.0.2.1"))
            self._run(known, machine)

    def _run(self, known: Json, machine: Machine) -> None:
        """Do what the program of a pod that has started does on this node."""
        if machine.defect == "mount":
            text = "bash: torchrun: command not found"
            self._later(2.0, lambda: self.report(known, ended(127, message=text, at=self._now())))
        elif machine.defect == "devices":
            report = {"exception": "RanksError", "kind": "RanksImpossible", "message": "this node has 7 GPUs"}
            self._later(5.0, lambda: self.report(known, failed(RANKS, at=self._now(), rank=0, **report)))
        elif (training := self.training_of(known)) is not None:
            training.join(int(known["metadata"]["labels"][names.LABEL_NODE_RANK]), known)

    def training_of(self, pod: Json) -> Training | None:
        """Return the training that a pod is a part of; None for a probe, and for a pod without its labels."""
        labels = pod["metadata"].get("labels") or {}
        program = self.programs.get(labels.get(names.LABEL_JOB_NAME, ""))
        if program is None or names.LABEL_JOB_UID not in labels or names.LABEL_PROBE in labels:
            return None
        key = labels[names.LABEL_JOB_UID], int(labels[names.LABEL_ATTEMPT])
        if key not in self.trainings:
            job = self._server.store.get(names.DDPJOBS, pod["metadata"]["namespace"], labels[names.LABEL_JOB_NAME]) or {
                "spec": {}
            }
            size = int(((job.get("status") or {}).get("world") or job["spec"]).get("numNodes", 1))
            volume = self.volumes[_folder(pod)]
            self.trainings[key] = Training(program, volume, self, job=key[0], attempt=key[1], size=size)
        return self.trainings[key]

    def _terminate(self, pod: Json) -> None:
        """Send SIGTERM to a pod that is being deleted; when it has ended, its object goes."""
        known = self._known(pod)
        if known is None:
            return
        if has_ended(known):
            self.remove(known)
            return
        training, grace = self.training_of(known), float(known["metadata"]["deletionGracePeriodSeconds"])
        node_rank = int((known["metadata"].get("labels") or {}).get(names.LABEL_NODE_RANK, -1))
        if training is None or node_rank not in training.pods:
            self._later(self._luck.uniform(0.1, 3.0), lambda: self.report(known, ended(143, at=self._now())))
        else:
            training.terminate(node_rank, grace)

    def report(self, pod: Json, status: Json) -> None:
        """Write the status of a pod as soon as its kubelet responds; a deleted pod that has ended goes."""
        self._on_node(pod, partial(self._report, pod, status))

    def _report(self, pod: Json, status: Json) -> None:
        known = self._known(pod)
        if known is None:
            return
        is_over = has_ended({"status": status})
        seen = {"Ready": _READY, "ContainersReady": _READY} if status["phase"] == "Running" else {}
        seen |= {"Ready": _COMPLETED, "ContainersReady": _COMPLETED} if is_over else {}
        kept = {each["type"]: each for each in known["status"].get("conditions", ())}
        conditions = kept | {name: condition | {"type": name} for name, condition in seen.items()}
        super().report(known, status | {"conditions": list(conditions.values())})
        if "deletionTimestamp" in known["metadata"] and is_over:
            self._later(0.2, lambda: self.remove(known))

    def _on_node(self, pod: Json, act: Callable[[], None]) -> None:
        """Act now, or when the kubelet of the pod's node responds."""
        known = self._known(pod)
        machine = self.machines.get(str((known or pod)["spec"].get("nodeName")))
        if machine is not None and machine.is_away:
            machine.late.append(act)
        else:
            act()

    def _inject(self, resource: Resource, obj: Json) -> None:
        super()._inject(resource, obj)
        if resource is not names.PODS:
            return
        if self.webhook == "grace":
            obj["spec"]["terminationGracePeriodSeconds"] = WEBHOOK_GRACE_SECONDS
        elif self.webhook == "labels":
            obj["metadata"]["labels"] = {"app": "web"}
        elif self.webhook == "owner":
            obj["metadata"].pop("ownerReferences", None)
        elif self.webhook == "adds":
            obj["metadata"]["labels"]["team"] = "vision"

    # What trainings ask.

    def is_away(self) -> bool:
        """Return whether a shared dependency is away."""
        return asyncio.get_running_loop().time() < self.away_until

    def lifetime(self, pod: Json) -> float | None:
        """Return after how many seconds a device of the pod's node fails, or None."""
        known = self._known(pod)
        machine = self.machines.get(str((known or pod)["spec"].get("nodeName")))
        is_dying = machine is not None and machine.defect == "dying"
        return self._luck.expovariate(1 / DYING_SECONDS) if is_dying else None

    def now(self) -> datetime:
        return self._now()

    def has_news(self, training: Training) -> None:
        """Note that rank 0 shows another step."""
        meta = training.pods[0]["metadata"]
        self.on_news(Key(meta["namespace"], meta["labels"][names.LABEL_JOB_NAME]))

    def progress_of(self, key: Key) -> Polled | None:
        """Return what rank 0 of a job's newest attempt shows."""
        job = self._server.store.get(names.DDPJOBS, *key)
        number = int(((job or {}).get("status") or {}).get("attempt") or 0)
        training = self.trainings.get((job["metadata"]["uid"], number)) if job else None
        if training is None or not training.trains or training.program.reports == "none":
            return None
        saved = training.volume.step
        document = {"schema": 2, "phase": "train", "step": training.shown, "totalSteps": training.program.steps}
        document |= {"fenced": True} if training.program.fenced else {}
        if saved:
            document["checkpoint"] = {"step": saved, "path": f"{saved}.pt"}
        return Polled(training.pods[0]["metadata"]["name"], training_report(document))

    # What goes wrong.

    def lose_dependency(self, seconds: float) -> None:
        """Let a shared dependency be away: each training fails within 20 s, and each that starts meanwhile."""
        self.away_until = asyncio.get_running_loop().time() + seconds
        for training in self.trainings.values():
            if training.trains:
                training.lose_dependency()

    def drain(self, name: str) -> None:
        """Cordon a node and evict its pods, as ``kubectl drain`` does."""
        self.machines[name].is_cordoned = True
        condition = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
        for pod in self.pods_on(name):
            self._mark(pod, condition)
            self._delete(pod)

    def flap(self, name: str, seconds: float) -> None:
        """Let the kubelet of a node be away; its containers run on."""
        machine = self.machines[name]
        machine.is_away = True
        self._later(min(MARKED_SECONDS, seconds / 2), partial(self._mark_unready, machine, "False"))
        self._later(EVICTED_SECONDS, partial(self._evict, machine))
        self._later(seconds, partial(self._respond, machine))

    def switch_off(self, name: str, seconds: float) -> None:
        """Let a node lose its power, with all that runs on it, and come back."""
        self.machines[name].is_down = True
        for pod in self.pods_on(name):
            if (training := self.training_of(pod)) is not None:
                training.lose(int(pod["metadata"]["labels"][names.LABEL_NODE_RANK]))
        self.flap(name, seconds)

    def crash(self, name: str, status: Json | None = None) -> None:
        """Let the trainer on a node end by SIGSEGV, or with this status."""
        for pod in self.pods_on(name):
            training, labels = self.training_of(pod), pod["metadata"]["labels"]
            if training is not None and (node_rank := int(labels[names.LABEL_NODE_RANK])) not in training.ended:
                training.lose(node_rank)
                self.report(pod, status or ended(139, at=self._now()))

    def show_pending(self, name: str, seconds: float) -> None:
        """Let a kubelet show the running pods of its node as Pending for a moment; their containers run on."""
        for pod in self.pods_on(name):
            shown = {key: pod["status"][key] for key in ("containerStatuses", "conditions")}
            waiting = {"name": names.TRAINER_CONTAINER, "state": {"waiting": {"reason": "ContainerCreating"}}}
            self._write(pod, {"phase": "Pending", "containerStatuses": [waiting]})
            self._later(seconds, partial(self._on_node, pod, partial(self._report, pod, {"phase": "Running"} | shown)))

    def _respond(self, machine: Machine) -> None:
        late, machine.late, machine.is_away = machine.late, [], False
        was_down, machine.is_down = machine.is_down, False
        for pod in self.pods_on(machine.name) if was_down else ():
            self._report(pod, ended(137, at=self._now(), reason="ContainerStatusUnknown"))
        self._mark_unready(machine, "True")
        for act in late:
            act()
        self.place()

    def _mark_unready(self, machine: Machine, status: str) -> None:
        if machine.is_away or status == "True":
            for pod in self.pods_on(machine.name):
                self._mark(pod, {"type": "Ready", "status": status})

    def _evict(self, machine: Machine) -> None:
        for pod in self.pods_on(machine.name) if machine.is_away else ():
            self._mark(pod, {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"})
            self._delete(pod)

    def pods_on(self, name: str) -> list[Json]:
        """Return the pods on a node that have not ended."""
        pods = [pod for pod in self._server.store.all(names.PODS) if pod["spec"].get("nodeName") == name]
        return [pod for pod in pods if not has_ended(pod)]

    def _mark(self, pod: Json, condition: Json) -> None:
        known = self._known(pod)
        if known is None:
            return
        others = [each for each in known["status"].get("conditions", ()) if each["type"] != condition["type"]]
        self._write(known, {"conditions": [*others, condition]})

    def _delete(self, pod: Json) -> None:
        meta = pod["metadata"]
        try:
            self._server.delete(names.PODS, meta["namespace"], meta["name"], uid=meta["uid"])
        except NotFound:
            return

    def _later(self, seconds: float, act: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(seconds, act)


def a_site(simulation: Simulation, machines: Iterable[Machine], programs: Mapping[str, Program], seed: int) -> Site:
    """Replace the nodes of a simulation."""
    kubelets = simulation.kubelets
    site = Site(kubelets._server, str(seed), kubelets._now, machines=machines)
    site.programs |= programs
    simulation.kubelets = site
    simulation.progress_of = site.progress_of
    site.on_news = simulation.poll
    return site


def machines(number: int, **defects: Defect) -> list[Machine]:
    """Return nodes ``worker-0`` and so on. defects: by name, with an underscore for the dash."""
    return [Machine(f"worker-{place}", defects.get(f"worker_{place}")) for place in range(number)]


def _takes_pods(machine: Machine) -> bool:
    return not (machine.is_cordoned or machine.is_away)


def _folder(pod: Json) -> tuple[str, str]:
    """Return the claim that the trainer mounts, and its subPath."""
    claims = {
        volume["name"]: volume["persistentVolumeClaim"]["claimName"]
        for volume in pod["spec"].get("volumes", ())
        if "persistentVolumeClaim" in volume
    }
    trainer = element(pod["spec"]["containers"], "name", names.TRAINER_CONTAINER)
    mounts = [mount for mount in trainer.get("volumeMounts", ()) if mount["name"] in claims]
    return (claims[mounts[0]["name"]], mounts[0].get("subPath", "")) if mounts else (pod["metadata"]["uid"], "")
