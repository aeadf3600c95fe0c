"""``ddpjob validate``, ``render`` and ``init`` as programs."""

import json
import re

import pytest
import yaml

from ddpjob.engine.injection import PROGRAM
from tests.cli.program import ROOT, Program, shell_job, with_volume

EXAMPLES = [
    str(path)
    for path in sorted((ROOT / "manifests" / "examples").rglob("*.yaml"))
    if "kind: DDPJob" in path.read_text(encoding="utf-8")
]


def test_validate_prints_file_line_field_and_hint_and_ends_with_1(ddpjob: Program) -> None:
    bad = ddpjob.folder / "bad.yaml"
    bad.write_text(yaml.safe_dump(shell_job("mnist", "true", numNods=2), sort_keys=False))
    done = ddpjob("validate", "bad.yaml", "missing.yaml")
    assert done.code == 1
    assert done.out.splitlines() == [
        'bad.yaml:11: error: spec.numNods: there is no such field (did you mean "numNodes"?)',
        "bad.yaml: 1 DDPJob, 1 error",
        f"missing.yaml: error: no such file ({ddpjob.folder} has no such file)",
        "missing.yaml: 0 DDPJobs, 1 error",
    ]


def test_validate_reads_standard_input_and_a_warning_is_no_error(ddpjob: Program) -> None:
    job = shell_job("mnist", "", command=["python", "train.py"], nprocPerNode=2)
    done = ddpjob("validate", "-", stdin=yaml.safe_dump(job))
    assert done.code == 0
    assert re.match(r"-:\d+: warning: spec\.command: nprocPerNode is 2", done.out)
    assert done.out.endswith("-: 1 DDPJob, valid\n")


def test_validate_warns_of_a_device_that_nobody_has_and_of_nodes_without_checkpoints(ddpjob: Program) -> None:
    job = shell_job("mnist", "true", numNodes=4, resources={"limits": {"nvidia.com/gpus": 8}})
    done = ddpjob("validate", "-", stdin=yaml.safe_dump(job))
    assert done.code == 0
    assert 'no known device is named nvidia.com/gpus (did you mean "nvidia.com/gpu"?)' in done.out
    assert "without checkpoint each restart begins the training again" in done.out
    fine = shell_job(
        "mnist", "true", resources={"limits": {"nvidia.com/gpu": 8, "nvidia.com/mig-1g.5gb": 1, "nvidia.com/gpumem": 9}}
    )
    assert ddpjob("validate", "-", stdin=yaml.safe_dump(fine)).out == "-: 1 DDPJob, valid\n"
    wrong = shell_job("mnist", "true", restartPolicy=[], args="--lr")
    text = ddpjob("validate", "-", stdin=yaml.safe_dump(wrong)).out
    assert "restartPolicy: must be a mapping of fields" in text and "args: must be a list, as [a, b]" in text


def test_validate_escapes_what_could_control_the_terminal(ddpjob: Program) -> None:
    done = ddpjob("validate", "-", stdin='kind: DDPJob\nmetadata: {name: a}\n"\\e[2Jspec": 1\n')
    assert done.code == 1
    assert "\x1b" not in done.out


def test_all_examples_are_valid(ddpjob: Program) -> None:
    done = ddpjob("validate", *EXAMPLES)
    assert len(EXAMPLES) > 5
    assert [line for line in done.out.splitlines() if ": error:" in line] == []
    assert done.code == 0


@pytest.mark.parametrize("form", ["yaml", "json"])
def test_render_prints_what_the_operator_creates_and_nothing_else(ddpjob: Program, form: str) -> None:
    file = ddpjob.write(shell_job("mnist", "true", **with_volume(numNodes=2)), {"kind": "Secret", "stringData": {}})
    done = ddpjob("render", file, "-n", "team-a", "-o", form)
    assert done.code == 0, done
    objects = json.loads(done.out)["items"] if form == "json" else list(yaml.safe_load_all(done.out))
    assert [item["kind"] for item in objects] == ["Service", "PersistentVolumeClaim", "Pod", "Pod"]
    assert {item["metadata"]["namespace"] for item in objects} == {"team-a"}
    assert ddpjob("render", file, "-n", "team-a", "-o", form).out == done.out
    assert not ddpjob.state.exists()


def test_init_prints_a_job_that_is_valid_and_renders(ddpjob: Program) -> None:
    text = ddpjob("init").out
    assert ddpjob("validate", "-", stdin=text).out == "-: 1 DDPJob, valid\n"
    (pod,) = [item for item in yaml.safe_load_all(ddpjob("render", "-", stdin=text).out) if item["kind"] == "Pod"]
    command = ["python3", PROGRAM, "--python-of", "torchrun", "train.py"]
    assert pod["spec"]["containers"][0]["command"] == command


def test_init_with_every_field_uncommented_is_valid(ddpjob: Program) -> None:
    text = ddpjob("init").out
    fields = re.sub(r"^#(?=  )(?! {3}ddpjob| {3}kubectl)", "", text, flags=re.MULTILINE)
    assert fields.count("\n#") < text.count("\n#") - 20
    done = ddpjob("validate", "-", stdin=fields)
    assert done.out == "-: 1 DDPJob, valid\n", fields
