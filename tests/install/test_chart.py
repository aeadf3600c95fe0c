"""Which values Helm accepts and refuses, and what it renders from the chart."""

from typing import Any

import pytest
import yaml

from tests.install.chart import CHART, NAMESPACE, helm, of_kind, refusal, template

DIGEST = "sha256:" + "0" * 64
CLUSTER_SCOPED = {"CustomResourceDefinition", "ClusterRole", "ClusterRoleBinding", "Namespace"}


def leaves(values: dict[str, Any], path: str = "") -> list[str]:
    """Return the dotted names of all values; an empty or free-form object counts as one."""
    found = []
    for key, value in values.items():
        name = f"{path}{key}"
        inner = isinstance(value, dict) and value and key != "resources"
        found += leaves(value, f"{name}.") if inner else [name]
    return found


def operator_pod(**values: Any) -> dict[str, Any]:
    [deployment] = of_kind(template(values), "Deployment")
    spec: dict[str, Any] = deployment["spec"]["template"]["spec"]
    return spec


def environment(**values: Any) -> dict[str, str]:
    return {e["name"]: e["value"] for e in operator_pod(**values)["containers"][0]["env"] if "value" in e}


@pytest.mark.parametrize(
    "values", [[], ["--set", "scope=namespace,namespaces={team-a},crds.install=false,metrics.enabled=true"]]
)
def test_helm_lint_reports_nothing(values: list[str]) -> None:
    done = helm("lint", "--strict", str(CHART), *values)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[WARNING]" not in done.stdout


def test_chart_has_at_most_50_values_and_each_has_a_comment() -> None:
    """Each value is something to decide for who installs the chart. A queue and a gang scheduler are two systems.

    One value allows what lends the operator's account to tenants. Five fit the pod into a platform, and one
    has defaults for the jobs of a team. Ten are of alerts and a dashboard, five of them thresholds.
    """
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    names = leaves(yaml.safe_load(text))
    assert len(names) <= 50, names
    for name in names:
        key = name.rsplit(".", 1)[-1]
        lines = text.splitlines()
        at = next(number for number, line in enumerate(lines) if line.strip().startswith(f"{key}:"))
        block = lines[:at]
        while block and not block[-1].strip().startswith("#") and block[-1].strip():
            block.pop()  # values without a blank line between them share a comment
        assert block and block[-1].strip().startswith("#"), f"{name} has no comment"


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"imagee": {}}, "imagee"),
        ({"image.tag": "not a tag"}, "tag"),
        ({"fullnameOverride": "Upper"}, "fullnameOverride"),
        ({"scope": "namespaces"}, "scope"),
        ({"scope": "namespace", "namespaces": ["Team"]}, "namespaces"),
        ({"crds.keep": None}, "keep"),
        ({"replicas": 0}, "replicas"),
        ({"operator.maxConcurrentRequests": 1.5}, "maxConcurrentRequests"),
        ({"defaults": {"team-a": {"numNodes": 2}}}, "numNodes"),
        ({"extraEnv": [{"name": "DDPJOB_OPERATOR_LOG_LEVEL", "value": "debug"}]}, "extraEnv"),
        ({"metrics.serviceMonitor": True}, "metrics"),
    ],
    ids=str,
)
def test_invalid_values_are_refused_by_name(values: dict[str, Any], name: str) -> None:
    message = refusal(values)
    assert "values don't meet the specifications of the schema" in message
    assert name in message


def test_namespaces_without_scope_namespace_are_refused_with_what_to_set() -> None:
    message = refusal({"namespaces": ["team-a"]})
    assert 'namespaces=["team-a"] has no effect with scope=cluster' in message
    assert "Set scope=namespace" in message


def test_defaults_that_would_have_no_effect_are_refused() -> None:
    values: dict[str, Any] = {"defaults": {"team-a": {"maxRestarts": 1}}}
    assert "this API server does not serve: use Kubernetes 1.36" in refusal(values)
    served = ("--api-versions", "admissionregistration.k8s.io/v1/MutatingAdmissionPolicy")
    scoped = values | {"scope": "namespace", "namespaces": ["team-b"]}
    assert "the operator does not serve this namespace" in refusal(scoped, *served)


def test_cluster_scope_serves_all_namespaces_with_one_cluster_role() -> None:
    objects = template()
    assert environment()["DDPJOB_OPERATOR_NAMESPACES"] == ""
    assert not of_kind(objects, "Role", "RoleBinding")
    [binding] = of_kind(objects, "ClusterRoleBinding")
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "ddpjob-operator", "namespace": NAMESPACE}]


@pytest.mark.parametrize("given", [[], [NAMESPACE], ["team-a", NAMESPACE]], ids=str)
@pytest.mark.parametrize("reused", [False, True])
def test_release_does_not_serve_its_own_namespace_unless_a_value_allows_it(given: list[str], reused: bool) -> None:
    """Who may create pods in it can run them with the operator's account, in all namespaces that it serves."""
    values: dict[str, Any] = {"scope": "namespace", "namespaces": given}
    message = refusal(values | ({"serveReleaseNamespace": None} if reused else {}))
    assert NAMESPACE in message and "serveReleaseNamespace=true" in message and "security" in message
    assert environment(**values, serveReleaseNamespace=True)["DDPJOB_OPERATOR_NAMESPACES"].split(",")[-1] == NAMESPACE


@pytest.mark.parametrize(
    ("given", "allowed"), [([NAMESPACE], True), (["team-a", "team-b"], False), (["team-a", "team-b"], True)], ids=str
)
def test_namespace_scope_has_a_role_and_a_binding_in_each_namespace(given: list[str], allowed: bool) -> None:
    values, served = {"scope": "namespace", "namespaces": given, "serveReleaseNamespace": allowed}, given
    objects = template(values)
    assert environment(**values)["DDPJOB_OPERATOR_NAMESPACES"] == ",".join(served)
    assert [role["metadata"]["namespace"] for role in of_kind(objects, "Role")] == served
    bindings = of_kind(objects, "RoleBinding")
    assert [binding["metadata"]["namespace"] for binding in bindings] == served
    assert all(binding["subjects"][0]["namespace"] == NAMESPACE for binding in bindings)
    assert not of_kind(objects, "ClusterRoleBinding")


def test_namespace_scope_can_install_no_cluster_wide_object() -> None:
    objects = template({"scope": "namespace", "namespaces": ["team-a"], "crds.install": False, "userRoles": False})
    assert not of_kind(objects, *CLUSTER_SCOPED)


def test_crd_and_user_roles_are_kept_on_uninstall_unless_crds_keep_is_false() -> None:
    """Seen: jobs stayed, and users were refused to read and stop them, because their roles went."""
    keep = {"helm.sh/resource-policy": "keep"}
    for values, crd in (({}, 1), ({"crds.install": False}, 0), ({"crds.keep": False}, 1)):
        objects = template(values)
        found = [item["metadata"] for item in of_kind(objects, "CustomResourceDefinition", "ClusterRole")]
        kept = {item["name"] for item in found if item.get("annotations") == keep}
        expected = {"ddpjob-edit", "ddpjob-view", *["ddpjobs.ddpjob.dev"][:crd]}
        assert kept == (set() if "crds.keep" in values else expected)
    assert not of_kind(template({"crds.install": False}), "CustomResourceDefinition")


def test_default_image_name_is_never_pulled() -> None:
    default = operator_pod()["containers"][0]
    mine = operator_pod(**{"image.repository": "registry.example.com/ddpjob/operator"})["containers"][0]
    forced = operator_pod(**{"image.pullPolicy": "Always"})["containers"][0]
    assert (default["image"], default["imagePullPolicy"]) == ("ddpjob/operator:0.1.0", "Never")
    assert mine["image"] == "registry.example.com/ddpjob/operator:0.1.0"
    assert mine["imagePullPolicy"] == "IfNotPresent"
    assert forced["imagePullPolicy"] == "Always"


def test_an_image_can_be_pinned_by_its_digest() -> None:
    pod = operator_pod(**{"image.repository": "registry.example.com/op", "image.tag": DIGEST})
    assert pod["containers"][0]["image"] == f"registry.example.com/op@{DIGEST}"


@pytest.mark.parametrize(
    ("values", "image", "policy"),
    [
        ({}, "ddpjob/trainer:0.1.0", "Never"),
        ({"image.tag": "dev"}, "ddpjob/trainer:dev", "Never"),
        ({"image.repository": "reg.example/op"}, "reg.example/op-trainer:0.1.0", "IfNotPresent"),
        (
            {"image.repository": "reg.example/op", "image.pullPolicy": "Always"},
            "reg.example/op-trainer:0.1.0",
            "Always",
        ),
        ({"image.repository": "reg.example/ddpjob/operator"}, "reg.example/ddpjob/trainer:0.1.0", "IfNotPresent"),
        (
            {"image.repository": "reg.example/operator", "image.tag": DIGEST},
            "reg.example/trainer:0.1.0",
            "IfNotPresent",
        ),
        ({"operator.launcherImage": f"r/t@{DIGEST}"}, f"r/t@{DIGEST}", "IfNotPresent"),
        # The default name is not ours in any registry, so the policy for the operator's image pulls no launcher.
        ({"image.pullPolicy": "Always"}, "ddpjob/trainer:0.1.0", "Never"),
        ({"image.pullPolicy": "Always", "operator.launcherImage": "r/t:1"}, "r/t:1", "Always"),
        ({"operator.launcherImage": None}, "ddpjob/trainer:0.1.0", "Never"),  # helm upgrade --reuse-values
    ],
    ids=str,
)
def test_launcher_image_is_the_trainer_image_beside_the_operators(
    values: dict[str, Any], image: str, policy: str
) -> None:
    env = environment(**values)
    assert env["DDPJOB_OPERATOR_LAUNCHER_IMAGE"] == image
    assert env["DDPJOB_OPERATOR_LAUNCHER_PULL_POLICY"] == policy
    # `helm test` starts the same.
    _, tested = of_kind(template(values), "Pod")
    [container] = tested["spec"]["containers"]
    assert (container["image"], container["imagePullPolicy"]) == (image, policy)


def test_every_setting_reaches_the_operator_unchanged() -> None:
    values = {
        "operator.clusterDomain": "corp.example",
        "operator.progressIntervalSeconds": 3600,
        "operator.sweepIntervalSeconds": 30,
        "operator.logLevel": "debug",
        "operator.maxConcurrentRequests": 1000,
        "operator.readLogs": False,
        "operator.launcherImage": "r/t:1",
    }
    env = environment(**values)
    for name, value in values.items():
        key = "".join(f"_{letter}" if letter.isupper() else letter.upper() for letter in name.split(".")[1])
        assert env.pop(f"DDPJOB_OPERATOR_{key}") == (str(value).lower() if value is False else str(value))
    assert env.pop("DDPJOB_OPERATOR_LAUNCHER_PULL_POLICY")
    assert env.pop("DDPJOB_OPERATOR_POD_LABELS")  # tests/install/test_network_policies.py
    assert env == {"DDPJOB_OPERATOR_NAMESPACES": "", "DDPJOB_OPERATOR_HEALTH_PORT": "8080"}
    assert environment(**{"metrics.perJob": True})["DDPJOB_OPERATOR_METRICS_PER_JOB"] == "true"


def test_scheduling_values_reach_the_operators_pod() -> None:
    values: dict[str, Any] = {
        "priorityClassName": "system-cluster-critical",
        "nodeSelector": {"role": "infra"},
        "affinity": {"nodeAffinity": {}},
        "imagePullSecrets": [{"name": "login"}],
    }
    pod = operator_pod(**values, tolerations=[{"key": "infra", "operator": "Exists"}])
    assert {name: pod[name] for name in values} == values
    assert pod["tolerations"][0] == {"key": "infra", "operator": "Exists"}


def test_values_of_a_platform_reach_the_operators_pod_and_account() -> None:
    zones = [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}]
    values: dict[str, Any] = {
        "replicas": 2,
        "podLabels": {"team": "ml", "app.kubernetes.io/name": "another"},
        "podAnnotations": {"inject": "false"},
        "serviceAccount.annotations": {"role": "r"},
        "topologySpreadConstraints": zones,
        "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
    }
    objects = template(values, hooks=False)
    [deployment] = of_kind(objects, "Deployment")
    made, selected = deployment["spec"]["template"]["metadata"], deployment["spec"]["selector"]["matchLabels"]
    assert made["labels"] == {**selected, "team": "ml"}, "the Deployment selects its pods by its own labels"
    assert made["annotations"]["inject"] == "false"
    assert deployment["spec"]["template"]["spec"]["topologySpreadConstraints"] == zones
    assert environment(**values)["HTTPS_PROXY"] == "http://proxy:3128"
    [account] = of_kind(objects, "ServiceAccount")
    assert account["metadata"]["annotations"] == {"role": "r"}


@pytest.mark.parametrize("replicas", [1, 2])
def test_old_pod_works_until_its_successor_is_ready(replicas: int) -> None:
    """Seen: an upgrade to a tag that does not exist left no operator until the rollback."""
    [deployment] = of_kind(template({"replicas": replicas}), "Deployment")
    assert deployment["spec"]["strategy"] == {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0}}


def test_pod_on_a_lost_node_is_replaced_after_30_s_unless_the_values_say_otherwise() -> None:
    added = {
        toleration["key"]: toleration["tolerationSeconds"]
        for toleration in operator_pod()["tolerations"]
        if toleration["effect"] == "NoExecute"
    }
    assert added == {"node.kubernetes.io/not-ready": 30, "node.kubernetes.io/unreachable": 30}
    given = {"key": "node.kubernetes.io/unreachable", "operator": "Exists", "tolerationSeconds": 5}
    tolerations = operator_pod(tolerations=[given])["tolerations"]
    assert [item for item in tolerations if item["key"] == given["key"]] == [given]


def test_replicas_share_a_lease_on_different_nodes_and_are_drained_one_by_one() -> None:
    single, several = template(hooks=False), template({"replicas": 2}, hooks=False)
    assert not of_kind(single, "PodDisruptionBudget", "Role")
    assert "DDPJOB_OPERATOR_LEASE" not in environment()
    assert environment(replicas=2)["DDPJOB_OPERATOR_LEASE"] == f"{NAMESPACE}/ddpjob-operator"
    [deployment] = of_kind(several, "Deployment")
    labels = deployment["spec"]["selector"]["matchLabels"]
    assert deployment["spec"]["replicas"] == 2
    [spread] = deployment["spec"]["template"]["spec"]["topologySpreadConstraints"]
    assert spread["labelSelector"]["matchLabels"] == labels
    [budget] = of_kind(several, "PodDisruptionBudget")
    assert budget["spec"] == {"maxUnavailable": 1, "selector": {"matchLabels": labels}}


def test_upgrade_may_reuse_the_values_of_a_release_that_had_fewer() -> None:
    later = ("replicas", "networkPolicy", "podLabels", "podAnnotations", "serviceAccount", "extraEnv", "defaults")
    later += ("topologySpreadConstraints", "metrics.rules", "metrics.dashboard", "metrics.perJob")
    assert template(dict.fromkeys(later)) == template()


def test_operators_of_two_namespaces_have_no_object_of_the_cluster_in_common() -> None:
    """The second release leaves out the CRD and the user roles, as docs/tasks/operations.md says."""
    values = {"kueue.enabled": True, "crds.install": False, "userRoles": False, "replicas": 2}
    values |= {"scope": "namespace", "namespaces": ["training"]}
    first, second = (
        {
            (item["kind"], item["metadata"]["name"])
            for item in of_kind(template(values, namespace=each), *CLUSTER_SCOPED)
        }
        for each in ("team-a", "team-b")
    )
    assert first and first.isdisjoint(second)


def test_metrics_are_off_by_default_and_add_service_and_monitor() -> None:
    kinds = {item["kind"] for item in template(hooks=False)}
    assert kinds.isdisjoint({"Service", "ServiceMonitor", "PrometheusRule", "ConfigMap"})
    assert "Service" in {item["kind"] for item in template({"metrics.enabled": True}, hooks=False)}
    values = {"metrics.enabled": True, "metrics.serviceMonitor": True, "metrics.serviceMonitorLabels": {"a": "b"}}
    [monitor] = of_kind(template(values), "ServiceMonitor")
    [service] = of_kind(template(values, hooks=False), "Service")
    assert monitor["metadata"]["labels"]["a"] == "b"
    assert monitor["spec"]["endpoints"][0]["honorLabels"], "the label namespace is the job's, not the operator's"
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()


@pytest.mark.parametrize(
    ("release", "name"),
    [("ddpjob", "ddpjob-operator"), ("prod", "prod-ddpjob-operator"), ("my-ddpjob", "my-ddpjob-operator")],
)
def test_object_names_have_release_and_chart_once(release: str, name: str) -> None:
    [deployment] = of_kind(template(release=release), "Deployment")
    assert deployment["metadata"]["name"] == name


def test_longest_release_name_gives_valid_object_names() -> None:
    for item in template(release="r" * 53):
        assert len(item["metadata"]["name"]) <= 63
