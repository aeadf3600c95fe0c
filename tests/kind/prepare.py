"""Build and download what tests need, before they run: `python -m tests.kind prepare NAME...`, used by `make test`.

A name is a program of toolchain.py, or `docker` (an engine that answers), `node-image`, `images`, `chromium` or
`promtool` (Debian's packages). Tests look the results up and never build, so no test's time limit includes a build. Two
processes may prepare at once: every build holds a lock, and the second process finds the result of the first.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial

from tests.kind import dockerd, images, node_image, packages, toolchain
from tests.kind.command import CommandError
from tests.kind.docker import DockerUnavailableError, ensure_engine, running_engine

GROUPS = ("docker", "node-image", "images", "chromium", "promtool")
CLUSTER = ("kubectl", "kind", "lookup", "provisioner", "docker", "node-image")
"""What `cluster.up` needs."""


class State(StrEnum):
    """Whether something is prepared."""

    READY = "ready"
    UNAVAILABLE = "unavailable"
    """This machine lacks something: Go, Docker, root, or a server to download from."""
    FAILED = "failed"
    """A build of this repository's own files failed."""


@dataclass(frozen=True)
class Result:
    """The outcome of one name. ``reason`` is one line, empty if it is ready."""

    name: str
    state: State
    seconds: float
    reason: str = ""
    detail: str = ""


def expand(names: Sequence[str]) -> list[str]:
    """Return the names with everything that they are built from before them, each once."""
    expanded: list[str] = []
    for name in names:
        for part in (*_requirements(name), name):
            if part not in expanded:
                expanded.append(part)
    return expanded


def prepare(names: Sequence[str], report: Callable[[Result], None] = lambda result: None) -> list[Result]:
    """Build or download each name, with progress on stderr. A failure does not stop the others.

    Programs are compiled beside the images and packages, which are mostly downloaded, each in the given order.
    ``report`` is called with each result as soon as it is known.
    """
    wanted = expand(names)
    results: list[Result] = []
    known = {name: threading.Event() for name in wanted}
    requirements = {name: [each for each in _requirements(name) if each in known] for name in wanted}
    numbers, one = itertools.count(1), threading.Lock()
    say = partial(_say, len(wanted))

    def prepare_in_order(part: Sequence[str]) -> None:
        for name in part:
            for requirement in requirements[name]:
                known[requirement].wait()
            with one:
                say(number := next(numbers), name)
            result = _prepare_one(name)
            with one:
                if result.state is not State.READY:
                    say(number, f"{name}: {result.state}: {result.detail}")
                report(result)
                results.append(result)
            known[name].set()

    # What Docker needs comes first, and last the node image, which waits for all its programs.
    first = requirements.get("docker", [])
    programs = sorted((name for name in wanted if name not in GROUPS), key=lambda name: name not in first)
    others = sorted((name for name in wanted if name in GROUPS), key=lambda name: name == "node-image")
    beside = threading.Thread(target=prepare_in_order, args=(others,), daemon=True)
    beside.start()
    prepare_in_order(programs)
    beside.join()
    return results


def ensure(*names: str, install: bool | None = None) -> None:
    """Prepare the names for a command that needs all of them, with progress. Raises the error of the first failure.

    ``install`` as in ``docker.ensure_engine``.
    """
    wanted = expand(names)
    for number, name in enumerate(wanted, 1):
        if len(wanted) > 1:
            _say(len(wanted), number, name)
        _builder(name, install)()


def failures(results: Sequence[Result]) -> str:
    """Return one line: which names are not prepared and why, each reason once; empty if all are."""
    reasons: dict[str, list[str]] = {}
    for result in results:
        if result.state is not State.READY:
            # The end of a program's output says more than its command.
            last = result.detail.rstrip().rpartition("\n")[2].strip()
            reason = result.reason if last == result.reason else f"{result.reason} … {last}"
            reasons.setdefault(reason, []).append(result.name)
    return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in reasons.items())


def print_json(result: Result) -> None:
    """Print a result as one line of JSON on stdout, for the program that started this one."""
    print(json.dumps(asdict(result)), flush=True)


def _say(total: int, number: int, text: str) -> None:
    print(f"[{number}/{total}] {text}", file=sys.stderr, flush=True)


def _prepare_one(name: str) -> Result:
    begin = time.monotonic()
    state, detail = State.READY, ""
    try:
        _builder(name, None)()
    except (toolchain.ToolchainError, DockerUnavailableError, packages.MissingProgramsError) as error:
        state, detail = State.UNAVAILABLE, str(error)
    except (CommandError, ValueError, OSError) as error:
        state, detail = State.FAILED, str(error)
    return Result(name, state, round(time.monotonic() - begin, 1), detail.partition("\n")[0], detail)


def _requirements(name: str) -> list[str]:
    if name == "docker":
        return ["runc-reduced"] if running_engine() is None and dockerd.lacks_sys_resource() else []
    if name == "node-image":
        return [*_requirements("docker"), "docker", *node_image.node_programs()]
    if name == "images":
        return [*_requirements("docker"), "docker"]
    return []


def _builder(name: str, install: bool | None) -> Callable[[], object]:
    if name == "docker":
        return partial(ensure_engine, install=install)
    if name == "node-image":
        return lambda: node_image.build_node_image(ensure_engine())
    if name == "images":
        return images.build_images_for_tests
    if name in ("chromium", "promtool"):
        return partial(packages.require, name, install=install)
    return partial(toolchain.build, name)
