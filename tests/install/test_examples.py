"""The example files are valid, have the documented world size, and mark what a user must change."""

import dataclasses
import itertools
from pathlib import Path

import pytest
import yaml

from ddpjob.engine.desired import Job
from ddptrain.config import Config
from ddptrain.lesson import lesson_names
from tests.install.chart import ROOT, Object, of_kind

EXAMPLES = ROOT / "manifests" / "examples"
JOBS = ("mnist-cpu.yaml", "mnist-gpu.yaml", "torchrun-script.yaml", "ddprun-script.yaml", "injected-launcher.yaml")
LESSONS = tuple(f"lessons/{name}.yaml" for name in lesson_names())


def documents(name: str) -> list[Object]:
    return list(yaml.safe_load_all((EXAMPLES / name).read_text(encoding="utf-8")))


def job(name: str) -> Job:
    [body] = of_kind(documents(name), "DDPJob")
    meta = {"namespace": "default", "uid": "1234567890", **body["metadata"]}
    return Job.of(body | {"metadata": meta})


def test_every_example_is_tested() -> None:
    found = {str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*.yaml")}
    assert found == {*JOBS, *LESSONS, "shared-volume.yaml"}


def test_lessons_whose_ranks_share_files_run_on_one_node() -> None:
    """Pods on several nodes share no folder without a volume, and the lessons' jobs have none."""
    folder = ROOT / "trainer_app" / "ddptrain" / "lessons"
    sharing = [name for name in LESSONS if "DDPJOB_CHECKPOINT_DIR" in (folder / f"{Path(name).stem}.py").read_text()]
    assert {name: job(name).spec.num_nodes for name in sharing} == {"lessons/fsdp.yaml": 1, "lessons/restart.yaml": 1}


@pytest.mark.parametrize("name", LESSONS)
def test_job_of_a_lesson_runs_that_lesson(name: str) -> None:
    example, lesson = job(name), Path(name).stem
    assert (example.name, example.spec.args) == (f"lesson-{lesson}", ["lesson", lesson])
    assert example.spec.num_nodes * example.nproc_per_node == (2 if lesson == "restart" else 4)


@pytest.mark.parametrize(
    ("name", "nodes", "processes"),
    [(JOBS[0], 2, 2), (JOBS[1], 2, 8), (JOBS[2], 2, 2), (JOBS[3], 2, 2), (JOBS[4], 2, 2)],
)
def test_examples_have_the_documented_world_size(name: str, nodes: int, processes: int) -> None:
    example = job(name)
    assert (example.spec.num_nodes, example.nproc_per_node) == (nodes, processes)
    assert example.name == name.removesuffix(".yaml")


@pytest.mark.parametrize("name", [*JOBS, *LESSONS])
def test_examples_explain_commands_and_required_changes(name: str) -> None:
    lines = (EXAMPLES / name).read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# ")
    assert any(f"kubectl apply -f manifests/examples/{name}" in line for line in lines)
    for number, line in enumerate(lines):
        # Other clusters have neither this image nor this storage class.
        if line.strip().startswith(("image: ddpjob/", "storageClassName: ")):
            comment = itertools.takewhile(lambda above: above.strip().startswith("#"), reversed(lines[:number]))
            assert any("CHANGE" in above for above in comment), f"{name}: {line.strip()} must be marked CHANGE"


@pytest.mark.parametrize("name", JOBS[:2])
def test_trainer_has_every_flag_of_the_mnist_examples(name: str) -> None:
    verb, *rest = job(name).spec.args or []
    assert verb == "train"
    flags = {word.removeprefix("--").replace("-", "_") for word in rest if word.startswith("--")}
    assert flags <= {field.name for field in dataclasses.fields(Config)}


def test_shared_volume_can_bind_the_claims_of_the_examples() -> None:
    [volume] = of_kind(documents("shared-volume.yaml"), "PersistentVolume")
    [storage_class] = of_kind(documents("shared-volume.yaml"), "StorageClass")
    for name in (*JOBS[:2], "ddprun-script.yaml"):
        checkpoint = job(name).spec.checkpoint
        assert checkpoint and checkpoint.claim_template
        claim = checkpoint.claim_template.wire()["spec"]
        assert claim["storageClassName"] == volume["spec"]["storageClassName"] == storage_class["metadata"]["name"]
        assert claim["accessModes"] == volume["spec"]["accessModes"]
