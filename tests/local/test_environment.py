"""Environment variables as the kubelet resolves them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ddpjob.api.objects import Json
from ddpjob.local import LocalError, environment
from ddpjob.local.references import ConfigError, References, expand
from ddpjob.local.translate import Translator
from tests.local.builders import a_config_map, a_container, a_pod, a_secret

REFERENCES = References([a_secret(token="s3cret", path="/checkpoints"), a_config_map(lr="0.1", note="x")], "default")


def resolved(*env: Json, env_from: list[Json] | None = None, **container: Any) -> dict[str, str]:
    """Return the variables of a container before translation."""
    built = a_container(env=list(env), envFrom=env_from or [], **container)
    pod = a_pod(built)
    pod["metadata"]["uid"] = "the-uid"
    pod |= {"status": {"podIP": "127.0.0.1", "podIPs": [{"ip": "127.0.0.1"}], "hostIP": "127.0.0.1"}}
    pod["spec"] |= {"nodeName": "local", "serviceAccountName": "default"}
    return dict(environment.declared(pod, built, REFERENCES).values)


def variable(value_from: Json) -> Json:
    return {"name": "X", "valueFrom": value_from}


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("$(A)", "1"),
        ("-$(A)-$(B)-", "-1-2-"),
        ("$(MISSING)", "$(MISSING)"),
        ("$$(A)", "$(A)"),
        ("$$$(A)", "$1"),
        ("$A ${A} $", "$A ${A} $"),
        ("$(A", "$(A"),
        ("$($$", "$($"),
        ("cost: 5$$", "cost: 5$"),
        ("$()", "$()"),
    ],
)
def test_references_expand_as_kubernetes_documents(text: str, meaning: str) -> None:
    assert expand(text, {"A": "1", "B": "2"}) == meaning


def test_variables_refer_to_earlier_ones_and_env_from_but_not_to_later_ones() -> None:
    seen = resolved(
        {"name": "A", "value": "1"},
        {"name": "B", "value": "$(A)$(C)$(lr)"},
        {"name": "C", "value": "3"},
        env_from=[{"configMapRef": {"name": "settings"}}],
    )
    assert seen["B"] == "1$(C)0.1"


def test_env_from_takes_its_prefix_and_env_overrides_it() -> None:
    sources = [{"prefix": "P_", "configMapRef": {"name": "settings"}}, {"secretRef": {"name": "keys"}}]
    seen = resolved({"name": "P_note", "value": "own"}, env_from=sources)
    assert seen == {"P_lr": "0.1", "P_note": "own", "token": "s3cret", "path": "/checkpoints"}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("metadata.name", "mnist-0a1b2-1-0"),
        ("metadata.namespace", "default"),
        ("metadata.uid", "the-uid"),
        ("metadata.labels['ddpjob.dev/node-rank']", "0"),
        ("metadata.labels['none']", ""),
        ("metadata.annotations['note']", 'a "b"'),
        ("spec.nodeName", "local"),
        ("spec.serviceAccountName", "default"),
        ("status.podIP", "127.0.0.1"),
        ("status.podIPs", "127.0.0.1"),
        ("status.hostIP", "127.0.0.1"),
    ],
)
def test_field_ref_returns_fields_of_the_pod(path: str, value: str) -> None:
    assert resolved(variable({"fieldRef": {"fieldPath": path}}))["X"] == value


@pytest.mark.parametrize(
    ("resource", "divisor", "value"),
    [
        ("limits.cpu", None, "2"),
        ("limits.cpu", "1m", "1500"),
        ("requests.cpu", "0", "1"),
        ("limits.memory", "1Mi", "1024"),
        ("limits.memory", "1Gi", "1"),
        ("requests.memory", None, "0"),
    ],
)
def test_resource_field_ref_is_divided_and_rounded_up(resource: str, divisor: str | None, value: str) -> None:
    reference = {"resource": resource} | ({"divisor": divisor} if divisor else {})
    resources = {"limits": {"cpu": "1500m", "memory": "1Gi"}, "requests": {"cpu": "500m"}}
    assert resolved(variable({"resourceFieldRef": reference}), resources=resources)["X"] == value


def test_missing_limit_defaults_to_the_capacity_of_the_machine() -> None:
    seen = resolved(variable({"resourceFieldRef": {"resource": "limits.cpu"}}))
    assert seen["X"] == str(len(os.sched_getaffinity(0)))


@pytest.mark.parametrize(
    ("value_from", "message"),
    [
        ({"secretKeyRef": {"name": "none", "key": "a"}}, 'secret "none" not found'),
        ({"secretKeyRef": {"name": "keys", "key": "a"}}, "couldn't find key a in Secret default/keys"),
        ({"configMapKeyRef": {"name": "none", "key": "a"}}, 'configmap "none" not found'),
        ({"configMapKeyRef": {"name": "settings", "key": "a"}}, "couldn't find key a in ConfigMap default/settings"),
        ({"fieldRef": {"fieldPath": "spec.containers"}}, "unsupported fieldPath: spec.containers"),
        ({"fileKeyRef": {"path": "x"}}, "environment variables from fileKeyRef need a cluster"),
    ],
)
def test_missing_reference_is_reported_as_the_kubelet_does(value_from: Json, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolved(variable(value_from))
    assert str(error.value) == message


def test_missing_optional_reference_sets_no_variable() -> None:
    assert "X" not in resolved(variable({"secretKeyRef": {"name": "none", "key": "a", "optional": True}}))
    assert resolved(env_from=[{"configMapRef": {"name": "none", "optional": True}}]) == {}


def test_secret_accepts_data_and_string_data() -> None:
    encoded = {"kind": "Secret", "metadata": {"name": "a"}, "data": {"x": "aGk="}}
    assert References([encoded], "default").value("Secret", {"name": "a", "key": "x"}) == "hi"
    with pytest.raises(LocalError, match=r"Secret a: data\.x is not base64"):
        References([encoded | {"data": {"x": "plain text"}}], "default")


def test_secret_of_another_namespace_is_not_found() -> None:
    elsewhere = {"kind": "Secret", "metadata": {"name": "a", "namespace": "other"}, "stringData": {"x": "1"}}
    with pytest.raises(ConfigError):
        References([elsewhere], "default").value("Secret", {"name": "a", "key": "x"})


def completed(*env: Json, gpus: Sequence[str] = ()) -> dict[str, str]:
    container = a_container(env=list(env))
    pod = a_pod(container)
    translator = Translator(
        pod=pod["metadata"]["name"],
        service="mnist-0a1b2",
        namespace="default",
        domain="cluster.local",
        port_of=lambda _, port: port - 1,
        paths={"/checkpoints": "/host/claim"},
    )
    return environment.complete(
        pod, environment.declared(pod, container, REFERENCES), translator, Path("/host/log"), gpus
    )


def test_operator_ports_are_translated_wherever_they_are_referenced() -> None:
    seen = completed(
        {"name": "MASTER_PORT", "value": "29500"},
        {"name": "DDPJOB_PROGRESS_PORT", "value": "29501"},
        {"name": "ENDPOINT", "value": "mnist-0a1b2-1-0.mnist-0a1b2:$(MASTER_PORT)"},
        {"name": "FLAG", "value": "--port=$(MASTER_PORT)"},
        {"name": "STEPS", "value": "29500"},
    )
    assert (seen["MASTER_PORT"], seen["DDPJOB_PROGRESS_PORT"]) == ("29499", "29500")
    assert (seen["ENDPOINT"], seen["FLAG"], seen["STEPS"]) == ("127.0.0.1:29499", "--port=29499", "29500")


def test_secret_values_are_not_translated() -> None:
    secret = {"name": "PASSWORD", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "path"}}}
    seen = completed(secret, {"name": "DIR", "value": "/checkpoints"})
    assert (seen["PASSWORD"], seen["DIR"]) == ("/checkpoints", "/host/claim")


def test_containers_inherit_only_selected_variables() -> None:
    mine = {"PATH": "/usr/bin:/bin", "LANG": "C", "LC_ALL": "C", "CUDA_VISIBLE_DEVICES": "1", "Https_Proxy": "p"}
    mine |= {"AWS_SECRET_ACCESS_KEY": "x", "PYTHONPATH": "/tmp", "MASTER_ADDR": "elsewhere", "OMP_NUM_THREADS": "9"}
    seen = environment.inherited(mine)
    assert seen.pop("PATH") == f"{Path(sys.executable).parent}:/usr/bin:/bin"
    assert seen == {"LANG": "C", "LC_ALL": "C", "CUDA_VISIBLE_DEVICES": "1", "Https_Proxy": "p"}


def test_local_defaults_are_set_unless_the_job_sets_them() -> None:
    assert completed()["GLOO_SOCKET_IFNAME"] == "lo"
    assert completed({"name": "GLOO_SOCKET_IFNAME", "value": "eth7"})["GLOO_SOCKET_IFNAME"] == "eth7"
    assert (completed()["HOSTNAME"], completed()["PYTHONUNBUFFERED"]) == ("mnist-0a1b2-1-0", "1")


def test_gpus_of_a_container_are_set_in_cuda_visible_devices() -> None:
    assert completed(gpus=["2", "3"])["CUDA_VISIBLE_DEVICES"] == "2,3"


@pytest.mark.parametrize(
    ("data", "expected"),
    [([1], "data is not a mapping"), ({"a/b": "x"}, '"a/b"'), ({"..": "x"}, '".."'), ({"": "x"}, 'the key ""')],
)
def test_invalid_config_keys_are_refused(data: Any, expected: str) -> None:
    document = {"kind": "ConfigMap", "metadata": {"name": "c"}, "data": data}
    with pytest.raises(LocalError) as raised:
        References([document], "default")
    assert expected in raised.value.error
