"""The parent of one container's main process: a program of its own, so that nothing of a container outlives the run.

Run as ``python -I -S shim.py FD``; FD is one end of a socket pair, the other is the run's. First comes one line of
JSON that says what to start, then ``{"signal": n}`` or ``{"kill": true}``; back go ``{"started": true}`` or
``{"refused": {...}}``, and in the end ``{"status": wait status, "ended": Unix time}``.

A process group is not enough: torchrun and the trainer give their workers groups and sessions of their own, and a
daemon leaves its parents altogether. So the shim is a *subreaper*, who becomes the parent of every orphan below it,
and in the end kills descendants until it has no child left; then nobody is left at all. It does so when the main
process ends, as the kernel does with a container, when it is told to, and when the socket ends: that is how it learns
that the run is gone, whatever killed it. (The kernel's PR_SET_PDEATHSIG would fire when the run's *thread* ends, and
leaves no time to tidy up; it guards the main process against the death of the shim itself.)

Standard library alone, and few modules of it: every container waits for these imports.
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
    # Only the run ends a container: a signal for everybody (shutdown, `kill 0`) is the main process's to answer.
    for number in _KEPT:
        signal.signal(number, signal.SIG_IGN)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    commands = _Lines(link)
    program = commands.wait()
    if program is None:
        return  # the run died before it said a word
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
        """The next one, or None when the run is gone."""
        while b"\n" not in self._buffer:
            if not self.receive():
                return None
        return self.take()[0]

    def receive(self) -> bool:
        """Read what is there; False at the end."""
        try:
            data = self._link.recv(65536)
        except ConnectionError:
            return False
        self._buffer += data
        return bool(data)

    def take(self) -> list[dict[str, Any]]:
        """The complete lines that were received."""
        *lines, self._buffer = self._buffer.split(b"\n")
        return [json.loads(line) for line in lines]


def _say(link: socket.socket, what: dict[str, Any]) -> None:
    try:  # noqa: SIM105 - contextlib takes its time to import
        link.sendall(json.dumps(what).encode() + b"\n")
    except OSError:
        pass  # the run is gone; there is nobody to tell


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _wakeup_on_child() -> int:
    """A descriptor that becomes readable when a child has ended."""
    read, write = os.pipe()
    for descriptor in (read, write):
        os.set_blocking(descriptor, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    return read


def _start(program: dict[str, Any]) -> tuple[int, dict[str, Any] | None]:
    """Fork and exec; the child's pid, and why it could not become the program."""
    read, write = os.pipe()  # closed by a successful exec
    shim = os.getpid()
    child = os.fork()
    if child == 0:
        os.close(read)
        _become(program, shim, write)
    os.close(write)
    with os.fdopen(read, "rb") as reader:
        words = reader.read()
    if not words:
        return child, None
    os.waitpid(child, 0)
    refusal: dict[str, Any] = json.loads(words)
    return 0, refusal


def _become(program: dict[str, Any], shim: int, report: int) -> NoReturn:
    """In the child. Never returns: what goes wrong goes into the pipe."""
    step = "start"
    try:
        os.setsid()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != shim:
            os._exit(128 + signal.SIGKILL)
        # Python ignores some signals and the shim more; a program must find them as a shell would leave them.
        signal.set_wakeup_fd(-1)
        for number in (*_KEPT, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        if program["cpus"]:
            os.sched_setaffinity(0, program["cpus"])
        step = "chdir"
        os.chdir(program["directory"])
        step = "exec"
        _exec(program["words"], program["environment"])
    except BaseException as error:
        code = getattr(error, "errno", None)
        refusal = {"step": step, "errno": code, "error": os.strerror(code) if code else repr(error)}
        os.write(report, json.dumps(refusal).encode())
    finally:
        os._exit(128)


def _exec(words: list[str], environment: dict[str, str]) -> NoReturn:
    """As runc does it: through the container's own PATH, in which only executable files count."""
    if "/" in words[0]:
        os.execve(words[0], words, environment)  # noqa: S606
    for folder in environment.get("PATH", os.defpath).split(":"):
        path = os.path.join(folder or ".", words[0])  # noqa: PTH118 - pathlib takes its time to import
        if os.path.isfile(path) and os.access(path, os.X_OK):  # noqa: PTH113
            os.execve(path, words, environment)  # noqa: S606
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))


def _supervise(child: int, commands: _Lines, link: socket.socket, wakeup: int) -> int:
    """Obey the run and bury orphans until the main process has ended; its wait status."""
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
    """Collect whoever ended; the wait status of the main process if it did, and nobody after it."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == child:
            return status
        if pid == 0:
            return None


def _kill_descendants() -> None:
    """Until there is no child. Whoever is born between look and blow has a parent that died of it, and becomes ours."""
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
            continue  # it ended meanwhile
        parent = int(stat.rpartition(b")")[2].split()[1])  # the program's name, in brackets, may hold anything
        children.setdefault(parent, []).append(int(name))
    found, todo = [], [root]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


if __name__ == "__main__":
    main()
