"""Reading the job of a file, of standard input or for a script."""

import json
from pathlib import Path

import pytest
import yaml

from ddpjob.api import limits
from ddpjob.api.names import ScriptLauncher
from ddpjob.api.spec import parse_spec
from ddpjob.client import jobfile
from ddpjob.errors import InvalidJobError
from tests.cli.program import shell_job

JOB = yaml.safe_dump(shell_job("mnist", "true"))
JOB_INLINE = json.dumps(shell_job("mnist", "true"))
MISTAKES = {
    "an empty file": ("", "exactly one DDPJob, and it holds 0"),
    "two jobs": (JOB + "---\n" + JOB.replace("mnist", "other"), "exactly one DDPJob, and it holds 2"),
    "no job": ("kind: Pod\nmetadata: {name: a}", "exactly one DDPJob, and it holds 0"),
    "no YAML": ("a: [b", "not valid YAML: line 1, column"),
    "a tab": ("a:\n\tb: 1", "line 2, column 1"),
    "a duplicate key": (JOB + "\nkind: DDPJob\n", 'duplicate key "kind"'),
    "a list": ("- a", "contains a list"),
    "a number in a list of objects": (f"kind: List\nitems: [1, {JOB_INLINE}]", "contains a number"),
    "metadata that is a list": (JOB + "---\nkind: Secret\nmetadata: [a]", "metadata of Secret is not a mapping"),
    "an anchor within itself": (JOB.replace("image: ", "args: &x [*x]\n  image: "), "Circular reference"),
    "aliases that stand for 10^30 values": (
        "a0: &a0 [1]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 31)),
        "it has more than 1,000,000 values",
    ),
    "aliases that stand for 2 GB of text": (
        "a: &a " + "x" * 100_000 + "\nb: [" + "*a, " * 20_000 + "]\n",
        "it has more than 1,000,000 values, or as much text",
    ),
    "aliases that stand for 2 GB of keys": (
        "a: &a " + "x" * 1000 + "\nb: [" + "{*a : 1}, " * 20_000 + "]\n",
        "it has more than 1,000,000 values, or as much text",
    ),
    "a number to base 60": ("a: !!int 1" + ":1" * 100_000, "line 1, column 4: the value is not a valid int"),
    "merges that copy 9^20 keys": (
        "a0: &a0 {k: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 21)),
        "more than 100,000 keys",
    ),
    "merges that copy 101,000 keys": (
        f"a: &a {{{', '.join(f'k{n}: 1' for n in range(1000))}}}\n"
        + "".join(f"b{n}: {{<<: *a}}\n" for n in range(101)),
        "more than 100,000 keys",
    ),
    "nesting without end": ("a: " + "[" * 5000, "recursion depth"),
    "a number that is none": ("a: !!int b", "line 1, column 4: the value is not a valid int"),
    "another version": (JOB.replace("v1alpha1", "v9"), "apiVersion ddpjob.dev/v9"),
    "no spec": ("apiVersion: ddpjob.dev/v1alpha1\nkind: DDPJob\nmetadata: {name: a}", "spec is missing"),
    "a misspelt field": (JOB.replace("image", "imgae"), 'spec has no field "imgae"'),
    "a misspelt field of metadata": (JOB.replace("name", "nmae"), 'metadata has no field "nmae"'),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_file_without_a_job_is_refused_with_hint_and_next_step(tmp_path: Path, mistake: str) -> None:
    text, expected = MISTAKES[mistake]
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(InvalidJobError) as raised:
        jobfile.read(str(path))
    assert expected in raised.value.error
    assert raised.value.hint and raised.value.next_step


def test_a_value_with_colons_or_a_date_is_text_as_for_kubectl() -> None:
    (document,) = jobfile.documents_of("values: [1:30, -1:30.5, 0644, yes, 1.5, 2026-01-02]")
    assert document["values"] == ["1:30", "-1:30.5", 0o644, True, 1.5, "2026-01-02"]


def test_misspelt_file_name_suggests_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "mnist.yaml").write_text(JOB)
    with pytest.raises(InvalidJobError) as raised:
        jobfile.read(str(tmp_path / "mnsit.yaml"))
    assert raised.value.hint == 'did you mean "mnist.yaml"?'


def test_secrets_and_config_maps_are_read_and_other_documents_listed(tmp_path: Path) -> None:
    others = [{"apiVersion": "v1", "kind": kind, "metadata": {"name": "a"}} for kind in ("ConfigMap", "Secret", "Pod")]
    path = tmp_path / "job.yaml"
    path.write_text(JOB + "---\n" + yaml.safe_dump_all(others))
    read = jobfile.read(str(path))
    assert [other["kind"] for other in read.others] == ["ConfigMap", "Secret"]
    assert read.ignored == ["Pod a"]
    assert read.directory == tmp_path


def test_list_of_kubectl_is_read(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump({"kind": "List", "apiVersion": "v1", "items": [shell_job("mnist", "true")]}))
    assert jobfile.read(str(path)).job["metadata"]["name"] == "mnist"


def test_fields_set_by_the_server_are_dropped(tmp_path: Path) -> None:
    job = shell_job("mnist", "true") | {"status": {"state": "Failed"}}
    job["metadata"] |= {"uid": "1", "resourceVersion": "2", "generation": 3, "managedFields": []}
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    assert jobfile.read(str(path)).job == shell_job("mnist", "true")


@pytest.mark.parametrize(
    ("given", "launcher", "injected"), [(None, "ddprun", "Injected"), ("torchrun", "torchrun", None)]
)
def test_a_script_becomes_a_job_under_ddprun_or_torchrun(
    tmp_path: Path, given: ScriptLauncher | None, launcher: str, injected: str | None
) -> None:
    script = tmp_path / "Train_MNIST.py"
    script.write_text("")
    read = jobfile.read(str(script), ["--lr", "0.1"], given)
    assert read.job["metadata"]["name"] == "train-mnist"
    spec = parse_spec(read.job)
    assert (spec.command, spec.launcher) == ([launcher, str(script), "--lr", "0.1"], injected)


def test_the_launcher_of_a_job_file_is_in_its_command(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    with pytest.raises(InvalidJobError, match=r"job\.yaml: a launcher can be chosen for a script only"):
        jobfile.read(str(path), [], "torchrun")


@pytest.mark.parametrize("stem", ["3d", "_", "a" * 80, "Ünïcode", "a.b.c", "-x-", "9" * 80, "x" * 44 + "--y"])
def test_any_file_name_becomes_a_valid_job_name(stem: str) -> None:
    name = jobfile.job_name(stem)
    assert name[0].isalpha() and name[-1].isalnum() and len(name) <= limits.MAX_JOB_NAME
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
