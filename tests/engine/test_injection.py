"""``launcher: Injected``: the init container, the changed command, and what the status says of both."""

from typing import Any

import pytest

from ddpjob.api.names import LAUNCHER, LAUNCHER_PATH
from ddpjob.engine.actions import EngineSettings
from ddpjob.engine.desired import Job, desired_pods
from ddpjob.engine.injection import PROGRAM, launched
from ddpjob.engine.mistakes import injection_warning
from tests.builders import World, a_job, a_running_world, a_started_world

SETTINGS = EngineSettings(launcher_image="launcher:1")
COPIED = ["python3", PROGRAM, "--python-of"]
REPLACED = [
    (["torchrun", "train.py", "--lr", "1"], [*COPIED, "torchrun", "train.py", "--lr", "1"]),
    (["/opt/conda/bin/torchrun", "train.py"], [*COPIED, "/opt/conda/bin/torchrun", "train.py"]),
    (["ddprun", "--start", "spawn", "train.py"], [*COPIED, "torchrun", "--start", "spawn", "train.py"]),
    (["python", "-m", "torch.distributed.run", "-m", "mine"], ["python", PROGRAM, "-m", "mine"]),
    (["python3.12", "-u", "-X", "dev", "-m", "ddprun", "a.py"], ["python3.12", "-u", "-X", "dev", PROGRAM, "a.py"]),
    (["/venv/bin/python", "/venv/bin/torchrun", "a.py"], ["/venv/bin/python", PROGRAM, "a.py"]),
    (["env", "A=/b", "torchrun", "a.py"], ["env", "A=/b", *COPIED, "torchrun", "a.py"]),
    (["/usr/bin/tini", "--", "torchrun", "a.py"], ["/usr/bin/tini", "--", *COPIED, "torchrun", "a.py"]),
    (["gosu", "user", "torchrun", "t.py"], ["gosu", "user", *COPIED, "torchrun", "t.py"]),
    (["py-spy", "record", "-o", "p", "--", "torchrun", "t.py"],
     ["py-spy", "record", "-o", "p", "--", *COPIED, "torchrun", "t.py"]),
    (["nsys", "profile", "-o", "/out/t", "torchrun"], ["nsys", "profile", "-o", "/out/t", *COPIED, "torchrun"]),
    (["nsys", "profile", "-o", "/out/t", "-f", "true", "python", "-m", "ddprun", "t.py"],
     ["nsys", "profile", "-o", "/out/t", "-f", "true", "python", PROGRAM, "t.py"]),
    (["timeout", "5m", "torchrun", "t.py"], ["timeout", "5m", *COPIED, "torchrun", "t.py"]),
    (["env", "-i", "torchrun", "--no-python", "python", "t.py"],
     ["env", "-i", *COPIED, "torchrun", "--no-python", "python", "t.py"]),
    (["stdbuf", "-oL", "torchrun", "t.py", "python"], ["stdbuf", "-oL", *COPIED, "torchrun", "t.py", "python"]),
    (["conda", "run", "-n", "dl", "python", "-m", "torch.distributed.run", "a.py"],
     ["conda", "run", "-n", "dl", "python", PROGRAM, "a.py"]),
]  # fmt: skip
UNCHANGED = [
    ["python", "train.py", "torchrun"],
    ["python", "-m", "torch.distributed.launch", "train.py"],
    ["python", "-c", "import torch"],
    ["python", "-m"],
    ["python"],
    ["accelerate", "launch", "train.py"],
    ["bash", "-c", "torchrun train.py"],
    ["./start.sh", "torchrun", "train.py"],
    ["tini", "--", "/start.sh", "torchrun", "train.py"],
    ["timeout", "60", "start.sh", "torchrun"],
    ["$(PROGRAM)", "train.py"],
    ["env"],
]


def job_of(**spec: Any) -> Job:
    return Job.of(a_job(launcher="Injected", **spec))


def pod_spec(settings: EngineSettings = SETTINGS, **spec: Any) -> dict[str, Any]:
    pod: dict[str, Any] = desired_pods(job_of(**spec), 1, settings)[1].body["spec"]
    return pod


@pytest.mark.parametrize(("command", "becomes"), REPLACED, ids=[" ".join(command) for command, _ in REPLACED])
def test_launcher_is_replaced_and_its_arguments_stay(command: list[str], becomes: list[str]) -> None:
    trainer = pod_spec(command=command[:1], args=command[1:])["containers"][0]
    assert ([*trainer["command"], *trainer.get("args", ())]) == becomes
    assert injection_warning(job_of(command=command)) is None


@pytest.mark.parametrize("command", UNCHANGED, ids=" ".join)
def test_other_command_runs_unchanged_and_an_event_says_so(command: list[str]) -> None:
    assert pod_spec(command=command)["containers"][0]["command"] == command
    world = a_started_world(a_job(launcher="Injected", command=command))
    [text] = [note.message for plan in world.plans for note in plan.events if note.reason == "LauncherNotUsed"]
    assert " ".join(command[:3]) in text and f"python3 {PROGRAM}" in text


def test_entrypoint_of_the_image_is_not_replaced() -> None:
    trainer = pod_spec(args=["torchrun", "train.py"])["containers"][0]
    assert (trainer.get("command"), trainer["args"]) == (None, ["torchrun", "train.py"])
    assert "the entrypoint of the image runs unchanged" in str(injection_warning(job_of(args=["torchrun"])))


def test_init_container_copies_under_restricted_pod_security() -> None:
    pod = pod_spec(podSecurity={"profile": "Unset"}, command=["torchrun", "a.py"])
    [init] = pod["initContainers"]
    assert init["securityContext"] == {
        "runAsNonRoot": True,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert (init["image"], init["command"]) == ("launcher:1", ["ddprun", "--copy-to", LAUNCHER_PATH])
    assert init["imagePullPolicy"] == "Never"
    assert init["resources"]["limits"] == init["resources"]["requests"], "a Guaranteed pod must remain one"
    assert init["volumeMounts"] == [{"name": LAUNCHER, "mountPath": LAUNCHER_PATH}]
    assert {"name": LAUNCHER, "mountPath": LAUNCHER_PATH, "readOnly": True} in pod["containers"][0]["volumeMounts"]
    [volume] = [volume for volume in pod["volumes"] if volume["name"] == LAUNCHER]
    assert volume["emptyDir"] == {"sizeLimit": "16Mi"}


@pytest.mark.parametrize(
    ("security", "user"),
    [({"profile": "Baseline", "runAsUser": 0}, 1000), ({"runAsUser": 70000}, None), ({"profile": "Unset"}, None)],
    ids=str,
)
def test_init_container_has_the_pods_user_unless_that_is_root(security: dict[str, Any], user: int | None) -> None:
    init = pod_spec(podSecurity=security)["initContainers"][0]
    assert init["securityContext"].get("runAsUser") == user


def test_what_the_template_has_stays_and_the_launcher_is_copied_first() -> None:
    sidecar = {"name": "proxy", "image": "proxy:1", "restartPolicy": "Always"}
    trainer = {"name": "trainer", "volumeMounts": [{"name": "scripts", "mountPath": "/scripts"}]}
    volume = {"name": "scripts", "configMap": {"name": "scripts"}}
    own = {
        "containers": [{"name": "side", "image": "side:1"}, trainer],
        "initContainers": [sidecar],
        "volumes": [volume],
    }
    given = [{"name": "PYTHONPATH", "value": "/mine"}, {"name": "PATH", "value": "/venv/bin:/bin"}]
    pod = pod_spec(template={"spec": own}, env=given, command=["torchrun", "a.py"])
    assert [init["name"] for init in pod["initContainers"]] == [LAUNCHER, "proxy"]
    assert pod["initContainers"][1]["restartPolicy"] == "Always"
    assert [container["name"] for container in pod["containers"]] == ["trainer", "side"]
    first, side = pod["containers"]
    assert trainer["volumeMounts"][0] in first["volumeMounts"] and volume in pod["volumes"]
    assert [variable for variable in first["env"] if variable in given] == given
    assert "volumeMounts" not in side


def test_machine_that_has_the_launcher_needs_no_init_container() -> None:
    pod = pod_spec(EngineSettings(launcher_image=""), command=["torchrun", "a.py"])
    assert "initContainers" not in pod and pod["containers"][0]["command"] == ["ddprun", "a.py"]
    assert launched(["python", "-u", "-m", "torch.distributed.run", "a.py"], None) == [
        *("python", "-u", "-m", "ddprun", "a.py")
    ]


def waiting_for_the_launcher(reason: str, message: str) -> World:
    world = a_started_world(a_job(launcher="Injected"))
    init = {"name": LAUNCHER, "state": {"waiting": {"reason": reason, "message": message}}}
    trainer = {"name": "trainer", "state": {"waiting": {"reason": "PodInitializing"}}}
    status = {"phase": "Pending", "initContainerStatuses": [init], "containerStatuses": [trainer]}
    world.show(1, status)
    return world


def test_launcher_image_that_cannot_be_pulled_is_named_with_what_to_do() -> None:
    world = waiting_for_the_launcher("ErrImagePull", "launcher:1 not found")
    running = world.condition("Running")
    assert running["reason"] == "ImagePullBackOff"
    assert f"init container {LAUNCHER}: launcher:1 not found" in running["message"]
    assert "chart value operator.launcherImage" in running["message"]


@pytest.mark.parametrize("reason", ["CreateContainerConfigError", "InvalidImageName"])
def test_wrong_setting_of_the_operator_fails_no_job(reason: str) -> None:
    world = waiting_for_the_launcher(reason, "image will run as root")
    world.later(1000)
    assert world.status["state"] == "Pending"
    assert world.condition("Running")["reason"] == reason, "it is shown"


def test_failed_copy_is_a_failure_of_its_own_with_what_to_do() -> None:
    world = a_running_world(a_job(numNodes=1, launcher="Injected"))
    report = '{"schema": 3, "code": 73, "message": "cannot write /opt: No space left on device"}'
    init = {"name": LAUNCHER, "state": {"terminated": {"exitCode": 73, "message": report}}}
    world.show(0, {"phase": "Failed", "initContainerStatuses": [init]})
    failure = world.status["failures"][0]
    assert (failure["reason"], failure["action"]) == ("LauncherNotInjected", "Restart")
    text = f"init container {LAUNCHER} ended with exit code 73: cannot write /opt: No space left on device"
    assert failure["message"].endswith(text)
    assert f"-c {LAUNCHER}" in failure["next"] and "operator.launcherImage" in failure["next"]
