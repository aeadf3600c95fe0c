"""Labelled situations of jobs (``tests/situations``): how each is reached, and what ``ddpjob why`` answers.

A situation has a ``name``, the ``source`` of its texts, what happens to the pod of one ``node`` (its rank, or 0), and
a ``label``. The engine itself makes the status of the job; events, claims and logs are read only if
``needed`` asks for them, as the client does.

What happens is one of
    unschedulable: the scheduler's text. waiting: [reason, message] of the container, or of the container ``init``.
    pending, preparing: {} or more of the pod's status, before and after the kubelet has accepted it.
    status: of a pod that ends from outside; with ``deleting``, and ``disruption``, a reason of DisruptionTarget. gone.
    failed: how the program ends, see ``_failed``. report: the same as a report of ddprun, with ``peer_reports``.
    refused: the API server's text, or [reason, text]. problem: [reason, text] of a create.
    queue: of the job; workload: [type, status, reason, message] of a condition of its Workload.
    steps: what is done one after the other, see ``_STEPS``.
and more of it: events ([seconds ago, type, reason, message, component] about the pod), claims, spec, pod_spec,
after (seconds), attempts, more (node: what happens to its pod).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import yaml

from ddpjob.api import names
from ddpjob.api.objects import Json
from ddpjob.api.pod_view import pod_view
from ddpjob.api.times import timestamp
from ddpjob.client.snapshot import Snapshot
from ddpjob.client.verdict.explain import explain, needed
from ddpjob.client.verdict.explanation import Explanation
from ddpjob.engine.actions import EngineSettings, Problem
from ddpjob.engine.evidence import needs_log
from tests.builders import NOW, SETTINGS, UID, World, a_job, ended, failed, running
from tests.engine.test_plain_scripts import BLOCK

FOLDER = Path(__file__).parents[1] / "situations"
_TERMINATION_BYTES = 2048
"""What a kubelet keeps of a log (FallbackToLogsOnError)."""
_LIBRARIES = "/usr/local/lib/python3.12/dist-packages/"
_LOST = {
    "gloo": "RuntimeError: [../gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.9]:4711",
    "aborted": "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 0.",
    "store": "torch.distributed.DistNetworkError: failed to recv, got 0 bytes",
    "nccl": "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3384, remote process exited or "
    "there was a network error, NCCL version 2.27.5\nncclRemoteError: A call failed possibly due to a network error or "
    "a remote process exiting prematurely.\nLast error:\nsocketProgress: Connection closed by remote peer 10.0.0.9",
}
"""What a rank logs when a peer has ended."""


def situations() -> dict[str, list[Json]]:
    """Return the situations by family."""
    return {path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.yaml"))}


def answer(situation: Json, *, pods_are_gone: bool = False) -> Explanation:
    """Return what ``ddpjob why`` says in this situation, or after its pods and their logs were deleted."""
    reached = Reached(situation)
    if pods_are_gone:
        reached.facts["pods"], reached.logs = [], {}
    return reached.explanation()


class Reached:
    """A situation, after everything in it has happened."""

    def __init__(self, situation: Json) -> None:
        self.situation = situation
        self.node = int(situation.get("node", 0))
        self.logs: dict[str, str] = {}
        self.facts: Json = {}
        self.world = World(self._job())
        if "refused" in situation:
            given = situation["refused"]
            refuse(self.world, *([given] if isinstance(given, str) else reversed(given)))
        elif "queue" in situation:
            self._queue()
        elif not any(_name(step) in _BEFORE_THE_OPERATOR for step in situation.get("steps", ())):
            self.world.settle()
        if "problem" in situation:
            reason, text = situation["problem"]
            self.world.problems = (Problem(reason, names.SERVICES, "mnist-0a1b2", text),)
            self.world.settle()
        self._end() if {"failed", "report", "status", "gone"} & situation.keys() else self._start()
        for step in situation.get("steps", ()):
            _STEPS[_name(step)](self, step[_name(step)] if isinstance(step, dict) else None)

    def _job(self) -> Json:
        has_ended = {"failed", "report", "status", "gone"} & self.situation.keys() and "attempts" not in self.situation
        spec: Json = {"nprocPerNode": 2, "numNodes": self.situation.get("nodes", 3 if has_ended else 2)}
        if has_ended:
            spec["restartPolicy"] = {"maxRestarts": 0, "maxTotalRestarts": 0}
        job = a_job(**spec | self.situation.get("spec", {}))
        job["metadata"]["creationTimestamp"] = timestamp(NOW)
        return job

    @property
    def nodes(self) -> int:
        return int(self.world.job["spec"]["numNodes"])

    def _queue(self) -> None:
        self.world.job["metadata"]["labels"] = {names.LABEL_QUEUE: self.situation["queue"]}
        self.world.settings = EngineSettings(kueue=self.situation.get("kueue", True))
        self.world.found[names.FLAVORS, "h100"] = {"metadata": {"name": "h100"}, "spec": {}}
        self.world.settle()
        if (condition := self.situation.get("workload")) is not None:
            (workload,) = self.world.groups[names.WORKLOADS].values()
            found = dict(zip(("type", "status", "reason", "message"), condition, strict=True))
            workload["status"] = {"conditions": [found | {"lastTransitionTime": timestamp(self.world.now)}]}
            self.world.settle()

    # Pods that wait

    def _start(self) -> None:
        """Let the pod wait. What happens to the pod of node 0 happens to all; before a later one, the others run."""
        kinds = ("unschedulable", "waiting", "pending", "preparing")
        if not {*kinds} & self.situation.keys():
            return
        for rank in range(self.nodes):
            self.world.set_pod(rank, running())
            if self.node in (0, rank):
                self._wait(rank, self.situation)
            if (more := self.situation.get("more", {}).get(rank)) is not None:
                self._wait(rank, more)
        self.world.settle()
        after = self.situation.get("after", 60 if "preparing" in self.situation else 0)
        for _ in range(2):  # the operator also looks in between
            self.world.forward(after / 2)
            self.world.settle()

    def _wait(self, rank: int, what: Json) -> None:
        node: str | None = f"worker-{rank}"
        if (text := what.get("unschedulable")) is not None:
            status, node = unschedulable(text), None
        elif "waiting" in what:
            status = waits_for(*what["waiting"], init=what.get("init")) | {"startTime": timestamp(NOW)}
        elif "preparing" in what:
            condition = {"type": "PodReadyToStartContainers", "status": "False"}
            status = {"startTime": timestamp(NOW), "conditions": [condition]} | what["preparing"]
        else:
            status, node = what["pending"], node if what.get("placed") else None
        pod = self.world.set_pod(rank, {"phase": "Pending"} | status, node=node)  # type: ignore[arg-type]
        pod["spec"] |= self.situation.get("pod_spec", {})

    # Pods that end

    def _end(self) -> None:
        world = self.world
        world.lingering = True  # the other pods save, and end later
        if not self._never_starts:
            world.run_all()
            world.settle()
        for attempt in range(1, self.situation.get("attempts", 1) + 1):
            if attempt > 1:
                world.settle_after_backoff()
                world.run_all()
                world.settle()
            world.forward(5)
            self._fail()
            self._see_logs()
            world.settle()
        if {"failed", "report"} & self.situation.keys() and "attempts" not in self.situation:
            world.forward(130)  # until it is known that no Kubernetes node is lost
            world.settle()

    @property
    def _never_starts(self) -> bool:
        what = self.situation.get("failed", {})
        return what.get("reason") == "StartError" or what.get("seconds", 600) < 10

    def _fail(self) -> None:
        world, situation = self.world, self.situation
        name = world.pod(self.node)["metadata"]["name"]
        if situation.get("gone"):
            del world.pods[name]
        elif "status" in situation:
            status = running() if situation["status"]["phase"] == "Running" else dict(situation["status"])
            if "disruption" in situation:
                target = {"type": "DisruptionTarget", "status": "True", "reason": situation["disruption"]}
                status["conditions"] = [target | {"lastTransitionTime": timestamp(world.now)}]
            pod = world.set_pod(self.node, status, node=f"worker-{self.node}")
            if situation.get("deleting"):
                deadline = timestamp(world.now + timedelta(seconds=30))
                pod["metadata"] |= {"deletionTimestamp": deadline, "deletionGracePeriodSeconds": 30}
        elif "report" in situation:
            for rank in range(self.nodes if situation.get("peer_reports") else 0):
                lost = failed(1, cause="peer", kind="PeerLost", message="connection closed", at=world.now)
                world.set_pod(rank, lost, node=f"worker-{rank}")
            code = situation["report"]["code"]
            more = {key: value for key, value in situation["report"].items() if key != "code"}
            world.set_pod(self.node, failed(code, at=world.now, **more), node=f"worker-{self.node}")
        else:
            for rank in range(self.nodes):
                if (status := self._failed(rank, situation["failed"])) is not None:
                    world.set_pod(rank, status, node=f"worker-{rank}")

    def _failed(self, node: int, what: Json) -> Json | None:
        """Return the status of a node's pod after its program ended; None if it runs on.

        code: of the container. log: its end, or raise: the traceback in it (``_traceback``). launcher: torchrun writes
        its block after it, with the global rank and rank_code. reason, message: of the kubelet. seconds: how long the
        program ran. peers: what the other nodes log; "same" as this one, "running" if they run on. later: by how many
        seconds it ended after its peers.
        """
        peers, is_peer = what.get("peers", "same" if self._never_starts else "silent"), node != self.node
        if is_peer and peers == "running":
            return None
        rank = 2 * node if is_peer else what.get("rank", 2 * node)
        code, reason, message, seconds = 1, "", "", 600
        if not is_peer or peers == "same":
            code, reason, seconds = what.get("code", 1), what.get("reason", ""), what.get("seconds", 600)
            message = what.get("message", "")
            text = what.get("log", _traceback(rank, **what["raise"]) if "raise" in what else "")
        else:
            text = _traceback(rank, at="train.py:90", error=_LOST[peers]) if peers in _LOST else ""
        if what.get("launcher") == "torchrun" and not is_peer:
            text += "\n" + BLOCK.format(rank=rank, code=what.get("rank_code", code))
        log = "step 4999 loss 0.31\nstep 5000 loss 0.31\n" + text if text else ""
        self.logs[self.world.pod(node)["metadata"]["name"]] = log
        at = self.world.now + timedelta(seconds=0 if is_peer else what.get("later", 0))
        tail = message or log.encode()[-_TERMINATION_BYTES:].decode(errors="replace")
        return ended(code, message=tail, reason=reason, at=at, started=at - timedelta(seconds=seconds))

    def _see_logs(self) -> None:
        """Let the operator read the logs that it reads: of pods whose status does not show the cause."""
        for name, pod in self.world.pods.items():
            if self.logs.get(name) and needs_log(pod_view(pod)):
                self.world.logs[pod["metadata"]["uid"]] = self.logs[name]

    # The answer

    def explanation(self) -> Explanation:
        world = self.world
        given = {"job": world.job, "now": world.now, "settings": SETTINGS, "pods": list(world.pods.values())}
        facts = Snapshot(**given | self.facts)
        more = needed(facts)
        read = {
            "events": [event for event in self._events() if _about(event) in more.about],
            "claims": {name: claim for name, claim in self._claims() if name in more.claims},
            "logs": {name: self.logs[name] for name in more.logs if name in self.logs},
        }
        return explain(Snapshot(**given | self.facts | read))

    def _events(self) -> Iterator[Json]:
        pod = {"kind": "Pod", "name": names.pod_name("mnist", UID, 1, self.node)}
        for seconds, kind, reason, message, *component in self.situation.get("events", ()):
            time = timestamp(self.world.now - timedelta(seconds=seconds))
            yield _event(pod, kind, reason, message, time) | {"source": {"component": next(iter(component), "kubelet")}}
        for name, claim in self.situation.get("claims", {}).items():
            if claim and "event" in claim:
                about = {"kind": "PersistentVolumeClaim", "name": name}
                yield _event(about, "Warning", *claim["event"], timestamp(self.world.now))

    def _claims(self) -> Iterator[tuple[str, Json | None]]:
        for name, claim in self.situation.get("claims", {}).items():
            spec = {"storageClassName": claim.get("class")} if claim else {}
            yield name, claim and {"metadata": {"name": name}, "spec": spec, "status": {"phase": claim["phase"]}}

    # Steps

    def run(self, only: int | None = None) -> None:
        for rank in range(self.nodes) if only is None else [only]:
            self.world.set_pod(rank, running(), node=f"worker-{rank}")
        self.world.settle()

    def train(self, report: int | Json) -> None:
        more = {"step": report} if isinstance(report, int) else report
        sent = {"schema": 3, "phase": "train", "totalSteps": 1000, "stepsPerSecond": 10.0} | more
        self.world.progress = (sent, self.world.pod(0)["metadata"]["name"])
        self.world.settle()

    def forward(self, seconds: float) -> None:
        self.world.forward(seconds)
        self.world.settle()

    def fail(self, _: None) -> None:
        """Let an attempt fail by what is no error of the program, and the next one start."""
        self.world.set_pod(1, failed(1, kind="OSError", exception="OSError", message="[Errno 5]", at=self.world.now))
        self.world.settle_after_backoff()

    def start_error(self, node: int) -> None:
        """Let the runtime of a pod's Kubernetes node fail, and the next attempt start."""
        hook = "error running prestart hook #0: nvidia-container-cli: initialization error: driver not loaded"
        status = ended(128, reason="StartError", message=hook, at=self.world.now)
        self.world.set_pod(node, status, node=f"worker-{node}")
        self.world.settle_after_backoff()

    def unplaced(self, text: str) -> None:
        """Let the scheduler find no Kubernetes node for the pods of the newest attempt."""
        for rank in range(self.nodes):
            self._wait(rank, {"unschedulable": text})
        self.world.settle()

    def lose(self, node: int) -> None:
        del self.world.pods[self.world.pod(node)["metadata"]["name"]]
        self.world.settle()

    def succeed(self, only: int | None) -> None:
        for rank in range(self.nodes) if only is None else [only]:
            self.world.set_pod(rank, ended(0, at=self.world.now), node=f"worker-{rank}")
        self.world.settle()

    def suspend(self, wanted: bool) -> None:
        self.world.job["spec"]["suspend"] = wanted

    def edit(self, spec: Json) -> None:
        self.world.job["spec"] |= spec
        self.world.job["metadata"]["generation"] += 1
        self.world.settle()

    def edit_unseen(self, seconds: float) -> None:
        fields = {"time": timestamp(self.world.now), "fieldsV1": {"f:spec": {}}}
        later = {"time": "2027-01-01T00:00:00Z", "subresource": "status"}
        self.world.job["metadata"] |= {"generation": 2, "managedFields": [fields, later]}
        self.world.forward(seconds)

    def unreachable(self, _: None) -> None:
        self.world.progress_problem = "unreachable"
        self.world.settle()

    def stalled(self, seconds: float) -> None:
        self.world.forward(seconds)
        self.world.stalled_seconds = seconds
        self.world.settle()

    def unready(self, node: int) -> None:
        marked = {"type": "Ready", "status": "False", "lastTransitionTime": timestamp(self.world.now)}
        conditions = [marked, {"type": "ContainersReady", "status": "True"}]
        self.world.set_pod(node, running(conditions=conditions), node=f"worker-{node}")
        self.world.settle()

    def finalizer(self, _: None) -> None:
        kept = {"deletionTimestamp": timestamp(self.world.now), "finalizers": ["example.com/backup"]}
        self.world.job["metadata"] |= kept
        self.world.settle()

    def operator_down(self, _: None) -> None:
        self.facts["operators"] = [deployment(0)]

    def former_pods(self, _: None) -> None:
        self.world.job["spec"]["checkpoint"] = {"claimName": "data"}
        other = World(a_job(checkpoint={"claimName": "data"}))
        other.settle()
        former = other.set_pod(0, running())
        former["metadata"] |= {"deletionTimestamp": timestamp(NOW + timedelta(seconds=600))}
        former["metadata"]["labels"] = former["metadata"]["labels"] | {names.LABEL_JOB_UID: "1a1b2c3d"}
        self.world.former = [former]
        self.world.settle()
        self.forward(60)


_STEPS: Mapping[str, Callable[[Reached, Any], None]] = {
    "run": lambda reached, _: reached.run(),
    "run_only": Reached.run,
    "train": Reached.train,
    "forward": Reached.forward,
    "fail": Reached.fail,
    "start_error": Reached.start_error,
    "unplaced": Reached.unplaced,
    "lose": Reached.lose,
    "succeed": Reached.succeed,
    "suspend": lambda reached, _: reached.suspend(True),
    "resume": lambda reached, _: reached.suspend(False),
    "settle": lambda reached, _: [reached.world.settle() for _ in range(2)] and None,
    "edit": Reached.edit,
    "edit_unseen": Reached.edit_unseen,
    "unreachable": Reached.unreachable,
    "stalled": Reached.stalled,
    "unready": Reached.unready,
    "finalizer": Reached.finalizer,
    "operator_down": Reached.operator_down,
    "former_pods": Reached.former_pods,
    "unreconciled": lambda reached, _: None,
    "unseen": lambda reached, seconds: reached.world.forward(seconds),
    "no_process": lambda reached, _: reached.facts.update(is_run=False),
}
"""What a step does; its value is the argument."""


_BEFORE_THE_OPERATOR = frozenset({"unreconciled", "former_pods", "unseen"})


def unschedulable(message: str) -> Json:
    """Return the status of a pod that the scheduler places nowhere."""
    return {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}]}


def waits_for(reason: str, message: str = "the message", *, init: str | None = None) -> Json:
    """Return the status of a pod whose trainer or init container waits."""
    state = {"waiting": {"reason": reason, "message": message}}
    return {"initContainerStatuses" if init else "containerStatuses": [{"name": init or "trainer", "state": state}]}


def refuse(world: World, message: str, reason: str = "CreateRefused") -> None:
    """Let the API server refuse the pods of a job."""
    world.reconcile(crash_after=1)
    world.problems = (Problem(reason, names.PODS, "mnist-0a1b2-1-0", message),)
    world.reconcile()
    world.problems = ()


def deployment(ready: int, namespaces: str = "") -> Json:
    """Return the Deployment of an operator with as many ready replicas, which serves these namespaces."""
    env = [{"name": "DDPJOB_OPERATOR_NAMESPACES", "value": namespaces}]
    return {
        "metadata": {"name": "ddpjob-operator", "namespace": "ddpjob-system"},
        "spec": {"replicas": 1, "template": {"spec": {"containers": [{"env": env}]}}},
        "status": {"readyReplicas": ready} if ready else {},
    }


def _name(step: str | Json) -> str:
    return next(iter(step)) if isinstance(step, dict) else step


def _traceback(rank: int, *, at: str, error: str, lib: str = "", more: str = "", before: str = "") -> str:
    """Return a traceback with the prefix of torch. at: file and line of the user. lib: of a library below it."""
    lines = ["Traceback (most recent call last):"]
    for path in filter(None, (f"/workspace/{at}", lib and f"{_LIBRARIES}{lib}")):
        file, _, line = path.rpartition(":")
        lines += [f'  File "{file}", line {line}, in call', "    run()"]
    lines += [*error.split("\n"), *filter(None, more.split("\n"))]
    prefixed = [f"[rank{rank}]: {line}" for line in lines] if "distributed" in error or rank % 4 else lines
    return "\n".join([*filter(None, before.split("\n")), *prefixed])


def _event(about: Json, kind: str, reason: str, message: str, time: str) -> Json:
    return {
        **{"involvedObject": about, "metadata": {}, "type": kind, "reason": reason, "message": message},
        "lastTimestamp": time,
    }


def _about(event: Json) -> tuple[str, str]:
    return event["involvedObject"]["kind"], event["involvedObject"]["name"]
