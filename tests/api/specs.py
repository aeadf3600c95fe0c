"""Good and bad specs, and edits of a live job: one table for pydantic and for the API server's CEL.

Each bad spec has the field and a part of the rule's message, which both refusals must contain.
"""

from dataclasses import dataclass, field
from typing import Any

Spec = dict[str, Any]

CLAIM = {"spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}}
OK: Spec = {"image": "trainer:1"}
LONG_KEY = "example.com/" + "x" * 306  # 318 characters
KEY_RULE = "a key must have at most 317 characters"


@dataclass(frozen=True)
class Bad:
    """A spec that must be refused, with the field that the message must name.

    cel_only: a rule about metadata, which only the API server sees.
    says: text of the API server's message, for rules of this project (schema errors have Kubernetes' own text).
    """

    id: str
    field: str
    spec: Spec = field(default_factory=lambda: dict(OK))
    name: str = "job"
    says: str = ""
    cel_only: bool = False


@dataclass(frozen=True)
class Edit:
    """A change of one field on a live job; ``before`` and ``after`` are merged into the minimal spec."""

    id: str
    field: str
    before: Spec
    after: Spec


GOOD: dict[str, Spec] = {
    "image alone": OK,
    "everything short": OK
    | {
        "command": ["torchrun", "train.py"],
        "args": ["--epochs", "3"],
        "env": [
            {"name": "A", "value": "x"},
            {"name": "B", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
            {"name": "C", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "D", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu", "divisor": 1}}},
        ],
        "envFrom": [{"prefix": "P_", "configMapRef": {"name": "c", "optional": True}}],
        "workingDir": "/app",
        "resources": {"limits": {"cpu": 2, "memory": "1Gi", "nvidia.com/gpu": "8"}, "requests": {"cpu": "500m"}},
        "imagePullPolicy": "Always",
        "imagePullSecrets": [{"name": "registry"}],
        "numNodes": 4096,
        "minNodes": 1,
        "nprocPerNode": 64,
        "rendezvous": {"port": 1024, "timeoutSeconds": 10},
        "sharedMemory": {"sizeLimit": "2Gi"},
        "podSecurity": {"profile": "Baseline", "runAsUser": 0, "fsGroup": 0},
        "networkPolicy": "Isolated",
        "launcher": "Injected",
        "scheduling": {"schedulingPolicy": {"gang": {}}, "partialGangSeconds": 86400},
        "restartPolicy": {"maxRestarts": 0},
        "activeDeadlineSeconds": 1,
        "ttlSecondsAfterFinished": 0,
        "suspend": True,
        "checkpoint": {"claimName": "models", "mountPath": "/ckpt", "subPath": "a/b..c"},
        "data": {"claimName": "mnist", "mountPath": "/mnt/data"},
    },
    "claim template": OK | {"checkpoint": {"claimTemplate": CLAIM, "claimRetention": "Delete"}},
    "template image": {"template": {"spec": {"containers": [{"name": "trainer", "image": "i"}]}}},
    "template with what we do not know": OK
    | {
        "template": {
            "metadata": {"labels": {"a": "b"}, "annotations": {"c": "d"}, "finalizers": ["x/y"]},
            "spec": {
                "dnsPolicy": "Default",
                "containers": [{"name": "side", "image": "s", "livenessProbe": {"httpGet": {"port": 1}}}],
                "tolerations": [{"key": "gpu", "operator": "Exists"}],
                "affinity": {"nodeAffinity": {}},
            },
        }
    },
    "number with resource claims": OK
    | {"nprocPerNode": 2, "template": {"spec": {"resourceClaims": [{"name": "g", "resourceClaimName": "x"}]}}},
    "null in declared fields": OK
    | {
        "command": None,
        "numNodes": 2,
        "rendezvous": {"port": None, "timeoutSeconds": 60},
        "restartPolicy": {"maxRestarts": None},
        "resources": {"limits": {"cpu": 1, "memory": None}},
        "template": {"spec": {"nodeSelector": {"a": "b", "c": None}, "containers": None}},
    },
    "nproc auto": OK | {"nprocPerNode": "auto"},
    "default port of progress as the port": OK | {"rendezvous": {"port": 29501, "progressPort": 29500}},
    "longest keys": OK
    | {
        "resources": {"limits": {LONG_KEY[:-1]: 1}},
        "template": {"metadata": {"labels": {LONG_KEY[:-1]: "v"}}, "spec": {"nodeSelector": {LONG_KEY[:-1]: "v"}}},
    },
    "longest quantity": OK | {"resources": {"limits": {"cpu": "1" * 64}}},
    "last ports": OK | {"rendezvous": {"port": 65535, "progressPort": 1024}},
}

BAD: tuple[Bad, ...] = (
    Bad("zero nodes", "numNodes", OK | {"numNodes": 0}),
    Bad("100,000 nodes", "numNodes", OK | {"numNodes": 100_000}),
    Bad("negative nodes", "numNodes", OK | {"numNodes": -1}),
    Bad("nodes as text", "numNodes", OK | {"numNodes": "2"}),
    Bad("half a node", "numNodes", OK | {"numNodes": 1.5}),
    Bad("name of 64 characters", "metadata.name", name="a" * 64, says="at most 45", cel_only=True),
    Bad("name of 46 characters", "metadata.name", name="a" * 46, says="at most 45", cel_only=True),
    Bad("name beginning with a digit", "metadata.name", name="1job", says="beginning with a letter", cel_only=True),
    Bad("name with a dot", "metadata.name", name="a.b", says="beginning with a letter", cel_only=True),
    Bad("no image", "spec", {"numNodes": 1}, says="image is required"),
    Bad("image of a sidecar only", "spec", {"template": {"spec": {"containers": [{"name": "x", "image": "i"}]}}},
        says="image is required"),
    Bad("empty image", "image", {"image": ""}),
    Bad("image with spaces", "image", {"image": "my image"}),
    Bad("image as a list", "image", {"image": ["a"]}),
    Bad("zero processes", "nprocPerNode", OK | {"nprocPerNode": 0}, says="must be auto or a number"),
    Bad("65 processes", "nprocPerNode", OK | {"nprocPerNode": 65}, says="must be auto or a number"),
    Bad("processes: gpu", "nprocPerNode", OK | {"nprocPerNode": "gpu"}, says="must be auto or a number"),
    Bad("auto with resource claims", "spec", OK | {"template": {"spec": {"resourceClaims": [{"name": "g"}]}}},
        says="nprocPerNode must be a number"),
    Bad("port out of range", "rendezvous.port", OK | {"rendezvous": {"port": 65536}}),
    Bad("port of root", "rendezvous.port", OK | {"rendezvous": {"port": 80}}),
    Bad("port of progress", "rendezvous", OK | {"rendezvous": {"port": 29501}}, says="port and progressPort must"),
    Bad("progress on the port", "rendezvous", OK | {"rendezvous": {"progressPort": 29500}},
        says="port and progressPort must differ"),
    Bad("one port for both", "rendezvous", OK | {"rendezvous": {"port": 3000, "progressPort": 3000}},
        says="port and progressPort must differ"),
    Bad("progress port of root", "rendezvous.progressPort", OK | {"rendezvous": {"progressPort": 1023}}),
    Bad("progress port out of range", "rendezvous.progressPort", OK | {"rendezvous": {"progressPort": 65536}}),
    Bad("no rendezvous time", "rendezvous.timeoutSeconds", OK | {"rendezvous": {"timeoutSeconds": 0}}),
    Bad("both claims", "checkpoint", OK | {"checkpoint": {"claimName": "a", "claimTemplate": CLAIM}},
        says="exactly one of claimName"),
    Bad("no claim", "checkpoint", OK | {"checkpoint": {"mountPath": "/x"}}, says="exactly one of claimName"),
    Bad("claim with a bad name", "checkpoint.claimName", OK | {"checkpoint": {"claimName": "A_b"}}),
    Bad("claim without size", "checkpoint.claimTemplate.spec.resources",
        OK | {"checkpoint": {"claimTemplate": {"spec": {"accessModes": ["ReadWriteMany"]}}}}),
    Bad("unknown access mode", "accessModes",
        OK | {"checkpoint": {"claimTemplate": {"spec": {**CLAIM["spec"], "accessModes": ["Many"]}}}}),
    Bad("relative mount path", "checkpoint.mountPath",
        OK | {"checkpoint": {"claimName": "a", "mountPath": "x"}}),
    Bad("subPath that leaves the volume", "checkpoint",
        OK | {"checkpoint": {"claimName": "a", "subPath": "a/../../b"}}, says="subPath must not contain '..'"),
    Bad("absolute subPath", "checkpoint.subPath", OK | {"checkpoint": {"claimName": "a", "subPath": "/a"}}),
    Bad("one mount path for two volumes", "spec",
        OK | {"checkpoint": {"claimName": "a", "mountPath": "/v"}, "data": {"claimName": "b", "mountPath": "/v"}},
        says="mountPath must differ"),
    Bad("data without a claim", "data.claimName", OK | {"data": {"mountPath": "/d"}}),
    Bad("negative deadline", "activeDeadlineSeconds", OK | {"activeDeadlineSeconds": -1}),
    Bad("deadline of zero", "activeDeadlineSeconds", OK | {"activeDeadlineSeconds": 0}),
    Bad("negative ttl", "ttlSecondsAfterFinished", OK | {"ttlSecondsAfterFinished": -1}),
    Bad("negative restarts", "restartPolicy.maxRestarts", OK | {"restartPolicy": {"maxRestarts": -1}}),
    Bad("too many restarts", "restartPolicy.maxRestarts", OK | {"restartPolicy": {"maxRestarts": 1001}}),
    Bad("too many total restarts", "maxTotalRestarts", OK | {"restartPolicy": {"maxTotalRestarts": 10001}}),
    Bad("backoff that shrinks", "backoff",
        OK | {"restartPolicy": {"backoff": {"initialSeconds": 9, "maxSeconds": 5}}}, says="must not exceed"),
    Bad("rule without a match", "rules", OK | {"restartPolicy": {"rules": [{"action": "Fail"}]}}, says="either"),
    Bad("rule with two matches", "rules", OK | {"restartPolicy": {"rules": [
        {"action": "Fail", "onReasons": ["A"], "onExitCodes": {"operator": "In", "values": [1]}}]}}, says="either"),
    Bad("rule without an action", "action", OK | {"restartPolicy": {"rules": [{"onReasons": ["A"]}]}}),
    Bad("rule of an unknown action", "action",
        OK | {"restartPolicy": {"rules": [{"onReasons": ["A"], "action": "Ignore"}]}}),
    Bad("rule for exit code 0", "values", OK | {"restartPolicy": {"rules": [
        {"action": "Fail", "onExitCodes": {"operator": "In", "values": [0]}}]}}),
    Bad("rule for a sentence", "onReasons",
        OK | {"restartPolicy": {"rules": [{"onReasons": ["out of memory"], "action": "Fail"}]}}),
    Bad("restart time without a date", "restartedAt", OK | {"restartedAt": "now"}),
    Bad("unknown success policy", "successPolicy", OK | {"successPolicy": "AnyNode"}),
    Bad("two scheduling policies", "scheduling.schedulingPolicy",
        OK | {"scheduling": {"schedulingPolicy": {"gang": {}, "basic": {}}}}, says="give exactly one of gang"),
    Bad("no smallest number of nodes", "minNodes", OK | {"minNodes": 0}),
    Bad("smallest number of nodes above numNodes", "minNodes", OK | {"numNodes": 2, "minNodes": 3},
        says="must not exceed numNodes"),
    Bad("smaller attempts that never start", "minNodes",
        OK | {"numNodes": 2, "minNodes": 1, "scheduling": {"partialGangSeconds": 0}},
        says="partialGangSeconds above 0"),
    Bad("wait for nodes above a day", "partialGangSeconds", OK | {"scheduling": {"partialGangSeconds": 86401}}),
    Bad("no scheduling policy", "scheduling.schedulingPolicy", OK | {"scheduling": {"schedulingPolicy": {}}},
        says="give exactly one of gang"),
    Bad("negative time of a partial gang", "scheduling.partialGangSeconds",
        OK | {"scheduling": {"partialGangSeconds": -1}}),
    Bad("unknown launcher", "launcher", OK | {"launcher": "Image"}),
    Bad("unknown network policy", "networkPolicy", OK | {"networkPolicy": "Open"}),
    Bad("unknown retention", "podRetention", OK | {"podRetention": "Some"}),
    Bad("unknown log setting", "logTail", OK | {"logTail": "Hash"}),
    Bad("controller without a path", "managedBy", OK | {"managedBy": "kueue"}),
    Bad("short progress deadline", "progressDeadlineSeconds", OK | {"progressDeadlineSeconds": 5}),
    Bad("scheduling gate without a name", "schedulingGates", OK | {"template": {"spec": {"schedulingGates": [{}]}}}),
    Bad("root under Restricted", "podSecurity", OK | {"podSecurity": {"runAsUser": 0}}, says="runAsUser 0 is root"),
    Bad("unknown profile", "podSecurity.profile", OK | {"podSecurity": {"profile": "Privileged"}}),
    Bad("negative user", "podSecurity.runAsUser", OK | {"podSecurity": {"runAsUser": -1}}),
    Bad("shared memory as text", "sharedMemory.sizeLimit", OK | {"sharedMemory": {"sizeLimit": "much"}}),
    Bad("negative shared memory", "sharedMemory.sizeLimit", OK | {"sharedMemory": {"sizeLimit": -1}}),
    Bad("limit as text", "resources.limits", OK | {"resources": {"limits": {"cpu": "two"}}}),
    Bad("quantity of 65 characters", "resources.limits", OK | {"resources": {"limits": {"nvidia.com/gpu": "1" * 65}}}),
    Bad("long name of a resource", "resources.limits", OK | {"resources": {"limits": {LONG_KEY: 1}}}, says=KEY_RULE),
    Bad("long name of a requested resource", "resources.requests", OK | {"resources": {"requests": {LONG_KEY: 1}}},
        says=KEY_RULE),
    Bad("long name of a sidecar's resource", "limits",
        OK | {"template": {"spec": {"containers": [{"name": "a", "resources": {"limits": {LONG_KEY: 1}}}]}}},
        says=KEY_RULE),
    Bad("long name of an init container's resource", "limits",
        OK | {"template": {"spec": {"initContainers": [{"name": "a", "resources": {"limits": {LONG_KEY: 1}}}]}}},
        says=KEY_RULE),
    Bad("long key of a label", "labels", OK | {"template": {"metadata": {"labels": {LONG_KEY: "v"}}}}, says=KEY_RULE),
    Bad("long key of an annotation", "annotations", OK | {"template": {"metadata": {"annotations": {LONG_KEY: "v"}}}},
        says=KEY_RULE),
    Bad("long key of the node selector", "nodeSelector", OK | {"template": {"spec": {"nodeSelector": {LONG_KEY: "v"}}}},
        says=KEY_RULE),
    Bad("long name of a claim's resource", "requests",
        OK | {"checkpoint": {"claimTemplate": {"spec": {**CLAIM["spec"], "resources": {"requests": {LONG_KEY: 1}}}}}},
        says=KEY_RULE),
    Bad("variable of the operator", "spec", OK | {"env": [{"name": "MASTER_ADDR", "value": "x"}]},
        says="env must not set variables that the operator sets"),
    Bad("variable twice", "env", OK | {"env": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]}),
    Bad("value and valueFrom", "spec", OK | {"env": [
        {"name": "A", "value": "1", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]},
        says="either value or valueFrom"),
    Bad("variable without a name", "env", OK | {"env": [{"value": "1"}]}),
    Bad("variable that is no text", "env", OK | {"env": [{"name": "A", "value": 1}]}),
    Bad("args as one text", "args", OK | {"args": "--epochs 3"}),
    Bad("argument that is a number", "args", OK | {"args": ["--epochs", 3]}),
    Bad("unknown field", "nodes", OK | {"nodes": 2}),
    Bad("field by its name in Python", "num_nodes", OK | {"num_nodes": 2}),
    Bad("nested field by its name in Python", "timeout_seconds", OK | {"rendezvous": {"timeout_seconds": 60}}),
    Bad("limit as true", "resources.limits", OK | {"resources": {"limits": {"cpu": True}}}),
    Bad("limit with a fraction", "resources.limits", OK | {"resources": {"limits": {"cpu": 1.5}}}),
    Bad("processes with a fraction", "nprocPerNode", OK | {"nprocPerNode": 1.5}),
    Bad("unknown field within", "restartPolicy.retries", OK | {"restartPolicy": {"retries": 2}}),
    Bad("unknown pull policy", "imagePullPolicy", OK | {"imagePullPolicy": "Sometimes"}),
    Bad("suspend as text", "suspend", OK | {"suspend": "yes"}),
    Bad("template container without a name", "template.spec.containers",
        OK | {"template": {"spec": {"containers": [{"image": "i"}]}}}),
    Bad("template container twice", "template.spec.containers",
        OK | {"template": {"spec": {"containers": [{"name": "a", "image": "i"}, {"name": "a", "image": "i"}]}}}),
)  # fmt: skip


def _nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"a": value}
    return value


# Specs that the API server cannot refuse; the job that has one gets the state Invalid with this text.
BEYOND_CEL: tuple[Bad, ...] = (
    Bad("auto with 65 devices", "nprocPerNode", OK | {"resources": {"limits": {"nvidia.com/gpu": 65}}},
        says="nprocPerNode: auto counts 65 devices, at most 64 can be used"),
    Bad("auto with half a device", "nprocPerNode", OK | {"resources": {"limits": {"nvidia.com/gpu": "500m"}}},
        says="nvidia.com/gpu: 500m is not a whole number of devices"),
    Bad("auto with a number too large to compute", "nprocPerNode",
        OK | {"resources": {"limits": {"nvidia.com/gpu": "1e999999999"}}}, says="'1e999999999' is not a quantity"),
    *(
        Bad(f"template nested {levels} levels deep", "spec", OK | {"template": {"spec": {"affinity": _nested(levels)}}},
            says="nested deeper than 100 levels")
        for levels in (98, 300, 900)
    ),
    Bad("template of more than 256 KiB", "spec", OK | {"template": {"spec": {"x": ["x" * 1000] * 270}}},
        says=" bytes of JSON, at most 262,144 are allowed: move scripts, configuration and data into"),
    Bad("template of 1.3 MB of empty objects", "spec", OK | {"template": {"spec": {"x": [{}] * 430_000}}},
        says=": move scripts, configuration and data into the image, a ConfigMap or a volume"),
    Bad("template of 60,000 empty objects", "spec", OK | {"template": {"spec": {"x": [{}] * 60_000}}},
        says="has more than 20,000 values: move scripts"),
)  # fmt: skip


def _three(name: str, one: Any, other: Any) -> tuple[Edit, Edit, Edit]:
    return (
        Edit(f"{name} added", name, {}, {name: one}),
        Edit(f"{name} changed", name, {name: one}, {name: other}),
        Edit(f"{name} removed", name, {name: one}, {}),
    )


def _trainer(**more: Any) -> Spec:
    return {"spec": {"containers": [{"name": "trainer"} | more]}}


ILLEGAL_EDITS: tuple[Edit, ...] = (
    Edit("image added", "image", {"image": None, "template": _trainer(image="i")},
         {"image": "j", "template": _trainer(image="i")}),
    Edit("image changed", "image", {"image": "a"}, {"image": "b"}),
    Edit("image removed", "image", {"image": "a", "template": _trainer(image="i")},
         {"image": None, "template": _trainer(image="i")}),
    *_three("command", ["a"], ["b"]),
    *_three("args", ["a"], ["a", "b"]),
    *_three("env", [{"name": "A", "value": "1"}], [{"name": "A", "value": "2"}]),
    Edit("launcher added", "launcher", {}, {"launcher": "Injected"}),
    Edit("launcher removed", "launcher", {"launcher": "Injected"}, {}),
    Edit("policy added", "scheduling.schedulingPolicy", {}, {"scheduling": {"schedulingPolicy": {"gang": {}}}}),
    Edit("policy removed", "scheduling.schedulingPolicy", {"scheduling": {"schedulingPolicy": {"gang": {}}}},
         {}),
    Edit("policy changed", "scheduling.schedulingPolicy", {"scheduling": {"schedulingPolicy": {"gang": {}}}},
         {"scheduling": {"schedulingPolicy": {"basic": {}}}}),
    *_three("envFrom", [{"secretRef": {"name": "a"}}], [{"secretRef": {"name": "b"}}]),
    *_three("workingDir", "/a", "/b"),
    *_three("resources", {"limits": {"cpu": "1"}}, {"limits": {"cpu": "2"}}),
    *_three("imagePullPolicy", "Always", "Never"),
    *_three("imagePullSecrets", [{"name": "a"}], [{"name": "b"}]),
    *_three("template", {"metadata": {"labels": {"a": "b"}}}, {"metadata": {"labels": {"a": "c"}}}),
    Edit("template command changed", "template", {"template": _trainer(command=["a"])},
         {"template": _trainer(command=["b"])}),
    Edit("template nodeSelector added", "template", {"template": {"spec": {}}},
         {"template": {"spec": {"nodeSelector": {"a": "b"}}}}),
    *_three("managedBy", "ddpjob.dev/operator", "kueue.x-k8s.io/multikueue"),
    Edit("command while suspended", "template", {"suspend": True, "template": _trainer(command=["a"])},
         {"suspend": True, "template": _trainer(command=["b"])}),
    Edit("command while suspending", "template", {"template": _trainer(command=["a"])},
         {"suspend": True, "template": _trainer(command=["b"])}),
    Edit("image while suspended", "image", {"suspend": True, "image": "a"}, {"suspend": True, "image": "b"}),
    Edit("node selector while suspended", "template", {"suspend": True},
         {"suspend": True, "template": {"spec": {"nodeSelector": {"a": "b"}}}}),
    *_three("numNodes", 2, 3),
    *_three("nprocPerNode", 2, 4),
    *_three("rendezvous", {"port": 3000}, {"port": 3001}),
    *_three("rendezvous", {"progressPort": 3000}, {"progressPort": 3001}),
    *_three("sharedMemory", {"sizeLimit": "1Gi"}, {"sizeLimit": "2Gi"}),
    *_three("podSecurity", {"profile": "Baseline"}, {"profile": "Unset"}),
    *_three("checkpoint", {"claimName": "a"}, {"claimName": "b"}),
    Edit("checkpoint claim template for a name", "checkpoint", {"checkpoint": {"claimName": "a"}},
         {"checkpoint": {"claimTemplate": CLAIM}}),
    *_three("data", {"claimName": "a"}, {"claimName": "b"}),
)  # fmt: skip

LEGAL_EDITS: tuple[Edit, ...] = (
    Edit("suspend", "suspend", {}, {"suspend": True}),
    Edit("numNodes while suspended", "numNodes", {"suspend": True}, {"suspend": True, "numNodes": 4}),
    Edit("nprocPerNode while resuming", "nprocPerNode", {"suspend": True}, {"suspend": False, "nprocPerNode": 4}),
    Edit("deadline added", "activeDeadlineSeconds", {}, {"activeDeadlineSeconds": 5}),
    Edit(
        "rules added",
        "restartPolicy",
        {},
        {"restartPolicy": {"rules": [{"onReasons": ["OOMKilled"], "action": "Fail"}]}},
    ),
    Edit("restart requested", "restartedAt", {}, {"restartedAt": "2026-03-01T12:00:00Z"}),
    Edit("network policy removed", "networkPolicy", {"networkPolicy": "Isolated"}, {}),
    Edit("smallest number of nodes removed", "minNodes", {"minNodes": 1}, {}),
    Edit("wait for nodes changed", "scheduling.partialGangSeconds", {}, {"scheduling": {"partialGangSeconds": 60}}),
)
