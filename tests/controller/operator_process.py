"""The operator as a separate process, as in production."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Self

from tests.controlplane import ControlPlane
from tests.processes import end, eventually, spawn, tail

READY_SECONDS = 60.0


class OperatorProcess:
    """Runs ``ddpjob-operator`` with a control plane; the context manager stops it with SIGTERM.

    namespaces: to serve. token: its credentials. server: URL of a proxy, or None.
    package: folder with the package ``ddpjob`` of another release; None runs the code of this working tree.
    """

    def __init__(
        self,
        plane: ControlPlane,
        namespaces: str,
        *,
        token: str = "",
        server: str = "",
        name: str = "operator",
        package: Path | None = None,
        **settings: object,
    ) -> None:
        kubeconfig = plane.kubeconfig(token or plane.admin_token, name=name, server=server)
        self._settings = {"namespaces": namespaces, "kubeconfig": str(kubeconfig), "health_host": "127.0.0.1"}
        self._settings |= {"health_port": "0"} | {key: str(value) for key, value in settings.items()}
        self._package = package
        self._log = plane.folder / f"{name}-{namespaces or 'all'}.log"
        self.process: subprocess.Popen[bytes] | None = None
        self._offset = 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables of the process."""
        environment = dict(os.environ) | {"NO_PROXY": "127.0.0.1"}
        if self._package is not None:
            environment["PYTHONPATH"] = str(self._package)
        return environment | {f"DDPJOB_OPERATOR_{key.upper()}": value for key, value in self._settings.items()}

    def start(self, *, wait: bool = True) -> None:
        """Start it and wait until it is ready."""
        self._offset = self._log.stat().st_size if self._log.exists() else 0
        self.process = spawn([sys.executable, "-m", "ddpjob.controller.main"], self._log, self.environment)
        if wait:
            eventually("the operator is ready", self.is_ready, timeout=READY_SECONDS)

    def stop(self) -> int:
        """Send SIGTERM, wait for the end and return the exit code."""
        assert self.process is not None
        end(self.process, grace=30)
        self._show()
        return int(self.process.returncode)

    def kill(self) -> None:
        """Send SIGKILL."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self._show()

    def _show(self) -> None:
        """Print the log, which pytest shows if the test fails."""
        print(tail(self._log, lines=60))

    def is_ready(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            raise RuntimeError(f"the operator ended with {self.process.returncode}:\n{tail(self._log)}")
        return self.get("/readyz")[0] == 200

    def get(self, path: str) -> tuple[int, str]:
        """Return HTTP status and body of the health server; (0, "") before it listens."""
        port = self.port()
        if port is None:
            return 0, ""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"http://127.0.0.1:{port}{path}", timeout=10) as response:
                return int(response.status), response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of the samples of a metric with these labels."""
        total = 0.0
        for line in self.get("/metrics")[1].splitlines():
            match = re.fullmatch(rf"{name}(?:\{{(.*)\}})? (\S+)", line)
            if match and all(f'{key}="{value}"' in (match[1] or "") for key, value in labels.items()):
                total += float(match[2])
        return total

    def port(self) -> int | None:
        """The port of the health server, from the log."""
        found = re.search(r"health on port (\d+)", self.text())
        return int(found[1]) if found else None

    def text(self) -> str:
        """The log lines since this start."""
        with self._log.open("rb") as log:
            log.seek(self._offset)
            return log.read().decode(errors="replace")

    def lines(self) -> list[dict[str, Any]]:
        """The log lines as JSON objects."""
        return [json.loads(line) for line in self.text().splitlines() if line.startswith("{")]

    @property
    def log(self) -> Path:
        return self._log
