"""Start and stop the Docker engine that the tests use where none runs: Debian's dockerd with separate state.

Used by docker.py. A killed run may leave stale pid files or a half-written state; start() handles both, and deletes the
state if the engine does not start with it (the state is a cache).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.kind.cache import cache_dir, discard
from tests.kind.command import CommandError, step, wait_until
from tests.kind.toolchain import binary

# Not in the cache folder: a socket's path is limited to 107 bytes, and this state must not survive a reboot.
RUN_DIR = Path("/run/ddpjob-docker")
SOCKET = RUN_DIR / "docker.sock"

_PID_FILE = RUN_DIR / "docker.pid"
_EXEC_ROOT = RUN_DIR / "exec"
_CONTAINERD_PID_FILE = _EXEC_ROOT / "containerd" / "containerd.pid"
_START_SECONDS = 90.0
_STOP_SECONDS = 60.0
_CAP_SYS_RESOURCE = 24  # linux/capability.h
# Linux gives a control group the CPU time of one process (1024), and all containers are in one group: beside four busy
# test processes five nodes with all their pods would get a fifth. Of control groups v1 and v2, whose default is 100.
_CPU_WEIGHTS = {Path("/sys/fs/cgroup/cpu/docker/cpu.shares"): 16384, Path("/sys/fs/cgroup/docker/cpu.weight"): 1600}

# 198.18.0.0/15 is reserved for benchmarks between networks (RFC 2544): no private network of the machine uses it.
_ADDRESS_POOL = {"base": "198.18.16.0/20", "size": 24}


def log_file() -> Path:
    """Return the engine's log file."""
    return cache_dir() / "docker.log"


def data_root() -> Path:
    """Return the engine's folder of images and containers."""
    return cache_dir() / "docker"


def lacks_sys_resource() -> bool:
    """Return whether root lacks CAP_SYS_RESOURCE here, according to /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapBnd:"):
            return not int(line.split()[1], 16) >> _CAP_SYS_RESOURCE & 1
    return False


def configuration(*, runc_reduced: Path | None) -> dict[str, object]:
    """Return dockerd's configuration. ``runc_reduced``: the runtime to start containers with (go/node/runc-reduced)."""
    settings: dict[str, object] = {
        "hosts": [f"unix://{SOCKET}"],
        "data-root": str(data_root()),
        "exec-root": str(_EXEC_ROOT),
        "pidfile": str(_PID_FILE),
        # dockerd shares a system-wide containerd: use namespaces that an installed Docker does not use.
        "containerd-namespace": "ddpjob",
        "containerd-plugins-namespace": "ddpjob-plugins",
        "default-address-pools": [_ADDRESS_POOL],
        "log-level": "warn",
    }
    if runc_reduced is not None:
        settings["runtimes"] = {"reduced": {"path": str(runc_reduced)}}
        settings["default-runtime"] = "reduced"
    return settings


def start(answers: Callable[[], bool]) -> None:
    """Start dockerd in a new session and wait until ``answers``. Raises CommandError with the end of its log."""
    reduced = binary("runc-reduced") if lacks_sys_resource() else None
    config = cache_dir() / "dockerd.json"
    config.write_text(json.dumps(configuration(runc_reduced=reduced), indent=1))
    with step("starting a Docker engine"):
        _end_unresponsive(answers)
        if answers():
            return
        _enable_forwarding()
        _give_cpu_time()
        had_state = data_root().exists()
        try:
            _start_once(config, answers)
        except CommandError:
            if not had_state:
                raise
            stop()
            discard(data_root())
            _start_once(config, answers)


def _start_once(config: Path, answers: Callable[[], bool]) -> None:
    RUN_DIR.mkdir(mode=0o700, parents=True, exist_ok=True)
    _remove_stale_pid_files()
    with log_file().open("w") as log:
        process = subprocess.Popen(
            ["dockerd", "--config-file", str(config)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",
        )

    def answers_or_died() -> bool:
        return process.poll() is not None or answers()

    try:
        wait_until("the Docker engine answers", answers_or_died, timeout=_START_SECONDS, interval=0.2)
        if process.poll() is not None:
            raise CommandError(f"dockerd exited with code {process.returncode}")
    except CommandError as error:
        tail = "\n".join(log_file().read_text(errors="replace").splitlines()[-15:])
        raise CommandError(
            f"The Docker engine could not be started ({error}). Its log, {log_file()}, ends with:\n{tail}"
        ) from error


def stop() -> bool:
    """Stop the engine that start() started, with its containers. Return False if it does not run."""
    pid = _our_pid(_PID_FILE, "dockerd", "dockerd.json")
    if pid is None:
        return False
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + _STOP_SECONDS
    while _our_pid(_PID_FILE, "dockerd", "") == pid:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            break
        time.sleep(0.2)
    return True


def _end_unresponsive(answers: Callable[[], bool]) -> None:
    if _our_pid(_PID_FILE, "dockerd", "") is None:
        return
    try:
        wait_until("a Docker engine that is already starting answers", answers, timeout=30)
    except CommandError:
        stop()


def _remove_stale_pid_files() -> None:
    # If a pid file names any live process, dockerd refuses to start or waits for a containerd that does not exist.
    if _our_pid(_PID_FILE, "dockerd", "") is None:
        _PID_FILE.unlink(missing_ok=True)
    if _our_pid(_CONTAINERD_PID_FILE, "containerd", str(_EXEC_ROOT)) is None:
        _CONTAINERD_PID_FILE.unlink(missing_ok=True)


def _our_pid(pid_file: Path, program: str, argument: str) -> int | None:
    """Return the pid in a file if it is a live process of that program with ``argument`` in its command line."""
    try:
        pid = int(pid_file.read_text())
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except (OSError, ValueError):
        return None
    is_program = Path(words[0]).name == program
    return pid if is_program and any(argument in word for word in words) else None


def _enable_forwarding() -> None:
    switch = Path("/proc/sys/net/ipv4/ip_forward")
    if switch.read_text().strip() != "1":
        try:
            switch.write_text("1")
        except OSError as error:
            raise CommandError(f"containers need IPv4 forwarding, but {switch} cannot be set: {error}") from error


def _give_cpu_time() -> None:
    """Give the containers as much CPU time as some processes. They work without it, but slowly on a busy machine."""
    for file, weight in _CPU_WEIGHTS.items():
        with suppress(OSError):
            if file.parents[1].joinpath("cgroup.procs").exists():
                file.parent.mkdir(exist_ok=True)
                file.write_text(str(weight))
