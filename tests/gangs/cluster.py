"""Control planes with a real scheduler: Kubernetes 1.36, which has PodGroups, and an older one with coscheduling.

Their nodes have no machines (tests.worlds.nodes).
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import yaml

from ddpjob.api.objects import Json
from tests.kind.toolchain import MODULES, source_of
from tests.processes import eventually, free_port, tail
from tests.worlds.control_plane import ControlPlane

GATES = ("GenericWorkload", "GangScheduling", "WorkloadAwarePreemption")
COSCHEDULING = "scheduler-plugins-scheduler"
"""The name of the scheduler with the coscheduling plugin."""
_CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


class WithScheduler(ControlPlane):
    """A control plane with controllers and a scheduler."""

    def __init__(self, *, audit: bool = False) -> None:
        super().__init__(audit=audit, controller_manager=True)

    def _start(self) -> None:
        super()._start()
        self.apply_crd()

    def _schedule_with(self, program: str, profile: Json, *flags: str) -> None:
        """Start a scheduler with one profile and wait until it has listed its objects."""
        kubeconfig, port = str(self.kubeconfig()), free_port()
        config = {
            "apiVersion": "kubescheduler.config.k8s.io/v1",
            "kind": "KubeSchedulerConfiguration",
            "leaderElection": {"leaderElect": False},
            "clientConnection": {"kubeconfig": kubeconfig, "qps": 1000, "burst": 2000},
            "profiles": [profile],
        }
        path = Path(self.folder / f"{program}.json")
        path.write_text(json.dumps(config))
        own = [f"--{kind}-kubeconfig={kubeconfig}" for kind in ("authentication", "authorization")]
        files = (f"--config={path}", f"--cert-dir={self.folder / 'scheduler-certificates'}")
        self._run(program, *files, *own, "--bind-address=127.0.0.1", f"--secure-port={port}", *flags)
        log = self.folder / f"{program}.log"
        scheduler = self._processes[-1]

        def serves() -> bool:
            if scheduler.poll() is not None:
                raise RuntimeError(f"{program} ended with {scheduler.returncode}:\n{tail(log)}")
            return "Caches are synced" in log.read_text(errors="replace") or "Serving securely" in log.read_text()

        eventually(f"{program} runs", serves, timeout=120)


class Kubernetes136(WithScheduler):
    """Kubernetes 1.36 with PodGroups (KEP-4671) as far as feature gates enable them."""

    programs: ClassVar[Mapping[str, str]] = {
        "kube-apiserver": "kube-apiserver-1.36",
        "kube-controller-manager": "kube-controller-manager-1.36",
        "kube-scheduler": "kube-scheduler-1.36",
    }
    controllers = (*ControlPlane.controllers, "podgroup-protection-controller")

    def __init__(self, gates: Sequence[str] = GATES, *, scheduler: bool = True, audit: bool = False) -> None:
        super().__init__(audit=audit)
        self._with_scheduler = scheduler
        self._gates = f"--feature-gates={','.join(f'{gate}=true' for gate in gates)}"
        self.api_flags = (self._gates, "--runtime-config=scheduling.k8s.io/v1alpha2=true")
        self.controller_flags = (self._gates,)

    def _start(self) -> None:
        super()._start()
        if self._with_scheduler:
            self._schedule_with("kube-scheduler", {"schedulerName": "default-scheduler"}, self._gates)


class WithCoscheduling(WithScheduler):
    """The Kubernetes of the other tests, with the coscheduling plugin in a second scheduler."""

    def _start(self) -> None:
        super()._start()
        (module,) = (each for each in MODULES if each.folder == "coscheduling")
        definitions = source_of(module, "sigs.k8s.io/scheduler-plugins") / "config" / "crd" / "bases"
        for kind in ("podgroups", "elasticquotas"):
            definition = yaml.safe_load((definitions / f"scheduling.x-k8s.io_{kind}.yaml").read_text())
            self.request("POST", _CRDS, definition)
        # Its writes to PodGroups also let the plugin try gangs again that it has rejected.
        health = f"--probeAddr=127.0.0.1:{free_port()}"
        self._run("coscheduling-controller", f"--kubeconfig={self.kubeconfig()}", "--metricsAddr=0", health)
        # As in its manifests/coscheduling/scheduler-config.yaml.
        plugin = [{"name": "Coscheduling"}]
        profile: dict[str, Any] = {
            "schedulerName": COSCHEDULING,
            "plugins": {
                "multiPoint": {"enabled": plugin},
                "queueSort": {"enabled": plugin, "disabled": [{"name": "*"}]},
            },
            "pluginConfig": [{"name": "Coscheduling", "args": {"permitWaitingTimeSeconds": 10}}],
        }
        self._schedule_with("coscheduling", profile)
