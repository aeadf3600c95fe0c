"""The objects of an attempt, and the precedence of operator, spec, template and defaults."""

import copy
from typing import Any

import pytest

from ddpjob.api import names
from ddpjob.engine.desired import Job, desired_claim, desired_pods, is_comparable, spec_hash
from ddpjob.engine.network import desired_service
from ddpjob.local.environment import expand
from tests.api.specs import CLAIM
from tests.builders import SETTINGS, UID, a_job, a_running_world, a_started_world, is_idle


def job_of(**spec: Any) -> Job:
    body = a_job(**spec)
    return Job.of(body)


def pod_of(rank: int = 0, attempt: int = 1, **spec: Any) -> dict[str, Any]:
    return desired_pods(job_of(**spec), attempt, SETTINGS)[rank].body


def env_of(pod: dict[str, Any]) -> dict[str, str]:
    return {variable["name"]: variable.get("value") for variable in pod["spec"]["containers"][0]["env"]}


def test_pods_differ_only_in_name_hostname_label_and_node_rank() -> None:
    pods = [copy.deepcopy(create.body) for create in desired_pods(job_of(numNodes=3), 2, SETTINGS)]
    first: dict[str, Any] = {}
    for rank, pod in enumerate(pods):
        name = f"mnist-0a1b2-2-{rank}"
        assert pod["metadata"]["name"] == pod["spec"]["hostname"] == name
        assert pod["metadata"]["labels"][names.LABEL_NODE_RANK] == str(rank)
        assert env_of(pod)["NODE_RANK"] == env_of(pod)["PET_NODE_RANK"] == str(rank)
        pod["metadata"] |= {"name": "", "labels": pod["metadata"]["labels"] | {names.LABEL_NODE_RANK: ""}}
        pod["spec"]["hostname"] = ""
        env = pod["spec"]["containers"][0]["env"]
        pod["spec"]["containers"][0]["env"] = [v for v in env if not v["name"].endswith("NODE_RANK")]
        first = first or pod
        assert pod == first
    assert {env_of(pod)["MASTER_ADDR"] for pod in pods} == {"mnist-0a1b2-2-0.mnist-0a1b2.default.svc.cluster.local"}


def test_environment_of_the_trainer_matches_the_design() -> None:
    pod = pod_of(
        nprocPerNode=2,
        rendezvous={"port": 3000, "progressPort": 3001, "timeoutSeconds": 60},
        checkpoint={"claimName": "c", "mountPath": "/ck"},
        data={"claimName": "d", "mountPath": "/da"},
    )
    assert env_of(pod) == {
        "MASTER_ADDR": "mnist-0a1b2-1-0.mnist-0a1b2.default.svc.cluster.local",
        "MASTER_PORT": "3000",
        "NNODES": "2",
        "NODE_RANK": "0",
        "NPROC_PER_NODE": "2",
        "PET_MASTER_ADDR": "mnist-0a1b2-1-0.mnist-0a1b2.default.svc.cluster.local",
        "PET_MASTER_PORT": "3000",
        "PET_NNODES": "2",
        "PET_NODE_RANK": "0",
        "PET_NPROC_PER_NODE": "2",
        "PET_MAX_RESTARTS": "0",
        "PET_RDZV_CONF": "timeout=60",
        "PET_RDZV_ID": f"{UID}-1",
        "DDPJOB_STOP_GRACE": "25",
        "DDPJOB_INPLACE_RESTARTS": "0",
        "DDPJOB_COMPLETION_GRACE": "300",
        "DDPJOB_NAME": "mnist",
        "DDPJOB_UID": UID,
        "DDPJOB_ATTEMPT": "1",
        "DDPJOB_CHECKPOINT_DIR": "/ck",
        "DDPJOB_DATA_DIR": "/da",
        "DDPJOB_PROGRESS_PORT": "3001",
        "HOME": "/tmp",
        "USER": "ddpjob",
    }


@pytest.mark.parametrize(("grace", "launchers"), [(None, "25"), (300, "295"), (8, "4"), (1, "1"), (0, "1")])
def test_launcher_gives_its_processes_the_grace_of_the_pod_but_for_its_own_end(
    grace: int | None, launchers: str
) -> None:
    pod = pod_of(template={"spec": {"terminationGracePeriodSeconds": grace}})
    assert env_of(pod)["DDPJOB_STOP_GRACE"] == launchers
    own = pod_of(env=[{"name": "DDPJOB_STOP_GRACE", "value": "7"}])
    assert env_of(own)["DDPJOB_STOP_GRACE"] == "7"


def test_launcher_knows_the_deadlines_that_end_an_attempt_without_a_step() -> None:
    found = env_of(pod_of(startupDeadlineSeconds=600, progressDeadlineSeconds=60, completionGraceSeconds=100))
    names = ("DDPJOB_STARTUP_DEADLINE", "DDPJOB_PROGRESS_DEADLINE", "DDPJOB_COMPLETION_GRACE")
    assert [found[name] for name in names] == ["600", "60", "100"]
    assert not set(names) & env_of(pod_of(successPolicy="NodeZero")).keys()


def test_launcher_knows_that_a_divergence_is_to_end_the_attempt() -> None:
    assert env_of(pod_of(onDivergence="Restart"))["DDPJOB_ON_DIVERGENCE"] == "restart"
    assert "DDPJOB_ON_DIVERGENCE" not in env_of(pod_of())


PROCESS_ENV = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}


def expanded(pod: dict[str, Any]) -> dict[str, str]:
    """Return the variables as the kubelet computes them, in order."""
    values: dict[str, str] = {}
    for variable in pod["spec"]["containers"][0]["env"]:
        values[variable["name"]] = expand(variable["value"], values)
    return values


@pytest.mark.parametrize("spec", [{}, {"nprocPerNode": 1}, {"resources": {"limits": {"nvidia.com/gpu": 1}}}])
def test_with_one_process_per_node_the_rank_is_that_of_the_node(spec: dict[str, Any]) -> None:
    for node_rank in range(3):
        values = expanded(pod_of(node_rank, numNodes=3, **spec))
        assert {name: values[name] for name in PROCESS_ENV} == {
            "RANK": str(node_rank),
            "WORLD_SIZE": "3",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
        }


@pytest.mark.parametrize("in_template", [False, True])
def test_rank_of_the_users_environment_overrides_the_operators(in_template: bool) -> None:
    env = [{"name": "RANK", "value": "7$(NODE_RANK)"}, {"name": "PLACE", "value": "$(RANK)/$(WORLD_SIZE)"}]
    spec = {"template": {"spec": {"containers": [{"name": "trainer", "env": env}]}}} if in_template else {"env": env}
    values = expanded(pod_of(1, **spec))
    assert (values["RANK"], values["WORLD_SIZE"], values["PLACE"]) == ("71", "2", "71/2")


def test_operator_values_override_the_template() -> None:
    trainer = {"name": "trainer", "env": [{"name": "MASTER_ADDR", "value": "evil"}]}
    metadata = {"labels": {names.LABEL_JOB_UID: "evil", "mine": "yes"}}
    spec = {"restartPolicy": "Always", "hostname": "evil", "subdomain": "evil", "containers": [trainer]}
    pod = pod_of(template={"metadata": metadata, "spec": spec})
    assert env_of(pod)["MASTER_ADDR"] != "evil"
    assert pod["spec"]["restartPolicy"] == "Never"
    assert pod["spec"]["hostname"] == "mnist-0a1b2-1-0" and pod["spec"]["subdomain"] == "mnist-0a1b2"
    assert pod["metadata"]["labels"][names.LABEL_JOB_UID] == UID
    assert pod["metadata"]["labels"]["mine"] == "yes"


def test_spec_fields_override_the_template_and_it_overrides_defaults() -> None:
    trainer = {"name": "trainer", "image": "template", "args": ["t"], "env": [{"name": "HOME", "value": "/root"}]}
    pod = pod_of(
        image="short", template={"spec": {"enableServiceLinks": True, "containers": [trainer], "tolerations": []}}
    )
    container = pod["spec"]["containers"][0]
    assert (container["image"], container["args"]) == ("short", ["t"])
    assert env_of(pod)["HOME"] == "/root"
    assert pod["spec"]["enableServiceLinks"] is True


def test_sidecars_and_init_containers_get_the_profile_by_default() -> None:
    own = {"name": "own", "image": "s", "securityContext": {"allowPrivilegeEscalation": True}}
    init = {"name": "init", "image": "s"}
    spec = pod_of(template={"spec": {"containers": [own], "initContainers": [init]}})["spec"]
    restricted = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert spec["initContainers"][0]["securityContext"] == restricted
    assert spec["containers"][1]["securityContext"] == restricted | {"allowPrivilegeEscalation": True}


NO_SIDECAR = {"sidecar.istio.io/inject": "false", "linkerd.io/inject": "disabled"}


def test_service_meshes_are_asked_for_no_sidecar() -> None:
    meta = pod_of()["metadata"]
    assert NO_SIDECAR.items() <= meta["annotations"].items()
    assert meta["labels"]["sidecar.istio.io/inject"] == "false"


@pytest.mark.parametrize("part", ["labels", "annotations"])
def test_users_wish_for_a_sidecar_is_kept_as_it_is(part: str) -> None:
    given = {"sidecar.istio.io/inject": "true", "linkerd.io/inject": "enabled"}
    meta = pod_of(template={"metadata": {part: given}})["metadata"]
    assert given.items() <= meta[part].items()
    other = meta["annotations" if part == "labels" else "labels"]
    assert not given.keys() & other.keys(), "one that contradicts it could win"


def test_pod_defaults_match_the_design() -> None:
    spec = pod_of()["spec"]
    assert spec["enableServiceLinks"] is False
    assert spec["automountServiceAccountToken"] is False
    assert spec["containers"][0]["terminationMessagePolicy"] == "FallbackToLogsOnError"
    assert {"name": "ddpjob-shm", "emptyDir": {"medium": "Memory"}} in spec["volumes"]
    assert {"name": "ddpjob-shm", "mountPath": "/dev/shm"} in spec["containers"][0]["volumeMounts"]


@pytest.mark.parametrize(
    ("security", "pod_context", "capabilities"),
    [
        (
            {},
            {"seccompProfile": {"type": "RuntimeDefault"}, "runAsNonRoot": True, "runAsUser": 1000, "fsGroup": 1000,
             "fsGroupChangePolicy": "OnRootMismatch"},
            {"drop": ["ALL"]},
        ),
        (
            {"runAsUser": 7, "fsGroup": 8},
            {"seccompProfile": {"type": "RuntimeDefault"}, "runAsNonRoot": True, "runAsUser": 7, "fsGroup": 8,
             "fsGroupChangePolicy": "OnRootMismatch"},
            {"drop": ["ALL"]},
        ),
        (
            {"profile": "Baseline", "runAsUser": 0},
            {"seccompProfile": {"type": "RuntimeDefault"}, "runAsUser": 0},
            None,
        ),
        ({"profile": "Unset", "runAsUser": 0}, {"runAsUser": 0}, None),
        ({"profile": "Unset"}, None, None),
    ],
)  # fmt: skip
def test_pod_security_profiles(security: dict[str, Any], pod_context: Any, capabilities: Any) -> None:
    spec = pod_of(podSecurity=security)["spec"]
    assert spec.get("securityContext") == pod_context
    assert spec["containers"][0].get("securityContext", {}).get("capabilities") == capabilities


def template_with(trainer: dict[str, Any], sidecar: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a spec whose template has these resources."""
    containers = [{"name": "side", "resources": sidecar or {}}, {"name": "trainer", "resources": trainer}]
    return {"template": {"spec": {"containers": containers}}}


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({}, 1),
        ({"nprocPerNode": 3}, 3),
        ({"resources": {"limits": {"nvidia.com/gpu": 8}}}, 8),
        ({"resources": {"limits": {"amd.com/gpu": "4", "cpu": "64"}}}, 4),
        (template_with({"limits": {"nvidia.com/gpu": 2}}), 2),
        ({"resources": {"limits": {"nvidia.com/gpu": "2e1"}}}, 20),
        ({"resources": {"limits": {"nvidia.com/mig-1g.5gb": 2, "nvidia.com/mig-2g.10gb": "3"}}}, 5),
        ({"resources": {"limits": {"nvidia.com/gpu": 1, "amd.com/gpu": 2, "nvidia.com/mig-1g.5gb": 4}}}, 7),
        ({"resources": {"limits": {"gpu.intel.com/i915": 2, "example.com/gpu-memory": 9, "cpu": 8}}}, 1),
        ({"resources": {"limits": {"nvidia.com/gpu": 0}}}, 1),
        ({"resources": {"requests": {"nvidia.com/gpu": 4}}}, 4),
        ({"resources": {"limits": {"nvidia.com/gpu": 2}, "requests": {"nvidia.com/gpu": 4, "amd.com/gpu": 1}}}, 3),
        # The short form overrides the template's limit, and adds to its other devices.
        (
            template_with(
                {"limits": {"nvidia.com/gpu": 2, "nvidia.com/mig-1g.5gb": 1}, "requests": {"amd.com/gpu": 3}},
                {"limits": {"nvidia.com/gpu": 32}},
            )
            | {"resources": {"limits": {"nvidia.com/gpu": 8}}},
            12,
        ),
    ],
)
def test_auto_is_the_number_of_devices_of_the_trainer_or_one(spec: dict[str, Any], expected: int) -> None:
    assert job_of(**spec).nproc_per_node == expected
    assert env_of(pod_of(**spec))["NPROC_PER_NODE"] == str(expected)


def test_checkpoint_and_data_mounts_match_the_environment() -> None:
    pod = pod_of(checkpoint={"claimName": "c", "subPath": "run/1"}, data={"claimName": "d"})
    assert {"name": "ddpjob-checkpoint", "mountPath": "/checkpoints", "subPath": "run/1"} in (
        pod["spec"]["containers"][0]["volumeMounts"]
    )
    assert {"name": "ddpjob-data", "mountPath": "/data", "readOnly": True} in (
        pod["spec"]["containers"][0]["volumeMounts"]
    )
    claims = [v["persistentVolumeClaim"]["claimName"] for v in pod["spec"]["volumes"] if "persistentVolumeClaim" in v]
    assert claims == ["c", "d"]


def test_claim_of_a_claim_template_has_no_owner() -> None:
    create = desired_claim(job_of(checkpoint={"claimTemplate": CLAIM}))
    assert create is not None and create.shared
    assert create.body["metadata"]["name"] == "mnist-checkpoints"
    assert "ownerReferences" not in create.body["metadata"]
    assert create.body["spec"] == CLAIM["spec"]
    deleted = desired_claim(job_of(checkpoint={"claimTemplate": CLAIM, "claimRetention": "Delete"}))
    assert deleted is not None and deleted.body["metadata"]["ownerReferences"][0]["uid"] == UID


def test_service_is_headless_and_publishes_not_ready_addresses() -> None:
    body = desired_service(job_of(rendezvous={"port": 3000})).body
    assert body["spec"]["clusterIP"] == "None"
    assert body["spec"]["publishNotReadyAddresses"] is True
    assert body["spec"]["selector"] == {names.LABEL_JOB_UID: UID}
    assert body["spec"]["ports"][0]["port"] == 3000


def test_everything_namespaced_is_owned_by_the_job() -> None:
    job = job_of()
    for create in (*desired_pods(job, 1, SETTINGS), desired_service(job)):
        (owner,) = create.body["metadata"]["ownerReferences"]
        assert owner["uid"] == UID and owner["controller"] is True


def hash_of(**spec: Any) -> str:
    return spec_hash(a_job(**spec)["spec"])


@pytest.mark.parametrize(
    "spec",
    [
        {"template": {"metadata": {"finalizers": ["x/y"]}}},
        {"template": {"spec": {"dnsPolicy": "None"}}},
        {"template": {"spec": {"containers": [{"name": "trainer", "livenessProbe": {"periodSeconds": 5}}]}}},
        {"checkpoint": {"claimTemplate": CLAIM}},
        {"checkpoint": {"claimTemplate": {"spec": CLAIM["spec"] | {"volumeMode": "Filesystem"}}}},
        {"resources": {"claims": [{"name": "gpu", "request": "one"}]}},
    ],
    ids=str,
)
def test_spec_hash_covers_what_the_schema_leaves_open(spec: dict[str, Any]) -> None:
    assert hash_of(**spec) != hash_of()
    assert hash_of(**spec) == hash_of(**copy.deepcopy(spec))


def test_spec_hash_covers_no_field_that_cel_rules_compare() -> None:
    later = {
        "compression": "none",
        "rendezvous": {"port": 3000, "progressPort": 29501},
        "checkpoint": {"claimName": "c"},
    }
    assert hash_of(args=["x"], suspend=True, activeDeadlineSeconds=5, **later) == hash_of()


def test_null_in_an_open_part_does_not_change_the_spec_hash() -> None:
    """The API server keeps it in a field that the schema does not declare, and drops it in one that it declares."""
    trainer = {"name": "trainer"}
    with_nulls = {"spec": {"dnsPolicy": None, "containers": [trainer | {"livenessProbe": None}]}}
    assert hash_of(template=with_nulls) == hash_of(template={"spec": {"containers": [trainer]}})
    assert hash_of(template=None) == hash_of()


def test_only_digests_of_the_same_form_are_compared() -> None:
    assert is_comparable(hash_of())
    assert not is_comparable(None)
    assert not is_comparable("0123456789abcdef")


def test_host_network_uses_cluster_dns_by_default() -> None:
    assert pod_of(template={"spec": {"hostNetwork": True}})["spec"]["dnsPolicy"] == "ClusterFirstWithHostNet"
    own = pod_of(template={"spec": {"hostNetwork": True, "dnsPolicy": "Default"}})
    assert own["spec"]["dnsPolicy"] == "Default"
    assert "dnsPolicy" not in pod_of()["spec"]


def test_only_labels_and_annotations_of_template_metadata_are_used() -> None:
    metadata = {"labels": {"a": "b"}, "annotations": {"c": "d"}, "finalizers": ["never/ends"]}
    pod = pod_of(template={"metadata": metadata})
    assert pod["metadata"]["labels"]["a"] == "b" and pod["metadata"]["annotations"]["c"] == "d"
    assert "finalizers" not in pod["metadata"]


EDITS: list[dict[str, Any]] = [
    {"selector": {"app": "web"}},
    {"selector": {}},
    {"ports": []},
    {"ports": [{"name": "rendezvous", "port": 1, "targetPort": 1, "protocol": "TCP"}]},
    {"publishNotReadyAddresses": False},
    {"type": "ExternalName", "externalName": "elsewhere.example", "clusterIP": ""},
]


@pytest.mark.parametrize("edit", EDITS)
def test_edited_service_of_a_running_job_is_restored(edit: dict[str, Any]) -> None:
    world = a_running_world(a_job())
    assert world.service is not None
    whole = copy.deepcopy(world.service["spec"])
    world.service["spec"] |= edit
    world.settle()
    assert world.service["spec"] == whole


def test_service_as_the_api_server_stores_it_is_not_changed() -> None:
    world = a_running_world(a_job())
    assert world.service is not None
    ports = [port | {"protocol": "TCP", "nodePort": 0} for port in world.service["spec"]["ports"]]
    world.service["spec"] |= {"ports": ports, "type": "ClusterIP", "clusterIPs": ["None"]}
    assert is_idle(world.reconcile())


def test_service_of_another_owner_is_not_changed() -> None:
    world = a_running_world(a_job())
    world.service = {"metadata": {"name": "mnist-0a1b2", "uid": "u"}, "spec": {"selector": {"app": "web"}}}
    assert is_idle(world.reconcile())


def test_values_of_the_template_that_the_operator_replaces_are_named_in_an_event() -> None:
    env = [{"name": "MASTER_ADDR", "value": "me"}, {"name": "MINE", "value": "x"}]
    template = {"hostname": "h", "subdomain": "s", "restartPolicy": "OnFailure"}
    world = a_started_world(a_job(template={"spec": template | {"containers": [{"name": "trainer", "env": env}]}}))
    (note,) = [note for plan in world.plans for note in plan.events if note.reason == "TemplateOverridden"]
    place = "spec.template.spec"
    for field in ("hostname", "subdomain", "restartPolicy", "containers[name=trainer].env[name=MASTER_ADDR]"):
        assert f"{place}.{field}" in note.message
    assert "MINE" not in note.message
    pod = world.pod(0)["spec"]
    assert pod["restartPolicy"] == "Never" and "h" not in (pod["hostname"], pod["subdomain"])
