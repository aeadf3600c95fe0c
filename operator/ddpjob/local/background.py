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
from ddpjob.errors import DDPJobError
from ddpjob.local import LocalError
from ddpjob.local.admission import admit
from ddpjob.local.pod_process import Machine
from ddpjob.local.references import References
from ddpjob.local.session import Session
from ddpjob.local.state import HostPaths, StateFolder
from ddpjob.local.stop import Stop

START_SECONDS = 120.0
LOG = "background.log"


@dataclass(frozen=True)
class Order:
    """What to run. root: of the state folder. others: Secrets and ConfigMaps. volumes: claim to directory."""

    job: Json
    root: str
    directory: str
    others: Sequence[Json] = ()
    volumes: dict[str, str] = field(default_factory=dict)


def start(order: Order) -> None:
    """Run a job in the background; return when it is recorded and locked. Raises ``LocalError``."""
    command = [sys.executable, "-m", "ddpjob.local.background"]
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
        return LocalError(*json.loads(done.stdout))
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
    try:
        admitted = admit(order.job)
        volumes = {claim: Path(path) for claim, path in order.volumes.items()}
        paths = HostPaths(admitted.job, StateFolder(Path(order.root)), volumes)
        _redirect_output(paths.record.path / LOG)
        machine = Machine(paths, References(order.others, admitted.job.namespace), Path(order.directory))
        session = Session(admitted=admitted, machine=machine, on_change=lambda *_: answer.send("running"), say=_say)
        stop = Stop()
        stop.say = _say
        asyncio.run(stop.run(session))
    except DDPJobError as error:
        answer.send(json.dumps([error.error, error.hint, error.next_step]))
        return 1
    return 0


def _redirect_output(log: Path) -> None:
    log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with log.open("a") as file, open(os.devnull) as nothing:  # noqa: PTH123 - a device
        sys.stdout.flush()
        os.dup2(nothing.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


class _Answer:
    """The pipe to the starting process; only the first answer is sent."""

    def __init__(self, pipe: int) -> None:
        self._pipe: int | None = pipe

    def send(self, text: str) -> None:
        if self._pipe is None:
            return
        pipe, self._pipe = self._pipe, None
        with contextlib.suppress(OSError):  # the starting process gave up waiting
            os.write(pipe, text.encode())
        os.close(pipe)


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
