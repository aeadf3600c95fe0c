"""--set changes exactly the field that it names; mistakes are reported with the nearest field."""

from typing import Any

import pytest

from ddpjob.api.objects import Json
from ddpjob.cli.prepare import assign
from ddpjob.local import LocalError
from tests.cli.program import shell_job


def a_job() -> Json:
    job = shell_job("mnist", "true", args=["train", "--epochs", "2"], restartPolicy={"maxRestarts": 3})
    del job["spec"]["command"]
    return job


@pytest.mark.parametrize(
    ("assignment", "path", "value"),
    [
        ("numNodes=3", ("spec", "numNodes"), 3),
        ("restartPolicy.maxRestarts=0", ("spec", "restartPolicy", "maxRestarts"), 0),
        ("args[2]=5", ("spec", "args", 2), "5"),
        ("args[3]=--seed", ("spec", "args", 3), "--seed"),
        ("args=[train, --epochs, 4]", ("spec", "args"), ["train", "--epochs", "4"]),
        ("metadata.name=other", ("metadata", "name"), "other"),
        ("metadata.labels.team=a", ("metadata", "labels", "team"), "a"),
        ('resources.limits["nvidia.com/gpu"]=8', ("spec", "resources", "limits", "nvidia.com/gpu"), 8),
        ("env[0]={name: A, value: b}", ("spec", "env", 0), {"name": "A", "value": "b"}),
        ("image=registry:5000/a:1", ("spec", "image"), "registry:5000/a:1"),
        ("template.spec.nodeSelector.zone=a", ("spec", "template", "spec", "nodeSelector", "zone"), "a"),
    ],
)
def test_set_assigns_a_yaml_value(assignment: str, path: tuple[str | int, ...], value: Any) -> None:
    job = a_job()
    assign(job, assignment)
    found: Any = job
    for step in path:
        found = found[step]
    assert found == value


def test_set_null_removes_a_field() -> None:
    job = a_job()
    assign(job, "restartPolicy=null")
    assign(job, "args[0]=null")
    assert "restartPolicy" not in job["spec"]
    assert job["spec"]["args"] == ["--epochs", "2"]


@pytest.mark.parametrize(
    ("assignment", "error", "hint"),
    [
        ("numNode=3", 'spec has no field "numNode"', 'did you mean "numNodes"?'),
        ("restartPolicy.maxrestart=1", 'spec.restartPolicy has no field "maxrestart"', 'did you mean "maxRestarts"?'),
        ("numNodes.x=3", "spec.numNodes has no fields", "single value"),
        ("zzzzz=3", 'spec has no field "zzzzz"', "it has image, command"),
        ("numNodes", "the = is missing", "FIELD=VALUE"),
        ("=3", "names no field", "FIELD=VALUE"),
        ("args[9]=x", "args has no entry [9]", "it has 3"),
        ("command[1]=x", "command has no entry [1]", "it has none"),
        ("image[0]=x", "spec.image is not a list", ""),
        ("args={", "not YAML", ""),
        ("args=!!int x", "not YAML: line 1, column 1: the value is not a valid int", ""),
        ("args[x]=3", "not part of a path", ""),
    ],
)
def test_mistake_names_the_field_and_the_nearest_one(assignment: str, error: str, hint: str) -> None:
    with pytest.raises(LocalError) as raised:
        assign(a_job(), assignment)
    assert error in raised.value.error
    assert hint in raised.value.hint
    assert raised.value.next_step
