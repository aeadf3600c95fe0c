"""The parent process of one container's main process: it kills every process of the container when that ends.

Run as ``python -I -S shim.py FD``; FD is one end of a socket pair, the run has the other. The run sends one line of
JSON with the program to start, then ``{"signal": n}`` or ``{"kill": true}``. The shim answers ``{"started": true}`` or
``{"refused": {...}}``, and at the end ``{"status": wait status, "ended": Unix time}``.

A process group is not enough: torchrun and the trainer start their workers in new groups and sessions, and a daemon
detaches from its parents. The shim is therefore a *subreaper*: orphans below it become its children, and at the end it
kills descendants until it has no child. It does so when the main process ends, as the kernel does for a container, on
``kill``, and when the socket closes because the run ended. (PR_SET_PDEATHSIG would fire when the run's *thread* ends,
and leaves no time to clean up; here it only kills the main process if the shim itself is killed.)

Imports little of the standard library, because every container waits for these imports.
"""

import ctypes
import errno
import json
import os
import select
import signal
import socket
import sys
import time
from typing import Any, NoReturn

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_KEPT = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    link = socket.socket(fileno=int(sys.argv[1]))
    link.set_inheritable(False)
    # Only the run stops a container: the main process handles signals to all processes (shutdown, `kill 0`).
    for number in _KEPT:
        signal.signal(number, signal.SIG_IGN)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    commands = _Lines(link)
    program = commands.wait()
    if program is None:
        return  # the run ended before it sent a program
    wakeup = _wakeup_on_child()
    child, refusal = _start(program)
    if refusal is not None:
        _say(link, {"refused": refusal})
        return
    _say(link, {"started": True})
    status = _supervise(child, commands, link, wakeup)
    ended = time.time()
    _kill_descendants()
    _say(link, {"status": status, "ended": ended})


class _Lines:
    """JSON lines from the run."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._buffer = b""

    def wait(self) -> dict[str, Any] | None:
        """Return the next line, or None if the run has ended."""
        while b"\n" not in self._buffer:
            if not self.receive():
                return None
        return self.take()[0]

    def receive(self) -> bool:
        """Read available data; return False at the end of the stream."""
        try:
            data = self._link.recv(65536)
        except ConnectionError:
            return False
        self._buffer += data
        return bool(data)

    def take(self) -> list[dict[str, Any]]:
        """Return the complete lines that were received."""
        *lines, self._buffer = self._buffer.split(b"\n")
        return [json.loads(line) for line in lines]


def _say(link: socket.socket, what: dict[str, Any]) -> None:
    try:  # noqa: SIM105 - contextlib is slow to import
        link.sendall(json.dumps(what).encode() + b"\n")
    except OSError:
        pass  # the run has ended


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def die_with_parent() -> None:
    """Let the kernel kill this process with SIGKILL when its parent dies. Called between fork and exec.

    It calls the C library, which is loaded before: a forked child must not take the loader's lock.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _wakeup_on_child() -> int:
    """Return a descriptor that becomes readable when a child has ended."""
    read, write = os.pipe()
    for descriptor in (read, write):
        os.set_blocking(descriptor, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    return read


def _start(program: dict[str, Any]) -> tuple[int, dict[str, Any] | None]:
    """Fork and exec. Return the child's pid, and the error if the program could not be started."""
    read, write = os.pipe()  # closed by a successful exec
    shim = os.getpid()
    child = os.fork()
    if child == 0:
        os.close(read)
        _become(program, shim, write)
    os.close(write)
    with os.fdopen(read, "rb") as reader:
        error = reader.read()
    if not error:
        return child, None
    os.waitpid(child, 0)
    refusal: dict[str, Any] = json.loads(error)
    return 0, refusal


def _become(program: dict[str, Any], shim: int, report: int) -> NoReturn:
    """Run the program in the child process; write an error into the pipe. Never returns."""
    step = "start"
    try:
        os.setsid()
        die_with_parent()
        if os.getppid() != shim:
            os._exit(128 + signal.SIGKILL)
        # Python and the shim ignore some signals; a program must start with default handlers, as from a shell.
        signal.set_wakeup_fd(-1)
        for number in (*_KEPT, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        if program["cpus"]:
            os.sched_setaffinity(0, program["cpus"])
        step = "chdir"
        os.chdir(program["directory"])
        step = "exec"
        _exec(program["command"], program["environment"])
    except BaseException as error:
        code = getattr(error, "errno", None)
        refusal = {"step": step, "errno": code, "error": os.strerror(code) if code else repr(error)}
        os.write(report, json.dumps(refusal).encode())
    finally:
        os._exit(128)


def _exec(command: list[str], environment: dict[str, str]) -> NoReturn:
    """Replace this process as runc does: search the container's own PATH for an executable file."""
    if "/" in command[0]:
        os.execve(command[0], command, environment)  # noqa: S606
    for folder in environment.get("PATH", os.defpath).split(":"):
        path = os.path.join(folder or ".", command[0])  # noqa: PTH118 - pathlib is slow to import
        if os.path.isfile(path) and os.access(path, os.X_OK):  # noqa: PTH113
            os.execve(path, command, environment)  # noqa: S606
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))


def _supervise(child: int, commands: _Lines, link: socket.socket, wakeup: int) -> int:
    """Carry out the run's commands and reap orphans until the main process ends. Return its wait status."""
    poll = select.poll()
    for descriptor in (link.fileno(), wakeup):
        poll.register(descriptor, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == wakeup:
                os.read(wakeup, 4096)
            elif not commands.receive():
                os.kill(child, signal.SIGKILL)
                poll.unregister(link.fileno())
        for command in commands.take():
            if command.get("kill"):
                os.kill(child, signal.SIGKILL)
            elif number := command.get("signal"):
                os.kill(child, number)
        status = _reap(child)
        if status is not None:
            return status


def _reap(child: int) -> int | None:
    """Reap ended children up to the main process. Return its wait status, or None if it still runs."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == child:
            return status
        if pid == 0:
            return None


def _kill_descendants() -> None:
    """Kill descendants until there is no child.

    A child forked during the scan is reparented to this process and killed on the next pass.
    """
    while True:
        for pid in _descendants(os.getpid()):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            os.waitpid(-1, 0)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return


def _descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123
                stat = file.read()
        except OSError:
            continue  # the process has ended
        parent = int(stat.rpartition(b")")[2].split()[1])  # the program's name, in brackets, may contain any character
        children.setdefault(parent, []).append(int(name))
    found, todo = [], [root]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


if __name__ == "__main__":
    main()
