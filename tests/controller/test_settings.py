"""Settings: the environment overrides defaults; errors have the allowed values."""

from typing import Any

import pytest

from ddpjob_operator.controller.settings import ENV_PREFIX, ControllerSettings, SettingsError, parse


def settings(**given: str) -> ControllerSettings:
    return parse({ENV_PREFIX + name.upper(): text for name, text in given.items()})


def test_settings_without_variables_are_the_defaults() -> None:
    assert settings() == ControllerSettings()


def test_every_setting_can_be_given() -> None:
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
    }
    expected = ControllerSettings(**{name: value for name, (_, value) in wanted.items()})
    assert settings(**{name: text for name, (text, _) in wanted.items()}) == expected


def test_namespaces_have_no_blanks_and_duplicates_and_none_means_all() -> None:
    assert settings(namespaces=" a , b,,a ").scopes == ("a", "b")
    assert settings(namespaces="").scopes == (None,)


def test_default_launcher_image_is_never_pulled() -> None:
    assert settings().pull_policy_of_launcher == "Never"
    mine = {"launcher_image": "registry.example.com/ddpjob/trainer@sha256:" + "0" * 64}
    assert settings(**mine).pull_policy_of_launcher == "IfNotPresent"
    assert settings(**mine, launcher_pull_policy="Always").pull_policy_of_launcher == "Always"


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("namespaces", "team-*", "patterns are not supported"),
        ("namespaces", "A", "is not a valid namespace name"),
        ("lease", "operator", "must be NAMESPACE/NAME"),
        ("read_logs", "yes", "must be one of true, false"),
        ("lease", "a/b/c", "must be NAMESPACE/NAME"),
        ("pod_namespace", "a.b", "must be the name of a namespace"),
        ("pod_labels", "a", "must be KEY=VALUE"),
        ("pod_labels", "a=b c", "must be KEY=VALUE"),
        ("cluster_domain", "", "must be a DNS domain"),
        ("cluster_domain", "cluster local", "must be a DNS domain"),
        ("progress_interval_seconds", "0.5", "must be from 1 to"),
        ("progress_interval_seconds", "nan", "must be from 1 to"),
        ("progress_interval_seconds", "soon", "must be a number"),
        ("sweep_interval_seconds", "1", "must be from 5 to"),
        ("health_port", "65536", "must be from 0 to 65535"),
        ("health_port", "8080.5", "must be a number"),
        ("log_level", "loud", "must be one of debug, info, warning, error"),
        ("launcher_image", "", "must be the name of an image"),
        ("launcher_image", "registry.example.com/Trainer:1", "must be the name of an image"),
        ("launcher_image", "a b", "must be the name of an image"),
        ("launcher_pull_policy", "Sometimes", "must be one of Always, IfNotPresent, Never"),
        ("max_concurrent_requests", "-1", "must be from 1 to 1024"),
    ],
)
def test_a_wrong_value_is_refused_with_variable_value_and_rule(name: str, value: str, says: str) -> None:
    with pytest.raises(SettingsError) as caught:
        settings(**{name: value})
    message = str(caught.value)
    assert ENV_PREFIX + name.upper() in message
    assert repr(value) in message
    assert says in message
