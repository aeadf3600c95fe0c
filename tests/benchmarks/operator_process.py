"""The operator as a process, started as in a deployment, for any kubeconfig."""

from __future__ import annotations

import os
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from subprocess import Popen
from types import TracebackType

from tests.processes import end, eventually, free_port, spawn, tail

READY_SECONDS = 60.0
STOP_SECONDS = 20.0


class OperatorProcess:
    """Context manager that starts the operator and stops it with SIGTERM. Prints the log's end if the block fails."""

    def __init__(self, kubeconfig: Path, *flags: str) -> None:
        self.port = free_port()
        self._folder = tempfile.TemporaryDirectory(prefix="ddpjob-operator-")
        self._log = Path(self._folder.name) / "log"
        self._command = [
            sys.executable,
            "-m",
            "ddpjob_operator.controller.main",
            f"--kubeconfig={kubeconfig}",
            "--health-host=127.0.0.1",
            f"--health-port={self.port}",
            *flags,
        ]
        self._process: Popen[bytes] | None = None

    def __enter__(self) -> OperatorProcess:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("DDPJOB_OPERATOR_")}
        self._process = spawn(self._command, self._log, environment)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        end(self._process, STOP_SECONDS)
        if kind is not None:
            print(tail(self._log), file=sys.stderr)
        self._folder.cleanup()

    def wait_until_ready(self, seconds: float = READY_SECONDS) -> None:
        """Wait until /readyz reports that the watches are open."""
        eventually("the operator is ready", self._is_ready, timeout=seconds)

    def memory(self) -> tuple[int, int]:
        """Return the resident memory of the process in bytes, now and at most."""
        assert self._process is not None
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        sizes = dict(line.split(":", 1) for line in lines)
        return tuple(1024 * int(sizes[key].split()[0]) for key in ("VmRSS", "VmHWM"))  # type: ignore[return-value]

    def cpu_seconds(self) -> float:
        """Return the processor time that the process has used, in user and system mode."""
        fields = self._proc("stat").rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def peak_mib(self) -> float:
        """Return the largest resident memory of the process so far."""
        line = next(line for line in self._proc("status").splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) / 1024

    def _proc(self, name: str) -> str:
        assert self._process is not None
        return Path(f"/proc/{self._process.pid}/{name}").read_text()

    def _is_ready(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError(f"the operator ended with {self._process.returncode}")
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{self.port}/readyz", timeout=5).close()
        except (urllib.error.URLError, OSError):
            return False
        return True
