"""Operators as processes that start in a fraction of a second: each is forked from one that has imported the code."""

import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from ddpjob.controller.main import main
from tests.controller.operator_process import OperatorProcess
from tests.controlplane import ControlPlane
from tests.processes import die_with_parent, tail

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload([__name__])


class ForkedOperator:
    """Runs ``ddpjob-operator`` for a namespace; all its requests go to ``server``. ``starts`` counts its processes."""

    def __init__(self, plane: ControlPlane, namespace: str, server: str, name: str, **settings: object) -> None:
        described = OperatorProcess(plane, namespace, server=server, name=name, **settings)
        self._environment = described.environment
        self.log = described.log
        self.starts = 0
        self._process: ForkServerProcess | None = None

    def start(self) -> None:
        """Start a process, and do not wait until it is ready."""
        self.starts += 1
        self._process = _FORKS.Process(target=_serve, args=(self._environment, self.log), daemon=True)
        self._process.start()

    def check(self) -> None:
        """Raise ``AssertionError`` if the process ended by itself."""
        code = self._process.exitcode if self._process is not None else None
        assert code in (None, -signal.SIGKILL), f"the operator exited with {code}:\n{tail(self.log)}"

    def send(self, number: signal.Signals) -> None:
        """Send a signal. It may be called in any thread."""
        assert self._process is not None and self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """Send SIGKILL and wait for the end."""
        if self._process is not None:
            self._process.kill()
            self._process.join()


def _serve(environment: Mapping[str, str], log: Path) -> None:
    """Run the operator in a forked process, until a signal."""
    die_with_parent()
    gc.freeze()  # a collection of the imported modules' objects would copy their memory pages
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.exit(main([]))
