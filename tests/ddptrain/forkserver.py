"""A server that imports torch once and forks ``ddptrain`` commands as real processes.

Like the launcher it runs no tensor operation and no thread, so that a forked process behaves like a new
interpreter. Protocol: one JSON line in, the arguments of ``ForkServer.start``; one line out, the pid; the exit code
goes to ``<log>.code``.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

from ddptrain.cli import main
from ddptrain.config import Config
from ddptrain.program import TrainerProgram


def serve() -> None:
    """Fork a command for each line of stdin until it closes; then kill the commands that still run."""
    TrainerProgram(Config(sync="ddp")).preload()
    gc.freeze()  # a collection in a command would copy the pages of all modules: some 0.2 s of CPU in each process
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
            for name in request["preload"]:  # once for all commands that need it
                importlib.import_module(name)
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


def _become(request: dict[str, Any]) -> NoReturn:
    code: object = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        _open_streams([os.devnull, *(request["streams"] or [request["log"]] * 2)])
        os.environ.clear()
        os.environ.update(request["env"])
        exec(request["first"], {})  # noqa: S102
        if request["mutant"]:
            from tests.ddptrain.mutants import MUTANTS  # noqa: PLC0415 - imports torch, after preload

            for name in request["mutant"].split(","):
                MUTANTS[name]()
        if request["module"]:
            sys.argv = [request["module"], *request["argv"]]
            is_script = request["module"].endswith(".py")
            (runpy.run_path if is_script else _run_module)(request["module"], run_name="__main__")
            code = 0
        else:
            code = main(request["argv"])
    except SystemExit as leaving:
        code = leaving.code
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                code = 120  # as the interpreter at its end
        os._exit(code if isinstance(code, int) else 1)


def _run_module(name: str, run_name: str) -> None:
    runpy.run_module(name, run_name=run_name, alter_sys=True)


def _open_streams(paths: list[str | None]) -> None:
    """Open stdin, stdout and stderr; close those without a path."""
    opened = [
        None if path is None else os.open(path, mode | os.O_CREAT | os.O_APPEND | os.O_NOCTTY, 0o644)
        for path, mode in zip(paths, (os.O_RDONLY, os.O_WRONLY, os.O_WRONLY), strict=True)
    ]
    for target, source in enumerate(opened):
        if source is None:
            os.close(target)
        else:
            os.dup2(source, target)
    for source in opened:
        if source is not None:
            os.close(source)


if __name__ == "__main__":
    serve()
    os._exit(0)  # finalizing an interpreter with torch takes seconds
