"""A copy of the repository, with a virtual environment that has the packages of the copy."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.mutants.mutant import ROOT, Mutant
from tests.processes import die_with_parent

_PYTEST = ("-m", "pytest", "-q", "-x", "-rfE", "--tb=line", "-p", "no:cacheprovider")
_PACKAGES = "ddpjob, ddpjob_operator, ddpplot, ddprun, ddptrain"
TIMED_OUT = -1


class Tree:
    """A copy of all files that git does not ignore, in ``folder``, an empty folder with a name that no other has."""

    def __init__(self, folder: Path) -> None:
        self.root, self._venv, self._log = folder / "tree", folder / "venv", folder / "output"
        self._folder = folder
        _copy(self.root)
        if (shared := ROOT.parent / "shared").is_dir():  # wheels and MNIST, as in the Makefile
            (folder / "shared").symlink_to(shared)
        self._make_environment()
        self._times = itertools.count(int(time.time()) + 1)  # a file of this second may be compiled already

    @contextmanager
    def changed(self, mutant: Mutant) -> Iterator[None]:
        """Apply the mutant to the copy until the context ends. Raises ``NotApplicableError``."""
        file = self.root / mutant.file
        before = file.read_text()
        self._write(file, mutant.apply_to(before))
        try:
            yield
        finally:
            self._write(file, before)

    def pytest(self, arguments: Sequence[str], timeout: float) -> tuple[int, str]:
        """Run pytest in the copy up to the first failure. Return its exit code, or ``TIMED_OUT``, and its output."""
        # In CI a test that lacks a program fails, and hypothesis draws the same examples in every run.
        path = f"{self._venv / 'bin'}:{os.environ['PATH']}"
        env = _without_paths() | {"PATH": path, "VIRTUAL_ENV": str(self._venv), "CI": "true"}
        with self._log.open("wb") as output:
            process = subprocess.Popen(
                [self._python, *_PYTEST, *arguments],
                cwd=self.root,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=die_with_parent,  # noqa: PLW1509 - one call into the kernel, no locks taken
            )
        code = TIMED_OUT
        try:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(timeout)
        finally:
            process.kill()
            process.wait()
            _kill_all_of(self._folder)
        return code, self._log.read_text(errors="replace")

    @property
    def _python(self) -> str:
        return str(self._venv / "bin" / "python")

    def _write(self, file: Path, text: str) -> None:
        """Write a file with a time of its own: Python recognizes outdated bytecode by time, in seconds, and size."""
        file.write_text(text)
        moment = next(self._times)
        os.utime(file, (moment, moment))

    def _make_environment(self) -> None:
        venv.create(self._venv, symlinks=True)
        packages = next((self._venv / "lib").glob("python*")) / "site-packages"
        folders = [str(self.root / name) for name in ("operator", "trainer_app")]
        others = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})"
        (packages / "copy.pth").write_text("\n".join([*folders, others]) + "\n")
        for script in Path(sys.executable).parent.iterdir():
            _copy_script(script, self._venv / "bin" / script.name, self._python)
        command = [
            self._python,
            "-c",
            f"import {_PACKAGES}; print(*(package.__file__ for package in ({_PACKAGES})))",
        ]
        done = subprocess.run(command, cwd=self.root, env=_without_paths(), text=True, capture_output=True, check=True)
        found = done.stdout.split()
        assert all(Path(file).is_relative_to(self.root) for file in found), found


def _copy(target: Path) -> None:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=True).stdout.split("\0")
    for name in sorted({name for name in names if name and (ROOT / name).is_file()}):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target / name)


def _without_paths() -> dict[str, str]:
    """Return the environment without the folders of another checkout."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def _copy_script(script: Path, target: Path, python: str) -> None:
    """Copy a program of this environment; those in Python run with the interpreter ``python``."""
    if target.exists() or not script.is_file():
        return
    content = script.read_bytes()
    first, _, rest = content.partition(b"\n")
    if not (first.startswith(b"#!") and b"python" in first):
        target.symlink_to(script)
        return
    target.write_bytes(f"#!{python}\n".encode() + rest)
    target.chmod(0o755)


def _kill_all_of(folder: Path) -> None:
    """Kill the processes that a run has left: those with the folder in their arguments or their environment."""
    while found := [pid for pid in _processes() if str(folder).encode() in _words_of(pid)]:
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]


def _words_of(pid: int) -> bytes:
    words = b""
    for name in ("cmdline", "environ"):
        with suppress(OSError):  # it has ended, or belongs to another user
            words += Path(f"/proc/{pid}/{name}").read_bytes()
    return words
