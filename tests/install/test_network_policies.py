"""Both NetworkPolicies together: the chart's for the operator, and the operator's for an isolated job."""

from typing import Any

import pytest

from ddpjob.engine.actions import EngineSettings
from ddpjob.engine.desired import Job, desired_pods
from ddpjob.engine.network import desired_policy
from ddpjob_operator.controller.settings import ENV_PREFIX, parse
from tests.builders import a_job
from tests.install.chart import NAMESPACE, of_kind, template
from tests.network_policies import OUTSIDE, Network, Place
from tests.worlds.control_plane import ControlPlane

CHART_VALUES = {"networkPolicy.enabled": True, "networkPolicy.apiServerPorts": [8443]}
JOB = a_job(networkPolicy="Isolated")
PODS = desired_pods(Job.of(JOB), 1, EngineSettings())
TRAINER, PEER = (Place("default", PODS[rank].body["metadata"]["labels"]) for rank in (0, 1))
WEB = Place("default", {"app": "web"})


def settings_of(release: str) -> EngineSettings:
    """Return the settings of the operator's process, as the Deployment of a release gives them."""
    [deployment] = of_kind(template(release=release), "Deployment")
    env = {entry["name"]: entry for entry in deployment["spec"]["template"]["spec"]["containers"][0]["env"]}
    namespace = env.pop(f"{ENV_PREFIX}POD_NAMESPACE")
    assert namespace["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.namespace"}}
    given = parse({name: entry["value"] for name, entry in env.items()})
    return EngineSettings(pod_namespace=NAMESPACE, pod_labels=dict(given.pod_labels))


def operator_of(release: str) -> Place:
    [deployment] = of_kind(template(release=release), "Deployment")
    return Place(NAMESPACE, deployment["spec"]["template"]["metadata"]["labels"] | {"pod-template-hash": "5d4"})


def job_policy(settings: EngineSettings) -> dict[str, Any]:
    made = desired_policy(Job.of(JOB), settings)
    assert made is not None
    return made.body


def test_no_network_policy_without_the_value() -> None:
    assert not of_kind(template({}), "NetworkPolicy")


@pytest.mark.parametrize("release", ["ddpjob", "prod"])
def test_operator_and_isolated_job_reach_what_they_need_and_no_more(release: str) -> None:
    [chart_policy] = of_kind(template(CHART_VALUES, release=release), "NetworkPolicy")
    network = Network((chart_policy, job_policy(settings_of(release))))
    operator = operator_of(release)
    assert network.connects(operator, OUTSIDE, 8443), "the API server"
    assert network.connects(operator, TRAINER, 29501) and network.connects(PEER, TRAINER, 29500)
    assert network.connects(Place("monitoring"), operator, 8080)
    for port in (22, 8081):
        assert not network.connects(Place("monitoring"), operator, port)
    assert not network.connects(operator, OUTSIDE, 80) and not network.connects(operator, WEB, 80)
    assert not network.connects(WEB, TRAINER, 29500) and not network.connects(operator, TRAINER, 29500)
    assert network.connects(TRAINER, OUTSIDE, 443) and network.connects(TRAINER, WEB, 80)


def test_operator_of_another_release_in_the_namespace_is_not_admitted() -> None:
    network = Network((job_policy(settings_of("ddpjob")),))
    assert not network.connects(operator_of("prod"), TRAINER, 29501)


@pytest.mark.apiserver
def test_api_server_stores_both_policies_as_they_are_sent(control_plane: ControlPlane, namespace: str) -> None:
    """Otherwise the operator would compare the stored policy with another one, and patch it without end."""
    path = f"/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies?fieldValidation=Strict"
    [chart_policy] = of_kind(template(CHART_VALUES), "NetworkPolicy")
    for number, settings in enumerate((EngineSettings(), EngineSettings(pod_namespace="ops"), settings_of("ddpjob"))):
        policy = job_policy(settings) | {"metadata": {"name": f"job-{number}"}}
        assert control_plane.request("POST", path, policy)["spec"] == policy["spec"]
    stored = control_plane.request("POST", path, chart_policy | {"metadata": {"name": "operator"}})
    assert stored["spec"]["policyTypes"] == ["Ingress", "Egress"]
