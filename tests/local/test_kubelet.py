"""The kubelet of local mode with real processes: it reports what a kubelet reports."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ddpjob.api.objects import Json
from tests.local.bench import MARKER, Bench, marked, running_kubelet
from tests.local.builders import a_container, a_pod

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with running_kubelet(tmp_path) as made:
        yield made


def trainer(status: Json) -> Json:
    """Return the terminated state of the trainer container."""
    state: Json = next(s for s in status["containerStatuses"] if s["name"] == "trainer")["state"]["terminated"]
    return state


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


# Kubernetes reads $$ in a command as one dollar: the shell gets $$, its pid.
@pytest.mark.parametrize(
    ("script", "code", "reason", "phase"),
    [
        ("exit 0", 0, "Completed", "Succeeded"),
        ("exit 3", 3, "Error", "Failed"),
        ("kill -TERM $$$$", 143, "Error", "Failed"),
        ("kill -KILL $$$$", 137, "Error", "Failed"),
        ("kill -SEGV $$$$", 139, "Error", "Failed"),
    ],
)
async def test_terminated_container_reports_exit_code_or_signal(
    bench: Bench, script: str, code: int, reason: str, phase: str
) -> None:
    status = await bench.run(a_pod(a_container(script=script)))
    assert (status["phase"], trainer(status)["exitCode"], trainer(status)["reason"]) == (phase, code, reason)
    assert "signal" not in trainer(status)


async def test_finished_pod_has_a_complete_status(bench: Bench) -> None:
    status = await bench.run(a_pod(a_container(script="exit 1")))
    conditions = {c["type"]: (c["status"], c.get("reason")) for c in status["conditions"]}
    assert conditions == {
        "PodScheduled": ("True", None),
        "Initialized": ("True", None),
        "Ready": ("False", "PodFailed"),
        "ContainersReady": ("False", "PodFailed"),
    }
    assert (status["podIP"], status["hostIP"]) == ("127.0.0.1", "127.0.0.1")
    assert status["startTime"] <= trainer(status)["startedAt"] <= trainer(status)["finishedAt"]
    assert trainer(status)["finishedAt"].endswith("Z")
    container = status["containerStatuses"][0]
    assert (container["ready"], container["started"], container["restartCount"]) == (False, False, 0)
    assert bench.pod("mnist-0a1b2-1-0")["spec"]["nodeName"] == "local"


async def test_running_pod_is_ready(bench: Bench) -> None:
    name = bench.create(a_pod(a_container(script="sleep 600")))
    await bench.until("it runs", lambda: "running" in bench.state_of(name))
    status = bench.pod(name)["status"]
    assert status["phase"] == "Running"
    assert {c["type"] for c in status["conditions"] if c["status"] == "True"} == {
        "PodScheduled",
        "Initialized",
        "Ready",
        "ContainersReady",
    }
    assert (status["containerStatuses"][0]["ready"], status["containerStatuses"][0]["started"]) == (True, True)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("no-such-program", 'exec: "no-such-program": executable file not found in $PATH'),
        ("/no/such/program", 'exec: "/no/such/program": stat /no/such/program: no such file or directory'),
        ("/etc/passwd", 'exec: "/etc/passwd": permission denied'),
    ],
)
async def test_command_that_cannot_start_fails_with_the_message_of_runc(
    bench: Bench, command: str, message: str
) -> None:
    status = await bench.run(a_pod(a_container(command=[command])))
    ended = trainer(status)
    assert (status["phase"], ended["exitCode"], ended["reason"]) == ("Failed", 128, "StartError")
    assert message in ended["message"]
    assert ended["startedAt"] == "1970-01-01T00:00:00Z"


async def test_missing_working_directory_is_named(bench: Bench) -> None:
    ended = trainer(await bench.run(a_pod(a_container(script="true", workingDir="/no/such/folder"))))
    assert ended["reason"] == "StartError"
    assert 'chdir to cwd ("/no/such/folder") set in config.json failed: no such file or directory' in ended["message"]


@pytest.mark.parametrize(
    ("script", "policy", "message"),
    [
        ("printf why > /dev/termination-log; exit 1", "File", "why"),
        ("printf why > $DDPJOB_TERMINATION_LOG", "File", "why"),
        ("echo last line; exit 1", "FallbackToLogsOnError", "last line\n"),
        ("echo last line >&2; exit 1", "FallbackToLogsOnError", "last line\n"),
        ("echo last line; exit 0", "FallbackToLogsOnError", None),
        ("echo last line; exit 1", "File", None),
        ("echo log; printf why > /dev/termination-log; exit 1", "FallbackToLogsOnError", "why"),
    ],
)
async def test_termination_message_is_the_file_or_as_fallback_the_end_of_the_log(
    bench: Bench, script: str, policy: str, message: str | None
) -> None:
    container = a_container(script=script, terminationMessagePolicy=policy)
    assert trainer(await bench.run(a_pod(container))).get("message") == message


async def test_long_termination_messages_are_cut_as_by_a_kubelet(bench: Bench) -> None:
    lines = "for i in $(seq 200); do echo line $i; done; exit 1"
    ended = trainer(await bench.run(a_pod(a_container(script=lines, terminationMessagePolicy="FallbackToLogsOnError"))))
    assert ended["message"].splitlines() == [f"line {i}" for i in range(121, 201)]
    wide = "head -c 5000 /dev/zero | tr '\\0' x; exit 1"
    pod = a_pod(a_container(script=wide, terminationMessagePolicy="FallbackToLogsOnError"), name="mnist-0a1b2-2-0")
    assert trainer(await bench.run(pod))["message"] == "x" * 2048
    filed = a_pod(a_container(script=wide.replace("; exit", " >/dev/termination-log; exit")), name="mnist-0a1b2-3-0")
    assert trainer(await bench.run(filed))["message"] == "x" * 4096


async def test_init_containers_run_in_order_before_the_trainer(bench: Bench) -> None:
    inits = [a_container(name, f"echo {name} >> /scratch/order") for name in ("first", "second")]
    mount = {"volumeMounts": [{"name": "work", "mountPath": "/scratch"}]}
    status = await bench.run(
        a_pod(
            a_container(script="cat /scratch/order") | mount,
            initContainers=[init | mount for init in inits],
            volumes=[{"name": "work", "emptyDir": {}}],
        )
    )
    assert bench.log("mnist-0a1b2-1-0") == "first\nsecond\n"
    assert [s["state"]["terminated"]["reason"] for s in status["initContainerStatuses"]] == ["Completed", "Completed"]


async def test_failed_init_container_prevents_the_trainer_from_starting(bench: Bench) -> None:
    inits = [a_container("broken", "exit 4"), a_container("never", "echo never")]
    status = await bench.run(a_pod(a_container(script="echo never"), initContainers=inits))
    assert status["phase"] == "Failed"
    assert bench.state_of("mnist-0a1b2-1-0", "broken")["terminated"]["exitCode"] == 4
    for container in ("never", "trainer"):
        assert bench.state_of("mnist-0a1b2-1-0", container)["waiting"]["reason"] == "PodInitializing"
        assert bench.log("mnist-0a1b2-1-0", container) == ""


async def test_sidecar_runs_with_the_trainer_and_ends_after_it(bench: Bench) -> None:
    sidecar = a_container(
        "sidecar", "trap 'echo bye; exit 0' TERM; while :; do sleep 0.01; done", restartPolicy="Always"
    )
    status = await bench.run(a_pod(a_container(script="exit 0"), initContainers=[sidecar]))
    assert status["phase"] == "Succeeded"
    assert bench.log("mnist-0a1b2-1-0", "sidecar") == "bye\n"
    assert bench.state_of("mnist-0a1b2-1-0", "sidecar")["terminated"]["exitCode"] == 0


async def test_sidecar_of_a_deleted_pod_ends_after_the_trainer(bench: Bench) -> None:
    mount = {"volumeMounts": [{"name": "work", "mountPath": "/scratch"}]}
    side = "trap 'ls /scratch; exit 0' TERM; echo up; while :; do sleep 0.01; done"
    main = "trap 'touch /scratch/saved; exit 0' TERM; echo up; while :; do sleep 0.01; done"
    name = bench.create(
        a_pod(
            a_container(script=main) | mount,
            initContainers=[a_container("sidecar", side, restartPolicy="Always") | mount],
            volumes=[{"name": "work", "emptyDir": {}}],
        )
    )
    await bench.until("both are up", lambda: bench.log(name) and bench.log(name, "sidecar"))
    bench.delete(name)
    await bench.until("its object is gone", lambda: bench.is_gone(name))
    assert bench.log(name, "sidecar") == "up\nsaved\n"


async def test_missing_key_keeps_the_container_waiting_and_is_named(bench: Bench) -> None:
    env = [{"name": "X", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "x"}}}]
    name = bench.create(a_pod(a_container(script="true", env=env)))
    await bench.until("it waits", lambda: bench.state_of(name).get("waiting", {}).get("message"))
    waiting = {"reason": "CreateContainerConfigError", "message": 'secret "keys" not found'}
    assert bench.state_of(name) == {"waiting": waiting}
    assert bench.pod(name)["status"]["phase"] == "Pending"
    bench.delete(name)
    await bench.until("it can be deleted nevertheless", lambda: bench.is_gone(name))


async def test_sidecar_without_a_command_is_refused(bench: Bench) -> None:
    name = bench.create(a_pod(a_container(script="true"), a_container("web")))
    await bench.until("it waits", lambda: bench.state_of(name, "web").get("waiting", {}).get("message"))
    assert "container web has no command" in bench.state_of(name, "web")["waiting"]["message"]


async def test_deleted_pod_gets_sigterm_and_is_removed_when_it_has_ended(bench: Bench) -> None:
    name = bench.create(
        a_pod(a_container(script="trap 'echo saved; exit 75' TERM; echo up; while :; do sleep 0.01; done"))
    )
    await bench.until("it is up", lambda: bench.log(name))
    bench.delete(name)
    await bench.until("its object is gone", lambda: bench.is_gone(name))
    assert bench.log(name) == "up\nsaved\n"


async def test_process_that_ignores_sigterm_is_killed_with_its_children(bench: Bench, tmp_path: Path) -> None:
    script = "trap '' TERM; setsid sleep 600 & (setsid sleep 600 &) ; echo up; while :; do sleep 0.01; done"
    env = [{"name": MARKER, "value": str(tmp_path)}]
    pod = a_pod(a_container(script=script, env=env), terminationGracePeriodSeconds=1)
    name = bench.create(pod)
    await bench.until("it is up", lambda: bench.log(name))
    assert len(marked(str(tmp_path))) >= 3
    bench.delete(name)
    await bench.until("its object is gone", lambda: bench.is_gone(name))
    assert marked(str(tmp_path)) == []


async def test_daemon_ends_with_the_main_process_of_its_container(bench: Bench, tmp_path: Path) -> None:
    script = "(setsid sh -c 'sleep 600 & sleep 600' >/dev/null 2>&1 &); exit 0"
    status = await bench.run(a_pod(a_container(script=script, env=[{"name": MARKER, "value": str(tmp_path)}])))
    assert status["phase"] == "Succeeded"
    assert marked(str(tmp_path)) == []


async def test_force_deleted_pod_is_killed_at_once(bench: Bench, tmp_path: Path) -> None:
    script = "trap '' TERM; echo up; while :; do sleep 0.01; done"
    name = bench.create(a_pod(a_container(script=script, env=[{"name": MARKER, "value": str(tmp_path)}])))
    await bench.until("it is up", lambda: bench.log(name))
    bench.delete(name, grace=0)
    await bench.until("nothing of it runs", lambda: not marked(str(tmp_path)))


async def test_container_whose_shim_is_killed_is_reported_as_killed(bench: Bench, tmp_path: Path) -> None:
    env = [{"name": MARKER, "value": str(tmp_path)}]
    name = bench.create(a_pod(a_container(script="echo up; exec sleep 600", env=env)))
    await bench.until("it is up", lambda: bench.log(name))
    (main,) = marked(str(tmp_path))
    os.kill(parent_of(main), signal.SIGKILL)
    await bench.until("it has ended", lambda: "terminated" in bench.state_of(name))
    assert bench.state_of(name)["terminated"]["exitCode"] == 137
    await bench.until("its process is gone", lambda: not marked(str(tmp_path)))


async def test_cancelling_the_kubelet_ends_every_process(tmp_path: Path) -> None:
    env = [{"name": MARKER, "value": str(tmp_path)}]
    script = "trap '' TERM; setsid sleep 600 & echo up; while :; do sleep 0.01; done"
    async with running_kubelet(tmp_path) as bench:
        for rank in range(2):
            bench.create(a_pod(a_container(script=script, env=env), name=f"mnist-0a1b2-1-{rank}"))
        await bench.until("both are up", lambda: bench.log("mnist-0a1b2-1-0") and bench.log("mnist-0a1b2-1-1"))
    assert marked(str(tmp_path)) == []


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU cannot be shared out")
async def test_each_pod_gets_its_share_of_the_cpus(bench: Bench) -> None:
    for rank in range(2):
        pod = a_pod(
            a_container(script="nproc"), name=f"mnist-0a1b2-1-{rank}", labels={"ddpjob.dev/node-rank": str(rank)}
        )
        await bench.run(pod)
    counts = [int(bench.log(f"mnist-0a1b2-1-{rank}")) for rank in range(2)]
    assert sum(counts) == len(os.sched_getaffinity(0))


async def test_container_has_no_stdin_and_default_signal_handlers(bench: Bench) -> None:
    script = "cat; grep -E 'Sig(Ign|Blk)' /proc/self/status"
    await bench.run(a_pod(a_container(script=script)))
    # glibc reserves 32 and 33; programs that `make` starts by posix_spawn ignore them.
    glibc = 1 << 31 | 1 << 32
    masks = [int(line.split()[1], 16) & ~glibc for line in bench.log("mnist-0a1b2-1-0").splitlines()]
    assert masks == [0, 0], "signals that are ignored or blocked"
