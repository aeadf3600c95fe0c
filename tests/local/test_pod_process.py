"""Pods as real processes: they report what a kubelet reports."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ddpjob.api.objects import Json
from ddpjob.local import LocalError
from tests.local.bench import MARKER, Bench, a_bench, marked
from tests.local.builders import POD, a_container, a_pod

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with a_bench(tmp_path) as made:
        yield made


def trainer(status: Json) -> Json:
    """Return the terminated state of the trainer."""
    state: Json = status["containerStatuses"][0]["state"]["terminated"]
    return state


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


async def test_trainer_is_ended_before_other_programs_when_memory_is_short(bench: Bench) -> None:
    status = await bench.run(a_pod(a_container(script='test "$(cat /proc/self/oom_score_adj)" -ge 500')))
    assert trainer(status)["exitCode"] == 0


# Kubernetes reads $$ in a command as one dollar: the shell gets $$, its pid.
@pytest.mark.parametrize(
    ("script", "code", "reason", "phase"),
    [
        ("exit 0", 0, "Completed", "Succeeded"),
        ("exit 3", 3, "Error", "Failed"),
        ("kill -TERM $$$$", 143, "Error", "Failed"),
        ("kill -KILL $$$$", 137, "Error", "Failed"),
        ("kill -SEGV $$$$", 139, "Error", "Failed"),
        ("for name in TERM INT HUP QUIT; do kill -$name $PPID; done; exit 3", 3, "Error", "Failed"),
    ],
)
async def test_ended_trainer_has_its_exit_code_or_signal(
    bench: Bench, script: str, code: int, reason: str, phase: str
) -> None:
    status = await bench.run(a_pod(a_container(script=script)))
    assert (status["phase"], trainer(status)["exitCode"], trainer(status)["reason"]) == (phase, code, reason)
    assert trainer(status)["startedAt"] <= trainer(status)["finishedAt"]


async def test_pod_is_pending_then_running_with_its_address(bench: Bench) -> None:
    name = bench.create(a_pod(a_container(script="sleep 600")))
    assert bench.pod(name)["status"]["phase"] == "Pending"
    await bench.until("it runs", lambda: "running" in bench.state_of(name))
    assert (bench.pod(name)["status"]["phase"], bench.pod(name)["status"]["podIP"]) == ("Running", "127.0.0.1")


@pytest.mark.parametrize(
    ("part", "code", "message"),
    [
        ({"command": ["no-such-program"]}, 127, "cannot run no-such-program: No such file or directory\n"),
        ({"command": ["/no/such/program"]}, 127, "cannot run /no/such/program: No such file or directory\n"),
        ({"command": ["/etc/passwd"]}, 126, "cannot run /etc/passwd: Permission denied\n"),
        ({"workingDir": "/no/such"}, 127, "cannot run in /no/such: No such file or directory\n"),
        ({"command": ["echo", "a\0b"]}, 126, "cannot run echo: embedded null byte\n"),
        ({"env": [{"name": "A", "value": "a\0b"}]}, 126, "cannot run sh: embedded null byte\n"),
    ],
)
async def test_program_that_cannot_start_ends_as_in_a_shell(bench: Bench, part: Json, code: int, message: str) -> None:
    container = a_container(script="true", terminationMessagePolicy="FallbackToLogsOnError") | part
    ended = trainer(await bench.run(a_pod(container)))
    assert (ended["exitCode"], ended["message"]) == (code, message)


@pytest.mark.parametrize(
    ("script", "policy", "message"),
    [
        ("printf why > /dev/termination-log; exit 1", "File", "why"),
        ("printf why > $DDPJOB_TERMINATION_LOG", "File", "why"),
        ("echo last line; exit 1", "FallbackToLogsOnError", "last line\n"),
        ("echo last line >&2; exit 1", "FallbackToLogsOnError", "last line\n"),
        ("echo last line; exit 0", "FallbackToLogsOnError", ""),
        ("echo last line; exit 1", "File", ""),
        ("echo log; printf why > /dev/termination-log; exit 1", "FallbackToLogsOnError", "why"),
    ],
)
async def test_termination_message_is_the_file_or_as_fallback_the_end_of_the_log(
    bench: Bench, script: str, policy: str, message: str
) -> None:
    container = a_container(script=script, terminationMessagePolicy=policy)
    assert trainer(await bench.run(a_pod(container)))["message"] == message


async def test_long_termination_messages_are_cut_as_by_a_kubelet(bench: Bench) -> None:
    lines = "for i in $(seq 200); do echo line $i; done; exit 1"
    ended = trainer(await bench.run(a_pod(a_container(script=lines, terminationMessagePolicy="FallbackToLogsOnError"))))
    assert ended["message"].splitlines() == [f"line {i}" for i in range(121, 201)]
    wide = "head -c 5000 /dev/zero | tr '\\0' x; exit 1"
    pod = a_pod(a_container(script=wide, terminationMessagePolicy="FallbackToLogsOnError"), name="mnist-0a1b2-2-0")
    assert trainer(await bench.run(pod))["message"] == "x" * 2048
    filed = a_pod(a_container(script=wide.replace("; exit", " >/dev/termination-log; exit")), name="mnist-0a1b2-3-0")
    assert trainer(await bench.run(filed))["message"] == "x" * 4096


@pytest.mark.parametrize("kind", ["containers", "initContainers"])
def test_other_containers_than_the_trainer_are_refused(bench: Bench, kind: str) -> None:
    other = a_container("web", "true")
    pod = a_pod(a_container(script="true"), other) if kind == "containers" else a_pod(initContainers=[other])
    with pytest.raises(LocalError, match=r"runs only the container trainer, and spec\.template has web"):
        bench.create(pod)


async def test_stopped_pod_gets_sigterm_and_is_marked_as_deleted(bench: Bench) -> None:
    name = bench.create(
        a_pod(a_container(script="trap 'echo saved; exit 75' TERM; echo up; while :; do sleep 0.01; done"))
    )
    await bench.until("it is up", lambda: bench.log(name))
    bench.stop(name)
    await bench.ended(name)
    assert bench.log(name) == "up\nsaved\n"
    assert bench.pod(name)["metadata"]["deletionGracePeriodSeconds"] == 30
    assert bench.pod(name)["metadata"]["deletionTimestamp"] > trainer(bench.pod(name)["status"])["finishedAt"]


async def test_pod_that_is_stopped_before_its_process_exists_does_not_run_on(bench: Bench) -> None:
    name = bench.create(a_pod(a_container(script="sleep 600"), terminationGracePeriodSeconds=600))
    bench.stop(name)
    await bench.ended(name)
    assert trainer(bench.pod(name)["status"])["exitCode"] == 143


@pytest.mark.parametrize("grace", [0, 1])
async def test_process_that_ignores_sigterm_is_killed_with_its_children(
    bench: Bench, tmp_path: Path, grace: int
) -> None:
    script = "trap '' TERM; setsid sleep 600 & (setsid sleep 600 &) ; echo up; while :; do sleep 0.01; done"
    env = [{"name": MARKER, "value": str(tmp_path)}]
    name = bench.create(a_pod(a_container(script=script, env=env), terminationGracePeriodSeconds=grace))
    await bench.until("it is up", lambda: bench.log(name))
    await bench.until("all its processes are there", lambda: len(marked(str(tmp_path))) >= 3)
    bench.stop(name)
    await bench.ended(name)
    assert marked(str(tmp_path)) == []
    assert trainer(bench.pod(name)["status"])["exitCode"] == 137


async def test_daemon_ends_with_the_main_process_of_its_pod(bench: Bench, tmp_path: Path) -> None:
    script = "(setsid sh -c 'sleep 600 & sleep 600' >/dev/null 2>&1 &); exit 0"
    status = await bench.run(a_pod(a_container(script=script, env=[{"name": MARKER, "value": str(tmp_path)}])))
    assert status["phase"] == "Succeeded"
    assert marked(str(tmp_path)) == []


async def test_pod_whose_shim_is_killed_is_reported_as_killed(bench: Bench, tmp_path: Path) -> None:
    env = [{"name": MARKER, "value": str(tmp_path)}]
    name = bench.create(a_pod(a_container(script="echo up; exec sleep 600", env=env)))
    await bench.until("it is up", lambda: bench.log(name))
    (main,) = marked(str(tmp_path))
    os.kill(parent_of(main), signal.SIGKILL)
    await bench.until("it has ended", lambda: "terminated" in bench.state_of(name))
    assert bench.state_of(name)["terminated"]["exitCode"] == 137
    await bench.until("its process is gone", lambda: not marked(str(tmp_path)))


async def test_orphans_are_reaped_while_the_pod_runs(bench: Bench, tmp_path: Path) -> None:
    env = [{"name": MARKER, "value": str(tmp_path)}]
    script = "for i in 1 2 3; do (true &); done; echo up; exec sleep 600"
    name = bench.create(a_pod(a_container(script=script, env=env)))
    await bench.until("it is up", lambda: bench.log(name))
    (main,) = marked(str(tmp_path))
    shim = Path(f"/proc/{parent_of(main)}/task/{parent_of(main)}/children")
    await bench.until("the main process is the only child", lambda: shim.read_text().split() == [str(main)])


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU cannot be shared out")
async def test_each_pod_gets_its_share_of_the_cpus(bench: Bench) -> None:
    for rank in range(2):
        pod = a_pod(
            a_container(script="nproc"), name=f"mnist-0a1b2-1-{rank}", labels={"ddpjob.dev/node-rank": str(rank)}
        )
        await bench.run(pod)
    counts = [int(bench.log(f"mnist-0a1b2-1-{rank}")) for rank in range(2)]
    assert sum(counts) == len(os.sched_getaffinity(0))


async def test_program_has_no_stdin_and_default_signal_handlers(bench: Bench) -> None:
    script = "cat; grep -E 'Sig(Ign|Blk)' /proc/self/status"
    await bench.run(a_pod(a_container(script=script)))
    # glibc reserves 32 and 33; programs that `make` starts by posix_spawn ignore them.
    glibc = 1 << 31 | 1 << 32
    masks = [int(line.split()[1], 16) & ~glibc for line in bench.log(POD).splitlines()]
    assert masks == [0, 0], "signals that are ignored or blocked"
