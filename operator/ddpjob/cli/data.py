"""``--data-dir`` and ``--digits-if-offline``: where a job that runs ``ddptrain`` finds its data on this machine."""

import ctypes
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

from ddpjob.api import names
from ddpjob.cli.places import Places, in_template
from ddpjob.local.errors import LocalError

Json = dict[str, Any]
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
FETCH_SECONDS = 120.0  # 11 MB; whoever has less than 100 KB/s is better off with a copy of the files


def runs_ddptrain(job: Json) -> bool:
    """Whether the job's program is the trainer of this repository: by name, or as the entrypoint of its image."""
    spec = job["spec"]
    containers = in_template(job, "containers")
    templates = next((c.get("command") for c in containers if c.get("name") == names.TRAINER_CONTAINER), None)
    command = spec.get("command") or templates
    return not command or (len(command) == 1 and PurePosixPath(str(command[0])).name == "ddptrain")


def use_directory(places: Places, given: str) -> None:
    """Train with the data in a directory of this machine. Raises ``LocalError`` where that cannot be."""
    _must_run_ddptrain(places.job, "--data-dir")
    directory = Path(given).expanduser().absolute()
    if not directory.is_dir():
        raise LocalError(
            f"--data-dir {given}: no such directory",
            "it holds the four MNIST files, gzipped or not",
            f"ddptrain data fetch --data-dir {given} downloads them; without a network, use --digits-if-offline",
        )
    for mount in places.mounts():
        if directory.is_relative_to(mount):
            raise LocalError(
                f"--data-dir {given} lies below {mount}, where the job mounts a volume",
                "in local mode that path means the volume's directory",
                "--volume CLAIM=DIR puts a directory in the place of the volume",
            )
    _read_from(places.job, directory)


def digits_if_offline(places: Places, *, fresh: bool, say: Callable[[str], None], warn: Callable[[str], None]) -> None:
    """Where a job would download MNIST: see that it is there, else train on scikit-learn's digits, and say so."""
    _must_run_ddptrain(places.job, "--digits-if-offline")
    args = list(places.job["spec"].get("args") or ())
    if "--download" not in args:
        return
    asked = value_of(args, "--data-dir")
    # What lies in the volume of the claimTemplate will not survive --fresh.
    if asked and not fresh and _is_whole(places.on_host(asked)):
        return
    kept = places.folder.root / "datasets" / "mnist"
    say("looking for MNIST")
    problem = _fetch(kept)
    if problem is None:
        _read_from(places.job, kept)
        return
    args = without(without(args, "--data-dir", takes_value=True), "--download")
    places.job["spec"]["args"] = [*without(args, "--data", takes_value=True), "--data", "digits"]
    warn(f"NOT MNIST: it is not here and cannot be downloaded ({problem})")
    warn("training on scikit-learn's digits instead (1,797 images of 8×8); --data-dir DIR uses files you have")


def value_of(args: list[str], flag: str) -> str | None:
    """The value that holds: of the last mention."""
    found = None
    for position, word in enumerate(args):
        if word == flag and position + 1 < len(args):
            found = args[position + 1]
        elif word.startswith(f"{flag}="):
            found = word.partition("=")[2]
    return found


def without(args: list[str], flag: str, *, takes_value: bool = False) -> list[str]:
    """The words without a flag and, where it takes one, its value."""
    kept: list[str] = []
    skip = False
    for word in args:
        if skip or word == flag or (takes_value and word.startswith(f"{flag}=")):
            skip = not skip and word == flag and takes_value
            continue
        kept.append(word)
    return kept


def _read_from(job: Json, directory: Path) -> None:
    args = without(list(job["spec"].get("args") or ["train"]), "--download")
    job["spec"]["args"] = [*without(args, "--data-dir", takes_value=True), "--data-dir", str(directory)]


def _must_run_ddptrain(job: Json, option: str) -> None:
    if not runs_ddptrain(job):
        command = " ".join(map(str, job["spec"].get("command") or ["its template's command"]))
        raise LocalError(
            f"{option} is for jobs that run ddptrain; this one runs {command}",
            "other programs name their data in their own ways",
            "--set 'args[0]=…' changes an argument, --volume CLAIM=DIR gives a volume a directory",
        )


def _is_whole(directory: Path) -> bool:
    return directory.is_dir() and _ddptrain("verify", directory).returncode == 0


def _fetch(directory: Path) -> str | None:
    """None when the files are there; else why not, in a few words."""
    try:
        done = _ddptrain("fetch", directory, "--tries", "1")
    except subprocess.TimeoutExpired:
        return f"no answer for {FETCH_SECONDS:g} s"
    if done.returncode == 0:
        return None
    said = next((line for line in done.stderr.splitlines() if line.startswith("error:")), "ddptrain data fetch failed")
    reason = said.removeprefix("error:").split(";")[0].strip()
    # "no mirror delivered FILE: URL: <urlopen error [Errno -2] Name or service not known>": the last part says it all.
    return re.sub(r"^<urlopen error (\[Errno -?\d+\] )?|>$", "", reason.rsplit(": ", 1)[-1])


def _ddptrain(verb: str, directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    # A program of its own: the trainer is no part of the operator's package, and may not even be installed.
    command = [sys.executable, "-m", "ddptrain", "data", verb, "--data-dir", str(directory), *options]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=FETCH_SECONDS,
        check=False,
        preexec_fn=_end_with_parent if sys.platform == "linux" else None,
    )


def _end_with_parent() -> None:
    """A download does not outlive the run that waits for it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
