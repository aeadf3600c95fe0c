"""Run kubectl with a time limit, and wait for what it shows."""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import yaml

from ddpjob.api.objects import Json
from tests.kind.command import CommandError, run
from tests.kind.toolchain import binary
from tests.processes import end, eventually, spawn

T = TypeVar("T")
INTERVAL = 0.8
"""Seconds between two calls of kubectl, of which each takes 0.07 s of CPU time."""
WATCH_INTERVAL = 0.1
"""Seconds between two reads of the output of one kubectl that watches."""


@dataclass(frozen=True)
class Kubectl:
    """kubectl for one cluster and one namespace."""

    kubeconfig: Path
    namespace: str = "default"

    def within(self, namespace: str) -> Kubectl:
        """Return a Kubectl for another namespace of the same cluster."""
        return replace(self, namespace=namespace)

    def __call__(self, *arguments: str, stdin: str | None = None, timeout: float = 60.0, check: bool = True) -> str:
        """Run one command and return its standard output. ``timeout`` in seconds. Raises ``CommandError``."""
        head: list[str | Path] = [binary("kubectl"), "--kubeconfig", self.kubeconfig, "--namespace", self.namespace]
        return run([*head, *arguments], stdin=stdin, timeout=timeout, check=check).stdout

    def objects(self, *arguments: str) -> list[Json]:
        """Run ``get`` and return its objects; one object is a list of one."""
        answer = json.loads(self("get", *arguments, "--output", "json"))
        return list(answer["items"]) if answer["kind"].endswith("List") else [answer]

    def object(self, kind: str, name: str) -> Json:
        """Return one object."""
        return self.objects(kind, name)[0]

    def watch(self, kind: str, ended: threading.Event) -> Iterator[Json]:
        """Run ``get --watch`` and yield its events, those of the present objects first, until it ends or ``ended``."""
        words = ("--namespace", self.namespace, "get", kind, "--watch", "--output-watch-events", "--output", "json")
        with tempfile.TemporaryDirectory(prefix="ddpjob-e2e-") as folder:
            output = Path(folder) / "events"
            process = spawn([binary("kubectl"), "--kubeconfig", self.kubeconfig, *words], output)
            try:
                with output.open() as events:
                    begun = ""
                    while not ended.wait(WATCH_INTERVAL) and process.poll() is None:
                        *lines, begun = (begun + events.read()).split("\n")
                        # An event is a line of JSON; kubectl may print warnings too.
                        yield from (json.loads(line) for line in lines if line.startswith("{"))
            finally:
                end(process)

    def apply(self, *manifests: Json) -> str:
        """Apply objects with ``kubectl apply -f``."""
        return self("apply", "--filename", "-", stdin=yaml.safe_dump_all(manifests))

    def wait_for(self, condition: str, target: str, seconds: float) -> None:
        """Run ``kubectl wait``."""
        self("wait", f"--for={condition}", target, f"--timeout={seconds:g}s", timeout=seconds + 30)


def until(what: str, look: Callable[[], T | None], *, seconds: float) -> T:
    """Do the same as ``eventually``; a command that fails counts as "not yet"."""

    def probe() -> T | None:
        try:
            return look()
        except CommandError:
            return None

    return eventually(what, probe, timeout=seconds, interval=INTERVAL)
