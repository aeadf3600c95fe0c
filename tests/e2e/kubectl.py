"""The cluster as a user meets it: kubectl, always with a time limit, and waiting on what it shows."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import yaml

from tests.kind.command import CommandError, run
from tests.kind.toolchain import binary
from tests.processes import eventually

Json = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Kubectl:
    """kubectl for one cluster and one namespace (``default`` unless told)."""

    kubeconfig: Path
    namespace: str = "default"

    def within(self, namespace: str) -> Kubectl:
        """The same cluster, another namespace."""
        return replace(self, namespace=namespace)

    def __call__(self, *words: str, stdin: str | None = None, timeout: float = 60.0, check: bool = True) -> str:
        """Standard output of one command. ``timeout`` in seconds. Raises ``CommandError``."""
        head: list[str | Path] = [binary("kubectl"), "--kubeconfig", self.kubeconfig, "--namespace", self.namespace]
        return run([*head, *words], stdin=stdin, timeout=timeout, check=check).stdout

    def objects(self, *words: str) -> list[Json]:
        """``get`` as a list of objects, also where one is named."""
        answer = json.loads(self("get", *words, "--output", "json"))
        return list(answer["items"]) if answer["kind"].endswith("List") else [answer]

    def object(self, kind: str, name: str) -> Json:
        """One object."""
        return self.objects(kind, name)[0]

    def apply(self, *manifests: Json) -> str:
        """Apply objects, as ``kubectl apply -f`` does with a file of them."""
        return self("apply", "--filename", "-", stdin=yaml.safe_dump_all(manifests))

    def wait_for(self, condition: str, target: str, seconds: float) -> None:
        """``kubectl wait``: the one that users' scripts call."""
        self("wait", f"--for={condition}", target, f"--timeout={seconds:g}s", timeout=seconds + 30)


def until(what: str, look: Callable[[], T | None], *, seconds: float) -> T:
    """``eventually`` for what is asked of kubectl: a command that fails means "not yet"."""

    def probe() -> T | None:
        try:
            return look()
        except CommandError:
            return None

    return eventually(what, probe, timeout=seconds, interval=0.25)


def condition_of(obj: Json, name: str) -> Json:
    """A condition by its type; {} where it is not there."""
    conditions = obj.get("status", {}).get("conditions") or []
    return next((dict(condition) for condition in conditions if condition["type"] == name), {})
