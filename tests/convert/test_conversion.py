"""What a conversion decides, refuses and notes, one field at a time."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddpjob.api.objects import Json
from ddpjob.client.jobfile import documents_of
from ddpjob.convert.conversion import convert
from ddpjob.errors import InvalidJobError

JOBS = Path(__file__).parent / "jobs"
NODE = {"name": "node", "image": "i", "command": ["torchrun", "a.py"]}
WORKER = "spec.pytorchReplicaSpecs.Worker"
COMMAND = f"{WORKER}.template.spec.containers[0].command"
OWN = "ClusterTrainingRuntime.spec"
PATCH = "spec.runtimePatches[0].trainingRuntimeSpec"


def replica(*command: str, replicas: int = 1, restart: str = "OnFailure", **container: Any) -> Json:
    trainer = {"name": "pytorch", "image": "i", "command": list(command)} | container
    return {
        "replicas": replicas,
        "restartPolicy": restart,
        "template": {"spec": {"containers": [{key: value for key, value in trainer.items() if value}]}},
    }


def pytorchjob(*, master: Json | None = None, worker: Json | None = None, **spec: Any) -> Json:
    kinds = {"Master": master, "Worker": worker}
    replicas = {kind: one for kind, one in kinds.items() if one is not None}
    head = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {"name": "mnist"}}
    return head | {"spec": {"pytorchReplicaSpecs": replicas, "runPolicy": {"backoffLimit": 1}} | spec}


def trainjob(*command: str, runtime: str = "torch-distributed", spec: Json | None = None, **trainer: Any) -> Json:
    own = {"image": "i", "command": list(command)} | trainer
    head = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": {"name": "mnist"}}
    return head | {"spec": {"runtimeRef": {"name": runtime}, "trainer": own} | (spec or {})}


def spec_of(*documents: Json) -> Json:
    spec: Json = convert(documents).job["spec"]
    return spec


def noted(*documents: Json) -> list[str]:
    return [note.field for note in convert(documents).notes]


def runtime(spec: Json | None = None, *, kind: str = "ClusterTrainingRuntime", **jobset: Any) -> Json:
    """Return the runtime ``own``, whose only job is the one that trains."""
    node = {"name": "node", "template": {"spec": {"template": {"spec": {"containers": [NODE]}}}}}
    template = {"spec": {"replicatedJobs": [node]} | jobset}
    return {"kind": kind, "metadata": {"name": "own"}, "spec": {"template": template} | (spec or {})}


def refusal(*documents: Json) -> str:
    with pytest.raises(InvalidJobError) as raised:
        convert(documents)
    assert raised.value.hint and raised.value.next_step
    return raised.value.error


# ---- PyTorchJob


@pytest.mark.parametrize(
    ("command", "spec", "nproc"),
    [
        (["python", "train.py"], {}, 1),
        (["python", "train.py"], {"nprocPerNode": "4"}, 4),
        (["python", "train.py"], {"nprocPerNode": "auto"}, 1),
        (["torchrun", "train.py"], {}, "auto"),
        (["torchrun", "train.py"], {"nprocPerNode": "4"}, 4),
        (["torchrun", "train.py"], {"nprocPerNode": "4", "elasticPolicy": {"nProcPerNode": 3}}, 3),
        (["torchrun", "--nproc_per_node", "2", "train.py"], {"nprocPerNode": "4"}, 2),
        (["python", "-u", "-m", "torch.distributed.launch", "--nproc-per-node=2", "train.py"], {}, 2),
        (["bash", "-c", "torchrun --nproc_per_node=2 train.py"], {}, 2),
        (["bash", "-c", "torchrun train.py"], {"nprocPerNode": "gpu"}, "auto"),
        (["accelerate", "launch", "train.py"], {"nprocPerNode": "gpu"}, "auto"),
        ([], {}, 1),
    ],
)
def test_processes_per_node(command: list[str], spec: Json, nproc: int | str) -> None:
    gpus = {"limits": {"nvidia.com/gpu": 8}}
    job = pytorchjob(worker=replica(*command, resources=gpus), **spec)
    assert spec_of(job)["nprocPerNode"] == nproc


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (
            "torchrun --nnodes=2 --node_rank 0 --master_addr=$(MASTER_ADDR) --tee 3 a.py x --nnodes 7",
            "torchrun --tee 3 a.py x --nnodes 7",
        ),
        ("torchrun --standalone -m pkg.train --max-restarts 2", "torchrun -m pkg.train --max-restarts 2"),
        (
            "python -X dev -m torch.distributed.run --rdzv_endpoint h:1 --no-python sh x",
            "python -X dev -m torch.distributed.run --no-python sh x",
        ),
        ("nice -n 5 /opt/bin/torchrun --rdzv-backend=c10d a.py", "nice -n 5 /opt/bin/torchrun a.py"),
        ("python a.py torchrun --nnodes 2", "python a.py torchrun --nnodes 2"),
        ("python -m pkg --nnodes 2", "python -m pkg --nnodes 2"),
        ("mpirun --nnodes 2 torchrun", "mpirun --nnodes 2 torchrun"),
    ],
)
def test_flags_of_torchrun_that_the_operator_sets_are_removed(given: str, kept: str) -> None:
    assert spec_of(pytorchjob(worker=replica(*given.split())))["command"] == kept.split()


def test_flags_of_other_launchers_are_kept_and_noted_if_they_name_one_node() -> None:
    words = "accelerate launch --num_machines 2 --machine_rank=0 --main_process_ip=$(MASTER_ADDR) a.py --nnodes=$N"
    made = convert([pytorchjob(worker=replica(*words.split()))])
    assert made.job["spec"]["command"] == words.split()
    assert made.notes[0].why == "--num_machines, --machine_rank would be the same in each pod"
    assert noted(pytorchjob(worker=replica("python", "a.py", "--num_nodes", "2"))) == []


def test_what_a_shell_runs_is_unchanged_and_noted() -> None:
    text = "torchrun --nnodes $WORLD_SIZE --node_rank $RANK a.py"
    made = convert([pytorchjob(worker=replica("sh", "-c", text))])
    assert made.job["spec"]["command"] == ["sh", "-c", text]
    whys = " ".join(note.why for note in made.notes)
    assert "--nnodes, --node_rank" in whys and "$RANK" in whys and "$WORLD_SIZE" in whys


def test_master_and_worker_that_differ_are_refused_with_every_difference() -> None:
    gpus = {"limits": {"nvidia.com/gpu": 1}}
    job = pytorchjob(master=replica("python", "a.py"), worker=replica("python", "b.py", resources=gpus, replicas=3))
    assert refusal(job) == "Master and Worker differ in command, resources"


def test_replicas_are_counted_and_their_kinds_have_any_case() -> None:
    job = pytorchjob()
    job["spec"]["pytorchReplicaSpecs"] = {"master": replica("python"), "WORKER": replica("python", replicas=0)}
    assert spec_of(job)["numNodes"] == 1
    job["spec"]["pytorchReplicaSpecs"]["worker2"] = replica("python")
    assert "Worker2" in refusal(job)


def test_labels_of_kubeflow_that_pods_read_or_select_are_noted() -> None:
    path = "metadata.labels['training.kubeflow.org/replica-index']"
    env = [{"name": "INDEX", "valueFrom": {"fieldRef": {"fieldPath": path}}}]
    (note,) = convert([pytorchjob(worker=replica("python", env=env))]).notes
    assert "training.kubeflow.org/replica-index" in note.why and "ddpjob.dev/node-rank" in note.action


def test_sidecars_init_containers_and_security_contexts_are_kept() -> None:
    worker = replica("python", securityContext={"privileged": True})
    pod = worker["template"]["spec"]
    pod["containers"].append({"name": "side", "image": "s"})
    pod |= {"initContainers": [{"name": "first", "image": "f"}], "hostname": "h", "securityContext": {"runAsUser": 5}}
    made = convert([pytorchjob(worker=worker)])
    template = made.job["spec"]["template"]["spec"]
    assert template == {
        "initContainers": [{"name": "first", "image": "f"}],
        "securityContext": {"runAsUser": 5},
        "containers": [{"name": "trainer", "securityContext": {"privileged": True}}, {"name": "side", "image": "s"}],
    }
    assert [note.field for note in made.notes] == ["spec.pytorchReplicaSpecs.Worker.template.spec.hostname"]


def test_volume_of_shared_memory_that_a_sidecar_mounts_is_kept() -> None:
    mount = {"name": "shm", "mountPath": "/dev/shm"}
    worker = replica("python", volumeMounts=[mount])
    pod = worker["template"]["spec"]
    pod["volumes"] = [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}}]
    pod["containers"].append({"name": "side", "image": "s", "volumeMounts": [mount]})
    spec = spec_of(pytorchjob(worker=worker))
    assert spec["sharedMemory"] == {"sizeLimit": "1Gi"}
    assert spec["template"]["spec"]["volumes"] == pod["volumes"]
    assert [one["name"] for one in spec["template"]["spec"]["containers"]] == ["side"]


# ---- TrainJob


@pytest.mark.parametrize(
    ("command", "trainer", "nproc"),
    [
        (["torchrun", "a.py"], {"numProcPerNode": 3}, 3),
        (
            ["torchrun", "a.py"],
            {"numProcPerNode": "auto", "resourcesPerNode": {"limits": {"nvidia.com/gpu": 2, "cpu": 8}}},
            "auto",
        ),
        (["torchrun", "a.py"], {"resourcesPerNode": {"limits": {"cpu": "2500m"}}}, 2),
        (["torchrun", "a.py"], {"resourcesPerNode": {"limits": {"cpu": 8}, "requests": {"cpu": "500m"}}}, 1),
        (["torchrun", "a.py"], {}, "auto"),
        (["python", "a.py"], {"resourcesPerNode": {"limits": {"cpu": 8}}}, 1),
    ],
)
def test_processes_per_node_of_a_trainjob(command: list[str], trainer: Json, nproc: int | str) -> None:
    assert spec_of(trainjob(*command, **trainer))["nprocPerNode"] == nproc


@pytest.mark.parametrize("name", ["node", "trainer"])
def test_trainer_overrides_the_container_of_the_runtime(name: str) -> None:
    container = {
        "name": name,
        "image": "of-runtime",
        "command": ["python", "x.py"],
        "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "1"}],
        "resources": {"limits": {"cpu": 1}},
    }
    node = {"name": "node", "template": {"spec": {"template": {"spec": {"containers": [container]}}}}}
    runtime = {
        "kind": "ClusterTrainingRuntime",
        "metadata": {"name": "own"},
        "spec": {"template": {"spec": {"replicatedJobs": [node]}}},
    }
    job = trainjob(runtime="own", env=[{"name": "B", "value": "2"}], resourcesPerNode={"requests": {"memory": "1Gi"}})
    spec = spec_of(runtime, job)
    assert (spec["image"], spec["command"]) == ("i", ["python", "x.py"])
    assert spec["env"] == [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]
    assert spec["resources"] == {"requests": {"memory": "1Gi"}}
    assert "template" not in spec


def test_runtime_that_is_not_in_the_file_is_noted_and_without_an_image_refused() -> None:
    assert noted(trainjob("python", runtime="own")) == ["spec.runtimeRef"]
    assert "spec.trainer.image is missing" in refusal(trainjob("python", runtime="own", image=None))
    assert noted(trainjob("python", image=None)) == ["spec.runtimeRef"]


# ---- both


def test_file_without_exactly_one_job_is_refused() -> None:
    assert "it holds 0" in refusal({"kind": "Pod"})
    assert "it holds 2" in refusal(trainjob("python"), trainjob("python"))
    assert "apiVersion kubeflow.org/v2 of PyTorchJob" in refusal(pytorchjob() | {"apiVersion": "kubeflow.org/v2"})
    assert "no replicas" in refusal(pytorchjob())


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in inner:
        yield from paths(child, (*path, key))


@pytest.mark.parametrize("odd", [None, 5, "x", [None], {"name": 5}], ids=str)
@pytest.mark.parametrize("name", ["pytorchjob-python", "pytorchjob-elastic", "trainjob-torchrun", "trainjob-overrides"])
def test_any_value_anywhere_gives_a_job_or_a_refusal_in_three_lines(name: str, odd: Any) -> None:
    documents = documents_of((JOBS / f"{name}.yaml").read_text(encoding="utf-8"))
    for path in paths(documents):
        if len(path) < 2:
            continue
        changed = copy.deepcopy(documents)
        holder: Any = changed
        for part in path[:-1]:
            holder = holder[part]
        holder[path[-1]] = copy.deepcopy(odd)
        try:
            assert convert(changed).job["spec"]
        except InvalidJobError as error:
            assert error.error and error.hint and error.next_step, path


# ---- Fields: a source, what becomes of it in the spec, and the fields of the notes


def elastic(command: str = "torchrun a.py", replicas: int = 3, **policy: Any) -> Json:
    return pytorchjob(worker=replica(*command.split(), replicas=replicas), elasticPolicy=policy)


def run(worker: Json | None = None, master: Json | None = None, **policy: Any) -> Json:
    return pytorchjob(worker=worker or replica("python"), master=master, runPolicy={"backoffLimit": 1} | policy)


def patched(**spec: Any) -> Json:
    return trainjob("python", spec=spec)


def patch(template: Json, **more: Any) -> list[Json]:
    return [{"manager": "m", "trainingRuntimeSpec": {"template": {"spec": template}} | more}]


POOL: Json = {"nodeSelector": {"a": "b"}}
OF_NODE = [{"name": "node", "template": {"spec": {"template": {"spec": POOL}}}}]
SHM = [{"name": "d", "mountPath": "/dev/shm"}]
VARIABLES = [{"name": name, "value": "x"} for name in ("MASTER_ADDR", "RANK", "PET_NNODES", "LR")]
GANG = {"schedulingPolicy": {"gang": {}}}
TIMES = {"ttlSecondsAfterFinished": 0, "activeDeadlineSeconds": 60, "suspend": True}
PLACED = {"template": {"spec": POOL}}
JOB_OF_OWN = trainjob("torchrun", "a.py", runtime="own")
BOTH = {"successPolicy": "NodeZero", "podRetention": "None"}
FIELDS: dict[str, tuple[Json | list[Json], Json, list[str]]] = {
    "never": (run(replica("python", restart="Never"), backoffLimit=7), {"restartPolicy": {"maxRestarts": 0}}, []),
    "limit-of-elastic": (
        pytorchjob(worker=replica("python", restart="Always"), runPolicy={}, elasticPolicy={"maxRestarts": 3}),
        {"restartPolicy": {"maxRestarts": 3}}, []),
    "limit-of-torchrun": (pytorchjob(worker=replica("torchrun", "--max-restarts=4", "a.py"), runPolicy={}),
        {"restartPolicy": {"maxRestarts": 4}}, [COMMAND, "spec.nprocPerNode"]),
    "no-limit": (pytorchjob(worker=replica("python"), runPolicy={}),
        {"restartPolicy": None}, [f"{WORKER}.restartPolicy"]),
    "clean-none": (run(master=replica("python"), cleanPodPolicy="None"), dict.fromkeys(BOTH), []),
    "clean-running": (run(master=replica("python"), cleanPodPolicy="Running"), BOTH | {"podRetention": None}, []),
    "clean-all": (run(master=replica("python"), cleanPodPolicy="All"), BOTH, []),
    "clean-without-master": (run(cleanPodPolicy="All"), BOTH | {"successPolicy": None}, []),
    "times": (run(**TIMES), TIMES, []),
    "not-suspended": (run(suspend=False), {"suspend": None}, []),
    "times-of-trainjob": (patched(activeDeadlineSeconds=9, suspend=True),
        {"activeDeadlineSeconds": 9, "suspend": True}, []),
    "flags-of-args": (
        pytorchjob(worker=replica("torchrun", "--nnodes=2", args=["--node-rank=1", "a.py", "--lr", "1"])),
        {"command": ["torchrun"], "args": ["a.py", "--lr", "1"]}, [COMMAND, "spec.nprocPerNode"]),
    "flags-of-the-rank": (run(*(replica("torchrun", f"--node_rank={rank}", "a.py") for rank in (0, 1))),
        {"command": ["torchrun", "a.py"]}, [COMMAND.replace("Worker", "Master"), "spec.nprocPerNode"]),
    "other-restarts": (run(master=replica("python", restart="Never")), {"restartPolicy": {"maxRestarts": 0}},
        ["spec.pytorchReplicaSpecs.Master.restartPolicy"]),
    "the-last-variable": (trainjob("python", env=[VARIABLES[-1], VARIABLES[-1] | {"value": "y"}]),
        {"env": [VARIABLES[-1] | {"value": "y"}]}, []),
    "a-part-of-a-cpu": (trainjob("torchrun", "a.py", resourcesPerNode={"limits": {"cpu": 1.5}}),
        {"resources": {"limits": {"cpu": "1.5"}}, "nprocPerNode": 1}, []),
    "variables": (pytorchjob(worker=replica("python", env=VARIABLES)),
        {"env": [VARIABLES[-1], {"name": "PYTHONUNBUFFERED", "value": "1"}]},
        [f"{WORKER}.template.spec.containers[0].env"] * 3),
    "memory": (pytorchjob(worker=replica("python", volumeMounts=SHM)),
        {"template": None, "sharedMemory": None}, [f"{WORKER}.template.spec.containers[0].volumeMounts"]),
    "unknown": (pytorchjob(worker=replica("python") | {"scaling": 1}, paused=True),
        {}, [f"{WORKER}.scaling", "spec.paused"]),
    "nodes-of-torchrun": (elastic("torchrun --nnodes=2:4 a.py"),
        {"numNodes": 3, "minNodes": 2}, [COMMAND, "spec.nprocPerNode"]),
    "nodes-fixed": (elastic("torchrun --nnodes=1 a.py"), {"minNodes": None}, [COMMAND, "spec.nprocPerNode"]),
    "gang-too-small": (run(replica("python", replicas=3), schedulingPolicy={"minAvailable": 2}),
        {"scheduling": None}, ["spec.runPolicy.schedulingPolicy.minAvailable"]),
    "gang-of-all": (run(replica("python", replicas=3), schedulingPolicy={"minAvailable": 3}), {"scheduling": GANG}, []),
    "overrides": (patched(podTemplateOverrides=[{"targetJobs": [{"name": "node"}], "spec": POOL}]), PLACED, []),
    "patches": (patched(runtimePatches=patch({"replicatedJobs": OF_NODE})), PLACED, []),
    "other-patches": (patched(runtimePatches=patch({"failurePolicy": {"maxRestarts": 7}}, mlPolicy={"numNodes": 9})),
        {"numNodes": 1, "restartPolicy": None}, [f"{PATCH}.template.spec.failurePolicy", f"{PATCH}.mlPolicy"]),
    "mpi": ([runtime({"mlPolicy": {"numNodes": 2, "mpi": {"a": 1}}}), trainjob("python", runtime="own")],
        {"numNodes": 2}, [f"{OWN}.mlPolicy.mpi"]),
    "elastic-runtime": (
        [runtime({"mlPolicy": {"numNodes": 4, "torch": {"elasticPolicy": {"minNodes": 2, "maxNodes": 8}}}}),
         JOB_OF_OWN],
        {"numNodes": 4, "minNodes": 2}, [f"{OWN}.mlPolicy.torch.elasticPolicy.maxNodes"]),
    "jobset": ([runtime(failurePolicy={"maxRestarts": 3, "rules": []}, ttlSecondsAfterFinished=0), JOB_OF_OWN],
        {"restartPolicy": {"maxRestarts": 3}, "ttlSecondsAfterFinished": 0}, []),
}  # fmt: skip


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_becomes_this_and_these_notes(name: str) -> None:
    source, expected, fields = FIELDS[name]
    made = convert(source if isinstance(source, list) else [source])
    assert {key: made.job["spec"].get(key) for key in expected} == expected
    assert [note.field for note in made.notes] == fields


CONF = [{"key": "timeout", "value": "60"}]


@pytest.mark.parametrize(
    ("flag", "policy", "kept"),
    [
        ("--rdzv-conf timeout=1200,is_host=0", [], {"timeoutSeconds": 1200}),
        ("--rdzv_conf=join_timeout=30", [], {"timeoutSeconds": 30}),
        ("--rdzv-conf=timeout=5", CONF, {"timeoutSeconds": 10}),
        ("--rdzv-conf=timeout=soon", [], None),
        ("--rdzv-conf=read_timeout=60", [], None),
        ("", CONF, {"timeoutSeconds": 60}),
    ],
)
def test_the_timeout_of_the_rendezvous_is_kept(flag: str, policy: list[Json], kept: Json | None) -> None:
    """Seen: a conversion left out the time limit of --rdzv-conf without a word."""
    words = ["torchrun", *flag.split(), "a.py"]
    assert spec_of(pytorchjob(worker=replica(*words), elasticPolicy={"rdzvConf": policy})).get("rendezvous") == kept
    if not policy:
        assert spec_of(trainjob(*words)).get("rendezvous") == kept
