"""Settings: flags override the environment, which overrides defaults; errors have the allowed values."""

from typing import Any

import pytest

from ddpjob_operator.controller.settings import ENV_PREFIX, Settings, SettingsError, parse


def test_settings_without_flags_are_the_defaults() -> None:
    assert parse([], {}) == Settings()


def test_flag_overrides_the_environment() -> None:
    environment = {f"{ENV_PREFIX}HEALTH_PORT": "1", f"{ENV_PREFIX}LOG_LEVEL": "debug"}
    settings = parse(["--health-port", "2"], environment)
    assert (settings.health_port, settings.log_level) == (2, "debug")


def test_every_setting_can_be_given_as_flag_and_as_variable() -> None:
    wanted: dict[str, tuple[str, Any]] = {
        "namespaces": ("a,b", ("a", "b")),
        "cluster_domain": ("cluster.example", "cluster.example"),
        "progress_interval_seconds": ("1.5", 1.5),
        "sweep_interval_seconds": ("30", 30.0),
        "health_port": ("0", 0),
        "log_level": ("ERROR", "error"),
        "max_concurrent_requests": ("16", 16),
        "read_logs": ("false", False),
        "lease": ("ddpjob-system/operator", "ddpjob-system/operator"),
        "identity": ("pod-1", "pod-1"),
        "pod_namespace": ("ddpjob-system", "ddpjob-system"),
        "pod_labels": ("a.b/c=d, e=f", (("a.b/c", "d"), ("e", "f"))),
        "launcher_image": ("reg.example:5000/t:1", "reg.example:5000/t:1"),
        "launcher_pull_policy": ("always", "Always"),
        "kubeconfig": ("/config", "/config"),
    }
    expected = Settings(**{name: value for name, (_, value) in wanted.items()})
    flags = [part for name, (text, _) in wanted.items() for part in (f"--{name.replace('_', '-')}", text)]
    assert parse(flags, {}) == expected
    assert parse([], {ENV_PREFIX + name.upper(): text for name, (text, _) in wanted.items()}) == expected


def test_blanks_and_duplicates_in_namespaces_are_ignored() -> None:
    assert parse(["--namespaces", " a , b,,a "], {}).namespaces == ("a", "b")


def test_no_namespaces_means_all_namespaces() -> None:
    assert parse(["--namespaces", ""], {}).scopes == (None,)
    assert parse(["--namespaces", "a,b"], {}).scopes == ("a", "b")


def test_default_launcher_image_is_never_pulled() -> None:
    assert parse([], {}).pull_policy_of_launcher == "Never"
    mine = ["--launcher-image", "registry.example.com/ddpjob/trainer@sha256:" + "0" * 64]
    assert parse(mine, {}).pull_policy_of_launcher == "IfNotPresent"
    assert parse([*mine, "--launcher-pull-policy", "Always"], {}).pull_policy_of_launcher == "Always"


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        ("--namespaces", "team-*", "patterns are not supported"),
        ("--namespaces", "A", "is not a valid namespace name"),
        ("--lease", "operator", "must be NAMESPACE/NAME"),
        ("--read-logs", "yes", "must be true or false"),
        ("--lease", "a/b/c", "must be NAMESPACE/NAME"),
        ("--pod-namespace", "a.b", "must be the name of a namespace"),
        ("--pod-labels", "a", "must be KEY=VALUE"),
        ("--pod-labels", "a=b c", "must be KEY=VALUE"),
        ("--cluster-domain", "", "must be a DNS domain"),
        ("--cluster-domain", "cluster local", "must be a DNS domain"),
        ("--progress-interval-seconds", "0.5", "must be from 1 to"),
        ("--progress-interval-seconds", "nan", "must be from 1 to"),
        ("--progress-interval-seconds", "soon", "must be a number"),
        ("--sweep-interval-seconds", "1", "must be from 5 to"),
        ("--health-port", "65536", "must be from 0 to 65535"),
        ("--health-port", "8080.5", "must be a number"),
        ("--log-level", "loud", "must be one of debug, info, warning, error"),
        ("--launcher-image", "", "must be the name of an image"),
        ("--launcher-image", "registry.example.com/Trainer:1", "must be the name of an image"),
        ("--launcher-image", "a b", "must be the name of an image"),
        ("--launcher-pull-policy", "Sometimes", "must be one of Always, IfNotPresent, Never"),
        ("--max-concurrent-requests", "-1", "must be from 1 to 1024"),
    ],
)
def test_a_wrong_value_is_refused_with_flag_variable_value_and_rule(flag: str, value: str, says: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse([flag, value], {})
    message = str(caught.value)
    assert flag in message
    assert ENV_PREFIX + flag.removeprefix("--").replace("-", "_").upper() in message
    assert repr(value) in message
    assert says in message
