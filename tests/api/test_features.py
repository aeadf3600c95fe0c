"""Each feature handles each field of a spec, or says why not: features.toml."""

from __future__ import annotations

import copy
import inspect
import json
import tomllib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from pydoc import locate
from typing import Any, get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel
from pydantic.alias_generators import to_snake

from ddpjob.api.model import OpenModel
from ddpjob.api.spec import DDPJobSpec
from ddpjob.client.bundle.redaction import Redactor
from ddpjob.client.jobfile import documents_of
from ddpjob.client.validation import validate
from ddpjob.convert.conversion import convert
from ddpjob.local.admission import AdmittedJob, admit
from tests.builders import UID, a_job
from tests.convert import test_conversion as conversions
from tests.convert.test_jobs import JOBS
from tests.install import fields as page

TABLE: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("features.toml").read_text())
WHOLE = yaml.safe_load("""
image: a:1
command: [ddprun]
args: [train.py]
env: [{name: A, value: "1"}]
envFrom: [{configMapRef: {name: c}}]
workingDir: /w
resources: {limits: {nvidia.com/gpu: "2"}, requests: {cpu: "1"}, claims: [{name: x}]}
imagePullPolicy: Always
imagePullSecrets: [{name: s}]
template: {metadata: {labels: {l: m}}, spec: {nodeSelector: {n: o}}}
numNodes: 3
minNodes: 1
nprocPerNode: 4
rendezvous: {port: 30000, progressPort: 30001, timeoutSeconds: 60}
sharedMemory: {sizeLimit: 2Gi}
podSecurity: {profile: Baseline, runAsUser: 5, fsGroup: 6}
networkPolicy: Isolated
launcher: Injected
restartPolicy:
  maxRestarts: 2
  maxTotalRestarts: 50
  backoff: {initialSeconds: 1, maxSeconds: 2}
  rules: [{onReasons: [Hang], action: Fail}]
onDivergence: Restart
successPolicy: NodeZero
activeDeadlineSeconds: 100
startupDeadlineSeconds: 200
progressDeadlineSeconds: 300
completionGraceSeconds: 400
ttlSecondsAfterFinished: 500
podRetention: All
logTail: Omit
suspend: true
restartedAt: "2026-03-01T12:00:00Z"
managedBy: ddpjob.dev/operator
checkpoint: {claimName: k, claimRetention: Retain, mountPath: /c, subPath: p, fenced: true}
data: {claimName: d, mountPath: /d}
scheduling: {schedulingPolicy: {basic: {}}, partialGangSeconds: 30, avoidSlowNodes: true}
""")
CLAIM = {"spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}}
# What else a spec may have in place of a part of WHOLE, and other values of what a spec must have.
OTHER: dict[str, Any] = {
    "checkpoint.claimTemplate.spec": {"checkpoint": {"claimTemplate": CLAIM, "mountPath": "/c", "subPath": "p"}},
    "checkpoint.claimRetention": {"checkpoint": {"claimTemplate": CLAIM, "claimRetention": "Delete"}},
    "scheduling.schedulingPolicy.gang": {"scheduling": WHOLE["scheduling"] | {"schedulingPolicy": {"gang": {}}}},
    "scheduling.schedulingPolicy.basic": {"scheduling": {"partialGangSeconds": 30}},
    "completionGraceSeconds": {"successPolicy": "AllNodes", "completionGraceSeconds": 401},
    "checkpoint.claimName": {"checkpoint": WHOLE["checkpoint"] | {"claimName": "other"}},
    "data.claimName": {"data": {"claimName": "other", "mountPath": "/d"}},
    "image": {"image": "b:1"},
}


def leaves(model: type[BaseModel], above: str = "") -> Iterator[str]:
    """Yield the path of each field without fields of its own; of lists and of parts of Kubernetes, the whole."""
    for field in model.model_fields.values():
        inner = [one for one in get_args(field.annotation) or (field.annotation,) if inspect.isclass(one)]
        parts = [one for one in inner if issubclass(one, BaseModel) and one.model_fields]
        path = f"{above}{field.alias}"
        if parts and get_origin(field.annotation) is not list and not issubclass(parts[0], OpenModel):
            yield from leaves(parts[0], f"{path}.")
        else:
            yield path


FIELDS = list(leaves(DDPJobSpec))


def changed(field: str) -> dict[str, Any]:
    """Return WHOLE without the field, or with another value of it."""
    spec = copy.deepcopy(WHOLE)
    if field in OTHER:
        return spec | OTHER[field]
    *above, last = field.split(".")
    parent = spec
    for part in above:
        parent = parent[part]
    del parent[last]
    return spec


@cache
def admitted(text: str) -> AdmittedJob:
    return admit(a_job(**json.loads(text)), uid=UID)


def objects(spec: dict[str, Any], *, local: bool = False) -> Sequence[Any]:
    """Return what is created for a spec."""
    job = admitted(json.dumps(spec))
    return job.pods if local else job.created()


def rows(feature: str) -> dict[str, str]:
    """Return the row of each path: the code that handles it, or the reason why none does."""
    left_out = {path: why for why, paths in TABLE[feature].get("not", {}).items() for path in paths}
    return {path: code for path, code in TABLE[feature].items() if path != "not"} | left_out


def row(feature: str, field: str) -> str:
    """Return the row of a field, or of the object that it belongs to; empty without one."""
    parts = field.split(".")
    found = rows(feature)
    return next((found[path] for n in range(len(parts), 0, -1) if (path := ".".join(parts[:n])) in found), "")


def without_row(feature: str, shown: set[str]) -> tuple[list[str], list[str]]:
    """Return the fields that a feature neither shows nor has a row for, and those with a row that it shows as well."""
    missing = [field for field in FIELDS if field not in shown and not row(feature, field)]
    return missing, [field for field in FIELDS if field in shown and field in rows(feature)]


def test_every_row_is_of_a_field_and_once() -> None:
    for feature, table in TABLE.items():
        paths = [path for path in table if path != "not"] + [p for each in table.get("not", {}).values() for p in each]
        known = {".".join(field.split(".")[:n]) for field in FIELDS for n in range(1, field.count(".") + 2)}
        assert set(paths) <= known, feature
        assert len(paths) == len(set(paths)), feature


@pytest.mark.parametrize("feature", TABLE)
def test_code_that_handles_a_field_exists_and_names_it(feature: str) -> None:
    for path, code in TABLE[feature].items():
        if path == "not":
            continue
        module, _, name = code.partition(":")
        found = locate(f"{module}.{name}")
        assert found is not None, f"{code} of {path} does not exist"
        found = getattr(found, "fget", getattr(found, "func", found))  # of a property
        text = inspect.getsource(found) if callable(found) else str(found)
        last = path.rpartition(".")[2]
        assert last in text or to_snake(last) in text or feature == "bundle", f"{code} does not name {path}"


def test_every_field_changes_the_objects_or_is_read_by_the_operator() -> None:
    shown = {field for field in FIELDS if objects(changed(field)) != objects(WHOLE)}
    assert without_row("render", shown) == ([], [])


def test_every_field_has_an_effect_in_local_mode_or_a_reason_why_it_has_none() -> None:
    missing = [
        field
        for field in FIELDS
        if objects(changed(field), local=True) == objects(WHOLE, local=True)
        and not (row("local", field) or row("render", field))
    ]
    assert missing == [], "neither the pods nor the rules of the operator have them"


def test_every_field_comes_out_of_a_conversion_or_has_a_reason_why_none_gives_it() -> None:
    assert without_row("convert", converted()) == ([], [])


def converted() -> set[str]:
    """Return the fields that conversions set."""
    made = [convert(documents_of(file.read_text())).job for file in sorted(JOBS.glob("*.yaml"))]
    container = {"envFrom": [{"secretRef": {"name": "s"}}], "workingDir": "/w"}
    replica = conversions.replica("torchrun", "train.py", resources={"claims": [{"name": "a"}]}, **container)
    replica["template"]["spec"]["imagePullSecrets"] = [{"name": "s"}]
    policy = {"cleanPodPolicy": "All", "suspend": True}
    made.append(convert([conversions.pytorchjob(master=replica, worker=replica, runPolicy=policy)]).job)
    found = set()
    for job in made:
        for field in FIELDS:
            value = job["spec"]
            for part in field.split("."):
                value = value.get(part) if isinstance(value, dict) else None
            found |= {field} if value is not None else set()
    return found


@pytest.mark.parametrize("feature", ["card", "why"])
def test_every_field_has_a_row(feature: str) -> None:
    assert without_row(feature, set())[0] == []


def test_a_bundle_hides_the_fields_that_its_rows_name() -> None:
    kept = Redactor(b"key", programs=False).redacted(a_job(**WHOLE), of_kubernetes=False)["spec"]
    named = {path.partition(".")[0] for path in rows("bundle")}
    assert {field for field in WHOLE if kept.get(field) != WHOLE[field]} == named


@pytest.mark.parametrize("field", FIELDS)
def test_a_wrong_value_of_every_field_is_an_error_at_that_field(field: str) -> None:
    value: Any = [[]]
    for part in reversed(field.split(".")):
        value = {part: value}
    text = yaml.safe_dump(a_job(**({"image": "a"} | value)) | {"metadata": {"name": "mnist"}})
    assert any((one.field or "").startswith(f"spec.{field}") for one in validate("job.yaml", text).problems)


def test_the_page_of_fields_has_every_field() -> None:
    text = page.reference()
    assert [field for field in FIELDS if f"- `{field.rpartition('.')[2]}` (" not in text] == []
