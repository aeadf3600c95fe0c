"""Which frame of a stack is the program's own: for errors, and for the stacks of a rank that hangs."""

from __future__ import annotations

import runpy
from pathlib import Path

import ddprun
from ddprun.code_frames import innermost_frame
from ddprun.diagnostics import training_frame

LAUNCHER = str(Path(ddprun.__file__).parent / "launcher" / "processes.py")
HEARTBEAT = str(Path(ddprun.__file__).parent / "heartbeat.py")
LIBRARY = str(Path(runpy.__file__))


def dump(thread: str, *frames: tuple[str, int]) -> str:
    """Return a thread as faulthandler prints it, with the innermost frame first."""
    lines = [f'  File "{file}", line {line} in f' for file, line in frames]
    return "\n".join([f"{thread} 0x00007f (most recent call first):", *lines])


def test_hang_in_a_script_is_located_in_the_script_and_not_in_packages(tmp_path: Path) -> None:
    script, helper = tmp_path / "train.py", tmp_path / "model" / "net.py"
    torch = tmp_path / ".venv" / "lib" / "site-packages" / "torch" / "distributed.py"
    stacks = "\n\n".join(
        (
            dump("Thread", (LIBRARY, 9), (str(tmp_path / "loader.py"), 5)),  # a thread of the script
            dump("Current thread", (str(torch), 1), (str(helper), 3), (str(script), 7), (LIBRARY, 2), (LAUNCHER, 200)),
        )
    )
    assert training_frame(stacks) == "net.py:3"


def test_frames_of_the_launchers_package_are_not_the_programs(tmp_path: Path) -> None:
    script = str(tmp_path / "train.py")
    assert innermost_frame([(LAUNCHER, 200), ("<frozen runpy>", 1), (script, 7), (HEARTBEAT, 90)]) == "train.py:7"
    console_script = (str(tmp_path / "bin" / "ddprun"), 3)
    assert innermost_frame([console_script, (LAUNCHER, 200), (script, 7), (LIBRARY, 3)]) == "train.py:7"
    assert innermost_frame([(LAUNCHER, 200), (HEARTBEAT, 90), (LIBRARY, 3)]) == "heartbeat.py:90"
    assert innermost_frame([(LIBRARY, 3)]) == "runpy.py:3"
    assert innermost_frame([("<string>", 1)]) is None


def test_all_of_a_package_is_the_program_also_if_it_is_installed(tmp_path: Path) -> None:
    package = tmp_path / "site-packages" / "trainer"
    inner, outer, other = package / "data" / "load.py", package / "main.py", tmp_path / "site-packages" / "numpy.py"
    inner.parent.mkdir(parents=True)
    for folder in (package, inner.parent):
        (folder / "__init__.py").touch()
    frames = [(LAUNCHER, 200), (str(outer), 1), (str(inner), 2), (str(other), 3)]
    assert innermost_frame(frames) == "load.py:2"
