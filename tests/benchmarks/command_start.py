"""CPU time of commands as a part of that of `import torch`: `python -m tests.benchmarks.command_start`.

Commands and imports alternate, so that other work on the machine changes both.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median

from tests.benchmarks.report import describe_machine, in_turns, parser_of, print_table, table_of
from tests.client.worlds import ClusterWorld
from tests.worlds.control_plane import control_plane

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
        for command in commands.values():
            user_seconds(command, environment)  # writes bytecode and fills the page cache
        measures = {name: partial(user_seconds, command, environment) for name, command in commands.items()}
        return in_turns(measures, repetitions)


def main() -> None:
    parser = parser_of("tests.benchmarks.command_start", __doc__)
    parser.add_argument("--repetitions", type=int, default=7)
    options = parser.parse_args()
    times = {name: median(found) for name, found in measure(options.repetitions).items()}
    torch = next(iter(times.values()))
    rows = [(f"`{name}`", f"{seconds:.2f} s", f"{seconds / torch:.2f}") for name, seconds in times.items()]
    shown = table_of(("command", "user CPU time", "part of `import torch`"), rows)
    foot = f"Medians of {options.repetitions} runs of each on {describe_machine()}."
    print_table(options, "command-start", f"{shown}\n\n{foot}")


if __name__ == "__main__":
    main()
