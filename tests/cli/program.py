"""``ddpjob`` as a program: its output and its exit code; the jobs are short shell commands.

A command that ends by itself is a process forked from one that has imported the code, which takes a fifth of the time.
"""

import contextlib
import json
import os
import pty
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import yaml

import tests.warm  # noqa: F401 - before a fork of this process
from ddpjob.api.objects import Json
from ddpjob.cli.main import main
from tests.forks import FORKS, preload
from tests.processes import die_with_parent, eventually

ROOT = Path(__file__).parents[2]
SECONDS = 500.0
preload(__name__, "ddpjob.cli.run", "ddpjob.client.cluster")  # which commands import late
_STREAMS = (("in", os.O_RDONLY), ("out", os.O_WRONLY | os.O_CREAT), ("err", os.O_WRONLY | os.O_CREAT))


@dataclass
class Done:
    """A program that ended."""

    code: int
    out: str
    err: str

    @property
    def objects(self) -> list[Json]:
        """Return its output, parsed as NDJSON."""
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def result(self) -> Json:
        last = self.objects[-1]
        assert last["type"] == "result"
        return last

    def is_refused(self, code: int = 2) -> list[str]:
        """Return the three lines of an error; fail if the output is anything else."""
        assert self.code == code, self
        lines = self.err.splitlines()
        assert [line[:7] for line in lines] == ["error: ", "hint:  ", "next:  "], self.err
        return lines


@dataclass
class Terminal:
    """A program on a terminal of its own; a call returns what it has written so far."""

    master: int
    process: subprocess.Popen[bytes]
    written: bytearray = field(default_factory=bytearray)

    def __call__(self) -> str:
        with contextlib.suppress(OSError):  # nothing new, or the program has ended
            while data := os.read(self.master, 65536):
                self.written.extend(data)
        return self.written.decode(errors="replace")

    def answer(self, question: str, text: str) -> None:
        """Wait for a question, and type a line."""
        eventually(f"it asks {question!r}", lambda: question in self(), timeout=SECONDS)
        os.write(self.master, f"{text}\n".encode())

    def ends(self) -> int:
        """Wait until the program ends, and return its exit code."""
        eventually("it ends", lambda: (self(), self.process.poll() is not None)[1], timeout=SECONDS)
        return self.process.returncode


@dataclass
class Program:
    """``ddpjob`` with its own state folder and working directory."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.state = self.folder / "state"
        self.environment = self.environment or {
            **{key: value for key, value in os.environ.items() if not key.startswith(("DDPJOB_", "DDPTRAIN_"))},
            "DDPJOB_STATE_DIR": str(self.state),
            "KUBECONFIG": str(self.folder / "no-kubeconfig"),
            "TERM": "dumb",
        }

    def __call__(
        self, *arguments: str, stdin: str | None = None, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> Done:
        with tempfile.TemporaryDirectory() as name:
            streams = Path(name)
            (streams / "in").write_text(stdin or "")
            place = (streams, cwd or self.folder, self.environment | dict(env or {}))
            process = FORKS.Process(target=_execute, args=(arguments, *place), daemon=True)
            process.start()
            process.join(SECONDS)
            process.kill()
            process.join()
            return Done(process.exitcode or 0, (streams / "out").read_text(), (streams / "err").read_text())

    def _start(self, arguments: Sequence[str], environment: Mapping[str, str], **streams: Any) -> subprocess.Popen[Any]:
        """Start a program as a fork of this process: an interpreter would import everything again."""
        return subprocess.Popen(
            ["ddpjob"],
            cwd=self.folder,
            preexec_fn=partial(_become, arguments, environment),  # noqa: PLW1509 - which never returns
            restore_signals=False,  # an interpreter ignores SIGPIPE
            **streams,
        )

    @contextmanager
    def started(self, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        """Start a program; it is killed at the end of the block."""
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = self._start(arguments, self.environment, text=True, **streams)
        try:
            yield process
        finally:
            process.kill()
            process.communicate()

    @contextmanager
    def on_terminal(self, *arguments: str, columns: int = 80) -> Iterator["Terminal"]:
        """Start a program on a terminal of its own."""
        master, terminal = pty.openpty()
        termios.tcsetwinsize(terminal, (40, columns))
        os.set_blocking(master, False)
        environment = self.environment | {"TERM": "xterm-256color"}
        process = self._start(arguments, environment, stdin=terminal, stdout=terminal, stderr=terminal)
        os.close(terminal)
        try:
            yield Terminal(master, process)
        finally:
            process.kill()
            process.wait()
            os.close(master)

    def write(self, job: Json, *others: Json) -> str:
        """Write the job to a file and return its path."""
        path = self.folder / f"{job['metadata']['name']}.yaml"
        path.write_text(yaml.safe_dump_all([job, *others]))
        return str(path)

    def job(self, name: str) -> Json:
        """Return the recorded job."""
        done = self("get", name, "--output", "json")
        assert done.code == 0, done
        found: Json = json.loads(done.out)
        return found

    def until_log(self, name: str, text: str) -> str:
        """Wait until a log of the job contains the text. Return all logs."""
        folder = self.state / "jobs" / "default" / name / "pods"

        def read() -> str | None:
            logs = "".join(path.read_text() for path in sorted(folder.glob("*/*.log")))
            return logs if text in logs else None

        return eventually(f"{name} prints {text!r}", read, timeout=SECONDS)


def _execute(arguments: Sequence[str], streams: Path, folder: Path, environment: Mapping[str, str]) -> None:
    """Run a command line in a forked process, with files as its standard streams."""
    die_with_parent()
    for number, (name, flags) in enumerate(_STREAMS):
        os.dup2(os.open(streams / name, flags, 0o600), number)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - multiprocessing has closed the one before
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.exit(main(arguments))


def _become(arguments: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Run a command line in a process that ``Popen`` has forked, in place of the program that it would execute."""
    die_with_parent()
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # among them the pipe on which Popen waits for the program
    sys.stdin, sys.stdout, sys.stderr = (open(n, mode, closefd=False) for n, mode in enumerate("rww"))  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["ddpjob", *arguments]
    code = 1
    try:
        code = main(arguments)
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(code)


def shell_job(name: str, script: str, **spec: Any) -> Json:
    """A DDPJob that runs a shell script as its trainer."""
    return {
        "apiVersion": "ddpjob.dev/v1alpha1",
        "kind": "DDPJob",
        "metadata": {"name": name},
        "spec": {"image": "busybox", "command": ["sh", "-c", script]} | spec,
    }


def with_volume(**spec: Any) -> Json:
    """Return spec fields with a claimTemplate."""
    claim = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    return {"checkpoint": {"claimTemplate": {"spec": claim}}} | spec
