"""What happens to the cluster's nodes and to processes on them; each node is a container of the Docker engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

from ddpjob.api.objects import Json, condition
from tests.e2e.kubectl import Kubectl, until
from tests.kind.cluster import Cluster
from tests.kind.cluster_config import ready_nodes
from tests.kind.docker import docker, ensure_engine

BROKEN_HOOK = [{"name": "DDPJOB_E2E_HOOK", "value": "broken"}]
"""Environment of the containers that do not start on a node with ``broken_hook``."""
_RUNC = """
found=$(sed -n 's/^ *BinaryName *= *"\\(..*\\)"/\\1/p' /etc/containerd/config.toml | tail -n 1)
echo "${found:-$(command -v runc)}"
"""
_WITH_HOOK = """\
#!/bin/sh
for word in "$@"; do
    [ "$before" != --bundle ] || config="$word/config.json"
    before="$word"
done
if [ -n "$config" ] && grep -q DDPJOB_E2E_HOOK=broken "$config"; then
    sed -i '1s/{{/{{"hooks":{{"prestart":[{{"path":"\\/bin\\/false"}}]}},/' "$config"
fi
exec {runc}.real "$@"
"""
# The container's first process: 1 in its own PID namespace, and not that of the pod's pause container.
_KILL_FIRST_PROCESS = """
for folder in /proc/[0-9]*; do
    grep -qs "{uid}" $folder/cgroup || continue
    grep -qsE '^NSpid:.*[[:space:]]1$' $folder/status || continue
    [ "$(cat $folder/comm)" = pause ] || {{ date +%s.%N && kill -KILL ${{folder#/proc/}}; }}
done
"""

LEAVING_TAINT = "ddpjob-e2e/leaves"
_LOGIND = "/org/freedesktop/login1 org.freedesktop.login1.Manager"
_SHUTDOWN = f"dbus-send --system {_LOGIND}.PrepareForShutdown boolean:"
_INHIBITORS = f"dbus-send --system --print-reply --dest=org.freedesktop.login1 {_LOGIND}.ListInhibitors"


def terms(*names: str) -> Json:
    """Return a term of an affinity that selects these nodes."""
    return {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": [*names]}]}


def run_on(node: str, script: str) -> str:
    """Run a shell script on a node and return its output. Raises CommandError."""
    return docker("exec", node, "sh", "-c", script, engine=ensure_engine(), timeout=60).stdout


def kill_first_process(pod: Json) -> float:
    """Send SIGKILL to process 1 of the pod's container, which no process in the container can, and return when."""
    uid = pod["metadata"]["uid"].replace("-", "[-_]")
    said = run_on(pod["spec"]["nodeName"], _KILL_FIRST_PROCESS.format(uid=uid))
    assert len(said.split()) == 1, f"not exactly one process was killed: {said!r}"
    return float(said)


@contextmanager
def leaving_node(cluster: Cluster) -> Iterator[None]:
    """Keep everything off the node that tests drain and stop, apart from pods that tolerate the taint."""
    kubectl = Kubectl(cluster.kubeconfig)
    kubectl("taint", "node", leaving(cluster), f"{LEAVING_TAINT}=true:NoSchedule", "--overwrite")
    move_dns_away(kubectl, leaving(cluster))
    yield
    kubectl("taint", "node", leaving(cluster), f"{LEAVING_TAINT}-")


def leaving(cluster: Cluster) -> str:
    """Return the node that tests drain and stop."""
    return cluster.workers[-1]


def staying(cluster: Cluster) -> tuple[str, ...]:
    """Return the workers that no test stops."""
    return cluster.workers[:-1]


def move_dns_away(kubectl: Kubectl, node: str) -> None:
    """Evict the cluster's only DNS server from a node, because the jobs need it."""
    system = kubectl.within("kube-system")
    try:
        system("drain", node, "--ignore-daemonsets", "--pod-selector=k8s-app=kube-dns", "--timeout=60s", timeout=90)
        system("rollout", "status", "deployment/coredns", "--timeout=90s", timeout=120)
    finally:
        system("uncordon", node)


def has_logind(node: str) -> bool:
    """Return whether logind runs on the node, from which kubelet learns that its machine shuts down."""
    return "method return" in run_on(node, f"{_INHIBITORS} 2>&1 || true")


def announce_shutdown(node: str) -> None:
    """Send logind's signal that the machine shuts down. Kubelet then ends the pods, in the order of their priority.

    The container itself runs on, so that the test can ask what became of its pods. Kubernetes' own tests of kubelet do
    the same (test/e2e_node/node_shutdown_linux_test.go).
    """
    run_on(node, f"{_SHUTDOWN}true")


def cancel_shutdown(cluster: Cluster, node: str) -> None:
    """Send the signal that the machine stays up, and wait until the node and its network work again."""
    run_on(node, f"{_SHUTDOWN}false")
    _until_all_ready(cluster, node)
    system = Kubectl(cluster.kubeconfig, "kube-system")
    # The controller of DaemonSets replaces refused pods after ever longer delays, but deleted ones at once.
    system("delete", "pods", f"--field-selector=spec.nodeName={node},status.phase=Failed")
    for daemon in system.objects("daemonsets"):
        system("rollout", "status", f"daemonset/{daemon['metadata']['name']}", "--timeout=120s", timeout=150)


def stop(node: str) -> None:
    """End all processes of a node at once, as a machine that is switched off.

    `docker stop` would let the node's systemd send SIGTERM to the trainer, which then stops at a step as if drained.
    """
    docker("kill", node, engine=ensure_engine(), timeout=120)


def start(cluster: Cluster, node: str) -> None:
    """Start a stopped node, and wait until all nodes are Ready."""
    docker("start", node, engine=ensure_engine(), timeout=60)
    _until_all_ready(cluster, node)


@contextmanager
def broken_hook(node: str) -> Iterator[None]:
    """Let a hook of the runtime fail on a node, as NVIDIA's does without a driver, for containers with the variable.

    NVIDIA's runtime, too, is a program in front of runc that adds the hook.
    """
    runc = run_on(node, _RUNC).strip()
    run_on(node, f"cat > {runc}.new <<'EOF'\n{_WITH_HOOK.format(runc=runc)}EOF\nchmod 755 {runc}.new")
    run_on(node, f"cp --preserve {runc} {runc}.real && mv {runc}.new {runc}")
    try:
        yield
    finally:
        # The copy stays for a program with the hook that has started and not called it yet.
        run_on(node, f"cp --preserve {runc}.real {runc}.new && mv {runc}.new {runc}")


@contextmanager
def without_kubelet(cluster: Cluster, node: str) -> Iterator[None]:
    """Stop the kubelet of a node, wait until the control plane notices, and start it again at the end."""
    kubectl = Kubectl(cluster.kubeconfig)
    run_on(node, "pkill -STOP -x kubelet")
    try:

        def is_noticed() -> bool:
            return condition(kubectl.object("node", node).get("status"), "Ready").get("status") == "Unknown"

        until(f"{node} is not Ready", is_noticed, seconds=180)
        yield
    finally:
        run_on(node, "pkill -KILL -x kubelet")  # systemd, or the loop of the node's first process, starts it again
        _until_all_ready(cluster, node)


def _until_all_ready(cluster: Cluster, node: str) -> None:
    def all_ready() -> bool:
        return ready_nodes(json.loads(cluster.kubectl("get", "nodes", "-o=json").stdout)) == set(cluster.nodes)

    until(f"{node} is Ready again", all_ready, seconds=180)
