"""CPU time of commands as a part of that of `import torch`: `python -m tests.benchmarks.command_start`.

Commands and imports alternate, so that other work on the machine changes both.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from tests.benchmarks.report import describe_machine, write_section
from tests.client.worlds import ClusterWorld
from tests.worlds.control_plane import control_plane

SECTION = "command-start"
PROGRAM = str(Path(sys.executable).with_name("ddpjob"))


def user_seconds(command: Sequence[str], environment: Mapping[str, str]) -> float:
    """Return the CPU time in user mode of one process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    subprocess.run(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True, timeout=60
    )
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before


def measure(repetitions: int) -> dict[str, list[float]]:
    """Return the times of each command; each place has three jobs."""
    with control_plane() as plane, tempfile.TemporaryDirectory() as state:
        plane.make_namespace("start")
        with ClusterWorld(plane, "start").client as client:
            world = ClusterWorld(plane, "start")
            for name in ("one", "two", "three"):
                client.submit(world.job(name))
        config = plane.kubeconfig(name="start", namespace="start")
        environment = {**os.environ, "KUBECONFIG": str(config), "DDPJOB_STATE_DIR": state}
        local = [PROGRAM, "run", "-", "-o", "json", "--name"]
        job = "{apiVersion: ddpjob.dev/v1alpha1, kind: DDPJob, metadata: {}, spec: {image: none, command: ['true']}}"
        for name in ("one", "two", "three"):
            subprocess.run([*local, name], env=environment, input=job.encode(), stdout=subprocess.DEVNULL, check=True)
        commands = {
            'python -c "import torch"': [sys.executable, "-c", "import torch"],
            "ddpjob --help": [PROGRAM, "--help"],
            "ddpjob get --local": [PROGRAM, "get", "--local"],
            "ddpjob get one": [PROGRAM, "get", "one"],
            "ddpjob get --context start": [PROGRAM, "get", "--context", "start"],
            "ddpjob get": [PROGRAM, "get"],
            "ddpjob why one --context start": [PROGRAM, "why", "one", "--context", "start"],
        }
        times: dict[str, list[float]] = {name: [] for name in commands}
        for command in commands.values():
            user_seconds(command, environment)  # writes bytecode and fills the page cache
        for _ in range(repetitions):
            for name, command in commands.items():
                times[name].append(user_seconds(command, environment))
        return times


def table(times: Mapping[str, list[float]], foot: str) -> str:
    """Return the result as a Markdown table."""
    torch = median(next(iter(times.values())))
    lines = ["| command | user CPU time | part of `import torch` |", "|---|---:|---:|"]
    for name, found in times.items():
        lines.append(f"| `{name}` | {median(found):.2f} s | {median(found) / torch:.2f} |")
    return "\n".join([*lines, "", foot])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--write", action="store_true", help="write the table into docs/develop/benchmarks.md")
    options = parser.parse_args()
    times = measure(options.repetitions)
    text = table(times, f"Medians of {options.repetitions} runs of each on {describe_machine()}.")
    print(text)
    if options.write:
        write_section(SECTION, text)


if __name__ == "__main__":
    main()
