"""The operator's settings: flags, environment variables of the same names, and validation."""

import argparse
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ddpjob import __version__
from ddpjob.engine.actions import EngineSettings

Check = Callable[[str, str], Any]
"""Returns a setting's value, given its name and text, or raises ``SettingsError``."""

ENV_PREFIX = "DDPJOB_OPERATOR_"
DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


class SettingsError(ValueError):
    """A setting is invalid; the message has flag, variable, value and the allowed values."""


@dataclass(frozen=True)
class Settings:
    """Validated settings of one operator process. Times in seconds."""

    namespaces: tuple[str, ...] = ()
    """Namespaces to serve; empty means all."""
    cluster_domain: str = "cluster.local"
    progress_interval_seconds: float = 10.0
    sweep_interval_seconds: float = 60.0
    health_host: str = ""
    """Address of the health server; empty means all addresses."""
    health_port: int = 8080
    """Port of the health server; 0 means any free port (it is logged)."""
    log_level: str = "info"
    log_format: str = "json"
    max_concurrent_reconciles: int = 8
    max_concurrent_requests: int = 64
    kubeconfig: str | None = None

    @property
    def engine(self) -> EngineSettings:
        """The settings of the engine."""
        return EngineSettings(self.cluster_domain)

    @property
    def scopes(self) -> tuple[str | None, ...]:
        """Namespaces to list, one request each; None lists all of them at once."""
        return self.namespaces or (None,)


_HELP = {
    "namespaces": "namespaces to serve, separated by commas; empty for all",
    "cluster_domain": "DNS domain of the cluster",
    "progress_interval_seconds": "seconds between progress requests to rank 0 of a running job (minimum 1)",
    "sweep_interval_seconds": "seconds between full relists, which find changes that watch events missed (minimum 5)",
    "health_host": "address for /healthz, /readyz and /metrics; empty for all",
    "health_port": "port for /healthz, /readyz and /metrics; 0 for any free port",
    "log_level": "debug, info, warning or error",
    "log_format": "json or text",
    "max_concurrent_reconciles": "number of jobs reconciled at the same time (1 to 256)",
    "max_concurrent_requests": "maximum number of connections to the API server (1 to 1024)",
    "kubeconfig": "kubeconfig to use; by default KUBECONFIG, else the pod's service account, else ~/.kube/config",
}


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
    for field in fields(Settings):
        flag = _flag(field.name)
        shown = "" if field.default in ((), "", None) else f" (default {field.default})"
        parser.add_argument(flag, metavar="VALUE", help=_HELP[field.name] + shown)
    given = vars(parser.parse_args(argv))
    values: dict[str, Any] = {}
    for field in fields(Settings):
        text = given[field.name]
        if text is None:
            text = environ.get(ENV_PREFIX + field.name.upper())
        if text is not None:
            values[field.name] = _CHECKS[field.name](field.name, text.strip())
    return Settings(**values)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _namespaces(name: str, text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for namespace in names:
        if not DNS_LABEL.fullmatch(namespace):
            raise _refusal(name, text, f"{namespace!r} is not a valid namespace name (patterns are not supported)")
    return names


def _domain(name: str, text: str) -> str:
    if not all(DNS_LABEL.fullmatch(label) for label in text.split(".")):
        raise _refusal(name, text, "must be a DNS domain such as cluster.local")
    return text


def _number(kind: type[int] | type[float], low: float, high: float) -> Check:
    def check(name: str, text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            raise _refusal(name, text, "must be a number") from None
        if not low <= value <= high:
            raise _refusal(name, text, f"must be from {low:g} to {high:g}")
        return value

    return check


def _choice(*allowed: str) -> Check:
    def check(name: str, text: str) -> str:
        if text.lower() not in allowed:
            raise _refusal(name, text, f"must be one of {', '.join(allowed)}")
        return text.lower()

    return check


def _refusal(name: str, text: str, rule: str) -> SettingsError:
    return SettingsError(f"{_flag(name)} ({ENV_PREFIX}{name.upper()}) is {text!r}: {rule}")


_CHECKS: dict[str, Check] = {
    "namespaces": _namespaces,
    "cluster_domain": _domain,
    "progress_interval_seconds": _number(float, 1, 86_400),
    "sweep_interval_seconds": _number(float, 5, 86_400),
    "health_host": lambda name, text: text,
    "health_port": _number(int, 0, 65_535),
    "log_level": _choice("debug", "info", "warning", "error"),
    "log_format": _choice("json", "text"),
    "max_concurrent_reconciles": _number(int, 1, 256),
    "max_concurrent_requests": _number(int, 1, 1024),
    "kubeconfig": lambda name, text: text or None,
}
