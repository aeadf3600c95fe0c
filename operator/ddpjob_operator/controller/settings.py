"""The operator's settings: flags, environment variables of the same names, and validation."""

import argparse
import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from ddpjob.engine.actions import LAUNCHER_IMAGE, EngineSettings
from ddpjob.engine.scheduling.adapters import GANG_SCHEDULERS
from ddpjob.version import __version__

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

Check = Callable[[str], Any]
"""Returns a setting's value, given its text. Raises ``ValueError`` with the rule that the text breaks."""


class SettingsError(Exception):
    """A setting is invalid; the message has flag, variable, value and the allowed values."""


def _text(pattern: str, rule: str) -> Check:
    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"must be {rule}")
        return text

    return check


def _namespaces(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for namespace in names:
        if not re.fullmatch(DNS_LABEL, namespace):
            raise ValueError(f"{namespace!r} is not a valid namespace name (patterns are not supported)")
    return names


def _flag(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError("must be true or false")
    return text.lower() == "true"


def _labels(text: str) -> tuple[tuple[str, str], ...]:
    labels = [part.strip().partition("=") for part in text.split(",") if part.strip()]
    for key, _, value in labels:
        if not (re.fullmatch(LABEL_KEY, key) and re.fullmatch(LABEL_VALUE, value)):
            raise ValueError("must be KEY=VALUE,... with keys and values of labels")
    return tuple((key, value) for key, _, value in labels)


def _number(kind: type[int] | type[float], low: float, high: float) -> Check:
    def check(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            raise ValueError("must be a number") from None
        if not low <= value <= high:
            raise ValueError(f"must be from {low:g} to {high:g}")
        return value

    return check


def _choice(*allowed: str) -> Check:
    def check(text: str) -> str:
        found = next((choice for choice in allowed if choice.lower() == text.lower()), None)
        if found is None:
            raise ValueError(f"must be one of {', '.join(filter(None, allowed))}")
        return found

    return check


def _setting(default: Any, check: Check, text: str) -> Any:
    """Return a field of ``Settings``; ``text`` is the help of its flag."""
    return field(default=default, metadata={"check": check, "help": text})


@dataclass(frozen=True)
class Settings:
    """Validated settings of one operator process."""

    namespaces: tuple[str, ...] = _setting((), _namespaces, "namespaces to serve, separated by commas; empty for all")
    cluster_domain: str = _setting(
        "cluster.local", _text(DNS_NAME, "a DNS domain such as cluster.local"), "DNS domain of the cluster"
    )
    progress_interval_seconds: float = _setting(
        10.0, _number(float, 1, 86_400), "seconds between progress requests to rank 0 of a running job (minimum 1)"
    )
    sweep_interval_seconds: float = _setting(
        60.0,
        _number(float, 5, 86_400),
        "seconds between full relists, which find changes that watch events missed (minimum 5)",
    )
    health_port: int = _setting(
        8080, _number(int, 0, 65_535), "port for /healthz, /readyz and /metrics; 0 for any free port"
    )
    log_level: str = _setting("info", _choice("debug", "info", "warning", "error"), "debug, info, warning or error")
    max_concurrent_requests: int = _setting(
        64, _number(int, 1, 1024), "maximum number of connections to the API server (1 to 1024)"
    )
    read_logs: bool = _setting(
        True, _flag, "true or false: read the logs of failed pods to find the exceptions of programs that report none"
    )
    lease: str = _setting(
        "",
        _text(f"({DNS_LABEL}/{DNS_LABEL})?", "NAMESPACE/NAME"),
        "NAMESPACE/NAME of the Lease that one of several replicas holds; empty for a single replica",
    )
    identity: str = _setting(
        socket.gethostname(),
        str,
        "name of this replica in the Lease; by default the host name, which is the pod's name",
    )
    pod_namespace: str = _setting(
        "",
        _text(f"({DNS_LABEL})?", "the name of a namespace"),
        "namespace of the operator's pods, which NetworkPolicies of jobs admit; empty to admit none",
    )
    pod_labels: tuple[tuple[str, str], ...] = _setting(
        (), _labels, "labels KEY=VALUE,... of the operator's pods; empty for all pods of the namespace"
    )
    kueue: bool = _setting(False, _flag, "true or false: let jobs with a queue of Kueue wait until it admits them")
    gang_scheduler: str = _setting(
        "",
        _choice("", *GANG_SCHEDULERS),
        "kubernetes, volcano or coscheduling: the system that places the pods of a job all or none; empty for none",
    )
    scheduler_name: str = _setting(
        "",
        _text(f"({DNS_NAME})?", "the name of a scheduler, such as scheduler-plugins-scheduler"),
        "schedulerName of the pods of a gang; empty for that of the gang scheduler",
    )
    launcher_image: str = _setting(
        LAUNCHER_IMAGE,
        _text(IMAGE, "the name of an image, such as registry.example.com/ddpjob/trainer:0.1.0"),
        "trainer image of this release, from which jobs with launcher: Injected get ddprun",
    )
    launcher_pull_policy: str = _setting(
        "",
        _choice("", "Always", "IfNotPresent", "Never"),
        "Always, IfNotPresent or Never; by default Never for the default image, and IfNotPresent for every other",
    )
    kubeconfig: str | None = _setting(
        None,
        lambda text: text or None,
        "kubeconfig to use; by default KUBECONFIG, else the pod's service account, else ~/.kube/config",
    )

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


def parse(argv: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ) -> Settings:
    """Return the settings from flags, environment and defaults, in this order.

    Raises ``SettingsError``; exits on --help and --version.
    """
    parser = argparse.ArgumentParser(
        prog="ddpjob-operator",
        description="Runs DDPJobs: multi-node PyTorch data-parallel training on Kubernetes.",
        epilog=f"Each flag can also be set in the environment, for example {ENV_PREFIX}LOG_LEVEL for --log-level.",
    )
    parser.add_argument("--version", action="version", version=f"ddpjob-operator {__version__}")
    for setting in fields(Settings):
        flag, variable = "--" + setting.name.replace("_", "-"), ENV_PREFIX + setting.name.upper()
        shown = "" if setting.default in ((), "", None) else f" (default {setting.default})"
        # argparse also checks a default that is text.
        parser.add_argument(
            flag,
            metavar="VALUE",
            type=partial(_checked, f"{flag} ({variable})", setting.metadata["check"]),
            default=environ.get(variable, setting.default),
            help=setting.metadata["help"] + shown,
        )
    return Settings(**vars(parser.parse_args(argv)))


def _checked(where: str, check: Check, text: str) -> Any:
    try:
        return check(text.strip())
    except ValueError as error:
        raise SettingsError(f"{where} is {text.strip()!r}: {error}") from error
