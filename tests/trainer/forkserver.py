"""A server that imports torch once and forks ``ddptrain`` commands as real processes.

Like the launcher it runs no tensor operation and no thread, so that a forked process behaves like a new
interpreter. Protocol: one JSON line in, {"argv", "env", "log", "mutant"}; one line out, the pid; the exit code goes to
``<log>.code``.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from ddptrain.cli import main
from ddptrain.launcher.launcher import preload


def serve() -> None:
    """Fork a command for each line of stdin until it closes; then kill the commands that still run."""
    preload(ddp=True)
    wakeup, wakeup_write = os.pipe()
    for end in (wakeup, wakeup_write):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wakeup_write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: dict[int, str] = {}
    stdin = sys.stdin.buffer
    print("ready", flush=True)
    while True:
        ready, _, _ = select.select([stdin, wakeup], [], [])
        if wakeup in ready:
            os.read(wakeup, 4096)
            _reap(running)
        if stdin in ready:
            line = stdin.readline()
            if not line:
                break
            request = json.loads(line)
            pid = os.fork()
            if pid == 0:
                _become(request)
            running[pid] = request["log"]
            print(pid, flush=True)
    for pid in running:
        os.kill(pid, signal.SIGKILL)


def _reap(running: dict[int, str]) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        code = Path(running.pop(pid) + ".code")
        code.with_suffix(".tmp").write_text(str(os.waitstatus_to_exitcode(status)))
        code.with_suffix(".tmp").replace(code)


def _become(request: dict[str, object]) -> NoReturn:
    code: object = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        log = os.open(str(request["log"]), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for target, source in ((0, nothing), (1, log), (2, log)):
            os.dup2(source, target)
        os.environ.clear()
        os.environ.update(request["env"])  # type: ignore[call-overload]
        if request["mutant"]:
            from tests.trainer.mutants import MUTANTS  # noqa: PLC0415 - imports torch, which preload must do first

            MUTANTS[str(request["mutant"])]()
        code = main(request["argv"])  # type: ignore[arg-type]
    except SystemExit as leaving:
        code = leaving.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


if __name__ == "__main__":
    serve()
    os._exit(0)  # finalizing an interpreter with torch takes seconds
