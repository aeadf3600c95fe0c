"""A user's program as the launcher runs it: a script, a module, or any executable. Not a line of it has to change.

A script runs in the rank's own process, as its ``__main__``. So its exception, with file and line, is in the report,
and each step of an optimizer is a heartbeat. ``ddprun.report`` and ``ddprun.should_stop`` are optional.
"""

import atexit
import builtins
import contextlib
import errno
import gc
import importlib.machinery
import inspect
import math
import os
import pkgutil
import platform
import random
import re
import runpy
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Literal, NoReturn

from ddprun import fault_injection, script_interface
from ddprun.code_frames import is_of_program
from ddprun.diagnostics import dump_on_request, dump_stacks_on_signal
from ddprun.errors import PeerLost, Stopped, TrainerError, UsageError, classify
from ddprun.files import dumps_json
from ddprun.heartbeat import RETURNED
from ddprun.preload import import_before_fork, is_path_safe
from ddprun.program import RankProcess
from ddprun.raised import handled_by
from ddprun.reporting import termination
from ddprun.reporting.console import unbuffer_output
from ddprun.reporting.termination import Report
from ddprun.settings import Settings
from ddprun.signals import STOP_SIGNALS, name_process, stop_signals
from ddprun.started_processes import after_import, connect, kept_groups

# Libraries read these when they are imported, so a script that sets them must import torch itself.
_SET_BEFORE_IMPORT = re.compile(
    rb"""environ(?:\[|\.setdefault\()\s*['"]((?:OMP|MKL|KMP|GOMP|OPENBLAS|TORCH|PYTORCH)_\w*)['"](?:\s*\]\s*=(?!=)|\s*,)"""
)
Kind = Literal["script", "module", "executable"]


@dataclass(frozen=True)
class Script:
    """The program whose ranks run what the user named.

    Attributes:
        kind: ``target`` is the path of a script, the name of a module, or an executable that is not Python.
        preloaded: the modules to import before the fork; none for a single rank, which imports them itself as early.
    """

    kind: Kind
    target: str
    arguments: tuple[str, ...]
    settings: Settings
    preloaded: tuple[str, ...] = ("torch",)

    sends_an_ending = False  # always, that is: an executable cannot, and a script may call os._exit

    @property
    def shares_progress(self) -> bool:
        """Whether the ranks keep their progress for the launcher; an executable may serve it itself."""
        return self.kind != "executable"

    def preload(self) -> str:
        """Import ``preloaded``. Returns why the ranks must not be forked; empty if they may."""
        if self.kind == "executable" or not self.preloaded:
            return ""
        if name := self._set_before_import():
            return f"{self.target} sets variables that torch reads when it is imported ({name})"
        reason = import_before_fork(self.preloaded, self.first_folders())
        gc.freeze()  # a collection in a rank would copy the pages of all modules
        return reason

    def first_folders(self) -> list[str]:
        """Return where Python looks first for modules; nothing with -P, -I and PYTHONSAFEPATH."""
        if is_path_safe():
            return []
        return [str(Path.cwd() if self.kind == "module" else Path(self.target).resolve().parent)]

    def _set_before_import(self) -> str:
        """Return a variable that the program sets and torch reads when it is imported; empty if there is none."""
        file = Path(self.target) if self.kind == "script" else _file_of_module(self.target)
        found = None
        if file is not None:
            with contextlib.suppress(OSError):
                found = _SET_BEFORE_IMPORT.search(file.read_bytes())
        return found[1].decode() if found else ""

    def run(self, rank: RankProcess) -> int:
        """Run the program on one rank and return its exit code."""
        _restore_process()
        unbuffer_output()
        os.environ |= torchrun_environment(rank, os.environ)
        if self.kind == "executable":
            _become([self.target, *self.arguments])
        dump_stacks_on_signal(rank.diagnostics)
        return _Run(self, rank).run()


def _become(command: list[str]) -> NoReturn:
    """Run the command in place of this process.

    Raises:
        UsageError: it cannot be started.
    """
    try:
        os.execvp(command[0], command)  # noqa: S606 - what the user asks for
    except OSError as error:
        hint, next_step = _advice(command[0], error.errno)
        raise UsageError(f"cannot start {command[0]}: {error.strerror}", hint=hint, next_step=next_step) from None


def _advice(program: str, number: int | None) -> tuple[str, str]:
    """Return why the kernel does not start the program, and what to do; the first is empty if it is not known."""
    path, head = Path(shutil.which(program, mode=os.F_OK) or program), b""
    with contextlib.suppress(OSError), path.open("rb") as file:
        head = file.read(4096).partition(b"\n")[0]
    if number == errno.ENOEXEC and head.startswith(b"\x7fELF"):
        here = platform.machine()
        return f"it is built for another processor than {here}", f"use a build for {here}"
    if number == errno.ENOEXEC:
        return (
            "its first line names no interpreter",
            f"begin it with #!/bin/sh, or start it by --no-python sh {program}",
        )
    if number == errno.ENOENT and head.startswith(b"#!"):
        interpreter = head[2:].decode(errors="replace")
        return f"its first line names an interpreter that does not exist: {interpreter!r}", "correct the first line"
    if number == errno.EACCES and head:
        return "it is not executable", f"chmod +x {path}"
    return "", "name a file or a program on PATH"


class _Run:
    """One run of a script or module in this process."""

    def __init__(self, script: Script, rank: RankProcess) -> None:
        self._script, self._ranks = script, rank.ranks
        self._reports, self._pipe, self._process = rank.reports, os.fstat(rank.reports).st_ino, os.getpid()
        # A script has no phases but its steps, and all that ddprun sees of a step is its end.
        self._fault = fault_injection.planned(script.settings, rank.ranks.rank, os.environ, phase="train")
        self._heartbeat, self._progress = connect(
            rank.diagnostics, rank.ranks.world_size, script.settings, on_mark=self._fault
        )
        self._heartbeat.mark("start", limit=math.inf)  # nothing is known about a script before its first step
        after_import("torch.optim.optimizer", lambda _: dump_on_request(rank.diagnostics))

    def run(self) -> int:
        """Run it, and all that an interpreter does at its end, and send the ending. Never raises.

        A failure is sent at once: the interpreter's end waits for threads, perhaps without end. A success is sent when
        the threads have ended, and before the exit handlers: a library that crashes there has trained before.
        """
        ending = self._failure_of_call()
        is_rank = os.getpid() == self._process  # else a fork of the script's own, which does not speak for the rank
        if ending and is_rank:
            self._send(ending)
        _end_of_interpreter(threading._shutdown)  # type: ignore[attr-defined]
        if is_rank and not ending and not script_interface.stop_was_asked() and not _awaited_processes():
            ending = self._success()
            self._send(ending)
        _end_of_interpreter(atexit._run_exitfuncs)  # a checkpoint that a handler saves after a stop counts
        _end_of_interpreter(kept_groups.clear)
        if not is_rank:
            return 0 if ending is None else ending["code"] if ending["kind"] == "SystemExit" else 1
        return ending["code"] if ending else self._send(self._success())

    def _failure_of_call(self) -> Report | None:
        try:
            self._call()
            if os.getpid() != self._process:
                return None
            script_interface.report_counted()
            was_stopped = script_interface.stop_was_asked()
            if not _awaited_processes():
                self._heartbeat.mark("stop" if was_stopped else RETURNED, limit=math.inf)
            if not was_stopped:
                fault_injection.check_occurred(self._fault)
        except BaseException as error:
            return self._failure(error)
        return None

    def _success(self) -> Report:
        if script_interface.stop_was_asked():
            saved = script_interface.saved_after_stop()
            stopped = Stopped("stopped by a signal" + ("" if saved else ", unsaved"), saved=saved)
            return termination.failure(stopped, rank=self._ranks.rank, progress=self._place())
        message = f"{self._script.target} finished"
        return termination.done(message, rank=self._ranks.rank, progress=self._progress.snapshot())

    def _send(self, ending: Report) -> int:
        with contextlib.suppress(OSError):
            if os.fstat(self._reports).st_ino == self._pipe:  # the script has not closed all descriptors
                with os.fdopen(self._reports, "wb") as pipe:
                    pipe.write(dumps_json(ending).encode())
        return int(ending["code"])

    def _call(self) -> None:
        script = self._script
        sys.argv = [script.target, *script.arguments]
        sys.orig_argv = [sys.executable, "-u", *(["-m"] if script.kind == "module" else ()), *sys.argv]
        sys.path[:0] = script.first_folders()
        try:
            if script.kind == "module":
                _run_module(script.target)
            else:
                _run_file(Path(script.target).absolute())
        except SystemExit as leaving:
            if leaving.code not in (None, 0):
                raise

    def _failure(self, error: BaseException) -> Report:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a DataLoader's handler raises, also in what follows
        if isinstance(error, SystemExit):
            return self._exit_report(error)
        if isinstance(error, KeyboardInterrupt):
            error = Stopped("stopped by SIGINT", saved=False)
        error.__traceback__ = _of_program(error.__traceback__)
        with contextlib.suppress(Exception):  # stderr is closed
            _show(error)
        return termination.failure(error, rank=self._ranks.rank, progress=self._place())

    def _exit_report(self, leaving: SystemExit) -> termination.Report:
        """Return the report of ``sys.exit`` with a number that is not 0, or with a text.

        If the script called it in the handler of an exception, that exception is the cause.
        """
        number = leaving.code if isinstance(leaving.code, int) else 1
        if not isinstance(leaving.code, int):
            print(leaving.code, file=sys.stderr, flush=True)
        leaving.__traceback__ = _of_program(leaving.__traceback__)
        message = f"rank {self._ranks.rank} called sys.exit({leaving.code!r})"
        error = handled_by(leaving)
        report = termination.failure(
            error or leaving, rank=self._ranks.rank, progress=self._place(), within=error and leaving
        )
        if error:
            message = f"{report['message']}; {message}"
            report["next"] = report["next"] or "see what the script printed when it handled this exception"
        else:
            del report["traceback"]
        return report | {"code": number & 0xFF or 1, "message": message}

    def _place(self) -> dict[str, Any]:
        last = self._heartbeat.last
        place = {"step": last.step, "exact": script_interface.step_is_exact(), "phase": last.collective or last.phase}
        return self._progress.snapshot() | place


def torchrun_environment(rank: RankProcess, env: Any) -> dict[str, str]:
    """Return the variables of torchrun's workers; libraries recognise a launcher by them."""
    ranks = rank.ranks
    return ranks.environment() | {
        "ROLE_RANK": str(ranks.rank), "ROLE_WORLD_SIZE": str(ranks.world_size), "ROLE_NAME": "default",
        "TORCHELASTIC_RUN_ID": env.get("TORCHELASTIC_RUN_ID") or "none",
        "TORCHELASTIC_MAX_RESTARTS": env.get("TORCHELASTIC_MAX_RESTARTS") or "0",
        "TORCHELASTIC_RESTART_COUNT": env.get("TORCHELASTIC_RESTART_COUNT") or "0",
        "TORCHELASTIC_USE_AGENT_STORE": "False",  # rank 0 opens MASTER_PORT
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": env.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") or "1",
    }  # fmt: skip


def _restore_process() -> None:
    """Give the process what a new interpreter has, and a fork of the launcher has not."""
    name_process(Path(sys.executable).name)
    for number in stop_signals():  # not SIGHUP under nohup
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    if processes := sys.modules.get("multiprocessing.process"):
        processes._children.clear()  # of the launcher: this process cannot join them at its end
        processes.current_process().authkey = os.urandom(32)
    # Each rank draws its own random numbers, as if it had seeded the generators when it imported them.
    random.seed()
    if torch := sys.modules.get("torch"):
        torch.default_generator.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()


def _file_of_module(name: str) -> Path | None:
    """Return the file that ``python -m NAME`` runs, without the import of a package; None if it is not found."""
    path: Sequence[str] | None = [str(Path.cwd()), *sys.path]
    origin: str | None = None
    for part in (*accumulate(name.split("."), "{}.{}".format), f"{name}.__main__"):
        spec = importlib.machinery.PathFinder.find_spec(part, path)
        if spec is None:
            break
        origin, path = spec.origin, spec.submodule_search_locations
        if path is None:
            break
    return Path(origin) if origin else None


def _run_module(name: str) -> None:
    _, spec, code = runpy._get_module_details(name)  # type: ignore[attr-defined]
    sys.argv[0] = spec.origin
    runpy._run_code(code, _new_main().__dict__, None, "__main__", spec)  # type: ignore[attr-defined]


def _run_file(path: Path) -> None:
    if pkgutil.get_importer(str(path)) is not None:  # a zip archive
        runpy.run_path(str(path), run_name="__main__")
        return
    main = _new_main()
    main.__dict__.update(__file__=str(path), __cached__=None)
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", str(path))
    exec(compile(path.read_bytes(), path, "exec", dont_inherit=True), main.__dict__)  # noqa: S102 - what the user asks


def _new_main() -> ModuleType:
    """Return an empty module ``__main__``, which stays: threads and exit handlers of the script still pickle by it."""
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    if "__mp_main__" in sys.modules:  # what processes call it that multiprocessing starts, and that send its objects
        sys.modules["__mp_main__"] = main
    return main


def _show(error: BaseException) -> None:
    """Print the error as an interpreter does at its end; libraries that log experiments learn of it by the hook."""
    hook = sys.excepthook
    if getattr(hook, "__module__", "") == "torch.distributed.distributed_c10d":  # writes the rank before each line
        hook = inspect.getclosurevars(hook).nonlocals.get("old_hook", sys.__excepthook__)
    hooked = hook is not sys.__excepthook__
    if hooked:
        try:
            hook(type(error), error, error.__traceback__)
        except BaseException:
            hooked = False
            print("Error in sys.excepthook:", file=sys.stderr)
            traceback.print_exc()
    typed = classify(error)
    if (typed is error and isinstance(typed, TrainerError)) or isinstance(typed, PeerLost):
        print(typed.lines(), file=sys.stderr, flush=True)
    elif not hooked:
        traceback.print_exception(error)


def _awaited_processes() -> bool:
    """Return whether processes of multiprocessing run that an exit handler waits for: they may be the training."""
    processes = sys.modules.get("multiprocessing.process")
    return processes is not None and any(not child.daemon for child in processes.active_children())


def _end_of_interpreter(step: Callable[[], None]) -> None:
    """Wait for threads, or call the exit handlers: a forked process would leave both out, as one of multiprocessing."""
    try:
        step()
    except BaseException as error:  # Ctrl-C; an interpreter goes on with its end, too
        with contextlib.suppress(Exception):  # stderr is closed
            print("Exception ignored at the end of the script:", file=sys.stderr)
            traceback.print_exception(error)


def _of_program(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback without the frames of the launcher and of ``runpy`` that lead to the program.

    None if the program had not begun, as with a syntax error in the script.
    """
    first = trace
    while first is not None and not is_of_program(first.tb_frame.f_code.co_filename):
        first = first.tb_next
    return first
