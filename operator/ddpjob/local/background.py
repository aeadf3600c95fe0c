"""Jobs in the background: ``start`` runs a job in a process of its own, which outlives the one that started it.

``python -m ddpjob.local.background`` reads an ``Order`` as JSON from standard input. It answers on standard output when
the job runs, and a process that it leaves behind runs the job. Output of that process: ``background.log`` of the job.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ddpjob.api.objects import Json
from ddpjob.errors import DDPJobError, JobExistsError
from ddpjob.local import LocalError, LocalJobExistsError
from ddpjob.local.admission import admit
from ddpjob.local.pod_process import Machine
from ddpjob.local.references import References
from ddpjob.local.session import Session
from ddpjob.local.state import ENDED, HostPaths, StateFolder, make_private, unusable
from ddpjob.local.stop import StoppableSession

START_SECONDS = 120.0
LOG = "background.log"
_ROOM = 4096  # bytes for the error that ends the run, which may be a full disk


@dataclass(frozen=True)
class Order:
    """What to run. root: of the state folder. others: Secrets and ConfigMaps. volumes: claim to directory.

    is_new: refuse to replace or resume a job of this name.
    """

    job: Json
    root: str
    directory: str
    others: Sequence[Json] = ()
    volumes: dict[str, str] = field(default_factory=dict)
    is_new: bool = False


def start(order: Order) -> None:
    """Run a job in the background; return when it is recorded and locked. Raises ``LocalError``."""
    # -P: without the current directory, whose yaml.py would be imported.
    command = [sys.executable, "-P", "-m", "ddpjob.local.background"]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(asdict(order)),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=START_SECONDS,
            check=False,
            start_new_session=True,  # so that Ctrl-C at the terminal does not stop the job
        )
    except subprocess.TimeoutExpired as error:
        raise LocalError(
            f"the job does not run after {START_SECONDS:g} s",
            "this machine is very busy, or its disk does not answer",
            "ddpjob get shows whether the job runs now",
        ) from error
    if done.returncode:
        raise _refusal(done)


def _refusal(done: "subprocess.CompletedProcess[str]") -> LocalError:
    try:
        exists, *parts = json.loads(done.stdout)
        return (LocalJobExistsError if exists else LocalError)(*parts)
    except (ValueError, TypeError):
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        return LocalError(
            f"the process that was to run the job ended: {last}", "this is a bug", f"see {LOG} in the job's folder"
        )


def main() -> int:
    """Leave a process behind that runs the job. Return 0 when the job runs, else 1 with the error printed."""
    order = Order(**json.load(sys.stdin))
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.close(reading)
        os._exit(_run_detached(order, _Answer(writing)))
    os.close(writing)
    with os.fdopen(reading) as pipe:
        answer = pipe.read()
    sys.stdout.write(answer)
    return 0 if answer == "running" else 1


def _run_detached(order: Order, answer: "_Answer") -> int:
    """Run the job with ``background.log`` as output; write "running" or the error as JSON to the pipe ``answer``."""
    ended: Path | None = None
    is_reported = False

    def report(error: DDPJobError) -> None:
        nonlocal is_reported
        if is_reported:  # while the job was locked
            return
        is_reported = True
        parts = [error.error, error.hint, error.next_step]
        if not answer.send(json.dumps([isinstance(error, JobExistsError), *parts])) and ended is not None:
            _keep(ended, parts)

    try:
        admitted = admit(order.job)
        volumes = {claim: Path(path) for claim, path in order.volumes.items()}
        paths = HostPaths(admitted.job, StateFolder(Path(order.root)), volumes)
        ended = paths.record.path / ENDED
        _redirect_output(paths.record.path / LOG)
        ended.write_text(" " * _ROOM)
        machine = Machine(paths, References(order.others, admitted.job.namespace), Path(order.directory))

        def running(*_: object) -> None:
            answer.send("running")

        session = Session(
            admitted=admitted, machine=machine, on_change=running, say=_say, is_new=order.is_new, on_error=report
        )
        stop = StoppableSession()
        stop.say = _say
        asyncio.run(stop.run(session))
        return 0
    except DDPJobError as error:
        report(error)
    except OSError as error:
        report(unusable(error, Path(order.root)))
    return 1


def _keep(ended: Path, parts: Sequence[str]) -> None:
    """Keep the error of a run that nothing waits for; the record may be on a full disk."""
    with contextlib.suppress(OSError):
        with ended.open("r+") as file:
            file.write(json.dumps(parts).ljust(_ROOM))
        _say("\n".join(parts))


def _redirect_output(log: Path) -> None:
    make_private(log.parent)
    with log.open("a") as file, open(os.devnull) as nothing:  # noqa: PTH123 - a device
        sys.stdout.flush()
        os.dup2(nothing.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


class _Answer:
    """The pipe to the starting process; only the first answer is sent."""

    def __init__(self, pipe: int) -> None:
        self._pipe: int | None = pipe

    def send(self, text: str) -> bool:
        """Return whether this was the first answer."""
        if self._pipe is None:
            return False
        pipe, self._pipe = self._pipe, None
        with contextlib.suppress(OSError):  # the starting process gave up waiting
            os.write(pipe, text.encode())
        os.close(pipe)
        return True


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
