"""The parent process of one container's main process: it kills every process of the container when that ends.

Run as ``python -I -S shim.py``. Standard input is a pipe from the run: first one line of JSON with the program to
start, then one byte for each signal to send to the main process. The shim ends with the exit code of the main process:
128 + n for signal n, and as in a shell 127 or 126 for a command that does not exist or cannot be executed.

A process group is not enough: torchrun and the trainer start their workers in new groups and sessions, and a daemon
detaches from its parents. The shim is therefore a *subreaper*: orphans below it become its children, and at the end it
kills children until it has none. It does so when the main process ends, as the kernel does for a container, and when
the pipe closes, because the run closed it or ended. (PR_SET_PDEATHSIG would fire when the run's *thread* ends, and
leaves no time to clean up; here it only kills the main process if the shim itself is killed.)

Imports little of the standard library, because every container waits for these imports.
"""

import _thread
import ctypes
import json
import os
import signal
import sys
from typing import Any, NoReturn

_OOM_SCORE = 500
"""Of 1,000; a session of a desktop has 0 to 200."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_KEPT = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_libc = ctypes.CDLL(None, use_errno=True)


def main() -> int:
    """Run the program. Return its exit code when no process of the container is left."""
    # Only the run stops a container: the main process handles signals to all processes (shutdown, `kill 0`).
    for number in _KEPT:
        signal.signal(number, signal.SIG_IGN)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        return 128 + signal.SIGKILL  # the run ended before it sent a program
    shim = os.getpid()
    # The child begins with these signals ignored. Blocked, a signal that the run sends at once waits until it is ready.
    signal.pthread_sigmask(signal.SIG_BLOCK, _KEPT)
    child = os.fork()
    if child == 0:
        _become(json.loads(line), shim)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _KEPT)
    _thread.start_new_thread(_obey, (os.pidfd_open(child),))
    status = _reap(child)
    _kill_children()
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def die_with_parent() -> None:
    """Let the kernel kill this process with SIGKILL when its parent dies. Called between fork and exec.

    It calls the C library, which is loaded before: a forked child must not take the loader's lock.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _die_first() -> None:
    """Let the kernel end this process, before others of the machine, when memory is short, as a pod is ended."""
    try:
        file = os.open("/proc/self/oom_score_adj", os.O_RDWR)
        if int(os.read(file, 16)) < _OOM_SCORE:
            os.pwrite(file, b"%d" % _OOM_SCORE, 0)
        os.close(file)
    except OSError:  # not on Linux, or /proc is read-only
        return


def _become(program: dict[str, Any], shim: int) -> NoReturn:
    """Run the program in the child process; write an error into the log. Never returns."""
    command, code, what = program["command"], 126, "the program"
    try:
        os.setsid()
        die_with_parent()
        if os.getppid() != shim:
            os._exit(128 + signal.SIGKILL)
        # Python and the shim ignore some signals; a program must start with default handlers, as from a shell.
        for number in (*_KEPT, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _KEPT)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if program["cpus"]:
            os.sched_setaffinity(0, program["cpus"])
        _die_first()
        what = f"in {program['directory']}"
        os.chdir(program["directory"])
        what = command[0]
        os.execvpe(command[0], command, program["environment"])  # noqa: S606 - searches the container's own PATH
    except (OSError, ValueError) as error:  # ValueError: a text with a NUL
        code = 127 if isinstance(error, FileNotFoundError) else 126
        why = os.strerror(error.errno or 0) if isinstance(error, OSError) else error
        os.write(2, f"cannot run {what}: {why}\n".encode())
    finally:
        os._exit(code)


def _obey(child: int) -> None:
    """Send the signals that the run requests to the main process, a pidfd; SIGKILL when the pipe closes."""
    while True:
        asked = sys.stdin.buffer.read(1)
        try:
            signal.pidfd_send_signal(child, asked[0] if asked else signal.SIGKILL)
        except ProcessLookupError:
            return  # it has ended
        if not asked:
            return


def _reap(child: int) -> int:
    """Reap ended children, orphans among them, up to the main process. Return its wait status."""
    while True:
        pid, status = os.wait()
        if pid == child:
            return status


def _kill_children() -> None:
    """Kill children until there is none: those of a killed process become children of this one."""
    while True:
        for pid in _children(os.getpid()):
            os.kill(pid, signal.SIGKILL)  # it cannot have been reaped, so the pid is still its own
        try:
            os.wait()
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return


def _children(parent: int) -> list[int]:
    found = []
    for name in os.listdir("/proc"):  # noqa: PTH208 - pathlib is slow to import
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123
                stat = file.read()
        except OSError:
            continue  # the process has ended
        # The program's name, in brackets, may contain any character.
        if int(stat.rpartition(b")")[2].split()[1]) == parent:
            found.append(int(name))
    return found


if __name__ == "__main__":
    os._exit(main())  # the end of the interpreter would wait for the thread that reads from the pipe
