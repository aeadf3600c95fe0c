"""The test layers: the commands of each, what has to be built before, and how much of a CPU each uses."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from tests.kind import prepare
from tests.kind.cache import cache_dir


@dataclass(frozen=True)
class Command:
    """One command of a layer. Placeholders such as ``{helm}`` stand for the path of a program in ``needs``."""

    words: tuple[str, ...]
    is_pytest: bool = False
    """pytest reports each test; any other command counts as one test."""
    needs: tuple[str, ...] = ()
    """Names for `python -m tests.kind prepare`. The command starts when all of them are prepared."""
    cores: float = 1.0
    """Seconds of CPU time per second, about as the report shows them: what it takes of the CPUs while it runs."""


@dataclass(frozen=True)
class Layer:
    """A named group of commands."""

    name: str
    commands: tuple[Command, ...]


def pytest_command(*arguments: str, needs: tuple[str, ...] = (), cores: float = 1.0) -> Command:
    """Return a pytest command of this interpreter; the runner adds the options for the report."""
    return Command((sys.executable, "-m", "pytest", "-q", *arguments), is_pytest=True, needs=needs, cores=cores)


def _tool(module: str, *arguments: str) -> Command:
    return Command((sys.executable, "-m", module, *arguments))


PACKAGES = ("ddpjob", "ddpjob_operator", "ddprun", "ddptrain", "ddpplot")


def _mypy(cache: str, *arguments: str) -> Command:
    """Return a run of mypy, which checks again only what has changed since the last run, also in another clone."""
    return _tool("mypy", "--cache-dir", str(cache_dir() / cache), *arguments)


CONTROL_PLANE = ("etcd", "kube-apiserver", "kubectl", "kube-controller-manager")
_NO_CLUSTER = ("-m", "not apiserver and not kind")

# The order in which commands start: what takes longest comes first, so that it does not run at the end by itself. The
# kind layer gets the share of the builds (``runner.BUILD_CORES``) when they end, because it asks for no more.
LAYERS = (
    Layer("kind", (pytest_command("tests/e2e", "-m", "kind", needs=(*prepare.CLUSTER, "helm", "images"), cores=1.0),)),
    Layer(
        "apiserver",
        (
            pytest_command("tests/controller", "-m", "apiserver", needs=CONTROL_PLANE, cores=0.2),
            pytest_command(
                *(
                    "tests/api",
                    "tests/cli",
                    "tests/client",
                    "tests/cluster",
                    "tests/install",
                    "tests/ui",
                    "tests/worlds",
                ),
                *("-m", "apiserver"),
                needs=("helm", *CONTROL_PLANE),
                cores=0.2,
            ),
            pytest_command("tests/injection", "-m", "apiserver", needs=CONTROL_PLANE, cores=0.5),
        ),
    ),
    Layer(
        "ddprun",
        (
            pytest_command("tests/ddprun/resilience", cores=0.3),
            pytest_command("tests/ddprun", "--ignore=tests/ddprun/resilience", cores=0.3),
        ),
    ),
    Layer("ddptrain", (pytest_command("tests/ddptrain", needs=("chromium",), cores=0.3),)),
    Layer("lessons", (pytest_command("tests/lessons", cores=0.3),)),
    Layer(
        "local",
        (
            pytest_command("tests/cli", *_NO_CLUSTER, cores=0.4),
            pytest_command("tests/local", "tests/client", "tests/ui", *_NO_CLUSTER, needs=("chromium",), cores=0.4),
        ),
    ),
    Layer(
        "unit",
        (
            pytest_command(
                *("tests/api", "tests/engine", "tests/cluster", "tests/controller", "tests/kind", "tests/layers"),
                *("tests/benchmarks", "tests/compatibility", "tests/convert", "tests/mutants", "tests/plot"),
                *("tests/worlds", *_NO_CLUSTER),
                cores=0.8,
            ),
            pytest_command("tests/simulator", cores=1.0),  # two processes, which take what the others leave
        ),
    ),
    Layer(
        "install",
        (pytest_command("tests/install", *_NO_CLUSTER, needs=("helm", "kubectl", "promtool"), cores=0.7),),
    ),
    Layer(
        "lint",
        (
            _tool("ruff", "check", "."),
            _tool("ruff", "format", "--check", "."),
            _mypy("types", *(word for package in PACKAGES for word in ("-p", package))),
            _mypy("types-oldest-python", "-p", "ddprun", "--config-file", "tests/layers/oldest_python.ini"),
            Command((str(Path(sys.executable).with_name("lint-imports")),)),
            _tool("yamllint", "--strict", "."),
            Command(("{helm}", "lint", "--strict", "charts/ddpjob"), needs=("helm",)),
        ),
    ),
)
BY_NAME = {layer.name: layer for layer in LAYERS}
