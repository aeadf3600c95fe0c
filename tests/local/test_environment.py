"""Environment variables as the kubelet resolves them, translated to this machine."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from ddpjob.api.objects import Json
from ddpjob.local import LocalError
from ddpjob.local.environment import declared, expand, inherited
from ddpjob.local.references import References
from tests.local.bench import Bench, a_bench
from tests.local.builders import POD, a_config_map, a_container, a_pod, a_secret

REFERENCES = References([a_secret(token="s3cret"), a_config_map(lr="0.1", note="x")], "default")


def resolved(*env: Json, env_from: list[Json] | None = None) -> dict[str, str]:
    """Return the variables of a container before translation."""
    return declared(a_container(env=list(env), envFrom=env_from or []), REFERENCES, {"MASTER_PORT": 21000})[0]


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


def test_secrets_and_config_maps_are_values_and_env_overrides_env_from() -> None:
    sources = [{"prefix": "P_", "configMapRef": {"name": "settings"}}, {"secretRef": {"name": "keys"}}]
    sources.append({"configMapRef": {"name": "none", "optional": True}})
    seen = resolved({"name": "P_note", "value": "own"}, env_from=sources)
    assert seen == {"P_lr": "0.1", "P_note": "own", "token": "s3cret"}
    assert resolved(variable({"secretKeyRef": {"name": "keys", "key": "token"}})) == {"X": "s3cret"}
    assert resolved(variable({"configMapKeyRef": {"name": "settings", "key": "lr"}})) == {"X": "0.1"}
    assert resolved(variable({"secretKeyRef": {"name": "none", "key": "a", "optional": True}})) == {}


@pytest.mark.parametrize(
    ("value_from", "message"),
    [
        ({"secretKeyRef": {"name": "none", "key": "a"}}, "the job refers to the Secret none, which its file does not"),
        ({"secretKeyRef": {"name": "keys", "key": "a"}}, "the job refers to the key a of the Secret keys, which has"),
        ({"fieldRef": {"fieldPath": "metadata.name"}}, "the variable X has a source that local mode does not support"),
        ({"resourceFieldRef": {"resource": "limits.cpu"}}, "the variable X has a source that local mode does not"),
    ],
)
def test_missing_or_unsupported_source_is_refused_with_a_next_step(value_from: Json, message: str) -> None:
    with pytest.raises(LocalError) as error:
        resolved(variable(value_from))
    assert message in error.value.error
    assert error.value.hint
    assert error.value.next_step


@pytest.mark.parametrize("source", [{}, {"configMapRef": "x"}, {"fieldRef": {"name": "x"}}])
def test_unknown_source_of_all_variables_is_refused(source: Json) -> None:
    with pytest.raises(LocalError, match="envFrom has a source that local mode does not support"):
        resolved(env_from=[source])


def test_secret_accepts_data_and_string_data() -> None:
    encoded = {"kind": "Secret", "metadata": {"name": "a"}, "data": {"x": "aGk="}}
    assert References([encoded], "default").data("Secret", {"name": "a"}) == {"x": b"hi"}
    with pytest.raises(LocalError, match=r"Secret a: data\.x is not base64"):
        References([encoded | {"data": {"x": "plain text"}}], "default")


def test_secret_of_another_namespace_is_not_found() -> None:
    elsewhere = {"kind": "Secret", "metadata": {"name": "a", "namespace": "other"}, "stringData": {"x": "1"}}
    with pytest.raises(LocalError):
        References([elsewhere], "default").data("Secret", {"name": "a"})


@pytest.mark.parametrize(
    ("data", "expected"),
    [([1], "data is not a mapping"), ({"a/b": "x"}, '"a/b"'), ({"..": "x"}, '".."'), ({"": "x"}, 'the key ""')],
)
def test_invalid_config_keys_are_refused(data: Any, expected: str) -> None:
    document = {"kind": "ConfigMap", "metadata": {"name": "c"}, "data": data}
    with pytest.raises(LocalError) as raised:
        References([document], "default")
    assert expected in raised.value.error


def test_ports_of_the_operator_are_local_ports_wherever_they_are_referenced() -> None:
    seen = resolved(
        {"name": "MASTER_PORT", "value": "29500"},
        {"name": "ENDPOINT", "value": "host:$(MASTER_PORT)"},
        {"name": "STEPS", "value": "29500"},
    )
    assert seen == {"MASTER_PORT": "21000", "ENDPOINT": "host:21000", "STEPS": "29500"}


def test_programs_inherit_only_selected_variables() -> None:
    mine = {"PATH": "/usr/bin:/bin", "LANG": "C", "LC_ALL": "C", "CUDA_VISIBLE_DEVICES": "1", "Https_Proxy": "p"}
    others = {"AWS_SECRET_ACCESS_KEY": "x", "PYTHONPATH": "/tmp", "MASTER_ADDR": "elsewhere", "OMP_NUM_THREADS": "9"}
    seen = inherited(mine | others)
    assert seen.pop("PATH") == f"{Path(sys.executable).parent}:/usr/bin:/bin"
    defaults = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}
    assert seen == {name: value for name, value in mine.items() if name != "PATH"} | defaults


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with a_bench(tmp_path) as made:
        yield made


async def test_local_defaults_are_set_unless_the_job_sets_them(bench: Bench) -> None:
    script = "echo $GLOO_SOCKET_IFNAME $HOSTNAME $PYTHONUNBUFFERED"
    await bench.run(a_pod(a_container(script=script)))
    assert bench.log(POD) == f"lo {POD} 1\n"
    env = [{"name": "GLOO_SOCKET_IFNAME", "value": "eth7"}]
    await bench.run(a_pod(a_container(script=script, env=env)))
    assert bench.log(POD) == f"eth7 {POD} 1\n"


async def test_secrets_are_not_translated_and_other_values_are(tmp_path: Path) -> None:
    place = [{"name": "DIR", "value": "/dev/termination-log"}, {"name": "OVERRIDDEN", "value": "/dev/termination-log"}]
    key = {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "ALL"}}}
    sources = [{"secretRef": {"name": "keys"}}]
    script = 'for name in ALL KEY DIR OVERRIDDEN; do eval "echo \\$$$name"; done'
    secret = a_secret(ALL="/dev/termination-log", OVERRIDDEN="x")
    async with a_bench(tmp_path, [secret]) as bench:
        await bench.run(a_pod(a_container(script=script, env=[*place, key], envFrom=sources)))
    here = f"{tmp_path}/jobs/default/mnist/pods/{POD}/trainer.termination-log"
    assert bench.log(POD).split() == ["/dev/termination-log", "/dev/termination-log", here, here]


async def test_gpus_of_a_node_are_set_in_cuda_visible_devices(tmp_path: Path) -> None:
    limits = {"limits": {"nvidia.com/gpu": 2}}
    async with a_bench(tmp_path, gpus=["2", "3", "5"], resources=limits) as bench:
        await bench.run(a_pod(a_container(script="echo $CUDA_VISIBLE_DEVICES")))
    assert bench.log(POD) == "2,3\n"
