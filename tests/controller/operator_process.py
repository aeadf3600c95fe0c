"""The operator as a separate process, as in production.

It is forked from a process that has imported the code, so that it starts in a tenth of the time.
"""

import gc
import json
import os
import re
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Self

from ddpjob_operator.controller.main import main
from tests.forks import FORKS, preload
from tests.processes import die_with_parent, eventually, tail
from tests.worlds.control_plane import ControlPlane

READY_SECONDS = 60.0
STOP_SECONDS = 30.0
preload(__name__)


class OperatorProcess:
    """Runs ``ddpjob-operator`` with a control plane; the context manager stops it with SIGTERM.

    namespaces: to serve. token: its credentials. server: URL of a proxy, or None.
    ``starts`` counts its processes.
    """

    def __init__(
        self,
        plane: ControlPlane,
        namespaces: str,
        *,
        token: str = "",
        server: str = "",
        name: str = "operator",
        **settings: object,
    ) -> None:
        kubeconfig = plane.kubeconfig(token or plane.admin_token, name=name, server=server)
        self._kubeconfig = kubeconfig
        self._settings = {"namespaces": namespaces, "health_port": "0"}
        self._settings |= {key: str(value) for key, value in settings.items()}
        self._log = plane.folder / f"{name}-{namespaces or 'all'}.log"
        self._log.touch()
        self._process: ForkServerProcess | None = None
        self._offset = 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables of the process."""
        variables = {f"DDPJOB_OPERATOR_{key.upper()}": value for key, value in self._settings.items()}
        return dict(os.environ) | {"NO_PROXY": "127.0.0.1", "KUBECONFIG": str(self._kubeconfig)} | variables

    def start(self, *, wait: bool = True) -> None:
        """Start it and wait until it is ready."""
        self._offset = self._log.stat().st_size
        self._process = FORKS.Process(target=_serve, args=(self.environment, self._log), daemon=True)
        self._process.start()
        if wait:
            eventually("the operator is ready", self.is_ready, timeout=READY_SECONDS)

    def stop(self) -> int:
        """Send SIGTERM, wait for the end and return the exit code."""
        self.send(signal.SIGTERM)
        assert self._process is not None
        self._process.join(STOP_SECONDS)
        print(tail(self._log, lines=60))  # pytest shows it if the test fails
        return self.kill()

    def kill(self) -> int:
        """Send SIGKILL unless it has ended, wait for the end and return the exit code."""
        assert self._process is not None
        self._process.kill()
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode

    def send(self, number: signal.Signals) -> None:
        """Send a signal. It may be called in any thread."""
        os.kill(self.pid, number)

    @property
    def pid(self) -> int:
        assert self._process is not None
        assert self._process.pid is not None
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.is_alive()

    def check(self) -> None:
        """Raise ``AssertionError`` if the process ended by itself."""
        code = self._process.exitcode if self._process is not None else None
        assert code in (None, -signal.SIGKILL), f"the operator exited with {code}:\n{tail(self._log)}"

    def is_ready(self) -> bool:
        assert self._process is not None
        if self._process.exitcode is not None:
            raise RuntimeError(f"the operator ended with {self._process.exitcode}:\n{tail(self._log)}")
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


def _serve(environment: Mapping[str, str], log: Path) -> None:
    """Run the operator in a forked process, until a signal."""
    die_with_parent()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    gc.freeze()  # a collection of the imported modules' objects would copy their memory pages
    os.environ.clear()
    os.environ.update(environment)
    sys.exit(main([]))
