"""The operator's settings: environment variables and their validation."""

import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from ddpjob.engine.actions import LAUNCHER_IMAGE, EngineSettings
from ddpjob.engine.scheduling.gangs import GANG_SCHEDULERS

ENV_PREFIX = "DDPJOB_OPERATOR_"
DNS_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
DNS_NAME = rf"(?=.{{0,253}}$){DNS_LABEL}(\.{DNS_LABEL})*"
LABEL_VALUE = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
LABEL_KEY = rf"([a-z0-9]([-a-z0-9.]{{0,251}}[a-z0-9])?/)?{LABEL_VALUE}"
# https://pkg.go.dev/github.com/distribution/reference, without digests of other algorithms.
IMAGE = (
    r"(?=.{0,512}$)([A-Za-z0-9][-A-Za-z0-9.]*(:[0-9]+)?/)?[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*(/[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*)*"
    r"(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(@sha256:[0-9a-f]{64})?"
)


class SettingsError(Exception):
    """A setting is invalid; the message has variable, value and the allowed values."""


def _text(pattern: str, rule: str, text: str) -> str:
    if not re.fullmatch(pattern, text):
        raise ValueError(f"must be {rule}")
    return text


def _namespaces(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for namespace in names:
        if not re.fullmatch(DNS_LABEL, namespace):
            raise ValueError(f"{namespace!r} is not a valid namespace name (patterns are not supported)")
    return names


def _labels(text: str) -> tuple[tuple[str, str], ...]:
    labels = [part.strip().partition("=") for part in text.split(",") if part.strip()]
    for key, _, value in labels:
        if not (re.fullmatch(LABEL_KEY, key) and re.fullmatch(LABEL_VALUE, value)):
            raise ValueError("must be KEY=VALUE,... with keys and values of labels")
    return tuple((key, value) for key, _, value in labels)


def _number(kind: type[int] | type[float], low: float, high: float, text: str) -> float:
    try:
        value = kind(text)
    except ValueError:
        raise ValueError("must be a number") from None
    if not low <= value <= high:
        raise ValueError(f"must be from {low:g} to {high:g}")
    return value


def _choice(allowed: Sequence[str], text: str) -> str:
    found = next((choice for choice in allowed if choice.lower() == text.lower()), None)
    if found is None:
        raise ValueError(f"must be one of {', '.join(filter(None, allowed))}")
    return found


def _flag(text: str) -> bool:
    return _choice(("true", "false"), text) == "true"


def _setting(default: Any, read: Callable[..., Any], *limits: Any) -> Any:
    """Return a field of ``ControllerSettings``.

    read: returns the value, given ``limits`` and the text. Raises ``ValueError`` with the rule that the text breaks.
    """
    return field(default=default, metadata={"read": partial(read, *limits)})


@dataclass(frozen=True)
class ControllerSettings:
    """Validated settings of one operator process; docs/tasks/operations.md says what they mean.

    namespaces: to serve; empty for all. lease: "NAMESPACE/NAME", empty for a single replica.
    identity: name of this replica in the Lease; by default the host name, which is the pod's name.
    pod_namespace, pod_labels: of the operator's pods, which NetworkPolicies of jobs admit; empty to admit none, or all
    pods of the namespace.
    health_port: 0 for any free one.
    """

    namespaces: tuple[str, ...] = _setting((), _namespaces)
    cluster_domain: str = _setting("cluster.local", _text, DNS_NAME, "a DNS domain such as cluster.local")
    progress_interval_seconds: float = _setting(10.0, _number, float, 1, 86_400)
    sweep_interval_seconds: float = _setting(60.0, _number, float, 5, 86_400)
    health_port: int = _setting(8080, _number, int, 0, 65_535)
    log_level: str = _setting("info", _choice, ("debug", "info", "warning", "error"))
    max_concurrent_requests: int = _setting(64, _number, int, 1, 1024)
    read_logs: bool = _setting(True, _flag)
    metrics_per_job: bool = _setting(False, _flag)
    lease: str = _setting("", _text, f"({DNS_LABEL}/{DNS_LABEL})?", "NAMESPACE/NAME")
    identity: str = _setting(socket.gethostname(), str)
    pod_namespace: str = _setting("", _text, f"({DNS_LABEL})?", "the name of a namespace")
    pod_labels: tuple[tuple[str, str], ...] = _setting((), _labels)
    kueue: bool = _setting(False, _flag)
    gang_scheduler: str = _setting("", _choice, ("", *GANG_SCHEDULERS))
    scheduler_name: str = _setting(
        "", _text, f"({DNS_NAME})?", "the name of a scheduler, such as scheduler-plugins-scheduler"
    )
    launcher_image: str = _setting(
        LAUNCHER_IMAGE, _text, IMAGE, "the name of an image, such as registry.example.com/ddpjob/trainer:0.1.0"
    )
    launcher_pull_policy: str = _setting("", _choice, ("", "Always", "IfNotPresent", "Never"))

    @property
    def pull_policy_of_launcher(self) -> str:
        """The pull policy of ``launcher_image``; the default image is not ours in any registry."""
        return self.launcher_pull_policy or ("Never" if self.launcher_image == LAUNCHER_IMAGE else "IfNotPresent")

    @property
    def engine(self) -> EngineSettings:
        """What plans depend on."""
        return EngineSettings(
            self.cluster_domain,
            reads_logs=self.read_logs,
            pod_namespace=self.pod_namespace,
            pod_labels=dict(self.pod_labels),
            kueue=self.kueue,
            gang_scheduler=self.gang_scheduler,
            scheduler_name=self.scheduler_name,
            launcher_image=self.launcher_image,
            launcher_pull_policy=self.pull_policy_of_launcher,
        )

    @property
    def scopes(self) -> tuple[str | None, ...]:
        """Namespaces to list, one request each; None lists all of them at once."""
        return self.namespaces or (None,)


VARIABLES = {ENV_PREFIX + setting.name.upper(): setting for setting in fields(ControllerSettings)}


def parse(environ: Mapping[str, str] = os.environ) -> ControllerSettings:
    """Return the settings from environment variables and defaults. Raises ``SettingsError``."""
    given = {}
    for variable, setting in VARIABLES.items():
        if (text := environ.get(variable)) is not None:
            try:
                given[setting.name] = setting.metadata["read"](text.strip())
            except ValueError as error:
                raise SettingsError(f"{variable} is {text.strip()!r}: {error}") from error
    return ControllerSettings(**given)
