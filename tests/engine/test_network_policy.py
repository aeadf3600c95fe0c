"""``networkPolicy: Isolated``: who reaches the pods, and when the policy is created, restored and deleted."""

import copy
from typing import Any

import pytest

from ddpjob.api import names
from ddpjob.api.objects import Json
from ddpjob.engine.actions import EngineSettings, Problem
from ddpjob.engine.desired import Job, desired_pods
from ddpjob.engine.network import desired_policy
from tests.builders import UID, World, a_job, a_running_world, is_idle
from tests.network_policies import OUTSIDE, Network, Place

OPERATOR = {"app.kubernetes.io/name": "ddpjob", "app.kubernetes.io/component": "operator"}
SETTINGS = EngineSettings(pod_namespace="ddpjob-system", pod_labels=OPERATOR)


def an_isolated_job(**spec: Any) -> Json:
    return a_job(networkPolicy="Isolated", **spec)


def policy_of(settings: EngineSettings = SETTINGS, **spec: Any) -> Json:
    made = desired_policy(Job.of(an_isolated_job(**spec)), settings)
    assert made is not None
    return made.body


def pod_of(job: Json, node_rank: int = 0) -> Place:
    meta = desired_pods(Job.of(job), 1, SETTINGS)[node_rank].body["metadata"]
    return Place(meta["namespace"], meta["labels"])


OWN = pod_of(an_isolated_job(), 1)
OTHER_UID = {**OWN.labels, names.LABEL_JOB_UID: "another"}


@pytest.mark.parametrize(
    ("source", "ports"),
    [
        pytest.param(OWN, {29500, 29501, 40000}, id="a pod of the job"),
        pytest.param(Place("ddpjob-system", {**OPERATOR, "pod-template-hash": "5"}), {29501}, id="the operator"),
        pytest.param(
            Place("ddpjob-system", {"app.kubernetes.io/name": "grafana"}), set(), id="the operator's neighbor"
        ),
        pytest.param(Place("default", OPERATOR), set(), id="a pod with the operator's labels elsewhere"),
        pytest.param(Place("default", OTHER_UID), set(), id="a pod of a deleted job of the same name"),
        pytest.param(Place("default", {"app": "web"}), set(), id="another pod of the namespace"),
        pytest.param(Place("team-b", OWN.labels), set(), id="a pod of another namespace with the job's labels"),
        pytest.param(OUTSIDE, set(), id="an address outside"),
    ],
)
def test_only_the_jobs_pods_and_the_operator_reach_an_isolated_job(source: Place, ports: set[int]) -> None:
    network = Network((policy_of(),))
    target = pod_of(an_isolated_job())
    assert {port for port in (29500, 29501, 40000) if network.connects(source, target, port)} == ports


def test_the_operator_reaches_another_progress_port_and_no_other_protocol() -> None:
    network = Network((policy_of(rendezvous={"progressPort": 30000}),))
    operator, target = Place("ddpjob-system", OPERATOR), pod_of(an_isolated_job())
    assert network.connects(operator, target, 30000) and not network.connects(operator, target, 29501)
    assert not network.connects(operator, target, 30000, "UDP")


def test_an_isolated_job_reaches_everything_and_changes_nothing_for_others() -> None:
    network = Network((policy_of(),))
    own, other = pod_of(an_isolated_job()), Place("default", {"app": "web"})
    for target in (other, Place("kube-system", {"k8s-app": "kube-dns"}), OUTSIDE):
        assert network.connects(own, target, 53, "UDP")
    assert network.connects(Place("team-b"), other, 80)


def test_an_operator_outside_of_the_cluster_is_not_admitted() -> None:
    assert len(policy_of(EngineSettings())["spec"]["ingress"]) == 1


def test_without_labels_every_pod_of_the_operators_namespace_is_admitted() -> None:
    network = Network((policy_of(EngineSettings(pod_namespace="ops")),))
    assert network.connects(Place("ops", {"a": "b"}), pod_of(an_isolated_job()), 29501)


def kinds(world: World) -> list[list[str]]:
    """Return the kinds of each phase of the creates that the world's plans made."""
    return [
        list(dict.fromkeys(create.resource.kind for create in phase)) for plan in world.plans for phase in plan.creates
    ]


def test_the_policy_is_created_before_the_pods() -> None:
    world = World(an_isolated_job())
    world.settle()
    assert kinds(world) == [["NetworkPolicy"], ["Pod", "Service"]]


EDITS: tuple[Json, ...] = (
    {"podSelector": {}},
    {"podSelector": {"matchLabels": {names.LABEL_JOB_UID: UID, "app": "web"}}},
    {"ingress": [{}]},
    {"ingress": None},
    {"policyTypes": ["Egress"]},
    {"policyTypes": ["Ingress", "Egress"], "egress": [{"to": [{"podSelector": {}}]}]},
)


@pytest.mark.parametrize("edit", EDITS, ids=str)
def test_an_edited_policy_is_restored(edit: Json) -> None:
    world = a_running_world(an_isolated_job())
    assert world.policy is not None
    whole = copy.deepcopy(world.policy["spec"])
    world.policy["spec"] = {key: value for key, value in (whole | edit).items() if value is not None}
    world.settle()
    assert world.policy["spec"] == whole
    assert is_idle(world.reconcile())


def test_a_policy_follows_the_operator_to_another_namespace() -> None:
    world = a_running_world(an_isolated_job())
    world.settings = SETTINGS
    world.settle()
    assert world.policy is not None and world.policy["spec"] == policy_of()["spec"]


def test_the_field_of_a_running_job_can_be_switched_on_and_off() -> None:
    world = a_running_world(a_job())
    for wanted in ("Isolated", None, "Isolated"):
        world.edit(networkPolicy=wanted)
        assert (world.policy is not None) == (wanted is not None)
    assert world.status["attempt"] == 1


def test_the_policy_is_whole_before_the_pods_of_the_next_attempt_are_created() -> None:
    world = a_running_world(an_isolated_job())
    world.job["spec"] |= {"suspend": True}
    world.settle()
    assert world.policy is not None
    world.policy["spec"]["ingress"] = [{}]
    world.job["spec"] |= {"suspend": False}
    while not world.reconcile().creates:
        pass
    assert world.policy["spec"]["ingress"] != [{}]


def test_a_policy_of_another_owner_is_neither_changed_nor_deleted() -> None:
    world = World(a_job())
    foreign = {"metadata": {"name": names.service_name("mnist", UID), "uid": "u"}, "spec": {"podSelector": {}}}
    world.policy = copy.deepcopy(foreign)
    world.settle()
    assert world.policy == foreign


def test_a_policy_of_another_owner_is_no_policy_of_the_job() -> None:
    """The create is refused with AlreadyExists, and shown as NameConflict."""
    world = World(an_isolated_job())
    world.policy = {"metadata": {"name": names.service_name("mnist", UID), "uid": "u"}, "spec": {}}
    world.reconcile()
    assert kinds(world)[0] == ["NetworkPolicy"]


def test_a_refused_policy_of_a_running_job_is_shown_and_ends_nothing() -> None:
    world = a_running_world(a_job())
    world.job["spec"]["networkPolicy"] = "Isolated"
    text = 'networkpolicies.networking.k8s.io is forbidden: User "operator" cannot create resource'
    world.problems = (Problem("CreateRefused", names.NETWORK_POLICIES, "mnist-0a1b2", text),)
    made = world.reconcile()
    stalled = world.condition("Stalled")
    assert (stalled["status"], stalled["reason"], stalled["message"]) == ("True", "CreateRefused", text)
    assert [note.reason for note in made.events] == ["CreateRefused"]
    assert world.status["attempt"] == 1 and world.condition("Running")["status"] == "True"


@pytest.mark.parametrize("host_network", [True, False])
def test_a_policy_without_effect_is_named_in_an_event(host_network: bool) -> None:
    world = World(an_isolated_job(template={"spec": {"hostNetwork": host_network}}))
    world.settle()
    reasons = [note.reason for plan in world.plans for note in plan.events]
    assert ("NetworkPolicyIgnored" in reasons) is host_network


def test_a_changed_template_does_not_keep_the_policy_from_being_created() -> None:
    world = a_running_world(an_isolated_job())
    world.job["spec"]["template"] = {"spec": {"hostNetwork": True}}
    world.policy = None
    world.settle()
    assert world.policy is not None
