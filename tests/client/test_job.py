"""Jobs from keyword arguments, YAML, scripts and functions."""

from __future__ import annotations

import builtins
import contextlib
import functools
import json
import linecache
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import yaml

from ddpjob import DDPJob
from ddpjob.api.objects import Json
from ddpjob.api.restarts import RestartPolicy
from ddpjob.api.spec import Checkpoint
from ddpjob.client.jobspec import with_words
from ddpjob.client.workdir.mount import with_files
from ddpjob.errors import InvalidJobError
from tests.client.worlds import condition


def seen(**status: Any) -> DDPJob:
    manifest: Json = {"metadata": {"name": "mnist", "namespace": "default", "uid": "1"}, "spec": {"new": 1}}
    return DDPJob.from_manifest(manifest | {"status": status})


def test_keyword_arguments_yaml_and_models_make_the_same_job() -> None:
    made = DDPJob(
        "mnist",
        labels={"team": "a"},
        image="mnist:1",
        command=("torchrun", "train.py"),
        numNodes=2,
        env={"LR": "0.1"},
        restart_policy=RestartPolicy(max_restarts=5),
        checkpoint=Checkpoint(claim_name="runs"),
    )
    spec = {
        "image": "mnist:1",
        "command": ["torchrun", "train.py"],
        "numNodes": 2,
        "env": [{"name": "LR", "value": "0.1"}],
        "restartPolicy": {"maxRestarts": 5},
        "checkpoint": {"claimName": "runs"},
    }
    assert made.manifest["metadata"] == {"name": "mnist", "labels": {"team": "a"}}
    assert yaml.safe_load(made.to_yaml())["spec"] == spec
    assert DDPJob.from_yaml(made.to_yaml()).manifest == made.manifest
    assert DDPJob.from_yaml(json.dumps(made.manifest)).manifest == made.manifest
    with pytest.raises(InvalidJobError, match="exactly one DDPJob"):
        DDPJob.from_yaml("")
    assert (made.spec.num_nodes, made.state, made.finished) == (2, "Pending", False)


def claim(access: str, **fields: str) -> Json:
    spec = {"accessModes": [access], "resources": {"requests": {"storage": "10Gi"}}} | fields
    return {"claimTemplate": {"spec": spec}}


def test_short_words_are_fields_of_the_spec() -> None:
    made = DDPJob("mnist", image="a:1", num_nodes=2, gpus=8, memory="8Gi", max_restarts=0, checkpoint="10Gi:fast")
    assert made.manifest["spec"] == {
        "image": "a:1",
        "numNodes": 2,
        "resources": {"limits": {"nvidia.com/gpu": 8, "memory": "8Gi"}, "requests": {"memory": "8Gi"}},
        "restartPolicy": {"maxRestarts": 0},
        "checkpoint": claim("ReadWriteMany", storageClassName="fast"),
    }
    assert (made.spec.nproc_per_node, made.spec.devices_per_node) == ("auto", 8)
    one = DDPJob("mnist", image="a:1", checkpoint="10Gi", restart_policy={"maxTotalRestarts": 9}, max_restarts=1)
    assert one.manifest["spec"]["checkpoint"] == claim("ReadWriteOnce")
    assert one.manifest["spec"]["restartPolicy"] == {"maxTotalRestarts": 9, "maxRestarts": 1}
    known = DDPJob("mnist", image="a:1", checkpoint="runs", gpus=2, resources={"requests": {"nvidia.com/gpu": 1}})
    assert known.manifest["spec"]["checkpoint"] == {"claimName": "runs"}
    assert known.manifest["spec"]["resources"]["requests"] == {"nvidia.com/gpu": 2}, "Kubernetes refuses two numbers"


def test_a_size_changes_only_the_size_of_a_claim_that_a_file_describes() -> None:
    described = claim("ReadWriteMany", storageClassName="fast", volumeMode="Filesystem")
    known = {"image": "a:1", "checkpoint": described | {"mountPath": "/mine"}}
    larger = with_words(known, {"checkpoint": "20Gi"})["checkpoint"]
    expected = deepcopy(known["checkpoint"])
    expected["claimTemplate"]["spec"]["resources"]["requests"]["storage"] = "20Gi"
    assert larger == expected
    other = with_words(known, {"checkpoint": "20Gi:slow"})["checkpoint"]["claimTemplate"]["spec"]
    assert (other["storageClassName"], other["accessModes"]) == ("slow", ["ReadWriteMany"])
    named = known | {"checkpoint": {"claimName": "runs", "mountPath": "/mine"}}
    assert with_words(named, {"checkpoint": "10Gi"})["checkpoint"] == claim("ReadWriteOnce") | {"mountPath": "/mine"}
    assert with_words(known, {"checkpoint": "runs"})["checkpoint"] == {"claimName": "runs", "mountPath": "/mine"}
    alone = {"checkpoint": claim("ReadWriteOnce")}
    shared = with_words(alone, {"checkpoint": "10Gi", "numNodes": 4})["checkpoint"]
    assert shared == claim("ReadWriteMany"), "pods of several nodes mount it"


def test_a_script_runs_under_ddprun_with_its_arguments(tmp_path: Path) -> None:
    script = tmp_path / "Train_MNIST.py"
    script.write_text("")
    made = DDPJob.from_script(script, "--lr", "0.1", nproc_per_node=2)
    assert (made.name, made.spec.command) == ("train-mnist", ["ddprun", str(script), "--lr", "0.1"])
    assert (made.spec.nproc_per_node, made.spec.launcher, made.directory) == (2, "Injected", Path.cwd())
    other = DDPJob.from_script(script, launcher="torchrun")
    assert (other.spec.command, other.spec.launcher) == (["torchrun", str(script)], None)


SCALE = 2


def plain(rate: float = 0.1, *, tags: list[str] | None = None) -> None:
    import math  # noqa: PLC0415 - the function is sent alone

    class Kept:
        value = math.pi

    if rate < 0:
        plain(-rate)
    print([rate * value for value in (Kept.value,)], tags, __name__)


def of_a_global() -> int:
    return SCALE


def of_a_default(scale: int = SCALE) -> int:
    return scale


def of_a_notebook() -> None:
    display(1)  # type: ignore[name-defined]  # noqa: F821


@functools.cache
def decorated() -> None:
    """Do nothing."""


@contextlib.contextmanager
def wrapped() -> Iterator[None]:
    yield


async def later() -> None:
    """Do nothing."""


def counting() -> None:
    global SCALE  # noqa: PLW0603
    SCALE += 1


def renamed() -> None:
    """Do nothing."""


renamed.__name__ = "../../evil"


def of_the_image() -> None:
    import of_the_image  # noqa: PLC0415
    import of_the_image_  # noqa: PLC0415

    print(of_the_image.KNOWN, "and", of_the_image_.KNOWN, "are imported")


def nested(scale: int = 0) -> Callable[[], object]:
    def inner() -> None:
        print("""a text
with less indentation""")

    def closed_over() -> int:
        return scale

    return closed_over if scale else inner


def test_a_function_becomes_a_script_that_calls_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDPJOB_STATE_DIR", str(tmp_path / "state"))
    arguments = {"rate": 0.5, "tags": ["é", "'"]}
    made = DDPJob.from_function(plain, arguments, num_nodes=2, image="torch:1", labels={"team": "a"})
    assert made.script is not None and made.name == "plain"
    assert made.manifest["spec"]["numNodes"] == 2 and made.spec.launcher == "Injected"
    again = DDPJob.from_function(plain, arguments, num_nodes=2, image="torch:1", labels={"team": "a"})
    assert (again.manifest, again.script) == (made.manifest, made.script)
    done = subprocess.run([sys.executable, made.script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == """[1.5707963267948966] ['é', "'"] __main__\n"""
    other = DDPJob.from_function(nested(), name="other")
    done = subprocess.run([sys.executable, str(other.script)], capture_output=True, text=True, timeout=60, check=True)
    assert (other.name, done.stdout) == ("other", "a text\nwith less indentation\n")
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "plain.py").write_text("a module of the user")
    for workdir in (None, tmp_path / "work"):
        assert with_files(made, workdir).manifest["spec"]["command"] == ["ddprun", f".ddpjob/{made.script.name}"]


@pytest.mark.parametrize("launcher", ["python", "torchrun", "ddprun"])
def test_no_import_of_a_function_finds_its_own_script(
    launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen: the pod has a module of that name, and this machine does not, so the script had its name."""
    monkeypatch.setenv("DDPJOB_STATE_DIR", str(tmp_path / "state"))
    for name in ("of_the_image", "of_the_image_"):
        (tmp_path / f"{name}.py").write_text("KNOWN = __name__\n")
    script = DDPJob.from_function(of_the_image).script
    command = [str(Path(sys.executable).with_name(launcher)), str(script)]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert "of_the_image and of_the_image_ are imported" in done.stdout, done.stderr


def test_a_function_of_a_cell_keeps_the_numbers_of_its_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDPJOB_STATE_DIR", str(tmp_path))
    cell = "rate = 1\n\ndef train():\n    raise ValueError('third')\n"
    linecache.cache["<cell 1>"] = (len(cell), None, cell.splitlines(True), "<cell 1>")  # as IPython does
    names: dict[str, Any] = {}
    exec(compile(cell, "<cell 1>", "exec"), names)  # noqa: S102
    script = DDPJob.from_function(names["train"]).script
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert f'File "{script}", line 4, in train\n    raise ValueError' in done.stderr


def test_a_function_whose_file_was_changed_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "fit.py"
    file.write_text("def train():\n    pass\n")
    names: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), names)  # noqa: S102
    file.write_text("def wipe():\n    pass\n")
    with pytest.raises(InvalidJobError, match="source is not known"):
        DDPJob.from_function(names["train"])


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda: None, "it is a lambda or a method"),
        (print, "print cannot be sent as a job: it is a method, a class, or a function that is not written in Python"),
        (Path("a").exists, "exists cannot be sent as a job: it is a method"),
        (decorated, "decorated cannot be sent as a job: it is a method, a class"),
        (wrapped, "wrapped cannot be sent as a job: it is decorated"),
        (later, "only makes a coroutine or a generator"),
        (counting, "it uses SCALE from outside of it"),
        (renamed, "its __name__ was changed"),
        (nested(2), "closed_over cannot be sent as a job: it uses scale from outside of it"),
        (of_a_global, "it uses SCALE from outside of it"),
        (of_a_default, "it uses SCALE from outside of it"),
        (of_a_notebook, "it uses display from outside of it"),
        (FunctionType(plain.__code__.replace(co_filename="<nowhere>"), {}), "source is not known"),
    ],
)
def test_a_function_that_is_not_whole_is_refused(function: Any, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtins, "display", plain, raising=False)  # as IPython adds it
    with pytest.raises(InvalidJobError, match=text) as raised:
        DDPJob.from_function(function)
    assert raised.value.hint and "from_script" in raised.value.next_step


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"rat": 1}, "unexpected keyword argument 'rat'"),
        ({"rate": {1}}, "set is not JSON serializable"),
        ({"tags": ("a", "b")}, r"JSON makes \['a', 'b'\] of its argument tags"),
        ({"tags": {1: "a"}}, "of its argument tags"),
        ({"rate": float("nan")}, "of its argument rate"),
    ],
)
def test_an_argument_that_json_does_not_have_is_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidJobError, match=text) as raised:
        DDPJob.from_function(plain, arguments)
    assert "DDPJob.from_function(plain, {" in raised.value.next_step


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"num_node": 2}, 'hint:  did you mean "num_nodes"'),
        ({"num_nodes": "2"}, r"spec\.num_nodes: must be a valid integer"),
        ({"name": "Mnist"}, "lower-case letters"),
        ({"restart_policy": {"max_restart": 1}}, "unknown field"),
        ({"num_nodes": 2, "numNodes": 2}, "num_nodes and numNodes are one field"),
        ({"env": {"A": 1}}, '(?s)env A is 1, not text.*write "1"'),
        ({"labels": {"debug": True}}, '(?s)labels debug is True, not text.*write "true"'),
        ({"checkpoint": "10gi"}, "'10gi' is neither a size nor the name of a claim"),
        ({"checkpoint": "s3://bucket/run"}, "is neither a size nor the name of a claim"),
        ({"gpus": 1, "resources": {"requests": 5}}, "resources.requests: must be a mapping"),
        ({"memory": "lots"}, r"memory: must be a non-negative quantity"),
        ({"memory": "8"}, r"(?s)memory 8: this is less than 1 MiB.*8Gi\?"),
        ({"memory": "500m"}, r"(?s)memory 500m: .*500Mi\?"),
        ({"memory": "1e3"}, r"memory 1e3: this is less"),
    ],
)
def test_a_wrong_field_is_named_with_what_to_do(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidJobError, match=text) as raised:
        DDPJob(**{"name": "mnist", "image": "mnist:1", **arguments})
    assert raised.value.error and raised.value.hint and raised.value.next_step


def test_a_job_of_another_release_is_shown() -> None:
    job = seen(state="Odd", conditions=[condition("Finished"), condition("Succeeded")], nodes="new", later={"a": 1})
    assert (job.state, job.finished, job.succeeded, job.status.nodes) == ("Odd", True, True, None)
    assert repr(job) == "DDPJob('mnist', namespace='default', state='Odd')"


def imported_by(*modules: str) -> set[str]:
    code = f"import json, sys, {', '.join(modules)}; print(json.dumps(sorted(sys.modules)))"
    return set(json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout))


def test_importing_the_package_imports_no_client() -> None:
    modules = imported_by("ddpjob", "ddpjob.cli.main")
    assert not {"kubernetes", "kopf", "torch", "aiohttp", "ddpjob.client.cluster"} & modules


def test_the_client_of_a_cluster_imports_none_of_the_typed_classes_of_kubernetes() -> None:
    modules = imported_by("ddpjob.client.cluster", "ddpjob.client.cluster_snapshot")
    typed = ("kubernetes.client.api.", "kubernetes.client.models.")
    assert "kubernetes.client.api_client" in modules
    assert not [module for module in modules if module.startswith(typed)], "these take a second"
