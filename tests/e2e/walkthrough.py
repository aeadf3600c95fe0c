"""Run the commands of docs/start/walkthrough.md on a kind cluster, and write the page and its pictures.

A new user submits a script with a mistake, asks why it fails, corrects it, copies the checkpoint and makes the page.
"""

from __future__ import annotations

import argparse
import io
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
import termios
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

from tests.benchmarks.report import describe_machine
from tests.e2e.demo import set_up
from tests.e2e.installation import ROOT
from tests.e2e.kubectl import Kubectl
from tests.kind.cluster import DEFAULT_NAME

PAGE = ROOT / "docs" / "start" / "walkthrough.md"
PICTURES = {"why": ROOT / "docs" / "start" / "why.svg", "get": ROOT / "docs" / "start" / "card.svg"}
SCRIPT = ROOT / "manifests" / "examples" / "train.py"
NAME, NAMESPACE = "digits", "walkthrough"
COLUMNS = 100
RIGHT, WRONG = "nn.Linear(128, 10)", "nn.Linear(128, 9)"
_FONT = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
_REDRAWN = re.compile(r"(\n|\r\x1b\[2K(?:\x1b\[1A\x1b\[2K)*)")
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


@dataclass(frozen=True)
class Said:
    """One command, what it wrote on a terminal, its exit code and how long it took."""

    command: str
    text: str
    code: int
    seconds: float

    @property
    def shown(self) -> str:
        """The command and its output without colours, as in a document: of a table that was drawn again, the last."""
        lines = [""]
        for part in _REDRAWN.split(self.text):
            if part == "\n":
                lines.append("")
            elif part.startswith("\r"):  # the cursor goes up, and each line is erased
                del lines[len(lines) - part.count("\x1b[1A") :]
                lines[-1] = ""
            else:
                lines[-1] += part
        return "\n".join([f"$ {self.command}", *(_COLOUR.sub("", line).rstrip() for line in lines)]).rstrip()


class User:
    """Types commands into a terminal."""

    def __init__(self, folder: Path, kubeconfig: Path) -> None:
        self._folder = folder
        self._environment = os.environ | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "KUBECONFIG": str(kubeconfig),
            "DDPJOB_STATE_DIR": str(folder / "state"),
            "TERM": "xterm-256color",
        }
        self.said: list[Said] = []

    def __call__(self, command: str, *, code: int = 0) -> Said:
        """Run a command. Raises RuntimeError if it ends with another exit code."""
        print(f"$ {command}", file=sys.stderr)
        master, terminal = pty.openpty()
        termios.tcsetwinsize(terminal, (40, COLUMNS))
        begin = time.monotonic()
        process = subprocess.Popen(
            ["sh", "-c", command], cwd=self._folder, env=self._environment,
            stdin=subprocess.DEVNULL, stdout=terminal, stderr=terminal,
        )  # fmt: skip
        os.close(terminal)
        text = _all_of(master)
        text = text.replace("\r\n", "\n").replace(str(self._folder), "~")
        said = Said(command, text, process.wait(600), time.monotonic() - begin)
        if said.code != code:
            raise RuntimeError(f"exit code {said.code}:\n{said.shown}")
        self.said.append(said)
        return said


def _all_of(master: int) -> str:
    """Return what is written to a terminal until no process has it open."""
    written = bytearray()
    try:
        while data := os.read(master, 65536):
            written += data
    except OSError:  # Linux: the last process has closed it
        pass
    finally:
        os.close(master)
    return written.decode(errors="replace")


def walk(user: User, folder: Path) -> str:
    """Type the commands of the page, and return it."""
    script = folder / "train.py"
    script.write_text(SCRIPT.read_text(encoding="utf-8").replace(RIGHT, WRONG), encoding="utf-8")
    submit = f"ddpjob submit train.py --name {NAME} --image ddpjob/trainer:0.1.0 --nodes 2 --nproc 1"
    submit += " \\\n    --checkpoint 1Gi --max-restarts 1 --wait"
    failed = user(submit, code=100)
    why = user(f"ddpjob why {NAME}")
    corrected = [user(f"sed -i 's/{WRONG}/{RIGHT}/' train.py"), user(f"ddpjob delete {NAME}"), user(submit)]
    card = user(f"ddpjob get {NAME}")
    pulled = user(f"ddpjob pull {NAME} --to trained")
    page = user(f"ddpjob report {NAME}")
    draw(why, PICTURES["why"])
    draw(card, PICTURES["get"])
    sections = (
        ("The script has a mistake", failed),
        ("Why?", why),
        ("Correct it, and submit it again", *corrected),
        ("Look at the job", card),
        ("Copy the checkpoint", pulled),
        ("Make the page", page),
    )
    return "\n".join([_HEAD, *(_section(title, *said) for title, *said in sections), _foot(user)])


_HEAD = f"""# From a mistake to a page

What a new user types: [train.py](../../manifests/examples/train.py) with `{WRONG}` in place of
`{RIGHT}`, so that one of ten labels has no output. The kubeconfig is that of a kind cluster with the operator
and the trainer's image. The commands are here as they were typed, with their output and time;
`python -m tests.e2e.walkthrough` repeats them and writes this page.
"""


def _section(title: str, *said: Said) -> str:
    quoted = "\n".join(f"{one.shown}" for one in said)
    seconds = " + ".join(f"{one.seconds:.1f} s" for one in said)
    return f"## {title}\n\n```text\n{quoted}\n```\n\nTime: {seconds}.\n"


def _foot(user: User) -> str:
    whole = sum(said.seconds for said in user.said)
    return f"In all {whole:.0f} s, {len(user.said)} commands. Measured with {describe_machine()}.\n"


def draw(said: Said, picture: Path) -> None:
    """Write the output of a command as it looks on a terminal."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, legacy_windows=False)
    console.print(Text.from_ansi(f"$ {said.command}\n{said.text.rstrip()}"))
    svg = console.export_svg(title=said.command, theme=SVG_EXPORT_THEME, unique_id=picture.stem)
    picture.write_text(_FONT.sub("", svg), encoding="utf-8")  # no font is loaded from elsewhere


def main() -> int:
    """Do all of it."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.e2e.walkthrough", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--name", default=DEFAULT_NAME, help="kind cluster to use or create (default: %(default)s)")
    cluster = set_up(parser.parse_args().name)
    kubectl = Kubectl(cluster.kubeconfig)
    kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found", "--timeout=120s", timeout=150)
    kubectl("create", "namespace", NAMESPACE)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kubeconfig = folder / "kubeconfig"
        shutil.copy(cluster.kubeconfig, kubeconfig)
        Kubectl(kubeconfig)("config", "set-context", "--current", f"--namespace={NAMESPACE}")
        PAGE.write_text(walk(User(folder, kubeconfig), folder), encoding="utf-8")
    kubectl("delete", "namespace", NAMESPACE, "--wait=false")
    print(f"wrote {PAGE} and its pictures; look at them", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
